"""Preference tasks: a reference comes once and from the right model, a mismatch from another prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import slow
from offline_tasks import made_pairs, read, task_of
from tiny_jobs import preference_config

from psigrad.config import Data, Evaluation, Optim
from psigrad.language.data import pairs
from psigrad.language.data.dataset_rows import validate
from psigrad.language.examples import Answer, LabelledAnswer
from psigrad.language.models import language_model
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Rows
from psigrad.language.recipes import preference
from psigrad.language.training.offline import preference_task as task_module
from psigrad.language.training.offline.preference_task import answer_logps, mismatch, reference_logps

pytestmark = pytest.mark.usefixtures("rewards_here")


def test_answers_that_share_a_prompt_have_the_log_probs_of_texts_that_do_not(job, model):
    made = made_pairs(job, model.tokenizer, 3)
    logp, tokens = answer_logps(model, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made])
    for n, (prompt, answer) in enumerate((p.prompt, a) for p in made for a in (p.chosen, p.rejected)):
        alone = model.evaluate(Rows([[*prompt, *answer.ids]], [[False] * len(prompt) + answer.mask])).logp.sum()
        assert float(logp[n].detach()) == pytest.approx(float(alone.detach()), abs=1e-4) and tokens[n] == sum(answer.mask)


def test_at_the_start_policy_is_reference_and_dpo_is_log_2(job, model):
    task, _ = task_of("dpo", job, model)
    figures = task.held_out(100)
    assert figures["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert figures["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert figures["rewards/accuracies/pairs"] == "h" * len(task), "every pair is a tie"
    moved = [(0.0, -9.0 * (n % 3)) for n in range(len(task))]  # the reference finds the rejected answers of two in three unlikely
    shifted = replace(task, reference=[(a + x, b + y) for (a, b), (x, y) in zip(task.reference, moved, strict=True)])
    marks = shifted.held_out(40)["rewards/accuracies/pairs"]
    assert marks == "".join("h00"[n % 3] for n in range(len(task))), "in the order of the rows, however they are packed"


def test_a_lora_models_reference_is_the_model_without_its_adapter(job):
    base, tuned = language_model.load(str(job / "base")), language_model.load(str(job / "base"), lora=Lora(4))
    with torch.no_grad():
        for p in tuned.trainable().values():
            p += 0.1
    made = made_pairs(job, base.tokenizer, 3)
    prompts, answers = [p.prompt for p in made], [[p.chosen, p.rejected] for p in made]
    assert torch.allclose(
        torch.tensor(reference_logps(tuned, prompts, answers, 50)),
        torch.tensor(reference_logps(base, prompts, answers, 50)),
        atol=1e-5,
    )
    moved, _ = answer_logps(tuned, prompts, answers)
    assert not torch.allclose(moved.detach(), answer_logps(base, prompts, answers)[0].detach(), atol=1e-2)


def test_mismatched_answers_are_another_prompts(job, model):
    rows = [pairs.encode_labelled(model.tokenizer, validate(r, "unpaired-preference", "x")) for r in read(job, "judged")]
    others = mismatch(rows)
    assert all(other in [r.answer for r in rows if r.prompt != row.prompt] for row, other in zip(rows, others, strict=True))
    assert mismatch(rows[:1]) == [rows[0].answer] and mismatch([]) == []


def test_the_mismatched_answer_is_that_of_the_last_row_before_with_another_prompt():
    """By hand: a0 a1 b2 b3 a4, and before a0 stand a4, b3."""
    rows = [LabelledAnswer([ord(letter)], Answer([place], [True]), True) for place, letter in enumerate("aabba")]
    assert [other.ids for other in mismatch(rows)] == [[3], [3], [1], [1], [3]]


def test_mismatching_a_thousand_rows_of_one_prompt_asks_for_each_a_few_times():
    asked = []

    class Counting(list):
        def __getitem__(self, place):
            asked.append(place)
            return super().__getitem__(place)

    rows = Counting(LabelledAnswer([1], Answer([place], [True]), True) for place in range(1000))
    assert [other.ids for other in mismatch(rows)] == [[place] for place in range(1000)]
    assert len(asked) <= 10 * len(rows)


@pytest.mark.parametrize("loss", ["dpo", "kto", *slow("ipo", "simpo", "orpo")])
def test_every_command_of_the_family_prefers_what_it_was_shown(loss, job, tmp_path):
    config = preference_config(job, tmp_path / "run", loss=loss, max_steps=40, save_steps=0)
    config = replace(config, batch_size=16, optim=Optim(learning_rate=3e-3), evaluation=Evaluation(eval_prompts=8))
    # held out would be all rows of a letter, about which nothing is learned
    config = replace(config, data=replace(config.data, eval_dataset=config.data.dataset))
    result = preference.run(config)
    key = "eval/rewards/margins"
    if loss == "orpo":  # at its lambda of 0.1 the likelihood of the chosen comes first
        assert result.after["eval/nll_loss"] < result.before["eval/nll_loss"] - 1
        return
    assert result.after[key] > result.before[key] + 0.05
    if loss != "kto":
        assert result.after["eval/rewards/accuracies"] > 0.8


def test_the_reference_is_computed_once_and_found_by_content(job, tmp_path, monkeypatch):
    monkeypatch.setenv("PSIGRAD_CACHE", str(tmp_path / "cache"))
    calls = []
    monkeypatch.setattr(preference, "reference_logps", lambda *a: calls.append(1) or task_module.reference_logps(*a))
    config = replace(preference_config(job, tmp_path / "one", max_steps=2), cache_reference=True)
    first = preference.run(config)
    assert len(calls) == 2, "training and held-out rows"
    second = preference.run(replace(config, run=replace(config.run, output_dir=str(tmp_path / "two"))))
    assert len(calls) == 2 and first.after == second.after
    preference.run(
        replace(config, data=Data(dataset=read(job, "pairs")[:20]), run=replace(config.run, output_dir=str(tmp_path / "three")))
    )
    assert len(calls) > 2, "negative control: other rows are other content"
    for path in (tmp_path / "cache" / "reference").iterdir():
        path.write_bytes(b"broken")
    third = preference.run(replace(config, run=replace(config.run, output_dir=str(tmp_path / "four"))))
    assert third.after == first.after
