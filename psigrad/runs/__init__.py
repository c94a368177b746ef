"""The life of any run: its cycle of steps, callbacks, saving, stopping and resuming."""
