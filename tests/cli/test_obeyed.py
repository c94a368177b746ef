"""What a command takes, it obeys: every setting that its help lists is read by what acts on it, and changes what one can see."""

from __future__ import annotations

import json
import re
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import tiny_rewards
from hub_stand_in import hub_stand_in, reach
from read_settings import watching
from speed import measured_once  # noqa: F401 (a fixture)

from psigrad import cli
from psigrad.cli import flags
from psigrad.compat.foreign_names import load, resolve_names
from psigrad.config import EvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, Sampling, SFTConfig
from psigrad.config.fields import FREE, MACHINE, RECORDED, flag_of, idle, settings_of, unread_by, unread_settings
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.kernels.kernels import kernels
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler

pytestmark = pytest.mark.usefixtures("measured_once")
ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow
REWARD = f"{tiny_rewards.__file__}:of_text"
DRAWN = ["--max-completion-length", "4", "--eval-prompts", "4"]
ADAPTER = (
    "--lora-rank 2 --lora-alpha 8 --lora-dropout 0.1 --lora-target-modules q_proj --use-rslora --lora-modules-to-save lm_head"
)
PUSHED = "--max-steps 1 --push-to-hub --hub-model-id ada/small --hub-private-repo --hub-revision second"
PLACED = "--max-steps 1 --cluster auto --samplers 2 --sampler-cpus 2 --sampler-gpus 0.5 --parcel-prompts 3"
SCORERS = "--max-steps 1 --cluster auto --scorers 2 --scorer-cpus 2"
ENVIRONMENTS = "--max-steps 1 --environment guess --cluster auto --environment-actors 2 --environment-cpus 2"
PLAYED = f"--environment {tiny_rewards.__file__}:Parrot --environment-timeout 9 --environment-workers 2 --max-turns 2"
PLAYED += " --environment-sandbox --environment-files /tmp"
SERVED = "--server http://127.0.0.1:9 --server-key-variable MINE --server-timeout 1 --server-attempts 1 --server-concurrency 2"
GOES_ON = "--max-steps 2 --eval-dataset {rows} --extend --allow threads"
FIRST = "--max-steps 1 --eval-dataset {rows}"
OFFLINE = [FIRST, GOES_ON, "--num-train-epochs 0.1 --batch-size 4", f"{ADAPTER} --batch-size 4 --max-steps 1", PUSHED]
# command -> the class of its settings, its rows, what all of these runs are given, and what each of them is given besides
RUNS = {
    "sft": (SFTConfig, "train", [*DRAWN, "--reward", REWARD, "--reward-weights", "2"], [*OFFLINE, SCORERS]),
    "dpo": (PreferenceConfig, "pairs", [*DRAWN, "--reward", REWARD], [*OFFLINE, SCORERS]),
    "kto": (PreferenceConfig, "judged", [*DRAWN, "--reward", REWARD], [*OFFLINE, SCORERS]),
    "reward": (RewardConfig, "pairs", ["--eval-prompts", "4"], [*OFFLINE, "--process --step-separator e"]),
    "grpo": (
        OnlineConfig,
        "train",
        [*DRAWN, "--reward", REWARD, "--prompts-per-step", "2", "--num-generations", "4"],
        [
            FIRST,
            GOES_ON,
            "--num-train-epochs 0.1",
            f"{ADAPTER} --max-steps 1",
            "--max-steps 1 algorithm.psi=gae algorithm.critic=value_loss --critic-warmup-steps 1",
            "--max-steps 1 --dynamic-sampling --max-refills 1 --beta 0.1 --ref-model-sync-steps 1 --eval-kl",
            "--max-steps 1 --teacher-prompt answer --beta 0.1",
            f"--max-steps 1 --environment {tiny_rewards.__file__}:Duel --past-opponents 0.5 --past-every 1 --past-kept 2",
            *(PUSHED, f"--max-steps 1 {PLAYED}", PLACED, SCORERS, ENVIRONMENTS),
        ],
    ),
    "eval": (EvalConfig, "held_out", [*DRAWN, "--reward", REWARD], ["", PLAYED, SERVED]),
    "sample": (SampleConfig, "held_out", [*DRAWN, "--reward", REWARD], ["--keep pairs --bradley-terry 2", PLAYED, SERVED]),
}
TRAINS = ("--early-stopping-patience", "9", "--threads", "1", "--no-progress", "--no-report")


