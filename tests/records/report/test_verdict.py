"""The verdict on paired evaluations: the change by hand, what is too little to judge, and what hardly moved."""

from __future__ import annotations

import json

import pytest

from psigrad.intervals import mean_interval
from psigrad.records.read import load
from psigrad.records.report import card
from psigrad.records.report.verdict import verdict


def judged(folder, before, after, *, damage=0.0, answers=None, lost=0, **figures):
    """The verdict of a run whose held-out prompts had these rewards, each the list of a prompt's completions."""
    rows = []
    for step, values in ((0, before), (9, after)):
        means = [sum(own) / len(own) for own in values]
        low, high = mean_interval(means)
        rows.append({"step": step, "eval/m/mean": sum(means) / len(means) + damage, "eval/m/low": low, "eval/m/high": high})
        with (folder / "rollouts.jsonl").open("a") as stream:
            for i, own in enumerate(values[: len(values) - lost]):
                for k, reward in enumerate(own):
                    text = answers[step][i] if answers else f"{i} {k} {step}"
                    row = {"step": step, "kind": "eval", "row": i, "k": k, "completion": text, "reward": reward}
                    stream.write(json.dumps(row) + "\n")
    rows[-1] |= figures
    (folder / "config.json").write_text('{"recipe": "online"}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return verdict(load(folder))


def single(ones, of):
    return [[1.0]] * ones + [[0.0]] * (of - ones)


# Of 50 prompts, 20 right before and k turned one way: s²(d) = (|k| − k²/50)/49, and the change is k/50 ± 1.96·s/√50.
@pytest.mark.parametrize(
    ("turned", "word", "change"),
    [
        (4, "Learned", "+0.08 [+0.00404, +0.156]"),
        (3, "No clear change", "+0.06 [-0.0065, +0.126]"),
        (-4, "Got worse", "-0.08 [-0.156, -0.00404]"),
        (0, "No clear change", "0 [-0.06, +0.06]"),
    ],
)
def test_the_change_is_that_of_the_same_prompts(tmp_path, turned, word, change):
    found = judged(tmp_path, single(20, 50), single(20 + turned, 50))
    assert found.judgement == word and f"; change {change} over 50 prompts" in found.evidence
    assert str(found) in card.text(tmp_path), "the model's card says what the report says"


def test_negative_control_independent_samples_would_not_tell(tmp_path):
    """The same means, where the completions recorded are not those of the evaluation, or some are lost."""
    for place, how in (("other", {"damage": 0.01}), ("lost", {"lost": 1})):
        (folder := tmp_path / place).mkdir()
        found = judged(folder, single(20, 50), single(24, 50), **how)
        assert found.judgement == "No clear change" and "change +" not in found.evidence


def test_several_completions_of_a_prompt_are_one_value(tmp_path):
    """16 prompts of 4: 8 gain a quarter, 4 a half, 4 nothing: 0.25 ± 2.131·√((4 + 4)·0.0625/15)/4 = ± 0.0973."""
    before = [[1.0, 0.0, 0.0, 0.0]] * 8 + [[1.0, 1.0, 0.0, 0.0]] * 8
    after = [[1.0, 1.0, 0.0, 0.0]] * 8 + [[1.0, 1.0, 1.0, 1.0]] * 4 + before[12:]
    assert "change +0.25 [+0.153, +0.347] over 16 prompts" in judged(tmp_path, before, after).evidence


def test_fewer_than_ten_common_prompts_are_too_few(tmp_path):
    assert judged(tmp_path, single(0, 9), single(9, 9)).judgement == "Too few to judge"
    (folder := tmp_path / "ten").mkdir()
    assert judged(folder, single(0, 10), single(10, 10)).judgement == "Learned"


@pytest.mark.parametrize(
    ("same", "kl", "said"),
    [
        (18, {}, "the policy hardly moved: 18 of 20 held-out completions are unchanged; raise the learning rate"),
        (0, {"eval/kl": 0.0098}, "the policy hardly moved: at this KL no accuracy can change by more than 0.07; raise"),
        (17, {"eval/kl": 0.011}, ""),
    ],
)
def test_a_policy_that_hardly_moved_is_said_to(tmp_path, same, kl, said):
    before = [f"answer {i}" for i in range(20)]
    answers = {0: before, 9: [*before[:same], *(f"another {i}" for i in range(20 - same))]}
    found = judged(tmp_path, single(10, 20), single(11, 20), answers=answers, **kl)
    assert found.judgement == "No clear change" and (said in found.evidence if said else "hardly" not in found.evidence)
    (folder := tmp_path / "learned").mkdir()
    assert "hardly" not in judged(folder, single(0, 20), single(20, 20), answers=answers, **kl).evidence


def test_a_loss_that_stayed_is_said_to(tmp_path):
    rows = [{"step": step, "eval/loss": loss} for step, loss in ((0, 2.3104), (9, 2.3096))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Trained: held-out loss 2.31 → 2.31; the model hardly moved" in str(verdict(load(tmp_path)))
