"""Names of TRL, verl and others: taken where they mean the same, computed where they count otherwise, else answered."""

from __future__ import annotations

import re

import pytest
from hub_stand_in import network
from huggingface_hub import constants
from transformers.trainer_utils import SchedulerType

import psigrad
from psigrad import cli
from psigrad.cli import flags
from psigrad.compat.foreign_names import load, resolve_names
from psigrad.compat.table import TABLE
from psigrad.config import OnlineConfig, PreferenceConfig, SFTConfig
from psigrad.config.algorithms import resolve
from psigrad.config.nested import names_of
from psigrad.config.shortcuts import SHORTCUTS
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.language.data import named_datasets


def parsed(*arguments: str, cls=OnlineConfig, **defaults):
    return flags.parse(cls, "grpo", arguments, defaults={"algorithm": "grpo"} if cls is OnlineConfig else defaults)


def from_file(text: str, tmp_path, cls=OnlineConfig, *overrides: str):
    (tmp_path / "run.yaml").write_text(text)
    return load(cls, tmp_path / "run.yaml", overrides)


THE_SAME = {
    "model_name_or_path": "a/b",
    "learning_rate": 1e-4,
    "dataset_name": "c",
    "reward_funcs": "exact",
    "lora_r": 8,
    "max_completion_length": 7,
    "bf16": True,
    "max_steps": -1,
    "num_train_epochs": 2,
    "report_to": "none",
    "logging_first_step": True,
    "lr_scheduler_type": "constant_with_warmup",
}


def is_the_same(config) -> bool:
    read = (config.model.path, config.data.dataset, config.reward, config.optim.learning_rate, config.model.lora_rank)
    run = (config.run.max_steps, config.run.num_train_epochs, config.run.report_to, config.optim.lr_scheduler_type)
    long, dtype = config.sampling.max_completion_length, config.model.dtype
    return (read, run, long, dtype) == (("a/b", "c", ("exact",), 1e-4, 8), (0, 2.0, (), "constant"), 7, "bfloat16")


def test_other_names_of_the_same_settings_are_taken_as_flags():
    assert is_the_same(parsed(*(text for name, value in THE_SAME.items() for text in (f"--{name}", str(value)))))
    assert is_the_same(parsed(*(f"--{name.replace('_', '-')}={value}" for name, value in THE_SAME.items())))


def test_other_names_of_the_same_settings_are_taken_as_overrides():
    assert is_the_same(parsed(*(f"{name}={str(value).lower()}" for name, value in THE_SAME.items())))


def test_a_flat_file_is_understood(tmp_path):
    lines = [f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in THE_SAME.items()]
    assert is_the_same(from_file("\n".join(lines), tmp_path))


def test_they_are_taken_in_python():
    assert is_the_same(load(OnlineConfig, flags=resolve_names(OnlineConfig, THE_SAME)))


def test_a_flag_beats_an_override_beats_the_file_by_whatever_name(tmp_path):
    (tmp_path / "run.yaml").write_text("lr: 1.0\nmodel: from/file\nnum_generations: 2\n")
    file = ["--config", str(tmp_path / "run.yaml")]
    assert parsed(*file).optim.learning_rate == 1.0 and parsed(*file).model.path == "from/file"
    assert parsed(*file, "optim.learning_rate=2").optim.learning_rate == 2
    assert parsed(*file, "learning_rate=2", "--lr", "3").optim.learning_rate == 3
    defaults = {"algorithm": "ppo", "num_generations": 1}
    assert flags.parse(OnlineConfig, "ppo", file, defaults).num_generations == 2
    assert flags.parse(OnlineConfig, "ppo", [], defaults).num_generations == 1


def test_a_switch_may_be_followed_by_true_or_false():
    assert parsed("--gradient_checkpointing", "true", "--seed", "3").model.gradient_checkpointing
    assert not parsed("--gradient_checkpointing", "False").model.gradient_checkpointing
    assert parsed("--use_vllm").sampling.sampler == "vllm" and parsed("--use_vllm", "false").sampling.sampler == "embedded"


