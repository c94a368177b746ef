"""A model sharded over the processes (FSDP2, torch's `fully_shard`): each layer's weights are gathered while it runs, then freed.

Gradients are summed, not averaged, because the losses already divide by counts over all processes.
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
from psigrad.language.models.backbone import Pretrained, reshard
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.towers import layers_of, write
from psigrad.processes.parallel import shards
from psigrad.processes.parallel.world import Division, World


class Root(nn.Module):
    """The FSDP root module, whose forward pass gathers the sharded weights."""

    def __init__(self, network: nn.Module, value_head: nn.Module | None) -> None:
        super().__init__()
        self.network, self.value_head = network, value_head

    def forward(self, compute: Callable[[], Any], found: list[Any]) -> list[Tensor]:
        """Append the result of `compute` to the list `found`. Return the result's tensors, since FSDP attaches hooks to these."""
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
    """Shard the model's weights over the processes, and move this process's shard to its device layer by layer.

    Afterwards all processes must call `model.evaluate` and similar methods together, and `model.trainable()` returns sharded
    tensors.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # the import takes a second and 40 MB

    kind = torch.device(device).type
    alone = world.division == Division()
    mesh: Any = init_device_mesh(kind, (world.size,)) if alone else extras.load("mesh").divide(model, world, kind)
    if model.decoder is not None and model.adapter is not None:
        model.decoder, model.why_unfused = None, "the model is sharded and has adapters"
    wide = torch.float32 if model.network.dtype in (torch.bfloat16, torch.float16) else None
    policy = MixedPrecisionPolicy(reduce_dtype=wide)
    network: Any = model.network
    for layer in layers_of(network):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    value_head: Any = getattr(model, "value_head", None)
    if value_head is not None:  # in its own group, since it is always float32 and a group has one dtype
        fully_shard(value_head, mesh=mesh, mp_policy=policy)
    root: Any = fully_shard(Root(network, value_head), mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # the settings are per module
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    model.shard_root = root
    if model.decoder is not None:
        model.decoder.in_shards = True
        for block in layers_of(network):  # the decoder computes while the block's hooks gather its weights
            block.forward, block.gradient_checkpointing = _run_inside, False  # type: ignore[assignment]


def _run_inside(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    return run(x)


def named_weights(model: Pretrained) -> dict[str, Tensor]:
    """Return the sharded weights that a checkpoint stores, by name: all weights, or with a LoRA adapter only the trained ones."""
    reshard(model)
    learns = model.trainable()
    if model.adapter is not None:
        return dict(learns)
    return {**dict(model.network.named_parameters()), **learns}


def save(model: Pretrained, folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """Write a checkpoint. Each process writes its rows of `tensors`, and rank 0 the configuration and the tokenizer."""
    shards.write(folder, tensors, getattr(world, "group", None))
    if world.rank == 0:
        _describe(model, folder)


def _describe(model: Pretrained, folder: Path) -> None:
    config: Any = copy.deepcopy(model.network.config)
    config.dtype = str(model.network.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    generation = getattr(model.network, "generation_config", None)  # a reward model has none
    if generation is not None:
        generation.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    if model.vision is not None:
        model.vision.save(folder)


@torch.no_grad()
def gather(model: Pretrained, names: set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, gathered weight) of every parameter, or only of those in `names`. All processes must iterate together."""
    reshard(model)
    for name, parameter in model.network.named_parameters():
        if names is None or name in names:
            tensor: Any = parameter
            yield name, tensor.full_tensor() if shards.is_sharded(tensor) else tensor.detach()


def save_merged(model: Pretrained, world: World, folder: Path, saved_form: str = "merged") -> None:
    """Gather a sharded model, and save it in Hugging Face format. Rank 0 needs memory for all weights.

    `saved_form` is "merged" (the model with LoRA merged in), "adapter", or "both", with the adapter in the subfolder adapter/.
    """
    state: dict[str, Tensor] = {}
    for name, weight in gather(model):
        if world.rank == 0:
            state[name] = weight.cpu().clone()
    if world.rank == 0:
        if saved_form != "merged":
            own = folder / "adapter" if saved_form == "both" else folder
            write_adapter(model, state, own)
            model.tokenizer.save_pretrained(own)
        if saved_form == "adapter":
            return
        write(_Saved(model.network, merge(model, state)), model.tokenizer, folder)


def write_adapter(model: Pretrained, state: dict[str, Tensor], folder: Path) -> None:
    """Write the model's adapter in peft's format. `state` has the gathered weights by their names in `model.network`."""
    wrapper: Any = model.adapter
    first = next(iter(state))
    prefix = next(name.removesuffix(first) for name, _ in wrapper.named_parameters() if name.endswith(first))
    whole = {f"{prefix}{name}": weight for name, weight in state.items()}
    wrapper.save_pretrained(folder, state_dict=whole, safe_serialization=True)


class _Saved:
    """A stand-in for a sharded `network` in `towers.write`. It saves the gathered weights `state`."""

    def __init__(self, network: Any, state: dict[str, Tensor]) -> None:
        self.network, self.state = network, state

    def save_pretrained(self, folder: Path, safe_serialization: bool = True) -> None:
        self.network.save_pretrained(folder, state_dict=self.state, safe_serialization=safe_serialization)


def merge(model: Pretrained, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights `state` under the base model's names, with LoRA merged in: scaling·B·A is added to each matrix."""
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
    """A complete, unsharded copy of a sharded model for sampling. `refresh` copies the current weights into it."""

    def __init__(self, model: LanguageModel, twin: LanguageModel) -> None:
        self.model, self.twin = model, twin
        twin.network.requires_grad_(False)
        self._learns = set(model.trainable())

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather the model's trained weights, and copy them into the unsharded `twin`. All processes must call this together."""
        own = dict(self.twin.network.named_parameters())
        for name, weight in gather(self.model, self._learns):
            own[name].copy_(weight)
