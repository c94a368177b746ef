"""Forward passes without gradient over a whole batch: log-probs and entropies of the policy, values of the critic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from psigrad.language.models.fused.activation_cache import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.training.online.collate import MicroBatch, micro_batches
from psigrad.objective import Batch, PolicyOutputs
from psigrad.processes.parallel.world import ALONE, World, shard


def log_probs(
    model: LanguageModel,
    batch: Batch,
    budget: int,
    temperature: float,
    *,
    cache: ActivationCache | None = None,
    wanted: Tensor | None = None,
    world: World = ALONE,
) -> Tensor:
    """[N, T] log-probs under `model` of every row, or of those where `wanted` [N] is True, in passes of `budget` tokens."""
    return filled(batch, budget, lambda x: model.evaluate(x.inputs, temperature=temperature, cache=cache).logp, wanted, world)


def entropies(model: LanguageModel, batch: Batch, budget: int, temperature: float, world: World = ALONE) -> Tensor:
    """[N, T] entropy of each step's distribution under `model`, in nats."""

    def of(micro: MicroBatch) -> Tensor:
        entropy = model.evaluate(micro.inputs, temperature=temperature, entropy=True).entropy
        assert entropy is not None
        return entropy

    return filled(batch, budget, of, world=world)


def values(
    critic: LanguageModel | ScalarModel, batch: Batch, budget: int, cache: ActivationCache | None = None, world: World = ALONE
) -> Tensor:
    """[N, T] the critic's value of the state before each step; a language model's is that of its value head."""

    def of(micro: MicroBatch) -> Tensor:
        if isinstance(critic, ScalarModel):
            return critic.values(micro.inputs)
        value = critic.evaluate(micro.inputs, value=True, cache=cache).value
        assert value is not None
        return value

    return filled(batch, budget, of, world=world)


@torch.no_grad()
def filled(
    batch: Batch,
    budget: int,
    of: Callable[[MicroBatch], Tensor],
    wanted: Tensor | None = None,
    world: World = ALONE,
) -> Tensor:
    """[N, T] of what `of` finds in each micro-batch of `budget` tokens, over all rows or the `wanted` ones; 0 elsewhere.

    Each process of the world does its share, and all of them get the whole.
    """
    out = torch.zeros_like(batch.logp_old)
    for micro, counts in shard(
        world, micro_batches(batch, batch.present.cpu() if wanted is None else wanted, budget, world.size)
    ):
        found = of(micro)
        if counts:
            out[micro.rows.to(out.device), : found.shape[1]] = found.to(out.dtype)
    return world.all_reduce(out)


def widened(evaluation: PolicyOutputs, width: int) -> PolicyOutputs:
    """The evaluation of a micro-batch [n, t] padded to the batch's [n, T]."""
    return PolicyOutputs(**{name: wide(x, width) for name, x in vars(evaluation).items() if x is not None})


def wide(x: Tensor, width: int) -> Tensor:
    """[n, t] padded with zeros to [n, width]."""
    return torch.nn.functional.pad(x, (0, width - x.shape[1]))
