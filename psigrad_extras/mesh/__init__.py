"""Processes that compute together: sharded copies of a model, tensor parallelism, and context parallelism."""
