"""Weights in the forms of GGUF keep their codes and their numbers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from psigrad.language.models.coded_linear import unpack
from psigrad.language.models.fused.gguf_weights import _read_coded


def matrix_of(rows: int = 100, width: int = 320, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 1, rows)[:, None]


@pytest.mark.parametrize("form", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_forms_of_gguf_keep_their_numbers(form):
    """gguf's own reader is the oracle. It writes no K-quants, so that those are random bytes with small scales."""
    kind = gguf.GGMLQuantizationType[form]
    if form[-1] == "K":
        size = {"Q4_K": 144, "Q6_K": 210}[form]
        data = np.random.default_rng(0).integers(0, 256, (70, 2, size), dtype=np.uint8)
        scales = np.random.default_rng(1).random((70, 2, 2)).astype(np.float16).view(np.uint8)
        at = 0 if form == "Q4_K" else 208
        data[:, :, at : at + scales.shape[2]] = scales[:, :, : min(4, size - at)]
        data = data.reshape(70, -1)
    else:
        data = gguf.quantize(matrix_of(70, 512).numpy(), kind)
    right = torch.from_numpy(gguf.dequantize(data, kind))
    coded = _read_coded(form, data, [])
    assert coded is not None and coded.shape == (70, 512)
    torch.testing.assert_close(coded.by_torch(torch.float32), right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(unpack(coded, torch.float32), right, rtol=1e-6, atol=1e-6)
    turned = _read_coded(form, data, [7]).by_torch(torch.float32)  # rows of a Llama's heads
    assert torch.equal(turned.view(7, 2, 5, 512).swapaxes(1, 2).reshape(70, 512), coded.by_torch(torch.float32))
