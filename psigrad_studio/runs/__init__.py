"""The runs page. It reads the folder of runs and never writes to it.

`run_finder` finds runs. `files` reads growing files. `history` stores one run's metrics, and `rollout_index` the offsets of its
completions. `run_cache` has both for all runs. `curves`, `tokens`, `advantage_notes` and `rollout_views` convert them to
responses, which `run_routes` serves.
"""
