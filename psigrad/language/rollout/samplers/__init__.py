"""Producers of completions: the embedded sampler, transformers' generate, vLLM, and several on Ray."""