@pytest.fixture
def alone(tmp_path, monkeypatch, rewards_here):
    """A folder to work in, without a cluster, and a hub that is a stand-in."""
    monkeypatch.chdir(tmp_path)
    kernels()  # of the usual cache: an empty one has them compiled anew, for a quarter of a minute
    monkeypatch.setenv("PSIGRAD_CACHE", str(tmp_path / "cache"))

    class NoCluster:
        def __init__(self, *given, **named):
            self.close = lambda: None

        def __getattr__(self, name):
            raise UserError("There is no cluster.")

    monkeypatch.setattr("psigrad_extras.cluster.ray_placement.ActorPool", NoCluster)
    monkeypatch.setattr("psigrad.language.episodes.environment_pool.enclosure_of_workers", lambda files: None)
    with hub_stand_in() as hub:
        reach(monkeypatch, hub.address)
        yield tmp_path


def command(name, job, folder, *more):
    """The command line of a run on the tiny job."""
    _, rows, given, _ = RUNS.get(name) or RUNS["grpo"]
    if "--reward" in more:  # in place of the usual one: several add up
        at = given.index("--reward")
        given = [*given[:at], *given[at + 2 :]]
    own = {"sample": ["--output", str(folder / "rows.jsonl")], "eval": []}.get(
        name, [*TRAINS, "--output-dir", str(folder / "run")]
    )
    # the last word is the one that holds
    return [name, "--model", str(job / "base"), "--dataset", str(job / f"{rows}.jsonl"), *given, *own, *more]


def listed(name, capsys):
    """The flags that `--help-all` shows."""
    with pytest.raises(SystemExit):
        cli.main([*name.split(), "--help-all"])
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", capsys.readouterr().out))


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in ("dpo", "kto", "reward") else ()) for name in RUNS])
def test_every_setting_that_help_lists_is_read(name, job, alone, capsys):
    """Offline training by `sft` always; its relatives, which are started by the same recipe, with `make test-slow`."""
    cls, _, _, runs = RUNS[name]
    with watching(cls) as read:
        for number, more in enumerate(runs):
            folder = alone / str(number - (more == GOES_ON))  # that of the run before
            folder.mkdir(exist_ok=True)
            words = command(name, job, folder, *more.format(rows=job / f"{RUNS[name][1]}.jsonl").split())
            refused = any(part in more for part in ("--cluster", "--server", "--process"))  # once they are read
            assert cli.main(words) == (2 if refused else 0), words
    shown = listed(name, capsys)
    assert {setting for setting in settings_of(cls) if flag_of(setting) in shown} == set(settings_of(cls))
    elsewhere = {"sampling.vllm_memory", "sampling.vllm_readback", "sampling.vllm_device"}  # only with vLLM
    elsewhere |= {"agent_timeout", "agent_workers", "agent_calls"}  # with an agent: tests/serve/agents
    assert set(settings_of(cls)) - read - elsewhere == set()
    assert not shown & {flag_of(other) for other, stands in unread_settings(cls).items() if not stands}


def test_negative_control_a_setting_that_nothing_reads_is_found(job, alone):
    """LoRA's without an adapter, the server's without one; and reads by what only loads, plans or checks do not count."""
    with watching(EvalConfig) as read:
        assert cli.main(command("eval", job, alone)) == 0
    assert {"max_turns", "server_timeout"}.isdisjoint(read) and {"sampling.top_p", "evaluation.eval_temperature"} <= read
    with watching(PreferenceConfig) as read:
        assert cli.main(["dpo", "--model", str(job / "base"), "--dataset", str(job / "pairs.jsonl"), "--eval-prompts", "4",
                         "--max-steps", "1", *TRAINS, "--output-dir", str(alone / "run")]) == 0  # fmt: skip
    assert {"sampling.top_p", "model.lora_alpha"}.isdisjoint(read) and "optim.weight_decay" in read


