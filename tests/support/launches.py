"""The kernels that layers launch, counted on a CPU."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from psigrad.language.models import hf_attention, probe, tiny
from psigrad.language.models.fused.gpu_parts import GpuParts
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.models.packing import Groups

# Operations that write no numbers.
FREE = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "reshape", "detach", "expand", "slice", "select", "unsqueeze"),
    *("squeeze", "alias", "split", "unbind", "as_strided", "empty", "empty_like", "empty_strided", "new_empty"),
    *("new_empty_strided", "split_with_sizes", "chunk", "promote_types"),
}
GROUPS = Groups([[3, 1, 2] * 4, [2, 5] * 6], [[[4, 2, 1] * 4, [1] * 9], [[3] * 8, [2] * 7]])


class Kernels(TorchDispatchMode):
    """The kernels that are launched, by name, and the bytes that those beside products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        self.names[name] += name not in FREE
        if name not in FREE | {"mm", "addmm", "attend", "attend_back"}:
            tensors = {id(x): x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)}
            self.bytes += sum(x.numel() * x.element_size() for x in tensors.values())
        return out


def one_kernel(name: str, given: str, learns: int) -> None:
    """Register an operation of the inputs `given`, with a gradient for the first `learns`, each a single kernel."""
    made = torch.library.custom_op(f"stand_in::{name}", lambda *x: x[0].clone(), mutates_args=(), schema=f"({given}) -> Tensor")
    tensors = ", ".join(f"Tensor x{i}" for i in range(learns))
    back = torch.library.custom_op(
        f"stand_in::{name}_back", lambda *x: [one.clone() for one in x], mutates_args=(), schema=f"({tensors}) -> Tensor[]"
    )
    more = given.count(",") + 1 - learns
    made.register_autograd(
        lambda ctx, grad: (*back(*ctx.saved_tensors), *[None] * more),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:learns]),
    )


one_kernel("attend", "Tensor q, Tensor k, Tensor v", 3)
one_kernel("rms_norm", "Tensor x, Tensor weight, float eps", 2)


def made(layers: int, lora: bool, recompute: bool, fewer: bool = True, dtype=torch.bfloat16, dropout: float = 0.0):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=layers, vocab_size=280)).to(dtype)
    adapter = Lora(4, dropout=dropout) if lora else None
    model = prepare(network, tiny.tokenizer(["say a: b"], 280), adapter, gradient_checkpointing=bool(recompute))
    for p in model.trainable().values():
        p.data = p.data.to(dtype)
    if fewer:
        model.network.train()  # as a new adapter is, before the first pass
        model.dropout_masks.tokens = None
        probe._enable(GpuParts(model.network), model, probe.lay_out(model._texts(), model.device, packed=True))
    return model


def attend_at_once(monkeypatch) -> None:
    """Let the attention of packed texts be a single kernel, as on a GPU."""
    monkeypatch.setattr(hf_attention, "varlen_kernel", lambda: lambda q, k, v, *rest: torch.ops.stand_in.attend(q, k, v))


def launched(monkeypatch, **how) -> tuple[float, float]:
    """The kernels of a layer in a micro-batch, forward and backward, and the bytes beside products."""
    found = []
    for layers in (2, 4):
        model = made(layers, **how)
        with monkeypatch.context() as patch:
            attend_at_once(patch)
            patch.setattr(GpuParts, "norm", lambda self, x, w, eps: torch.ops.stand_in.rms_norm(x, w, eps))
            model.attention_kernel = "varlen"
            model.switch(training=bool(how["recompute"]))
            with Kernels() as counted:
                model.evaluate(GROUPS).logp.sum().backward()
        found.append((counted.names.total(), counted.bytes))
    return (found[1][0] - found[0][0]) / 2, (found[1][1] - found[0][1]) / 2
