"""The runs page: what is in the folder of runs, read and never written.

`files` reads growing files, `catalogue` finds runs, `history` is one run's figures, `signals` names them, `alerts` watches them,
`rollouts` finds completions by their place in a file, `tokens` and `why` put them in figures and words; `shelf` keeps all of it,
`curves` and `inspect` make it answers, `routes` gives them.
"""