def test_what_is_so_anyway_needs_nothing_and_its_opposite_is_answered(capsys):
    asked = flags.parse(SFTConfig, "sft", ["--assistant_only_loss", "--resume_from_checkpoint", "true", "--model", "m"])
    assert asked == flags.parse(SFTConfig, "sft", ["--model", "m"])
    assert load(SFTConfig, flags=resolve_names(SFTConfig, {"resume_from_checkpoint": True})) == load(SFTConfig)
    for given in (["--assistant_only_loss", "false"], ["--resume_from_checkpoint", "out/checkpoint-2"]):
        assert cli.main(["sft", *given]) == 2
        assert re.search(f"{given[0]} is .*; psigrad takes only True( or False)?: ", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["eval_strategy", "save_strategy"])
def test_no_is_no_also_where_yaml_reads_it_as_false(name, tmp_path, capsys):
    steps = {"eval_strategy": "eval_steps", "save_strategy": "save_steps"}[name]
    off = {"eval_strategy": ("--eval-prompts", "0"), "save_strategy": ("--save-minutes", "0")}[name]
    for said, count in (("no", 0), ("steps", 5)):
        found = from_file(f"{steps}: 5", tmp_path, OnlineConfig, f"{name}={said}")
        assert {"eval_steps": found.evaluation.eval_steps, "save_steps": found.run.save_steps}[steps] == count
        assert parsed(f"--{name}", said) == parsed(f"--{name}={said}") == (parsed() if said == "steps" else parsed(*off))
    assert from_file(f"{name}: no", tmp_path) == from_file(f"{steps}: 0\n{off[0][2:].replace('-', '_')}: 0", tmp_path)
    assert cli.main(["sft", f"--{name}", "best"]) == 2
    assert f"--{name} is 'best'; psigrad takes only 'steps', 'no' or 'epoch': " in capsys.readouterr().err


def test_a_value_without_a_setting_of_its_own_is_answered_too(capsys):
    with pytest.raises(UserError, match=r"^disable_tqdm is 3; psigrad takes only True or False\.$"):
        load(SFTConfig, flags={"disable_tqdm": 3})
    assert load(SFTConfig, flags={"resume_from_checkpoint": False}).run.resume == "never"
    with pytest.raises(UserError, match=r"^packing is True; psigrad takes only False: .*give the rows of a step as batch_size"):
        load(SFTConfig, flags={"packing": True})


def test_what_a_file_leaves_unset_is_left_out(tmp_path):
    unset = "run_name: null\nbf16: null\nwarmup_ratio: null\nper_device_train_batch_size: null\nresume_from_checkpoint: null\n"
    assert from_file(unset, tmp_path) == load(OnlineConfig)
    with pytest.raises(UserError, match="no setting 'unheard'"):
        from_file("unheard: null", tmp_path)


def test_once_an_epoch_is_a_number_of_steps(tmp_path, capsys):
    once = {"eval_strategy": "epoch", "save_strategy": "epoch", "eval_steps": 5}
    config = load(SFTConfig, flags=resolve_names(SFTConfig, once))
    assert (config.run.num_train_epochs, config.evaluation.eval_steps, config.run.save_steps) == (1, 0, 0)
    for given in ({"num_train_epochs": 3, "per_device_train_batch_size": 4}, {"max_steps": 100, "batch_size": 4}):
        with pytest.raises(UserError, match=r"an epoch has rows / batch_size of them; for 1,000 rows give eval_steps=250\.$"):
            load(SFTConfig, flags={"eval_strategy": "epoch", **resolve_names(SFTConfig, given)})
    assert cli.main(["grpo", "--save_strategy", "epoch", "--num_train_epochs", "2"]) == 2
    assert "rows / prompts_per_step of them; for 1,000 rows give save_steps=63." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cls", "name", "said"),
    [
        (OnlineConfig, "batch_size", "prompts_per_step sets the prompts of a step"),
        (SFTConfig, "prompts_per_step", "batch_size sets the rows of a step"),
        (SFTConfig, "num_generations", "it is a setting of the online methods"),
        (SFTConfig, "beta", "it is a setting of the online methods and the preference methods"),
    ],
)
def test_a_setting_of_other_methods_is_named_as_such(cls, name, said, tmp_path, capsys):
    with pytest.raises(UserError, match=f"there is no setting '{name}': {said}"):
        from_file(f"{name}: 3", tmp_path, cls)
    with pytest.raises(UserError, match=f"(?i)there is no setting '{name}': {said}"):
        load(cls, flags=resolve_names(cls, {name: 3}))
    assert cli.main([{OnlineConfig: "grpo", SFTConfig: "sft"}[cls], f"--{name}", "3"]) == 2
    assert said in capsys.readouterr().err


