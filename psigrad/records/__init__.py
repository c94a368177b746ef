"""Writing and reading the files of a run, such as metrics and checkpoints; warnings and reports about the run."""
