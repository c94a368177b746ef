"""The names and files of TRL, verl, Stable-Baselines3 and rl-zoo3, as settings of psigrad."""
