"""The numbers of every preset, as their papers and the libraries of their authors have them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from psigrad.objective.catalog import METHODS
from psigrad.objective.preferences.online_preference import METHODS as ONLINE
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES

GROUP = 1e-4  # what GRPO and its relatives add to a standard deviation
WHITE = 1e-8  # and whitening
PPO = (0.2, 0.2)
HIGHER = (0.2, 0.28)
# In the order psi, surrogate, aggregate, KL, filters, critic; settings of the run behind them.
NUMBERS = {
    "grpo": (GROUP, *PPO, 0.04),
    "dr_grpo": (GROUP, *PPO, 1024),
    "dapo": (GROUP, *HIGHER),
    "gspo": (GROUP, 3e-4, 4e-4),
    "cispo": (GROUP, 5.0),
    "rloo": (*PPO, 0.05),
    "reinforce": (0.05,),
    "reinforce_moving_average": (0.9, 0.05),
    "reinforce_total_return": (1.0,),
    "reinforce_reward_to_go": (1.0,),
    "reinforce_pp": (1.0, WHITE, *PPO, 0.01),
    "ppo": (1.0, 1.0, WHITE, *PPO, 0.05, 0.1, 0.2, {"num_iterations": 4, "num_generations": 1}),
    "ppo_penalty": (1.0, 1.0, WHITE, 1.0, 0.01, 0.05, 0.1, 0.2, {"num_iterations": 4, "num_generations": 1}),
    "vc_ppo": (1.0, 0.95, WHITE, *PPO, 0.1, 0.2, 1.0, 1.0, {"num_iterations": 4, "num_generations": 1}),
    "vapo": (0.05, 1.0, WHITE, *HIGHER, 0.1, 1.0, 0.1, 0.2, 1.0, 1.0, {"num_iterations": 4}),
    "reinforce_pp_baseline": (GROUP, WHITE, *PPO, 0.01),
    "opo": (),
    "maxrl": HIGHER,
    "pass_at_k": (4, 0.5, *HIGHER),
    "sapo": (GROUP, 1.0, 1.05),
    "dppo": (GROUP, 0.15, 20.0),
    "gmpo": (GROUP, 0.4, 0.4),
    "gdpo": (GROUP, *PPO, 0.04),
    "process_grpo": (GROUP, *PPO, 0.04),
    "top_entropy": (GROUP, *HIGHER, 0.2),
    "clip_cov": (GROUP, *PPO, 2e-4, 1.0, 5.0),
    "kl_cov": (GROUP, 2e-3, 1.0, {"num_minibatches": 4}),
    "distill": (1.0, {"num_generations": 1}),
    "raft": (1,),
}
# What a KL term is made of besides its coefficient.
KLS = {
    **dict.fromkeys(("grpo", "gdpo", "process_grpo"), ("loss", "k3")),
    **dict.fromkeys(("rloo", "reinforce", "reinforce_moving_average", "reinforce_pp", "ppo", "ppo_penalty"), ("reward", "k1")),
    "reinforce_pp_baseline": ("loss", "k2"),
    "distill": ("loss", "exact"),
}
# beta, margin, weight of the likelihood, weight of the preference; a share of swapped labels before them.
PAIRS = {
    "dpo": (0.0, 0.1, 0.0, 0.0, 1.0),
    "cdpo": (0.1, 0.1, 0.0, 0.0, 1.0),
    "robust_dpo": (0.1, 0.1, 0.0, 0.0, 1.0),
    "ipo": (0.1, 0.0, 0.0, 1.0),
    "hinge": (0.1, 0.0, 0.0, 1.0),
    "ln_dpo": (0.0, 2.0, 0.0, 0.0, 1.0),
    "simpo": (0.0, 2.0, 1.0, 0.0, 1.0),
    "orpo": (0.0, 1.0, 0.0, 1.0, 0.1),
    "apo_zero": (0.1, 0.0, 0.0, 1.0),
    "apo_down": (0.1, 0.0, 0.0, 1.0),
    "kto": (0.1, 1.0, 1.0),
}


def numbers(part) -> list[float]:
    """Those of a part and of the parts within it, in the order of their fields."""
    found = []
    for field in fields(part) if is_dataclass(part) else ():
        value = getattr(part, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(each, int | float) and not isinstance(each, bool) and field.name != "mixture"
            found += [each] if is_number else numbers(each) if is_dataclass(each) and not isinstance(each, type) else []
    return found


def test_every_preset_is_here():
    assert NUMBERS.keys() == METHODS.keys() and PAIRS.keys() == LOSSES.keys() and ONLINE.keys() == {"online_dpo"}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_method_has_these_numbers(name):
    method = METHODS[name]
    assert numbers(method.algorithm) + ([dict(method.defaults)] if method.defaults else []) == list(NUMBERS[name])
    kl = method.algorithm.kl
    assert (None if kl is None else (kl.where, kl.estimator, kl.importance_weighted, kl.mixture)) == (
        (*KLS[name], False, 0.5) if name in KLS else None
    )


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_of_pairs_has_these_numbers(name):
    assert numbers(LOSSES[name].algorithm) == list(PAIRS[name]) and not LOSSES[name].defaults


def test_online_dpo_is_dpo_on_groups_of_two_or_more():
    online = ONLINE["online_dpo"].algorithm
    assert (online.loss, online.min_group_size) == (LOSSES["dpo"].algorithm, 2)
