"""Deep Q-learning: act ε-greedily, and learn from transitions of a replay buffer, with targets from a target network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad.control.environments.collector import Collector, Rollout
from psigrad.control.methods.trainer import Trainer
from psigrad.control.networks.actor_critic import ActorCritic
from psigrad.control.networks.distributions import Array, Categorical
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.objective import q_learning
from psigrad.optim import Optimizer
from psigrad.records import checkpoint

REPLAY = "replay.safetensors"


@dataclass(frozen=True, eq=False)
class Transitions:
    """M transitions from a replay buffer, as tensors."""

    observation: Tensor
    """[M, D]"""
    action: Tensor
    """[M] int64"""
    reward: Tensor
    """[M]"""
    next_observation: Tensor
    """[M, D] the observation after the step. For an episode's last step, it is the final one, not that of the next episode."""
    terminated: Tensor
    """[M] bool: True if the step ended the episode in a terminal state. False if a limit cut it."""


class ReplayBuffer:
    """A buffer of the last `capacity` transitions, sampled uniformly with replacement."""

    def __init__(self, capacity: int, size: int, dtype: np.typing.DTypeLike = np.float32) -> None:
        self.capacity, self.added = capacity, 0
        self._data: dict[str, Array] = {
            "observation": np.empty((capacity, size), dtype),
            "action": np.empty(capacity, np.int64),
            "reward": np.empty(capacity, np.float32),
            "next_observation": np.empty((capacity, size), dtype),
            "terminated": np.empty(capacity, bool),
        }

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, **fields: Array) -> None:
        """Add transitions [m, …], oldest first. They overwrite the oldest ones beyond `capacity`."""
        count = len(fields["action"])
        place = np.arange(self.added, self.added + count) % self.capacity
        for name, data in self._data.items():
            data[place] = fields[name]
        self.added += count

    def sample(self, count: int, rng: np.random.Generator) -> Transitions:
        """Sample `count` transitions. Raises `ValueError` while the buffer is empty."""
        if not len(self):
            raise ValueError("The replay buffer is empty; add transitions before sampling (learning_starts).")
        at = rng.integers(len(self), size=count)
        return Transitions(**{name: torch.from_numpy(data[at]) for name, data in self._data.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the transitions as tensors for a checkpoint."""
        stored = {name: torch.from_numpy(data[: len(self)].copy()) for name, data in self._data.items()}
        return {**stored, "added": torch.tensor(self.added)}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the transitions by those of another buffer's `tensors`, oldest first. If not all fit, keep the last.

        Raises `ValueError` if their observations have another shape.
        """
        for name, data in self._data.items():
            if name not in tensors or tensors[name].shape[1:] != data.shape[1:]:
                found = f"{name} of shape {list(tensors[name].shape[1:])}" if name in tensors else f"no {name}"
                raise ValueError(f"the saved transitions have {found}; expected {name} of shape {list(data.shape[1:])}")
        oldest = int(tensors["added"]) % max(1, len(tensors["action"])) if "added" in tensors else 0
        self.added = 0
        self.add(**{name: np.roll(tensors[name].numpy(), -oldest, 0)[-self.capacity :] for name in self._data})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the buffer from the result of `tensors`."""
        self.added = int(tensors["added"])
        for name, data in self._data.items():
            data[: len(self)] = tensors[name].numpy()


class DQNTrainer(Trainer):
    """The trainer of DQN (Mnih et al. 2015), with a target network that is copied or averaged, and optional Double DQN.

    The Q-network is an `ActorCritic` without critics. Its policy outputs are used as Q(s, ·), so that its most likely action is
    the greedy one.
    """

    prints_by_episode = True

    def __init__(self, config: ControlConfig, network: ActorCritic, optimizer: Optimizer, collector: Collector) -> None:
        self.updates = self.since_target = 0
        self.replay = ReplayBuffer(config.dqn.buffer_size, collector.envs.size, collector.observation.dtype)
        self.target = network.flat.detach().clone()
        collector.raw = True  # the normaliser's statistics change, so transitions are normalised when they are drawn
        super().__init__(config, network, optimizer, collector)
        _check(config, network)

    @property
    def moves(self) -> int:
        """The number of updates and added transitions: both overwrite state that no `Moment` stores."""
        return super().moves + self.replay.added

    def counters(self) -> dict[str, int]:
        """Return the number of updates, and of transitions since the target network's last update, for a checkpoint."""
        return {"updates": self.updates, "since_target": self.since_target}

    @property
    def epsilon(self) -> float:
        """The current ε, the probability of a random action."""
        d = self.config.dqn
        return q_learning.linear_epsilon(
            self.progress, d.exploration_fraction, d.exploration_initial_eps, d.exploration_final_eps
        )

    @property
    def most_steps(self) -> float:
        """The maximum number of transitions that an iteration collects."""
        return max(self.config.dqn.train_freq, self.collector.envs.count)

    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """Collect `train_freq` transitions, then train on minibatches of the buffer. Return metrics if `metrics` is True."""
        settings, count = self.config.dqn, self.collector.envs.count
        rng = self.rng("act")
        # Epsilon hardly falls within a collection, so one value serves for all of its steps.
        epsilon = self.epsilon
        rollout = self.collector.steps(lambda o: self._act(o, epsilon, rng), max(1, settings.train_freq // count))
        collected = len(rollout.row)
        self._remember(rollout)
        self.timesteps += collected
        losses: list[Tensor] = []
        rate = self.learning_rate
        self._follow(collected)
        if self.replay.added > settings.learning_starts:
            steps = collected if settings.gradient_steps < 0 else settings.gradient_steps
            losses = self._learn(steps, rate, rng, metrics)
        self.iterations += 1
        if not metrics:
            return {}
        figures = {"rollout/exploration_rate": epsilon, "learning_rate": rate, "n_updates": float(self.updates)}
        return figures | ({"loss": float(torch.stack(losses).mean())} if losses else {})

    def _act(self, observation: Array, epsilon: float, rng: np.random.Generator) -> Array:
        chance = rng.random(len(observation)) < epsilon
        drawn = rng.integers(self.network.distribution.outputs, size=len(observation))
        return drawn if chance.all() else np.where(chance, drawn, self.network.act(observation))

    def _remember(self, rollout: Rollout) -> None:
        following = np.empty_like(rollout.observation)
        following[:-1] = rollout.observation[1:]
        final = np.flatnonzero(np.append(rollout.row[1:] != rollout.row[:-1], True))
        following[final] = rollout.after
        terminated = np.zeros(len(rollout.row), bool)
        terminated[final] = rollout.terminated
        self.replay.add(
            observation=rollout.observation,
            action=rollout.action,
            reward=rollout.reward,
            next_observation=following,
            terminated=terminated,
        )

    def draw(self, count: int, rng: np.random.Generator) -> Transitions:
        """Sample `count` transitions, with all observations and rewards normalised by the current statistics."""
        drawn, normalizer = self.replay.sample(count, rng), self.collector.normalizer
        if not (normalizer.observations or normalizer.rewards):
            return drawn
        seen, following = (normalizer.see(x.numpy()) for x in (drawn.observation, drawn.next_observation))
        reward = normalizer.scale(drawn.reward.numpy())
        return replace(
            drawn,
            observation=torch.from_numpy(seen),
            next_observation=torch.from_numpy(following),
            reward=torch.from_numpy(reward),
        )

    def _follow(self, collected: int) -> None:
        """Count the `collected` transitions, and update the target network if it is due."""
        self.since_target += collected
        if self.since_target >= self.config.dqn.target_update_interval:
            self.since_target = 0
            q_learning.polyak(self.target, self.network.flat.detach(), self.config.dqn.tau)

    def _learn(self, steps: int, rate: float, rng: np.random.Generator, metrics: bool) -> list[Tensor]:
        """Train on `steps` minibatches at the learning rate `rate`. Return their losses if `metrics` is True.

        The target network does not change meanwhile, so one forward pass of it serves all minibatches.
        """
        if not steps:
            return []
        size, towers, config = self.config.batch_size, self.network.towers, self.config
        double = config.dqn.double_q
        drawn = self.draw(steps * size, rng)
        next_q = towers.with_flat(self.target, drawn.next_observation)[0]
        worth = torch.split(q_learning.back_up(drawn.reward, drawn.terminated, next_q, config.gamma), size)
        shares = torch.split(q_learning.shares(drawn.action, next_q.shape[1], size), size)
        shown = drawn.observation.view(steps, size, -1)
        if double:  # the learning network evaluates s and s' in one forward pass
            shown = torch.cat([shown, drawn.next_observation.view(steps, size, -1)], 1)
        losses = []
        for i in range(steps):
            recording = towers.record(shown[i])
            q = recording.output[0]
            target = q_learning.td_target(worth[i], q[size:] if double else None)
            slope = q_learning.q_slope(q[:size], shares[i], target)
            self.apply_gradient(recording.backward(slope[None]), rate)
            if metrics:
                losses.append(q_learning.q_loss(q[:size], drawn.action[i * size : (i + 1) * size], target))
        self.updates += steps
        return losses

    def save(self, folder: Path, **more: Any) -> None:
        """Save what `Trainer.save` does, the replay buffer and the target network."""
        super().save(folder, **more)
        checkpoint.save_tensors(folder / REPLAY, {**self.replay.tensors(), "target": self.target})

    def restore(self, folder: Path) -> dict[str, Any]:
        """Restore what `Trainer.restore` does, the target network and the replay buffer. Return the saved numbers."""
        numbers = super().restore(folder)
        stored = checkpoint.load_tensors(folder / REPLAY)
        self.target.copy_(stored.pop("target"))
        self.replay.load(stored)
        return numbers


def _check(config: ControlConfig, network: ActorCritic) -> None:
    """Raise `UserError` for settings that do not fit DQN."""
    if not isinstance(network.distribution, Categorical):
        raise UserError(
            "DQN needs discrete actions, one at a time, and this environment's are continuous or several at once; choose ppo, "
            "a2c or trpo."
        )
    if config.batch_size < 1:
        raise UserError("DQN needs a batch_size: transitions per minibatch; 64 is usual.")
    if config.dqn.learning_starts >= config.total_timesteps:
        raise UserError(
            f"learning_starts is {config.dqn.learning_starts} and the run has {config.total_timesteps} steps: nothing would be "
            "learned; set learning_starts lower."
        )
