"""Seeing what a run does: metrics, TensorBoard, one merged log, the terminal, memory and CPU."""
