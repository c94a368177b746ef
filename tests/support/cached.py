"""Sampling into an activation cache."""

from __future__ import annotations


def sample(sampler, requests, params, cache):
    """The completions of each request, what sampling computed going to `cache`."""
    done = dict(complete for step in sampler.steps(requests, params, cache) for complete in step)
    return [done[place] for place in range(len(requests))]
