"""`psigrad.train(args=…)` with configurations of TRL."""

from __future__ import annotations

import json

import pytest
import trl
import yaml
from tiny_rewards import right

import psigrad
from psigrad.compat.conversion import convert_object
from psigrad.config.algorithms import resolve_online
from psigrad.errors import UserError
from psigrad.objective.parts.ratio import KL


def trained(job, tmp_path, method, args, **more):
    data = job / ("pairs.jsonl" if method == "dpo" else "train.jsonl")
    return psigrad.train(
        method, model=job / "base", train_dataset=data, args=args, progress=False, report=False, threads=1, **more
    )


def written(result):
    return json.loads((result.folder / "config.json").read_text())


def test_a_run_has_the_settings_of_the_configuration(job, tmp_path):
    args = trl.GRPOConfig(
        use_cpu=True,
        bf16=False,
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=4,
        max_steps=2,
        learning_rate=1e-3,
        beta=0.04,
    )
    result = trained(job, tmp_path, "grpo", args, reward_funcs=right, max_steps=1)
    found = written(result)
    assert result.folder == tmp_path / "run"
    assert (found["prompts_per_step"], found["num_generations"]) == (2, 4), "8 completions are two prompts' groups"
    assert found["sampling"]["max_completion_length"] == 4 and found["optim"]["learning_rate"] == 1e-3
    assert resolve_online(found["algorithm"]).kl == KL("loss", "k3", 0.04, importance_weighted=True)
    assert found["run"]["max_steps"] == 1, "what is given besides comes first"
    assert found["evaluation"]["eval_prompts"] == 0, "TRL holds nothing out"


def test_a_loss_of_its_own_is_its_method_and_differences_are_warnings(job, tmp_path):
    args = trl.DPOConfig(use_cpu=True, bf16=False, output_dir=str(tmp_path), loss_type="ipo", max_steps=1, beta=0.3)
    assert convert_object(args).method == "ipo"
    result = trained(job, tmp_path, "dpo", args, eval_dataset=job / "pairs.jsonl")
    found = written(result)
    assert found["loss"]["preset"] == "ipo" and found["loss"]["beta"] == 0.3 and found["evaluation"]["eval_prompts"] is None
    args = trl.SFTConfig(use_cpu=True, bf16=False, output_dir=str(tmp_path / "sft"), max_steps=1, max_length=32)
    with pytest.warns(UserWarning, match="TRL by default trains on every token"):
        trained(job, tmp_path, "sft", args)


@pytest.mark.parametrize("config", ["GRPOConfig", "RLOOConfig", "SFTConfig", "DPOConfig", "RewardConfig"])
def test_of_a_fresh_object_nothing_is_asked_for_but_trls_defaults(config):
    made = convert_object(getattr(trl, config)(use_cpu=True, bf16=False))
    other = convert_object(getattr(trl, config)(use_cpu=True, bf16=False, learning_rate=0.5))
    assert not made.no_equal and not made.look_at and "run.output_dir" not in made.settings
    changed = {name for name in other.settings if other.settings[name] != made.settings.get(name)}
    assert changed == {"optim.learning_rate"} and yaml.safe_load(other.yaml())


def test_what_cannot_be_is_a_sentence():
    args = trl.GRPOConfig(use_cpu=True, bf16=False, optim="sgd")
    with pytest.raises(
        UserError,
        match=r"optim='sgd': set optimizer to adamw, adamw_8bit, muon or adafactor\. Remove them from GRPOConfig",
    ):
        psigrad.train("grpo", model="m", dataset="d", args=args)
    with pytest.raises(UserError, match=r'GRPOConfig, which is for grpo, but the method is \'dpo\'; call psigrad.train\("grpo"'):
        psigrad.train("dpo", model="m", dataset="d", args=trl.GRPOConfig(use_cpu=True, bf16=False))
