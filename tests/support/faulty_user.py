"""A user's reward, environment and sampler that talk and fail, for workers on a cluster."""

from __future__ import annotations

from psigrad.language.rollout.samplers.embedded import EmbeddedSampler


def reward(completions, **columns):
    """Half of the groups raise."""
    print("the reward speaks")
    if len(completions[0]) % 2:
        raise ValueError("an odd answer")  # line of reward
    return [float(len(c)) for c in completions]


class Environment:
    """Raises in the second turn where the first was odd."""

    def reset(self, row):
        self.odd = None

    def step(self, completion):
        if self.odd:
            raise KeyError("the board")  # line of environment
        self.odd = bool(len(completion) % 2)
        print("the environment speaks")
        return " go on:", 1.0, False


class Sampler(EmbeddedSampler):
    """Breaks down."""

    def __init__(self, model, sampling):
        super().__init__(model, sampling.max_decode_batch)

    def steps(self, requests, params, cache=None):
        print("the sampler speaks")
        raise RuntimeError("no more tokens")  # line of sampler