def test_vllm_is_given_its_memory(job, alone, monkeypatch):
    given = {}

    def stub(model, batch, **named):
        given.update(named)
        return EmbeddedSampler(model, batch)

    monkeypatch.setattr("psigrad_extras.vllm.vllm_backend.VLLMSampler", stub)
    asked = ["--sampler", "vllm", "--vllm-memory", "0.3", "--vllm-sleep", "--tensor-parallel-size", "2"]
    assert cli.main(command("grpo", job, alone, "--max-steps", "1", *asked)) == 0
    assert (given["memory"], given["sleep"], given["tensor_parallel_size"]) == (0.3, True, 2)


ENDS = " ".join(map(str, range(0, 270, 2)))  # half of all tokens, or a tiny model would never come to the end of a turn
# What another value than a default is, where the type does not say it; for one command where it differs there.
OTHER = {
    "evaluation.eval_prompts": 3, "data.max_rows": 20, "data.max_prompt_length": 2, "sampling.max_completion_length": 3,
    "sampling.top_k": 2, "sampling.min_p": 0.5, "sampling.top_p": 0.3, "sampling.stop_token_ids": ENDS,
    "evaluation.eval_temperature": 0, "evaluation.metric": "exact", "reward_weights": "3", 
    "reward": f"{REWARD} {tiny_rewards.__file__}:early_letters",
    "optim.max_grad_norm": 0.01, "optim.warmup_steps": 1, "optim.adam_epsilon": 0.1, "max_length": 4, "batch_size": 3,
    "evaluation.num_generations_eval": 3, "best_of": 3, "keep": "best", "max_logp_difference": 1e-12, "max_unscored": 0,
    "reference_dtype": "bfloat16", "model.dtype": "bfloat16", "loss": "ipo", "algorithm": "rloo", "teacher_prompt": "answer",
    "data.eval_dataset": "{rows}", "fewshot_dataset": "{rows}", "model.lora_target_modules": "q_proj",
    "model.lora_modules_to_save": "lm_head", "record_tokens": 1, "run.save_steps": 1, "run.save_total_limit": 1,
    "server": "http://127.0.0.1:9", "prompts_per_step": 3, "optim.lr_scheduler_kwargs": '{"power":3}',
    "evaluation.metric_for_best_model": "loss", "evaluation.greater_is_better": "false",
    "model.quantize_base": "int8",  # rows of nf4's blocks of 64 this job has none of
    "optim.optimizer": "muon",  # adamw_8bit keeps parts as small as these whole: optim/test_low_memory.py
}  # fmt: skip
OTHER_OF = {("grpo", "evaluation.metric_for_best_model"): "completions/mean_length",
            ("kto", "evaluation.eval_prompts"): 9,
            ("kto", "loss"): '{"preset":"kto","desirable_weight":3}',
            ("sample", "data.max_rows"): 3, ("eval", "data.max_rows"): 3}  # fmt: skip
