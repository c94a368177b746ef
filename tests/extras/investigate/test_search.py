"""A sweep: spaces as they are typed, trials over seeds by hand, and the same trials where it was stopped in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psigrad import cli
from psigrad.errors import UserError
from psigrad_extras.investigate import search as sweep
from psigrad_extras.investigate.search import Search, Space, space_of


def test_spaces_as_they_are_typed():
    assert space_of("learning_rate:1e-6..1e-4:log") == Space("learning_rate", (), 1e-6, 1e-4, log=True)
    assert space_of("lora_rank:8..64") == Space("lora_rank", (), 8, 64, whole=True)
    assert space_of("optimizer:adamw,muon") == Space("optimizer", ("adamw", "muon"))
    assert space_of("lora_rank:8,16") == Space("lora_rank", (8, 16))
    for wrong in ("learning_rate", "learning_rate:2..1", "learning_rate:a..b", "beta:0..1:log", ":1..2"):
        with pytest.raises(UserError, match="--search has"):
            space_of(wrong)


class Trainer:
    """Writes a run whose held-out figure is known: seed − (x − 3)², or a `loss` of (x − 3)² + seed."""

    def __init__(self, die_after: int = 10**9, loss: bool = False) -> None:
        self.asked: list[tuple[float, int]] = []
        self.die_after, self.loss = die_after, loss

    def __call__(self, words, folder: Path) -> str:
        given = dict(word.split("=") for word in words if "=" in word)
        x, seed = float(given["x"]), int(words[words.index("--seed") + 1])
        if len(self.asked) == self.die_after:
            raise KeyboardInterrupt
        self.asked.append((x, seed))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events.jsonl").write_text("")
        off = (x - 3) ** 2
        row = {"step": 1, "eval/loss": off + seed} if self.loss else {"step": 1, "eval/score/mean": seed - off}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return ""


def made(folder: Path, **settings) -> Search:
    usual = {"spaces": (Space("x", (), 0.0, 5.0),), "trials": 6, "seeds": (1, 2), "command": ("sft",)}
    return Search(folder=folder, **{**usual, **settings})


def test_each_trial_is_the_mean_over_its_seeds_with_its_interval(tmp_path):
    trainer = Trainer()
    page = sweep.run(made(tmp_path, seeds=(1, 2, 1)), trainer)  # a seed that is given twice counts once
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert len(found["trials"]) == 6 and [seed for _, seed in trainer.asked] == [1, 2] * 6
    for trial in found["trials"]:
        x = trial["settings"]["x"]
        assert trial["mean"] == pytest.approx(1.5 - (x - 3) ** 2)
        # two values one apart: t(0.975, 1) · 0.7071 / √2 = 12.706 / 2
        assert trial["high"] - trial["mean"] == pytest.approx(6.353, abs=1e-3)
    best = max(found["trials"], key=lambda trial: trial["mean"])
    assert sweep.summary(tmp_path).startswith(f"best    x={best['settings']['x']}: ")
    html = page.read_text()
    assert html.count("<svg") == 2 and "A sweep of 6 trials" in html


def test_a_sweep_that_was_stopped_asks_as_one_that_was_not(tmp_path):
    whole, first, second = Trainer(), Trainer(die_after=5), Trainer()
    sweep.run(made(tmp_path / "whole"), whole)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(made(tmp_path / "parts"), first)
    sweep.run(made(tmp_path / "parts"), second)
    # the trial in which it was stopped is run again, in its own folders, where its finished runs are found
    assert [x for x, _ in first.asked[:4] + second.asked] == [x for x, _ in whole.asked]
    assert len(list((tmp_path / "parts").glob("trial-*"))) == 6
    again = Trainer()
    sweep.run(made(tmp_path / "parts"), again)
    assert again.asked == [], "nothing was left to do"
    with pytest.raises(UserError, match="holds a sweep with another seeds"):
        sweep.run(made(tmp_path / "parts", seeds=(7,)), Trainer())


def test_another_direction_is_refused_for_it_would_turn_the_search_around(tmp_path):
    sweep.run(made(tmp_path, trials=2), Trainer())
    with pytest.raises(UserError, match="holds a sweep with another direction: none was given; name another folder"):
        sweep.run(made(tmp_path, trials=3, direction="minimize"), Trainer())
    sweep.run(made(tmp_path / "named", trials=1, direction="minimize"), Trainer())
    with pytest.raises(UserError, match="another direction: minimize;"):
        sweep.run(made(tmp_path / "named", trials=2), Trainer())


def test_one_process_at_a_time_sweeps_in_a_folder(tmp_path):
    """The second would take the trial that the first has begun for one that was left."""

    def second(words, folder):
        with pytest.raises(UserError, match=r"is in use by process \d+"):
            sweep.run(made(tmp_path, trials=1, seeds=(1,)), Trainer())
        return Trainer()(words, folder)

    sweep.run(made(tmp_path, trials=1, seeds=(1,)), second)
    assert len(json.loads((tmp_path / "sweep.json").read_text())["trials"]) == 1


def test_a_failed_trial_is_counted_and_the_first_one_tells_why(tmp_path):
    with pytest.raises(UserError, match="The first trial failed: no such model"):
        sweep.run(made(tmp_path / "a"), lambda words, folder: "no such model")
    trainer, calls = Trainer(), []

    def sometimes(words, folder):
        calls.append(words)
        return "ran out of memory" if len(calls) == 3 else trainer(words, folder)

    sweep.run(made(tmp_path / "b", trials=3), sometimes)
    assert len(json.loads((tmp_path / "b" / "sweep.json").read_text())["trials"]) == 2
    with pytest.raises(UserError, match="has no held-out loss"):
        sweep.run(made(tmp_path / "c", metric="loss"), Trainer())


@pytest.mark.parametrize("loss", [False, True])
def test_the_search_goes_where_it_is_better(loss, tmp_path):
    trainer = Trainer(loss=loss)
    sweep.run(made(tmp_path / "unnamed", trials=25, seeds=(1,)), trainer)
    near = lambda xs: sum(abs(x - 3) for x, _ in xs) / len(xs)  # noqa: E731
    assert near(trainer.asked[-8:]) < near(trainer.asked[:8])
    for metric in ("", "eval/loss", "loss") if loss else ("",):
        folder, named = tmp_path / (metric.replace("/", " ") or "unnamed"), trainer
        if metric:  # the same search, behind the first trials, which are drawn without looking at what was found
            named = Trainer(loss=loss)
            sweep.run(made(folder, trials=13, seeds=(1,), metric=metric), named)
            assert named.asked == trainer.asked[:13]
        found = json.loads((folder / "sweep.json").read_text())
        best = min(named.asked, key=lambda one: abs(one[0] - 3))[0]
        assert sweep.summary(folder).startswith(f"best    x={best}: ")
        assert (found["direction"], found["metric"]) == (("minimize", metric or "loss") if loss else ("maximize", "score"))


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "_train", Trainer())
    folder = str(tmp_path / "s")
    words = ["sweep", "sft", "--search", "x:0..5", "--trials", "2", "--seeds", "0", "1", "--output-dir", folder, "--model", "m"]
    assert cli.main(words) == 0
    assert "best    x=" in capsys.readouterr().out
    assert cli.main(["sweep", "--search", "x:0..5"]) == 2 and "sweep got no method" in capsys.readouterr().err
    assert cli.main(["sweep", "sft"]) == 2 and "sweep searches nothing" in capsys.readouterr().err
    assert cli.main(["sweep", "sft", "--search", "x:1,2", "--direction", "up"]) == 2
