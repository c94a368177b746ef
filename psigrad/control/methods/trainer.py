"""The base of on-policy methods, TRPO and DQN: their state, their schedules, and saving it."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad import seeds
from psigrad.control.environments.collector import ActionLog, Collector, Normalizer
from psigrad.control.environments.vector import Environments
from psigrad.control.networks.actor_critic import ActorCritic
from psigrad.control.networks.distributions import Array
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.optim import Optimizer, apply_together
from psigrad.optim.optimizer import STATE_FILE, check_gradients, check_weights
from psigrad.optim.rules import decayed
from psigrad.records import checkpoint
from psigrad.records.run_folder import to_line

NUMBERS, EPISODES = "state.json", "episodes.safetensors"
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


@dataclass(frozen=True, eq=False)
class Moment:
    """What changes from iteration to iteration besides weights, moments and transitions, kept so that it can be saved later."""

    moves: int
    """`Trainer.moves` at this moment: it can be saved as long as that is the same."""
    timesteps: int
    numbers: dict[str, Any]
    normalizer: Normalizer
    observation: Array
    log: ActionLog
    logged: int


class Trainer(ABC):
    """A policy that learns on its environments, with all that changes while it learns."""

    prints_by_episode = False
    """Whether Stable-Baselines3 counts episodes, not rollouts, between two lines that it prints."""

    def __init__(self, config: ControlConfig, network: ActorCritic, optimizer: Optimizer, collector: Collector) -> None:
        self.config, self.network, self.optimizer, self.collector = config, network, optimizer, collector
        self.timesteps = self.start = self.iterations = self.lines = self._in_line = 0
        self.state: dict[str, float] = {}
        self.begun = self._moment()

    @abstractmethod
    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """One rollout and its updates; their figures where `metrics`."""

    @property
    @abstractmethod
    def most_steps(self) -> float:
        """The most steps that one iteration can take."""

    @property
    def moves(self) -> int:
        """Counts what no `Moment` holds: the updates of weights, and whatever else cannot be taken back."""
        return self.optimizer.updates

    @property
    def progress(self) -> float:
        """Share of the steps behind `start`, where the schedules began, that is done."""
        return min(1.0, (self.timesteps - self.start) / (self.config.total_timesteps - self.start))

    @property
    def learning_rate(self) -> float:
        """The rate at this moment of its schedule."""
        return decayed(self.config.learning_rate, self.config.lr_scheduler_type, self.progress)

    def apply_gradient(self, gradient: Tensor, rate: float) -> float:
        """Step down the gradient at `rate`. The gradient may be clipped in place. Returns its norm before clipping.

        Raises `NonFiniteError` after three in a row that are not finite; such a gradient is skipped.
        """
        self.network.flat.grad = gradient
        (norm,) = apply_together([(self.optimizer, rate)])
        check_gradients(self.optimizer.nonfinite, self.timesteps)
        return norm

    def rng(self, purpose: str) -> np.random.Generator:
        """The random numbers of this iteration for one purpose."""
        return generator(seeds.derive(self.config.run.seed, purpose, self.iterations))

    def restart(self) -> None:
        """New episodes everywhere."""
        self.collector.restart(seeds.derive(self.config.run.seed, "environments", self.iterations))
        self.begun = self._moment()

    def _moment(self) -> Moment:
        collector = self.collector
        numbers = {
            "line": self.lines,
            "in_line": self._in_line,
            "timesteps": self.timesteps,
            "iterations": self.iterations,
            "state": self.state,
            "nonfinite": self.optimizer.nonfinite,
            "figures": collector.statistics.numbers(),
            "begun": collector.statistics.begun(),
            **self.counters(),
        }
        normalizer, log = collector.normalizer.copy(), collector.log
        return Moment(self.moves, self.timesteps, numbers, normalizer, collector.observation, log, len(log))

    def counters(self) -> dict[str, int]:
        """Further numbers that a checkpoint holds, which are attributes of the trainer."""
        return {}

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
        while True:
            # what may be the last rollout of the run is measured too
            last = self.timesteps + self.most_steps >= self.config.total_timesteps
            figures = self.iterate(last or self._in_line == self.config.log_interval - 1)
            self._in_line += 1
            ended = self._in_line == self.config.log_interval or self.timesteps >= self.config.total_timesteps
            if ended:
                self.lines, self._in_line = self.lines + 1, 0
            if self.collector.resumable:
                self.begun = self._moment()
            if ended:
                break
        named = {_NAMES.get(name, name): value for name, value in figures.items() if name in _NAMES or "/" in name}
        return {**self.collector.statistics.summary(), **named}

    def save(self, folder: Path, **more: Any) -> None:
        """Weights, optimiser and numbers as they were when the last iteration began, as files of a folder; `more` numbers beside
        them.

        Raises `NonFiniteError` for weights that are not finite.
        """
        check_weights({"flat": self.network.flat}, self.timesteps)
        begun = self.begun
        self.network.save(folder)
        checkpoint.save_tensors(folder / STATE_FILE, self.optimizer.state_dict())
        running = begun.normalizer.running.tolist()
        numbers = {**begun.numbers, "normalizer": begun.normalizer.state(), "seed": begun.log.seed, "running": running, **more}
        (folder / NUMBERS).write_bytes(to_line(numbers))
        actions, observation = begun.log.actions(begun.logged), begun.observation.copy()
        stood = {"actions": torch.from_numpy(actions), "observation": torch.from_numpy(observation)}
        checkpoint.save_tensors(folder / EPISODES, stood)

    def restore(self, folder: Path) -> dict[str, Any]:
        """The inverse of `save`, with the same settings, but for the environments (see `go_on`); the numbers that were saved."""
        numbers: dict[str, Any] = json.loads((folder / NUMBERS).read_text())
        self.network.load(folder)
        self.optimizer.load_state_dict(checkpoint.load_tensors(folder / STATE_FILE))
        self.optimizer.nonfinite = numbers["nonfinite"]
        self.lines, self.timesteps, self.iterations = numbers["line"], numbers["timesteps"], numbers["iterations"]
        self._in_line = numbers.get("in_line", 0)  # older checkpoints end with their line
        self.state = dict(numbers["state"])
        self.collector.normalizer.restore(numbers["normalizer"])
        self.collector.statistics.restore(numbers["figures"])
        for name in self.counters():
            setattr(self, name, numbers[name])
        return numbers

    def go_on(self, folder: Path, numbers: Mapping[str, Any]) -> int | None:
        """Bring the environments back to where they stood when `folder` was saved, by their actions since their last restart.

        Returns the number of steps. Where they do not lead there (the environments follow no seed, or an older version saved no
        actions) new episodes begin, and it returns None.
        """
        stood = checkpoint.load_tensors(folder / EPISODES) if (folder / EPISODES).exists() else None
        if stood is None or not self._replay(numbers["seed"], stood["actions"].numpy(), stood["observation"].numpy()):
            self.restart()
            return None
        self.collector.statistics.go_on(numbers["begun"])
        self.collector.normalizer.running = np.array(numbers["running"])
        self.begun = self._moment()
        return len(stood["actions"]) * self.collector.envs.count

    def _replay(self, seed: int, actions: Array, observation: Array) -> bool:
        """Whether these actions lead back to this observation."""
        try:
            self.collector.replay(seed, actions)
        except UserError:  # other states than those of its seed may not allow an action that was allowed
            return False
        return np.array_equal(self.collector.observation, observation)


class Actor(Trainer):
    """A policy whose method is not known: it acts, and to train it is refused in a sentence."""

    most_steps = math.inf

    def __init__(self, reason: str, *given: Any) -> None:
        super().__init__(*given)
        self.reason = reason

    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """Raises `UserError`."""
        raise UserError(
            f"This policy can act, and its method is not in its folder: {self.reason.rstrip('.')}. To train it on, give the "
            "method to load: algorithm=…"
        )


def generator(seed: int) -> np.random.Generator:
    """The random numbers of a seed."""
    return np.random.Generator(np.random.SFC64(seed))