def test_values_keep_their_underscores():
    config = parsed("--reward", "my_module:my_reward", "other_module:f", "--output_dir=a_b")
    assert config.reward == ("my_module:my_reward", "other_module:f") and config.run.output_dir == "a_b"


@pytest.mark.parametrize(
    ("given", "prompts", "minibatches"),
    [
        ({"per_device_train_batch_size": 16}, 2, 1),
        ({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}, 8, 1),
        ({"gradient_accumulation_steps": 4}, 4, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 4, 4),
        ({"per_device_train_batch_size": 4, "generation_batch_size": 64}, 8, 16),
        ({"per_device_train_batch_size": 6, "num_generations": 3, "processes": 2}, 4, 1),
        ({"data.train_batch_size": 64, "actor_rollout_ref.actor.ppo_mini_batch_size": 16}, 64, 4),
    ],
)
def test_online_batch_sizes_are_computed(given, prompts, minibatches):
    config = load(OnlineConfig, flags=given)
    assert (config.prompts_per_step, config.num_minibatches) == (prompts, minibatches)


def test_they_are_what_trl_computes():
    import trl

    for p, a, s, g in ((16, 4, None, 8), (4, 2, 8, 4), (8, 1, None, 2)):
        theirs = trl.GRPOConfig(
            output_dir="x", per_device_train_batch_size=p, gradient_accumulation_steps=a, steps_per_generation=s,
            num_generations=g, bf16=False, use_cpu=True, report_to="none",
        )  # fmt: skip
        given = {"per_device_train_batch_size": p, "gradient_accumulation_steps": a, "num_generations": g}
        ours = load(OnlineConfig, flags=given | ({"steps_per_generation": s} if s else {}))
        assert ours.prompts_per_step * ours.num_generations == theirs.generation_batch_size
        assert ours.num_minibatches == theirs.steps_per_generation // a


def test_processes_of_torchrun_count(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load(OnlineConfig, flags={"per_device_train_batch_size": 8}).prompts_per_step == 4


def test_offline_batch_sizes_are_computed():
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "placement.processes": 2}
    assert load(SFTConfig, flags=given).batch_size == load(PreferenceConfig, flags=given).batch_size == 64


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"per_device_train_batch_size": 3},
            "3 completions at once × 1 = 3 a step, which is not a multiple of num_generations 8",
        ),
        ({"generation_batch_size": 24, "gradient_accumulation_steps": 2}, "24 completions a step, .* multiple of the 16"),
        ({"per_device_train_batch_size": 8, "prompts_per_step": 2}, "both set the size of a step"),
        ({"per_device_train_batch_size": "many"}, "expected a whole number"),
        ({"data.train_batch_size": 9, "actor_rollout_ref.actor.ppo_mini_batch_size": 2}, "does not divide"),
    ],
)
def test_batch_sizes_that_make_no_step_are_answered_with_the_arithmetic(given, said):
    with pytest.raises(UserError, match=said):
        load(OnlineConfig, flags=given)


