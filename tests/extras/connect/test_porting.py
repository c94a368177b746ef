"""docs/porting.md: both sides of each program say the same, and psigrad's side runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from psigrad.cli import flags
from psigrad.compat.foreign_names import load
from psigrad.config import OnlineConfig
from psigrad.config.methods import declaration
from psigrad.language.models import tiny
from psigrad_extras.connect.trl_scripts import convert_file

PAGE = (Path(__file__).parents[3] / "docs" / "porting.md").read_text()


def programs(heading):
    """(theirs, psigrad's) under a heading of the page."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(?:python)?\n(.*?)```", part, re.DOTALL)
    return blocks[0], blocks[1]


def parse(command, method=None):
    """The settings of a command; `method` where it is another library's."""
    words = shlex.split(command.replace("\\\n", " "))
    method, arguments = (method, words[3:]) if method else (words[1], words[2:])
    return flags.parse(OnlineConfig, method, arguments, defaults=declaration(method).defaults)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what the programs name: a model and prompts."""
    texts = [f"say {word}" for word in ("one", "two", "three")]
    tokenizer = tiny.tokenizer(texts, 40)
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text, "answer": text}) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_trls_script_says_what_psigrads_program_does(here):
    theirs, ours = programs("TRL")
    (here / "train.py").write_text(theirs)
    (here / "brief.py").write_text(ours)
    converted = {name.rpartition(".")[2]: value for name, value in convert_file("train.py").settings.items()}
    said = dict(re.findall(r"^    (\w+)=([^,#]+),", ours, re.MULTILINE))
    for name in ("learning_rate", "max_steps", "num_generations", "max_completion_length", "prompts_per_step"):
        assert float(converted[name]) == float(said[name]), name
    assert json.loads(said["beta"]) in (converted.get("beta"), converted.get("coefficient"))
    scope = {"__name__": "__main__", "__file__": str(here / "brief.py")}
    exec(compile(ours, str(here / "brief.py"), "exec"), scope)
    assert len((here / "runs/brief/metrics.jsonl").read_text().splitlines()) >= 2
    assert (here / "runs/brief/model/model.safetensors").exists()


@pytest.mark.slow
def test_trls_program_runs(here):
    """Its shorter sibling reads it. A CPU needs three arguments more, of which the page says nothing."""
    theirs, _ = programs("TRL")
    scope = {}
    exec(theirs.replace("learning_rate", "use_cpu=True, bf16=False, report_to='none', learning_rate"), scope)
    (row,) = [row for row in scope["trainer"].state.log_history if "rewards/brevity/mean" in row]
    assert scope["trainer"].state.global_step == 2 and row["reward"] < 0


def test_both_sides_of_stable_baselines3_run(here):
    for program in programs("Stable-Baselines3"):
        scope = {}
        exec(program, scope)
        assert scope["mean"] > 5  # CartPole's least is 8


def test_verls_command_is_psigrads(here):
    theirs, ours = programs("verl")
    words = shlex.split(theirs.replace("\\\n", " "))[3:]
    wanted = [word for word in words if not word.startswith("algorithm.adv_estimator")]
    assert len(words) == len(wanted) + 1
    tree = {}
    for word in wanted:
        name, _, value = word.partition("=")
        *folders, leaf = name.split(".")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[leaf] = value if not re.fullmatch(r"[\d.e-]+", value) else json.loads(value)
    (here / "verl.yaml").write_text(json.dumps({**tree, "algorithm": "grpo", "run": {"output_dir": "x"}}))
    mine = parse(ours + " --output-dir x")
    assert load(OnlineConfig, here / "verl.yaml", []) == mine
    assert parse(ours.replace("2e-6", "3e-6") + " --output-dir x") != mine


def test_openrlhfs_command_is_psigrads(here):
    theirs, ours = programs("OpenRLHF")
    theirs = re.sub(r"--advantage_estimator \w+ ", "", theirs)
    mine = parse(ours + " --output-dir x")
    assert parse(theirs + " --output-dir x", "reinforce_pp") == mine
    assert parse(theirs.replace("0.01", "0.02") + " --output-dir x", "reinforce_pp") != mine


def test_the_programs_of_the_page_are_there():
    assert [len(programs(heading)) for heading in ("TRL", "Stable-Baselines3", "verl", "OpenRLHF")] == [2] * 4
