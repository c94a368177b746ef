"""The folder of a run where a model is expected: the model in it is meant. Commands: tests/extras/test_run_folders.py."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from tiny_jobs import sft_config

from psigrad.config import Model
from psigrad.errors import UserError
from psigrad.language.loading.model_source import find_adapter, locate, resolve_path
from psigrad.language.recipes import dispatch, sft


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints, and nothing in it that a loader would take."""
    for name in ("checkpoints/step-00000002", "checkpoints/step-00000010", "checkpoints/step-00000011"):
        (tmp_path / "run" / name).mkdir(parents=True)
        if not name.endswith("11"):  # this one is in shards
            (tmp_path / "run" / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": {"path": "base"}}))
    (tmp_path / "run" / "events.jsonl").write_text("")
    return tmp_path / "run"


def test_the_trained_model_is_meant_else_the_newest_checkpoint(run):
    newest = str(run / "checkpoints" / "step-00000010")
    for given in (run, run / "checkpoints", newest):
        assert resolve_path(str(given)) == locate(Model(path=str(given))) == newest
    (run / "model").mkdir()
    base = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"], "lora_alpha": 8}
    (run / "model" / "adapter_config.json").write_text(json.dumps(base | {"base_model_name_or_path": newest}))
    assert resolve_path(str(run)) == resolve_path(str(run / "model")) == str(run / "model")
    assert find_adapter(Model(path=str(run))).folder == run / "model"


def test_what_is_no_run_is_taken_as_it_is(run):
    for given in ("", "org/name", str(run.parent), "psigrad"):
        assert resolve_path(given) == given


def test_a_run_without_a_model_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=r"run' is a run that has saved no language model yet; give the folder of a model\.$"):
        resolve_path(str(run))


def test_a_run_of_transformers_is_one_too(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert resolve_path(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # save_model puts the model beside them
    assert resolve_path(str(tmp_path)) == str(tmp_path)


def test_a_model_that_is_nowhere_is_named_before_the_settings_of_another_run(job, tmp_path):
    made = sft_config(job, tmp_path / "run", max_steps=2)
    sft.run(made)
    for name in (str(job / "bsae"), "no-such/model-here"):
        other = replace(made, model=replace(made.model, path=name), batch_size=3)
        with pytest.raises(UserError, match=rf"There is no (folder|model) '{name}'"):
            dispatch.run(other)
    with pytest.raises(UserError, match="is a run with other settings \\(batch_size was 4 and is 3"):
        dispatch.run(replace(made, batch_size=3))
