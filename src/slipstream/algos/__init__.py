"""Algorithms, one file each; the file's name is its name on the command line."""
