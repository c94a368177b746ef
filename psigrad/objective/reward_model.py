"""Losses and figures of reward models: comparisons, rankings and steps.

All losses are sums over what they are given, divided by totals of the whole optimiser step, so that any split into micro-batches
gives the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from psigrad.objective.policy_gradient import Loss
from psigrad.objective.preference import correct


@dataclass(frozen=True)
class BradleyTerry:
    """The likelihood of the comparisons, with optional margin, centring and label smoothing.

    Formula: −(1 − ε)·log σ(r_w − r_l − m) − ε·log σ(r_l − r_w + m) + c·(r_w + r_l)²

    Source: Bradley and Terry 1952; Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023,
    Llama 2, arXiv:2307.09288, eq. 2; centring: Eisenstein et al. 2023, arXiv:2312.09244.
    """

    center_rewards_coefficient: float = 0.0
    """c: pulls the mean reward of a pair to 0, which the comparisons leave open; TRL's name."""
    label_smoothing: float = 0.0
    """ε: probability that a label is wrong."""

    def __post_init__(self) -> None:
        if self.center_rewards_coefficient < 0 or not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"BradleyTerry has center_rewards_coefficient={self.center_rewards_coefficient} and "
                f"label_smoothing={self.label_smoothing}; expected at least 0, and from 0 to below 0.5."
            )

    def loss(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None, total_pairs: int) -> Loss:
        """The share of these pairs, rewards [n], in the loss of an optimiser step with `total_pairs`."""
        lead = chosen - rejected if margin is None else chosen - rejected - margin
        per_pair = -(1 - self.label_smoothing) * logsigmoid(lead) - self.label_smoothing * logsigmoid(-lead)
        if self.center_rewards_coefficient:
            per_pair = per_pair + self.center_rewards_coefficient * (chosen + rejected) ** 2
        value = per_pair.sum() / total_pairs
        chosen, rejected = chosen.detach(), rejected.detach()
        terms = {
            "loss": value.detach(),
            "accuracy": correct(chosen, rejected).sum() / total_pairs,
            "margin": (chosen - rejected).sum() / total_pairs,
            "mean_reward": (chosen + rejected).sum() / (2 * total_pairs),
        }
        return Loss(value, terms)


def plackett_luce(rewards: Tensor) -> Tensor:
    """Negative log-likelihood [n] of rankings, rewards [n, K] given from best to worst. K = 2 is Bradley–Terry.

    Formula: −Σ_k log(exp(r_k) / Σ_{j≥k} exp(r_j))

    Source: Plackett 1975; Luce 1959; Rafailov et al. 2023, arXiv:2305.18290, appendix A.3.
    """
    later = rewards.flip(1).logcumsumexp(1).flip(1)
    return (later - rewards).sum(1)


def process_loss(logits: Tensor, labels: Tensor, total_steps: int) -> Loss:
    """The share of these steps, logits [n] and labels [n] in [0, 1], in the loss of an optimiser step with `total_steps`.

    Formula: −label·log σ(z) − (1 − label)·log(1 − σ(z))

    Source: Lightman et al. 2023, Let's verify step by step, arXiv:2305.20050.
    """
    value = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / total_steps
    hit = ((logits.detach() > 0) == (labels > 0.5)).to(logits.dtype)
    return Loss(value, {"loss": value.detach(), "accuracy": hit.sum() / total_steps})


@dataclass(frozen=True)
class Calibration:
    """How sure the model is against how often it is right, in bins of its confidence max(p, 1 − p)."""

    lower: tuple[float, ...]
    """Least confidence of each bin."""
    confidence: tuple[float, ...]
    """Mean confidence of each bin."""
    accuracy: tuple[float, ...]
    """Share of pairs of each bin whose order is right, ties counted half."""
    counts: tuple[int, ...]
    """Pairs of each bin; empty bins are left out."""

    @property
    def error(self) -> float:
        """Expected calibration error: Σ_b n_b/N · |accuracy_b − confidence_b|."""
        total = sum(self.counts)
        gaps = zip(self.counts, self.accuracy, self.confidence, strict=True)
        return sum(n * abs(a - c) for n, a, c in gaps) / total if total else 0.0


def calibration(lead: Tensor, bins: int = 10) -> Calibration:
    """Calibration of P(chosen beats rejected) = σ(lead) on held-out pairs, lead [n] = r_w − r_l.

    Source: Guo et al. 2017, arXiv:1706.04599.
    """
    lead = lead.detach().double()
    sure = torch.sigmoid(lead.abs())
    right = correct(lead, torch.zeros_like(lead))
    which = ((sure - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    lower, confidence, accuracy, counts = [], [], [], []
    for b in range(bins):
        inside = which == b
        if bool(inside.any()):
            lower.append(0.5 + b / (2 * bins))
            confidence.append(float(sure[inside].mean()))
            accuracy.append(float(right[inside].mean()))
            counts.append(int(inside.sum()))
    return Calibration(tuple(lower), tuple(confidence), tuple(accuracy), tuple(counts))
