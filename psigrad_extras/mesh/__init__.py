"""Parallel training by several processes: sharded models, tensor parallelism, and context parallelism."""
