"""What every part in contrib/ is held to."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path

import pytest
import scripts
import torch

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, terminal
from psigrad.objective.parts.advantage import group_mean

CONTRIB = Path(__file__).parents[2] / "contrib"


def parts(kind):
    """The parts of a file, by name."""
    module = scripts.load(CONTRIB / f"{kind}.py")
    return {name: getattr(module, name) for name in module.__all__}


ADVANTAGES, REWARDS = parts("advantages"), parts("rewards")
# Worked out by hand: of rewards 0, 1, 1, 3 in one group; of completions.
VALUES = {
    "group_rank": [-1.0, 0.0, 0.0, 1.0],
    "fresh_words": {"a b c": 1.0, "a b c d": 1.0, "a b a b a": 2 / 3, "go go go go go": 1 / 3, "two words": None, "": None},
}


def batch(rewards, group):
    mask = torch.tensor([[True, True, False]] * len(rewards))
    logp = torch.zeros(len(rewards), 3, dtype=torch.float64)
    return Batch(mask, terminal(torch.tensor(rewards, dtype=torch.float64), mask), logp, torch.tensor(group))


def of(name, rewards, group):
    """The advantage of each completion, which is that of all its steps."""
    advantage_NT = ADVANTAGES[name](batch(rewards, group))
    assert advantage_NT.shape == (len(rewards), 3)
    assert bool((advantage_NT[:, 0] == advantage_NT[:, 1]).all())
    return advantage_NT[:, 0]


def test_every_part_has_its_docstring_and_its_numbers():
    assert set(VALUES) == {*ADVANTAGES, *REWARDS}
    for part in ADVANTAGES.values():
        assert "Formula: " in inspect.getdoc(part) and "Source: " in inspect.getdoc(part)
    assert all(inspect.getdoc(part) for part in REWARDS.values())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_gives_the_numbers_worked_by_hand_in_any_order_and_nothing_to_equal_rewards(name):
    rewards, group, order = [0.0, 1.0, 1.0, 3.0, 5.0, 5.0], [0, 0, 0, 0, 1, 1], [4, 2, 0, 5, 1, 3]
    found = of(name, rewards, group)
    assert found[:4].tolist() == pytest.approx(VALUES[name]) and found[4:].tolist() == [0.0, 0.0]
    mixed = of(name, [rewards[i] for i in order], [group[i] for i in order])
    assert mixed.tolist() == found[order].tolist()
    assert bool(of(name, [1e300, -1e300, 0.0], [0, 0, 0]).isfinite().all())
    assert of(name, [7.0], [0]).tolist() == [0.0], "a completion alone has nothing beside it"


def test_group_rank_does_not_change_where_rewards_are_stretched():
    stretched = [-9.0, 1.0, 1.0, 1e6]
    assert of("group_rank", stretched, [0] * 4).tolist() == pytest.approx(VALUES["group_rank"])
    plain = group_mean()(batch([0.0, 1.0, 1.0, 3.0], [0] * 4))
    assert not torch.allclose(plain, group_mean()(batch(stretched, [0] * 4))), "negative control"


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_is_named_on_the_command_line(name):
    method = resolve({"preset": "grpo", "psi": f"{CONTRIB / 'advantages.py'}:{name}"})
    assert replace(method, kl=None).prepare(batch([0.0, 1.0, 1.0, 3.0], [0] * 4), method.initial_state()).advantage[3, 0] > 0


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_gives_the_numbers_worked_by_hand_and_reads_any_text(name):
    texts = list(VALUES[name])
    assert REWARDS[name](texts, prompts=texts) == pytest.approx(list(VALUES[name].values()))
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    assert REWARDS[name](turns, prompts=texts) == REWARDS[name](texts, prompts=texts)
    hostile = ["\0", "\ud800", " " * 1000, "́" * 99, "a\u2028b c d", "\n\n\n"]
    assert all(value is None or isinstance(value, float) for value in REWARDS[name](hostile, prompts=hostile))
    start = time.process_time()
    REWARDS[name](["word " * 20_000], prompts=[""])
    assert time.process_time() - start < 1