def test_a_file_of_verl_is_understood(tmp_path):
    text = """
data: {train_files: a.parquet, train_batch_size: 32, max_response_length: 9, max_prompt_length: 5}
actor_rollout_ref:
  model: {path: m, use_remove_padding: true}
  actor: {optim: {lr: 2.0e-6}, ppo_mini_batch_size: 8}
  rollout: {n: 5, name: vllm, temperature: 0.7}
trainer: {total_epochs: 4, save_freq: 10, test_freq: 5, nnodes: 1}
custom_reward_function: {path: mine.py, name: score}
algorithm:
  kl_ctrl: {type: fixed, kl_coef: 0.02, horizon: 10000}
  filter_groups: {enable: true, metric: score}
  use_kl_in_reward: false
"""
    config = from_file(text, tmp_path)
    method = resolve(config.algorithm)
    assert method.kl.coefficient == 0.02 and method.keep and config.filter_metric == "score"
    assert (config.data.dataset, config.data.max_prompt_length, config.sampling.max_completion_length) == ("a.parquet", 5, 9)
    assert (config.model.path, config.optim.learning_rate, config.sampling.sampler) == ("m", 2e-6, "vllm")
    assert (config.prompts_per_step, config.num_minibatches, config.num_generations) == (32, 4, 5)
    assert (config.run.num_train_epochs, config.run.save_steps, config.evaluation.eval_steps) == (4, 10, 5)
    assert config.reward == ("mine.py:score",) and config.sampling.temperature == 0.7


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("{adv_estimator: grpo}", "There is no setting 'algorithm.adv_estimator': the method is the command: psigrad grpo"),
        ("{kl_ctrl: {type: adaptive}}", "algorithm.kl_ctrl.type is 'adaptive'; psigrad takes only 'fixed': psigrad ppo_penalty"),
        ("{use_pf_ppo: true}", "There is no setting 'algorithm.use_pf_ppo': psigrad has no PF-PPO"),
        ("{pf_ppo: {reweight: pow}}", "The algorithm has no setting 'pf_ppo'"),
        ("{}", "The algorithm has no preset"),
        ("{preset: grpo, surrogat: clip}", "The algorithm has no setting 'surrogat'"),
    ],
)
def test_the_algorithm_of_a_file_of_verl_is_answered(tree, said, tmp_path):
    with pytest.raises(UserError, match="^" + re.escape(said)):
        resolve(from_file(f"algorithm: {tree}", tmp_path).algorithm)


def test_every_schedule_of_transformers_is_taken_or_answered_with_what_to_write():
    answers = {}
    for kind in SchedulerType:
        try:
            load(SFTConfig, flags={"lr_scheduler_type": kind.value})
        except UserError as error:
            answers[kind.value] = str(error)
    assert answers.keys() == {"reduce_lr_on_plateau", "greedy"}
    for name, said in answers.items():
        assert said.startswith(f"lr_scheduler_type is '{name}': ") and "control.change(learning_rate=…)" in said


def test_the_tables_name_settings_that_exist_and_take_none_of_ours():
    ours = {name for cls in (OnlineConfig, PreferenceConfig, SFTConfig) for name in names_of(cls)}
    known = {*ours, *SHORTCUTS, *names_of(ControlConfig), *names_of(ControlConfig).values()}
    assert {row.means for row in TABLE.values() if row.means} <= known
    meant = {name for row in TABLE.values() for new in row.values.values() for name in new}
    assert meant - {"algorithm.kl"} <= known
    theirs = {name for name, row in TABLE.items() if row.library and not row.usual}
    assert not (theirs | {*SHORTCUTS}) & ours - {"optim"}
    assert all(row.means or row.values or row.rule or row.why or row.usual for row in TABLE.values())


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, row in TABLE.items()
        if row.why and row.library and not (row.rule or row.needless or row.means or row.usual or "." in name)
    ),
)
def test_another_name_is_answered_with_what_to_write(name, capsys):
    assert cli.main(["grpo", f"--{name}", "unheard"]) == 2
    said = capsys.readouterr().err
    by_value = bool(TABLE[name].values)
    told = "{} is 'unheard'; psigrad takes only .*: " if by_value else "There is no {}: "
    flag, setting = (f"--{name}", name) if by_value else (f"flag --{name}", f"setting '{name}'")
    assert re.match(f"psigrad: {told.format(flag)}", said) and said.count("\n") == 1
    with pytest.raises(UserError, match=f"^{told.format(setting)}"):
        load(OnlineConfig, flags=resolve_names(OnlineConfig, {name: "unheard"}))


