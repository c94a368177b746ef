"""What stands beside the core: other people's programs, and whole capabilities that few need.

Each is reached from psigrad by a name in `psigrad/extras.py`, and imported when it is asked for. The core reads, tests and runs
without this package.
"""
