"""The reference of a KL term: a frozen model, the model without its adapter, or a moving average of the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from psigrad.language.models.backbone import reshard
from psigrad.language.models.language_model import Divergence, LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.training.online.batching import MicroBatch, compute_by_row, inputs_of, reference_inputs_of
from psigrad.language.training.online.online_run import Annotator, OnlineRun
from psigrad.objective import Batch, PolicyGradient
from psigrad.processes.parallel.world import ALONE, World

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache


class Reference(Annotator):
    """The annotator of a reference model. It adds `logp_ref`, or gives a `Divergence` if the KL sums over the vocabulary."""

    gives_reference = True

    def __init__(self, model: LanguageModel) -> None:
        self.reference = self.model = model

    def columns(self, run: OnlineRun, batch: Batch, step: int, cache: ActivationCache | None) -> Batch:
        """Add `logp_ref` for a policy gradient whose KL needs it. A KL summed over the vocabulary uses `divergence` instead."""
        if not run.algorithm.needs_reference or not isinstance(run.algorithm, PolicyGradient) or run.algorithm.needs_exact_kl:
            return batch
        logp = reference_log_probs(self.model, batch, run.config.micro_batch_tokens, run.params.temperature, run.world)
        return replace(batch, logp_ref=logp)

    def divergence(self, run: OnlineRun, batch: Batch, micro: MicroBatch) -> Divergence | None:
        """Return the `Divergence` from the reference; see `Annotator`. None unless the KL sums over the vocabulary."""
        return exact_kl(run.algorithm, self.model, reference_inputs_of(batch, micro))

    def after_step(self, run: OnlineRun, number: int) -> None:
        """If the `number` of steps so far is a multiple of `ref_model_sync_steps`, move the reference towards the policy."""
        if run.config.ref_model_sync_steps and number % run.config.ref_model_sync_steps == 0:
            move_towards(self.model, run.model, run.config.ref_model_mixup_alpha)


def exact_kl(algorithm: object, model: LanguageModel, inputs: Groups | None = None) -> Divergence | None:
    """Return a `Divergence` from the reference `model`; None unless the algorithm's KL sums over the vocabulary.

    `inputs` are the reference's inputs. None: they are the same as the policy's.
    """
    if not isinstance(algorithm, PolicyGradient) or not algorithm.needs_exact_kl or algorithm.kl is None:
        return None
    return Divergence(model, algorithm.kl.estimator, algorithm.kl.mixture, inputs)


def reference_log_probs(model: LanguageModel, batch: Batch, budget: int, temperature: float, world: World = ALONE) -> Tensor:
    """Return the reference's log-probs [N, T]. If `model.is_own_reference`, disable the LoRA adapter during these passes."""
    with model.without_adapter() if model.is_own_reference else torch.no_grad():
        of = lambda x: model.evaluate(x, temperature=temperature).logp  # noqa: E731
        return compute_by_row(batch, budget, of, world=world, inputs=inputs_for_reference)


def inputs_for_reference(batch: Batch, micro: MicroBatch) -> Groups:
    """Return the reference's inputs for `micro`, without the policy's choices of experts: the reference makes its own."""
    return reference_inputs_of(batch, micro) or replace(inputs_of(batch, micro), experts=None)


@torch.no_grad()
def move_towards(reference: LanguageModel, model: LanguageModel, share: float) -> None:
    """Move the reference's weights towards the policy's.

    Formula: θ_ref ← share·θ + (1 − share)·θ_ref

    Half precision rounds small changes away, so set reference_dtype to float32.

    Source: TRL sync_ref_model; Gorbatovski et al. 2024, TR-DPO, arXiv:2404.09656.
    """
    reshard(reference)
    learnt = model.trainable()
    for name, parameter in reference.network.named_parameters():
        if name in learnt:
            parameter.lerp_(learnt[name].detach().to(parameter.dtype), share)