def test_flags_are_answered_all_at_once(capsys):
    assert cli.main(["sft", "--packing", "--model", "m", "--run_name", "x"]) == 2
    said = capsys.readouterr().err
    assert "--packing is True; psigrad takes only False: " in said and "no flag --run_name: " in said


def test_a_file_is_answered_all_at_once(tmp_path):
    with pytest.raises(UserError) as refused:
        from_file("optim: sgd\nrun_name: x\nlearning_rate: 1e-3\nwarmup_steps: 3\n", tmp_path)
    assert str(refused.value).count("\n") == 1 and "optim is 'sgd'" in str(refused.value) and "'run_name'" in str(refused.value)


def test_an_object_where_a_name_is_expected_does_not_fill_the_screen():
    class Model:
        def __repr__(self):
            return "Linear()\n" * 100

    with pytest.raises(UserError, match=r"^reference is a Model; expected the folder or hub name of a model\.$"):
        load(PreferenceConfig, flags={"reference": Model()})


TWO = "both are the setting optim.learning_rate; give one of them"


def test_two_names_of_one_setting_with_two_values_are_refused_and_with_one_taken(tmp_path):
    with pytest.raises(UserError, match=f"lr is 0.0001 and learning_rate is 1e-05, and {TWO}"):
        parsed("--lr", "1e-4", "--learning_rate", "1e-5")
    with pytest.raises(UserError, match=f"run.yaml: lr is 0.0001 and optim.learning_rate is 1e-05, and {TWO}"):
        from_file("lr: 1e-4\noptim: {learning_rate: 1e-5}", tmp_path)
    with pytest.raises(UserError, match=TWO):
        from_file("{}", tmp_path, OnlineConfig, "lr=1e-4", "optim.learning_rate=1e-5")
    with pytest.raises(UserError, match=TWO):
        resolve_names(OnlineConfig, {"lr": 1e-4, "learning_rate": 1e-5})
    assert parsed("--lr", "1e-4", "--learning-rate=1e-4").optim.learning_rate == 1e-4
    assert parsed("--lr", "1e-4", "--lr", "1e-5").optim.learning_rate == 1e-5
    assert from_file("lr: 1e-4", tmp_path, OnlineConfig, "learning_rate=1e-5").optim.learning_rate == 1e-5


def test_a_wrong_value_is_laid_to_the_file_only_where_it_stands_there(tmp_path):
    with pytest.raises(UserError, match=r"run\.yaml: optim\.learning_rate is 'fast'"):
        from_file("learning_rate: fast", tmp_path)
    with pytest.raises(UserError, match=r"^optim\.learning_rate is 'slow'"):
        from_file("learning_rate: fast", tmp_path, OnlineConfig, "learning_rate=slow")


def test_trls_loss_type_is_an_aggregation_a_link_or_the_command():
    assert parsed("--loss_type", "dapo").algorithm["aggregate"] == "token_mean"
    assert "fixed_length" in str(parsed("--loss_type", "dr_grpo").algorithm)
    assert parsed("--loss_type", "sigmoid", cls=PreferenceConfig, loss="dpo").loss == "dpo"
    assert parsed("--loss_type", "bco_pair", cls=PreferenceConfig, loss="dpo").loss["link"] == "bco_pair"
    assert parsed("--loss_type", "ipo", cls=PreferenceConfig, loss="dpo").loss == {"preset": "ipo"}
    with pytest.raises(UserError, match="loss_type is 'ipo': the method is the command: psigrad ipo;"):
        parsed("--loss_type", "ipo", cls=PreferenceConfig, loss="hinge")
    with pytest.raises(UserError, match="expected one of grpo, dapo, bnpo, dr_grpo, cispo, sapo, vespo"):
        parsed("--loss_type", "sigmoid")


