"""Choices that psigrad makes by the processor, the device or a size, made otherwise for a test that gives its `monkeypatch`."""

from __future__ import annotations

from psigrad.kernels import processor
from psigrad.kernels.kernels import Kernels, kernels
from psigrad.kernels.products import Products
from psigrad.language.models import logprobs
from psigrad.language.models.fused import layer
from psigrad.optim import low_memory, optimizer


def cut_head(monkeypatch, elements=None, *, rows=None, chunk=None, closed=False, on_gpu=False) -> None:
    """Compute log-probs in tiles of at most `elements` logits and `rows` states, or in chunks of `chunk` logits.

    If `closed`, the closed form is the only way. If `on_gpu`, take the way of a GPU, whose tiles are then no larger.
    """
    sizes = {"TILE_ELEMENTS": elements, "TILE_ROWS": rows, "CHUNK_ELEMENTS": chunk, "TILE_ON_GPU": 1 if on_gpu else None}
    for name, size in sizes.items():
        if size is not None:
            monkeypatch.setattr(logprobs, name, size)
    if closed:
        monkeypatch.setattr(logprobs, "checkpoint", None)  # it would keep a table of logits, or make it again
    if on_gpu:
        monkeypatch.setattr(logprobs, "_on_gpu", lambda x: True)


def without_adamw_kernels(monkeypatch) -> None:
    """Step AdamW by PyTorch alone."""
    for module in (low_memory, optimizer):
        monkeypatch.setattr(module, "adamw_kernels", lambda dtype, device: None)


def multiply_bfloat16(monkeypatch, fast: bool) -> None:
    """Let layers of bfloat16 be computed in it if `fast`, else in float32."""
    monkeypatch.setattr(layer, "fast_bfloat16", lambda: fast)


def own_products(monkeypatch, like: Products | None = None) -> Products:
    """Compute all products that the kernels can by them, or only those that `like` computes by them."""
    native = kernels()
    assert isinstance(native, Kernels), native
    for name in ("float32", "bfloat16", "packs_bfloat16"):
        monkeypatch.setattr(native.products, name, like is None or getattr(like, name))
    return native.products


def pretend_processor(monkeypatch, *lines: str, machine: str = "x86_64") -> None:
    """Run on a processor of the kind that these lines of /proc/cpuinfo describe."""
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.setattr(processor, "_described", lambda: lines)
