"""Modules with fewer kernels on a GPU: their numbers and gradients, and the kernels that a layer launches, counted on a CPU.

An operation of PyTorch that writes numbers is a kernel. RMS norms and attention, which are one kernel on a GPU, have stand-ins.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from inductor_counts import Launches, counting
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from psigrad.language.models import backbone, hf_attention, probe, tiny
from psigrad.language.models.fused import gpu_parts, inductor
from psigrad.language.models.fused.gpu_parts import GpuParts
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers import cache
from psigrad.language.rollout.samplers.cuda_graph import CudaGraphDecoding, Room
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

# Operations that write no numbers.
FREE = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "reshape", "detach", "expand", "slice", "select", "unsqueeze"),
    *("squeeze", "alias", "split", "unbind", "as_strided", "empty", "empty_like", "empty_strided", "new_empty"),
    *("new_empty_strided", "split_with_sizes", "chunk", "promote_types"),
}
SLOW = pytest.mark.slow
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


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The branches of a GPU on the host."""
    monkeypatch.setattr(backbone, "fuse", lambda model, texts, recompute: (None, ""))
    monkeypatch.setattr(probe, "kernels", lambda: "none on a GPU")
    monkeypatch.setattr(GpuParts, "runs", lambda self, x, *weights: self.on)


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


def launched(monkeypatch, **how) -> tuple[float, float]:
    """The kernels of a layer in a micro-batch, forward and backward, and the bytes beside products."""
    found = []
    for layers in (2, 4):
        model = made(layers, **how)
        with monkeypatch.context() as patch:
            patch.setattr(hf_attention, "varlen_kernel", lambda: lambda q, k, v, *rest: torch.ops.stand_in.attend(q, k, v))
            patch.setattr(gpu_parts, "_rms_norm", lambda x, w, eps, offset=0.0: torch.ops.stand_in.rms_norm(x, w, eps))
            model.attention_kernel = "varlen"
            model.switch(training=bool(how["recompute"]))
            with Kernels() as counted:
                model.evaluate(GROUPS).logp.sum().backward()
        found.append((counted.names.total(), counted.bytes))
    return (found[1][0] - found[0][0]) / 2, (found[1][1] - found[0][1]) / 2


@pytest.mark.parametrize(("lora", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.5)])
def test_log_probs_and_gradients_are_those_of_the_modules(lora, dropout, as_on_a_gpu):
    found = []
    for fewer in (True, False):
        model = made(2, lora, False, fewer, torch.float64, dropout)
        learns = [p.data.normal_(std=0.2, generator=torch.Generator().manual_seed(len(p))) for p in model.trainable().values()]
        assert lora or len(learns) > 20
        logp = model.evaluate(GROUPS).logp
        found.append([logp.detach(), *torch.autograd.grad((logp * logp.detach()).sum(), list(model.trainable().values()))])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


def test_negative_control_a_wrong_kernel_is_left_out(as_on_a_gpu, monkeypatch):
    right = made(2, False, False, fewer=False).evaluate(GROUPS).logp
    monkeypatch.setattr(gpu_parts, "norm_offset", lambda module, norm: 0.0 if "RMSNorm" in type(module).__name__ else None)
    monkeypatch.setattr(gpu_parts, "_rms_norm", lambda x, weight, eps, offset=0.0: F.rms_norm(x, weight.shape, weight, eps + 0.1))
    assert torch.equal(made(2, False, False).evaluate(GROUPS).logp, right)
    monkeypatch.setattr(probe, "_why_not", lambda hf, numbers: "")
    assert not torch.equal(made(2, False, False).evaluate(GROUPS).logp, right)


