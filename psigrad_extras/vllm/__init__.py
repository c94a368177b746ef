"""vLLM as a sampler: its engine in a separate process, and the transfer of weights to it."""