# What a run needs besides, so that the setting can have an effect.
LORA = "--lora-rank 2"
MANY = "--max-completion-length 48 --num-generations-eval 24"
CRITIC = "algorithm.psi=gae algorithm.critic=value_loss"
BEST = "--eval-steps 1 --load-best-model-at-end"
# by which the best weights are not the last ones
WORST = "--eval-steps 1 --metric-for-best-model {} --greater-is-better {}"
NO_SERVER = "--server http://127.0.0.1:9 --server-attempts 1 --server-timeout 0.2"
TALK = f"--environment {tiny_rewards.__file__}:Talker --max-turns 2 --stop-token-ids {ENDS}"
BESIDES = {
    "run.num_train_epochs": "--max-steps 0", "max_refills": "--dynamic-sampling --reward exact",
    "run.save_total_limit": "--save-steps 1",
    "max_logp_difference": "--sampler transformers",
    "max_unscored": f"--reward {tiny_rewards.__file__}:some",
    "server": "--server-attempts 1",
    **dict.fromkeys(("critic_shared", "critic_learning_rate", "critic_warmup_steps"), CRITIC),
    **{f"model.lora_{leaf}": LORA for leaf in ("alpha", "dropout", "target_modules", "modules_to_save", "save")},
    "model.quantize_base": LORA, "optim.bf16_stochastic_round": "--dtype bfloat16",
    "model.use_rslora": f"{LORA} --lora-alpha 8", "model.use_dora": LORA, "ref_model_mixup_alpha": "--ref-model-sync-steps 1",
    "server_attempts": NO_SERVER, "optim.lr_scheduler_kwargs": "--lr-scheduler-type polynomial",
    "evaluation.metric_for_best_model": BEST, "evaluation.greater_is_better": BEST,
    "evaluation.load_best_model_at_end": WORST.format("loss", "true"),
    ("grpo", "evaluation.load_best_model_at_end"): WORST.format("of_text", "false"),
    # the second evaluation is no better, or better by less than the threshold
    "evaluation.early_stopping_patience": WORST.format("of_text", "false"),
    ("reward", "evaluation.early_stopping_patience"): WORST.format("loss", "false"),
    "evaluation.early_stopping_threshold": "--eval-steps 1 --early-stopping-patience 1",
    ("reward", "evaluation.early_stopping_threshold"): WORST.format("loss", "true") + " --early-stopping-patience 1",
    **dict.fromkeys(("max_turns", "max_turn_length", "max_observation_length"), TALK),
    "bradley_terry": "--keep pairs",
    # so many draws that rounding decides one of them, and that one is a special token
    **{(name, "model.dtype"): MANY for name in ("eval", "sample")}, ("eval", "skip_special_tokens"): MANY,
}  # fmt: skip
# What the tiny job cannot show, and the test that shows it.
ELSEWHERE = {
    "model.path": "runs/test_pins.py::test_another_base_model_is_refused_by_name",
    "model.revision": "runs/test_pins.py::test_a_revision_is_what_is_loaded_and_pinned",
    "model.trust_remote_code": "runs/test_pins.py::test_code_that_comes_with_a_model_never_runs_unasked",
    "model.adapter": "language/loading/test_adapters.py::test_a_rank_puts_a_new_adapter_on_top_and_merge_trains_all",
    **dict.fromkeys(
        ("model.chat_template_path", "model.eos_token"),
        "language/data/test_chat.py::test_a_template_and_an_eos_are_taken_from_the_settings",
    ),
    "model.chat_template_kwargs": "language/data/test_chat.py::test_arguments_of_the_run_hold_where_a_row_says_nothing",
    "train_empty_thinking": "language/data/test_templates.py::"
    "test_an_empty_thought_is_trained_only_where_it_is_asked_for_or_written",
    "data.dataset": "extras/preflight/test_check.py::test_the_dataset_is_looked_at",
    "data.image_urls": "language/data/test_image_urls.py::test_the_setting_is_off_by_default_and_reaches_the_rows",
    # the tiny model of these runs has no tower, and its job no game
    "model.vision": "language/models/test_vision.py::test_the_text_half_alone_takes_no_images",
    "model.trained_towers": "language/models/test_vision.py::test_towers_are_frozen_unless_they_are_named",
    **dict.fromkeys(
        ("past_opponents", "past_every", "past_kept"),
        "extras/test_text_games.py::test_past_selves_are_the_last_snapshots_and_the_share_of_prompts_that_they_play",
    ),
    **dict.fromkeys(("data.split", "data.eval_split"), "language/loading/test_model_object.py::test_datasets_frames_and_splits"),
    "data.columns": "language/recipes/test_rows_read.py::test_plain_prompts_of_a_run_with_a_chat_model",
    "data.bad_rows": "language/recipes/test_row_limits.py::test_such_rows_are_left_out_and_counted_when_asked",
    "data.plain_prompts": "language/recipes/test_rows_read.py::test_plain_prompts_of_a_run_with_a_chat_model",
    "sampling.sampler": "language/rollout/test_embedded.py::"
    "test_embedded_and_generate_write_the_same_tokens_and_the_trainer_agrees",
    "model.compile_layers": "language/models/test_inductor.py::"
    "test_compiled_layers_have_the_numbers_and_gradients_of_the_modules",
    "sampling.cuda_graphs": "gpu/test_gpu.py::test_a_recorded_step_writes_what_a_step_writes",
    # the tiny model of these runs has no experts
    "model.router_aux_loss_coef": "language/models/test_experts.py::"
    "test_a_run_adds_the_models_own_share_unless_it_is_told_another",
    "router_replay": "language/models/test_experts.py::test_grpo_follows_the_experts_of_sampling",
    "cache_reference": "language/training/test_preference_task.py::test_the_reference_is_computed_once_and_found_by_content",
    "filter_metric": "language/training/test_batching.py::"
    "test_dynamic_sampling_compares_all_but_the_penalty_on_length_or_the_reward_that_is_named",
    "reference": "runs/test_pins.py::test_another_reference_is_refused_by_name",
    **dict.fromkeys(
        ("reference_model", "reference_top_k"),
        "extras/connect/test_teacher_server.py::test_a_teacher_behind_a_server_teaches_what_one_in_the_process_does",
    ),
    "reference_tokenizer": "extras/connect/test_teacher_server.py::test_a_foreign_teacher_behind_a_server_says_what_it_says_here",
    "reward_model": "language/training/test_critic.py::test_a_reward_model_and_a_reward_function_are_mixed_by_weight",
    "critic": "language/training/test_critic.py::test_a_critic_starts_from_the_reward_model_that_was_trained",
    "environment": "language/rollout/test_episodes.py::test_environments_are_named_or_refused",
    "tools": "language/rollout/test_episodes.py::test_tools_are_called_by_type_and_their_mistakes_are_answers",
    "server_timeout": "extras/connect/test_openai_server.py::"
    "test_a_server_that_is_not_there_or_hangs_or_serves_several_models_is_said_too",
    "agent": "serve/agents/test_agents.py::test_one_question_has_the_tokens_of_this_process_and_its_gradient",
    "agent_command": "serve/agents/test_agents.py::test_a_program_is_asked_as_a_function_is",
    "benchmark": "language/rewards/test_benchmarks.py::test_prompts_by_hand",
    "server_key_variable": "extras/connect/test_openai_server.py::test_the_command_line_takes_a_server_and_says_what_it_cannot",
    **dict.fromkeys(("process", "step_separator"), "language/data/test_pairs.py::test_steps_end_where_their_separator_does"),
    "output": "extras/datasets/test_sample.py::test_sampled_rows_are_all_the_best_or_pairs_of_the_same_completions",
}