def test_what_nobody_knows_still_gets_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match="did you mean '--learning-rate'"):
        flags.parse(SFTConfig, "sft", ["--lerning_rate", "1"])
    with pytest.raises(UserError, match="no setting 'lerning_rate'; did you mean 'learning_rate'"):
        from_file("lerning_rate: 1", tmp_path)
    with pytest.raises(UserError, match="no setting 'actor_rollout_ref"):
        from_file("actor_rollout_ref: {unheard: 1}", tmp_path)


@pytest.mark.parametrize("path", ["./absent", "/absent/folder", "a/b/c", "~/absent_model"])
def test_a_model_folder_that_is_not_there_is_named_at_once(path, tmp_path, monkeypatch, capsys):
    """Without five tries of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "one"}\n')
    arguments = ["grpo", "--model", path, "--dataset", str(data), "--reward", "exact", "--output-dir", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    assert f"There is no folder '{path}'" in capsys.readouterr().err


def test_a_file_where_a_model_is_expected_is_named_at_once(tmp_path, monkeypatch, capsys):
    """Also one whose name could be one of the hub's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").write_text("nothing")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n')
    assert cli.main(["sft", "--model", "weights", "--dataset", "rows.jsonl", "--output-dir", "run"]) == 2
    assert "weights' is a file; give the folder of a model" in capsys.readouterr().err


def test_a_reward_model_says_that_rewards_are_for_others(capsys):
    assert cli.main(["reward", "--reward", "exact"]) == 2
    assert "There is no flag --reward: only methods and commands that sample" in capsys.readouterr().err
    for name in ("reward", "reward_funcs"):
        with pytest.raises(UserError, match=f"There is no setting '{name}': only methods and commands that sample"):
            psigrad.train("reward", model="m", dataset="d", **{name: len})


