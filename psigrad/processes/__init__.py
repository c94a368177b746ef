"""What is not ours to trust, and what is not one process: workers that can be killed, the sandbox, several processes as one."""