def test_what_this_file_cannot_show_another_does():
    for setting, place in ELSEWHERE.items():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), setting


def another(command_name, name, setting):
    """A value of a setting that is not its default, as a flag's."""
    value = OTHER_OF.get((command_name, name), OTHER.get(name))
    if value is not None:
        return [flag_of(name), *str(value).split()]
    if setting.type is bool:
        return [flag_of(name) if not setting.default else flag_of(name).replace("--", "--no-", 1)]
    if get_origin(setting.type) is Literal:
        return [flag_of(name), next(word for word in get_args(setting.type) if word and word != setting.default)]
    assert setting.type in (int, float), f"{name} is new: OTHER says another value of it, or ELSEWHERE which test shows it"
    return [flag_of(name), str(setting.default + 1 if setting.type is int else setting.default / 2 or 0.5)]


@pytest.mark.parametrize("name", RUNS)
def test_each_setting_has_another_value_to_be_tried_with(name):
    assert all(another(name, setting, about) for setting, about in judged(RUNS[name][0]))


UNREPEATABLE = ("config.json", "timings.jsonl", "events.jsonl", "manifest.json", "README.md", "training_args.bin", ".lock")


def seen(name, job, folder, capsys, *more):
    """All that one can see of a run: status, output, and what is written."""
    folder.mkdir()
    status = cli.main(command(name, job, folder, *more))
    said = capsys.readouterr()
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in UNREPEATABLE
    }
    # how long it may take here, and what is said of it, is what the machine was busy with
    busy = r" The machine is busy \(.*?\), so the run would be faster on an idle one\.|(?<=about )\d.*?(?= here)"
    return status, *(re.sub(busy, "", text.replace(str(folder), "")) for text in said), files


