"""Environments, one file for each kind, all behind one batched interface over rows.

Row = one agent in one environment copy. See `rollout.Environment` and `rollout.Step`.
"""
