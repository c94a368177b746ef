"""The files of a run: its folder and checkpoints, the rows of its files, reading them, and warnings."""
