"""Callbacks of transformers' shape: what they are told, what they may change, and that a run stays what it was without."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from resuming import digest, dying_at
from tiny_jobs import forked, online_config, preference_config, sft_config
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

import psigrad
from psigrad.cli import flags
from psigrad.compat.foreign_names import load
from psigrad.config import OnlineConfig, Run, SFTConfig
from psigrad.errors import UserError
from psigrad.language.recipes import online, preference, sft
from psigrad.language.recipes.changes import change_settings
from psigrad.runs import callbacks

pytestmark = pytest.mark.usefixtures("rewards_here")


class Diary(TrainerCallback):
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def note(self, event, state, **more):
        self.told.append((event, state.step, more))

    def on_train_begin(self, args, state, control, **kwargs):
        self.note("train_begin", state, max_steps=state.max_steps, rate=args.learning_rate, model=type(kwargs["model"]).__name__)

    def on_step_begin(self, args, state, control, **kwargs):
        self.note("step_begin", state)

    def on_step_end(self, args, state, control, **kwargs):
        assert state.global_step == state.step and state.metrics["step"] == state.step
        self.note("step_end", state, due=(control.should_evaluate, control.should_save), rows=len(state.history))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.note("log", state, evaluation=any(name.startswith("eval/") for name in logs))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        assert metrics["eval_headline"] == metrics["eval/early_letters/mean"] == metrics["eval_early_letters/mean"]
        self.note("evaluate", state)

    def on_save(self, args, state, control, checkpoint=None, **kwargs):
        assert (checkpoint / "state.json").exists()
        self.note("save", state)

    def on_train_end(self, args, state, control, **kwargs):
        self.note("train_end", state)


class Idle(psigrad.Callback):
    """Changes nothing, and remembers how often it was told."""

    def __init__(self):
        self.count = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, held):
        self.count = held["count"]


class Schedule(psigrad.Callback):
    """Another rate, another KL coefficient and another temperature after the second step."""

    def __init__(self, rate: float = 3e-3):
        self.rate = rate

    def on_step_end(self, args, state, control, **kwargs):
        if state.step == 2:
            control.change(learning_rate=self.rate, temperature=0.7, **{"algorithm.kl.coefficient": 0.3})


def with_callbacks(config, *given):
    return replace(config, run=replace(config.run, callbacks=given))


def rows(folder: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(job, tmp_path_factory) -> Path:
    """A run without callbacks."""
    return online.run(online_config(job, tmp_path_factory.mktemp("plain") / "run")).folder


def test_every_event_is_told_in_transformers_order(job, tmp_path, plain):
    diary = Diary()
    online.run(with_callbacks(online_config(job, tmp_path / "run"), diary))
    events = [(event, step) for event, step, _ in diary.told]
    assert events[:3] == [("train_begin", 0), ("evaluate", 0), ("log", 0)] and events[-1] == ("train_end", 6)
    for step in range(1, 7):
        evaluated = [("evaluate", step), ("log", step)] if step in (3, 6) else []
        saved = [("save", step)] if step % 2 == 0 else []
        expected = [("step_begin", step - 1), ("step_end", step), ("log", step), *evaluated, *saved]
        at = events.index(("step_begin", step - 1))
        assert events[at : at + len(expected)] == expected
    assert diary.told[0][2] == {"max_steps": 6, "rate": 1e-2, "model": "Qwen3ForCausalLM"}
    due = {step: more["due"] for event, step, more in diary.told if event == "step_end"}
    assert due == {1: (False, False), 2: (False, True), 3: (True, False), 4: (False, True), 5: (False, False), 6: (True, True)}
    assert [more["rows"] for event, _, more in diary.told if event == "step_end"] == [2, 3, 4, 6, 7, 8]
    assert digest(tmp_path / "run") == digest(plain), "a callback that only looks changes no bit"


def test_a_callback_that_changes_nothing_leaves_every_bit_also_over_a_kill(job, tmp_path, plain):
    config = with_callbacks(online_config(job, tmp_path / "run"), Idle())

    def doomed():
        dying_at(60)
        online.run(config)

    assert os.WTERMSIG(forked(doomed)) == signal.SIGKILL
    assert forked(lambda: online.run(config)) == 0
    found, expected = digest(tmp_path / "run"), digest(plain)
    assert found.pop("state") != expected.pop("state")  # it remembers
    assert found == expected
    newest = tmp_path / "run" / "checkpoints" / "step-00000006" / "state.json"
    assert json.loads(newest.read_text())["callbacks"] == {"Idle": {"count": 6}}


def test_changes_hold_from_the_next_step_on_are_recorded_and_survive_a_kill(job, tmp_path, plain):
    def config(folder):
        return with_callbacks(online_config(job, folder), Schedule())

    assert forked(lambda: online.run(config(tmp_path / "whole"))) == 0

    def doomed():  # after step 4 was saved, and with it what was changed after step 2
        callbacks.Callbacks.after_save = lambda self, state, checkpoint: os.kill(os.getpid(), 9) if state.step == 4 else state
        online.run(config(tmp_path / "parts"))

    assert os.WTERMSIG(forked(doomed)) == signal.SIGKILL
    assert forked(lambda: online.run(config(tmp_path / "parts"))) == 0
    assert digest(tmp_path / "whole") == digest(tmp_path / "parts") != digest(plain)
    own, others = rows(tmp_path / "whole"), rows(plain)
    rates = [row["learning_rate"] for row in own if "learning_rate" in row]
    assert rates == pytest.approx([1e-2, 1e-2 * 5 / 6, *(3e-3 * left / 6 for left in (4, 3, 2, 1))])
    assert [row for row in own if row["step"] <= 2] == [row for row in others if row["step"] <= 2]
    told = [event for event in rows(tmp_path / "whole", "events") if event["kind"] == "changed"]
    assert [(event["step"], event["callback"]) for event in told] == [(2, "Schedule")] * 3
    assert {name: pair for event in told for name, pair in event["changes"].items()} == {
        "optim.learning_rate": [1e-2, 3e-3],
        "sampling.temperature": [1.0, 0.7],
        "algorithm.kl.coefficient": [None, 0.3],
    }


class Director(psigrad.Callback):
    """Evaluates and saves out of turn, and ends the run."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.step == 1
        control.should_save = state.step == 3
        control.should_training_stop = state.step == 4


