"""Whole runs: what they leave behind, in every precision and form of fine-tuning, and what they refuse to go on with."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import slow
from resuming import digest, events_of
from tiny_jobs import online_config, sft_config
from tiny_rewards import early_letters
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm import warm

import psigrad
from psigrad.config import EvalConfig, Evaluation, Model
from psigrad.errors import UserError
from psigrad.kernels.kernels import kernels
from psigrad.language.recipes import evaluate, online, sft
from psigrad.records import checkpoint
from psigrad.records.rows import RolloutRow

pytestmark = pytest.mark.usefixtures("rewards_here")

ROOT = Path(__file__).parents[3]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def documented(beginning: str) -> set[str]:
    """The keys that docs/run_files.md names in a point of its list, or in the row of its table for a kind of event."""
    section = (ROOT / "docs" / "run_files.md").read_text().split("## The keys of the files")[1].split("\n## ")[0]
    points = [*section.replace("\n  ", " ").splitlines()]
    own = [line for line in points if line.startswith(beginning) or beginning in line.strip("| ").split(" | ")[0].split(", ")]
    return {key for line in own for key in re.findall(r"`([\w/]+)`", line)}


def test_negative_control_a_key_of_another_event_is_not_documented_for_this():
    assert documented("failed") == {"reason", "traceback"} and not documented("unheard_of")


def kinds_in(source: str) -> dict[str, set[str]]:
    """The events that a source tells by their names: kind -> keys."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("log", "_log", "event"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and not first.value.startswith("on_"):
                found.setdefault(first.value, set()).update(word.arg for word in node.keywords if word.arg)
    return found


def test_every_event_that_is_told_is_documented():
    found: dict[str, set[str]] = {}
    for package in ("psigrad", "psigrad_extras", "psigrad_serve"):
        for path in (ROOT / package).rglob("*.py"):
            for kind, keys in kinds_in(path.read_text()).items():
                found.setdefault(kind, set()).update(keys)
    page = (ROOT / "docs" / "run_files.md").read_text()
    assert len(found) > 30
    assert not [kind for kind in found if not re.search(rf"^\|[^|]*\b{kind}\b", page, re.MULTILINE)]
    lacking = {kind: keys - documented(kind) - {"machine"} for kind, keys in found.items()}
    assert not {kind: keys for kind, keys in lacking.items() if keys}
    # negative control
    assert kinds_in("journal.log('slow', text, why=1, much=2)\nself.event('on_step')") == {"slow": {"why", "much"}}


def test_a_run_leaves_its_folder(job, tmp_path):
    result = online.run(online_config(job, tmp_path / "run", report=True))
    assert {p.name for p in result.folder.iterdir()} >= {
        "config.json", "metrics.jsonl", "timings.jsonl", "rollouts.jsonl", "events.jsonl", "checkpoints", "model", "report.html",
    }  # fmt: skip
    # without a compiler a run is told that it is slower
    told = [kind for kind in events_of(result.folder) if kind not in ("warning", "no_effect", "slower")]
    assert told == [
        *("held_out_seen", "prompt_form", "first_rows", "started", "detectable_gain", "saved", "saved", "saved", "finished"),
    ]
    (began,) = [event for event in lines(result.folder / "events.jsonl") if event["kind"] == "started"]
    native = kernels()
    assert began["instructions"] == ("" if isinstance(native, str) else native.products.instructions(torch.float32))
    steps = [row["step"] for row in lines(result.folder / "metrics.jsonl") if "reward" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in lines(result.folder / "metrics.jsonl") if "eval/prompts" in row] == [0, 3, 6]
    rollouts = lines(result.folder / "rollouts.jsonl")
    assert sum(row["kind"] == "train" for row in rollouts) == 6 * 16 and sum(row["kind"] == "eval" for row in rollouts) == 3 * 4
    assert {key for row in rollouts for key in row} <= RolloutRow.__annotations__.keys(), (
        "a key that records/rows.py does not document"
    )
    assert {key for row in lines(result.folder / "timings.jsonl") for key in row} <= documented("- **timings.jsonl**")
    for event in lines(result.folder / "events.jsonl"):
        assert set(event) <= {"time", "kind", *documented(event["kind"])}, event
    opened = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert opened(input_ids=torch.tensor([tokenizer("say a:").input_ids])).logits.isfinite().all()
    assert len(list((result.folder / "checkpoints").glob("step-*"))) == 2
    assert result.before["step"] == 0 and result.after["step"] == 6


