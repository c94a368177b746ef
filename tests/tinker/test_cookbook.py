"""tinker-cookbook's own loops and recipes, unmodified, against psigrad's server: a tiny model under a name that they know, and
data sets of their shape in folders of their names.

The cookbook pins another transformers, so it has an environment of its own: PSIGRAD_COOKBOOK is its Python.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

import psigrad
from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny
from psigrad_serve.serving import running
from psigrad_serve.tinker_api import TinkerServer

COOKBOOK = os.environ.get("PSIGRAD_COOKBOOK", "")
pytestmark = [
    pytest.mark.tinker,
    pytest.mark.timeout(1800),
    pytest.mark.needs("cookbook"),
]
NAME = "Qwen/Qwen3-4B-Instruct-2507"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
GSM8K = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"  # noqa: E501


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def talk(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """The folder that recipes run in, and the server: its model boxes some number, the right one about four times in ten."""
    folder, rng = tmp_path_factory.mktemp("cookbook"), random.Random(0)
    sums = [(rng.randint(0, 4), rng.randint(0, 4)) for _ in range(640)]
    chats = [
        {"prompt": f"{a}+{b}", "prompt_id": str(i), "category": "Math", "messages": talk(f"{a}+{b}", "\\boxed{7}")}
        for i, (a, b) in enumerate(sums)
    ]
    asked = [{"question": f"{a}+{b}", "answer": f"So.\n#### {a + b}"} for a, b in sums]
    for name, rows in (("HuggingFaceH4/no_robots", chats), ("openai/gsm8k/main", asked)):
        write(folder / name / "train.jsonl", rows)
        write(folder / name / "test.jsonl", rows[:32])
    (folder / "openai/gsm8k/README.md").write_text(GSM8K)

    tokenizer = tiny.tokenizer(["user assistant 0 1 2 3 4 5 6 7 8 9 + How many r's are in strawberry?" + SUFFIX] * 5, 320)
    tokenizer.add_tokens([f"\\boxed{{{n}}}" for n in range(9)])
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML
    ends = int(tokenizer.eos_token_id)
    network = tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, heads=4, max_length=1024, eos_token_id=ends)
    network.save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    shown = []
    for a, b in sums:
        answer = a + b if rng.random() < 0.3 else rng.randint(0, 8)
        before = talk("How many r's are in strawberry?" + SUFFIX, "\\boxed{3}") if rng.random() < 0.5 else []
        shown.append({"messages": [*before, *talk(f"{a}+{b}" + SUFFIX * (rng.random() < 0.8), f"\\boxed{{{answer}}}")]})
    settings = {"learning_rate": 3e-3, "batch_size": 16, "max_steps": 200, "eval_prompts": 0}
    psigrad.train("sft", model=folder / "random", dataset=shown, output_dir=folder / "sft", **settings)
    shutil.copytree(folder / "sft" / "model", folder / NAME)
    server = TinkerServer(str(folder / NAME), NAME, folder / "states")
    with running(server, "tml-key") as running_at:
        yield folder, running_at
    server.close()


def cook(at, recipe: str, *settings: str) -> list[dict]:
    """Run a recipe as its page says; its figures, step by step."""
    folder, server = at
    log = folder / recipe.replace(".", "-")
    own = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.token, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [COOKBOOK, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={NAME}", f"log_path={log}", *settings]
    done = subprocess.run(words, cwd=folder, env={**kept, **own}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_the_supervised_loop(at):
    """It learns to answer 7, whatever is asked."""
    rows = cook(at, "sl_loop", "batch_size=16", "learning_rate=3e-3", "lora_rank=8", "max_steps=20")
    assert rows[-1]["train_mean_nll"] < 0.7 * rows[0]["train_mean_nll"]


def test_the_rl_loop(at):
    """That rewards rise is shown by the client's own test, which has seeds and controls."""
    rows = cook(
        at, "rl_loop", "batch_size=16", "group_size=8", "learning_rate=1e-3", "lora_rank=8", "max_tokens=12", "max_steps=8"
    )
    assert len(rows) == 8 and any(row["reward/total"] > 0 for row in rows)
    assert any(row.get("grad_norm:mean", 0.0) > 0 for row in rows)


RECIPES = {
    "chat_sl.train": ["dataset=no_robots", "batch_size=16", "learning_rate=1e-3", "max_steps=8", "eval_every=0"],
    "math_rl.train": ["env=gsm8k", "group_size=8", "groups_per_batch=16", "learning_rate=3e-3", "max_tokens=12", "max_steps=6",
                      "eval_every=0"],
    "preference.shorter.train": ["batch_size=4", "group_size=8", "learning_rate=3e-3", "max_tokens=16", "max_steps=4",
                                 "renderer_name=qwen3_instruct", "eval_every=0"],
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_as_it_is(at, recipe):
    rows = cook(at, recipe, *RECIPES[recipe], "behavior_if_log_dir_exists=delete")
    steps = int(next(setting for setting in RECIPES[recipe] if setting.startswith("max_steps=")).partition("=")[2])
    assert len(rows) >= steps and any(row.get("grad_norm:mean", 0.0) > 0 for row in rows)
