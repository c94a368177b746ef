"""Distributions over actions, as functions of a network's outputs: discrete (softmax) and continuous (diagonal normal).

Training uses torch. Acting in a few states at a time samples with numpy, which is faster there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """A distribution over actions, given a policy's outputs [M, P] and `rest`, parameters that are the same in every state."""

    @property
    def outputs(self) -> int:
        """The number of outputs, P."""

    @property
    def extra(self) -> int:
        """The length of `rest`."""

    def log_prob(self, out: Tensor, rest: Tensor, actions: Tensor) -> Tensor:
        """Return [M] the log-probability (or log-density) of each action."""

    def entropy(self, out: Tensor, rest: Tensor) -> Tensor:
        """Return [M] entropies in nats."""

    def slope(self, out: Tensor, rest: Tensor, actions: Tensor, d_logp: Tensor, d_entropy: float) -> tuple[Tensor, Tensor]:
        """Return a loss's gradients with respect to (`out`, `rest`), given those of the log-probs [M] and of each entropy."""

    def kl(self, out: Tensor, rest: Tensor, other: Tensor, other_rest: Tensor) -> Tensor:
        """Return [M] KL(this ‖ other) in nats."""

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Return random numbers [*shape, P], which `sample` needs for as many states as `shape` has."""

    def sample(self, out: Array, rest: Array, noise: Array) -> Array:
        """Return one action for each row of outputs [E, P], given `noise` [E, P]."""

    def mode(self, out: Array) -> Array:
        """Return the most likely action of each row."""


class Noise:
    """The noise for sampling successive actions in E states. It is drawn for many steps at once, which is faster."""

    _STEPS = 32

    def __init__(self, distribution: Distribution, rng: np.random.Generator, count: int) -> None:
        self._distribution, self._rng, self._count = distribution, rng, count
        self._block: Array = np.zeros(0)
        self._at = 0

    def step(self) -> Array:
        """Return the noise [E, P] of the next step."""
        if self._at == len(self._block):
            self._block, self._at = self._distribution.noise(self._rng, (self._STEPS, self._count)), 0
        drawn: Array = self._block[self._at]
        self._at += 1
        return drawn


@dataclass(frozen=True)
class Categorical:
    """A categorical distribution over `outputs` actions, whose parameters are logits. Actions are int64 [M]."""

    outputs: int
    extra: ClassVar[int] = 0

    def log_prob(self, out: Tensor, rest: Tensor, actions: Tensor) -> Tensor:
        """Return [M] log-probabilities of the actions [M]."""
        return _log_softmax(out).gather(1, actions[:, None]).squeeze(1)

    def entropy(self, out: Tensor, rest: Tensor) -> Tensor:
        """Return [M] entropies of the softmax, in nats."""
        logp = _log_softmax(out)
        return -(logp.exp() * logp).sum(-1)

    def slope(self, out: Tensor, rest: Tensor, actions: Tensor, d_logp: Tensor, d_entropy: float) -> tuple[Tensor, Tensor]:
        """Return (the gradient with respect to the logits [M, P] in closed form, an empty one for `rest`)."""
        # d log π(a) / d logits = e_a − π,  dH / d logits = −π·(log π + H)
        logp = _log_softmax(out)
        pi = logp.exp()
        if d_entropy:
            gradient = pi * (-d_entropy * (logp - (pi * logp).sum(-1, keepdim=True)) - d_logp[:, None])
        else:
            gradient = pi.mul_(d_logp[:, None]).neg_()
        return gradient.scatter_add_(1, actions[:, None], d_logp[:, None]), rest

    def kl(self, out: Tensor, rest: Tensor, other: Tensor, other_rest: Tensor) -> Tensor:
        """Return [M] KL(this ‖ other) in nats."""
        logp = _log_softmax(out)
        return (logp.exp() * (logp - _log_softmax(other))).sum(-1)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Return standard Gumbel noise [*shape, P]."""
        waits = rng.standard_exponential((*shape, self.outputs), dtype=np.float32)
        waits += np.finfo(np.float32).tiny  # a wait of exactly 0, whose logarithm is infinite, occurs once in ten million
        return -np.log(waits, out=waits)

    def sample(self, out: Array, rest: Array, noise: Array) -> Array:
        """Return one action for each row of logits [E, P], by the Gumbel-max trick: int64 [E]."""
        # The index of the maximum of logits + Gumbel noise has the distribution softmax(logits).
        drawn: Array = (out + noise).argmax(1)
        return drawn

    def mode(self, out: Array) -> Array:
        """Return the most probable action of each row of logits [E, P]: int64 [E]."""
        likeliest: Array = out.argmax(1)
        return likeliest


