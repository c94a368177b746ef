"""The whole way: a GRPO run's rollouts are labelled blind, exported, and trained on by DPO, KTO and a reward model."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest
from tiny_jobs import make_job, online_config, preference_config, reward_config

from psigrad.config import Data
from psigrad.language.recipes import online, preference, reward
from psigrad_studio.labels import assignments, export, intake
from psigrad_studio.labels.questions import Question


@pytest.mark.one_database
def test_from_rollouts_over_votes_to_training(desks, db, tmp_path):
    job = make_job(tmp_path)
    online.run(online_config(job, tmp_path / "grpo", max_steps=3, save_steps=0))
    made = desks(strengths=3, questions=(Question("long"), Question("short", weight=3)))
    added = intake.add_run(db, made.owner, made.project, tmp_path / "grpo")
    assert added.tasks > 20
    while (shown := made.next(made.owner)) is not None:
        lengths = [len(c) for c in shown.completions]
        choice = "tie" if lengths[0] == lengths[1] else ("left", "right")[lengths.index(max(lengths))]
        other = {"left": "right", "right": "left", "tie": "tie"}[choice]
        own = {"long": {"value": choice}, "short": {"value": other}}
        made.vote(made.owner, shown, choice, strength=None if choice == "tie" else 2, answers=own)
    assert assignments.mine(db, made.owner, made.project)["answered"] == added.tasks
    pairs = export.preference(db, made.owner, made.project, margin=True)
    thumbs = export.unpaired(db, made.owner, made.project)
    assert len(pairs.rows) + pairs.left_out["tie"] == added.tasks and len(thumbs.rows) == 2 * len(pairs.rows)
    assert all(len(row["chosen"]) > len(row["rejected"]) for row in pairs.rows)
    rollouts = [json.loads(line) for line in (tmp_path / "grpo" / "rollouts.jsonl").read_text().splitlines()]
    by_name = {(r["step"], r["row"], r["k"]): r["completion"] for r in rollouts if r["kind"] == "train"}
    for row in pairs.rows:
        for side in ("chosen", "rejected"):
            for origin in row["lineage"][side]:
                assert origin["run"] == "grpo" and by_name[origin["step"], origin["row"], origin["k"]] == row[side]
    export.write(tmp_path / "labelled.jsonl", pairs.rows)
    export.write(tmp_path / "thumbs.jsonl", thumbs.rows)
    for name in ("long", "short", "weighted"):
        export.write(tmp_path / f"{name}.jsonl", export.preference(db, made.owner, made.project, margin=True, aspect=name).rows)
    short = {"max_steps": 2, "save_steps": 0}
    labelled = Data(dataset=str(tmp_path / "labelled.jsonl"))
    preference.run(replace(preference_config(job, tmp_path / "dpo", **short), data=labelled))
    reward.run(replace(reward_config(job, tmp_path / "rm", **short), data=labelled))
    kto = preference_config(job, tmp_path / "kto", loss="kto", **short)
    preference.run(replace(kto, data=Data(dataset=str(tmp_path / "thumbs.jsonl"))))
    texts = [{"prompt": row["prompt"], "completion": row[side]} for row in pairs.rows for side in ("chosen", "rejected")]
    for name in ("long", "short", "weighted"):  # a reward model for each aspect: opposite votes make opposite models
        data = Data(dataset=str(tmp_path / f"{name}.jsonl"))
        result = reward.run(replace(reward_config(job, tmp_path / name, max_steps=20, save_steps=0), data=data))
        scores = [row["reward"] for row in reward.score_rows(str(result.model), texts)]
        long, brief = fmean(scores[::2]), fmean(scores[1::2])
        assert (long > brief) == (name == "long"), (name, brief, long)
    for name in ("dpo", "rm", "kto"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert {row["step"] for row in rows} >= {1, 2} and all(row.get("loss") != "NaN" for row in rows)
