"""The reader of GGUF files. The layers' matrices stay quantised if their format is supported. Other weights are dequantised."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad.kernels.codes import CodedMatrix, lay_out
from psigrad.language.models.sizes import size

WEIGHTS = "weights.gguf"
"""The name of the link to the GGUF file, in a folder with a configuration and a tokenizer."""
_PERMUTED = ("attn_q.", "attn_k.")


def read(folder: str, config: Any, wanted: Collection[str]) -> Iterator[tuple[str, Tensor | CodedMatrix]]:
    """Yield (name, tensor) from the GGUF file in `folder` for each of transformers' parameter names in `wanted`.

    `config` is the configuration of transformers' model. Raises `ValueError` if the file lacks a tensor.
    """
    import gguf

    reader = gguf.GGUFReader(Path(folder) / WEIGHTS)
    kind = str(reader.fields["general.architecture"].contents())
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, size(config, "layers"))
    held = {tensor.name: tensor for tensor in reader.tensors}
    for name in wanted:
        stem, _, last = name.rpartition(".")
        own = f"{names.get_name(stem)}.{last}"
        if own not in held:
            raise ValueError(f"the GGUF file has no {own}")
        tensor = held[own]
        heads = {"attn_q.": size(config, "heads"), "attn_k.": size(config, "key_heads")}
        permuted = [heads[part] for part in _PERMUTED if kind == "llama" and part in own]
        coded = _read_coded(tensor.tensor_type.name, tensor.data, permuted) if ".layers." in name else None
        if coded is not None:
            yield name, coded
        else:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
            yield name, torch.from_numpy(np.array(_rows(numbers, permuted)))


def has_head(file: Path) -> bool:
    """Return True if a GGUF file has an output matrix (LM head). Without one, the embedding is also the head."""
    import gguf

    return any(tensor.name == "output.weight" for tensor in gguf.GGUFReader(file).tensors)


def ends_in(file: Path) -> list[int]:
    """Return the ids of the tokens that a GGUF file declares as the end of a text, a turn or a message."""
    import gguf

    fields = gguf.GGUFReader(file).fields
    named = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return [int(field.contents()) for field in named if field is not None]


def _rows(x: Any, permuted: list[int]) -> Any:
    """Put the rows of a query or key matrix into transformers' order. llama.cpp interleaves the two halves of each head.

    `permuted` is [number of heads], or [] if the rows are in transformers' order already.
    """
    for heads in permuted:
        x = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    return x


def _read_coded(kind: str, data: Any, permuted: list[int]) -> CodedMatrix | None:
    """Return `data` as a `CodedMatrix`; None if psigrad does not support its GGUF type `kind`. For `permuted` see `_rows`."""
    if kind not in _FORMS:
        return None
    size, form, bits, levels = _FORMS[kind]
    blocks = data.reshape(-1, size)
    codes, scales, offsets = form(blocks)
    parts = [None if x is None else _rows(x.reshape(len(data), -1), permuted) for x in (codes, scales, offsets)]
    made = [None if x is None else torch.from_numpy(np.ascontiguousarray(x)) for x in parts]
    assert made[0] is not None and made[1] is not None
    return lay_out(made[0], made[1], made[2], levels, bits)


# ggml's quantisations (ggml-common.h). `_FORMS` has (bytes per block, function that unpacks blocks, bits per code, levels).
def _q4_0(blocks: Any) -> tuple[Any, Any, None]:
    codes = blocks[:, 2:]
    return np.concatenate([codes & 15, codes >> 4], 1), _halves(blocks[:, :2]), None


def _q8_0(blocks: Any) -> tuple[Any, Any, None]:
    return blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]), None


def _q4_k(blocks: Any) -> tuple[Any, Any, Any]:
    packed = blocks[:, 4:16]
    low, high = packed[:, :4], packed[:, 4:8]
    scales = np.concatenate([low & 63, (packed[:, 8:] & 15) | (low >> 6) << 4], 1)
    least = np.concatenate([high & 63, (packed[:, 8:] >> 4) | (high >> 6) << 4], 1)
    quarters = blocks[:, 16:].reshape(-1, 4, 32)
    codes = np.stack([quarters & 15, quarters >> 4], 2).reshape(len(blocks), -1)
    return codes, _halves(blocks[:, :2]) * scales, -_halves(blocks[:, 2:4]) * least


def _q6_k(blocks: Any) -> tuple[Any, Any, None]:
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], 2).reshape(len(blocks), 2, 4, 32)
    tops = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    codes = (nibbles | tops << 4).reshape(len(blocks), -1).astype(np.int8) - 32
    return codes.astype(np.int8), _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8), None


def _halves(x: Any) -> Any:
    return np.ascontiguousarray(x).view(np.float16).astype(np.float32)


_FORMS: dict[str, tuple[int, Any, int, tuple[float, ...]]] = {
    "Q4_0": (18, _q4_0, 4, tuple(map(float, range(-8, 8)))),
    "Q8_0": (34, _q8_0, 8, ()),
    "Q4_K": (144, _q4_k, 4, tuple(map(float, range(16)))),
    "Q6_K": (210, _q6_k, 8, ()),
}
