"""`psigrad check` shows the first rows as a run would read them."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import HEAD, save_chat_model

from psigrad import cli
from psigrad.language.data.row_rendering import RenderedRow, Segment
from psigrad.records.report import terminal
from psigrad_extras.preflight import check, first_rows


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"))


def test_check_shows_the_first_rows_of_any_form(chat: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(check, "run", lambda config, told, **how: [])
    monkeypatch.setattr(check, "report", lambda findings, **how: json.dumps([list(row) for row in how["rows"]]))
    file = tmp_path / "a.jsonl"
    talk = {"conversations": [{"from": "human", "value": "say a:"}, {"from": "gpt", "value": "a"}]}
    file.write_text("".join(json.dumps(talk) + "\n" for _ in range(5)))
    assert cli.main(["check", "--model", str(chat), "--dataset", str(file), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "In 5 rows conversations is read as messages." in err
    lines = out.splitlines()
    assert lines[:6] == [
        "a.jsonl:1",
        "  prompt  | <|im_start|>user",
        "  prompt  | say a:<|endoftext|>",
        "  prompt  | <|im_start|>assistant",
        "  trained | a<|endoftext|>",
        "  masked  | ",
    ]
    assert sum(line.startswith("a.jsonl") for line in lines) == 3 and "\033" not in out, "no colours where there are none"
    file.write_text(json.dumps({"question": "say a:", "answer": "a"}) + "\n")
    arguments = ["check", "--model", str(chat), "--dataset", str(file), "--columns", "question=prompt", "--json"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "1 plain prompt is sent as a user turn of the chat template;" in err
    assert json.loads(out)[0][1][0] == ["prompt", HEAD]


@pytest.mark.parametrize(
    ("method", "reads"),
    [
        (["sft", "--batch-size", "2"], ["prompt  | say a:", "trained | a<|endoftext|>"]),
        (["grpo", "--reward", "exact"], ["prompt  | say a:", "sampled | (the model's completion, which is trained)"]),
        (["dpo"], [line for x in "ab" for line in ("prompt  | say a:", f"trained | {x}<|endoftext|>")]),
        (["kto"], ["prompt  | say a:", "trained | a<|endoftext|>"]),
        (["dpo", "--loss", "kto"], ["prompt  | say a:", "trained | a<|endoftext|>"]),
        (["reward", "--process"], ["prompt  | say a:", "trained | a", "trained | b"]),
    ],
)
def test_check_shows_what_a_method_trains_on(method, reads, chat: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(check, "run", lambda config, told, **how: [])
    monkeypatch.setattr(check, "report", lambda findings, **how: "")
    row = {"prompt": "say a:", "answer": "a", "completion": "a", "chosen": "a", "rejected": "b", "label": True}
    row |= {"completions": ["a", "b"], "labels": [True, False]}
    wanted = {"dpo": ("chosen", "rejected"), "kto": ("completion", "label"), "--process": ("completions", "labels")}
    columns = ("prompt", *wanted.get(method[-1], ("completion", "answer")))
    (tmp_path / "a.jsonl").write_text(json.dumps({name: row[name] for name in columns}) + "\n")
    given = ["--model", str(chat), "--dataset", str(tmp_path / "a.jsonl"), "--device", "cpu", "--plain-prompts"]
    assert cli.main(["check", *method, *given]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line in reads] == reads


def test_each_kind_has_a_colour_of_its_own_where_there_are_colours(capsys: Any, monkeypatch: Any) -> None:
    """By the terminal's own numbers: 36 is cyan, 32 green, 33 yellow."""
    monkeypatch.setattr(terminal, "Console", partial(terminal.Console, force_terminal=True, color_system="standard"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    pieces = [Segment("prompt", "say a:"), Segment("trained", "a"), Segment("masked", "b")]
    terminal.print_lines(first_rows.lines([RenderedRow("x:1", pieces)]))
    shown = capsys.readouterr().out.splitlines()
    assert [re.findall(r"\033\[(\d+)m", line)[0] for line in shown] == ["1", "36", "32", "33"]
