"""What rewards give to completions that are there already: psigrad score --reward."""

from __future__ import annotations

import json

import pytest
from tiny_rewards import broken, strict, wants_tokens

from psigrad import cli
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.recipes import score_rows
from psigrad.language.recipes.score_rows import score, summary
from psigrad.language.rewards import Failed, Scored, Unscored

ROWS = [
    {"prompt": "2 + 2 = ", "completion": "4", "answer": "4"},
    {"prompt": "2 + 3 = ", "completion": "6", "answer": "5"},
    {"prompt": "2 + 4 = ", "completion": "six", "answer": "6"},
]


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_every_row_has_its_reward_its_parts_or_its_reason():
    found = score([strict], ROWS)
    assert [type(one.result) for one in found] == [Scored, Scored, Failed]
    assert [one.row()["reward"] for one in found] == [1.0, 0.0, 0.0]
    assert found[0].row()["parts"] == {"strict": 1.0} and found[0].source == "rows:1"
    assert "'six' is no number" in found[2].row()["reason"] and found[2].row()["status"] == "failed"
    assert all(one.seconds > 0 for one in found)
    assert summary(found).startswith("3 rows: mean reward 0.3333, 1 failed, 0 unscored")


def test_a_reward_that_raises_leaves_rows_unscored_and_says_why():
    (one, *_) = score([broken], ROWS[:1])
    assert isinstance(one.result, Unscored) and one.row()["reward"] is None
    assert "KeyError" in one.row()["reason"] and "tiny_rewards.py" in one.row()["reason"]


def test_several_rewards_are_weighed():
    (one, *_) = score([strict, "exact"], ROWS[:1], weights=[0.25, 2.0])
    assert one.result.value == 2.25 and one.result.parts == {"strict": 1.0, "exact": 1.0}


def test_tokens_are_shown_where_a_tokenizer_is_named(tmp_path):
    tokenizer = tiny.tokenizer(["2 + 2 = 4 six"], 270)
    tokenizer.save_pretrained(tmp_path)
    rows = [{"prompt": "2", "completion": "six"}]
    (shown,) = score([wants_tokens], rows, tokenizer=str(tmp_path))
    assert shown.result.value >= len(tokenizer("six").input_ids) > 0
    (bare,) = score([wants_tokens], rows)
    assert bare.result.value == 0.0
    with pytest.raises(UserError, match="counts tokens; use --tokenizer to name the model"):
        score(["length"], rows)
    with pytest.raises(UserError, match="cannot be read"):
        score(["length"], rows, tokenizer=str(tmp_path / "nothing"))


def test_the_command(dataset, tmp_path, capsys):
    assert cli.main(["score", "--reward", "exact", "numeric", "--dataset", str(dataset)]) == 0
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["reward"] for row in rows] == [2.0, 0.0, 0.0] and rows[1]["parts"] == {"exact": 0.0, "numeric": 0.0}
    assert rows[0]["source"].endswith("rows.jsonl:1") and "3 rows: mean reward 0.6667" in said.err
    output = tmp_path / "new" / "scores.jsonl"
    assert cli.main(["score", "--reward", "exact", "--dataset", str(dataset), "--output", str(output)]) == 0
    assert len(output.read_text().splitlines()) == 3
    weighed = ["score", "--reward", "exact", "numeric", "--reward-weights", "1", "-0.25", "--dataset", str(dataset)]
    capsys.readouterr()
    assert cli.main(weighed) == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [0.75, 0.0, 0.0]


def test_a_reward_with_parameters_is_given_as_in_training(dataset, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def near(data_source, solution_str, ground_truth, extra_info):\n    return abs(int(solution_str) - 5)\n"
    )
    wrapped = f"{{reward: verl, function: '{tmp_path}/mine.py:near'}}"
    dataset.write_text(
        json.dumps({"prompt": "2", "completion": "8", "data_source": "sums", "reward_model": {"ground_truth": "5"}}) + "\n"
    )
    assert cli.main(["score", "--reward", wrapped, "--dataset", str(dataset)]) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 3.0


def test_the_place_of_the_scores_is_looked_at_before_anything_is_scored(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(score_rows, "score", lambda *given, **also: pytest.fail("it scored"))
    assert cli.main(["score", "--reward", "exact", "--dataset", str(dataset), "--output", str(tmp_path)]) == 2
    assert "cannot be written: Is a directory; name another file as --output." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--reward", "exact"], "No dataset was given"),
        (["--reward", "exakt", "--dataset", "DATASET"], "exact"),
        (["--reward", "exact", "--dataset", "nothing.jsonl"], "nothing.jsonl"),
        (["--reward", "exact", "--model", "x", "--dataset", "DATASET"], "--model and --reward"),
        (["--reward", "exact", "--reward-weights", "much", "--dataset", "DATASET"], "expected a finite number"),
    ],
)
def test_mistakes_are_one_sentence(dataset, capsys, arguments, said):
    assert cli.main(["score", *(str(dataset) if a == "DATASET" else a for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_a_row_whose_gold_is_not_read_whole_is_unscored_and_says_why():
    """The audit's smallest inputs: 2 for 2√3, and 30 for 12:30 that is a time."""
    rows = [
        {"prompt": "q", "completion": "\\boxed{2}", "answer": "2\\sqrt{3}"},
        {"prompt": "q", "completion": "12:30", "answer": "12:30"},
        {"prompt": "q", "completion": "5", "answer": None},
    ]
    odd, time, none = score(["numeric"], rows)
    assert isinstance(odd.result, Unscored)
    assert odd.row()["reason"] == r"numeric: the answer '2\\sqrt{3}' is no plain number; for expressions, use the reward 'math'"
    assert time.row()["reward"] == 1.0 and time.row()["reason" if "reason" in time.row() else "parts"] == {"numeric": 1.0}
    assert "no reward function applies" in none.row()["reason"]
    wrong, *_ = score(["math"], rows[:1])
    assert wrong.row()["reward"] == 0.0


def test_the_columns_of_a_file_are_gathered_once(monkeypatch):
    """For each row anew, a file of 50,000 rows would take minutes before its first score."""
    looked, real = [], score_rows.column_names
    monkeypatch.setattr(score_rows, "column_names", lambda rows: looked.append(len(rows)) or real(rows))
    found = score([strict], [*ROWS, {**ROWS[0], "note": "n"}])
    assert looked == [4] and [one.result.value for one in found] == [1.0, 0.0, 0.0, 1.0]


def test_score_leaves_malformed_rows_out_as_its_message_advises(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    file.write_text("prompt,completion,answer\na,b,b\n,b,b\nc,,d\n")
    command = ["score", "--reward", "exact", "--dataset", str(file)]
    assert cli.main(command) == 2 and "skip malformed rows with --bad-rows skip" in capsys.readouterr().err
    assert cli.main([*command, "--bad-rows", "skip"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["source"] == "rows.csv:2"
    assert "2 malformed rows are left out: 1 because column 'prompt' is empty (null)" in found.err
