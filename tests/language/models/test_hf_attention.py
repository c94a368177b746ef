"""Attention without padding, by a kernel that runs on GPUs alone: its place is taken by an oracle that loops over the pieces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from packed_inputs import BRANCHES, GROUPS, ROWS, draw, oracle, pieces_of

from psigrad.errors import UserError
from psigrad.language.models import hf_attention, probe, tiny
from psigrad.language.models.attention import modified_attention
from psigrad.language.models.hf_attention import VarlenLayout, varlen_kernel
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups, Rows, pack

# Queries and keys of a tile of the kernel: a tile is computed where one of its pairs is seen.
TILE = (128, 64)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("inputs", [GROUPS, BRANCHES, ROWS], ids=["groups", "branches", "rows"])
def test_outputs_and_gradients_are_those_of_the_packed_layout(inputs, window):
    layout, found = pack(inputs).layout, []
    for one in (VarlenLayout(layout, oracle), layout):
        given = [x.requires_grad_() for x in draw(layout.rows, dtype=torch.float64)]
        out = one.attend(0, *given, 0.3, window)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        found.append([out, *(x.grad for x in given)])
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("spoil", [lambda i: i.roll(1), lambda i: i.flip(0)], ids=["moved", "reversed"])
def test_negative_control_other_copies_give_other_numbers(spoil, monkeypatch):
    known = VarlenLayout._copies.func
    layout = pack(BRANCHES).layout
    monkeypatch.setattr(VarlenLayout, "_copies", property(lambda self: (spoil(known(self)[0]), *known(self)[1:])))
    given = draw(layout.rows)
    assert not torch.allclose(VarlenLayout(layout, oracle).attend(0, *given, 0.3, None), layout.attend(0, *given, 0.3, None))


def test_gradients_of_copies_are_summed_in_float32():
    """257 copies of 1 are 257; bfloat16, which has 8 digits, adds them up to 256."""
    layout = pack(Groups([[1]], [[[1, 1]] * 256])).layout
    x = torch.ones(layout.rows, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    y = hf_attention._Copies.apply(x, *VarlenLayout(layout, oracle)._copies)
    (y.float() * torch.cat([torch.ones(1), torch.full((len(y) - 1,), 3.0)])[:, None, None]).sum().backward()
    assert x.grad[0].item() == torch.tensor(1.0 + 3 * 256).bfloat16().item() and set(x.grad[1:].flatten().tolist()) == {3.0}


def log_normal(seed: int, median: int, count: int) -> list[int]:
    return np.random.default_rng(seed).lognormal(np.log(median), 0.8, count).astype(int).clip(8, 8192).tolist()


def computed(inputs) -> tuple[int, int, int]:
    """Pairs that the kernel is given, those in its tiles, and those that are needed."""
    given = []

    def count(q, k, v, *rest):
        given.extend(pieces_of(q, k, *rest[:4]))
        return q

    layout = pack(inputs).layout
    q, k, v = (torch.zeros(1, 1, layout.rows, 1) for _ in range(3))
    VarlenLayout(layout, count).attend(0, q, k, v, 1.0, None)
    pairs = sum(n * m - n * (n - 1) // 2 for n, m in given)
    tiles = 0
    for n, m in given:
        for row in range(0, n, TILE[0]):
            last = min(row + TILE[0], n) + m - n  # keys that the tile's last query sees
            tiles += min(TILE[0], n - row) * -(-last // TILE[1]) * TILE[1]
    needed = 0
    for length, before in zip(layout.pieces.lengths.tolist(), layout.pieces.before.tolist(), strict=True):
        needed += sum(before + t + 1 for t in range(length))
    return pairs, tiles, needed


GROUPS_AT_SCALE = Groups(
    [[1] * n for n in log_normal(0, 300, 4)], [[[1] * n for n in log_normal(s, 1000, 8)] for s in range(1, 5)]
)
ROWS_AT_SCALE = Rows([[1] * n for n in log_normal(5, 1000, 24)], [[0] + [1] * (n - 1) for n in log_normal(5, 1000, 24)])


@pytest.mark.parametrize("inputs", [GROUPS_AT_SCALE, ROWS_AT_SCALE], ids=["groups", "rows"])
def test_no_more_scores_are_computed_than_are_needed(inputs):
    pairs, tiles, needed = computed(inputs)
    assert pairs == needed
    assert tiles <= 1.1 * needed


@pytest.mark.parametrize("inputs", [GROUPS_AT_SCALE, ROWS_AT_SCALE], ids=["groups", "rows"])
def test_negative_control_padding_computes_many_times_as_many(inputs):
    """What scaled_dot_product_attention is given: of each piece the longest."""
    layout = pack(inputs).layout
    (b, p), (n, length) = layout.prefix_rows.shape, layout.sequence_rows.shape
    assert b * p * p + n * length * (p + length) > 5 * computed(inputs)[2]


def test_a_model_attends_without_padding_where_a_kernel_is(monkeypatch):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer)
    own = model.evaluate(GROUPS).logp
    calls = []
    monkeypatch.setattr(hf_attention, "varlen_kernel", lambda: lambda *given: calls.append(1) or oracle(*given))
    model.attend("varlen")
    assert model.attention_kernel == "varlen" and model.frozen_copy().attention_kernel == "varlen"
    calls.clear()
    assert torch.allclose(model.evaluate(GROUPS).logp, own, atol=1e-5) and calls
    monkeypatch.setattr(hf_attention, "varlen_kernel", lambda: lambda *given: 1.1 * oracle(*given))
    model.attention_kernel = "sdpa"
    with pytest.raises(UserError, match=r"attention is 'varlen', and .*differ by .*leave it at 'auto'"):
        model.attend("varlen")
    assert model.attention_kernel == "sdpa"


def test_on_a_gpu_the_first_way_that_runs_is_taken_and_why_none_was(monkeypatch):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer)
    model.attend("auto")
    assert (model.attention_kernel, model.slow_reason) == ("sdpa", "") or "fused" in model.slow_reason  # a CPU pads
    cuda = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(type(model), "device", property(lambda self: cuda))
    broken = []

    def numbers(one):
        if one.attention_kernel in broken:
            raise RuntimeError(f"no {one.attention_kernel} here")
        return [torch.zeros(2)]

    monkeypatch.setattr(probe, "with_gradient", numbers)
    for more, taken in (([], "varlen"), (["varlen"], "flex"), (["flex"], "sdpa")):
        broken += more
        model.attention_kernel = "sdpa"
        model.attend("auto")
        assert model.attention_kernel == taken
    assert "no varlen here" in model.slow_reason and "no flex here" in model.slow_reason


def test_capped_scores_are_left_to_flex():
    layout = pack(GROUPS).layout
    with pytest.raises(ValueError, match="caps scores"):
        VarlenLayout(layout, oracle).attend(0, *draw(layout.rows), 0.3, None, modified_attention)


def test_torchs_kernel_is_called_as_it_wants_to_be():
    """On the meta device, where torch tells shapes and refuses what it does not know."""
    layout = pack(replace(GROUPS, starts=None)).layout
    given = [x.to("meta", torch.bfloat16) for x in draw(layout.rows)]
    ends = torch.zeros(3, dtype=torch.int32, device="meta")
    q, k, v = (x[0].transpose(0, 1) for x in given)
    assert varlen_kernel()(q, k, v, ends, ends, 4, 4, 0.3, None).shape == q.shape
    assert varlen_kernel()(q, k, v, ends, ends, 4, 4, 0.3, 7).shape == q.shape
