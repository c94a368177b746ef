"""What on-policy methods, TRPO and DQN share: their state, their schedules, and how it is saved."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from psigrad import seeds
from psigrad.control.environments.collector import Collector
from psigrad.control.environments.normalizer import Normalizer
from psigrad.control.environments.vector import Environments
from psigrad.control.methods.optimizers import FlatOptimizer
from psigrad.control.networks.actor_critic import ActorCritic
from psigrad.control.settings import ControlConfig
from psigrad.records import checkpoint
from psigrad.records.run_folder import to_line

OPTIMIZER, NUMBERS = "optimizer.safetensors", "state.json"
# What the figures of a policy gradient are called in control, after Stable-Baselines3.
_NAMES = {
    "policy/approxkl_avg": "train/approx_kl",
    "clip_ratio/region_mean": "train/clip_fraction",
    "explained_variance": "train/explained_variance",
    "policy_loss": "train/policy_gradient_loss",
    "value_loss": "train/value_loss",
    "entropy": "train/entropy",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "n_updates": "train/n_updates",
    "loss": "train/loss",
}


class Trainer(ABC):
    """A policy that learns on its environments, with all that changes while it learns."""

    def __init__(self, config: ControlConfig, network: ActorCritic, optimizer: FlatOptimizer, collector: Collector) -> None:
        self.config, self.network, self.optimizer, self.collector = config, network, optimizer, collector
        self.timesteps = self.iterations = self.lines = 0
        self.state: dict[str, float] = {}

    @abstractmethod
    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """One rollout and its updates; their figures where `metrics`."""

    @property
    @abstractmethod
    def most_steps(self) -> float:
        """The most steps that one iteration can take."""

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        return min(1.0, self.timesteps / self.config.total_timesteps)

    @property
    def learning_rate(self) -> float:
        """The rate at this moment of its schedule."""
        return self.config.learning_rate * (1 - self.progress if self.config.lr_scheduler_type == "linear" else 1.0)

    def rng(self, purpose: str) -> np.random.Generator:
        """The random numbers of this iteration for one purpose."""
        return generator(seeds.derive(self.config.run.seed, purpose, self.iterations))

    def restart(self) -> None:
        """New episodes everywhere: at the start, and after every checkpoint, since what an environment holds in memory cannot be
        saved.
        """
        self.collector.restart(seeds.derive(self.config.run.seed, "environments", self.iterations))

    def set_environments(self, envs: Environments, named: Any) -> None:
        """Go on in other environments; what the normaliser has learned of observations and rewards stays."""
        old = self.collector.normalizer
        self.config = replace(self.config, env=named, n_envs=envs.count)
        normalizer = Normalizer(envs.size, envs.count, self.config.gamma, old.observations, old.rewards)
        normalizer.restore(old.state())
        self.collector = Collector(envs, normalizer)

    def train_interval(self) -> dict[str, float]:
        """`log_interval` iterations; the figures of the last one, and of the episodes that ended last."""
        figures: dict[str, float] = {}
        for i in range(self.config.log_interval):
            # what may be the last rollout of the run is measured too
            last = self.timesteps + self.most_steps >= self.config.total_timesteps
            figures = self.iterate(last or i == self.config.log_interval - 1)
            if self.timesteps >= self.config.total_timesteps:
                break
        self.lines += 1
        named = {_NAMES.get(name, name): value for name, value in figures.items() if name in _NAMES or "/" in name}
        return {**self.collector.statistics.summary(), **named}

    def save(self, folder: Path, **more: Any) -> None:
        """Weights, optimiser and numbers, as files of a folder."""
        self.network.save(folder)
        checkpoint.save_tensors(folder / OPTIMIZER, self.optimizer.tensors())
        numbers = {
            "line": self.lines,
            "timesteps": self.timesteps,
            "iterations": self.iterations,
            "state": self.state,
            "nonfinite": self.optimizer.nonfinite,
            "normalizer": self.collector.normalizer.state(),
            "figures": self.collector.statistics.numbers(),
            **more,
        }
        (folder / NUMBERS).write_bytes(to_line(numbers))

    def restore(self, folder: Path) -> dict[str, Any]:
        """The inverse of `save`, with the same settings; the numbers that were saved."""
        numbers: dict[str, Any] = json.loads((folder / NUMBERS).read_text())
        self.network.load(folder)
        self.optimizer.load(checkpoint.load_tensors(folder / OPTIMIZER))
        self.optimizer.nonfinite = numbers["nonfinite"]
        self.lines, self.timesteps, self.iterations = numbers["line"], numbers["timesteps"], numbers["iterations"]
        self.state = dict(numbers["state"])
        self.collector.normalizer.restore(numbers["normalizer"])
        self.collector.statistics.restore(numbers["figures"])
        return numbers


def generator(seed: int) -> np.random.Generator:
    """The random numbers of a seed."""
    return np.random.Generator(np.random.SFC64(seed))
