"""The files of a run: its folder and checkpoints, writing and reading the rows of its files, and warnings about its figures."""