def judged(cls):
    """The settings whose effect a run here shows: not those of speed, of the machine or of one start, where no value is named."""
    for name, setting in settings_of(cls).items():
        if name not in ELSEWHERE and (name in OTHER or not {RECORDED, MACHINE, FREE} & setting.marks):
            yield name, setting


def without_effect(name, job, folder, capsys, settings, besides):
    """Those of the settings that change nothing one can see, each tried alone."""
    bases, same = {}, []
    for i, (setting, about) in enumerate(settings):
        more = (*besides, *BESIDES.get((name, setting), BESIDES.get(setting, "")).split())
        if more not in bases:
            bases[more] = seen(name, job, folder / f"base{len(bases)}", capsys, *more)
        words = [word.replace("{rows}", str(job / f"{RUNS[name][1]}.jsonl")) for word in another(name, setting, about)]
        found = seen(name, job, folder / str(i), capsys, *more, *words)
        about_it = [re.sub("[-_ ]", "", word) for word in (setting.rpartition(".")[2], *words[1:]) if len(word) > 2]
        refused_otherwise = (
            found[0] and not bases[more][0] and not any(word in re.sub("[-_ ]", "", found[2]) for word in about_it)
        )
        if found == bases[more] or refused_otherwise:
            same.append(f"{' '.join(words)[:80]} {found[2] if refused_otherwise else ''}")
    # negative controls: the same twice, and a setting at its default changes nothing
    assert bases[besides] == seen(name, job, folder / "again", capsys, *besides)
    assert bases[besides] == seen(name, job, folder / "default", capsys, *besides, "--seed", "0")
    return same


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eval", "sample"])
def test_each_setting_alone_changes_what_one_sees(name, job, alone, capsys):
    """That each is read: test_every_setting_that_help_lists_is_read."""
    assert without_effect(name, job, alone, capsys, judged(RUNS[name][0]), ()) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward", "grpo"])
def test_each_setting_alone_changes_what_training_leaves(name, job, alone, capsys):
    longer = ("--max-steps", "3", "--learning-rate", "0.01")
    assert without_effect(name, job, alone, capsys, judged(RUNS[name][0]), longer) == []


def test_temperature_0_is_greedy_whatever_the_seed(job, alone, capsys):
    written = []
    for seed, more in ((0, "0"), (5, "0"), (5, "1")):
        assert cli.main(command("sample", job, alone, "--temperature", more, "--seed", str(seed))) == 0
        written.append((alone / "rows.jsonl").read_text())
        (alone / "rows.jsonl").unlink()  # a file that is there is not overwritten
    assert written[0] == written[1] != written[2]
    assert cli.main(command("eval", job, alone, "--temperature", "0", "--eval-temperature", "1")) == 2
    assert "both are the setting evaluation.eval_temperature; give one of them" in capsys.readouterr().err


def test_a_sampled_row_has_no_reward_where_nobody_scored_it(job, alone):
    words = command("sample", job, alone)
    at = words.index("--reward")
    assert cli.main([*words[:at], *words[at + 2 :]]) == 0
    assert {json.loads(line)["reward"] for line in (alone / "rows.jsonl").open()} == {None}


def test_one_number_of_completions_has_two_names_where_completions_are_drawn_by_evaluations_alone():
    for cls in (EvalConfig, SampleConfig):
        for name in ("num_generations", "evaluation.num_generations", "num_generations_eval"):
            assert load(cls, flags=resolve_names(cls, {name: 3})).evaluation.num_generations_eval == 3
    online = load(OnlineConfig, flags=resolve_names(OnlineConfig, {"num_generations": 3}))
    assert (online.num_generations, online.evaluation.num_generations_eval) == (3, 1)
    with pytest.raises(UserError, match="num_generations': it is a setting of the online methods"):
        resolve_names(SFTConfig, {"num_generations": 3})


