"""torch.compile on a GPU: the layers of a model, and coded matrices decoded in one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from psigrad import redaction
from psigrad.errors import reason_of
from psigrad.kernels import codes
from psigrad.language.models import hf_attention
from psigrad.language.models.coded_linear import coded_as
from psigrad.language.models.probe import check_gap, with_gradient
from psigrad.language.models.sharded import layers_of
from psigrad.language.models.sizes import size

# The versions of a layer that torch.compile keeps: with and without a gradient, of one row and of one token, of each window.
VERSIONS = 32
BACKEND = "inductor"


def compile_layers(model: Any) -> str:
    """Compile the layers of a packed model on a GPU, one version for all layers of a kind and all lengths.

    Attention stays outside: it reads a layout of the host, and has kernels of its own. Returns why the layers are not compiled;
    empty if they are.
    """
    if why := _why_not(model):
        return why
    AttentionInterface.register(hf_attention.IMPLEMENTATION, torch.compiler.disable(hf_attention.attention))
    limit: Any = torch._dynamo.config
    limit.recompile_limit = max(VERSIONS, limit.recompile_limit)
    own, layers = with_gradient(model), layers_of(model.network)
    for layer in layers:
        layer.compile(dynamic=True, backend=BACKEND)
    try:
        check_gap(model, own)
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError, ValueError, TypeError) as error:
        for layer in layers:
            layer._compiled_call_impl = None
        return reason_of(error)
    return ""


def _why_not(model: Any) -> str:
    """Return why the layers of a model cannot be compiled; empty if it may be tried."""
    network = model.network
    reasons = {
        "only layers on a GPU are compiled": model.device.type != "cuda",
        "the model runs padded": bool(model.why_padded),
        "its weights are in shards": model.root is not None,
        "lora_dropout draws its masks outside": model.masks.used,
        "its weights are in codes": coded_as(network) is not None,
        "it is a mixture of experts": size(network.config, "experts") > 0,
        "it has layers with state": any(hasattr(module, "has_state") for module in network.modules()),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


@functools.cache
def decoder() -> Callable[..., Tensor]:
    """Return `codes.decode`, compiled for all shapes. It reads 0.6 to 1.1 bytes a weight and writes 2; PyTorch alone moves 30.

    Where the compiler does not run, PyTorch decodes, and the reason is printed once.
    """
    compiled: list[Callable[..., Tensor]] = [torch.compile(codes.decode, dynamic=True)]

    def decode(*given: object) -> Tensor:
        try:
            return compiled[0](*given)
        except torch._dynamo.exc.TorchDynamoException as error:
            redaction.say(f"Coded weights are decoded without torch.compile, in ten times the time: {reason_of(error)}.")
            compiled[0] = codes.decode
            return codes.decode(*given)  # type: ignore[arg-type]

    return decode
