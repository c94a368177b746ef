"""Offline tasks: any split is the same step, references come once and from the right model, and learning happens."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import slow
from in_memory import advance, log_of
from tiny_jobs import preference_config, reward_config
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from psigrad import cli
from psigrad.config import Data, Evaluation, Optim, RewardConfig, Run, SFTConfig
from psigrad.config.algorithms import resolve_loss
from psigrad.errors import UserError
from psigrad.language.data import pairs
from psigrad.language.data.dataset_rows import validate
from psigrad.language.examples import Answer, Example, LabelledAnswer
from psigrad.language.models import language_model, scalar_model
from psigrad.language.models.lora import DropoutMasks, Lora
from psigrad.language.models.packing import Rows
from psigrad.language.recipes import preference, reward
from psigrad.language.rollout.types import State
from psigrad.language.training.offline import offline
from psigrad.language.training.offline import preference_task as task_module
from psigrad.language.training.offline.offline import OfflineRun
from psigrad.language.training.offline.preference_task import KTOTask, PreferenceTask, answer_logps, mismatch, reference_logps
from psigrad.language.training.offline.reward_task import ProcessRewardTask, RewardTask
from psigrad.language.training.offline.sft_task import SFTTask, bundle
from psigrad.objective import Loss
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES
from psigrad.objective.preferences.reward_model import BradleyTerry
from psigrad.optim import Optimizer

pytestmark = pytest.mark.usefixtures("rewards_here")


@pytest.fixture(scope="module")
def model(job):
    return language_model.load(str(job / "base"))


def read(job, name: str) -> list[dict]:
    return [json.loads(line) for line in (job / f"{name}.jsonl").read_text().splitlines()]


def made_pairs(job, tokenizer, n: int = 7):
    return [pairs.encode_pair(tokenizer, validate(row, "preference", "x")) for row in read(job, "pairs")[:n]]


def step(task, parameters, budget: int):
    """Loss, terms and gradient of one step on all rows."""
    for p in parameters:
        p.grad = None
    total, terms = 0.0, {}
    for share in task.shares(range(len(task)), budget):
        loss = share()
        loss.value.backward()
        total += float(loss.value.detach())
        terms = {name: terms.get(name, 0.0) + float(value) for name, value in loss.terms.items()}
    return total, terms, torch.cat([p.grad.flatten() for p in parameters])


def task_of(kind: str, job, model, apart: float = 0.0):
    """The task and who learns. The reference of a pair lies `apart` from the policy: where the two are one, rounding decides
    which answer it prefers.
    """
    if kind == "reward":
        scalar = scalar_model.load(str(job / "base"))
        return RewardTask(scalar, BradleyTerry(0.01), made_pairs(job, scalar.tokenizer)), scalar
    if kind == "process":
        scalar = scalar_model.load(str(job / "base"))
        rows = [
            {"prompt": "say a:", "completions": ["a b", "c", "d e f"][: k + 1], "labels": [1, 0, 0.5][: k + 1]} for k in range(3)
        ]
        return ProcessRewardTask(
            scalar, [pairs.encode_steps(scalar.tokenizer, validate(r, "stepwise", "x")) for r in rows]
        ), scalar
    if kind == "kto":
        rows = [pairs.encode_labelled(model.tokenizer, validate(r, "unpaired-preference", "x")) for r in read(job, "judged")[:7]]
        answers = [[row.answer, other] for row, other in zip(rows, mismatch(rows), strict=True)]
        return KTOTask(model, resolve_loss("kto"), rows, reference_logps(model, [r.prompt for r in rows], answers, 64)), model
    made = made_pairs(job, model.tokenizer)
    known = reference_logps(model, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 64)
    known = [[chosen - apart * (-1) ** i, rejected] for i, (chosen, rejected) in enumerate(known)]
    return PreferenceTask(model, resolve_loss(kind), made, known), model


@pytest.mark.parametrize("kind", [*LOSSES, "reward", "process"])
def test_any_split_into_forward_passes_is_the_same_step(kind, job, model):
    task, learner = task_of(kind, job, model, apart=0.1)
    parameters = list(learner.trainable().values())
    whole = step(task, parameters, 1 << 20)
    assert float(whole[2].abs().max()) > 1e-6
    for budget in (12, 30):
        part = step(task, parameters, budget)
        assert part[0] == pytest.approx(whole[0], abs=1e-5)
        assert part[1] == pytest.approx(whole[1], abs=1e-4)
        assert float((part[2] - whole[2]).abs().max()) < 1e-4 * float(whole[2].abs().max())


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


def trained_reward_model(job, tmp_path, **changes):
    config = reward_config(job, tmp_path / "rm", max_steps=60, save_steps=0)
    return reward.run(replace(config, batch_size=16, optim=Optim(learning_rate=3e-3), **changes))


def test_a_reward_model_learns_and_opens_in_transformers_with_the_same_scores(job, tmp_path):
    result = trained_reward_model(job, tmp_path)
    assert result.before["eval/accuracy"] < 0.8 < 0.9 < result.after["eval/accuracy"]
    assert result.after["eval/accuracy/low"] < result.after["eval/accuracy"] <= result.after["eval/accuracy/high"] + 1e-9
    assert "eval/calibration_error" in result.after
    rows = [{"prompt": r["prompt"], "completion": r[k]} for r in read(job, "pairs")[:3] for k in ("chosen", "rejected")]
    ours = [row["reward"] for row in reward.score_rows(str(result.model), rows)]
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    peer = AutoModelForSequenceClassification.from_pretrained(result.model)
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
    theirs = peer(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")).logits[:, 0]
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)
    assert all(a > b for a, b in zip(ours[0::2], ours[1::2], strict=True))


def test_a_process_reward_model_learns_which_steps_are_right(job, tmp_path):
    rows = [
        {"prompt": r["prompt"], "completions": [r["chosen"], r["rejected"]], "labels": [True, False]} for r in read(job, "pairs")
    ]
    config = reward_config(job, tmp_path / "prm", max_steps=60, save_steps=0)
    config = replace(config, process=True, data=Data(dataset=rows), batch_size=16, optim=Optim(learning_rate=3e-3))
    result = reward.run(config)
    assert result.before["eval/accuracy"] < 0.8 < result.after["eval/accuracy"]


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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["dpo", "--model", "{base}", "--dataset", "{judged}"], "chosen"),
        (["kto", "--model", "{base}", "--dataset", "{train}"], "completion"),
        (["dpo", "--model", "{base}", "--dataset", "{pairs}", "--max-length", "2"], "more than max_length 2"),
        (["simpo", "--model", "{base}", "--dataset", "{pairs}", "--reference", "{base}"], "uses none"),
        (["dpo", "--model", "{base}", "--dataset", "{pairs}", "loss.beta=0"], "above 0"),
        (["ipo", "--model", "{base}", "--dataset", "{pairs}", "loss=dpo"], "psigrad dpo"),
        (["reward", "--dataset", "{pairs}"], "No model was given"),
        (["reward", "--model", "{base}", "--dataset", "{train}"], "chosen"),
        (["score", "--model", "{base}", "--dataset", "{train}"], "without a trained scalar head"),
        (["score", "--dataset", "{train}"], "No reward model was given"),
    ],
)
def test_a_users_mistake_is_one_sentence(command, said, job, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {name: job / f"{name}.jsonl" for name in ("train", "pairs", "judged")} | {"base": job / "base"}
    arguments = [part.format(**named) for part in command]
    if "--eval-prompts" not in arguments and command[0] != "score":
        arguments += ["--eval-prompts", "4"]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error and error.startswith("psigrad: ")


def test_score_prints_one_number_per_row_or_writes_them(job, tmp_path, capsys):
    result = trained_reward_model(job, tmp_path)
    assert cli.main(["score", "--model", str(result.model), "--dataset", str(job / "train.jsonl")]) == 0
    printed = capsys.readouterr().out.split()
    assert len(printed) == 32 and all(float(x) for x in printed)
    output = tmp_path / "scores.txt"
    assert cli.main(["score", "--model", str(result.model), "--dataset", str(job / "train.jsonl"), "--output", str(output)]) == 0
    assert output.read_text().split() == printed
    rows = tmp_path / "scored.jsonl"
    assert cli.main(["score", "--model", str(result.model), "--dataset", str(job / "train.jsonl"), "--output", str(rows)]) == 0
    scored = [json.loads(line) for line in rows.read_text().splitlines()]
    given = [json.loads(line) for line in (job / "train.jsonl").read_text().splitlines()]
    assert [f"{row['reward']:.6g}" for row in scored] == printed
    assert [(row["prompt"], row["completion"]) for row in scored] == [(row["prompt"], row["completion"]) for row in given]


def test_rows_that_are_too_long_are_counted_in_the_events(job, tmp_path):
    rows = [*read(job, "pairs"), {"prompt": "say " + "a " * 40, "chosen": " a", "rejected": " b"}]
    config = replace(reward_config(job, tmp_path / "run", max_steps=1), data=Data(dataset=rows), max_length=20)
    config = replace(config, evaluation=Evaluation(eval_prompts=0))
    reward.run(config)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {"longer_than_max_length": 1, "kept": 40}.items() <= next(e for e in events if e["kind"] == "rows_left_out").items()


def test_a_process_reward_model_of_a_model_without_tokens_is_refused(job, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(job / "base")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    config = reward_config(job, tmp_path / "run")
    config = replace(config, process=True, model=replace(config.model, path=str(tmp_path / "bert")))
    with pytest.raises(UserError, match="no score for each token"):
        reward.run(config)
    assert isinstance(config, RewardConfig) and not os.path.exists(tmp_path / "run")


class Asked:
    """A task that remembers which rows each step asked for."""

    name = "rows"
    model = SimpleNamespace(load_balancing=None, dropout_masks=DropoutMasks())

    def __init__(self, weight):
        self.weight, self.asked = weight, []

    def __len__(self):
        return 6

    def tokens(self, rows):
        return len(rows)

    def shares(self, rows, budget, ranks=1):
        self.asked.append(list(rows))
        return [lambda: Loss((self.weight * len(rows)).sum(), {"loss": torch.tensor(1.0)})]


def test_three_steps_of_two_rows_are_an_epoch_of_six():
    weight = torch.nn.Parameter(torch.zeros(1))
    task, optim = Asked(weight), Optim(learning_rate=0.1)
    run = OfflineRun(SFTConfig(batch_size=2, optim=optim), task, None, Optimizer({"w": weight}, optim), 6)
    state = State()
    for _ in range(6):
        state = advance(run, state, offline.step)
    first, second = task.asked[:3], task.asked[3:]
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == [*range(6)] and first != second
    assert [row["epoch"] for row in log_of(run).rows] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    assert Run(num_train_epochs=2).steps(10, 4) == 5, "every step takes four rows, as docs/porting.md says"


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
