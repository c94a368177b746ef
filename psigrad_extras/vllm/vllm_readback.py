"""The comparison of the weights with which an engine computes, and those that were sent to it.

vLLM arranges weights differently from a checkpoint: q, k and v in one matrix, gate and up in one, shards on several devices. On
CPUs, it computes with packed copies in the kernel's layout, which cannot be read directly. They are read by multiplication: the
product with a column of the identity is exactly a column of the matrix.

A weight that an update did not change is always detected. Stored weights are compared in full. Of a packed matrix, only some
columns are read. They are chosen before the update, and include one in which the old weight differs from the new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The minimum number of columns to read of a packed matrix.
COLUMNS = 8


class Piece(NamedTuple):
    """The part of a vLLM parameter on this device that one sent weight fills: the values of its rows from `first` on."""

    name: str
    first: int
    values: Tensor

    def of(self, matrix: Tensor) -> Tensor:
        """Return the piece's rows of `matrix`."""
        return matrix[self.first : self.first + len(self.values)]


class Held(NamedTuple):
    """A module of vLLM with one of its parameters, and the pieces of which it consists; none if the arrangement is unknown."""

    name: str
    module: Any
    parameter: Tensor
    pieces: list[Piece]

    @property
    def packed(self) -> bool:
        """True if the module multiplies by a packed copy of the parameter."""
        multiplies = self.name.endswith(".weight") and bool(_kinds(self.module) & _MULTIPLY)
        return multiplies and hasattr(self.module, "cpu_linear")


_MULTIPLY = {"LinearBase", "ParallelLMHead"}


@dataclass
class Readback:
    """The comparison of `model`, a module of vLLM, with weights that were sent to it in buckets of complete layers.

    With `tied`, the head is the embedding. `pack(layer, matrices)` returns a layer's experts as vLLM stores them, if it does not
    store them as they were sent.
    """

    model: Any
    tied: bool
    pack: Callable[[Any, Tensor], Tensor] | None = None
    columns: dict[str, list[int]] = field(default_factory=dict)
    bad: dict[str, None] = field(default_factory=dict)
    strange: dict[str, None] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def choose(self, sent: Mapping[str, Tensor], changed: Collection[str], transposed: Collection[str] = ()) -> None:
        """Choose, before an update, the columns of packed matrices to read after it.

        In at least one of them, the old value of each weight in `changed` differs from the new one.
        """
        for layer in self.layers(sent, transposed):
            if layer.packed:
                self.columns[layer.name] = _telling(layer, [p for p in layer.pieces if p.name in changed])

    def compare(self, sent: Mapping[str, Tensor], transposed: Collection[str] = ()) -> None:
        """Compare, after an update, a bucket of sent weights with the model's, and record those that differ."""
        for layer in self.layers(sent, transposed):
            self.seen.add(layer.name)
            if not layer.pieces:
                self.strange[layer.name] = None
            for piece in layer.pieces:
                if not len(piece.values):
                    self.bad[f"{piece.name} (not sent)"] = None
                elif layer.parameter.numel() and not _equal(piece.of(layer.parameter), piece.values):
                    self.bad[piece.name] = None
            if layer.packed:
                chosen = self.columns.get(layer.name) or _order(layer)[:COLUMNS]
                read = _read(layer, chosen)
                for piece in layer.pieces:
                    if len(piece.values) and not _equal(piece.of(read), piece.values[:, chosen]):
                        self.bad[piece.name] = None

    def found(self) -> tuple[list[str], list[str]]:
        """Return, after all buckets, (weights that differ or were not sent, parameters whose arrangement is unknown)."""
        own = (f"{name}.{leaf}" for name, m in self.model.named_modules() for leaf, _ in m.named_parameters(recurse=False))
        return [*self.bad, *(f"{name} (not sent)" for name in own if name not in self.seen)], list(self.strange)

    def layers(self, sent: Mapping[str, Tensor], transposed: Collection[str]) -> Iterator[Held]:
        """Yield each parameter of the model for which a weight of this bucket was sent."""
        fused = getattr(self.model, "packed_modules_mapping", {})
        embedding = next((f"{n}.weight" for n, m in self.model.named_modules() if _is_embedding(m)), "")
        for name, module in self.model.named_modules():
            head, _, last = name.rpartition(".")
            for leaf, parameter in module.named_parameters(recurse=False):
                sources = [".".join(filter(None, (head, one, leaf))) for one in fused.get(last, [last])]
                if self.tied and "ParallelLMHead" in _kinds(module) and sources[0] not in sent and leaf == "weight":
                    sources = [embedding]
                rows = parameter
                if "RoutedExperts" in _kinds(module) and parameter.ndim == 3:  # [experts, rows, columns]
                    sources, rows = _expert_sources(module, head, leaf, len(parameter)), parameter.flatten(0, 1)
                if any(source in sent for source in sources):
                    pieces = _pieces(module, leaf, rows, sources, sent, transposed)
                    if self.pack is not None and rows is not parameter and pieces and all(len(p.values) for p in pieces):
                        whole = torch.cat([p.values for p in pieces]).view(parameter.shape).to(parameter.dtype)
                        stored = self.pack(module, whole).view(rows.shape)
                        pieces = [p._replace(values=p.of(stored)) for p in pieces]
                    yield Held(f"{name}.{leaf}", module, rows, pieces)


