"""Names, mappings, refusals and the text of `explain`."""

from __future__ import annotations

import json
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from cases import repeat_for

from psigrad.config import algorithms
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs
from psigrad.objective import catalog as presets
from psigrad.objective.catalog import METHODS as PRESETS
from psigrad.objective.parts.advantage import gae, group_mean, leave_one_out, moving_average, reward_to_go, whitened
from psigrad.objective.parts.aggregate import fixed_length, has_signal, not_truncated, sequence_mean, token_mean
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.off_policy import off_policy_mask
from psigrad.objective.parts.ratio import KL, adaptive, none, sequence, truncated_importance
from psigrad.objective.parts.surrogate import clip, covariance_penalty, divergence_mask, kl_penalty, score, with_imitation

ROOT = Path(__file__).parents[2]


def test_presets_hold_the_values_of_their_papers() -> None:
    assert (presets.GRPO.surrogate, presets.GRPO.kl, presets.GRPO.aggregate) == (
        clip(0.2, 0.2),
        KL("loss", "k3", 0.04),
        sequence_mean,
    )
    assert (presets.GRPO.psi, presets.DR_GRPO.psi) == (group_mean(std=True), group_mean(std=False))
    assert presets.DR_GRPO.aggregate == fixed_length(1024) and presets.DR_GRPO.kl is None
    assert (presets.DAPO.surrogate, presets.DAPO.keep, presets.DAPO.kl) == (clip(0.2, 0.28), (has_signal, not_truncated), None)
    assert presets.DAPO.aggregate is token_mean
    assert (presets.GSPO.ratio, presets.GSPO.surrogate) == (sequence, clip(3e-4, 4e-4))
    assert (presets.RLOO.psi, presets.RLOO.kl) == (leave_one_out, KL("reward", "k1", 0.05))
    assert presets.REINFORCE_PP.psi == whitened(reward_to_go(1.0)) and presets.REINFORCE_PP.kl.where == "reward"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"psi": gae()}, "critic is None"),
        ({"psi": whitened(gae())}, "critic is None"),
        ({"critic": value_loss()}, "never reads its values"),
        ({"ratio": none}, "takes its gradient from the ratio"),
        ({"surrogate": score}, "ignores the ratio"),
        ({"ratio": none, "surrogate": covariance_penalty()}, "takes its gradient from the ratio"),
        ({"ratio": none, "surrogate": off_policy_mask(kl_penalty())}, "takes its gradient from the ratio"),
        ({"ratio": none, "surrogate": with_imitation(off_policy_mask())}, "takes its gradient from the ratio"),
        ({"ratio": sequence, "surrogate": divergence_mask()}, "of each step, but ratio is sequence; set ratio=token"),
        ({"ratio": none, "surrogate": off_policy_mask(divergence_mask())}, "of each step, but ratio is none; set ratio=token"),
        ({"ratio": presets.RLOO.ratio, "aggregate": token_mean}, "set aggregate=sequence_mean"),
    ],
)
def test_parts_that_do_not_fit_are_refused_at_construction(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(presets.GRPO, **change)


def test_whitening_refuses_a_psi_with_memory() -> None:
    with pytest.raises(ValueError, match="which has a state"):
        whitened(moving_average())


def tiny(**changes: object) -> Batch:
    two = torch.zeros(2, 1)
    return replace(Batch(torch.ones(2, 1, dtype=torch.bool), two, two, torch.zeros(2).long(), logp_ref=two), **changes)


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        (presets.GRPO, {"group": torch.arange(2)}, "num_generations"),
        (presets.GRPO, {"logp_ref": None}, "logp_ref"),
        (presets.GRPO, {"reward": torch.tensor([[0.0], [float("nan")]])}, r"reward of rows \[1\]"),
        (presets.DAPO, {}, "truncated"),
        (replace(presets.GRPO, psi=gae(), critic=value_loss()), {}, "critic's values"),
        (replace(presets.GRPO, correction=truncated_importance()), {}, "logp_sampler"),
        (replace(presets.GRPO, entropy=bonus()), {}, "`entropy` is missing"),
        (replace(presets.GRPO, kl=KL("loss", "exact")), {}, "`kl` is missing"),
        (replace(presets.GRPO, kl=KL("loss", "exact", adaptive())), {"logp_ref": None}, "logp_ref"),
    ],
)
def test_a_batch_that_lacks_what_a_part_reads_is_refused(method: PolicyGradient, changes: dict, sentence: str) -> None:
    batch = tiny(**changes)
    with pytest.raises(ValueError, match=sentence):
        prepared = method.prepare(batch, method.initial_state())
        method.loss(prepared, PolicyOutputs(torch.zeros(2, 1)), method.totals(prepared), prepared.state)


