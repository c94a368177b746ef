"""The referee beside TRL itself: equal settings, every field of GRPOConfig changed alone, and differences planted in TRL."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import referee_jobs
import torch
import trl
import yaml

from psigrad_extras.referee import first_difference, recording, trl_side

pytestmark = pytest.mark.long
SINGLE = {"num_iterations": 1}
# The settings of both sides, besides those of `referee_jobs.SETTINGS`.
BASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {**SINGLE, "lr_scheduler_type": "linear"},
    "epochs": {**SINGLE, "lr_scheduler_type": "linear", "max_steps": -1, "num_train_epochs": 2},
    "cosine": {**SINGLE, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "sync": {**SINGLE, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "no sync": {**SINGLE, "ref_model_sync_steps": 1},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "truncated": {"mask_truncated_completions": True},
    "filtered": {"top_p": 0.9, "top_k": 50},
    "small rewards": {"reward_weights": [0.05, 0.025]},
    "decay": {"weight_decay": 0.1},
    "chat": {},
}
# Settings that have no effect until the changed field is on, and that psigrad has no equal of.
IDLE = {"adaptive": {"entropy_target": 100.0, "entropy_coef_delta": 0.1}}
# field -> [(its value on TRL's side, the base, the first tensor that parts)]
CHANGED: dict[str, list[tuple[Any, str, str]]] = {
    "per_device_train_batch_size": [(4, "plain", "batch")],
    "gradient_accumulation_steps": [(1, "plain", "batch")],
    "generation_batch_size": [(32, "plain", "batch")],
    "steps_per_generation": [(4, "plain", "batch")],
    "num_generations": [(2, "plain", "batch")],
    "num_iterations": [(1, "plain", "batch")],
    "chat_template_kwargs": [({"shout": True}, "chat", "rendered prompt")],
    "max_completion_length": [(8, "plain", "completion ids"), (16, "plain", "completion ids")],
    "mask_truncated_completions": [(True, "plain", "mask")],
    "temperature": [(1.1, "plain", "sampling log-probs")],
    "top_p": [(0.8, "plain", "sampling log-probs")],
    "top_k": [(20, "plain", "sampling log-probs")],
    "min_p": [(0.1, "plain", "sampling log-probs")],
    "repetition_penalty": [(1.3, "plain", "sampling log-probs")],
    "generation_kwargs": [({"top_k": 20}, "plain", "sampling log-probs")],
    "bf16": [(True, "plain", "sampling log-probs")],
    "model_init_kwargs": [({"dtype": "bfloat16"}, "plain", "sampling log-probs")],
    "neftune_noise_alpha": [(5.0, "plain", "sampling log-probs")],
    "beta": [(0.0, "plain", "reference log-probs"), (0.2, "plain", "loss slopes")],
    "sync_ref_model": [(True, "no sync", "reference log-probs")],
    "ref_model_sync_steps": [(2, "sync", "reference log-probs")],
    "ref_model_mixup_alpha": [(1.0, "sync", "reference log-probs")],
    "reward_weights": [([1.0, 2.0], "plain", "rewards")],
    "scale_rewards": [("none", "plain", "advantages"), ("batch", "plain", "advantages")],
    "multi_objective_aggregation": [("normalize_then_sum", "plain", "advantages")],
    "loss_type": [
        *(("dr_grpo", "plain", "loss weights"), ("grpo", "plain", "loss weights"), ("bnpo", "plain", "loss weights")),
        *(("luspo", "plain", "loss weights"), ("cispo", "plain", "loss slopes")),
    ],
    "epsilon": [(0.2, "plain", "loss slopes")],
    "epsilon_high": [(0.2, "plain", "loss slopes")],
    "delta": [(1.04, "plain", "loss slopes")],
    "sapo_temperature_pos": [(5.0, "sapo", "loss")],
    "sapo_temperature_neg": [(5.0, "sapo", "loss")],
    **{f"vespo_{name}": [(4.0, "vespo", "loss slopes")] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "importance_sampling_level": [("sequence", "plain", "loss slopes")],
    "top_entropy_quantile": [(0.5, "plain", "loss slopes")],
    "off_policy_mask_threshold": [(1e-5, "plain", "loss slopes")],
    "use_bias_correction_kl": [(False, "plain", "loss slopes")],
    "entropy_coef": [(0.05, "plain", "loss")],
    "use_adaptive_entropy": [(True, "adaptive", "loss")],
    "learning_rate": [(2e-3, "plain", "learning rate")],
    "lr_scheduler_type": [("cosine", "plain", "learning rate")],
    "lr_scheduler_kwargs": [({"min_lr_rate": 0.5}, "cosine", "learning rate")],
    "warmup_steps": [(2, "linear", "learning rate")],
    "num_train_epochs": [(1, "epochs", "learning rate")],
    "max_steps": [(8, "linear", "learning rate")],
    "optim": [("adafactor", "plain", "update"), ("sgd", "plain", "update")],
    "weight_decay": [(1.0, "plain", "update")],
    "adam_beta1": [(0.5, "plain", "update")],
    "adam_beta2": [(0.9, "plain", "update")],
    "adam_epsilon": [(1e-4, "plain", "update")],
    "max_grad_norm": [(1e-3, "linear", "update")],
}  # fmt: skip
# Fields that change numbers, and cannot here: what they need, or what else has to be set.
UNSEEN = {
    "a draw that one side hands to the other": "seed data_seed shuffle_dataset train_sampling_strategy full_determinism",
    "a GPU or vLLM": "fp16 tf32 use_liger_kernel liger_kernel_config use_vllm",
    "a mixture of experts": "router_aux_loss_coef",
    "dropout, which psigrad has none of": "disable_dropout",
    "a model in half precision": "cast_lm_head_to_fp32",
    "use_adaptive_entropy, which psigrad has no equal of": "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
    "tools": "max_tool_calling_iterations",
    "another optimiser": "optim_args optim_target_modules",
}
# Fields by the beginning of their names that change no number of a training step, or only how the same is computed.
SILENT = (
    "output_dir average_tokens label_smoothing activation_ bf16_ fp16_ gradient_checkpointing torch_ use_cache auto_find "
    "logging_ log_ include_ disable_tqdm report_to run_name project trackio eval_ per_device_eval prediction_loss "
    "batch_eval save_ enable_jit push_to_hub hub_ load_best metric_for greater_is ignore_data restore_ use_cpu "
    "accelerator_config parallelism dataloader_ remove_unused label_names length_column ddp_ fsdp deepspeed debug "
    "skip_memory do_ resume_ local_rank trust_remote num_generations_eval ds3_ pad_to cache_implementation vllm_ "
    "num_completions use_transformers transformers_ "
)


@functools.cache
def jobs(folder: Path) -> Path:
    torch.set_num_threads(1)
    return referee_jobs.make_jobs(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return jobs(tmp_path_factory.mktemp("referee"))


@functools.cache
def settings_of(folder: Path, base: str) -> Any:
    """psigrad's settings for a base, from a run of TRL."""
    where = folder / f"base {base}"
    referee_jobs.record_trl(folder, where, base if base == "chat" else "plain", referee_jobs.SETTINGS | BASES[base])
    return trl_side.settings(json.loads((where / "about.json").read_text()), where)[0]


