"""Who produces completions: the embedded sampler, transformers' generate, vLLM, and many of them on Ray."""