def test_one_temperature_has_two_names_where_completions_are_drawn_by_evaluations_alone():
    for cls in (EvalConfig, SampleConfig, SFTConfig, PreferenceConfig):
        for name in ("temperature", "sampling.temperature", "eval_temperature"):
            assert load(cls, flags=resolve_names(cls, {name: 0.5})).evaluation.eval_temperature == 0.5
        assert load(cls, flags={"sampling": {"temperature": 0.5}}).evaluation.eval_temperature == 0.5
    online = load(OnlineConfig, flags=resolve_names(OnlineConfig, {"temperature": 0.5}))
    assert (online.sampling.temperature, online.evaluation.eval_temperature) == (0.5, 1.0)
    with pytest.raises(UserError, match=r"means evaluation\.eval_temperature, which is also given"):
        load(EvalConfig, flags={"sampling": {"temperature": 0.5}, "evaluation": {"eval_temperature": 0.2}})


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(EvalConfig, "run.max_steps", 3), (SampleConfig, "metric", "exact"), (RewardConfig, "cluster", "auto"),
     (SFTConfig, "max_prompt_length", 7), (EvalConfig, "lora_rank", 2), (EvalConfig, "save_strategy", "no")],
)  # fmt: skip
def test_what_a_command_does_not_read_is_refused_unless_it_asks_for_nothing(cls, name, value, tmp_path):
    with pytest.raises(UserError, match=f"{name} is {value!r} and (has no effect on this command|means .*not read)"):
        load(cls, flags=resolve_names(cls, {name: value}))
    if name != "save_strategy":
        usual = {"max_steps": 0, "metric": "", "cluster": "", "max_prompt_length": 0, "lora_rank": 0}[name.rpartition(".")[2]]
        assert load(cls, flags=resolve_names(cls, {name: usual})) == cls()


def without_patience(words):
    """A command without early stopping."""
    at = words.index("--early-stopping-patience")
    return words[:at] + words[at + 2 :]


