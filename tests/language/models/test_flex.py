"""FlexAttention's mask against the packed layout that it stands for, in its plain form: this needs no GPU, its gradient does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models import hf_attention, tiny
from psigrad.language.models.hf_attention import FlexLayout
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups, Rows, pack

GROUPS = Groups(
    prompts=((3, 1, 2), (2, 5, 4, 1, 3), (7,)), completions=(((4, 2, 1), (1,)), ((3, 3), (2, 1, 4, 5), ()), ((1, 2, 3, 4, 5),))
)
BRANCHES = replace(GROUPS, starts=((1, 3), (5, 2, 4), (1,)))
ROWS = Rows([[1, 2, 3, 4], [3, 4, 5, 6, 7], [8, 9]], [[0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1]])


def both(inputs, window):
    layout = pack(inputs).layout
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, layout.rows, 8, generator=generator) for heads in (4, 2, 2))
    return (x.attend(0, q, k, v, 0.3, window) for x in (FlexLayout(layout), layout))


@pytest.mark.parametrize("window", [None, 3])
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


def test_a_model_with_flex_gives_its_own_log_probs():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer)
    with torch.no_grad():
        own = model.evaluate(GROUPS).logp
        model.flex = True
        assert torch.allclose(model.evaluate(GROUPS).logp, own, atol=1e-5)
    assert model.frozen_copy().flex


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(("kind", "why"), [("qwen3", "the fused decoder has an attention"), ("gpt2", "it does not run on cpu")])
def test_flex_is_refused_where_it_cannot_train(kind, why, tmp_path):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    tiny.model(kind, len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"attention is 'flex', and {why}.*; leave it at 'sdpa'"):
        load_model(Model(path=str(tmp_path), attention="flex"), Run(device="cpu"), None)


def test_flex_is_refused_where_its_numbers_differ(monkeypatch):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer)
    own = type(model)._probe_with_gradient
    monkeypatch.setattr(
        type(model), "_probe_with_gradient", lambda self, learns: [x + self.flex for x in own(_plain(self), learns)]
    )
    with pytest.raises(UserError, match="its numbers differ by 1 from the model's own"):
        model.attend_by_flex()
    assert not model.flex


def _plain(model):
    from copy import copy

    twin = copy(model)
    twin.flex = False
    return twin
