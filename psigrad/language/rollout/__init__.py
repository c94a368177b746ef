"""Producers of trajectories: the embedded sampler, transformers' generate, vLLM, and several on Ray, behind one protocol."""
