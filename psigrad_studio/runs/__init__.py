"""The runs page: reads the folder of runs and never writes to it.

`run_finder` finds runs; `files` reads growing files; `history` holds one run's figures and `rollout_index` where its completions
are; `run_cache` keeps both for all runs. `curves`, `tokens`, `advantage_notes` and `rollout_views` make answers of them, which
`run_routes` serves.
"""
