"""Who produces trajectories: the embedded sampler, transformers' generate, vLLM, and a scripted fake, behind one protocol."""
