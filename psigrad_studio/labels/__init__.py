"""Labels without the web: who may label, what is shown to whom, what was answered, and what follows from it.

`database.connect` opens the store; `projects`, `people`, `intake`, `assignments`, `results` and `export` act on it, each function
in one transaction; `agreement` and `ranking` are statistics on arrays.
"""
