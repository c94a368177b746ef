"""Who produces trajectories: the embedded sampler, transformers' generate, and a scripted fake, behind one protocol."""
