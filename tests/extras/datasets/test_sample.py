"""Sampled datasets, and comparisons out of rankings and ratings."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest
from sample_agents import gone
from tiny_rewards import early_letters

from psigrad import cli
from psigrad.cli import flags
from psigrad.config import Data, Evaluation, Model, Run, SampleConfig, Sampling
from psigrad.errors import UserError
from psigrad.language.recipes import evaluate
from psigrad_extras import commands
from psigrad_extras.datasets import preferences, sample


def sample_config(job, tmp_path, keep, **changes) -> SampleConfig:
    base = SampleConfig(
        model=Model(path=str(job / "base")),
        data=Data(dataset=str(job / "held_out.jsonl")),
        sampling=Sampling(max_completion_length=4),
        evaluation=Evaluation(eval_prompts=0, num_generations_eval=6),
        run=Run(threads=1),
        reward=(early_letters,),
        keep=keep,
        output=str(tmp_path / f"{keep}.jsonl"),
    )
    return replace(base, **changes)


def test_sampled_rows_are_all_the_best_or_pairs_of_the_same_completions(job, tmp_path):
    found = {}
    for keep in ("all", "best", "pairs"):
        sample.run(sample_config(job, tmp_path, keep))
        found[keep] = sample.read_rows(str(tmp_path / f"{keep}.jsonl"))
    assert len(found["all"]) == 48 and len(found["best"]) == 8
    for i, best in enumerate(found["best"]):
        group = found["all"][6 * i : 6 * i + 6]
        assert best["reward"] == max(row["reward"] for row in group) and best["prompt"] == group[0]["prompt"]
    for pair in found["pairs"]:
        group = [row for row in found["all"] if row["prompt"] == pair["prompt"]]
        assert pair["score_chosen"] > pair["score_rejected"]
        assert pair["chosen"] in [row["completion"] for row in group]
    unscored = sample.run(sample_config(job, tmp_path, "all", reward=(), output=str(tmp_path / "unscored.jsonl")))
    assert unscored.rows == 48
    with pytest.raises(UserError, match="chooses completions by their reward"):
        sample.run(sample_config(job, tmp_path, "best", reward=()))
    with pytest.raises(UserError, match="No output"):
        sample.run(sample_config(job, tmp_path, "all", output=""))


def test_sessions_that_fail_are_said_and_named_in_their_rows(job, tmp_path, monkeypatch, capsys):
    config = sample_config(job, tmp_path, "all", reward=(), agent=gone, evaluation=Evaluation(eval_prompts=2))
    monkeypatch.setattr(flags, "parse", lambda *given: config)
    assert commands.sample([]) == 0
    rows = sample.read_rows(config.output)
    assert rows[0]["reason"].startswith("the agent raised RuntimeError: browser gone") and rows[0]["reward"] is None
    assert "2 of 2 completions stayed unscored; most often" in capsys.readouterr().err


def test_written_rows_keep_every_column_the_offered_tools_too(job, tmp_path):
    """A date, a decimal and bytes, as a Parquet file has them, are their texts: JSON has no form for them."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    own = {"answer": "a", "day": date(2024, 2, 29), "price": Decimal("1.50"), "raw": b"x", "tools": tools}
    data = Data(dataset=[{"prompt": f"say {c}:", **own} for c in "abcd"])
    for keep in ("all", "pairs"):
        written = sample.run(sample_config(job, tmp_path, keep, data=data))
        rows = sample.read_rows(str(written.path))
        assert rows and all(row["tools"] == tools for row in rows)
        assert {(row["day"], row["price"], row["raw"]) for row in rows} == {("2024-02-29", "1.50", "b'x'")}


@pytest.mark.parametrize(("keep", "more"), [("best", {}), ("pairs", {}), ("pairs", {"bradley_terry": 8.0})])
def test_empty_completions_are_in_no_row_that_is_trained_on(job, tmp_path, monkeypatch, keep, more):
    real = evaluate.sample_and_score

    def every_third_is_empty(*given):
        report = real(*given)
        made = [t if i % 3 else replace(t, text="", reward=2.0) for i, t in enumerate(report.trajectories)]
        return replace(report, trajectories=made)

    monkeypatch.setattr(evaluate, "sample_and_score", every_third_is_empty)
    written = sample.run(sample_config(job, tmp_path, keep, **more))
    rows = sample.read_rows(str(written.path))
    assert rows and written.empty == 16
    assert all(row[column] for row in rows for column in ("completion", "chosen", "rejected") if column in row)


def test_rankings_and_ratings_become_every_ordered_pair_without_ties():
    ranked = preferences.from_rankings([{"prompt": "p", "completions": ["a", "b", "c"], "ranking": [2, 1, 2]}])
    assert [(r["chosen"], r["rejected"]) for r in ranked.rows] == [("b", "a"), ("b", "c")] and ranked.ties == 1
    rated = preferences.from_ratings([{"prompt": "p", "completions": ["a", "b", "c"], "ratings": [5, 2, 4.5]}], scale=5, tie=0.5)
    assert [(r["chosen"], r["rejected"], r["margin"]) for r in rated.rows] == [
        ("a", "b", 3.0),
        ("c", "b", 2.5),
    ] and rated.ties == 1
    single = preferences.from_ratings([{"prompt": "p", "completions": ["a"], "ratings": [3]}])
    assert single.rows == [] and single.alone == 1
    together = preferences.group_by_prompt(
        [{"prompt": "p", "completion": c, "rating": r} for c, r in (("a", 1), ("b", 2))], "rating"
    )
    assert together == [{"prompt": "p", "completions": ["a", "b"], "ratings": [1, 2]}]
    assert [row["label"] for row in preferences.split_pairs(rated.rows)] == [True, False] * 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p", "completions": ["a", "b"], "ratings": [1, 9]}, "numbers from 1 to 5"),
        ({"prompt": "p", "completions": ["a", "b"], "ratings": [1]}, "one number for each"),
        ({"completions": ["a", "b"], "ratings": [1, 2]}, "'prompt' is missing"),
    ],
)
def test_malformed_ratings_are_refused_by_row(row, said):
    with pytest.raises(UserError, match=said) as refused:
        preferences.from_ratings([row], "my.jsonl", scale=5)
    assert "my.jsonl:1" in str(refused.value)


def test_a_row_may_hold_any_end_of_line_and_what_is_no_text_is_named(tmp_path):
    file, rows = tmp_path / "rows.jsonl", [{"prompt": "a\u2028b\x85c"}, {"prompt": "d"}]
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    assert sample.read_rows(str(file)) == rows
    file.write_bytes(b"{}\n\xff\n")
    with pytest.raises(UserError, match=r"rows.jsonl:2:1: is not UTF-8"):
        sample.read_rows(str(file))


def test_pairs_on_the_command_line(tmp_path, capsys):
    source, output = tmp_path / "ratings.jsonl", tmp_path / "pairs.jsonl"
    source.write_text(json.dumps({"prompt": "p", "completions": ["a", "b"], "ratings": [1, 2]}) + "\n")
    assert cli.main(["pairs", "--dataset", str(source), "--output", str(output)]) == 0
    assert "1 pairs" in capsys.readouterr().out
    assert json.loads(output.read_text()) == {"prompt": "p", "chosen": "b", "rejected": "a", "margin": 1.0}
    for wrong, said in (('{"x": 1}', "has the columns x"), ("[1]", "an object"), ("{", "not JSON")):
        source.write_text(wrong + "\n")
        output.unlink(missing_ok=True)
        assert cli.main(["pairs", "--dataset", str(source), "--output", str(output)]) == 2
        assert said in capsys.readouterr().err
