"""The effect of a method on given completions: its gradient, and figures for every token.

If weights must change for that, `remember` restores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from psigrad.language.rollout.types import Trajectory
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.online.figures import TokenFigures
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective import PolicyGradient, PolicyOutputs, Prepared
from psigrad.objective.parts.ratio import exp_ratio
from psigrad.objective.parts.surrogate import clip_fractions
from psigrad.optim import Optimizer
from psigrad.optim.optimizer import Read

Gradient = dict[str, Tensor]


class WatchedOptimizer:
    """An optimiser that also records the sum of its gradients. Unless `applies` is set, it never changes a weight."""

    def __init__(self, inner: Optimizer, applies: bool) -> None:
        self.inner, self.applies, self.nonfinite = inner, applies, inner.nonfinite
        self.gradient: Gradient = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def norm(self, *read: Read) -> float:
        """Return the gradient's norm, and add the gradient to the sum."""
        norm = self.inner.norm(*read)
        for name, own in self.inner.weights.items():
            parts, weight = [] if own.gradient is None else [(slice(None), own.gradient)], own.parameter
            for rows, part in (*parts, *(self.inner.sums.blocks(weight) if weight in self.inner.sums.uses else ())):
                self.gradient.setdefault(name, torch.zeros_like(weight, dtype=torch.float32))[rows] += part
        return norm

    def apply(self, norm: float, lr: float) -> None:
        """Take the optimiser step if `applies` is set, and otherwise discard the gradient."""
        if self.applies:
            self.inner.apply(norm, lr)
        else:
            self.inner.clear()


class WatchedTokens(TokenFigures):
    """Token figures that include the weight of each token in the gradient, summed over all passes.

    Formula: Σ weight · ∇log π(token), the direction of the update. A token with a weight above 0 becomes more likely.
    """

    def __init__(self, rows: int, prepared: Prepared) -> None:
        super().__init__(len(prepared.batch.mask), prepared)
        self.weight = torch.zeros_like(self.logp)

    def store(self, rows: Tensor, evaluation: PolicyOutputs, sums: LossSums) -> None:
        """Record log-probs and entropies (see `TokenFigures`), and register a hook that adds the weights in the backward pass."""
        super().store(rows, evaluation, sums)
        if evaluation.logp.requires_grad:
            evaluation.logp.register_hook(partial(self._weigh, rows))

    def _weigh(self, rows: Tensor, slope: Tensor) -> None:
        self.weight[rows] -= slope.detach().float().cpu()


@dataclass
class MethodWatch:
    """The record of a method's effect on completions, filled while it learns. Losses on pairs have no figures per token."""

    algorithm: Any
    optimizer: WatchedOptimizer
    single_pass: bool
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tokens: WatchedTokens | None = None

    def watch_tokens(self, rows: int, prepared: Prepared) -> WatchedTokens:
        """Return the object that records figures per token, which is also stored here. A run calls this as `token_figures`."""
        self.tokens = WatchedTokens(rows, prepared)
        return self.tokens

    def columns(self) -> dict[str, Tensor]:
        """Return name -> [N, T], from each token's last pass: advantage, ratio, clipped (1 or 0), weight. NaN means no pass."""
        if self.tokens is None or not isinstance(self.algorithm, PolicyGradient):
            return {}
        batch, advantage = self.tokens.prepared.batch, self.tokens.prepared.advantage
        mask, logp = batch.mask, self.tokens.logp
        moved = self.algorithm.ratio(logp, logp if self.single_pass else batch.logp_old, mask)
        hits = list(clip_fractions(self.algorithm.surrogate, moved, advantage).values())
        clipped = torch.stack(hits).any(0) if hits else torch.zeros_like(mask)
        seen = mask & ~logp.isnan()
        made = {"advantage": advantage, "ratio": exp_ratio(moved), "clipped": clipped.float(), "weight": self.tokens.weight}
        return {name: x.float().masked_fill(~(mask if name == "advantage" else seen), math.nan) for name, x in made.items()}

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories to which the rows of `columns` belong."""
        return [] if self.tokens is None else list(self.tokens.prepared.batch.inputs)

    def figures(self, own: MethodWatch) -> dict[str, Any]:
        """Return this method's column in the table of metrics. `own` is the record of the run's own method, for comparison."""
        norm = self.metrics.get("grad_norm", 0.0)
        most = self.optimizer.optim.max_grad_norm
        found: dict[str, Any] = {
            "loss": self.metrics.get("loss"),
            "gradient norm": norm,
            "gradient norm after clipping": min(norm, most) if most else norm,
            "cosine to the run's gradient": cosine(self.optimizer.gradient, own.optimizer.gradient),
            "optimiser steps": self.metrics.get("updates", 0),
        }
        told = {"pairs": "pairs", "explained variance of its values": "explained_variance"}
        found |= {said: self.metrics[name] for said, name in told.items() if name in self.metrics}
        if self.tokens is None:
            return found
        columns, prepared = self.columns(), self.tokens.prepared
        for name in ("advantage", "ratio"):
            values = columns[name][~columns[name].isnan()]
            for kind, of in (("least", torch.min), ("greatest", torch.max)):
                found[f"{kind} {name}"] = float(of(values)) if len(values) else math.nan
        seen = ~columns["weight"].isnan()
        return found | {
            "completions": len(prepared.keep),
            "completions left out by a filter": int((~prepared.keep).sum()),
            "completions with a gradient": int(prepared.needs_gradient.sum()),
            "tokens trained on": int(seen.sum()),
            "clipped tokens": int(columns["clipped"][seen].sum()),
            "tokens pushed the other way": self._opposed(own),
        }

    def _opposed(self, own: MethodWatch) -> int:
        if own.tokens is None or self.tokens is None:
            return 0
        mine, theirs = (
            {t.completion.seed: row for t, row in zip(seen.prepared.batch.inputs, seen.weight, strict=True)}
            for seen in (self.tokens, own.tokens)
        )
        width = min(self.tokens.weight.shape[1], own.tokens.weight.shape[1])
        return sum(int((mine[seed][:width] * theirs[seed][:width] < 0).sum()) for seed in mine.keys() & theirs.keys())


def cosine(a: Gradient, b: Gradient) -> float:
    """Return ⟨a, b⟩ / (‖a‖·‖b‖) in double precision, or NaN if one is 0."""

    def product(x: Gradient, y: Gradient) -> float:
        return math.fsum(float((x[name].double() * y[name].double()).sum()) for name in x.keys() & y.keys())

    norms = math.sqrt(product(a, a) * product(b, b))
    return product(a, b) / norms if norms else math.nan


def remember(run: OnlineRun) -> Callable[[], None]:
    """Return a function that restores the trainable weights and the optimisers to their current state."""
    optimizers = [run.optimizer, *([run.critic.optimizer] if run.critic is not None else [])]
    held = [
        ({n: w.local.detach().clone() for n, w in one.weights.items()}, {n: x.clone() for n, x in one.state_dict().items()})
        for one in optimizers
    ]

    @torch.no_grad()
    def restore() -> None:
        for one, (weights, tensors) in zip(optimizers, held, strict=True):
            for name, weight in weights.items():
                one.weights[name].local.copy_(weight)
            one.load_state_dict(tensors)

    return restore
