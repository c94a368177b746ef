"""The device mesh of processes, with the dimensions replicate, shard and tensor.

Processes that divide the tokens of a row (context parallelism, `Division.context`) also have a shard each. They are in the
dimension "shard".
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from psigrad.errors import UserError
from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.sizes import layer_sizes, size
from psigrad.processes.parallel.shards import is_sharded
from psigrad.processes.parallel.world import World
from psigrad_extras.mesh.ulysses import Ulysses


def divide(model: Pretrained, world: World, kind: str) -> Any:
    """Divide a model for tensor and context parallelism: each process keeps its part of every layer.

    `kind` is the device type. Return the mesh for shards. Raises `UserError` if the model or its family cannot be divided.
    """
    check(model, world)
    ranks: Any = world
    over, tensor, model.sequence_group = make(ranks, kind)
    if world.division.team > 1:
        model.decoder, model.why_unfused = None, "several processes compute it together"
    if tensor is not None:
        # PyTorch warns that a matrix with two kinds of division is gathered in two steps, which is intended.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        divide_layers(model, tensor)
    return over


@functools.lru_cache(1)
def make(world: Any, kind: str) -> tuple[Any, Any, Ulysses | None]:
    """Return (mesh for shards, mesh for tensor parallelism or None, group for context parallelism or None)."""
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
    return over, whole["tensor"] if tensor > 1 else None, Ulysses(own, world.rank % world.division.team // tensor, context)


def check(model: Pretrained, world: World) -> None:
    """Raise `UserError` if several processes cannot compute the model together."""
    _, tensor, context = world.division
    config = model.network.config
    if world.division.team == 1:
        return
    if model.why_padded:
        raise UserError(
            f"cp_size and tp_size need packed batches, but the model runs padded ({model.why_padded}); set both to 1."
        )
    if any(getattr(module, "has_state", False) for module in model.network.modules()):
        raise UserError(
            f"cp_size and tp_size do not support recurrent layers, which {type(model.network).__name__} has; set both to 1."
        )
    if size(config, "experts"):
        raise UserError("cp_size and tp_size do not support a mixture of experts; give tp_size=1 and cp_size=1.")
    heads, keys = layer_sizes(config, "heads"), layer_sizes(config, "key_heads")
    if odd := [count for count in heads if count % world.division.team]:
        raise UserError(
            f"{type(config).__name__} has {odd[0]} attention heads, not a multiple of tp_size × cp_size = {tensor} × "
            f"{context}; choose sizes whose product divides {odd[0]}."
        )
    if tensor > 1 and (odd := [count for count in keys if count % tensor]):
        raise UserError(
            f"The model has {odd[0]} key-value heads, which is not a multiple of tp_size={tensor}; give a tp_size that "
            f"divides {odd[0]}."
        )
    if tensor > 1 and model.adapter is not None:
        raise UserError("tp_size does not support adapters; use cp_size or placement.strategy=fsdp instead.")


def divide_layers(model: Pretrained, over: Any) -> None:
    """Divide every layer's matrices over the processes of the mesh `over`, by transformers' tensor-parallel plan of the family.

    Raises `UserError` if there is no plan, or if outputs or gradients differ from those of the full model.
    """
    network: Any = model.network
    family = type(network).__name__
    plan = {name: style for name, style in (network.tp_plan or {}).items() if ".*." in name}
    if unknown := sorted(set(plan.values()) - _STYLES.keys()):
        raise UserError(
            f"tp_size does not support the styles {', '.join(unknown)} of transformers' plan for {family}; give tp_size=1."
        )
    patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    found = [(m, style) for name, m in network.named_modules() for key, style in patterns.items() if key.fullmatch(name)]
    if not found:
        raise UserError(f"transformers has no tensor-parallel plan for {family}; give tp_size=1, or use cp_size.")
    before = _probe(model)
    for module, style in found:
        _divide(module, *_STYLES[style], over)
    gap = max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in zip(_probe(model), before, strict=True))
    if not gap < (1e-3 if network.dtype in (torch.float32, torch.float64) else 0.25):
        raise UserError(f"With tp_size above 1, the output of {family} changes by {gap:.1g} of its norm; give tp_size=1.")


# Style in transformers' plans -> (dimension of the division, True if each process gets the full input, True if it gets the full
# output). The last style is for vectors between divided layers: they are not divided, and their gradients are summed.
_STYLES = {
    "colwise": (0, True, False),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), (0, True, True)),
    "rowwise": (1, False, True),
    **dict.fromkeys(("rowwise_rep", "rowwise_split_input"), (1, True, True)),
    "replicated_with_grad_allreduce": (None, False, False),
}


def _divide(module: Any, dim: int | None, whole_input: bool, whole_output: bool, over: Any) -> None:
    """Divide a module's parameters over the processes, and replace its `forward` by one that exchanges inputs and outputs.

    The new `forward` computes with plain tensors, since DTensor plans the computation again for every row length, which takes
    longer than a layer.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    for name, p in module.named_parameters(recurse=False):
        placement = Replicate() if dim is None or dim >= p.ndim else Shard(dim)
        part = distribute_tensor(p.detach(), over, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=p.requires_grad))
    group, rank, size, forward = over.get_group(), over.get_local_rank(), over.size(), module.forward

    def same(x: Tensor) -> Tensor:
        return x.view_as(x)

    def summed(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    def own(x: Tensor) -> Tensor:
        part: Tensor = x.chunk(size, -1)[rank]
        return part

    def joined(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    def compute(x: Tensor) -> Tensor:
        held = {name: p for name, p in module._parameters.items() if p is not None}
        partial = [Partial()] if dim is None else None
        local = {name: p.to_local(grad_placements=partial) for name, p in held.items()}
        after = local.pop("bias", None) if dim == 1 else None  # the bias must be added only once
        module._parameters.update(dict.fromkeys(held), **local)
        try:
            if dim is not None and whole_input:
                x = _Through.apply(x, *((same, summed) if dim == 0 else (own, joined)))
            x = forward(x)
        finally:
            module._parameters.update(held)
        if whole_output:
            x = _Through.apply(x, *((joined, own) if dim == 0 else (summed, same)))
        made: Tensor = x if after is None else x + after
        return made

    module.forward = compute


class _Through(torch.autograd.Function):
    """An autograd function that applies `there` to a tensor, and `back` to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _probe(model: Pretrained) -> list[Tensor]:
    """Return outputs of the model and their gradients by its vectors (norms, biases), to compare before and after a division.

    A plan may omit the gradients of vectors.
    """
    vectors: list[nn.Parameter] = [p for p in model.network.parameters() if p.ndim == 1 and p.requires_grad]
    with torch.enable_grad():
        found = model._probe(model._texts(), packed=True)
        slopes: Any = torch.autograd.grad(found.sum(), vectors, allow_unused=True)
    return [found.detach(), *(x.full_tensor() if is_sharded(x) else x for x in slopes if x is not None)]