def test_what_is_written_about_a_completion_is_what_was_sampled(job, tmp_path):
    """A random byte-level model writes garbage: broken UTF-8, control characters, special tokens."""
    result = online.run(online_config(job, tmp_path / "run"))
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    rows = lines(result.folder / "rollouts.jsonl")
    assert any("\ufffd" in row["completion"] for row in rows) and any("<|im_start|>" in row["completion"] for row in rows)
    hidden = {tokenizer.convert_tokens_to_ids(token) for token in tokenizer.special_tokens_map.values()}
    assert tokenizer.eos_token_id in hidden and tokenizer.convert_tokens_to_ids("<|im_start|>") not in hidden
    for row in rows:
        assert row["completion"] == tokenizer.decode([i for i in row["completion_ids"] if i not in hidden])
        assert row["finish_reason"] == ("stop" if row["completion_ids"][-1] == tokenizer.eos_token_id else "length")


@pytest.mark.parametrize(
    "algorithm",
    [*("dapo", "reinforce_moving_average"), *slow("rloo", "reinforce_pp", {"preset": "grpo", "kl": None})],
    ids=str,
)
def test_other_methods_run_and_leave_a_checkpoint(algorithm, job, tmp_path):
    """That they go on bitwise is in tests/runs/test_resume.py."""
    done = online.run(online_config(job, tmp_path / "run", algorithm, max_steps=4))
    assert digest(done.folder)["metrics"] and checkpoint.latest(done.folder / "checkpoints").step == 4


@pytest.fixture(scope="module")
def teacher(job, tmp_path_factory):
    """The base model, somewhat changed."""
    path = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(job / "base")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(job / "base").save_pretrained(path)
    return path


def test_the_reference_can_be_another_model(job, teacher, tmp_path):
    own = online.run(online_config(job, tmp_path / "own", "rloo", max_steps=1))
    other = online.run(replace(online_config(job, tmp_path / "other", "rloo", max_steps=1), reference=str(teacher)))
    (mine,), (theirs,) = ([row for row in lines(r.folder / "metrics.jsonl") if "objective/kl" in row] for r in (own, other))
    assert abs(mine["objective/kl"]) < 1e-4 < 1e-2 < abs(theirs["objective/kl"])
    with pytest.raises(UserError, match=r"name a reference model, but dapo has no KL term"):
        free = online_config(job, tmp_path / "none", "dapo", max_steps=1)
        online.run(replace(free, reference=str(teacher), evaluation=replace(free.evaluation, eval_kl=False)))


@pytest.mark.slow
def test_a_policy_comes_near_to_its_teacher_on_its_own_samples(job, teacher, tmp_path):
    """On-policy distillation by the exact reverse KL at the states that the policy visits, without a reward.

    Its heart: language/training/test_learning.py, where a pupil finds what its teacher does by each estimator.
    """

    def nearer(rate: float) -> float:
        config = online_config(job, tmp_path / f"rate {rate}", "distill", max_steps=30)
        config = replace(config, reference=str(teacher), optim=replace(config.optim, learning_rate=rate), reward=())
        rows = [row["kl"] for row in lines(online.run(config).folder / "metrics.jsonl") if "kl" in row]
        return sum(rows[-6:]) / sum(rows[:1]) / 6

    assert nearer(1e-2) < 0.7 and nearer(1e-9) > 0.8


