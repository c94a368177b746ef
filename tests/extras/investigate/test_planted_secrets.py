"""Sweeps and comparisons: secrets are in no file that they leave, and a reader who leaves ends none."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from planted_secrets import CHANNELS, PLANTED, found_in

from psigrad.config import Data, OnlineConfig
from psigrad.errors import UserError
from psigrad_extras.connect import trackers
from psigrad_extras.investigate import comparison


def test_files_of_a_sweep_hold_none(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    from psigrad_extras.investigate import search

    monkeypatch.setenv("JUDGE_SECRET", PLANTED["variable"])
    words = ("sft", "--hub-token", PLANTED["flag"], f"dataset=https://me:{PLANTED['url']}@data.example/a.jsonl")
    reasons = iter(["", f"HTTP 401 for {words[-1]}: {PLANTED['variable']}", "", ""])
    monkeypatch.setattr(search.session, "evaluations", lambda folder: ({}, {"eval/exact/mean": 0.5}))

    def train(given):
        for n in range(4):  # a run leaves its events
            place = tmp_path / "sweep" / f"trial-{n:04d}" / "seed-0"
            place.mkdir(parents=True, exist_ok=True)
            (place / "events.jsonl").write_text('{"kind": "started"}\n')
        return next(reasons)

    for trials in (3, 4):  # and it is known again
        space = dict([search.space_of("seed:1,2,3")])
        search.run(words, space, tmp_path / "sweep", trials=trials, metric="exact", train=train)
        for name in range(5):
            (tmp_path / "sweep" / str(name)).touch()
        assert found_in(tmp_path / "sweep") == set()


def test_a_job_of_a_comparison_is_told_its_secrets_and_leaves_none(tmp_path, monkeypatch):
    class Process:
        def __init__(self, command, **pipes):
            self.stdin, self.stderr, self.pid = (tmp_path / "told").open("wb"), io.BytesIO(b"it failed"), 0

    (tmp_path / "settings").mkdir()
    monkeypatch.setattr(comparison.subprocess, "Popen", Process)
    monkeypatch.setattr(comparison.os, "wait4", lambda pid, options: (0, 256, None))
    monkeypatch.setattr(comparison, "settings_of", lambda *given: OnlineConfig(data=Data(dataset=CHANNELS["data"]["dataset"])))
    with pytest.raises(UserError, match="it failed"):
        comparison._finish(SimpleNamespace(config=OnlineConfig()), tmp_path, "grpo", 0)
    assert PLANTED["url"] in (tmp_path / "told").read_text()
    written = (tmp_path / "settings" / "grpo-0.json").read_text()
    assert "data.example" in written and PLANTED["url"] not in written


def test_what_is_said_of_a_tracker_holds_none(monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_SECRET", PLANTED["variable"])

    def broken():
        raise OSError(f"{PLANTED['variable']} is no key for https://me:{PLANTED['url']}@track.example")

    trackers.Background("wandb", broken).close()
    said = capsys.readouterr().err
    assert said.count("***") == 2 and not [value for value in PLANTED.values() if value in said]


def test_completions_that_a_tracker_is_shown_hold_none(monkeypatch):
    monkeypatch.setenv("JUDGE_SECRET", PLANTED["variable"])
    shown = []
    mine = SimpleNamespace(completions=lambda *told: shown.append(told), close=lambda: None)
    tracker = trackers.Background("mine", lambda: mine)
    talk = [{"role": "tool", "content": f"JUDGE_SECRET is {PLANTED['variable']}, and {PLANTED['token']}"}]
    tracker.completions(1, [{"kind": "train", "prompt": talk, "completion": f"?token={PLANTED['query']}", "reward": 1.0}])
    tracker.close()
    ((_, (row,)),) = shown
    assert row["completion"] == "?token=***" and row["reward"] == 1.0
    assert row["prompt"] == [{"role": "tool", "content": "JUDGE_SECRET is ***, and ***"}]
