"""vLLM as a sampler: its engine in a process of its own, and the way that weights take into it."""
