"""Processes that run a user's code and can be killed: rewards, environments and tools. The trainer runs none of that code."""
