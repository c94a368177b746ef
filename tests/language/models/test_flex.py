"""FlexAttention's mask against the packed layout that it stands for, in its plain form: this needs no GPU, its gradient does."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from packed_inputs import BRANCHES, GROUPS, ROWS, draw
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models import hf_attention, probe, tiny
from psigrad.language.models.attention import modified_attention
from psigrad.language.models.hf_attention import BLOCK, FlexLayout
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups, pack


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
    monkeypatch.setattr(
        hf_attention.FlexLayout, "tokens", property(lambda self: tuple(x * (i != lost) for i, x in enumerate(known(self))))
    )
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
    ("kind", "why"), [("qwen3", "the fused decoder has its own attention"), ("gpt2", "it does not run on cpu")]
)
def test_flex_is_refused_where_it_cannot_train(kind, why, tmp_path):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    tiny.model(kind, len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"attention is 'flex', and {why}.*; leave it at 'auto'"):
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
