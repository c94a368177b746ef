"""What a run leaves on the disk: its folder and checkpoints, the rows of its files, how they are read, and what they warn of."""
