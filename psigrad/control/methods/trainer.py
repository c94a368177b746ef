"""The base class of the trainers of on-policy methods, TRPO and DQN: state, schedules, and saving."""

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
# Metric of a policy gradient -> its name in control, after Stable-Baselines3.
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
    """A snapshot of a trainer's state at the start of an iteration, for a checkpoint.

    It lacks weights, the optimiser's moments and transitions, which `save` reads from the trainer.
    """

    moves: int
    """`Trainer.moves` at this moment. The snapshot can be saved only as long as this number has not changed."""
    timesteps: int
    numbers: dict[str, Any]
    normalizer: Normalizer
    observation: Array
    log: ActionLog
    logged: int


class Trainer(ABC):
    """A trainer: it has a policy, its environments and the optimiser, and all state that changes during training."""

    prints_by_episode = False
    """True if Stable-Baselines3 counts episodes instead of rollouts between two printed lines."""

    def __init__(self, config: ControlConfig, network: ActorCritic, optimizer: Optimizer, collector: Collector) -> None:
        self.config, self.network, self.optimizer, self.collector = config, network, optimizer, collector
        self.timesteps = self.start = self.iterations = self.lines = self._in_line = 0
        self.state: dict[str, float] = {}
        self.begun = self._moment()

    @abstractmethod
    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """Collect a rollout and train on it. Return metrics if `metrics` is True."""

    @property
    @abstractmethod
    def most_steps(self) -> float:
        """The maximum number of steps in an iteration."""

    @property
    def moves(self) -> int:
        """The number of changes to state that no `Moment` stores, such as updates of weights."""
        return self.optimizer.updates

    @property
    def progress(self) -> float:
        """The share of the run that is done, from 0 to 1, counted from the step `start` at which schedules begin."""
        return min(1.0, (self.timesteps - self.start) / (self.config.total_timesteps - self.start))

    @property
    def learning_rate(self) -> float:
        """The current learning rate, by its schedule."""
        return decayed(self.config.learning_rate, self.config.lr_scheduler_type, self.progress)

    def apply_gradient(self, gradient: Tensor, rate: float) -> float:
        """Take an optimiser step at `rate` and return the norm of the gradient before clipping.

        The gradient may be clipped in place. A gradient that is not finite is skipped. Raises `NonFiniteError` after three such
        gradients in a row.
        """
        self.network.flat.grad = gradient
        (norm,) = apply_together([(self.optimizer, rate)])
        check_gradients(self.optimizer.nonfinite, self.timesteps)
        return norm

    def rng(self, purpose: str) -> np.random.Generator:
        """Return the random generator for a purpose, such as "act", in this iteration.

        It depends only on the seed, the purpose and the iteration.
        """
        return generator(seeds.derive(self.config.run.seed, purpose, self.iterations))

    def restart(self) -> None:
        """Start new episodes in all environments."""
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
        """Return further attributes of the trainer for a checkpoint, by name. The default has none."""
        return {}

    def set_environments(self, envs: Environments, named: Any) -> None:
        """Replace the environments by others. `named` is their name in the settings. The normaliser's statistics stay."""
        old = self.collector.normalizer
        self.config = replace(self.config, env=named, n_envs=envs.count)
        normalizer = Normalizer(envs.size, envs.count, self.config.gamma, old.observations, old.rewards)
        normalizer.restore(old.state())
        self.collector = Collector(envs, normalizer)

    def train_interval(self) -> dict[str, float]:
        """Run `log_interval` iterations, or fewer at the end of the run. Return the metrics of one line of the log.

        They are those of the last iteration and of the most recent episodes.
        """
        figures: dict[str, float] = {}
        while True:
            # Metrics are also computed for a rollout that may be the last of the run.
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
        """Save the weights, the optimiser and the last snapshot of the state as files of a folder, with `more` numbers.

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
        """Restore the state that `save` wrote under the same settings, and return the saved numbers.

        The environments are not restored; `go_on` does that.
        """
        numbers: dict[str, Any] = json.loads((folder / NUMBERS).read_text())
        self.network.load(folder)
        self.optimizer.load_state_dict(checkpoint.load_tensors(folder / STATE_FILE))
        self.optimizer.nonfinite = numbers["nonfinite"]
        self.lines, self.timesteps, self.iterations = numbers["line"], numbers["timesteps"], numbers["iterations"]
        self._in_line = numbers["in_line"]
        self.state = dict(numbers["state"])
        self.collector.normalizer.restore(numbers["normalizer"])
        self.collector.statistics.restore(numbers["figures"])
        for name in self.counters():
            setattr(self, name, numbers[name])
        return numbers

    def go_on(self, folder: Path, numbers: Mapping[str, Any]) -> int | None:
        """Restore the environments' state of the checkpoint `folder`, by replaying the actions since their last restart.

        Return the number of replayed steps. If the replay does not lead to the saved observation, because the environments do not
        depend on their seed alone, start new episodes and return None.
        """
        stood = checkpoint.load_tensors(folder / EPISODES)
        if not self._replay(numbers["seed"], stood["actions"].numpy(), stood["observation"].numpy()):
            self.restart()
            return None
        self.collector.statistics.go_on(numbers["begun"])
        self.collector.normalizer.running = np.array(numbers["running"])
        self.begun = self._moment()
        return len(stood["actions"]) * self.collector.envs.count

    def _replay(self, seed: int, actions: Array, observation: Array) -> bool:
        """Replay the actions from the seed. Return True if they lead to this observation."""
        try:
            self.collector.replay(seed, actions)
        except UserError:  # an environment that does not depend on its seed alone may reject an action in its new state
            return False
        return np.array_equal(self.collector.observation, observation)


class Actor(Trainer):
    """A trainer of a policy whose method is unknown. The policy can act, but training raises an error."""

    most_steps = math.inf

    def __init__(self, reason: str, *given: Any) -> None:
        super().__init__(*given)
        self.reason = reason

    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """Raise `UserError`, since the method is unknown."""
        raise UserError(
            f"This policy can act but not train, since its folder does not contain its method: {self.reason.rstrip('.')}. Load "
            "it again with algorithm=…."
        )


def generator(seed: int) -> np.random.Generator:
    """Return numpy's random generator for a seed."""
    return np.random.Generator(np.random.SFC64(seed))
