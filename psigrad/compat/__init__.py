"""Conversion of the names and files of TRL, verl, Stable-Baselines3 and rl-zoo3 into settings of psigrad."""
