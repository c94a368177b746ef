"""Flags of TRL, Stable-Baselines3 and verl: taken where they mean the same, else answered with ours."""

from __future__ import annotations

import pytest

from psigrad import cli
from psigrad.cli import flags
from psigrad.cli.other_names import INSTEAD, SAME, ours
from psigrad.config import OnlineConfig, PreferenceConfig, SFTConfig
from psigrad.errors import UserError


def known(cls) -> list[str]:
    return flags._options(flags._parser(cls, "x"))


def test_underscores_and_other_names_of_the_same_settings_are_taken():
    given = [
        "--model_name_or_path",
        "a/b",
        "--learning_rate=1e-4",
        "--dataset_name",
        "c",
        "--reward_funcs",
        "exact",
        "--lora_r=8",
    ]
    config = flags.parse(OnlineConfig, "grpo", [*given, "--max_completion_length", "7"], defaults={"algorithm": "grpo"})
    assert (config.model.path, config.data.dataset, config.reward) == ("a/b", "c", ("exact",))
    assert (config.optim.learning_rate, config.model.lora_rank, config.sampling.max_completion_length) == (1e-4, 8, 7)


def test_values_keep_their_underscores():
    config = flags.parse(
        OnlineConfig, "grpo", ["--reward", "my_module:my_reward", "--output_dir=a_b"], defaults={"algorithm": "grpo"}
    )
    assert config.reward == ("my_module:my_reward",) and config.run.output_dir == "a_b"


@pytest.mark.parametrize("cls", [OnlineConfig, PreferenceConfig, SFTConfig])
def test_a_name_that_is_answered_is_none_of_ours(cls):
    assert not {*SAME, *INSTEAD} & {*known(cls)} - {"--epsilon-high"}


def test_a_name_that_is_taken_is_one_of_ours_somewhere():
    everything = {flag for cls in (OnlineConfig, PreferenceConfig, SFTConfig) for flag in known(cls)}
    assert set(SAME.values()) <= everything


@pytest.mark.parametrize("flag", INSTEAD)
def test_another_name_is_answered_with_what_to_write(flag, capsys):
    typed = "--" + flag[2:].replace("-", "_")
    assert cli.main(["grpo", typed, "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"psigrad: There is no flag {typed}: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "override",
    ["algorithm.kl.coefficient=0.04", "algorithm.surrogate.low=0.2", "algorithm.surrogate.high=0.28", "algorithm.psi=group_mean"],
)
def test_what_is_to_be_written_is_understood(override, capsys):
    assert override in " ".join(INSTEAD.values())
    assert cli.main(["explain", "grpo", override]) == 0


def test_a_preference_losss_beta_is_understood(capsys):
    assert "loss.beta=0.1" in INSTEAD["--beta"]
    assert cli.main(["explain", "dpo", "loss.beta=0.1"]) == 0


def test_what_nobody_knows_still_gets_the_nearest_name():
    with pytest.raises(UserError, match="did you mean '--learning-rate'"):
        flags.parse(SFTConfig, "sft", ["--lerning_rate", "1"])
    assert ours(["--frob_x=1", "value_x", "-h"], ["--frob"]) == ["--frob-x=1", "value_x", "-h"]


@pytest.mark.parametrize("path", ["./absent", "/absent/folder", "a/b/c", "~/absent_model"])
def test_a_model_folder_that_is_not_there_is_named_at_once(path, tmp_path, monkeypatch, capsys):
    """Without five tries of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "one"}\n')
    arguments = ["grpo", "--model", path, "--dataset", str(data), "--reward", "exact", "--output-dir", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    assert f"There is no folder '{path}'" in capsys.readouterr().err


def test_a_near_miss_of_a_folder_is_shown(tmp_path, capsys):
    (tmp_path / "my_model").mkdir()
    arguments = ["sft", "--model", str(tmp_path / "my_modl"), "--dataset", "x.jsonl", "--output-dir", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    assert "did you mean 'my_model'" in capsys.readouterr().err
