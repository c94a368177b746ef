"""What on-policy methods, TRPO and DQN share: the optimiser, their state, their schedules, and how it is saved."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from psigrad import seeds
from psigrad.control.environments.collector import ActionLog, Collector, Normalizer
from psigrad.control.environments.vector import Environments
from psigrad.control.networks.actor_critic import ActorCritic
from psigrad.control.networks.distributions import Array
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.kernels.kernels import kernels
from psigrad.kernels.products import TowerKernels
from psigrad.records import checkpoint
from psigrad.records.run_folder import to_line
from psigrad.runs.callbacks import MAX_NONFINITE, NonFiniteError

_BETA1, _BETA2, _SMOOTHING = 0.9, 0.999, 0.99
OPTIMIZER, NUMBERS, EPISODES = "optimizer.safetensors", "state.json", "episodes.safetensors"
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


class FlatOptimizer:
    """Adam or RMSprop on one flat vector, with the gradient's norm clipped; a step whose gradient is not finite is left out.

    They are `torch.optim`'s, written out: on one small vector those spend ten times as long on bookkeeping as on numbers.
    `tests/control/test_steps.py` holds them against the originals.

    Formula: m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²,  θ ← θ − η·(m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
             RMSprop: v ← α·v + (1 − α)·g²,  θ ← θ − η·g / (√v + ε)

    Source: Kingma and Ba 2015, arXiv:1412.6980; Tieleman and Hinton 2012, as in A3C (Mnih et al. 2016), α = 0.99.
    """

    def __init__(self, flat: nn.Parameter, kind: Literal["adam", "rmsprop"], epsilon: float, max_grad_norm: float) -> None:
        self.flat, self.kind, self.epsilon, self.max_grad_norm = flat, kind, epsilon, max_grad_norm
        self.mean, self.square = torch.zeros_like(flat, requires_grad=False), torch.zeros_like(flat, requires_grad=False)
        self._scratch, self._tiny = torch.empty_like(self.mean), self.mean.new_tensor(1e-30)
        self.steps = self.nonfinite = 0

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float) -> float:
        """Step down the gradient (which may be clipped in place) at `rate`; its norm before clipping.

        Raises `NonFiniteError` after three in a row that are not finite.
        """
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            self.nonfinite += 1
            if self.nonfinite >= MAX_NONFINITE:
                raise NonFiniteError(
                    f"The gradient was not finite for {self.nonfinite} updates in a row; none of them was applied. Lower "
                    "learning_rate, or look at the environment's rewards and observations."
                )
            return float(norm)
        self.nonfinite = 0
        clip = self.max_grad_norm / norm if 0 < self.max_grad_norm < norm else 1.0
        self.steps += 1
        # a weight behind a dead unit gets no gradient, its moments decay below 1e-38, and there arithmetic takes a hundred
        # times as long
        torch.set_flush_denormal(True)
        try:
            self._apply(gradient, rate, clip)
        finally:
            torch.set_flush_denormal(False)
        return float(norm)

    def _apply(self, gradient: Tensor, rate: float, clip: float) -> None:
        if self.kind == "adam" and (native := self._native(gradient)) is not None:
            size, correction = rate / (1 - _BETA1**self.steps), 1 / (1 - _BETA2**self.steps)
            moments, betas = (self.mean, self.square), (_BETA1, _BETA2)
            native.adam(self.flat, gradient, moments, betas, size, correction, self.epsilon, clip)
            return
        if clip < 1:
            gradient.mul_(clip)
        if self.kind == "adam":
            self.mean.lerp_(gradient, 1 - _BETA1)
            self.square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
            spread = self._root(1 / (1 - _BETA2**self.steps)).add_(self.epsilon)
            self.flat.addcdiv_(self.mean, spread, value=-rate / (1 - _BETA1**self.steps))
        else:
            self.square.mul_(_SMOOTHING).addcmul_(gradient, gradient, value=1 - _SMOOTHING)
            spread = self._root(1.0).add_(self.epsilon)
            self.flat.addcdiv_(gradient, spread, value=-rate)

    def _native(self, gradient: Tensor) -> TowerKernels | None:
        """One pass over memory in place of seven."""
        found = kernels() if gradient.device.type == "cpu" and gradient.dtype == self.flat.dtype == torch.float32 else "PyTorch's"
        return None if isinstance(found, str) else found.towers

    def _root(self, scale: float) -> Tensor:
        """√(scale·v); of the zeros behind dead units MKL's square root takes twenty times as long as of other numbers."""
        return torch.add(self._tiny, self.square, alpha=scale, out=self._scratch).sqrt_()

    def tensors(self) -> dict[str, Tensor]:
        """What must survive a stop besides the weights."""
        return {"mean": self.mean, "square": self.square, "steps": torch.tensor(self.steps)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.mean.copy_(tensors["mean"])
        self.square.copy_(tensors["square"])
        self.steps = int(tensors["steps"])


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

    def __init__(self, config: ControlConfig, network: ActorCritic, optimizer: FlatOptimizer, collector: Collector) -> None:
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
        return self.optimizer.steps

    @property
    def progress(self) -> float:
        """Share of the steps behind `start`, where the schedules began, that is done."""
        return min(1.0, (self.timesteps - self.start) / (self.config.total_timesteps - self.start))

    @property
    def learning_rate(self) -> float:
        """The rate at this moment of its schedule."""
        return self.config.learning_rate * (1 - self.progress if self.config.lr_scheduler_type == "linear" else 1.0)

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
        if not bool(torch.isfinite(self.network.flat).all()):
            raise NonFiniteError(
                f"The weights are not finite after {self.timesteps} steps, so no checkpoint was made of them; the last one is "
                "sound. Lower learning_rate."
            )
        begun = self.begun
        self.network.save(folder)
        checkpoint.save_tensors(folder / OPTIMIZER, self.optimizer.tensors())
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
        self.optimizer.load(checkpoint.load_tensors(folder / OPTIMIZER))
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