def _expert_sources(module: Any, head: str, leaf: str, count: int) -> list[str]:
    """Return the names that a checkpoint has for the weights of a layer's experts, in the order of their rows."""
    names = [module.ckpt_gate_proj_name, module.ckpt_up_proj_name] if leaf == "w13_weight" else [module.ckpt_down_proj_name]
    return [f"{head}.{expert}.{name}.weight" for expert in range(count) for name in names]


def _pieces(
    module: Any, leaf: str, parameter: Tensor, sources: list[str], sent: Mapping[str, Tensor], transposed: Collection[str]
) -> list[Piece]:
    """Return the pieces of a parameter, which consists of the weights `sources`.

    A weight that was not sent gets a piece without rows. If the shapes do not fit, there are no pieces.
    """
    pieces, first = [], 0
    for place, source in enumerate(sources):
        if source not in sent:
            pieces.append(Piece(source, first, torch.empty(0)))
            continue
        whole = sent[source].T if source in transposed else sent[source]
        values = _share(module, leaf, place, len(sources), whole)
        if values is None:
            return []
        pieces.append(Piece(source, first, values))
        first += len(values)
    sizes = [p.values.shape for p in pieces if len(p.values)]
    rows = max((p.first + len(p.values) for p in pieces), default=0)
    if parameter.numel() and sizes and (sizes[0][1:] != parameter.shape[1:] or rows > len(parameter)):
        return []
    return pieces


