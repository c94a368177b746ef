"""Untrusted code and groups of processes: workers that can be killed, the sandbox, several processes as one."""
