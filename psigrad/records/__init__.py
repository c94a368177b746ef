"""The files of a run, such as metrics and checkpoints: how they are written and read. Also warnings and reports on them."""