def _share(module: Any, leaf: str, place: int, count: int, whole: Tensor) -> Tensor | None:
    """Return this device's part of a weight by the rules of vLLM's parallel layers, or None if the rule is unknown."""
    kinds, size, rank = _kinds(module), getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    if _is_embedding(module) or "ParallelLMHead" in kinds:
        shard = module.shard_indices
        return whole[shard.org_vocab_start_index : shard.org_vocab_end_index]
    if size == 1 or "ReplicatedLinear" in kinds:
        return whole
    if "QKVParallelLinear" in kinds:
        if count != 3:
            return None
        heads, block = (module.num_heads, rank) if place == 0 else (module.num_kv_heads, rank // module.num_kv_head_replicas)
        return whole.narrow(0, block * heads * module.head_size, heads * module.head_size)
    if "RoutedExperts" in kinds:
        return whole.chunk(size, 0 if leaf == "w13_weight" else 1)[rank]
    if "ColumnParallelLinear" in kinds:
        return whole.chunk(size, 0)[rank] if count > 1 or "MergedColumnParallelLinear" not in kinds else None
    if "RowParallelLinear" in kinds and leaf == "weight":
        return whole.chunk(size, 1)[rank]
    return whole if whole.ndim == 1 else None


def _kinds(module: Any) -> set[str]:
    """Return the names of a module's classes, which identify its kind without importing vLLM."""
    return {kind.__name__ for kind in type(module).__mro__}


def _is_embedding(module: Any) -> bool:
    return "VocabParallelEmbedding" in _kinds(module) and "ParallelLMHead" not in _kinds(module)


def _equal(own: Tensor, sent: Tensor) -> bool:
    return own.shape == sent.shape and torch.equal(own.detach(), sent.to(own.device, own.dtype))


def _width(layer: Held) -> int:
    return int(next(p.values.shape[1] for p in layer.pieces if len(p.values)))


def _order(layer: Held) -> list[int]:
    """Return the indices of all columns of a packed matrix in random order."""
    known = any(len(piece.values) for piece in layer.pieces)
    return torch.randperm(_width(layer)).tolist() if known else []


def _read(layer: Held, columns: list[int]) -> Tensor:
    """Return these columns, [rows, columns], of the matrix by which the layer multiplies."""
    dtype = next(p.values.dtype for p in layer.pieces if len(p.values))
    one = torch.zeros(len(columns), _width(layer), dtype=dtype)
    one[torch.arange(len(columns)), columns] = 1
    found: Tensor = layer.module.cpu_linear(one, layer.parameter, None)
    return found.reshape(len(columns), -1).T


def _telling(layer: Held, wanted: list[Piece]) -> list[int]:
    """Return random columns, and for each of the `wanted` pieces one in which it differs from the layer's current weight."""
    order, missing, chosen, size = _order(layer), list(wanted), list[int](), COLUMNS
    while order and (missing or not chosen):
        block, order, size = order[:size], order[size:], size * 2
        read = _read(layer, block)
        chosen = chosen or block[:COLUMNS]
        for piece in list(missing):
            differs = (piece.of(read) != piece.values[:, block]).any(0).nonzero()
            if len(differs):
                missing.remove(piece)
                chosen.append(block[int(differs[0])])
    return list(dict.fromkeys(chosen))


def wrong_in_adapter(
    layers: Mapping[str, Any], slot: int, sent: Mapping[str, Tensor], scaling: float, fused: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the names of adapter matrices that differ from those in vLLM's `layers`, or that no layer has.

    vLLM has the adapter in `slot`, with B multiplied by `scaling`. Layers divided among several devices are not compared.
    """
    left, found = {name.removeprefix("base_model.model."): matrix for name, matrix in sent.items()}, []
    for name, layer in layers.items():
        head, _, last = name.rpartition(".")
        linear = isinstance(layer.lora_a_stacked, tuple)  # other layers, embedding and head, have no adapter
        for place, source in enumerate(fused.get(last, [last]) if linear else ()):
            for letter, held, factor in (("A", layer.lora_a_stacked, 1.0), ("B", layer.lora_b_stacked, scaling)):
                key = f"{head}.{source}.lora_{letter}.weight"
                matrix = left.pop(key, None)
                if getattr(layer, "tp_size", 1) > 1:
                    continue
                own = held[place][slot, 0]
                expected = torch.zeros_like(own)
                if matrix is not None:
                    matrix = matrix.to(own.device, own.dtype)
                    expected[: matrix.shape[0], : matrix.shape[1]] = matrix * factor if factor != 1 else matrix
                if not torch.equal(own, expected):
                    found.append(key)
    return [*found, *(f"{name} (not loaded)" for name in left)]


def scaling_of(config: Mapping[str, Any]) -> float:
    """Return the factor by which vLLM multiplies B, from the adapter's configuration."""
    return float(config["lora_alpha"]) / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
