"""Completion in the shells: the scripts are run by the shells themselves, where they are installed (bash always is)."""

from __future__ import annotations

import contextlib
import subprocess

import pytest

from psigrad import cli
from psigrad.errors import UserError
from psigrad_extras.completion import Flag, _described, offer


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("completion"), {}
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w") as file, contextlib.redirect_stdout(file):
            assert cli.main(["completion", shell]) == 0
        found[shell] = folder / shell
    return found


def offered(script, *words):
    """What bash offers for the last of the words."""
    line = " ".join(words)
    program = f"""
      source {script}
      COMP_WORDS=({" ".join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; COMP_LINE={line!r}
      _psigrad
      printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_bash_completes_commands_flags_and_values(scripts):
    assert offered(scripts["bash"], "psigrad", "dp") == ["dppo", "dpo"]
    assert "--learning-rate" in offered(scripts["bash"], "psigrad", "grpo", "--learn")
    assert offered(scripts["bash"], "psigrad", "grpo", "--dtype", "") == ["float32", "bfloat16"]
    assert offered(scripts["bash"], "psigrad", "explain", "reinforce_p") == ["reinforce_pp", "reinforce_pp_baseline"]
    assert offered(scripts["bash"], "psigrad", "explain", "dead_") == ["dead_groups"]
    assert offered(scripts["bash"], "psigrad", "explain", "flat_") == ["flat_reward"]
    assert offered(scripts["bash"], "psigrad", "completion", "") == ["bash", "zsh", "fish"]


def test_bash_leaves_file_names_to_itself(scripts):
    assert offered(scripts["bash"], "psigrad", "grpo", "--dataset", "da") == []
    assert "complete -o default" in scripts["bash"].read_text()


def test_every_command_and_every_flag_of_its_help_is_in_every_script(scripts):
    for shell, path in scripts.items():
        text = path.read_text()
        assert all(name in text for name in cli.COMMANDS), shell
        assert "max-completion-length" in text and "allow-host" in text


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(name, marks=pytest.mark.needs(name)) for name in ("zsh", "fish"))])
def test_the_shell_reads_its_script(scripts, shell):
    subprocess.run([shell, "-n", scripts[shell]], check=True)


def test_flags_are_read_off_argparse_help():
    text = "options:\n  -h, --help   show it\n  --dtype DTYPE\n        Precision; more. (float32, bfloat16; default float32)\n"
    assert _described(text) == [Flag("--help", "show it", ()), Flag("--dtype", "Precision", ("float32", "bfloat16"))]


def test_words_are_read_off_the_usage():
    words = {name: set(offer(name, cli.COMMANDS[name]).words) for name in ("experiment", "init", "control")}
    assert {"psi", "bias", "clip"} <= words["experiment"]
    assert words["init"] == {"verifiable", "preferences", "tools", "control"}
    assert {"ppo", "reinforce", "trpo", "dqn"} <= words["control"]


def test_the_methods_of_a_grid_are_values_of_its_flag():
    (method,) = (flag for flag in offer("grid", cli.COMMANDS["grid"]).flags if flag.name == "--method")
    assert method.values == ("value_iteration", "policy_iteration", "modified_policy_iteration", "prioritised_sweeping")


def test_an_unknown_shell_is_refused(capsys):
    assert cli.main(["completion", "tcsh"]) == 2
    error = capsys.readouterr().err
    assert "tcsh" in error and "bash|zsh|fish" in error
    with pytest.raises(UserError, match="takes the name of a shell"):
        cli.COMMANDS["completion"].run([])
