"""The terminal shows any text as it is, on any terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from psigrad.records.read import load
from psigrad.records.report import terminal
from psigrad.records.report.verdict import verdict
from psigrad.runs.result import Result

FIGURES = [{"name": "accuracy [b]", "value": 0.8, "low": 0.75, "high": 0.85}, {"name": "\ud800", "value": None, "unit": "s"}]


def test_samples_are_shown_as_they_are(run, hostile, capsys):
    terminal.print_before_and_after(run("one"))
    terminal.print_completions([hostile], [hostile * 50], [None])
    shown = capsys.readouterr().out
    assert "[bold]" in shown and not {"\x00", "\ud800", "\u202e"} & set(shown)
    assert "step 0" in shown and "step 30" in shown and "step 15" not in shown


def test_the_final_table_has_the_figures_of_the_report(capsys):
    terminal.print_summary(FIGURES)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert lines == [["accuracy [b]", "0.8", "0.75 to 0.85", ""], ["\\ud800", "–", "", "s"]]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_no_encoding_of_the_terminal_stops_a_run_at_its_end(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    terminal.print_summary([{"name": "ответ \ud800 日本", "value": None}], Console(file=stream, width=80))
    stream.flush()
    shown = stream.buffer.getvalue().decode(encoding)
    assert ("日本" in shown) == (encoding == "utf-8") and ("\\u65e5" in shown) == (encoding != "utf-8")


def test_conversations_are_told_as_messages(capsys):
    terminal.print_completions([[{"role": "user", "content": "What is 2 + 2?"}]], ["4"], [1.0])
    assert "user: What is 2 + 2?" in capsys.readouterr().out


def test_text_is_one_line_of_bounded_width():
    assert terminal.fit_line("a\nb\tc", 60) == "a\\nb\\tc"
    assert terminal.fit_line("x" * 1_000_000, 10) == "x" * 9 + "…" and terminal.fit_line("x" * 10, 10) == "x" * 10
    assert terminal.fit_line("a → b", 60, "ascii") == "a -> b" and terminal.fit_line("a → b", 60) == "a → b"
    assert terminal.fit_line("é" * 20, 10, "ascii") == "\\xe9\\xe..."


def test_the_end_of_a_run_is_told_with_and_without_a_summary(run, capsys):
    folder = run("[runs]")
    before, after = {"step": 0, "eval/exact/mean": 0.25}, {"step": 30, "eval/exact/mean": 0.75}
    result = Result(folder, folder / "model", None, before, after)
    terminal.print_result(result)
    shown = capsys.readouterr().out
    assert "0.25" in shown and "0.75" in shown and str(folder / "model") in shown
    assert "Learned: held-out exact 0.25 [0.15, 0.35] → 0.75 [0.65, 0.85]" in " ".join(shown.split())
    (folder / "summary.json").write_text(json.dumps({"rows": FIGURES}))
    with (folder / "rollouts.jsonl").open("ab") as stream:
        stream.write(b'{"step": 30, "kind"')
    terminal.print_result(result)
    shown = capsys.readouterr().out
    assert "0.75 to 0.85" in shown and "step 30" in shown


def test_a_run_that_was_evaluated_once_has_one_column(run, capsys):
    folder, figures = run("two"), {"step": 30, "eval/exact/mean": 0.75}
    terminal.print_result(Result(folder, Path("m"), None, figures, dict(figures)))
    assert capsys.readouterr().out.count("step 30") == 1
    terminal.print_result(Result(folder, Path("m"), None, {**figures, "step": 0}, figures))
    shown = capsys.readouterr().out
    assert shown.count("step 30") == shown.count("step 0") == 1


def test_the_verdict_is_one_line_where_no_terminal_breaks_it(run, capsys):
    folder = run("two")
    terminal.print_result(Result(folder, Path("m"), None))
    said = str(verdict(load(folder)))
    assert len(said) > 80 and said in capsys.readouterr().out.splitlines()
