"""The gradient of PPO and A2C is that of Stable-Baselines3's own `train`, on the same weights and the same rollout, and so
are the weights that PPO leaves behind."""

from __future__ import annotations

import pytest
import scripts

bench = scripts.load("benchmarks/control.py")


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_gradients_agree(algorithm):
    assert bench.agree(algorithm) < 1e-6


@pytest.mark.parametrize("setting", ["gae_lambda", "gamma"])
def test_negative_control_another_discount_is_noticed(setting, monkeypatch):
    settings, mine = bench.ZOO["ppo"], bench.ours
    monkeypatch.setattr(bench, "ours", lambda name, given, seed: mine(name, {**given, setting: settings[setting] - 0.05}, seed))
    assert bench.agree("ppo") > 1e-4


# PPO's minibatches of whole epochs: ten passes over 64 steps of each copy.
TRAINED = {
    "n_steps": 64, "batch_size": 128, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2,
    "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), [(True, "minibatch"), (False, False)])
def test_the_weights_after_ten_passes_in_the_same_minibatches_agree(theirs, ours):
    given = {**TRAINED, "normalize_advantage": theirs}
    assert bench.agree_on_weights(given, adam_epsilon=1e-5, normalize_advantage=ours) < 1e-4


@pytest.mark.parametrize(
    "other", [{"adam_epsilon": 1e-3}, {"max_grad_norm": 0.4}, {"clip_range": 0.15}, {"normalize_advantage": True}]
)
def test_negative_control_another_setting_is_noticed_in_the_weights(other):
    """True whitens over the rollout here, over each minibatch there."""
    given = {**TRAINED, "normalize_advantage": True}
    assert bench.agree_on_weights(given, **{"adam_epsilon": 1e-5, "normalize_advantage": "minibatch", **other}) > 1e-2