def test_a_near_miss_of_a_folder_is_shown(tmp_path, capsys):
    (tmp_path / "my_model").mkdir()
    arguments = ["sft", "--model", str(tmp_path / "my_modl"), "--dataset", "x.jsonl", "--output-dir", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    assert "did you mean 'my_model'" in capsys.readouterr().err


def test_without_a_network_the_hub_is_not_asked_and_with_one_it_is_again(monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for there, offline in ((True, False), (False, True), (False, True), (True, False)):
        network(monkeypatch, there)
        named_datasets.go_offline_without_network()
        assert constants.HF_HUB_OFFLINE is offline
    assert capsys.readouterr().err.count("No network: the address of huggingface.co cannot be found, so") == 1
    network(monkeypatch, False, https="http://proxy")
    named_datasets.go_offline_without_network()
    assert constants.HF_HUB_OFFLINE is False, "a proxy finds the name"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    network(monkeypatch, True)
    named_datasets.go_offline_without_network()
    assert constants.HF_HUB_OFFLINE is True, "the user's own choice stays"


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [("truncation_mode", "keep_start", "keep_end"), ("hub_token", None, "hf_x"), ("hub_always_push", False, True)],
)
def test_what_has_no_equal_is_answered_with_the_reason_and_its_default_needs_nothing(name, usual, other, tmp_path, capsys):
    said = f"There is no setting '{name}': {TABLE[name].why}."
    with pytest.raises(UserError, match=re.escape(said)):
        resolve_names(SFTConfig, {name: other})
    with pytest.raises(UserError, match=re.escape(said)):
        from_file(f"{name}: {str(other).lower() if other is True else other}", tmp_path, SFTConfig)
    assert cli.main(["sft", f"--{name}", str(other)]) == 2
    assert f"There is no flag --{name}: {TABLE[name].why}." in capsys.readouterr().err
    assert load(SFTConfig, flags=resolve_names(SFTConfig, {name: usual})) == load(SFTConfig)
    assert from_file(f"{name}: {'null' if usual is None else usual}", tmp_path, SFTConfig) == load(SFTConfig)


def test_a_reference_that_follows_is_a_setting_of_online_methods_alone():
    for default in (512, 7):
        assert (
            load(OnlineConfig, flags=resolve_names(OnlineConfig, {"ref_model_sync_steps": default})).ref_model_sync_steps
            == default
        )
    with pytest.raises(UserError, match="the reference of a preference loss does not change"):
        load(PreferenceConfig, flags=resolve_names(PreferenceConfig, {"ref_model_sync_steps": 7}))


def test_what_trl_does_by_default_needs_nothing():
    usual = {"use_cpu": False, "normalize_advantages": False, "multi_objective_aggregation": "sum_then_normalize"}
    assert load(OnlineConfig, flags=resolve_names(OnlineConfig, usual)) == load(OnlineConfig)
    assert load(OnlineConfig, flags=resolve_names(OnlineConfig, {"use_cpu": True})).run.device == "cpu"


def test_a_warm_up_that_is_a_share_of_the_run_is_computed_where_its_steps_are_known(tmp_path):
    for name in ("warmup_ratio", "warmup_steps"):
        assert parsed(f"--{name}", "0.1", "--max-steps", "25").optim.warmup_steps == 3
        assert load(SFTConfig, flags=resolve_names(SFTConfig, {name: 0.5, "max_steps": 9})).optim.warmup_steps == 5
        assert from_file(f"{name}: 0.1\nmax_steps: 25", tmp_path).optim.warmup_steps == 3
        with pytest.raises(
            UserError, match=f"{name} is 0.1, a share of a run whose length is given in epochs; give warmup_steps"
        ):
            load(SFTConfig, flags=resolve_names(SFTConfig, {name: 0.1}))
    assert from_file("warmup_ratio: 0.0", tmp_path) == load(OnlineConfig)
    assert parsed("--warmup_ratio", "0.1", "--warmup_steps", "7", "--max-steps", "25").optim.warmup_steps == 7
    with pytest.raises(UserError, match="a share of max_steps, from 0 to 1"):
        load(SFTConfig, flags=resolve_names(SFTConfig, {"warmup_ratio": 5}))


@pytest.mark.parametrize("name", ["accelerate_config", "mixed_precision", "num_machines", "datasets", "env"])
def test_what_trls_command_takes_besides_is_answered(name, tmp_path, capsys):
    assert cli.main(["sft", f"--{name}", "a_value"]) == 2
    assert f"There is no flag --{name}: {TABLE[name].why}." in capsys.readouterr().err
    with pytest.raises(UserError, match=f"There is no setting '{name}': "):
        from_file(f"{name}: [{{path: a}}]", tmp_path, SFTConfig)
    assert parsed("--num_processes", "2").placement.processes == 2


def test_what_trl_leaves_unset_is_unset_under_our_name_too(tmp_path):
    unset = {"ref_model": None, "model_revision": None}
    assert load(PreferenceConfig, flags=resolve_names(PreferenceConfig, unset)) == load(PreferenceConfig)
    assert from_file("ref_model: null\nmodel_revision: null", tmp_path, PreferenceConfig) == load(PreferenceConfig)


def test_a_wrong_value_is_answered_with_what_was_expected_and_a_share_of_a_run_with_why_not():
    for given, said in {
        "learning_rate=abc": "optim.learning_rate is 'abc'; expected a number.",
        "top_p=1.5": "sampling.top_p is 1.5; expected at most 1.",
        "gradient_checkpointing=maybe": "model.gradient_checkpointing is 'maybe'; expected true or false.",
        "save_steps=0.1": "run.save_steps is 0.1; expected a whole number, since psigrad counts steps, not shares of a run.",
        "save_steps=1.5": "run.save_steps is 1.5; expected a whole number.",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
            load(OnlineConfig, overrides=[given])
