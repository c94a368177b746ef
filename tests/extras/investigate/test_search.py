"""A sweep: spaces as they are typed, trials over seeds by hand, and a study that resumes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from psigrad import cli
from psigrad.errors import UserError
from psigrad_extras.investigate import search

X = dict([search.space_of("x:0.0..5.0")])


def test_spaces_as_they_are_typed():
    d = search.optuna.distributions
    assert search.space_of("learning_rate:1e-6..1e-4:log") == ("learning_rate", d.FloatDistribution(1e-6, 1e-4, log=True))
    assert search.space_of("lora_rank:8..64") == ("lora_rank", d.IntDistribution(8, 64))
    assert search.space_of("optimizer:adamw,muon") == ("optimizer", d.CategoricalDistribution(["adamw", "muon"]))
    assert search.space_of("lora_rank:8,16") == ("lora_rank", d.CategoricalDistribution([8, 16]))
    for wrong in ("learning_rate", "learning_rate:2..1", "learning_rate:a..b", "beta:0..1:log", ":1..2"):
        with pytest.raises(UserError, match="--search has"):
            search.space_of(wrong)


class Trainer:
    """Writes a run whose held-out figure is known: seed − (x − 3)², or a `loss` of (x − 3)² + seed."""

    def __init__(self, loss: bool = False, code: str = "") -> None:
        self.asked: list[tuple[float, int]] = []
        self.loss, self.code = loss, {"code": {"reward": code}} if code else {}

    def __call__(self, words) -> str:
        given = dict(word.split("=") for word in words if "=" in word)
        x, seed, folder = float(given["x"]), int(words[words.index("--seed") + 1]), Path(words[-1])
        self.asked.append((x, seed))
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text(json.dumps({"kind": "started", **self.code}) + "\n")
        off = (x - 3) ** 2
        row = {"step": 1, "eval/loss": off + seed} if self.loss else {"step": 1, "eval/score/mean": seed - off}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return ""


def test_each_trial_is_the_mean_over_its_seeds_with_its_interval_and_a_study_resumes(tmp_path):
    first, second = Trainer(), Trainer()
    search.run(["sft"], X, tmp_path, trials=2, seeds=(1, 2), train=first)
    study = search.run(["sft"], X, tmp_path, trials=6, seeds=(1, 2), train=second)
    assert [seed for _, seed in first.asked + second.asked] == [1, 2] * 6 and len(first.asked) == 4
    assert len({x for x, _ in first.asked + second.asked}) == 6, "what was drawn before is not drawn again"
    for trial in study.trials:
        assert trial.value == pytest.approx(1.5 - (trial.params["x"] - 3) ** 2)
        # two values one apart: t(0.975, 1) · 0.7071 / √2 = 12.706 / 2
        assert trial.user_attrs["interval"][1] - trial.value == pytest.approx(6.353, abs=1e-3)
    with pytest.raises(UserError, match=r"holds another sweep \(sft"):
        search.run(["sft"], X, tmp_path, seeds=(7,), train=second)


def test_a_failed_trial_is_counted_and_the_first_one_tells_why(tmp_path):
    with pytest.raises(UserError, match="The first trial failed: no such model"):
        search.run(["sft"], X, tmp_path / "a", train=lambda words: "no such model")
    trainer, calls = Trainer(), []

    def sometimes(words):
        calls.append(words)
        return "ran out of memory" if len(calls) == 2 else trainer(words)

    study = search.run(["sft"], X, tmp_path / "b", trials=3, train=sometimes)
    assert len(calls) == len(study.trials) == 3 and [t.value is None for t in study.trials] == [False, True, False]
    with pytest.raises(UserError, match="has no held-out loss"):
        search.run(["sft"], X, tmp_path / "c", metric="loss", train=Trainer())
    with pytest.raises(UserError, match="would maximise the held-out loss; give --direction minimize"):
        search.run(["sft"], X, tmp_path / "d", train=Trainer(loss=True))


def test_runs_of_different_own_code_are_not_pooled(tmp_path):
    search.run(["sft"], X, tmp_path, trials=2, train=Trainer(code="a"))
    with pytest.raises(UserError, match=r"trial-0002/seed-0 was trained with other code .*\(changed: reward\)"):
        search.run(["sft"], X, tmp_path, trials=6, train=(changed := Trainer(code="b")))
    assert len(changed.asked) == 1, "the sweep stops there"
    study = search.run(["sft"], X, tmp_path, trials=4, train=Trainer(code="a"))
    assert [trial.value is None for trial in study.trials] == [False, False, True, False], "restored, it goes on"
    rewards = dict([search.space_of("x:0..5"), search.space_of("reward:a,b")])
    own = lambda words: Trainer(code=next(w for w in words if w.startswith("reward=")))(words)  # noqa: E731
    assert len(search.run(["sft"], rewards, tmp_path / "searched", trials=4, train=own).trials) == 4, "code may be searched"


@pytest.mark.parametrize("loss", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_search_goes_where_it_is_better(loss, tmp_path):
    trainer = Trainer(loss=loss)
    study = search.run(["sft"], X, tmp_path, trials=25, metric="eval/loss" if loss else "", train=trainer)
    near = lambda xs: sum(abs(x - 3) for x, _ in xs) / len(xs)  # noqa: E731
    assert near(trainer.asked[-8:]) < near(trainer.asked[:8])
    assert study.best_params["x"] == min(trainer.asked, key=lambda one: abs(one[0] - 3))[0]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "run", partial(search.run, train=Trainer()))
    folder = str(tmp_path / "s")
    words = ["sweep", "sft", "--search", "x:0..5", "--trials", "2", "--seeds", "0", "1", "--output-dir", folder, "--model", "m"]
    assert cli.main(words) == 0
    assert "best    x=" in capsys.readouterr().out
    assert cli.main(["sweep", "--search", "x:0..5"]) == 2 and "sweep got no method" in capsys.readouterr().err
    assert cli.main(["sweep", "sft"]) == 2 and "sweep got no --search" in capsys.readouterr().err
    assert cli.main(["sweep", "sft", "--search", "x:1,2", "--direction", "up"]) == 2
