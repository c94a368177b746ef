"""Processes: workers for a user's code that can be killed, the sandbox, and training by several processes together."""
