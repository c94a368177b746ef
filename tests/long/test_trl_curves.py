"""A hundred steps beside TRL on the same data and settings: the curves differ by no more than seeds do."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from tiny_jobs import make_job, preference_config, reward_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from psigrad.config import Data, Evaluation, Optim
from psigrad.language.recipes import preference, reward

pytestmark = pytest.mark.long
STEPS, BATCH, RATE, SEEDS = 100, 16, 1e-3, (0, 1, 2, 3, 4)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """600 pairs, a fifth of them the wrong way round, and 200 held out that are right."""
    folder, rng = make_job(tmp_path_factory.mktemp("curves")), random.Random(5)

    def pair(noise: float):
        good, bad = rng.sample("abcdefgh", 2)
        row = {"prompt": f"say {good}:", "chosen": f" {good}", "rejected": f" {bad}"}
        return row if rng.random() >= noise else {**row, "chosen": row["rejected"], "rejected": row["chosen"]}

    return folder, [pair(0.2) for _ in range(600)], [pair(0.0) for _ in range(200)]


def arguments(cls, folder, seed, **more):
    return cls(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        seed=seed,
        data_seed=seed,
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        eval_strategy="no",
        disable_tqdm=True,
        **more,
    )


def tail(losses: list[float]) -> float:
    return statistics.fmean(losses[-20:])


def agree(ours: list[float], theirs: list[float]) -> None:
    """The means over seeds differ by less than three standard errors of their difference."""
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
    assert abs(statistics.fmean(ours) - statistics.fmean(theirs)) < 3 * error + 5e-3, (ours, theirs)


def losses_of(folder) -> list[float]:
    import json

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


DPO = (preference, preference_config, "eval/rewards/accuracies", 0.9)
REWARD = (reward, reward_config, "eval/accuracy", 0.75)  # the head starts from noise: a hundred steps are a beginning


@pytest.mark.parametrize(("recipe", "settings", "figure", "least"), [DPO, REWARD], ids=["dpo", "reward"])
def test_curves_agree(recipe, settings, figure, least, task, tmp_path):
    folder, rows, held = task
    ours, theirs, right = [], [], []
    for seed in SEEDS:
        config = settings(folder, tmp_path / f"ours{seed}", max_steps=STEPS, save_steps=0, seed=seed)
        config = replace(config, data=Data(dataset=rows, eval_dataset=held), optim=Optim(learning_rate=RATE), batch_size=BATCH)
        result = recipe.run(replace(config, evaluation=Evaluation(eval_prompts=200), micro_batch_tokens=4096))
        ours.append(tail(losses_of(result.folder)))
        right.append(result.after[figure])
        torch.manual_seed(seed)
        given = {"train_dataset": Dataset.from_list(rows), "processing_class": AutoTokenizer.from_pretrained(folder / "base")}
        if recipe is preference:
            model = AutoModelForCausalLM.from_pretrained(folder / "base")
            trainer = DPOTrainer(model=model, args=arguments(DPOConfig, tmp_path / f"theirs{seed}", seed), **given)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
            config = arguments(RewardConfig, tmp_path / f"theirs{seed}", seed, disable_dropout=True)
            trainer = RewardTrainer(model=model, args=config, **given)
        trainer.train()
        theirs.append(tail([row["loss"] for row in trainer.state.log_history if "loss" in row]))
    assert statistics.fmean(right) > least
    agree(ours, theirs)


def test_negative_control_another_beta_is_seen_in_the_curve(task, tmp_path):
    folder, rows, held = task
    curves = {}
    for beta in (0.1, 0.5):
        curves[beta] = []
        for seed in SEEDS[:3]:
            config = preference_config(folder, tmp_path / f"{beta}-{seed}", max_steps=STEPS, save_steps=0, seed=seed)
            config = replace(config, loss={"preset": "dpo", "beta": beta}, data=Data(dataset=rows, eval_dataset=held))
            config = replace(config, optim=Optim(learning_rate=RATE), batch_size=BATCH, micro_batch_tokens=4096)
            curves[beta].append(tail(losses_of(preference.run(config).folder)))
    with pytest.raises(AssertionError):
        agree(curves[0.1], curves[0.5])
