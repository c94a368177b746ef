"""The course of any run: its training loop, callbacks, checkpoints, stopping and resuming."""