def test_eval_strategy_no_is_off_and_save_strategy_no_saves_the_end_alone(job, alone):
    words = command("sft", job, alone, "--max-steps", "2", "--save-steps", "1")
    words = without_patience(words)  # which wants evaluations
    assert cli.main([*words, "--eval-strategy", "no", "--save-strategy", "no"]) == 0
    rows = [json.loads(line) for line in (alone / "run" / "metrics.jsonl").open()]
    assert len(rows) == 2 and not any(key.startswith("eval/") for row in rows for key in row)
    assert [path.name for path in (alone / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    (started,) = (e for e in map(json.loads, (alone / "run" / "events.jsonl").open()) if e["kind"] == "started")
    assert (started["rows"], started["eval_rows"]) == (32, 0)


def test_what_another_setting_leaves_without_effect_is_said(job, alone, capsys):
    assert cli.main(without_patience(command("sft", job, alone, "--max-steps", "1", "--lora-alpha", "3"))) == 0
    assert "psigrad: model.lora_alpha is 3.0 and has no effect without model.lora_rank; remove it.\n" in capsys.readouterr().err
    events = [json.loads(line) for line in (alone / "run" / "events.jsonl").open()]
    assert [event["settings"] for event in events if event["kind"] == "no_effect"] == [["model.lora_alpha"]]
    assert idle(OnlineConfig()) == {} and idle(OnlineConfig(ref_model_mixup_alpha=0.5, ref_model_sync_steps=1)) == {}
    vllm = idle(OnlineConfig(sampling=Sampling(vllm_memory=0.3)))["sampling.vllm_memory"]
    assert vllm == "sampling.vllm_memory is 0.3 and has no effect without sampling.sampler=vllm; remove it."
    assert idle(SFTConfig(sampling=Sampling(top_p=0.3))).keys() == {"sampling.top_p"}
    assert idle(replace(SFTConfig(reward=("exact",)), sampling=Sampling(top_p=0.3))) == {}


CONTROL = [
    *("--env", "CartPole-v1", "--total-timesteps", "128", "--n-envs", "2", "--eval-episodes", "2", "--no-progress"),
    *("--no-report", "--no-tuned"),
]
ALGORITHMS = {
    "ppo": ["--n-steps 16 --batch-size 8 --target-kl 1", "--n-steps 0"],
    "trpo": ["--n-steps 16", "--n-steps 0"],
    "dqn": ["--learning-starts 16 --batch-size 8 --train-freq 8 --target-update-interval 16"],
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_control_is_read_by_its_algorithm_or_refused(name, alone, capsys):
    with watching(ControlConfig) as read:
        for number, more in enumerate(ALGORITHMS[name]):
            assert cli.main(["control", name, *CONTROL, *more.split(), "--output-dir", str(alone / str(number))]) == 0
    unread = unread_by(ControlConfig, name)
    assert set(settings_of(ControlConfig)) - read - {"run.allow", "run.extend"} <= unread
    assert not {flag_of(other) for other in unread} & listed(f"control {name}", capsys)
    assert {flag_of(other) for other in unread} <= listed("control", capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [("ppo --buffer-size 5", "dqn.buffer_size is 5, but ppo does not read it"), ("dqn --n-steps 5", "n_steps is 5, but dqn does"),
     ("trpo --clip-range 0.3", "clip_range is 0.3, but trpo"), ("ppo dqn.tau=0.5", "dqn.tau is 0.5, but ppo"),
     ("a2c --clip-range-schedule linear", "clip_range_schedule is linear, but a2c does not clip"),
     ("grpo --gae-lambda 0.5", "grpo does not read gae_lambda=0.5")],
)  # fmt: skip
def test_control_refuses_what_its_algorithm_does_not_read(words, said, alone, capsys):
    assert cli.main(["control", *words.split(), "--no-tuned", "--output-dir", str(alone / "run")]) == 2
    assert said in capsys.readouterr().err


class Given(UserDict):
    """The flags of a command without settings, and which of them it asked for; by ** for all of them."""

    read: set[str]

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


PLAIN = {
    "score": ["--reward", "exact", "--dataset", "{job}/train.jsonl", "--output", "{tmp}/scores.jsonl"],
    "pairs": ["--dataset", "{tmp}/ranked.jsonl", "--output", "{tmp}/pairs.jsonl", "--scale", "5", "--tie", "1"],
    "doctor": ["--json"],
    "push": ["somewhere", "ada/small", "--private", "--revision", "second"],
    "studio": ["--port", "1", "--no-open", "--model-memory", "2", "--database", "x"],
    "demo": ["--output-dir", "x", "--seed", "3", "--sft-steps", "2", "--rl-steps", "1", "--no-progress"],
}


@pytest.mark.parametrize("name", PLAIN)
def test_every_flag_of_a_plain_command_is_read(name, job, alone, monkeypatch):
    plain, made = flags.parse_plain, []
    monkeypatch.setattr(Given, "read", set(), raising=False)
    monkeypatch.setattr(flags, "parse_plain", lambda *given: made.append(Given(plain(*given))) or made[-1])
    for place in ("psigrad_extras.connect.hub.push", "psigrad_studio.serve.studio", "psigrad_extras.demo.run",
                  "psigrad.records.report.terminal.print_result"):  # fmt: skip
        monkeypatch.setattr(place, lambda *given, **named: "done")
    ranked = {"prompt": "a", "completions": ["b", "c"], "ranking": [2, 1]}
    (alone / "ranked.jsonl").write_text(json.dumps(ranked) + "\n")
    assert cli.main([name, *(word.format(job=job, tmp=alone) for word in PLAIN[name])]) == 0
    (given,) = made
    assert {*plain(name, [], given.data)} - Given.read <= {"reward"}, "which is taken before, with its several values"
