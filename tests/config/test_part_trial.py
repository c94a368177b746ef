"""Custom parts are called on a test batch before a run loads anything, and a wrong one is named with its line."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import repeat_for

from psigrad.config import OnlineConfig, part_trial
from psigrad.config.part_trial import make_batch, try_parts
from psigrad.errors import UserError
from psigrad.language.recipes import online
from psigrad.objective.catalog import GRPO, METHODS, PPO
from psigrad.objective.parts.aggregate import sequence_mean
from psigrad.objective.parts.ratio import KL


def centred(batch):
    """A psi of the right shape."""
    return (batch.sequence_reward - batch.sequence_reward.mean())[:, None] * batch.mask


def squared(logp, log_ratio, advantage):
    """A surrogate of the right shape."""
    return log_ratio**2 - advantage * logp


WRONG = {
    "psi": (lambda batch: batch.reward.sum(1), r"returned a tensor of shape \[16\]; expected a tensor \[N, T\] = \[16, 3\]"),
    "ratio": (lambda logp, old, mask: 1.0, "returned a float; expected a tensor"),
    "surrogate": (lambda logp, log_ratio, advantage: logp.mean(), r"returned a tensor of shape \[\]"),
    "aggregate": (lambda mask: mask, "raised TypeError: .* takes 1 positional argument but 2 were given on a test batch"),
    "keep": ((lambda batch: batch.sequence_reward,), r"expected a boolean tensor \[N\] = \[16\] or \[N, T\] = \[16, 3\]"),
    "correction": (lambda batch: batch.mean(), "raised AttributeError: 'Batch' object has no attribute 'mean'"),
}


@pytest.mark.parametrize("slot", WRONG)
def test_a_wrong_part_is_named_with_its_slot_and_line(slot):
    part, message = WRONG[slot]
    with pytest.raises(UserError, match=rf"^algorithm\.{slot} \(.*{message}.*test_part_trial\.py, line \d+"):
        try_parts(replace(GRPO, **{slot: part}))


def test_parts_that_fit_pass_and_a_part_inside_another_is_called():
    try_parts(replace(GRPO, psi=centred, surrogate=squared))
    assert PPO.critic is not None
    with pytest.raises(UserError, match=r"^algorithm \(.*size"):
        try_parts(replace(PPO, critic=replace(PPO.critic, returns=lambda batch: batch.reward[:, :1].expand(2, 7))))


@repeat_for("name", METHODS)
def test_the_made_batch_has_what_every_method_reads(name):
    batch = make_batch()
    part_trial._compute_loss(METHODS[name].algorithm, batch, batch.logp_old.clone().requires_grad_())


def test_a_run_stops_before_it_makes_a_folder(tmp_path):
    config = OnlineConfig(reward=("exact",), algorithm={"preset": "grpo", "psi": lambda batch: torch.zeros(3)})
    with pytest.raises(UserError, match=r"algorithm\.psi \("):
        online.run(replace(config, run=replace(config.run, output_dir=str(tmp_path / "run"))))
    assert not (tmp_path / "run").exists()


def parts_of_the_page() -> dict:
    page = (Path(__file__).parents[2] / "docs" / "own_part.md").read_text()
    names: dict = {"__name__": "mine"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    return names


# (log π, log ρ, A) → the loss. The binary KL of 0.5 and 0.9 is (ln(5/9) + ln 5) / 2 = 0.51.
BY_HAND = {
    "dro": {(-1, 0.5, 2): 2.0125, (-1, -0.5, -2): -1.9875},
    "topr": {(-1, 0.5, 2): 2, (-1, 0.5, -2): -2, (-1, math.log(0.5), -2): -1},
    "up_grpo": {(-1, 0.5, 2): -2, (-1, math.log(1.5), -1): 1.5, (-1, math.log(4), -1): 3, (-1, math.log(0.5), -1): 0.8},
    "dppo_kl": {
        (math.log(0.9), math.log(1.8), 1): 0,
        (math.log(0.9), math.log(1.8), -1): 1.8 * math.log(0.9),
        (math.log(0.5), 0, 1): math.log(2),
    },
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_published_methods_of_the_page_have_the_values_of_their_formulas(name):
    part, steps = parts_of_the_page()[name], torch.tensor([*BY_HAND[name]], dtype=torch.float64)
    found = part(*(steps[:, i : i + 1] for i in range(3)))
    torch.testing.assert_close(found[:, 0], torch.tensor([*BY_HAND[name].values()], dtype=torch.float64))
    try_parts(replace(METHODS["gspo" if name == "topr" else "grpo"].algorithm, surrogate=part))


def test_the_gate_of_the_page_drops_completions_that_the_sampler_saw_otherwise():
    """Per token 0.5 → 0.9 has a binary KL of 0.51, 0.5 → 0.55 one of (ln(10/11) + ln(10/9)) / 2 = 0.005; the bound is 0.02."""
    gate, half = parts_of_the_page()["flash_gate"], math.log(0.5)
    old = torch.tensor([[0.9, 0.5], [0.55, 0.5], [0.55, 1e-9]]).log()
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.bool)
    found = gate(SimpleNamespace(logp_old=old, logp_sampler=torch.full((3, 2), half), mask=mask))
    torch.testing.assert_close(found[mask], torch.tensor([0, 0, 1.1, 1, 1.1]))
    try_parts(replace(METHODS["reinforce"].algorithm, kl=None, aggregate=sequence_mean, correction=gate))


def test_the_parts_of_the_page_fit_their_slots():
    names = parts_of_the_page()
    slots = {"psi": "best_only", "ratio": "half_ratio", "surrogate": "squared", "aggregate": "root_length"}
    for slot, name in slots.items():
        try_parts(replace(GRPO, **{slot: names[name]}))
    try_parts(replace(GRPO, keep=(names["not_too_long"],)))
    try_parts(replace(GRPO, kl=names["CappedKL"]()))
    try_parts(replace(PPO, critic=names["absolute_error"]()))
    try_parts(names["mine"])
    with pytest.raises(UserError, match=r"^algorithm \(Shorter\)"):
        try_parts(replace(GRPO, kl=type("Shorter", (KL,), {"per_step": lambda self, logp, old, ref: logp[:, :2]})()))
