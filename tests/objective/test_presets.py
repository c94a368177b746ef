"""The numbers of every preset, as their papers and the libraries of their authors have them."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass

import pytest
from cases import repeat_for

from psigrad.objective.catalog import METHODS
from psigrad.objective.parts.advantage import k_step, length_gae, moving_average
from psigrad.objective.parts.aggregate import clip_covariance, fixed_length, top_entropy, top_k
from psigrad.objective.parts.group_advantage import pass_at_k
from psigrad.objective.parts.off_policy import gamma_weight, off_policy_mask, symmetric_mask
from psigrad.objective.parts.ratio import KL, adaptive, divergence_rejection, masked_importance, truncated_importance
from psigrad.objective.parts.surrogate import (
    clip,
    covariance_penalty,
    divergence_mask,
    dual_clip,
    geometric_clip,
    kl_penalty,
    soft_clip,
    truncated_weight,
    with_imitation,
)
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES
from psigrad.objective.preferences.preference_catalog import ONLINE_METHODS as ONLINE
from psigrad.objective.preferences.preference_loss import KahnemanTversky, logistic, robust
from psigrad.objective.preferences.reward_model import BradleyTerry

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
    "prime_ipo": (GROUP, 0.3),
    "vespo": (GROUP, 2.0, 3.0, 3.0, 2.0),
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
    assert NUMBERS.keys() == METHODS.keys(), "write a method's numbers into NUMBERS, and its KL term into KLS"
    assert PAIRS.keys() == LOSSES.keys(), "write a loss's numbers into PAIRS"
    assert ONLINE.keys() == {"online_dpo"}


@repeat_for("name", NUMBERS)
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


# Of each setting the numbers that are refused, then those nearest to them that are taken.
BORDERS = [
    (adaptive, "initial", (0.0, -0.1), (1e-9,)),
    (adaptive, "target", (0.0, -1.0), (1e-9,)),
    (adaptive, "horizon", (0, -1), (1,)),
    (clip, "low", (-0.1, 1.1), (0.0, 1.0)),
    (clip, "high", (-0.1,), (0.0, 9.0)),
    (dual_clip, "bound", (-1.0, 1.0, 1.2), (1.3,)),
    (truncated_weight, "cap", (0.0, -1.0), (1e-9,)),
    (soft_clip, "positive", (0.0, -1.0), (1e-9,)),
    (soft_clip, "negative", (0.0, -1.0), (1e-9,)),
    (divergence_mask, "delta", (0.0, -0.1, 1.1), (1e-9, 1.0)),
    (divergence_mask, "cap", (0.0, -1.0), (1e-9,)),
    (symmetric_mask, "delta", (0.0, -0.1, 1.1), (1e-9, 1.0)),
    *((gamma_weight, f"k_{sign}", (-0.1,), (0.0,)) for sign in ("positive", "negative")),
    *((gamma_weight, f"lambda_{sign}", (0.0, -1.0), (1e-9,)) for sign in ("positive", "negative")),
    (geometric_clip, "low", (-0.1,), (0.0,)),
    (geometric_clip, "high", (-0.1,), (0.0,)),
    (off_policy_mask, "delta", (0.0, -0.5), (1e-9,)),
    (covariance_penalty, "share", (0.0, -0.1, 1.0, 1.5), (1e-9, 0.999)),
    (covariance_penalty, "coefficient", (0.0, -1.0), (1e-9,)),
    (with_imitation, "coefficient", (0.0, -1.0), (1e-9,)),
    (kl_penalty, "coefficient", (-0.1,), (0.0,)),
    (kl_penalty, "target", (0.0, -1.0), (1e-9, None)),
    (truncated_importance, "floor", (-0.1, 3.0, 4.0), (0.0, 2.9)),
    (masked_importance, "floor", (-0.1, 3.0, 4.0), (0.0, 2.9)),
    (divergence_rejection, "limit", (0.0, -1.0), (1e-9,)),
    (pass_at_k, "k", (0, -1), (1,)),
    (k_step, "k", (0, -1), (1,)),
    (top_k, "k", (0, -1), (1,)),
    (top_entropy, "share", (0.0, -0.1, 1.1), (1e-9, 1.0)),
    (clip_covariance, "share", (0.0, -0.1, 1.0, 1.5), (1e-9, 0.999)),
    (clip_covariance, "low", (5.0, 6.0), (4.9,)),
    (fixed_length, "n", (0, -1), (1,)),
    (moving_average, "decay", (-0.1, 1.0, 1.5), (0.0, 0.999)),
    (length_gae, "alpha", (0.0, -1.0), (1e-9,)),
    (KL, "coefficient", (-0.1,), (0.0,)),
    (KL, "mixture", (0.0, -0.1, 1.0, 1.5), (1e-9, 0.999)),
    (logistic, "label_smoothing", (-0.1, 0.5, 0.6), (0.0, 0.499)),
    (robust, "label_smoothing", (-0.1, 0.5, 0.6), (0.0, 0.499)),
    (BradleyTerry, "label_smoothing", (-0.1, 0.5, 0.6), (0.0, 0.499)),
    (BradleyTerry, "center_rewards_coefficient", (-0.1, math.nan), (0.0,)),
    (KahnemanTversky, "beta", (0.0, -1.0, math.inf, math.nan), (1e-9,)),
    (KahnemanTversky, "desirable_weight", (-0.1, math.nan), (0.0,)),
    (KahnemanTversky, "undesirable_weight", (-0.1, math.nan), (0.0,)),
]


@repeat_for(("part", "name", "refused", "taken"), BORDERS)
def test_a_setting_ends_where_it_says(part, name, refused, taken):
    for value in refused:
        with pytest.raises(ValueError, match="expected"):
            part(**{name: value})
    for value in taken:
        part(**{name: value})


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (k_step, {"k": 0}),
        (adaptive, {"initial": 0.0}),
        (adaptive, {"target": 0.0}),
        (adaptive, {"target": -0.5}),
        (adaptive, {"horizon": 0}),
        (KahnemanTversky, {"beta": 0.0}),
        (KahnemanTversky, {"desirable_weight": -1.0}),
        (KahnemanTversky, {"undesirable_weight": -1.0}),
        (clip, {"low": -0.5}),
        (clip, {"low": 1.5}),
        (soft_clip, {"negative": 0.0}),
        (soft_clip, {"positive": 0.0}),
        (divergence_mask, {"delta": 0.0}),
        (divergence_mask, {"delta": -0.1}),
        (divergence_mask, {"delta": 1.1}),
        (divergence_mask, {"cap": 0.0}),
        (divergence_mask, {"cap": -0.5}),
    ],
)
def test_settings_beyond_the_border_are_refused(part, given):
    with pytest.raises(ValueError, match=r"expected|above 0"):
        part(**given)


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (k_step, {"k": 1}),
        (adaptive, {"horizon": 1}),
        (clip, {"low": 0.0}),
        (clip, {"low": 1.0}),
        (divergence_mask, {"delta": 1.0}),
    ],
)
def test_settings_at_the_border_are_taken(part, given):
    part(**given)


def test_defaults_are_those_of_their_sources():
    assert dual_clip().bound == 3.0
    for name in ("ppo", "ppo_penalty"):
        assert METHODS[name].defaults["num_generations"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: truncated_importance(1.0, floor=1.0),
        lambda: masked_importance(level="word"),
        lambda: divergence_rejection(0),
        lambda: soft_clip(0),
        lambda: divergence_mask(0),
        lambda: geometric_clip(-1),
        lambda: off_policy_mask(delta=0),
        lambda: pass_at_k(0),
        lambda: length_gae(0),
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        wrong()
