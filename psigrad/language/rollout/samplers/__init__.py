"""Who produces completions: the embedded sampler, transformers' generate, vLLM, Ray, a scripted fake."""
