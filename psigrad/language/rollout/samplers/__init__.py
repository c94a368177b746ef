"""Samplers in this process: the embedded sampler with its caches, and transformers' `generate`."""
