"""Gradients of models that several processes compute together, and how transformers' families take to it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from lone_runs import OneOf
from rank_gradients import CASES, gradient
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from psigrad.errors import UserError
from psigrad.language.models import sharded, tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.packing import Groups
from psigrad.processes.parallel.world import ALONE, Division, World, shard
from psigrad_extras.mesh import mesh

GROUPS = Groups([(5, 6, 7, 8, 9), (11, 12)], [[(20, 21, 22, 23), (24,)], [(30, 31, 32, 33, 34, 35, 36)]])
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 280,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def family(kind: str) -> LanguageModel:
    """A small model of random weights."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL))
    with torch.no_grad():
        for p in made.parameters():  # at their first values biases and norms have nothing to be mistaken for
            p.add_(0.2 * torch.randn_like(p)) if p.ndim == 1 else p.mul_(3)
    return prepare(made, tiny.tokenizer(["hello world 123"] * 5, 280))


def _measured(model: LanguageModel, world: World) -> dict[str, torch.Tensor]:
    """Log-probs of the groups, and the gradient of a sum of them."""
    found = model.evaluate(GROUPS, entropy=True)
    weights = torch.linspace(0.5, 1.5, found.logp.numel()).view_as(found.logp)
    loss = (weights * (found.logp + 0.1 * found.entropy)).sum() + (found.logp.sum(1) ** 2).sum() / 100
    for _, weight in shard(world, [None]):  # who has no share computes along
        (weight * loss).backward()
    slopes = {name: p.grad for name, p in model.trainable().items() if p.grad is not None}
    return {"logp": found.logp.detach(), **{n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in slopes.items()}}


def families(world: World, out: str, names: str) -> None:
    """Write `out`.json: of each family how far log-probs and gradients are from those of one process, or why it is refused."""
    found = {}
    for name in names.split(","):
        one, model = _measured(family(name), ALONE), family(name)
        try:
            sharded.shard(model, world)
        except UserError as error:
            found[name] = str(error)
            continue
        several = _measured(model, world)
        assert one.keys() == several.keys()
        found[name] = max(float((one[n] - x).norm() / one[n].norm().clamp(min=1e-6)) for n, x in several.items())
    if world.rank == 0:
        Path(f"{out}.json").write_text(json.dumps(found))


def main(world: World, folder: str, out: str, names: str) -> None:
    """Write `out`-<case>.safetensors for the cases named; and with tensor parallelism see that a wrong plan is noticed."""
    for name in names.split(","):
        found = gradient(CASES[name], Path(folder), world)
        if world.rank == 0:
            save_file({key: x.contiguous() for key, x in found.items()}, f"{out}-{name.replace(' ', '_')}.safetensors")
    if world.division.tensor > 1:
        overlooked(world)


def overlooked(world: World) -> None:
    """Norms of single heads see the gradient of their own heads alone: a plan that leaves them out trains something else."""
    model = family("qwen3")
    model.network.tp_plan = {name: style for name, style in model.network.tp_plan.items() if "norm" not in name}
    try:
        mesh.divide_layers(model, mesh.make(world, "cpu")[1])
    except UserError as error:
        assert "With tp_size above 1, the output of" in str(error)
        return
    raise AssertionError("nobody noticed")


def alone(**division: int) -> OneOf:
    """A world that only says how it is divided."""
    return OneOf(4, lockstep=True, division=Division(**division))
