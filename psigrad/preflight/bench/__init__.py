"""A model's training steps, timed: seconds by phase, tokens per second, peak memory, the time to the first step; beside TRL's.

Both run in processes of their own, on the same weights, prompts, batch shape and precision. `timing` is the command;
`side_by_side.alone` times psigrad by itself, `side_by_side.beside` beside TRL.
"""
