"""A model's training steps, timed: seconds by phase, tokens per second, peak memory, the time to the first step.

`timing` is the command, `timed_run` the process that it times. `--beside trl` is benchmarks/beside_trl.py
of the source checkout.
"""
