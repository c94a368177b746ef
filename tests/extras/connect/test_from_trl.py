"""`psigrad from-trl`: every field of TRL's configurations is known, and scripts become settings that load."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
import trl
import yaml

from psigrad import cli
from psigrad.cli import flags
from psigrad.compat.foreign_names import load, resolve_names
from psigrad.compat.table import TABLE
from psigrad.compat.translate import is_known
from psigrad.compat.trl import DEFAULTS, METHODS
from psigrad.config import OnlineConfig, PreferenceConfig
from psigrad.config.algorithms import resolve_loss, resolve_online
from psigrad.config.methods import declaration, other_methods
from psigrad.config.nested import names_of
from psigrad.errors import UserError
from psigrad.objective.explain import label
from psigrad_extras.connect.trl_scripts import convert_file

EXPERIMENTAL = {"OnlineDPOConfig": "online_dpo", "ORPOConfig": "orpo", "CPOConfig": "cpo"}
CLASSES = {
    name: getattr(trl, name, None) or getattr(importlib.import_module(f"trl.experimental.{EXPERIMENTAL[name]}"), name)
    for name in METHODS
    if name != "PPOConfig"  # TRL 1.x has none any more
}
OTHERS = {"ModelConfig": trl.ModelConfig, "ScriptArguments": trl.ScriptArguments}


def default(field):
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


@pytest.mark.parametrize("name", [*CLASSES, *OTHERS])
def test_every_field_of_trl_is_known(name):
    fields = {field.name for field in dataclasses.fields({**CLASSES, **OTHERS}[name])}
    ours = names_of(METHODS.get(name, ("", OnlineConfig))[1])
    assert not sorted(field for field in fields - {*ours} if not is_known(field) and not other_methods(OnlineConfig, field))
    assert not is_known("frobnicate")


def test_every_configuration_of_trl_is_converted_or_named():
    public = {name for name in dir(trl) if name.endswith("Config")}
    assert public - {*CLASSES, *OTHERS} == {"DatasetMixtureConfig"}


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_are_trls(name):
    real = {field.name: default(field) for field in dataclasses.fields(CLASSES[name])}
    assert {key: real[key] for key in DEFAULTS[name]} == DEFAULTS[name]
    for key in (key for key in real.keys() & TABLE.keys() if TABLE[key].usual):
        if (name, key) not in {("KTOConfig", "train_sampling_strategy")}:
            assert real[key] in TABLE[key].usual, key


SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

raise SystemExit("a script is read, not run")
MODEL = "org/model"

def brevity(completions, **columns):
    return [-len(text) for text in completions]

dataset = load_dataset("openai/gsm8k", "main", split="train")
args = GRPOConfig(
    output_dir=f"runs/{MODEL}", learning_rate=1e-5, per_device_train_batch_size=4, gradient_accumulation_steps=4, beta=0.01,
    num_generations=8, scale_rewards=False, max_completion_length=64 * 4, epsilon_high=0.28, log_completions=True, seed=seed(),
    load_best_model_at_end=True,
)
trainer = GRPOTrainer(
    model=MODEL, args=args, reward_funcs=[accuracy_reward, brevity], train_dataset=dataset, callbacks=[Mine()],
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", lora_bias=True),
)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def converted(path: str, trainer: str = ""):
    return convert_file(path, trainer)


@pytest.mark.parametrize("name", ["GRPOConfig", "DPOConfig", "SFTConfig", "RewardConfig"])
def test_pushing_to_the_hub_is_taken_over(here, name):
    Path("mine.py").write_text(
        f"from trl import {name}\n"
        f"args = {name}(output_dir='out', push_to_hub=True, hub_model_id='me/it', hub_private_repo=True, hub_revision='b')\n"
    )
    made = converted("mine.py", name.removesuffix("Config").lower())
    found = {key.removeprefix("hub."): value for key, value in made.settings.items() if key.startswith("hub.")}
    assert found == {"push_to_hub": True, "hub_model_id": "me/it", "hub_private_repo": True, "hub_revision": "b"}
    assert not made.no_equal


def test_a_script_is_read_without_being_run(here):
    Path("mine.py").write_text(SCRIPT)
    made = converted("mine.py")
    assert made.method == "grpo" and made.settings == {
        "algorithm.aggregate": "token_mean",
        "algorithm.surrogate.high": 0.28,
        "algorithm.psi": {"part": "group_mean", "std": False},
        "algorithm.kl.coefficient": 0.01,
        "algorithm.kl.importance_weighted": True,
        "evaluation.eval_prompts": 0,
        "evaluation.load_best_model_at_end": True,
        "model.path": "org/model",
        "model.lora_rank": 16,
        "model.lora_alpha": 32,
        "reward": ["trl.rewards:accuracy_reward", "mine.py:brevity"],
        "data.dataset": "openai/gsm8k:main",
        "run.output_dir": "runs/org/model",
        "run.num_train_epochs": 3.0,
        "run.seed": 42,
        "run.save_steps": 500,
        "optim.learning_rate": 1e-5,
        "prompts_per_step": 2,
    }
    assert made.look_at == [
        "seed = seed(): the value is known only when the script runs; add the setting.",
        "callbacks=[Mine()]: pass the callbacks as callbacks=[…] or --callbacks file.py:Class.",
    ]
    assert [line.split(":")[0] for line in made.no_equal] == ["LoraConfig(lora_bias=True)"]
    assert [line.split(":")[0] for line in made.nothing] == ["log_completions"]


@pytest.mark.parametrize(
    ("files", "split", "dataset", "its"),
    [
        ('"d.jsonl"', "train", "d.jsonl", None),
        ('{"train": "d.jsonl", "test": "t.jsonl"}', "test", "t.jsonl", None),
        ('{"train": ["a.jsonl", "b.jsonl"]}', "train", ["a.jsonl", "b.jsonl"], None),
        ("{where: what}", "train", None, None),
    ],
)
def test_files_that_load_dataset_reads_are_named(files, split, dataset, its, here):
    Path("mine.py").write_text(
        "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        f'data = load_dataset("json", data_files={files}, split="{split}")\n'
        'SFTTrainer("org/model", SFTConfig(output_dir="out"), train_dataset=data).train()\n'
    )
    made = converted("mine.py")
    assert (made.settings.get("data.dataset"), made.settings.get("data.split")) == (dataset, its)
    assert dataset is not None or any("the file that load_dataset reads" in line for line in made.look_at)


def test_a_part_of_a_dataset_is_its_file_and_what_trl_splits_off_is_told(here):
    Path("mine.py").write_text(
        "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        'data = load_dataset("json", data_files="d.jsonl", split="train").shuffle(seed=1).train_test_split(0.1)\n'
        'SFTTrainer("m", SFTConfig(eval_strategy="steps"), train_dataset=data["train"], eval_dataset=data["test"]).train()\n'
    )
    made = converted("mine.py")
    assert made.settings["data.dataset"] == "d.jsonl" and "data.eval_dataset" not in made.settings
    assert any("eval_dataset is a random part" in line for line in made.look_at)


def test_a_field_of_another_version_of_trl_stops_nothing(here):
    Path("old.py").write_text("from trl import DPOConfig\nDPOConfig(beta=0.3, rpo_alpha=0.5, use_logits_to_keep=True)\n")
    made = converted("old.py")
    assert made.settings["loss.beta"] == 0.3 and made.settings["loss.sft"] == 0.5
    assert any(line.startswith("use_logits_to_keep=True: DPOConfig of TRL 1.16 has no such field") for line in made.look_at)


def test_teaching_the_assistant_alone_needs_nothing(here):
    Path("a.py").write_text("from trl import SFTConfig\nSFTConfig(assistant_only_loss=True)\n")
    assert "assistant" not in "".join([*converted("a.py").differs, *converted("a.py").no_equal])
    Path("b.py").write_text("from trl import SFTConfig\nSFTConfig()\n")
    assert "In rows of messages psigrad trains only on the assistant's turns" in "".join(converted("b.py").differs)


@pytest.mark.parametrize(("value", "dataset"), [('"org/data"', "org/data"), ("None", None)])
def test_a_dataset_may_be_a_name_or_none(value, dataset, here):
    Path("mine.py").write_text(f'from trl import SFTConfig, SFTTrainer\nSFTTrainer("m", SFTConfig(), train_dataset={value})\n')
    made = converted("mine.py")
    assert made.settings.get("data.dataset") == dataset and not made.look_at


def test_reward_functions_of_trls_command_line_are_functions(here):
    rewards = ["mine.good", "accuracy_reward", "get_soft_overlong_punishment"]
    Path("c.yaml").write_text(yaml.safe_dump({"epsilon": 0.2, "reward_funcs": rewards, "reward_model_name_or_path": "org/m"}))
    made = converted("c.yaml")
    overlong = {"reward": "soft_overlong", "max_completion_length": 1280, "soft_punish_cache": 256}
    assert made.settings["reward"] == ["mine:good", "accuracy_reward", overlong]


@pytest.mark.parametrize("more", ["", "report_to='none', "])
def test_the_yaml_and_the_command_give_the_same_settings(more, here, capsys):
    Path("mine.py").write_text(SCRIPT.replace("GRPOConfig(", f"GRPOConfig({more}", 1))
    assert cli.main(["from-trl", "mine.py", "--output", "run.yaml"]) == 0
    assert cli.main(["from-trl", "mine.py"]) == 0
    said = capsys.readouterr().out
    assert said.count("# no equivalent in psigrad:") == 2 and said.startswith("# psigrad grpo --config run.yaml")
    typed = next(line for line in said.splitlines() if line.startswith("# psigrad grpo --model") or "algorithm.aggregate" in line)
    words = shlex.split(typed.removeprefix("# psigrad grpo"))
    assert flags.parse(OnlineConfig, "grpo", words, {"algorithm": "grpo"}) == load(OnlineConfig, "run.yaml")


def test_the_file_may_be_in_a_folder_to_be_made_and_must_be_one_that_can_be_written(here, capsys):
    Path("mine.py").write_text(SCRIPT)
    assert cli.main(["from-trl", "mine.py", "--output", "new/run.yaml"]) == 0 and Path("new/run.yaml").exists()
    assert cli.main(["from-trl", "mine.py", "--output", "new"]) == 2
    assert "new cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_of_every_trainer_become_settings_that_load(name, here):
    Path("mine.py").write_text(f"args = {name}(output_dir='runs/x')")
    made = converted("mine.py")
    settings = METHODS[name][1]
    config = load(settings, flags={**declaration(made.method).defaults, **made.settings})
    real = DEFAULTS[name]
    assert config.optim.learning_rate == real["learning_rate"] and config.run.seed == 42 and config.run.num_train_epochs == 3


@pytest.mark.parametrize(
    ("given", "part", "expected"),
    [
        ({"loss_type": "dr_grpo", "max_completion_length": 99}, "aggregate", "fixed_length(n=99)"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "surrogate", "truncated_weight"),
        ({"loss_type": "sapo"}, "surrogate", "soft_clip"),
        ({"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, "correction", "None"),
        ({"delta": 2.0}, "surrogate", "bound=2.0"),
        ({"off_policy_mask_threshold": 0.5}, "surrogate", "off_policy_mask"),
        ({"importance_sampling_level": "sequence"}, "ratio", "sequence"),
        ({"scale_rewards": "batch"}, "psi", "group_mean_batch_std"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "psi", "decoupled_group_mean"),
        ({"beta": 0.04}, "kl", "importance_weighted=True"),
        ({"use_vllm": True}, "correction", "masked_importance"),
        ({}, "aggregate", "token_mean"),
    ],
)
def test_grpos_options_become_parts(given, part, expected, here):
    Path("c.yaml").write_text(yaml.safe_dump({**given, "learning_rate": 1e-6}))
    made = converted("c.yaml", "grpo")
    config = load(OnlineConfig, flags={**declaration("grpo").defaults, **made.settings})
    held = getattr(resolve_online(config.algorithm), part)
    assert expected in label(held), label(held)


@pytest.mark.parametrize(
    ("loss", "method", "beta"),
    [
        ("sigmoid", "dpo", 0.1),
        ("ipo", "ipo", 0.1),
        (["sigmoid", "sft"], "dpo", 0.1),
        ("robust", "robust_dpo", 0.1),
    ],
)
def test_preference_losses(loss, method, beta, here):
    given = {"loss_type": loss, "beta": beta, "label_smoothing": 0.2, "precompute_ref_log_probs": True}
    Path("c.yaml").write_text(yaml.safe_dump(given))
    made = converted("c.yaml")
    config = load(PreferenceConfig, flags={**declaration(made.method).defaults, **made.settings})
    found = resolve_loss(config.loss)
    assert made.method == method and found.beta == beta and found.sft == (1.0 if isinstance(loss, list) else 0.0)


def test_yaml_of_trls_command_line(here):
    Path("c.yaml").write_text(yaml.safe_dump({
        "model_name_or_path": "org/m", "dataset_name": "org/d", "dataset_config": "main", "use_peft": True, "lora_r": 8,
        "packing": True, "bf16": True, "eval_strategy": "steps", "eval_steps": 10, "warmup_ratio": 0.1, "neftune_noise_alpha": 5,
    }))  # fmt: skip
    made = converted("c.yaml")
    assert made.method == "sft" and made.settings["model.path"] == "org/m" and made.settings["data.dataset"] == "org/d:main"
    assert made.settings["model.lora_rank"] == 8 and made.settings["evaluation.eval_steps"] == 10
    told = "\n".join([*made.differs, *made.no_equal])
    assert (
        "warmup_ratio is 0.1, a share of a run whose length is given in epochs" in told
        and "packing" in told
        and "neftune_noise_alpha=5" in told
    )


def test_a_value_that_a_setting_does_not_take_stands_among_what_has_no_equal(here):
    for value, said in (
        ("steps", "optim.lr_scheduler_type is 'steps'; expected 'linear', 'cosine'"),
        ("reduce_lr_on_plateau", "lr_scheduler_type is 'reduce_lr_on_plateau': a callback can follow a metric"),
    ):
        Path("c.yaml").write_text(yaml.safe_dump({"packing": True, "lr_scheduler_type": value, "learning_rate": 0.5}))
        made = converted("c.yaml")
        assert "optim.lr_scheduler_type" not in made.settings and made.settings["optim.learning_rate"] == 0.5
        assert any(said in line for line in made.no_equal), made.no_equal


@pytest.mark.parametrize(("given", "told"), [({}, True), ({"bf16": False}, False), ({"fp16": True}, False)])
def test_trls_bfloat16_by_default_is_told(given, told, here):
    Path("c.yaml").write_text(yaml.safe_dump({"packing": True, **given}))
    assert any("unless bf16=False" in line for line in converted("c.yaml").differs) is told


def test_a_share_of_warm_up_is_counted_where_the_steps_are_known(here):
    Path("c.yaml").write_text(yaml.safe_dump({"packing": True, "warmup_ratio": 0.1, "max_steps": 25}))
    made = converted("c.yaml")
    assert made.settings["optim.warmup_steps"] == 3 and not any("warmup" in line for line in made.differs)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("absent.py", None, "cannot be read"),
        ("a.py", "def (", "is not Python"),
        ("a.py", "x = 1", "uses none of TRL's configurations"),
        ("a.py", "GRPOConfig(learning_rat=1)", "has no field 'learning_rat'; did you mean 'learning_rate'"),
        ("a.yaml", "num_processes: 2\ndistributed_type: FSDP", "configuration of accelerate; .* --processes 2 --strategy fsdp"),
        ("a.yaml", "learning_rate: 1", "does not say which trainer it is for; add --trainer"),
        ("a.py", "GRPOConfig(num_generations=7)", "is not a multiple of num_generations 7"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(name, text, sentence, here, capsys):
    if text is not None:
        Path(name).write_text(text)
    assert cli.main(["from-trl", name]) == 2
    said = capsys.readouterr().err
    assert re.search(sentence, said) and said.count("\n") == 1


def test_the_command_says_how_it_is_used(capsys):
    assert cli.main(["from-trl"]) == 2 and "the usage is psigrad from-trl SCRIPT.py|CONFIG.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        cli.main(["from-trl", "--help"])
    assert left.value.code == 0 and "--trainer TRAINER" in capsys.readouterr().out
    assert cli.main(["from-trl", "x.py", "--trainer", "gpo"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_trl_is_taken_or_answered_as_a_keyword(name):
    """Never by a name that merely looks alike."""
    settings = METHODS[name][1]
    for field in (field for one in (CLASSES[name], *OTHERS.values()) for field in dataclasses.fields(one)):
        try:
            resolve_names(settings, {field.name: "a value"})
        except UserError as error:
            assert (": " in str(error) or "psigrad takes only" in str(error)) and "did you mean" not in str(error), error


TRAINERS = {"GRPOConfig": "GRPO", "RLOOConfig": "RLOO", "SFTConfig": "SFT", "DPOConfig": "DPO", "RewardConfig": "Reward"}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_argument_of_trls_trainers_is_taken_or_answered_and_its_default_needs_nothing(name):
    arguments = list(inspect.signature(getattr(trl, f"{TRAINERS[name]}Trainer").__init__).parameters.values())[1:]
    for one in arguments:
        try:
            resolve_names(METHODS[name][1], {one.name: "a value"})
        except UserError as error:
            assert ": " in str(error) and "did you mean" not in str(error), error
    usual = {one.name: one.default for one in arguments if one.default is not inspect.Parameter.empty}
    usual = {
        key: value for key, value in usual.items() if key not in ("model", "train_dataset", "eval_dataset", "callbacks", "tools")
    }
    assert load(METHODS[name][1], flags=resolve_names(METHODS[name][1], usual)) == load(METHODS[name][1])
