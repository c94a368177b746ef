"""Layers that torch compiles: the kernels that they launch, and their numbers and gradients."""

from __future__ import annotations

import pytest
import torch
from inductor_counts import Launches, counting
from launches import GROUPS, Kernels, attend_at_once, launched, made

from psigrad.language.models.fused import inductor
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers import cache
from psigrad.language.rollout.samplers.cuda_graph import CudaGraphDecoding, Room
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "most"), [(False, 40), (True, 70)])
def test_a_compiled_layer_launches_at_most_40_kernels_and_moves_half_of_the_bytes(lora, most, compiles, monkeypatch):
    """All layers share one forward and one backward pass, each in the parts before, between and behind attention.

    With LoRA the first layer has its own, since its input needs no gradient. A model of this layer alone is subtracted.

    What is compiled and how often: test_compiled_layers_have_the_numbers_and_gradients_of_the_modules.
    """
    _, more = launched(monkeypatch, lora=lora, recompute=False, fewer=False)
    monkeypatch.setattr(inductor, "check_gap", lambda model, own: None)
    attend_at_once(monkeypatch)
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
