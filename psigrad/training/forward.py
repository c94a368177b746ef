"""Forward passes without gradient over a whole batch: log-probs of the policy and of the reference, values of the critic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from psigrad.models.fused.activation_cache import ActivationCache
from psigrad.models.language_model import LanguageModel
from psigrad.models.packing import Groups
from psigrad.models.scalar_model import ScalarModel
from psigrad.objective import Batch, Evaluation
from psigrad.training.collate import micro_batches


def log_probs(
    model: LanguageModel,
    batch: Batch,
    budget: int,
    temperature: float,
    *,
    cache: ActivationCache | None = None,
    wanted: Tensor | None = None,
) -> Tensor:
    """[N, T] log-probs under `model` of every row, or of those where `wanted` [N] is True, in passes of `budget` tokens."""
    return _filled(batch, budget, lambda x: model.evaluate(x, temperature=temperature, cache=cache).logp, wanted)


def reference_log_probs(model: LanguageModel, batch: Batch, budget: int, temperature: float) -> Tensor:
    """As `log_probs` under the reference; a LoRA model is its own, without its adapter."""
    with model.without_adapter() if model.adapter is not None else torch.no_grad():
        return log_probs(model, batch, budget, temperature)


def values(critic: LanguageModel | ScalarModel, batch: Batch, budget: int, cache: ActivationCache | None = None) -> Tensor:
    """[N, T] the critic's value of the state before each step; a language model's is that of its value head."""

    def of(inputs: Groups) -> Tensor:
        if isinstance(critic, ScalarModel):
            return critic.values(inputs)
        value = critic.evaluate(inputs, value=True, cache=cache).value
        assert value is not None
        return value

    return _filled(batch, budget, of)


@torch.no_grad()
def _filled(batch: Batch, budget: int, of: Callable[[Groups], Tensor], wanted: Tensor | None = None) -> Tensor:
    out = torch.zeros_like(batch.logp_old)
    for micro in micro_batches(batch, batch.present.cpu() if wanted is None else wanted, budget):
        found = of(micro.inputs)
        out[micro.rows.to(out.device), : found.shape[1]] = found.to(out.dtype)
    return out


def widened(evaluation: Evaluation, width: int) -> Evaluation:
    """The evaluation of a micro-batch [n, t] padded to the batch's [n, T]."""
    return Evaluation(**{name: wide(x, width) for name, x in vars(evaluation).items() if x is not None})


def wide(x: Tensor, width: int) -> Tensor:
    """[n, t] padded with zeros to [n, width]."""
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))
