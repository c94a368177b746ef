"""Checks before a run: memory, correctness, speed, and the features of this machine."""