@pytest.mark.parametrize("form", ["lora", "transformers sampler", *slow("bfloat16", "checkpointing")])
def test_every_form_of_training_is_repeatable(form, job, tmp_path):
    def config(name: str, steps: int):
        made = online_config(job, tmp_path / name, max_steps=steps)
        made = replace(made, optim=replace(made.optim, lr_scheduler_type="constant"))
        model = {
            "lora": {"lora_rank": 4},
            "bfloat16": {"dtype": "bfloat16"},
            "checkpointing": {"gradient_checkpointing": True},
        }.get(form, {})
        sampling = {"sampler": "transformers"} if form == "transformers sampler" else {}
        return replace(made, model=replace(made.model, **model), sampling=replace(made.sampling, **sampling))

    whole = online.run(config("whole", 6))
    online.run(config("parts", 4))
    # the evaluation at the end of the first part is not in the whole run: take the run back to its checkpoint at step 4
    longer = config("parts", 6)
    resumed = online.run(replace(longer, run=replace(longer.run, extend=True)))
    file = "model/adapter_model.safetensors" if form == "lora" else "model/model.safetensors"
    assert (resumed.folder / file).read_bytes() == (whole.folder / file).read_bytes()
    trained = [row for row in lines(resumed.folder / "metrics.jsonl") if "reward" in row]
    assert trained == [row for row in lines(whole.folder / "metrics.jsonl") if "reward" in row]
    opened = AutoModelForCausalLM.from_pretrained(resumed.model)
    assert opened.dtype == (torch.bfloat16 if form == "bfloat16" else torch.float32)


