"""Offline tasks on a few rows, and one step of them."""

from __future__ import annotations

import json

import torch

from psigrad.config.algorithms import resolve_loss
from psigrad.language.data import pairs
from psigrad.language.data.dataset_rows import validate
from psigrad.language.models import scalar_model
from psigrad.language.training.offline.preference_task import KTOTask, PreferenceTask, mismatch, reference_logps
from psigrad.language.training.offline.reward_task import ProcessRewardTask, RewardTask
from psigrad.objective.preferences.reward_model import BradleyTerry


def read(job, name: str) -> list[dict]:
    return [json.loads(line) for line in (job / f"{name}.jsonl").read_text().splitlines()]


def made_pairs(job, tokenizer, n: int = 7):
    return [pairs.encode_pair(tokenizer, validate(row, "preference", "x")) for row in read(job, "pairs")[:n]]


def step(task, parameters, budget: int):
    """Loss, terms and gradient of one step on all rows."""
    for p in parameters:
        p.grad = None
    total, terms = 0.0, {}
    for share in task.shares(range(len(task)), budget):
        loss = share()
        loss.value.backward()
        total += float(loss.value.detach())
        terms = {name: terms.get(name, 0.0) + float(value) for name, value in loss.terms.items()}
    return total, terms, torch.cat([p.grad.flatten() for p in parameters])


def task_of(kind: str, job, model, apart: float = 0.0):
    """The task and who learns. The reference of a pair lies `apart` from the policy: where the two are one, rounding decides
    which answer it prefers.
    """
    if kind == "reward":
        scalar = scalar_model.load(str(job / "base"))
        return RewardTask(scalar, BradleyTerry(0.01), made_pairs(job, scalar.tokenizer)), scalar
    if kind == "process":
        scalar = scalar_model.load(str(job / "base"))
        rows = [
            {"prompt": "say a:", "completions": ["a b", "c", "d e f"][: k + 1], "labels": [1, 0, 0.5][: k + 1]} for k in range(3)
        ]
        return ProcessRewardTask(
            scalar, [pairs.encode_steps(scalar.tokenizer, validate(r, "stepwise", "x")) for r in rows]
        ), scalar
    if kind == "kto":
        rows = [pairs.encode_labelled(model.tokenizer, validate(r, "unpaired-preference", "x")) for r in read(job, "judged")[:7]]
        answers = [[row.answer, other] for row, other in zip(rows, mismatch(rows), strict=True)]
        return KTOTask(model, resolve_loss("kto"), rows, reference_logps(model, [r.prompt for r in rows], answers, 64)), model
    made = made_pairs(job, model.tokenizer)
    known = reference_logps(model, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 64)
    known = [[chosen - apart * (-1) ** i, rejected] for i, (chosen, rejected) in enumerate(known)]
    return PreferenceTask(model, resolve_loss(kind), made, known), model
