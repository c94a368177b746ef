"""Who produces trajectories: the embedded sampler, transformers' generate, vLLM, and many of them on Ray, behind one protocol."""
