"""Compilation of a model's layers with torch.compile, on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from psigrad.errors import reason_of
from psigrad.language.models import hf_attention
from psigrad.language.models.coded_linear import coded_as
from psigrad.language.models.probe import check_gap, with_gradient
from psigrad.language.models.sizes import size
from psigrad.language.models.towers import layers_of

# The largest number of compiled versions of a layer: with and without a gradient, for one row and for one token, per window.
VERSIONS = 32
BACKEND = "inductor"


def compile_layers(model: Any) -> None:
    """Compile the layers of a model. If they stay uncompiled, `model.why_uncompiled` has the reason."""
    model.why_uncompiled = _why_not(model) or _compiled(model)
    model.compiled = not model.why_uncompiled


def _compiled(model: Any) -> str:
    """Compile the layers and return "". If this fails or changes outputs or gradients, undo it and return the reason."""
    # Attention has its own kernels, and reads the sequences' layout from the CPU's memory.
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
    """Return the reason why the layers of a model cannot be compiled; "" if they can."""
    network = model.network
    reasons = {
        "the model runs padded": bool(model.why_padded),
        "its weights are sharded": model.shard_root is not None,
        "lora_dropout draws its masks outside the layers": model.dropout_masks.used,
        "its weights are quantised": coded_as(network) is not None,
        "it is a mixture of experts": size(network.config, "experts") > 0,
        "it has layers with state": any(hasattr(module, "has_state") for module in network.modules()),
        "only layers on a GPU are compiled": model.device.type != "cuda",
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