def test_lora_checkpoints_and_the_model_are_the_adapter_and_merged_it_is_whole(job, tmp_path):
    config = online_config(job, tmp_path / "run")
    alone = replace(config, model=Model(path=config.model.path, lora_rank=4))
    assert (
        not list(online.run(alone).model.rglob("model.safetensors"))
        and (tmp_path / "run/model/adapter_model.safetensors").exists()
    )
    result = online.run(
        replace(alone, model=replace(alone.model, lora_save="merged"), run=replace(alone.run, output_dir=str(tmp_path / "b")))
    )
    saved = {p.name for p in checkpoint.latest(result.folder / "checkpoints").path.iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    base = AutoModelForCausalLM.from_pretrained(job / "base").state_dict()
    merged = AutoModelForCausalLM.from_pretrained(result.model).state_dict()
    assert merged.keys() == base.keys() and any(not torch.equal(merged[k], base[k]) for k in base)


def always_a(job: Path, tmp_path: Path, steps: int):
    """SFT on demonstrations that all say the same: the known optimum is to say it."""
    rows = [{**row, "completion": " a", "answer": "a"} for row in lines(job / "train.jsonl")]
    for name, part in (("train", rows[:24]), ("held_out", rows[24:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config = sft_config(job, tmp_path / "run", max_steps=steps, save_steps=0)
    data = replace(config.data, dataset=str(tmp_path / "train.jsonl"), eval_dataset=str(tmp_path / "held_out.jsonl"))
    return sft.run(replace(config, data=data))


def test_sft_learns_its_data(job, tmp_path):
    result = always_a(job, tmp_path, 150)
    assert result.after["eval/loss"] < 0.1 * result.before["eval/loss"]
    assert result.after["eval/exact/mean"] >= 0.9 > result.before["eval/exact/mean"]


def test_eval_scores_what_was_trained(job, tmp_path):
    trained = always_a(job, tmp_path, 10)
    base = sft_config(job, tmp_path / "unused")
    config = EvalConfig(
        model=Model(path=str(trained.model)),
        data=replace(base.data, dataset=str(job / "held_out.jsonl")),
        sampling=base.sampling,
        evaluation=Evaluation(eval_prompts=0, num_generations_eval=4, eval_temperature=1.0),
        run=base.run,
        reward=("exact",),
    )
    report = evaluate.run(config)
    assert len(report.trajectories) == 8 * 4
    assert report.figures["eval/pass@4"] >= report.figures["eval/pass@1"] == pytest.approx(report.figures["eval/exact/mean"])
    assert report.figures["eval/exact/low"] <= report.figures["eval/exact/mean"] <= report.figures["eval/exact/high"]


def test_a_bare_length_reward_counts_against_the_runs_own_limit(job, tmp_path):
    config = online_config(job, tmp_path / "run", max_steps=1)
    result = online.run(replace(config, reward=("soft_overlong", "length"), max_unscored=0.0))
    for row in lines(result.folder / "rollouts.jsonl"):
        n = len(row["completion_ids"])  # of at most 4, with a cache of 1
        assert row["parts"] == {"soft_overlong": -1.0 if n == 4 else 0.0, "length": -n / 4}


def test_python_trains_on_rows(job, tmp_path):
    rows = lines(job / "train.jsonl")
    settings = {"max_steps": 2, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "eval_prompts": 4}
    settings |= {"threads": 1, "progress": False, "report": False, "output_dir": str(tmp_path / "run")}
    result = psigrad.train("rloo", model=str(job / "base"), dataset=rows, reward=early_letters, **settings)
    assert result.after["eval/prompts"] == 3, "rows of one prompt, and no other that fits into four"
    assert json.loads((result.folder / "config.json").read_text())["data"]["dataset"].startswith("rows:32:")
    figures = psigrad.evaluate(
        model=str(result.model), dataset=iter(rows[:3]), reward="exact", max_completion_length=4, threads=1, progress=False
    )
    assert figures["eval/prompts"] == 3


@pytest.mark.parametrize("change", ["setting", "dataset", "eval_dataset"])
def test_a_run_does_not_go_on_with_something_else(change, job, tmp_path):
    data, held = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    for file in (data, held):
        file.write_text((job / file.name).read_text())

    def config(steps: int):
        made = sft_config(job, tmp_path / "run", max_steps=steps, extend=True)
        return replace(made, data=replace(made.data, dataset=str(data), eval_dataset=str(held)))

    sft.run(config(2))
    if change == "setting":
        with pytest.raises(UserError, match=r"optim.learning_rate was 0.01 and is 0.02"):
            sft.run(replace(config(4), optim=replace(config(4).optim, learning_rate=0.02)))
    else:
        changed = data if change == "dataset" else held
        changed.write_text(changed.read_text().replace("say ", "says "))
        with pytest.raises(UserError, match=f"was trained with other rows or images in {change}"):
            sft.run(config(4))


def test_a_broken_checkpoint_is_passed_over_by_name(job, tmp_path):
    config = online_config(job, tmp_path / "run")
    expected = digest(online.run(config).folder)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints").path
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    shutil.rmtree(tmp_path / "run" / "model")  # as if killed before the end
    online.run(config)
    assert digest(tmp_path / "run") == expected
    ignored = [e for e in lines(tmp_path / "run" / "events.jsonl") if e["kind"] == "checkpoint_ignored"]
    assert len(ignored) == 1 and "step-00000006/model.safetensors" in ignored[0]["reason"]


def test_the_command_line_trains_and_reports(job, tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "def letters(completions, answer, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    command = [sys.executable, "-m", "psigrad", "grpo", "--model", str(job / "base"), "--dataset", str(job / "train.jsonl")]
    command += ["--reward", "my_rewards:letters", "--max-steps", "2", "--prompts-per-step", "2", "--num-generations", "2"]
    command += ["--eval-prompts", "4", "--max-completion-length", "4", "--threads", "1", "--output-dir", "out"]
    command += ["algorithm.kl=null"]
    root = str(Path(psigrad.__file__).parents[1])
    with warm():
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"}
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists() and "out/model" in done.stdout
