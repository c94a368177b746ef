"""The labelling system without its web pages: permissions, task assignment, answers and results.

`database.connect` opens the store. `projects`, `people`, `intake`, `assignments`, `results` and `export` act on it, each function
in one transaction. `agreement` and `ranking` are statistics on arrays.
"""
