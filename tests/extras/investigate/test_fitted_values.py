"""Values that are fitted for a replay: the regression by hand, and no prompt's own rewards in its values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from psigrad.language.models import language_model
from psigrad.language.rollout.types import Completion, Trajectory
from psigrad.language.training.online.batching import to_batch
from psigrad.objective.parts.advantage import gae, whitened
from psigrad_extras.investigate.fitted_values import FittedValues, fit_on_others

MONTE_CARLO = gae(1.0, 1.0)  # A = R - V


def test_the_regression_by_hand():
    """Of the first part: mean 0, centre 1, variance 1; slope (1·1 + 1·1) / (2 + ridge 1) = 2/3. The second part's is above 2 at
    x = 3, where nothing was seen.
    """
    x, y = torch.tensor([[-1.0], [1.0], [0.5], [3.0]]), torch.tensor([0.0, 2.0, 5.0, 7.0])
    values = fit_on_others(x, y, torch.ones(4), torch.tensor([0, 0, 1, 1]))
    assert values[2:].tolist() == pytest.approx([1 + 1 / 3, 2.0])


def test_a_long_completion_counts_as_a_short_one():
    """A completion's tokens that say the same, each weighing 1/T, are that completion in one token; unweighted they are not."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=9)
    part = torch.tensor([0] * 6 + [1] * 3)
    times = np.array([1, 4, 2, 1, 3, 1, 1, 1, 1])
    wide, high, of = (torch.tensor(np.repeat(v, times, axis=0)).float() for v in (x, y, part.numpy()))
    once = fit_on_others(torch.tensor(x).float(), torch.tensor(y).float(), torch.ones(9), part)[6:]
    weight = torch.tensor(np.repeat(1 / times, times)).float()
    assert fit_on_others(wide, high, weight, of)[-3:].tolist() == pytest.approx(once.tolist(), abs=1e-5)
    assert fit_on_others(wide, high, torch.ones(len(high)), of)[-3:].tolist() != pytest.approx(once.tolist(), abs=1e-2)


@pytest.fixture(scope="module")
def model(job):
    return language_model.load(str(job / "base"))


def batch_of(model, prompts: int, changed: dict[tuple[int, int], float] | None = None):
    """Four completions of two to five tokens for each prompt; the reward is how often a token is even, or `changed`."""

    def one(g: int, k: int) -> Trajectory:  # fmt: skip
        rng = np.random.default_rng([g, k])
        ids = tuple(map(int, rng.integers(5, 60, 2 + (g + k) % 4)))
        logps = (-1.0,) * len(ids)
        reward = (changed or {}).get((g, k), float(np.mean([i % 2 == 0 for i in ids])))
        drawn = Completion(ids, logps, logps, "stop", 10 * g + k)
        return Trajectory(g, k, (5 + g, 6, 7), drawn, 0, reward=reward, status="scored")

    return to_batch([[one(g, k) for k in range(4)] for g in range(prompts)])


def values_in(batch, model, budget=64):
    psi = FittedValues(MONTE_CARLO, model, budget)
    return torch.where(batch.mask, batch.sequence_reward[:, None] - psi(batch), 0.0), psi.figures["explained_variance"]


@pytest.mark.parametrize("prompts", [9, 2, 1])
def test_no_prompts_own_rewards_are_in_its_values(prompts, model):
    """With one prompt, it is no completion's own."""
    before, _ = values_in(batch_of(model, prompts), model)
    after, _ = values_in(batch_of(model, prompts, {(0, 1): 30.0}), model)
    own = slice(0, 4) if prompts > 1 else slice(1, 2)
    assert torch.allclose(after[own], before[own], atol=1e-5)  # 30 - (30 - V) rounds
    assert not torch.allclose(after, before, atol=1e-2), "and those of others follow it"


def test_passes_of_any_size_give_the_same_values(model):
    batch = batch_of(model, 6)
    small, large = values_in(batch, model, 16)[0], values_in(batch, model, 10_000)[0]
    assert torch.allclose(small, large, atol=1e-5)
    assert not torch.allclose(small[4], small[8], atol=1e-4)


def test_what_the_hidden_states_tell_is_foreseen(model):
    """A reward that can be read off the state before the first token, for one token's sake, and one that is drawn."""
    batch = batch_of(model, 60)
    first = torch.zeros_like(batch.mask)
    first[:, 0] = True
    hidden = FittedValues(MONTE_CARLO, model, 512)._hidden(batch)[:, 0]
    told = (hidden - hidden.mean(0)) @ torch.linalg.svd(hidden - hidden.mean(0)).Vh[0]
    drawn = torch.randn(len(told), generator=torch.Generator().manual_seed(1))
    explained = [values_in(replace(batch, mask=first, reward=first * reward[:, None]), model, 512)[1] for reward in (told, drawn)]
    assert explained[0] > 0.5 and explained[1] < 0.1


def test_advantages_are_whitened_behind_the_values(model):
    batch = batch_of(model, 6)
    made = FittedValues(whitened(MONTE_CARLO), model, 512)(batch)[batch.mask]
    assert float(made.mean()) == pytest.approx(0, abs=1e-5) and float(made.std()) == pytest.approx(1, abs=1e-4)
