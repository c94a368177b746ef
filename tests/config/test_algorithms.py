"""Algorithms from settings: names, mappings, parts of one's own, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from psigrad.config.algorithms import explain, resolve
from psigrad.objective import Batch, PolicyGradient
from psigrad.objective import catalog as presets
from psigrad.objective.catalog import METHODS as PRESETS
from psigrad.objective.parts.advantage import gae, group_mean, reward_to_go, whitened
from psigrad.objective.parts.aggregate import has_signal, token_mean, top_k
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.ratio import KL, adaptive, token, truncated_importance
from psigrad.objective.parts.surrogate import clip, dual_clip


def mine(batch: Batch) -> torch.Tensor:
    """My own advantage.

    Formula: A_t = 42
    """
    return torch.full_like(batch.reward, 42.0)


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("users_own_module")
    module.mine, module.METHOD = mine, replace(presets.GRPO, psi=mine, name="mine")
    monkeypatch.setitem(sys.modules, "users_own_module", module)
    return "users_own_module"


def test_every_name_resolves_to_its_preset() -> None:
    assert all(resolve(name).name == name for name in PRESETS)
    assert resolve(presets.GRPO) is presets.GRPO and resolve({"preset": "grpo"}) == presets.GRPO


def test_a_mapping_changes_the_slots_it_names_and_no_other() -> None:
    method = resolve(
        json.loads(
            '{"preset": "grpo", "kl": {"estimator": "k2", "coefficient": 0.01}, "surrogate": {"part": "clip", "high": 0.28},'
            ' "aggregate": "token_mean", "keep": ["has_signal", {"part": "top_k", "k": 3}], "name": "mine"}'
        )
    )
    assert method == PolicyGradient(
        group_mean(), token, clip(0.2, 0.28), token_mean, kl=KL("loss", "k2", 0.01), keep=(has_signal, top_k(3)), name="mine"
    )


@pytest.mark.parametrize(
    ("change", "slot", "expected"),
    [
        ({"kl": None}, "kl", None),
        ({"kl": {"where": "reward", "estimator": "k1"}}, "kl", KL("reward", "k1", 0.04)),
        ({"kl": {"coefficient": {"initial": 0.2, "target": 3.0}}}, "kl", KL("loss", "k3", adaptive(0.2, 3.0))),
        ({"surrogate": {"high": 0.3}}, "surrogate", clip(0.2, 0.3)),
        ({"surrogate": "dual_clip"}, "surrogate", dual_clip()),
        ({"psi": {"std": False}}, "psi", group_mean(std=False)),
        ({"psi": {"part": "whitened", "psi": {"part": "reward_to_go", "gamma": 0.9}}}, "psi", whitened(reward_to_go(0.9))),
        ({"entropy": {"coefficient": 0.2}}, "entropy", bonus(0.2)),
        ({"entropy": "bonus"}, "entropy", bonus()),
        ({"correction": {"part": "truncated_importance", "cap": 2}}, "correction", truncated_importance(2)),
        ({"keep": []}, "keep", ()),
    ],
)
def test_slots_from_plain_data(change: dict, slot: str, expected: object) -> None:
    assert getattr(resolve({"preset": "grpo", **change}), slot) == expected


def test_a_whole_method_from_plain_data() -> None:
    method = resolve(
        {
            "psi": {"part": "gae", "lam": 0.95},
            "ratio": "token",
            "surrogate": "clip",
            "aggregate": "token_mean",
            "critic": {"clip": 0.2},
        }
    )
    assert method == PolicyGradient(gae(lam=0.95), token, clip(), token_mean, critic=value_loss(clip=0.2))


def test_a_users_own_function_is_a_part(user_module: str) -> None:
    method = resolve({"preset": "dr_grpo", "psi": f"{user_module}:mine"})
    mask = torch.ones(1, 2, dtype=torch.bool)
    prepared = method.prepare(Batch(mask, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1).long()), {})
    assert prepared.advantage.tolist() == [[42.0, 42.0]]
    assert resolve(f"{user_module}:METHOD").psi is mine
    assert "A_t = 42" in explain(method)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("grop", "did you mean 'grpo'"),
        ({"preset": "grpo", "surogate": "clip"}, "did you mean 'surrogate'"),
        ({"preset": "grpo", "surrogate": "clpi"}, "did you mean 'clip'"),
        ({"preset": "grpo", "surrogate": {"part": "clip", "hihg": 1}}, "did you mean 'high'"),
        ({"preset": "grpo", "kl": {"coefficient": "many"}}, "not supported between"),
        ({"preset": "grpo", "psi": None}, "algorithm.psi is None"),
        ({"preset": "grpo", "aggregate": {"n": 3}}, "mapping with `part`"),
        ({"preset": "grpo", "psi": {"part": "leave_one_out", "k": 3}}, "takes no parameters"),
        ({"preset": "grpo", "psi": "no_such_module:x"}, "cannot be imported"),
        ({"preset": "grpo", "psi": "math:no_such_name"}, "math has no 'no_such_name'"),
        ({"psi": "ones"}, "no ratio, surrogate, aggregate"),
        ({"preset": "grpo", "kl": 0.1}, "or null"),
        (3, "expected a preset's name"),
        ("math:pi", "expected a PolicyGradient"),
    ],
)
def test_a_wrong_specification_is_refused_with_what_to_do(spec: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        resolve(spec)
