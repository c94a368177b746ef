"""The best checkpoint and early stopping: by hand, in runs whose best evaluation is not the last, and over a kill."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lone_runs import Heard
from resuming import digest
from safetensors.torch import load_file
from tiny_jobs import forked, online_config, reward_config, sft_config

from psigrad.config import Evaluation
from psigrad.errors import UserError
from psigrad.language.recipes import finish, online, reward, sft
from psigrad.records.read import load
from psigrad.records.report import card
from psigrad.runs import callbacks
from psigrad.runs.best import Best
from psigrad.runs.callbacks import Control
from psigrad.step import RunState

pytestmark = pytest.mark.usefixtures("rewards_here")


def told(values: list[float | dict | None], name: str = "loss", **settings) -> tuple[Best, list[int], int]:
    """The callback after evaluations of steps 1, 2, …; those that it wanted saved; the step that it ended the run at. A value of
    None is an evaluation that lacks the figure.
    """
    best, saved, ended = Best(Evaluation(eval_steps=1, load_best_model_at_end=True, **settings)), [], 0
    for step, value in enumerate(values, start=1):
        control = Control()
        row = value if isinstance(value, dict) else {"eval/prompts": 4} | ({} if value is None else {f"eval/{name}": value})
        best.on_evaluate(None, RunState(step), control, row)
        saved += [step] if control.should_save else []
        ended = ended or (step if control.should_training_stop else 0)
    return best, saved, ended


def test_the_best_and_the_patience_by_hand():
    best, saved, ended = told([3.0, 2.0, 2.5, 1.9, 1.95, 2.0], early_stopping_patience=2)
    assert (best.step, best.value, saved, ended) == (4, 1.9, [1, 2, 4], 6)
    # by 0.1 and not by more: step 4 is the best and counts against the patience all the same
    best, saved, ended = told([3.0, 2.0, 2.5, 1.9], early_stopping_patience=2, early_stopping_threshold=0.2)
    assert (best.step, ended) == (4, 4)
    assert told([0.1, 0.3, 0.2], name="exact", metric_for_best_model="eval_exact")[0].step == 2
    assert told([0.1, 0.3, 0.2], name="exact", metric_for_best_model="exact", greater_is_better=False)[0].step == 1
    assert told([1.0, 1.0, 1.0])[1] == [1], "an equal evaluation is no better"
    with pytest.raises(UserError, match=r"metric_for_best_model is 'exakt'.*exact"):
        told([0.1], name="exact", metric_for_best_model="exakt")


@pytest.mark.parametrize("metric", ["", "loss"])
def test_an_evaluation_without_a_finite_figure_is_no_better_and_ends_no_run(metric):
    nan = float("nan")
    best, saved, ended = told([nan, 3.0, None, 2.0, "NaN", None], early_stopping_patience=2, metric_for_best_model=metric)
    assert (best.step, best.value, saved, ended) == (4, 2.0, [2, 4], 6)
    assert told([nan, 3.0, 2.0, 1.0], early_stopping_patience=3, metric_for_best_model=metric)[2] == 0
    unknown = told([nan, None], metric_for_best_model=metric)[0]
    assert unknown.step == 0 and unknown.state_dict()["value"] is None


def test_what_no_evaluation_has_had_is_refused():
    before = {"eval/exact/mean": 0.5}
    best = Best(Evaluation(metric_for_best_model="exact"))
    best.on_evaluate(None, RunState(), Control(), before)
    best.on_evaluate(None, RunState(1), Control(), {"eval/unscored": 4})  # a judge that is down
    for metric in ("exact", ""):
        with pytest.raises(UserError, match=f"metric_for_best_model is '{metric}'.*it has none"):
            told([{}], metric_for_best_model=metric)


def test_evaluations_are_compared_by_one_figure_also_where_one_lacks_it():
    """An accuracy of 0.2, a judge that is down beside a loss of 0.1, an accuracy of 0.3."""
    rows = [{"eval/exact/mean": 0.2, "eval/loss": 1.0}, {"eval/loss": 0.1}, {"eval/exact/mean": 0.3, "eval/loss": 0.9}]
    best, saved, _ = told(rows)
    assert (best.step, best.value, saved) == (3, 0.3, [1, 3])
    again = Best(best.settings)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    again.on_evaluate(None, RunState(4), Control(), {"eval/loss": 0.0})
    assert (again.step, again.value, again.waited) == (3, 0.3, 1), "over a stop too"


def test_a_best_that_is_not_there_is_told():
    journal = Heard()
    for values in ([3.0, 2.0], [float("nan")]):
        journal.callbacks.callbacks = [told(values)[0]]
        assert finish._best_of(None, journal, "last", None) == "last"
    gone = "The last weights are kept: the checkpoint of step 2, whose evaluation was the best, is gone."
    assert journal.said == [
        ("kept_last", gone, {"best": 2}),
        ("kept_last", "The last weights are kept: no evaluation gave a value of the metric.", {"best": 0}),
    ]


def test_the_model_before_its_first_step_is_no_candidate():
    best = Best(Evaluation(load_best_model_at_end=True))
    best.on_evaluate(None, RunState(), Control(), {"eval/loss": 0.0})
    assert best.step == 0 and best.state_dict()["value"] is None


def perverse(config, **more):
    """Settings by which the first evaluation, of step 2, is the best one: the loss falls, and more of it is wanted."""
    wanted = {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    return replace(config, evaluation=replace(config.evaluation, **{**wanted, **more}))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("best") / "run"
    return sft.run(perverse(sft_config(job, folder, save_steps=0, save_total_limit=1)))


def test_the_weights_of_the_best_evaluation_are_left_behind(whole):
    kept = sorted(path.name for path in (whole.folder / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000006"]
    assert same(weights(whole.model), weights(whole.folder / "checkpoints" / kept[0]))
    assert not same(weights(whole.model), weights(whole.folder / "checkpoints" / kept[1]))
    assert whole.after["step"] == 2 and whole.before["step"] == 0
    run = load(whole.folder)
    assert [row["step"] for row in run.evaluations] == [0, 2] and [row["step"] for row in run.all_evaluations] == [0, 2, 4, 6]
    assert "after (step 2)" in card.text(whole.folder)


def test_without_it_the_last_weights_are(job, tmp_path):
    done = sft.run(perverse(sft_config(job, tmp_path / "run", save_total_limit=1), load_best_model_at_end=False))
    assert [path.name for path in (done.folder / "checkpoints").iterdir()] == ["step-00000006"]
    assert same(weights(done.model), weights(done.folder / "checkpoints" / "step-00000006")) and done.after["step"] == 6


def test_it_ends_a_run_early(job, tmp_path):
    config = perverse(sft_config(job, tmp_path / "run", max_steps=20), eval_steps=1, early_stopping_patience=3)
    done = sft.run(config)
    # step 1 is the best; 2, 3 and 4 are no better
    assert [row["step"] for row in load(done.folder).all_evaluations] == [0, 1, 2, 3, 4]
    assert same(weights(done.model), weights(done.folder / "checkpoints" / "step-00000001"))


def test_a_kill_behind_the_best_changes_nothing(job, tmp_path, whole):
    config = perverse(sft_config(job, tmp_path / "run", save_steps=0, save_total_limit=1))

    def doomed():
        callbacks.Callbacks.step_begin = lambda self, state: os.kill(os.getpid(), 9) if state.step == 5 else state
        sft.run(config)

    assert os.WIFSIGNALED(forked(doomed))
    done = sft.run(config)
    assert same(weights(done.model), weights(whole.model)) and done.after["step"] == 2
    mine, theirs = digest(done.folder), digest(whole.folder)
    assert {name: sum for name, sum in mine.items() if "config" not in name} == {
        name: sum for name, sum in theirs.items() if "config" not in name
    }


def test_an_adapter_and_what_it_is_merged_into_are_the_best_ones(job, tmp_path):
    config = perverse(sft_config(job, tmp_path / "run", save_total_limit=1))
    done = sft.run(replace(config, model=replace(config.model, lora_rank=2, lora_save="both")))
    best = load_file(done.folder / "checkpoints" / "step-00000002" / "adapter_model.safetensors")
    assert same(load_file(done.model / "adapter" / "adapter_model.safetensors"), best)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["online", "reward"])
def test_other_recipes_too(kind, job, tmp_path):
    made, run = (online_config, online.run) if kind == "online" else (reward_config, reward.run)
    name = "completions/mean_length" if kind == "online" else "loss"
    config = perverse(made(job, tmp_path / "run", save_total_limit=1), metric_for_best_model=name)
    done = run(config)
    values = {row["step"]: row[f"eval/{name}"] for row in load(done.folder).all_evaluations if row["step"]}
    best = max(values, key=lambda step: (values[step], -step))
    assert same(weights(done.model), weights(done.folder / "checkpoints" / f"step-{best:08d}"))
    assert json.loads((done.folder / "config.json").read_text())["evaluation"]["load_best_model_at_end"]
