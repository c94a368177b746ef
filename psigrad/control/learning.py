"""The loop of control: rollouts and updates until the steps are done, with lines of metrics, evaluations and checkpoints
between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from psigrad import seeds
from psigrad.config import ControlConfig
from psigrad.control.actor_critic import ActorCritic
from psigrad.control.dqn import DQN
from psigrad.control.flat_optimizer import FlatOptimizer
from psigrad.control.rollouts import Collector, play
from psigrad.control.vector import Environments
from psigrad.records import checkpoint
from psigrad.records.rows import EpisodeRow
from psigrad.records.run_folder import to_line
from psigrad.training.journal import Clock, Journal
from psigrad.training.progress import bar

OPTIMIZER, REPLAY = "optimizer.safetensors", "replay.safetensors"
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


class Method(Protocol):
    """What the loop turns: on-policy gradients, TRPO and DQN alike."""

    config: ControlConfig
    network: ActorCritic
    optimizer: FlatOptimizer
    collector: Collector
    timesteps: int
    iterations: int
    state: dict[str, float]

    @property
    def most_steps(self) -> float:
        """The most steps that a rollout can have."""
        ...

    def restart(self) -> None:
        """New episodes everywhere."""
        ...

    def iterate(self, metrics: bool = True) -> dict[str, float]:
        """One rollout and its updates."""
        ...


@dataclass
class Progress:
    """Where a run stands besides what its method knows."""

    line: int = 0
    evaluated: list[dict[str, float]] = field(default_factory=list)


def train(method: Method, judge: Judge | None, journal: Journal, root: Path, progress: Progress) -> Progress:
    """From where `method` and `progress` stand to the last step. Everything of a line is in the run folder before a checkpoint of
    it is; a stop that was asked for is served between lines.
    """
    config, total = method.config, method.config.total_timesteps
    method.restart()
    with bar("steps", total, shown=config.run.progress, done=method.timesteps) as advance:
        while method.timesteps < total:
            if journal.stop_requested():
                save(root, method, progress)
                journal.stopped(method.timesteps)
            before, clock = method.timesteps, Clock()
            with clock("time/update"):
                figures = line(method)
            progress.line += 1
            journal.metrics(method.timesteps, figures)
            journal.timings(method.timesteps, clock, method.timesteps - before)
            advance(method.timesteps - before, f"return {figures.get('rollout/ep_rew_mean', float('nan')):.1f}")
            last = method.timesteps >= total
            if judge is not None and (last or (config.eval_steps and progress.line % config.eval_steps == 0)):
                judge.record(method, progress, journal)
            if last or (config.run.save_steps and progress.line % config.run.save_steps == 0):
                save(root, method, progress)
                if not last:  # what an environment holds in memory cannot be saved, so neither run goes on with it
                    method.restart()
    return progress


def line(method: Method) -> dict[str, float]:
    """`log_interval` iterations; the figures of the last one."""
    figures: dict[str, float] = {}
    for i in range(method.config.log_interval):
        # what may be the last rollout of the run ends a line too
        last = method.timesteps + method.most_steps >= method.config.total_timesteps
        figures = method.iterate(last or i == method.config.log_interval - 1)
        if method.timesteps >= method.config.total_timesteps:
            break
    named = {_NAMES.get(name, name): value for name, value in figures.items() if name in _NAMES or "/" in name}
    return {**method.collector.figures.summary(), **named}


@dataclass(frozen=True, eq=False)
class Judge:
    """Plays whole episodes of the policy on environments of its own, and says how it did."""

    envs: Environments
    episodes: int
    deterministic: bool

    def play(self, method: Method, seed: int) -> tuple[list[float], list[int]]:
        """Returns and lengths of `episodes` or a few more whole episodes."""
        rng = None if self.deterministic else np.random.Generator(np.random.SFC64(seed))
        see = method.collector.normalizer.see
        return play(self.envs, method.network.actor(rng, self.envs.count), self.episodes, seed, see)

    def record(self, method: Method, progress: Progress, journal: Journal) -> None:
        """Play, and write the figures with their 95 % interval and every episode."""
        seed = seeds.derive(method.config.run.seed, "evaluation", progress.line)
        returns, lengths = self.play(method, seed)
        figures = summary(returns, lengths)
        progress.evaluated.append({"timesteps": method.timesteps, **figures})
        journal.metrics(method.timesteps, {f"eval/{k}": v for k, v in figures.items()})
        rows: list[EpisodeRow] = [
            {"step": method.timesteps, "kind": "episode", "episode": i, "reward": r, "length": n}
            for i, (r, n) in enumerate(zip(returns, lengths, strict=True))
        ]
        journal.rollouts(rows)


def summary(returns: list[float], lengths: list[int]) -> dict[str, float]:
    """Mean return of episodes with its 95 % interval, its standard deviation over them, and their mean length."""
    mean, std = float(np.mean(returns)), float(np.std(returns, ddof=1)) if len(returns) > 1 else 0.0
    half = 1.96 * std / len(returns) ** 0.5
    return {
        "return/mean": mean,
        "return/low": mean - half,
        "return/high": mean + half,
        "return/std": std,
        "length/mean": float(np.mean(lengths)),
        "episodes": len(returns),
    }


def save(root: Path, method: Method, progress: Progress, keep: int | None = None) -> Path:
    """A checkpoint of everything that changes, under `root`; old ones go."""
    path = checkpoint.save(root, method.timesteps, lambda folder: write(folder, method, progress), meta={"kind": "control"})
    checkpoint.prune(root, keep or method.config.run.save_total_limit)
    return path


def write(folder: Path, method: Method, progress: Progress) -> None:
    """Weights, optimiser, replay buffer and numbers of a method, as files of a folder."""
    method.network.save(folder)
    checkpoint.save_tensors(folder / OPTIMIZER, method.optimizer.tensors())
    numbers: dict[str, Any] = {
        "line": progress.line,
        "evaluated": progress.evaluated,
        "timesteps": method.timesteps,
        "iterations": method.iterations,
        "state": method.state,
        "nonfinite": method.optimizer.nonfinite,
        "normalizer": method.collector.normalizer.state(),
        "figures": method.collector.figures.numbers(),
    }
    if isinstance(method, DQN):
        checkpoint.save_tensors(folder / REPLAY, {**method.replay.tensors(), "target": method.target})
        numbers |= {"updates": method.updates, "since_target": method.since_target}
    (folder / "state.json").write_bytes(to_line(numbers))


def read(folder: Path, method: Method) -> Progress:
    """The inverse of `write`, into a method of the same settings."""
    numbers: Mapping[str, Any] = json.loads((folder / "state.json").read_text())
    method.network.load(folder)
    tensors: Mapping[str, Tensor] = checkpoint.load_tensors(folder / OPTIMIZER)
    method.optimizer.load(tensors)
    method.optimizer.nonfinite = numbers["nonfinite"]
    method.timesteps, method.iterations = numbers["timesteps"], numbers["iterations"]
    method.state = dict(numbers["state"])
    method.collector.normalizer.restore(numbers["normalizer"])
    method.collector.figures.restore(numbers["figures"])
    if isinstance(method, DQN):
        stored = checkpoint.load_tensors(folder / REPLAY)
        method.target.copy_(stored.pop("target"))
        method.replay.load(stored)
        method.updates, method.since_target = numbers["updates"], numbers["since_target"]
    return Progress(numbers["line"], numbers["evaluated"])
