"""What a user types: quick help, one-sentence errors, settings from everywhere."""

from __future__ import annotations

import json
import operator
import re
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

import psigrad
from psigrad import cli, flags
from psigrad.config import EvalConfig, OnlineConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.recipes.load import load, resolve_names, to_dict

ROOT = Path(__file__).parents[2]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_help_answers_within_half_a_second():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "psigrad", "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) <= 0.5
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("code", ["import psigrad", "from psigrad.cli import main; main(['--help'])", "import psigrad.rewards"])
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    heavy = python(
        f"import sys\n{code}\nprint([m for m in ('torch', 'transformers', 'datasets', 'matplotlib') if m in sys.modules])"
    )
    assert heavy.splitlines()[-1] == "[]"


def test_help_of_a_command_needs_no_torch_and_shows_every_setting():
    command = "from psigrad.cli import main\ntry: main(['grpo', '--help'])\nexcept SystemExit: pass"
    out = python(f"import sys\n{command}\nprint('torch' in sys.modules)")
    assert out.splitlines()[-1] == "False"
    for flag in ("--model", "--dataset", "--reward", "--learning-rate", "--max-steps", "--num-generations", "--output-dir"):
        assert flag in out


@pytest.mark.parametrize("cls", [SFTConfig, OnlineConfig, EvalConfig])
def test_every_setting_has_a_help_text(cls):
    for name, _, _ in flags._fields(cls):
        assert flags._help(cls, name), name


def test_the_leaf_names_of_settings_are_unique():
    for cls in (SFTConfig, OnlineConfig, EvalConfig):
        leaves = [name.rpartition(".")[2] for name, _, _ in flags._fields(cls)]
        assert len(leaves) == len(set(leaves))


MISTAKES = {
    "unknown command": (["grpoo"], "There is no command 'grpoo'.*did you mean 'grpo'"),
    "unknown flag": (["grpo", "--learning-rat", "1"], "There is no flag --learning-rat.*did you mean '--learning-rate'"),
    "unknown override": (
        ["grpo", "optim.learningrate=1"],
        "there is no setting 'learningrate' in optim; did you mean 'learning_rate'",
    ),
    "bad value": (["grpo", "--max-steps", "ten"], "run.max_steps is 'ten'; input should be a valid integer"),
    "bad choice": (["sft", "--dtype", "float16"], "model.dtype is 'float16'"),
    "stray word": (["sft", "hello"], "'hello' is neither a flag nor an override"),
    "no value": (["sft", "--dataset"], "expected one argument"),
    "missing file": (["sft", "--config", "nowhere.yaml"], "'nowhere.yaml' cannot be read"),
    "no model": (["sft", "--dataset", "x.jsonl", "--output-dir", "{tmp}/run"], "No model was given"),
    "no reward": (["grpo", "--model", "x", "--dataset", "x.jsonl"], "No reward was given"),
    "unknown reward": (
        ["grpo", "--model", "{model}", "--dataset", "{data}", "--reward", "exat", "--output-dir", "{tmp}/run"],
        "'exat'",
    ),
    "no dataset": (["grpo", "--model", "{model}", "--reward", "exact", "--output-dir", "{tmp}/run"], "No dataset was given"),
    "bad model": (["sft", "--model", "{tmp}", "--dataset", "{data}", "--output-dir", "{tmp}/run"], "No causal language model"),
    "bad algorithm": (["grpo", "--reward", "exact", "algorithm.surrogate=clipp"], "surrogate.*'clipp'.*did you mean 'clip'"),
    "parts that do not fit": (["grpo", "--reward", "exact", "algorithm.psi=gae"], "critic is None"),
    "group of one": (["grpo", "--reward", "exact", "--num-generations", "1"], "give at least 2"),
    "greedy": (["grpo", "--reward", "exact", "--temperature", "0"], "temperature is 0"),
    "bad top_p": (
        ["grpo", "--model", "{model}", "--dataset", "{data}", "--reward", "exact", "--top-p", "0", "--output-dir", "{tmp}/r"],
        "top_p",
    ),
    "no run": (["report", "{tmp}"], "is no run folder"),
    "unknown preset": (["explain", "grop"], "There is no algorithm 'grop'.*did you mean 'grpo'"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    from tiny_jobs import make_job

    return make_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_status_2(mistake, job, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, expected = MISTAKES[mistake]
    places = {"tmp": tmp_path, "model": job / "base", "data": job / "train.jsonl"}
    assert cli.main([a.format(**places) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error), error
    assert "Traceback" not in error
    assert error.startswith("psigrad: ") and error.count("\n") == 1


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def broken(arguments):
        raise ValueError("deep in a library")

    monkeypatch.setitem(cli.COMMANDS, "tasks", cli.Command("", broken))
    with pytest.raises(ValueError, match="deep in a library"):
        cli.main(["tasks"])


def test_flags_beat_overrides_beat_the_file_beats_the_defaults(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("optim: {learning_rate: 1e-3, weight_decay: 0.5, adam_beta1: 0.7}\nreward: exact\n")
    config = flags.parse(
        OnlineConfig,
        "grpo",
        [
            "--config",
            str(file),
            "optim.learning_rate=2e-3",
            "optim.weight_decay=0.6",
            "--learning-rate",
            "3e-3",
            "--reward",
            "a",
            "b",
        ],
        defaults={"algorithm": "grpo"},
    )
    assert (config.optim.learning_rate, config.optim.weight_decay, config.optim.adam_beta1) == (3e-3, 0.6, 0.7)
    assert config.optim.adam_beta2 == 0.999 and config.reward == ("a", "b")


def test_parts_of_the_algorithm_are_overridden_by_dotted_name():
    config = flags.parse(
        OnlineConfig, "grpo", ["algorithm.kl=null", "algorithm.surrogate.high=0.28"], defaults={"algorithm": "grpo"}
    )
    assert config.algorithm == {"preset": "grpo", "kl": None, "surrogate": {"high": 0.28}}


@pytest.mark.parametrize("cls", [SFTConfig, OnlineConfig, EvalConfig])
def test_settings_survive_the_way_through_json(cls):
    config = load(
        cls, overrides=["model.path=x", "reward=[a,b]", "optim.learning_rate=1e-5" if cls is not EvalConfig else "run.seed=3"]
    )
    assert load(cls, flags=json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(("file", "cls"), [("grpo.yaml", OnlineConfig), ("sft.yaml", SFTConfig)])
def test_the_shipped_examples_load(file, cls):
    assert load(cls, ROOT / "examples" / file).run.output_dir.startswith("runs/")


def test_python_settings_are_named_by_leaf_or_dotted_name():
    assert resolve_names(OnlineConfig, {"learning_rate": 1, "run.seed": 2}) == {"optim.learning_rate": 1, "run.seed": 2}
    with pytest.raises(UserError, match="did you mean 'learning_rate'"):
        resolve_names(OnlineConfig, {"learning_rat": 1})


def test_every_settings_class_is_frozen():
    for cls in (SFTConfig, OnlineConfig, EvalConfig):
        assert cls.__dataclass_params__.frozen
        for f in fields(cls):
            hint = get_type_hints(cls)[f.name]
            assert not is_dataclass(hint) or hint.__dataclass_params__.frozen


def test_the_public_names_are_there_and_lazy():
    assert {"train", "evaluate", "explain", "PolicyGradient", "__version__"} == set(psigrad.__all__) == set(dir(psigrad))
    assert callable(psigrad.train) and callable(psigrad.explain)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        operator.attrgetter("trian")(psigrad)
