"""Rows that are too long, empty or too deep are found before the first step, by file and line, or left out when asked."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_environments import Sleepy
from tiny_jobs import online_config, preference_config, sft_config
from tiny_rewards import early_letters

from psigrad.errors import UserError
from psigrad.language.recipes import online, preference, sft


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def events(folder, kind):
    return [e for line in (folder / "events.jsonl").read_text().splitlines() if (e := json.loads(line))["kind"] == kind]


@pytest.fixture
def narrow(job, tmp_path):
    """The base model's folder with 24 positions."""
    shutil.copytree(job / "base", tmp_path / "narrow")
    file = tmp_path / "narrow" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 24}))
    return str(tmp_path / "narrow")


def with_rows(config, dataset, model=None, **data):
    made = replace(config, data=replace(config.data, dataset=dataset, **data))
    return made if model is None else replace(made, model=replace(made.model, path=model))


LONG = "say a: " * 30


def test_a_prompt_beyond_the_models_positions_is_found_before_the_first_step(job, tmp_path, narrow):
    rows = rows_of(job / "train.jsonl")
    rows[20] = {**rows[20], "prompt": LONG}
    config = with_rows(online_config(job, tmp_path / "run"), written(tmp_path / "rows.jsonl", rows), narrow)
    with pytest.raises(
        UserError, match=r"rows\.jsonl:21: the prompt has \d+ tokens, but only \d+ fit .* minus max_completion_length 4"
    ):
        online.run(config)
    assert not (tmp_path / "run").exists()


def test_such_rows_are_left_out_and_counted_when_asked(job, tmp_path, narrow, capsys):
    rows = rows_of(job / "train.jsonl")
    rows[20] = {**rows[20], "prompt": LONG}
    config = with_rows(online_config(job, tmp_path / "run"), written(tmp_path / "rows.jsonl", rows), narrow, bad_rows="skip")
    done = online.run(config)
    assert events(done.folder, "rows_left_out")[0]["longer_than_max_length"] == 1
    assert f"1 of {len(rows)} prompts have too many tokens and were skipped." in capsys.readouterr().err
    assert all(row["prompt"] != LONG for row in rows_of(done.folder / "rollouts.jsonl"))


def test_an_answer_that_its_reward_reads_only_in_part_is_refused_by_line(job, tmp_path):
    rows = [{**row, "answer": str(i)} for i, row in enumerate(rows_of(job / "train.jsonl"))]
    right = written(tmp_path / "right.jsonl", rows)
    rows[1] |= {"answer": "2\\sqrt{3}"}
    rows[2] |= {"answer": None}
    odd = written(tmp_path / "odd.jsonl", rows)
    base = replace(online_config(job, tmp_path / "run", max_steps=1), reward=("numeric", early_letters))
    every = written(tmp_path / "every.jsonl", [{**row, "answer": rows[1]["answer"]} for row in rows])
    for train, held_out, where in ((odd, right, r"odd\.jsonl:2"), (right, every, r"every\.jsonl:\d+")):
        with pytest.raises(
            UserError, match=where + r": numeric: the answer '2\\\\sqrt\{3\}' is no plain number.*--bad-rows skip"
        ):
            online.run(with_rows(base, train, eval_dataset=held_out))
    done = online.run(with_rows(base, odd, eval_dataset=right, bad_rows="skip"))
    (told,) = events(done.folder, "rows_left_out")
    assert (told["unjudged"], told["kept"]) == (1, len(rows) - 1)


def test_supervised_rows_are_cut_at_the_models_positions_and_that_is_told(job, tmp_path, narrow, capsys):
    rows = rows_of(job / "train.jsonl")
    rows = [{**row, "completion": " a" * 40} for row in rows[:8]] + [{**row, "completion": " a"} for row in rows[8:]]
    config = with_rows(sft_config(job, tmp_path / "run", max_steps=1), written(tmp_path / "rows.jsonl", rows), narrow)
    done = sft.run(config)
    assert events(done.folder, "rows_cut") == [
        {"time": events(done.folder, "rows_cut")[0]["time"], "kind": "rows_cut", "at": 24, "count": 8}
    ]
    assert f"8 of {len(rows)} texts are cut at 24 tokens." in capsys.readouterr().err


def test_comparisons_beyond_the_models_positions_are_left_out(job, tmp_path, narrow):
    config = preference_config(job, tmp_path / "run", max_steps=1)
    rows = rows_of(Path(config.data.dataset))
    rows = [{**row, "chosen": row["chosen"] + " a" * 40} for row in rows[:3]] + rows[3:]
    done = preference.run(with_rows(config, written(tmp_path / "rows.jsonl", rows), narrow))
    assert events(done.folder, "rows_left_out")[0]["longer_than_max_length"] == 3
    every = [{**row, "chosen": row["chosen"] + " a" * 40} for row in rows]
    with pytest.raises(UserError, match=r"rows have more than 24 tokens, the model's number of positions"):
        preference.run(
            with_rows(preference_config(job, tmp_path / "none", max_steps=1), written(tmp_path / "all.jsonl", every), narrow)
        )


def test_a_column_nested_too_deep_is_named_by_line(job, tmp_path):
    deep: object = 1
    for _ in range(800):
        deep = [deep]
    rows = rows_of(job / "train.jsonl")
    text = "".join(json.dumps(row) + "\n" for row in rows[:3]) + json.dumps({**rows[3], "extra": 0})[:-2]
    lines = text + "[" * 800 + "1" + "]" * 800 + "}\n" + "".join(json.dumps(row) + "\n" for row in rows[4:])
    (tmp_path / "rows.jsonl").write_text(lines)
    config = with_rows(online_config(job, tmp_path / "run"), str(tmp_path / "rows.jsonl"))
    with pytest.raises(UserError, match=r"rows\.jsonl:4.*'extra' is nested 800 levels deep; at most 100"):
        online.run(config)
    online.run(with_rows(online_config(job, tmp_path / "skip", max_steps=1), str(tmp_path / "rows.jsonl"), bad_rows="skip"))


def test_a_reference_with_fewer_positions_than_a_run_needs_is_refused(job, tmp_path, narrow):
    """Rotary positions go on beyond them, and give numbers."""
    rows = written(tmp_path / "rows.jsonl", [{**rows_of(job / "train.jsonl")[0], "prompt": "say a: " * 8}] * 8)
    config = replace(with_rows(online_config(job, tmp_path / "run", "rloo"), rows), reference=narrow)
    with pytest.raises(UserError, match=r"The reference has 24 positions, and texts of this run have up to \d+ tokens"):
        online.run(config)
    pairs = [{"prompt": "say a: " * 8, "chosen": " a" * (i + 1), "rejected": " b"} for i in range(12)]
    config = with_rows(preference_config(job, tmp_path / "dpo", "dpo"), written(tmp_path / "pairs.jsonl", pairs))
    with pytest.raises(UserError, match=r"The reference has 24 positions, and texts of this run have up to \d+ tokens"):
        preference.run(replace(config, reference=narrow))


@pytest.mark.parametrize(("method", "other"), [("rloo", "reference"), ("ppo", "critic")])
def test_an_episode_may_fill_the_policys_positions(job, tmp_path, narrow, method, other):
    """What an environment answers is not known before, so another model of the run needs as many positions as the policy has."""
    config = replace(online_config(job, tmp_path / "run", method, max_steps=1), environment=Sleepy, reward=())
    with pytest.raises(UserError, match=rf"The {other} has 24 positions, and texts of this run have up to \d+ tokens"):
        online.run(replace(config, **{other: narrow}))
