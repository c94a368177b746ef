"""Processes that compute together: copies of a model in shards, tensor parallelism, and rows that several divide."""