def first_parted(
    folder: Path, base: str, name: str, changed: dict[str, Any], trl_folder: Path | None = None
) -> first_difference.TensorResult:
    """The first finding that parts, or the last one: TRL with the change, psigrad without."""
    config, where = settings_of(folder, "plain" if base in IDLE else base), folder / name
    asked = referee_jobs.SETTINGS | BASES.get(base, {}) | IDLE.get(base, {}) | changed
    referee_jobs.record_trl(folder, where, base if base == "chat" else "plain", asked, trl_folder)
    about, theirs = json.loads((where / "about.json").read_text()), torch.load(where / "record.pt")
    ours, _ = recording.record(config, where, 2, theirs, about["rows"])
    for found in first_difference.compare(ours, theirs, ("psigrad", "TRL"), first_difference.TOLERANCE):
        if found.parts:
            break
    return found


@pytest.mark.parametrize("base", BASES)
def test_with_equal_settings_nothing_parts(folder, base):
    found = first_parted(folder, base, f"equal {base}", {})
    assert not found.parts and (found.step, found.name) == (2, "update"), found


@pytest.mark.parametrize(
    ("field", "value", "base", "first"), [(f, *case) for f, cases in CHANGED.items() for case in cases], ids=lambda x: str(x)
)
def test_a_changed_field_parts_where_it_acts(folder, field, value, base, first):
    found = first_parted(folder, base, f"{field} {value}", {field: value})
    assert (bool(found.parts), found.name) == (True, first), found


def test_every_field_of_grpo_config_has_its_place():
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    unseen = {name for names in UNSEEN.values() for name in names.split()}
    silent = {name for name in fields if name.startswith(tuple(SILENT.split()))}
    assert not (CHANGED.keys() & unseen or silent & (CHANGED.keys() | unseen))
    assert fields == silent | CHANGED.keys() | unseen


PLANTED = yaml.safe_load((Path(__file__).parent / "planted.yaml").read_text())


@pytest.mark.parametrize("planted", PLANTED, ids=[one["name"] for one in PLANTED])
def test_a_planted_difference_parts_where_it_acts(folder, tmp_path, planted):
    shutil.copytree(Path(trl.__file__).parent, tmp_path / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "trl/trainer" / planted.get("file", "grpo_trainer.py")
    text = file.read_text()
    assert text.count(planted["old"]) == 1
    file.write_text(text.replace(planted["old"], planted["new"]))
    found = first_parted(folder, planted.get("base", "plain"), f"planted {planted['name']}", {}, tmp_path)
    first = planted["first"] or "update"
    at = (planted.get("step", 1), planted.get("update", 0)) if planted["first"] else (2, 2)
    assert (bool(found.parts), found.name, found.step, found.update) == (bool(planted["first"]), first, *at), found
    assert planted.get("says", "") in " ".join(found.parts), found
