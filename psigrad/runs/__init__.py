"""What runs of every kind share: the training loop, callbacks, the log, stopping, resuming and the result."""
