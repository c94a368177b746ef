"""Values for a method with a critic if the run trained none: a regression on the policy's hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from psigrad.language.models.backbone import with_whole_weights
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups, lay_out
from psigrad.language.training.online.batching import fill
from psigrad.objective import Batch, PolicyGradient
from psigrad.objective.batch import discounted_sum, explained_variance
from psigrad.objective.parts.advantage import whitened

_PARTS, _MOST_DIRECTIONS = 8, 256

ASSUMED = (
    "This run trained no critic. For {}, values are fitted to this step's returns from the policy's hidden states, "
    "each prompt from the other prompts; the gradient does not include a critic's loss."
)


@dataclass(frozen=True)
class FittedValues:
    """A psi that reads values, with V fitted to the given batch.

    Formula: V(s) = c + (h(s) − m)·w, w = (Σ_i 1/T_i Σ_t x_t·x_tᵀ + E·I)⁻¹ Σ_i 1/T_i Σ_t x_t·(R_t − c), x = h − m

    with h the last hidden state before a token [E], scaled to a mean variance of 1, R its return-to-go, and sums over completions
    i of other prompts only. V is independent of a prompt's own rewards, so subtracting it does not change the expected gradient.
    The ridge E·I assumes that all directions explain equally little. Of more than 256 directions, 256 random ones are used.
    """

    psi: Callable[[Batch], Tensor]
    model: LanguageModel
    budget: int
    """The number of tokens in a forward pass."""
    figures: dict[str, float] = field(default_factory=dict, init=False)
    """`explained_variance`: the share of the returns' variance that the last values explain."""

    def __call__(self, batch: Batch) -> Tensor:
        """Return [N, T] the advantages of `psi`."""
        mask, inner = batch.mask.cpu(), self.psi.psi if isinstance(self.psi, whitened) else self.psi
        returns = discounted_sum(batch.reward, batch.mask, getattr(inner, "gamma", 1.0))
        of_row = batch.group if len(batch.group.unique()) > 1 else torch.arange(len(mask), device=batch.group.device)
        length = batch.mask.sum(1, keepdim=True).clamp(min=1).float()
        weight, part = (x.expand(mask.shape).cpu()[mask] for x in (1 / length, (of_row % _PARTS)[:, None]))
        found = fit_on_others(self._hidden(batch)[mask], returns.cpu()[mask], weight, part)
        value = torch.zeros_like(batch.reward).masked_scatter(batch.mask, found.to(batch.reward))
        self.figures["explained_variance"] = explained_variance(value, returns, batch.mask)
        return self.psi(replace(batch, value=value))

    @torch.no_grad()
    def _hidden(self, batch: Batch) -> Tensor:
        """Return [N, T, E] the hidden state before each token."""
        read: list[Tensor] = []

        def of(inputs: Groups) -> Tensor:
            """Add the hidden states to `read`, and return the index of each token's state."""
            self.model.switch(False)
            forward = lay_out(inputs, self.model.device, not self.model.why_padded)
            hidden = with_whole_weights(self.model, lambda: self.model.target_hidden(forward)).float()
            first = sum(map(len, read))
            read.append(_directions(hidden).cpu())
            return forward.targets.unpack(torch.arange(first, first + len(hidden), device=hidden.device))

        places = fill(replace(batch, logp_old=batch.logp_old.double()), self.budget, of)
        return torch.cat(read)[places.long().cpu()]


def fitted(algorithm: PolicyGradient, model: LanguageModel, budget: int) -> PolicyGradient:
    """Return the method without its critic. Its psi reads fitted values."""
    return replace(algorithm, psi=FittedValues(algorithm.psi, model, budget), critic=None)  # type: ignore[arg-type]


def fit_on_others(features: Tensor, returns: Tensor, weight: Tensor, part: Tensor) -> Tensor:
    """Return [M] the values of features [M, E]. Each `part` [M] uses the regression on all other parts; 0 if there is none."""
    values = torch.zeros_like(returns)
    for now in part.unique():
        own = part == now
        x, y, w = features[~own], returns[~own], weight[~own]
        if not len(y):
            continue
        mean, centre = (w[:, None] * x).sum(0) / w.sum(), (w * y).sum() / w.sum()
        scale = ((w[:, None] * (x - mean) ** 2).sum(0) / w.sum()).mean().sqrt().clamp(min=1e-12)
        x = (x - mean) / scale
        gram = (x.T @ (w[:, None] * x)).double() + x.shape[1] * torch.eye(x.shape[1], dtype=torch.float64)
        slope = torch.linalg.solve(gram, (x.T @ (w * (y - centre))).double()).to(x)
        # Values are limited to the range of the observed returns.
        values[own] = (centre + (features[own] - mean) / scale @ slope).clamp(min=y.min(), max=y.max())
    return values


def _directions(hidden: Tensor) -> Tensor:
    if hidden.shape[1] <= _MOST_DIRECTIONS:
        return hidden
    drawn = torch.randn(hidden.shape[1], _MOST_DIRECTIONS, generator=torch.Generator().manual_seed(0))
    return hidden @ drawn.to(hidden)
