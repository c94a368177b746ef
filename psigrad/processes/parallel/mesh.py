"""Processes as a mesh of (replicate, shard, tensor): who holds which part of a model in shards, and who computes together.

Those that divide the tokens of a row (`Division.context`) hold a part each as well: they lie in the dimension "shard".
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from psigrad.errors import UserError
from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.ulysses import Context
from psigrad.processes.parallel.shards import in_shards
from psigrad.processes.parallel.world import World


@functools.lru_cache(1)
def make(world: World, kind: str) -> tuple[Any, Any, Context | None]:
    """(the mesh that weights are in shards over, that of tensor parallelism or None, who divides rows or None)."""
    from torch.distributed.device_mesh import init_device_mesh

    replicate, tensor, context = world.division
    sizes = {"replicate": replicate, "shard": world.size // (replicate * tensor), "tensor": tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    whole = init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))
    over = whole["replicate", "shard"] if replicate > 1 else whole["shard"]
    if context == 1:
        return over, whole["tensor"] if tensor > 1 else None, None
    teams = range(0, world.size, context * tensor)
    groups = [[team + place * tensor + t for place in range(context)] for team in teams for t in range(tensor)]
    own, _ = dist.new_subgroups_by_enumeration(groups)
    return over, whole["tensor"] if tensor > 1 else None, Context(own, world.rank % world.division.team // tensor, context)


def check(model: Pretrained, world: World) -> None:
    """Raise `UserError` where a model cannot be computed by several processes together."""
    _, tensor, context = world.division
    config: Any = model.network.config.get_text_config()
    if world.division.team == 1:
        return
    if model.why_padded:
        raise UserError(f"cp_size and tp_size are for models that are packed, and this one is not: {model.why_padded}.")
    if config.num_attention_heads % world.division.team:
        raise UserError(
            f"{type(config).__name__} has {config.num_attention_heads} attention heads, which tp_size × cp_size = {tensor} × "
            f"{context} does not divide; give sizes that do."
        )
    if tensor > 1 and config.num_key_value_heads % tensor:
        raise UserError(
            f"The model has {config.num_key_value_heads} heads of keys and values, which tp_size={tensor} does not divide."
        )
    if tensor > 1 and model.adapter is not None:
        raise UserError("An adapter is not divided by tp_size; give cp_size, or more shards.")


def divide_layers(model: Pretrained, over: Any) -> None:
    """Leave each process of the mesh with its part of every layer's matrices, by the plan that transformers has for the family.
    Raises `UserError` where it has none, or has other numbers or gradients than the whole model.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    network: Any = model.as_transformers()
    model.decoder, model.why_unfused = None, "its layers are divided"
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        **dict.fromkeys(("colwise_rep", "colwise_gather_output"), ColwiseParallel(output_layouts=Replicate())),
        **dict.fromkeys(("rowwise_rep", "rowwise_split_input"), RowwiseParallel(input_layouts=Replicate())),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    family = type(network).__name__
    plan = {name: style for name, style in (network.tp_plan or {}).items() if ".*." in name}
    if unknown := sorted(set(plan.values()) - styles.keys()):
        raise UserError(
            f"tp_size is above 1, and {family} is divided by {', '.join(unknown)}, which is not there; give tp_size=1."
        )
    found = {
        name: styles[style]
        for name, _ in network.named_modules()
        for key, style in plan.items()
        if re.fullmatch(re.escape(key).replace(r"\*", r"\d+"), name)
    }
    if not found:
        raise UserError(f"tp_size is above 1, and transformers has no plan to divide {family}; give tp_size=1, or cp_size.")
    before = _probe(model)
    parallelize_module(network, over, found, src_data_rank=None)
    after = _probe(model)
    gap = max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in zip(after, before, strict=True))
    if not gap < (1e-3 if network.dtype in (torch.float32, torch.float64) else 0.25):
        raise UserError(f"tp_size is above 1, and {family} divided by its plan differs from itself by {gap:.1g}; give tp_size=1.")


def _probe(model: Pretrained) -> list[Tensor]:
    """Numbers of the model, and their gradient in its vectors: norms and biases, which a plan may overlook."""
    vectors: list[nn.Parameter] = [p for p in model.network.parameters() if p.ndim == 1 and p.requires_grad]
    with torch.enable_grad():
        found = model._probe(model._texts(), packed=True)
        slopes: Any = torch.autograd.grad(found.sum(), vectors, allow_unused=True)
    return [found.detach(), *(x.full_tensor() if in_shards(x) else x for x in slopes if x is not None)]
