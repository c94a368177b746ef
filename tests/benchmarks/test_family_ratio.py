"""Families beside TRL: one is measured once, one that cannot be compared says why, and the page's table shows the ratio."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import family_ratio as ratios
import pytest
from timed import timed_run
from timed.workload import read
from timed_runs import timed_functions  # noqa: F401 (a fixture)

from psigrad.errors import UserError

ROOT = Path(__file__).parents[2]


def test_a_family_is_measured_once_and_another_processors_is_no_measurement(tmp_path, monkeypatch, capsys):
    asked, file = [], tmp_path / "found.jsonl"

    def measure(name, dtype, threads, pairs):
        asked.append(name)
        return (
            {"way": "fused", "pairs": [[1.0, 4.0]] * pairs, "mb": [1.0, 2.0]}
            if name == "llama"
            else {"way": "padded", "why": "no"}
        )

    monkeypatch.setattr(ratios, "measure", measure)
    for processor in ("one", "one", "other"):
        monkeypatch.setattr(ratios, "provenance", lambda device, processor=processor: {"processor": processor})
        monkeypatch.setattr(sys, "argv", ["family_ratio", "llama", "nemotron", "--json", str(file)])
        ratios.main()
    assert asked == ["llama", "nemotron"] * 2 and len(file.read_text().splitlines()) == 4
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "llama (fused): 4.00 times as fast [4.00, 4.00], 0.50 of its memory"
    assert said[1] == "nemotron (padded): not compared: no" and said[:2] * 3 == said


def test_losses_that_differ_are_no_ratio(monkeypatch):
    def beside(*given, **named):
        raise UserError("the loss differs")

    monkeypatch.setattr(ratios, "beside", beside)
    assert ratios.measure("gemma2", "float32", 1, 2) == {"way": "packed", "why": "the loss differs"}


def test_the_model_is_of_the_family_and_of_the_sizes(tmp_path):
    ratios.make("gpt_oss", ratios.WORK, tmp_path)
    found = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (found["model_type"], found["hidden_size"], found["num_local_experts"]) == ("gpt_oss", 256, 4)
    work, rows = read(tmp_path)
    assert work == ratios.WORK and len({len(row["prompt"]) for row in rows}) > 8


@pytest.mark.slow
@pytest.mark.usefixtures("timed_functions")
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_the_load_of_experts_is_in_both_losses(tmp_path, monkeypatch, kind):
    """TRL adds it by the model's own coefficient, and so does what is timed here."""
    import beside_trl
    import trl_worker

    monkeypatch.setattr(ratios, "SIZES", {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 80, "num_hidden_layers": 2})
    work = replace(ratios.WORK, name="mixtral", kind=kind, prompts=2, generations=2, prompt_tokens=6, completion_tokens=4)
    ratios.make("mixtral", work, tmp_path)
    run = timed_run.build(tmp_path, "float32", "cpu")
    trainer, _ = trl_worker._trainer(work, tmp_path, read(tmp_path)[1], False, "cpu")
    theirs = trl_worker._check(work, trainer)
    beside_trl.agree(work, "float32", {"ours": beside_trl.check(run), "trl": theirs})
    run.model.balance = None
    with pytest.raises(UserError, match="differs"):
        beside_trl.agree(work, "float32", {"ours": beside_trl.check(run), "trl": theirs})


def test_the_table_has_the_ratio_of_what_was_compared(tmp_path, monkeypatch):
    lines = [
        {"family": "llama", "way": "fused", "pairs": [[1.0, 4.0], [2.0, 8.0]]},
        {"family": "phi", "way": "packed", "why": "no"},
    ]
    monkeypatch.setattr(ratios.families, "MEASURED", tmp_path / "none")
    assert ratios.families.ratio("llama", "fused") == "not measured"
    ratios.families.MEASURED.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [ratios.families.ratio(name, "fused") for name in ("llama", "phi", "gemma")]
    four = "4.0 [4.0, 4.0]".replace(" ", "\N{NO-BREAK SPACE}")
    assert found == [four, "not measured", "not measured"] and ratios.families.ratio("llama", "padded") == f"{four} (fused)"
