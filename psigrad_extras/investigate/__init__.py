"""The analysis of runs and rewards: comparing methods, searching settings, replaying a step, attacking rewards."""
