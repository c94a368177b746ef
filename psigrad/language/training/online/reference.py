"""The policy that the KL term holds to: its log-probs, exact divergences from it, and how it follows the one that learns."""

from __future__ import annotations

import torch
from torch import Tensor

from psigrad.language.models.backbone import reshard
from psigrad.language.models.language_model import Divergence, LanguageModel
from psigrad.language.training.online.collate import MicroBatch
from psigrad.language.training.online.forward import filled
from psigrad.objective import Batch, PolicyGradient
from psigrad.processes.parallel.world import ALONE, World


def reference_log_probs(model: LanguageModel, batch: Batch, budget: int, temperature: float, world: World = ALONE) -> Tensor:
    """[N, T] log-probs under the reference, behind its own prompts where it has them, in passes of `budget` tokens; a LoRA model
    is its own reference, without its adapter.
    """
    with model.without_adapter() if model.is_own_reference else torch.no_grad():
        of = lambda x: model.evaluate(x.teacher_inputs or x.inputs, temperature=temperature).logp  # noqa: E731
        return filled(batch, budget, of, world=world)


def divergence(algorithm: PolicyGradient, reference: LanguageModel | None, micro: MicroBatch) -> Divergence | None:
    """What the algorithm's KL term sums over the vocabulary; None where it does not."""
    if not algorithm.needs_exact_kl or reference is None or algorithm.kl is None:
        return None
    return Divergence(reference, algorithm.kl.estimator, algorithm.kl.mixture, micro.teacher_inputs)


@torch.no_grad()
def follow(reference: LanguageModel, model: LanguageModel, share: float) -> None:
    """Move the reference's weights towards the policy's.

    Formula: θ_ref ← share·θ + (1 − share)·θ_ref

    With share 1 it becomes a copy of the policy, with a small one after every step an exponential moving average of it. In half
    precision a change below the last digit is lost: keep such a reference in float32 (reference_dtype).

    Source: TRL sync_ref_model; Gorbatovski et al. 2024, TR-DPO, arXiv:2404.09656.
    """
    reshard(reference)
    learnt = model.trainable()
    for name, parameter in reference.network.named_parameters():
        if name in learnt:
            parameter.lerp_(learnt[name].detach().to(parameter.dtype), share)
