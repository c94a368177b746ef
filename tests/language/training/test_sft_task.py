"""Label smoothing: a value by hand, and transformers' LabelSmoother on a model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from offline_tasks import step
from transformers.trainer_pt_utils import LabelSmoother

from psigrad.language.examples import Example
from psigrad.language.models import language_model
from psigrad.language.models.logprobs import token_stats
from psigrad.language.models.stats import TokenStatsRequest
from psigrad.language.training.offline.sft_task import SFTTask, bundle

TEXTS = [Example([5, 6, 7, 8, 9, 3], [False] * 3 + [True] * 3, False), Example([1, 2, 3, 4], [False, True, False, True], False)]


def test_the_mean_over_the_vocabulary_by_hand():
    hidden = torch.tensor([[0.5, 0.25, 0.25]]).log()
    stats = token_stats(hidden, torch.tensor([0]), lambda h: h, 3, TokenStatsRequest(mean_logp=True))
    assert float(stats.mean_logp) == pytest.approx(-(math.log(2) + 2 * math.log(4)) / 3)
    # with ε = 0.3: 0.7 · ln 2 + 0.3 · (5 ln 2) / 3 = 1.2 ln 2
    assert -0.7 * float(stats.logp) - 0.3 * float(stats.mean_logp) == pytest.approx(1.2 * math.log(2))


def test_the_loss_and_its_gradient_are_transformers(job):
    model = language_model.load(str(job / "base"))
    parameters = list(model.trainable().values())

    def ours(epsilon: float, budget: int) -> tuple[float, list[torch.Tensor]]:
        total, shares = 0.0, SFTTask(model, [[text] for text in TEXTS], label_smoothing=epsilon).shares([0, 1], budget)
        for share in shares:
            loss = share()
            loss.value.backward()
            total += float(loss.terms["loss"])
        gradient = [p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
        return total, gradient

    ids, labels = torch.zeros(2, 6, dtype=torch.long), torch.full((2, 6), -100)
    for row, text in enumerate(TEXTS):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        labels[row, : len(text.ids)] = torch.where(torch.tensor(text.mask), torch.tensor(text.ids), -100)
    attention = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    output = model.network(input_ids=ids, attention_mask=attention)
    expected = LabelSmoother(epsilon=0.2)(output, labels, shift_labels=True)
    expected.backward()
    theirs = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    for budget in (1000, 1):
        value, gradient = ours(0.2, budget)
        assert value == pytest.approx(float(expected), rel=1e-5)
        torch.testing.assert_close(gradient, theirs, atol=1e-5, rtol=1e-3)
    assert abs(ours(0.0, 1000)[0] - float(expected)) > 1e-3


def test_turns_in_contexts_of_their_own_share_what_they_begin_with(model):
    """A row of several texts costs their common beginning once, and has the loss and gradients of the texts one by one."""
    texts = [
        Example([5, 6, 7, 8, 9, 3], [False] * 3 + [True] * 3, False),
        Example([5, 6, 7, 9, 4, 8, 8, 3], [False] * 5 + [True] * 3, False),
        Example([5, 6, 7, 9, 4, 8, 9, 2, 7, 3], [False] * 8 + [True] * 2, False),
    ]
    alone = Example([1, 2, 3, 4], [False, True, False, True], False)

    together = SFTTask(model, [texts, [alone]])
    # the last one's context of eight tokens, and behind three, five and eight of them 3 + 3 + 2
    assert [one.starts for one in bundle(texts)] == [[3, 5, 8]] and together.tokens([0]) == 16 and together.tokens([1]) == 4
    # a fourth that begins otherwise stands alone: 16 + 4
    assert [one.starts for one in bundle([*texts, alone])] == [[3, 5, 8], [1]]
    # one that goes on from the first: behind its own six 6 + 3 + 5 + 7 + 1 = 22, and alone beside the others 16 + 7
    fourth = Example([*texts[0].ids, 4], [False] * 6 + [True], False)
    assert [one.starts for one in bundle([*texts, fourth])] == [[3, 3, 3, 6]]
    assert len(bundle([*texts, Example([*fourth.ids, 4, 4, 4, 4], [*fourth.mask, *[True] * 4], False)])) == 1
    parameters = list(model.trainable().values())
    apart = step(SFTTask(model, [[text] for text in texts] + [[alone]]), parameters, 1)
    for budget in (1000, 1):
        total, terms, gradient = step(together, parameters, budget)
        assert total == pytest.approx(apart[0], abs=1e-5) and terms == pytest.approx(apart[1], abs=1e-5)
        torch.testing.assert_close(gradient, apart[2], atol=1e-5, rtol=1e-4)
    # the control: what may not be shared is what is trained
    wrong = [replace(text, mask=[False, True, *text.mask[2:]]) for text in texts]
    assert [one.starts for one in bundle(wrong)] == [[1, 1, 1]]
