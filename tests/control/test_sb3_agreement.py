"""The gradient of PPO and A2C is that of Stable-Baselines3's own `train`, on the same weights and the same rollout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("bench_control", Path(__file__).parents[2] / "benchmarks" / "control.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


@pytest.mark.parametrize("algorithm", ["ppo", "a2c"])
def test_gradients_agree(algorithm):
    assert bench.agree(algorithm) < 1e-6


@pytest.mark.parametrize("setting", ["gae_lambda", "gamma"])
def test_negative_control_another_discount_is_noticed(setting, monkeypatch):
    settings, mine = bench.ZOO["ppo"], bench.ours
    monkeypatch.setattr(bench, "ours", lambda name, given, seed: mine(name, {**given, setting: settings[setting] - 0.05}, seed))
    assert bench.agree("ppo") > 1e-4
