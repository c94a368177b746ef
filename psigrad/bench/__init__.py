"""A model's training steps, timed: seconds by phase, tokens per second, peak memory, the time to the first step; beside TRL's.

Each side runs in a process of its own on the same weights, prompts, batch shape and precision. `beside` is the comparison,
`alone` psigrad's side by itself.
"""
