"""Distributions over actions, as functions of a network's outputs: discrete (softmax) and continuous (diagonal normal).

Each takes parameters and actions as tensors for training, and draws with numpy for acting on a few states at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """How outputs [M, P] of a policy, with numbers that no state changes (`rest`), say what is done."""

    @property
    def outputs(self) -> int:
        """P."""
        ...

    @property
    def extra(self) -> int:
        """Length of `rest`."""
        ...

    def log_prob(self, out: Tensor, rest: Tensor, actions: Tensor) -> Tensor:
        """[M] log-probability (or density) of each action."""
        ...

    def entropy(self, out: Tensor, rest: Tensor) -> Tensor:
        """[M] in nats."""
        ...

    def slope(self, out: Tensor, rest: Tensor, actions: Tensor, d_logp: Tensor, d_entropy: float) -> tuple[Tensor, Tensor]:
        """The gradients of `out` and `rest`, given those of each log-probability [M] and of each entropy."""
        ...

    def kl(self, out: Tensor, rest: Tensor, other: Tensor, other_rest: Tensor) -> Tensor:
        """[M] KL(this ‖ other) in nats."""
        ...

    def sample(self, out: Array, rest: Array, rng: np.random.Generator) -> Array:
        """One action for each row of outputs."""
        ...

    def mode(self, out: Array) -> Array:
        """The likeliest action of each row."""
        ...


@dataclass(frozen=True)
class Categorical:
    """One of `n` actions; the outputs are logits. Actions are int64 [M]."""

    n: int

    @property
    def outputs(self) -> int:
        return self.n

    @property
    def extra(self) -> int:
        return 0

    def log_prob(self, out: Tensor, rest: Tensor, actions: Tensor) -> Tensor:
        return torch.log_softmax(out, -1).gather(1, actions[:, None]).squeeze(1)

    def entropy(self, out: Tensor, rest: Tensor) -> Tensor:
        logp = torch.log_softmax(out, -1)
        return -(logp.exp() * logp).sum(-1)

    def slope(self, out: Tensor, rest: Tensor, actions: Tensor, d_logp: Tensor, d_entropy: float) -> tuple[Tensor, Tensor]:
        # d log π(a) / d logits = e_a − π,  dH / d logits = −π·(log π + H)
        if d_entropy:
            logp = torch.log_softmax(out, -1)
            pi = logp.exp()
            gradient = pi * (-d_entropy * (logp - (pi * logp).sum(-1, keepdim=True)) - d_logp[:, None])
        else:
            gradient = torch.softmax(out, -1).mul_(d_logp[:, None]).neg_()
        return gradient.scatter_add_(1, actions[:, None], d_logp[:, None]), rest

    def kl(self, out: Tensor, rest: Tensor, other: Tensor, other_rest: Tensor) -> Tensor:
        logp = torch.log_softmax(out, -1)
        return (logp.exp() * (logp - torch.log_softmax(other, -1))).sum(-1)

    def sample(self, out: Array, rest: Array, rng: np.random.Generator) -> Array:
        weights = np.exp(out - out.max(1, keepdims=True)).cumsum(1)
        # the smallest action whose cumulated weight passes a uniform share of the whole
        return (rng.random((len(out), 1), dtype=np.float32) * weights[:, -1:] >= weights[:, :-1]).sum(1)

    def mode(self, out: Array) -> Array:
        return out.argmax(1)


@dataclass(frozen=True)
class Normal:
    """`n` independent normals; the outputs are means, `rest` the logarithms of the standard deviations, the same in every state.
    Actions are float32 [M, n]; who steps the environment clips them to its bounds.
    """

    n: int

    @property
    def outputs(self) -> int:
        return self.n

    @property
    def extra(self) -> int:
        return self.n

    def log_prob(self, out: Tensor, rest: Tensor, actions: Tensor) -> Tensor:
        z = (actions - out) * torch.exp(-rest)
        return -(0.5 * z * z + rest + _HALF_LOG_2PI).sum(-1)

    def entropy(self, out: Tensor, rest: Tensor) -> Tensor:
        return (rest + 0.5 + _HALF_LOG_2PI).sum().expand(len(out))

    def slope(self, out: Tensor, rest: Tensor, actions: Tensor, d_logp: Tensor, d_entropy: float) -> tuple[Tensor, Tensor]:
        # d log p / dμ = z / σ,  d log p / d log σ = z² − 1,  dH / d log σ = 1
        inverse = torch.exp(-rest)
        z = (actions - out) * inverse
        weighted = z * d_logp[:, None]
        return weighted * inverse, (weighted * z).sum(0) - d_logp.sum() + d_entropy * len(out)

    def kl(self, out: Tensor, rest: Tensor, other: Tensor, other_rest: Tensor) -> Tensor:
        shift = ((out - other) * torch.exp(-other_rest)) ** 2
        return (other_rest - rest + 0.5 * (torch.exp(2 * (rest - other_rest)) + shift - 1)).sum(-1)

    def sample(self, out: Array, rest: Array, rng: np.random.Generator) -> Array:
        return out + np.exp(rest) * rng.standard_normal(out.shape, dtype=np.float32)

    def mode(self, out: Array) -> Array:
        return out
