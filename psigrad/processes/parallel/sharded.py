"""A model in shards over the processes (FSDP2, torch's `fully_shard`): who computes gathers a layer's weights and lets them go.

Gradients are summed, not averaged: the losses already divide by counts over all processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from psigrad import extras
from psigrad.language.models.backbone import Pretrained, reshard, write
from psigrad.language.models.language_model import LanguageModel
from psigrad.processes.parallel import shards
from psigrad.processes.parallel.world import Division, World


class Root(nn.Module):
    """Whatever runs inside this module's forward pass finds whole weights: those of the embedding, the last norm and the head all
    the time, those of a layer inside the layer's own forward pass.
    """

    def __init__(self, network: nn.Module, value_head: nn.Module | None) -> None:
        super().__init__()
        self.network, self.value_head = network, value_head

    def forward(self, compute: Callable[[], Any], found: list[Any]) -> list[Tensor]:
        """Puts what `compute` returns into `found`; the tensors in it, so that hooks see them."""
        found.append(compute())
        return list(_tensors(found[0]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))


def shard(model: Pretrained, world: World, device: str = "cpu") -> None:
    """Leave this process with its share of the model's weights, moved to its device block by block. From now on all processes
    must call `model.evaluate` and the like alike, and `model.trainable()` has tensors in shards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # a second, and forty megabytes

    kind = torch.device(device).type
    alone = world.division == Division()
    mesh: Any = init_device_mesh(kind, (world.size,)) if alone else extras.load("mesh").divide(model, world, kind)
    if model.decoder is not None and model.adapter is not None:
        model.decoder, model.why_unfused = None, "it is in shards and has adapters"
    wide = torch.float32 if model.network.dtype in (torch.bfloat16, torch.float16) else None
    policy = MixedPrecisionPolicy(reduce_dtype=wide)
    network: Any = model.network
    for layer in layers_of(network):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    value_head: Any = getattr(model, "value_head", None)
    if value_head is not None:  # of a group of its own: it is in float32 whatever the network is in
        fully_shard(value_head, mesh=mesh, mp_policy=policy)
    root: Any = fully_shard(Root(network, value_head), mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # each has its own factor
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no product with the sum
    model.root = root
    if model.decoder is not None:
        model.decoder.in_shards = True
        for block in layers_of(network):  # the decoder computes, and the block's hooks gather its weights meanwhile
            block.forward, block.gradient_checkpointing = _run_inside, False  # type: ignore[assignment]


def _run_inside(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    return run(x)


def layers_of(network: Any) -> list[nn.Module]:
    """The blocks that are gathered one at a time."""
    names = set(getattr(network, "_no_split_modules", None) or ())
    found = [module for module in network.modules() if type(module).__name__ in names]
    return found or [m for child in network.modules() if isinstance(child, nn.ModuleList) for m in child]


def named_weights(model: Pretrained) -> dict[str, Tensor]:
    """The weights that a checkpoint holds, in shards: all of them, or what an adapter adds."""
    reshard(model)
    learns = model.trainable()
    if model.adapter is not None:
        return dict(learns)
    return {**dict(model.network.named_parameters()), **learns}


def save(model: Pretrained, folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """A part of a checkpoint: the tensors, each process its rows; rank 0 adds configuration and tokenizer."""
    shards.write(folder, tensors, getattr(world, "group", None))
    if world.rank == 0:
        _describe(model, folder)


def _describe(model: Pretrained, folder: Path) -> None:
    config: Any = copy.deepcopy(model.network.config)
    config.dtype = str(model.network.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.network.generation_config is not None:
        model.network.generation_config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


@torch.no_grad()
def gather(model: Pretrained, wanted: set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, whole weight) of every parameter, or of the `wanted`, one after the other, on every process."""
    reshard(model)
    for name, parameter in model.network.named_parameters():
        if wanted is None or name in wanted:
            tensor: Any = parameter
            yield name, tensor.full_tensor() if shards.in_shards(tensor) else tensor.detach()


def save_merged(model: Pretrained, world: World, folder: Path, kept: str = "merged") -> None:
    """The whole model in Hugging Face form, adapter merged in; rank 0 holds it in the host's memory while it is written.

    With `kept` the adapter alone ("adapter"), or beside it in adapter/ ("both").
    """
    state: dict[str, Tensor] = {}
    for name, weight in gather(model):
        if world.rank == 0:
            state[name] = weight.cpu().clone()
    if world.rank == 0:
        if kept != "merged":
            own = folder / "adapter" if kept == "both" else folder
            write_adapter(model, state, own)
            model.tokenizer.save_pretrained(own)
        if kept == "adapter":
            return
        write(_Saved(model.network, merge(model, state)), model.tokenizer, folder)


def write_adapter(model: Pretrained, state: dict[str, Tensor], folder: Path) -> None:
    """The adapter in peft's form, out of whole weights by the network's own names."""
    wrapper: Any = model.adapter
    first = next(iter(state))
    prefix = next(name.removesuffix(first) for name, _ in wrapper.named_parameters() if name.endswith(first))
    whole = {f"{prefix}{name}": weight for name, weight in state.items()}
    wrapper.save_pretrained(folder, state_dict=whole, safe_serialization=True)


class _Saved:
    """A transformers model that is saved with weights from elsewhere."""

    def __init__(self, network: Any, state: dict[str, Tensor]) -> None:
        self.network, self.state = network, state

    def save_pretrained(self, folder: Path, safe_serialization: bool = True) -> None:
        self.network.save_pretrained(folder, state_dict=self.state, safe_serialization=safe_serialization)


def merge(model: Pretrained, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with the adapters' products added to the matrices, under the names that the model had without them."""
    found = {}
    for name, weight in state.items():
        if ".lora_" in name:
            continue
        base = name.replace(".base_layer.", ".")
        if name != base and name.endswith(".weight"):
            owner: Any = model.network.get_submodule(name.removesuffix(".base_layer.weight"))
            for adapter in owner.active_adapters:
                a, b = (state[f"{name.removesuffix('.base_layer.weight')}.lora_{x}.{adapter}.weight"] for x in "AB")
                weight = (weight.float() + owner.scaling[adapter] * (b.float() @ a.float())).to(weight.dtype)
        found[base] = weight
    return found


class Replica:
    """A whole copy of a model in shards, to sample with. `refresh` copies the weights of now; all processes must call it."""

    def __init__(self, model: LanguageModel, twin: LanguageModel) -> None:
        self.model, self.twin = model, twin
        twin.network.requires_grad_(False)
        self._learns = set(model.trainable())

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the model's weights."""
        own = dict(self.twin.network.named_parameters())
        for name, weight in gather(self.model, self._learns):
            own[name].copy_(weight)