def test_a_callback_evaluates_saves_and_ends_the_run(job, tmp_path):
    config = with_callbacks(sft_config(job, tmp_path / "run", save_total_limit=5), Director())
    result = sft.run(config)
    assert sorted(p.name for p in (result.folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    assert sorted({row["step"] for row in rows(result.folder) if "eval/loss" in row}) == [0, 1, 4]
    events = rows(result.folder, "events")
    assert ("stop_asked", 4, "Director") in [(e["kind"], e.get("step"), e.get("callback")) for e in events]
    assert events[-1]["kind"] == "finished" and result.after["step"] == 4
    before = (result.folder / "metrics.jsonl").read_bytes()
    sft.run(config)
    assert (result.folder / "metrics.jsonl").read_bytes() == before, "it is finished"
    longer = replace(config, run=replace(config.run, max_steps=8, extend=True, callbacks=()))
    assert sft.run(longer).after["step"] == 8


def test_a_run_that_was_ended_stays_ended_though_it_was_killed_before_its_model_was_written(job, tmp_path):
    config = with_callbacks(sft_config(job, tmp_path / "run"), Director())

    def doomed():
        callbacks.Callbacks.end = lambda self, state: os.kill(os.getpid(), 9)
        sft.run(config)

    assert os.WTERMSIG(forked(doomed)) == signal.SIGKILL
    assert sft.run(config).after["step"] == 4


def test_transformers_early_stopping_works_on_the_headline_and_its_patience_is_kept(job, tmp_path):
    stopper = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=10.0)
    config = with_callbacks(sft_config(job, tmp_path / "run", max_steps=20), stopper, PrinterCallback())
    result = sft.run(replace(config, evaluation=replace(config.evaluation, eval_steps=2)))
    assert result.after["step"] == 4  # step 0 sets the best, and neither step 2 nor step 4 improves on it by 10
    newest = result.folder / "checkpoints" / "step-00000004" / "state.json"
    held = json.loads(newest.read_text())
    assert held["ended"] and held["callbacks"] == {"EarlyStoppingCallback": {"early_stopping_patience_counter": 2}}


def evaluated(job, tmp_path, rows, **settings):
    """The headlines that a callback is told of, and the best evaluation as it is shown at the end."""
    told = []

    class Reader(psigrad.Callback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            told.append(metrics.get("eval_headline"))

    config = sft_config(job, tmp_path / "run")
    config = replace(config, evaluation=replace(config.evaluation, **settings))
    hooks = callbacks.Callbacks([Reader()], config)
    for step, row in enumerate(rows, start=1):
        hooks.add_row({"step": step, **row})
        hooks.after_evaluation(callbacks.RunState(step=step))
    return told, (hooks.visible_state.best_global_step, hooks.visible_state.best_metric)


def test_callbacks_are_told_of_one_figure_and_NaN_is_never_the_best(job, tmp_path):
    rows = [{"eval/exact/mean": 0.2, "eval/loss": 1.0}, {"eval/loss": 0.1}, {"eval/exact/mean": 0.1, "eval/loss": 0.9}]
    assert evaluated(job, tmp_path, rows) == ([0.2, None, 0.1], (1, 0.2))
    assert evaluated(job, tmp_path, rows, metric_for_best_model="loss") == ([0.2, 0.1, 0.1], (2, 0.1))
    losses = [{"eval/loss": value} for value in ("NaN", 3.0, 2.0)]
    assert evaluated(job, tmp_path, losses, metric_for_best_model="loss")[1] == (3, 2.0)


@pytest.mark.parametrize(("name", "greater", "threshold"), [("loss", True, 0.0), ("exact", None, 10.0)])
def test_transformers_early_stopping_follows_the_metric_that_is_named(name, greater, threshold, job, tmp_path):
    """More of a loss is wanted, which falls; an accuracy does not rise by ten. The headline is the accuracy."""
    stopper = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=threshold)
    config = with_callbacks(sft_config(job, tmp_path / "run", max_steps=20), stopper)
    asked = replace(config.evaluation, eval_steps=2, metric_for_best_model=name, greater_is_better=greater)
    assert sft.run(replace(config, evaluation=asked)).after["step"] == 4


def test_the_beta_of_a_preference_loss_can_change(job, tmp_path):
    class Stiffer(psigrad.Callback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.step == 3:
                control.change(**{"loss.beta": 5.0})

    plain = rows(preference.run(preference_config(job, tmp_path / "a")).folder)
    own = rows(preference.run(with_callbacks(preference_config(job, tmp_path / "b"), Stiffer())).folder)
    assert [row for row in own if row["step"] < 3] == [row for row in plain if row["step"] < 3]
    assert [row["loss"] for row in own if row["step"] == 4] != [row["loss"] for row in plain if row["step"] == 4]


REFUSED = [
    ({"num_generations": 2}, "num_generations cannot be changed during a run; a callback can change"),
    ({"learning_rat": 1}, "did you mean 'optim.learning_rate'|did you mean 'learning_rate'"),
    ({"learning_rate": -1.0}, "learning_rate cannot be changed to -1.0; expected at least 0"),
    ({"algorithm.kl.coefficient": "x"}, "cannot be changed to 'x'; expected a number"),
    ({"algorithm.kl.coeficient": 0.1}, "there is no 'coeficient'; did you mean 'coefficient'"),
    ({"algorithm.kl.estimator": 1.0}, "is 'k3.*', but only a number can be changed"),
]


def test_what_cannot_be_changed_is_refused_by_name_and_the_run_is_saved(job, tmp_path):
    """One run, which each refusal ends a step later, and which goes on from there."""

    class Wrong(psigrad.Callback):
        def __init__(self, at: int, change: dict):
            self.at, self.change = at, change

        def on_step_end(self, args, state, control, **kwargs):
            if state.step == self.at:
                control.change(**self.change)

    config = online_config(job, tmp_path / "run", max_steps=len(REFUSED) + 1)
    for step, (change, sentence) in enumerate(REFUSED, 1):
        with pytest.raises(UserError, match=f"callback Wrong raised in on_step_end.*({sentence})"):
            online.run(with_callbacks(config, Wrong(step, change)))
        assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").exists()
    assert online.run(with_callbacks(config, Idle())).after["step"] == len(REFUSED) + 1


def test_a_kl_coefficient_needs_the_reference_that_the_run_began_with(job, tmp_path):
    config = replace(online_config(job, tmp_path / "run", {"preset": "grpo", "kl": {"coefficient": 0.0, "where": "loss"}}))
    config = replace(config, evaluation=replace(config.evaluation, eval_kl=False))
    with pytest.raises(UserError, match="the run has no reference model; start the run with a value above 0"):
        online.run(with_callbacks(config, Schedule()))


@pytest.mark.parametrize(
    "event",
    [
        "on_step_end",
        "on_save",
        *(pytest.param(f"on_{e}", marks=pytest.mark.long) for e in ("train_begin", "step_begin", "log", "evaluate")),
    ],
)
def test_an_exception_names_the_callback_the_event_and_the_line(event, job, tmp_path):
    class Broken:
        pass

    def fail(self, args, state, control, **kwargs):
        raise ZeroDivisionError("division by zero")

    setattr(Broken, event, fail)
    place = rf"test_callbacks.py:{fail.__code__.co_firstlineno + 1}"
    with pytest.raises(UserError, match=rf"The callback Broken raised in {event} \(.*{place}\): ZeroDivisionError: division"):
        sft.run(with_callbacks(sft_config(job, tmp_path / "run"), Broken()))
    assert sft.run(sft_config(job, tmp_path / "run")).after["step"] == 6


def test_a_callback_comes_from_a_file_a_module_and_a_mapping(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import psigrad\nclass Stop(psigrad.Callback):\n    def __init__(self, after=3):\n        self.after = after\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        control.should_training_stop = state.step >= self.after\n"
        "    def on_epoch_end(self, args, state, control, **kwargs): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    typed = ["--callbacks", "mine.py:Stop", "{callback: mine.py:Stop, after: 7}"]
    config = flags.parse(OnlineConfig, "grpo", typed, {"algorithm": "grpo"})
    first, second = (callbacks.resolve(given) for given in config.run.callbacks)
    assert (first.after, second.after) == (3, 7)
    assert callbacks.never_called(first) == ["on_epoch_end"] and callbacks.never_called(Diary()) == []
    (tmp_path / "run.yaml").write_text("run: {callbacks: 'mine.py:Stop'}\n")
    assert load(SFTConfig, "run.yaml").run.callbacks == ("mine.py:Stop",)
    for wrong, sentence in (
        ("mine", "write module:Class or file.py:Class"),
        ("mine.py:Stp", "did you mean 'Stop'"),
        ({"callback": "mine.py:Stop", "afer": 2}, "cannot be created: .*afer"),
        ({"after": 2}, "has no key 'callback'"),
        (3, "has none of the methods on_train_begin"),
    ):
        with pytest.raises(UserError, match=sentence):
            callbacks.resolve(wrong)


def test_settings_name_callbacks_by_their_class():
    from psigrad.config.load import to_dict

    given = ("mine:Stop", {"callback": "mine:Stop", "after": 3}, Idle(), Idle)
    name = f"{Idle.__module__}:Idle"
    assert to_dict(Run(callbacks=given))["callbacks"] == [*given[:2], name, name]


def test_a_change_of_nothing_is_the_run_itself(job, tmp_path):
    run = object()
    assert change_settings(run, {}) is run
