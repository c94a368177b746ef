"""Attention by kernels that run on GPUs alone: an oracle stands for the one without padding, and FlexAttention is plain here."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from packed_inputs import BRANCHES, GROUPS, ROWS, draw, oracle, pieces_of
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models import hf_attention, probe, tiny
from psigrad.language.models.attention import modified_attention
from psigrad.language.models.hf_attention import BLOCK, FlexLayout, VarlenLayout, varlen_kernel
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
    with pytest.raises(UserError, match=r"attention is 'varlen', but .*differ by .*set it to 'auto'"):
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


def both(inputs, window):
    layout = pack(inputs).layout
    q, k, v = draw(layout.rows)
    return (x.attend(0, q, k, v, 0.3, window) for x in (FlexLayout(layout), layout))


@pytest.mark.parametrize("window", [3, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inputs", [GROUPS, BRANCHES, ROWS], ids=["groups", "branches", "rows"])
def test_everybody_sees_whom_the_packed_layout_lets_them_see(inputs, window):
    ours, theirs = both(inputs, window)
    assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("lost", range(4), ids=["prompt", "completion", "position", "begin"])
def test_negative_control_each_number_of_a_token_counts(lost, monkeypatch):
    known = FlexLayout.tokens.func
    monkeypatch.setattr(FlexLayout, "tokens", property(lambda self: tuple(x * (i != lost) for i, x in enumerate(known(self)))))
    ours, theirs = both(BRANCHES, 3)
    assert float((ours - theirs).abs().max()) > 1e-2


@pytest.mark.parametrize("given", [{"softcap": 0.5}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}], ids=["cap", "sinks"])
def test_scores_that_are_capped_or_have_a_sink_beside_them(given):
    how = functools.partial(modified_attention, **{"softcap": None, "sinks": None, **given})
    layout = pack(BRANCHES).layout
    q, k, v = draw(layout.rows)
    ours, theirs = (x.attend(0, q, k, v, 0.3, None, how) for x in (FlexLayout(layout), layout))
    assert torch.allclose(ours, theirs, atol=1e-6)
    plain = layout.attend(0, q, k, v, 0.3, None)
    assert not torch.allclose(ours, plain, atol=1e-2)


def lengths_of(count: int, seed: int) -> list[int]:
    """Log-normal, a median of 300."""
    return np.random.default_rng(seed).lognormal(np.log(300), 0.8, count).astype(int).tolist()


@pytest.mark.parametrize("window", [None, 100])
def test_a_mask_is_of_blocks_and_names_those_that_torch_would_find(window):
    completions = [[[1] * n for n in lengths_of(4, seed)] for seed in (0, 1)]
    layout = FlexLayout(pack(Groups([[1] * 200, [1] * 70], completions)).layout)
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    with Watch():
        mask = layout._mask(window)
    rows = layout.packed.rows
    assert max(sizes) <= max(rows, (rows // BLOCK + 2) ** 2)
    theirs = create_block_mask(mask.mask_mod, None, None, rows, rows, device="cpu")
    assert torch.equal(mask.to_dense(), theirs.to_dense())
    some, whole = layout.blocks(window)
    seen = torch.zeros(len(some) * BLOCK, len(some) * BLOCK, dtype=torch.bool)
    i, j = torch.arange(rows)[:, None], torch.arange(rows)[None]
    seen[:rows, :rows] = mask.mask_mod(None, None, i, j)
    squares = seen.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2)
    assert squares[torch.from_numpy(whole)].all() and (whole.any() or window)


def test_a_model_with_flex_gives_its_own_log_probs():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer)
    with torch.no_grad():
        own = model.evaluate(GROUPS).logp
        model.attention_kernel = "flex"
        assert torch.allclose(model.evaluate(GROUPS).logp, own, atol=1e-5)
    assert model.frozen_copy().attention_kernel == "flex"


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(
    ("kind", "why"), [("qwen3", "the fused decoder has its own attention"), ("gpt2", "it does not work on cpu")]
)
def test_flex_is_refused_where_it_cannot_train(kind, why, tmp_path):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    tiny.model(kind, len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"attention is 'flex', but {why}.*; set it to 'auto'"):
        load_model(Model(path=str(tmp_path), attention="flex"), Run(device="cpu"), None)


def test_flex_is_refused_where_its_numbers_differ(monkeypatch):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer)
    own = probe.with_gradient
    monkeypatch.setattr(probe, "with_gradient", lambda one: [x + (one.attention_kernel == "flex") for x in own(_plain(one))])
    with pytest.raises(UserError, match="the outputs or gradients differ by 1 from those of sdpa"):
        model.attend("flex")
    assert model.attention_kernel == "sdpa"


def _plain(model):
    from copy import copy

    twin = copy(model)
    twin.attention_kernel = "sdpa"
    return twin