@pytest.mark.parametrize(("lora", "recompute", "most"), [(0, 0, 90), (0, 1, 120), (1, 0, 135), (1, 1, 160)])
def test_a_layer_launches_at_most_so_many_kernels_in_a_micro_batch(lora, recompute, most, as_on_a_gpu, monkeypatch):
    (few, less), (many, more) = (launched(monkeypatch, lora=lora, recompute=recompute, fewer=fewer) for fewer in (True, False))
    print(lora, recompute, few, many, less / more)
    assert few <= most < many - 40 and less < 0.6 * more


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "most"), [(False, 40), (True, 70)])
def test_a_compiled_layer_launches_at_most_40_kernels_and_moves_half_of_the_bytes(lora, most, compiles, monkeypatch):
    """All layers share one forward and one backward pass, each in the parts before, between and behind attention.

    With LoRA the first layer has its own, since its input needs no gradient. A model of this layer alone is subtracted.

    What is compiled and how often: test_compiled_layers_have_the_numbers_and_gradients_of_the_modules.
    """
    _, more = launched(monkeypatch, lora=lora, recompute=False, fewer=False)
    monkeypatch.setattr(inductor, "check_gap", lambda model, own: None)
    monkeypatch.setattr(hf_attention, "varlen_kernel", lambda: lambda q, k, v, *rest: torch.ops.stand_in.attend(q, k, v))
    first, both = Launches(), Launches()
    for layers, found in ((1, first), (2, both)) if lora else ((2, both),):
        model = made(layers, lora, False)
        model.attention_kernel = "varlen"
        with counting(monkeypatch, found):
            compiles(model, "inductor").evaluate(GROUPS).logp.sum().backward()
    print(both, first, more)
    kernels, calls = both.kernels - first.kernels, both.calls - first.calls
    assert kernels > 5 and calls > 15 and kernels + calls <= most
    assert 0 < both.bytes - first.bytes <= 0.5 * more


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "most"), [(False, 20), (True, 40)])
def test_a_compiled_layer_launches_at_most_40_kernels_in_a_recorded_step_too(lora, most, compiles, monkeypatch):
    """For four sequences, and half of the bytes of transformers' layer. Attention and the cache have kernels of their own."""

    def step(layers, counted, fewer=True, compiled=False):
        model = made(layers, lora, False, fewer)
        graphs = CudaGraphDecoding(model, Room(4, 64), record=lambda run: run)
        graphs.begin(SamplingParams(max_tokens=8))
        cache.prefill(model, graphs.cache, [(5, 6, 7)], torch.zeros(4, dtype=torch.long), None)
        with counted:
            if compiled:
                compiles(model, "inductor")
            graphs._step(graphs.params, 4, 64)

    def attend(self, layer, q, k, v, *given):
        return torch.ops.stand_in.attend(q, k, v).transpose(1, 2)

    monkeypatch.setattr(inductor, "check_gap", lambda model, own: None)
    monkeypatch.setattr(cache.Decode, "attend", attend)
    found, few, many = Launches(), Kernels(), Kernels()
    with torch.no_grad():
        step(2, few, fewer=False)
        step(4, many, fewer=False)
        step(4, counting(monkeypatch, found), compiled=True)
    own, bytes_ = (many.names.total() - few.names.total()) / 2, (many.bytes - few.bytes) / 2
    print(found, own, bytes_)
    assert found.kernels > 3 and found.calls > 5 and found.kernels + found.calls <= most < own - 20
    assert 0 < found.bytes <= 0.5 * bytes_


@pytest.fixture
def compiles(as_on_a_gpu, monkeypatch):
    """compiles(model, backend): compile its layers as on a GPU."""
    why = inductor._why_not

    def run(model, backend):
        monkeypatch.setattr(inductor, "_why_not", lambda one: why(one) if "GPU" not in why(one) else "")
        monkeypatch.setattr(inductor, "BACKEND", backend)
        torch._dynamo.reset()
        inductor.compile_layers(model)
        return model

    yield run
    torch._dynamo.reset()


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=SLOW)])
def test_compiled_layers_have_the_numbers_and_gradients_of_the_modules(lora, compiles):
    """In training and in sampling, where a recorded step reads the cache; one version serves all layers and lengths."""
    requests = [Request((5, 6, 7), (1, 2)), Request((9,), (3,))]
    found, graphs = [], []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for backend in ("", counted):
        model = made(4, lora, False, True, torch.float32)
        if backend:
            compiles(model, backend)
            assert model.compiled and not model.why_uncompiled
        logp = model.evaluate(GROUPS).logp
        before = len(graphs)
        model.evaluate(Groups([[3, 1]], [[[4, 2, 1, 7]]])).logp.sum().backward()
        written = EmbeddedSampler(model).sample(requests, SamplingParams(max_tokens=6))
        slopes = torch.autograd.grad((logp * logp.detach()).sum(), list(model.trainable().values()))
        found.append(([logp.detach(), *slopes], [c.ids for group in written for c in group]))
    (own, ids), (ours, others) = found
    for a, b in zip(ours, own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert ids == others and 0 < before <= 8 and len(graphs) < 4 * before
    copy = model.frozen_copy()
    assert copy.compiled and all(layer._compiled_call_impl is not None for layer in copy.network.model.layers)


def test_layers_that_compute_other_numbers_when_compiled_are_left_as_they_are(compiles):
    def wrong(graph, inputs):
        def run(*given):
            return [x + 1.0 if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in graph.forward(*given)]

        return run

    model = compiles(made(2, False, False, True, torch.float32), wrong)
    assert "outputs or gradients differ" in model.why_uncompiled and not model.compiled
    assert model.network.model.layers[0]._compiled_call_impl is None
    padded = made(2, False, False)
    padded.why_padded = "for a test"
    assert compiles(padded, "eager").why_uncompiled == "the model runs padded"