@dataclass(frozen=True)
class MultiCategorical:
    """K independent categorical distributions, of which the k-th has `sizes[k]` options.

    The parameters are the concatenated logits of all of them. Actions are int64 [M, K].
    """

    sizes: tuple[int, ...]
    extra: ClassVar[int] = 0

    @property
    def outputs(self) -> int:
        """The number of outputs, P: a logit for each option of each choice."""
        return sum(self.sizes)

    def log_prob(self, out: Tensor, rest: Tensor, actions: Tensor) -> Tensor:
        """Return [M] log-probabilities of the actions [M, K], summed over choices."""
        own = zip(self._choices(out), actions.unbind(1), strict=True)
        return torch.stack([choice.log_prob(o, rest, a) for (choice, o), a in own]).sum(0)

    def entropy(self, out: Tensor, rest: Tensor) -> Tensor:
        """Return [M] entropies in nats, summed over choices."""
        return torch.stack([choice.entropy(o, rest) for choice, o in self._choices(out)]).sum(0)

    def slope(self, out: Tensor, rest: Tensor, actions: Tensor, d_logp: Tensor, d_entropy: float) -> tuple[Tensor, Tensor]:
        """Return (the gradient with respect to all logits [M, P] in closed form, an empty one for `rest`)."""
        own = zip(self._choices(out), actions.unbind(1), strict=True)
        return torch.cat([choice.slope(o, rest, a, d_logp, d_entropy)[0] for (choice, o), a in own], 1), rest

    def kl(self, out: Tensor, rest: Tensor, other: Tensor, other_rest: Tensor) -> Tensor:
        """Return [M] KL(this ‖ other) in nats: the sum over the choices, which are independent."""
        both = zip(self._choices(out), self._choices(other), strict=True)
        return torch.stack([choice.kl(o, rest, b, other_rest) for (choice, o), (_, b) in both]).sum(0)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Return standard Gumbel noise [*shape, P]."""
        return Categorical(self.outputs).noise(rng, shape)

    def sample(self, out: Array, rest: Array, noise: Array) -> Array:
        """Return one action for each row of logits [E, P]: int64 [E, K]."""
        return self.mode(out + noise)

    def mode(self, out: Array) -> Array:
        """Return the most probable option of each choice: int64 [E, K]."""
        parts = np.split(out, np.cumsum(self.sizes)[:-1], axis=1)
        return np.stack([part.argmax(1) for part in parts], 1)

    def _choices(self, out: Tensor) -> list[tuple[Categorical, Tensor]]:
        """Return each of the K distributions with its logits."""
        return [(Categorical(n), o) for n, o in zip(self.sizes, out.split(self.sizes, 1), strict=True)]


@dataclass(frozen=True)
class Normal:
    """Independent normal distributions. The outputs are the means; `rest` has the log standard deviations, equal in all states.

    Actions are float32 [M, P]. `Environments` clips them to the bounds of the action space.
    """

    outputs: int

    @property
    def extra(self) -> int:
        """The length of `rest`, P: one log standard deviation for each component of an action."""
        return self.outputs

    def log_prob(self, out: Tensor, rest: Tensor, actions: Tensor) -> Tensor:
        """Return [M] log-densities of the actions [M, P], summed over components."""
        z = (actions - out) * torch.exp(-rest)
        return -(0.5 * z * z + rest + _HALF_LOG_2PI).sum(-1)

    def entropy(self, out: Tensor, rest: Tensor) -> Tensor:
        """Return [M] differential entropies in nats, which are the same in every state."""
        return (rest + 0.5 + _HALF_LOG_2PI).sum().expand(len(out))

    def slope(self, out: Tensor, rest: Tensor, actions: Tensor, d_logp: Tensor, d_entropy: float) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to (the means [M, P], the log standard deviations [P]), in closed form."""
        # d log p / dμ = z / σ,  d log p / d log σ = z² − 1,  dH / d log σ = 1
        inverse = torch.exp(-rest)
        z = (actions - out) * inverse
        weighted = z * d_logp[:, None]
        return weighted * inverse, (weighted * z).sum(0) - d_logp.sum() + d_entropy * len(out)

    def kl(self, out: Tensor, rest: Tensor, other: Tensor, other_rest: Tensor) -> Tensor:
        """Return [M] KL(this ‖ other) in nats, in closed form."""
        shift = ((out - other) * torch.exp(-other_rest)) ** 2
        return (other_rest - rest + 0.5 * (torch.exp(2 * (rest - other_rest)) + shift - 1)).sum(-1)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Return standard normal noise [*shape, P]."""
        return rng.standard_normal((*shape, self.outputs), dtype=np.float32)

    def sample(self, out: Array, rest: Array, noise: Array) -> Array:
        """Return the mean plus the standard deviation times the noise: [E, P]."""
        drawn: Array = out + np.exp(rest) * noise
        return drawn

    def mode(self, out: Array) -> Array:
        """Return the means [E, P]."""
        return out


def _log_softmax(out: Tensor) -> Tensor:
    """Return the log-softmax of [M, P] over its last axis.

    It works along the first axis of the transpose, where the states are contiguous. With few actions, that takes a third of the
    time.
    """
    return torch.log_softmax(out.T.contiguous(), 0).T if out.shape[1] <= 8 else torch.log_softmax(out, -1)