@pytest.mark.parametrize("changes", [{"reward": torch.zeros(2, 3)}, {"group": torch.zeros(3).long()}, {"mask": torch.ones(2, 1)}])
def test_a_batch_of_the_wrong_shape_is_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        tiny(**changes)


def test_a_lone_completion_among_groups_has_no_advantage() -> None:
    mask = torch.ones(3, 1, dtype=torch.bool)
    batch = Batch(mask, torch.tensor([[5.0], [1.0], [0.0]]), torch.zeros(3, 1), torch.tensor([0, 1, 1]))
    for psi in (leave_one_out, group_mean()):
        assert psi(batch)[0].item() == 0.0 and psi(batch)[1].item() > 0


def test_what_a_method_needs() -> None:
    assert (presets.GRPO.needs_reference, presets.DAPO.needs_reference) == (True, False)
    assert not replace(presets.GRPO, kl=KL("loss", "k3", 0.0)).needs_reference
    assert (presets.GRPO.min_group_size, presets.REINFORCE.min_group_size) == (2, 1)
    assert (presets.DAPO.dynamic_sampling, presets.GRPO.dynamic_sampling) == (True, False)
    rich = replace(presets.GRPO, psi=gae(), critic=value_loss(), entropy=bonus(), kl=KL("loss", "exact"))
    assert rich.needs_critic and rich.needs_entropy and rich.needs_exact_kl and rich.min_group_size == 1


def test_state_is_plain_numbers() -> None:
    method = replace(presets.REINFORCE_MOVING_AVERAGE, kl=KL("reward", "k1", adaptive()))
    state = method.initial_state()
    assert set(state) == {"reward_average", "reward_batches", "kl_coefficient"}
    after = method.prepare(tiny(reward=torch.tensor([[1.0], [3.0]])), state).state
    assert json.loads(json.dumps(after)) == after and after != state and set(after) == set(state)


KNOWN = {part for parts in algorithms.PARTS.values() for part in parts.values() if is_dataclass(part)}
PARTS = sorted(KNOWN, key=lambda part: part.__name__)


@repeat_for("part", PARTS)
def test_a_part_cannot_be_changed_once_it_is_made_and_equals_its_twin(part: type) -> None:
    """Methods share their parts: what one changed, all others would have."""
    made = part(**{f.name: 2 for f in fields(part) if f.default is MISSING and f.default_factory is MISSING})
    name = fields(made)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(made, name, getattr(made, name))
    assert made == replace(made) and hash(made) == hash(replace(made))


def test_the_table_of_methods_names_how_each_gradient_is_tested():
    page = (ROOT / "docs" / "methods" / "table.md").read_text().split("| method |")[1].split("\n\n")[0]
    rows = {line.split("|")[1].split("]")[0].strip(" ["): line.split("|")[-2].strip() for line in page.splitlines()[2:]}
    assert rows.keys() == set(PRESETS) and all(rows.values())
    tested = (ROOT / "tests" / "objective" / "test_enumerated_gradients.py").read_text()
    listed = tested.split("FORMULAS = [")[1].split("]")[0].replace("\n", " ").split(",")
    assert {name for name, proof in rows.items() if proof == "enumerated"} == {n.strip() for n in listed} & rows.keys()
