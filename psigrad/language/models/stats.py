"""Statistics of tokens under a model: the request for them, and their computation from logits over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# The least total probability of all tokens outside a reference's `Top`.
LEAST_REST = 1e-6


@dataclass(frozen=True)
class TokenStats:
    """Statistics per token [M]: `logp` is log π(a|s) of the token a after the text s. The others are None unless requested.

    `entropy` is that of π(·|s), and `kl` the divergence of π and the reference, in nats. `hit` is 1 if the token is the most
    probable one, else 0. `value` is the critic's V(s), and `mean_logp` the mean of log π over the vocabulary.
    """

    logp: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None
    hit: Tensor | None = None
    value: Tensor | None = None
    mean_logp: Tensor | None = None

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """All statistics in the order of the fields. A statistic that was not requested is None."""
        return (self.logp, self.entropy, self.kl, self.hit, self.value, self.mean_logp)

    def detach(self) -> TokenStats:
        """Return the statistics without gradient."""
        kept: list[Any] = [x if x is None else x.detach() for x in self.columns]
        return TokenStats(*kept)


def upcast(logits: Tensor) -> Tensor:
    """Cast logits in half precision to float32. Return logits in float32 and float64 unchanged."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@dataclass(frozen=True)
class Top:
    """The k most probable tokens of a reference at M positions: ids and log-probs [M, k]. Other probabilities are unknown."""

    ids: Tensor
    logp: Tensor

    def __getitem__(self, where: Any) -> Top:
        return Top(self.ids[where], self.logp[where])

    def compare(self, logits: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log π, log π_ref) [M, k + 1] of the reference's k most probable tokens and, last, of all others together.

        `logits` [M, V] are the policy's, and `normaliser` [M] is their log-sum-exp.
        """
        log_pi = logits.gather(-1, self.ids) - normaliser[:, None]
        rest, rest_ref = (torch.full_like(normaliser, -torch.inf) for _ in range(2))
        if self.ids.shape[-1] < logits.shape[-1]:
            rest = logits.scatter(-1, self.ids, -torch.inf).logsumexp(-1) - normaliser
            # Without the limit, log π_ref would be −∞ and the KL infinite if a server rounds the rest to 0.
            rest_ref = torch.log1p(-self.logp.exp().sum(-1).clamp(max=1 - LEAST_REST))
        return torch.cat([log_pi, rest[:, None]], -1), torch.cat([self.logp, rest_ref[:, None]], -1)


@dataclass(frozen=True)
class TokenStatsRequest:
    """The statistics to compute for each token, and the softmax temperature.

    `reference_head` maps a reference's hidden states to logits; if set, a divergence is computed. `divergence` is "exact" for
    KL(π‖ref), "exact_forward" for KL(ref‖π), or "exact_js" for Jensen–Shannon with the weight `mixture` for ref. For a `Top`,
    the result is a lower bound. `entropy="figure"` requests an entropy for logging, which needs no gradient.
    """

    temperature: float = 1.0
    entropy: bool | Literal["figure"] = False
    accuracy: bool = False
    reference_head: Callable[[Tensor], Tensor] | None = None
    divergence: str = "exact"
    mixture: float = 0.5
    mean_logp: bool = False

    @property
    def logp_only(self) -> bool:
        """True if only log-probs are requested."""
        return not (self.entropy or self.accuracy or self.mean_logp) and self.reference_head is None

    @property
    def is_closed_form(self) -> bool:
        """True if no requested statistic needs autograd: no mean of log π, no divergence, and no entropy with gradient."""
        slopes = self.entropy is True and torch.is_grad_enabled()
        return not (slopes or self.mean_logp) and self.reference_head is None

    def of(self, logits: Tensor, ids: Tensor, reference_hidden: Tensor | Top | None) -> tuple[Tensor, ...]:
        """Return (logp, entropy, kl, hit, mean_logp) [M] of `TokenStats` from logits [M, V] and ids [M].

        Statistics that were not requested are empty. `reference_hidden` are the reference's hidden states or `Top`.
        """
        raw, logits = logits, upcast(logits)
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        normaliser = logits.logsumexp(-1)
        logp = logits.gather(-1, ids[:, None])[:, 0] - normaliser
        entropy = kl = hit = mean_logp = raw.new_empty(0)
        if self.entropy or self.reference_head is not None:
            pi, log_pi, never = _exp(logits - normaliser[:, None])
            if self.entropy:
                entropy = -(pi * log_pi).sum(-1)
            if isinstance(reference_hidden, Top):
                own, log_ref = reference_hidden.compare(logits, normaliser)
                kl = self._divergence(*_exp(own), log_ref)
            elif self.reference_head is not None and reference_hidden is not None:
                theirs = upcast(self.reference_head(reference_hidden)) / self.temperature
                # ids beyond the smaller vocabulary are padding
                if (both := min(theirs.shape[-1], logits.shape[-1])) < logits.shape[-1]:
                    pi, log_pi, never = _exp(logits[:, :both].log_softmax(-1))
                kl = self._divergence(pi, log_pi, never, theirs[:, :both].log_softmax(-1))
        if self.accuracy:
            hit = (raw.detach().argmax(-1) == ids).to(logits.dtype)
        if self.mean_logp:
            mean_logp = logits.mean(-1) - normaliser
        return logp, entropy, kl, hit, mean_logp

    def _divergence(self, pi: Tensor, log_pi: Tensor, never: Tensor, log_ref: Tensor) -> Tensor:
        """Return the divergence [M] of π and the reference. `pi`, `log_pi` and `never` [M, V] are the results of `_exp`."""
        if self.divergence == "exact":
            return (pi * (log_pi - log_ref.masked_fill(never, 0.0))).sum(-1)
        ref = log_ref.exp()
        log_ref = log_ref.masked_fill(ref == 0, 0.0)  # 0 · log 0 = 0
        if self.divergence == "exact_forward":
            return (ref * (log_ref - log_pi.masked_fill(never & (ref > 0), -torch.inf))).sum(-1)
        mixed = self.mixture * ref + (1 - self.mixture) * pi
        log_mixed = mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()
        return (self.mixture * ref * (log_ref - log_mixed) + (1 - self.mixture) * pi * (log_pi - log_mixed)).sum(-1)


def _exp(log_pi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (π, log π, the mask where π is 0). Under the mask log π is 0, so that π · log π and its gradient are 0."""
    pi, never = log_pi.exp(), log_pi.isneginf()
    return pi, log_pi.masked_fill(never, 0.0), never
