"""Samplers that run in the trainer's process: the embedded sampler with its caches, and transformers' `generate`."""
