"""Worker processes that run a user's code (rewards, environments, tools) and can be killed.

The trainer runs none of that code.
"""
