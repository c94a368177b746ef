"""Losses and metrics of reward models that learn from comparisons or from labelled solution steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from psigrad.objective.batch import Loss
from psigrad.objective.preferences.preference_loss import correct


@dataclass(frozen=True)
class BradleyTerry:
    """The negative log-likelihood of comparisons.

    Formula: −(1 − ε)·log σ(r_w − r_l − m) − ε·log σ(r_l − r_w + m) + c·(r_w + r_l)²
             r_w, r_l: rewards of chosen and rejected; m: margin; c: `center_rewards_coefficient`; ε: `label_smoothing`

    Source: Bradley and Terry 1952; Ouyang et al. 2022, InstructGPT, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023,
    Llama 2, arXiv:2307.09288, eq. 2; centring: Eisenstein et al. 2023, arXiv:2312.09244.
    """

    center_rewards_coefficient: float = 0.0
    """c: pulls the mean reward of each pair to 0. Comparisons do not determine this mean. The name is TRL's."""
    label_smoothing: float = 0.0
    """ε: probability that a label is wrong."""

    def __post_init__(self) -> None:
        if not self.center_rewards_coefficient >= 0 or not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"BradleyTerry has center_rewards_coefficient={self.center_rewards_coefficient} and "
                f"label_smoothing={self.label_smoothing}; expected a coefficient >= 0 and 0 <= label_smoothing < 0.5."
            )

    def loss(self, chosen: Tensor, rejected: Tensor, margin: Tensor | None, total_pairs: int) -> Loss:
        """Return the part of an optimiser step's loss that these n pairs contribute. The step has `total_pairs` pairs.

        `chosen` and `rejected` are the rewards [n] of the pairs' completions. `margin` [n] is subtracted from their difference.
        """
        for name, tensor in (("chosen", chosen), ("rejected", rejected), ("margin", margin)):
            if tensor is not None and (tensor.dim() != 1 or tensor.shape != chosen.shape):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; expected [n], one number for each pair; chosen has "
                    f"{tuple(chosen.shape)}; if a head returns [n, 1], call squeeze(-1)."
                )
        total_pairs = max(total_pairs, 1)
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


def process_loss(logits: Tensor, labels: Tensor, total_steps: int) -> Loss:
    """Return a micro-batch's share of an optimiser step's loss. Each label rates one step of a solution.

    `labels` are in [0, 1] and have the shape of `logits`. `total_steps` is the number of labels in the whole optimiser step.

    Formula: Σ (−label·log σ(z) − (1 − label)·log(1 − σ(z))) / total_steps, with the logits z

    Source: Lightman et al. 2023, Let's verify step by step, arXiv:2305.20050.
    """
    if labels.shape != logits.shape:
        raise ValueError(f"logits has shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; expected the same.")
    value = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / max(total_steps, 1)
    hit = ((logits.detach() > 0) == (labels > 0.5)).to(logits.dtype)
    return Loss(value, {"loss": value.detach(), "accuracy": hit.sum() / max(total_steps, 1)})


@dataclass(frozen=True)
class Calibration:
    """A reward model's accuracy on pairs, in bins of its confidence max(p, 1 − p), where p = P(chosen beats rejected)."""

    lower: tuple[float, ...]
    """The least confidence of each bin."""
    confidence: tuple[float, ...]
    """The mean confidence of each bin."""
    accuracy: tuple[float, ...]
    """The share of pairs of each bin whose order is right; ties count half."""
    counts: tuple[int, ...]
    """The number of pairs of each bin; empty bins are dropped."""

    @property
    def error(self) -> float:
        """The expected calibration error: Σ_b n_b/N · |accuracy_b − confidence_b|, where bin b has n_b of the N pairs."""
        total = sum(self.counts)
        gaps = zip(self.counts, self.accuracy, self.confidence, strict=True)
        return sum(n * abs(a - c) for n, a, c in gaps) / total if total else 0.0


def calibration(lead: Tensor, bins: int = 10) -> Calibration:
    """Return the calibration of P(chosen beats rejected) = σ(lead) on held-out pairs, lead [n] = r_w − r_l.

    Source: Guo et al. 2017, arXiv:1706.04599. Errors: ValueError if an element of `lead` is NaN or `bins` is below 1.
    """
    lead = lead.detach().double()
    if bins < 1 or bool(lead.isnan().any()):
        raise ValueError(f"calibration got bins={bins} and {int(lead.isnan().sum())} NaN in lead; expected bins >= 1 and no NaN.")
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
