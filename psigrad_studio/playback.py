"""The frames of a solver or learner for the grid page. They are computed once, in order, and cached for random access.

Frame 0 is the start (zeros, or the values of a warm start); frame k is the k-th result that `psigrad.tabular` yields.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psigrad import tabular
from psigrad.tabular import MDP, Episode, GridWorld, Learned, Sweep
from psigrad.tabular.solvers import SOLVERS

FloatArray = NDArray[np.float64]
Family = Literal["planning", "prediction", "control"]
MOST_SWEEPS, MOST_STAGES = 2_000, 500
EPISODE_STEPS = 500
TIE = 1e-12


@dataclass(frozen=True)
class PlaybackOptions:
    """The options of all algorithms. Each algorithm reads only its own options."""

    sweeps: int = 5
    """Modified policy iteration: sweeps of evaluation between two backups."""
    exploration: float = 0.2
    """Control: ε."""
    step_size: float = 0.2
    """TD(0), SARSA, expected SARSA and Q-learning: α. Monte Carlo takes the mean of all returns."""
    episodes: int = 10
    """Learners: episodes per frame."""
    seed: int = 0
    evaluated: Literal["random", "best"] = "random"
    """Prediction: the policy whose value is learned."""


@dataclass(frozen=True)
class AlgorithmInfo:
    """The title of an algorithm, and its family."""

    title: str
    family: Family


ALGORITHMS = {
    "policy_iteration": AlgorithmInfo("Policy iteration", "planning"),
    "policy_iteration_by_sweeps": AlgorithmInfo("Policy iteration, by sweeps", "planning"),
    "value_iteration": AlgorithmInfo("Value iteration", "planning"),
    "value_iteration_in_place": AlgorithmInfo("Value iteration, in place", "planning"),
    "modified_policy_iteration": AlgorithmInfo("Modified policy iteration", "planning"),
    "prioritised_sweeping": AlgorithmInfo("Prioritised sweeping", "planning"),
    "monte_carlo_evaluation": AlgorithmInfo("Monte Carlo evaluation", "prediction"),
    "td": AlgorithmInfo("TD(0) evaluation", "prediction"),
    "monte_carlo": AlgorithmInfo("Monte Carlo control", "control"),
    "sarsa": AlgorithmInfo("SARSA", "control"),
    "expected_sarsa": AlgorithmInfo("Expected SARSA", "control"),
    "q_learning": AlgorithmInfo("Q-learning", "control"),
}
_PLANNERS: dict[str, Callable[..., Iterator[Sweep]]] = SOLVERS | {
    "policy_iteration_by_sweeps": partial(tabular.policy_iteration, exact=False, epsilon=1e-6),
    "value_iteration_in_place": partial(tabular.value_iteration, in_place=True),
}
_LEARNERS: dict[str, Callable[..., Iterator[Learned]]] = {
    "monte_carlo": tabular.monte_carlo_control,
    "sarsa": tabular.sarsa,
    "expected_sarsa": tabular.expected_sarsa,
    "q_learning": tabular.q_learning,
}


@dataclass(frozen=True, eq=False)
class Frame:
    """The values and the policy that the page shows after one step."""

    index: int
    step: str
    """start, evaluate, improve, back up, or learn."""
    value: FloatArray
    """[S]"""
    actions: NDArray[np.int64]
    """[S]: the actions of the displayed policy, as a sum of 1 up, 2 right, 4 down, 8 left; 15: all are equally good."""
    residual: float
    """max_s |V_new(s) − V_old(s)| of this step, or the residual that the solver reports."""
    error: float
    """max_s |V(s) − target(s)|."""
    error_bound: float | None = None
    changed: int | None = None
    q: FloatArray | None = None
    """(S, A), for control."""
    episode: Episode | None = None
    """Learners: the last episode."""
    before: FloatArray | None = None
    """The table before that episode: V [S] for prediction, Q (S, A) for control."""

    @property
    def size(self) -> int:
        """The bytes of the stored arrays."""
        arrays: list[NDArray[Any] | None] = [self.value, self.actions, self.q, self.before]
        if self.episode is not None:
            arrays += [self.episode.states, self.episode.actions, self.episode.rewards]
        return 400 + sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, eq=False)
class PlaybackSpec:
    """The inputs of a playback."""

    world: GridWorld
    algorithm: str
    options: PlaybackOptions = field(default_factory=PlaybackOptions)
    value: FloatArray | None = None
    """[S]: the initial values; None: zeros."""
    q: FloatArray | None = None
    """(S, A): the initial Q of control, in place of `value`."""

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all inputs, by which playbacks are cached."""
        hashed = hashlib.sha256(repr((self.algorithm, self.options, self.world)).encode())
        for array in (self.value, self.q):
            hashed.update(b"none" if array is None else array.tobytes())
        return hashed.hexdigest()


class Playback:
    """The frames for a spec that have been computed so far."""

    def __init__(self, spec: PlaybackSpec) -> None:
        self.spec = spec
        self.mdp = spec.world.mdp()
        self.target = target(spec, self.mdp)
        self.frames: list[Frame] = []
        self.ended = False
        self.note = ""
        """The reason why the playback ended early; empty if it converged."""
        self.size = 2 * self.mdp.transitions.nbytes
        """The stored bytes, approximately."""
        self._coming = _frames(spec, self.mdp, self.target)
        self._lock = threading.Lock()

    def extend(self, count: int, seconds: float) -> None:
        """Compute frames until there are `count`, the playback ends, or `seconds` have passed, but at least one new frame."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while len(self.frames) < count and not self.ended:
                try:
                    frame = next(self._coming)
                except StopIteration:
                    self.ended = True
                except ValueError as error:  # the solver reports a limit of float64
                    self.ended, self.note = True, str(error)
                else:
                    self.frames.append(frame)
                    self.size += frame.size
                if time.monotonic() > deadline:
                    return

    @property
    def length(self) -> int | None:
        """The final number of frames; None while it is unknown."""
        if self.ended:
            return len(self.frames)
        return None if ALGORITHMS[self.spec.algorithm].family == "planning" else MOST_STAGES + 1


class PlaybackCache:
    """A cache of playbacks by their inputs. The least recently used one is dropped first, and recomputed if needed."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._playbacks = most_bytes, OrderedDict[str, Playback]()
        self._lock = threading.Lock()

    def playback(self, spec: PlaybackSpec, count: int, seconds: float) -> Playback:
        """Return the playback of a spec with at least `count` frames, or as many as `seconds` allow. See `Playback.extend`.

        Raises `ValueError` if the world is not a valid decision process.
        """
        name = spec.digest
        with self._lock:
            playback = self._playbacks.get(name)
        playback = playback or Playback(spec)
        playback.extend(count, seconds)
        with self._lock:
            self._playbacks[name] = playback
            self._playbacks.move_to_end(name)
            while len(self._playbacks) > 1 and sum(held.size for held in self._playbacks.values()) > self._most:
                self._playbacks.popitem(last=False)
        return playback

    @property
    def size(self) -> int:
        """The stored bytes, approximately."""
        with self._lock:
            return sum(playback.size for playback in self._playbacks.values())


def evaluated_policy(spec: PlaybackSpec, mdp: MDP) -> NDArray[np.int64] | FloatArray:
    """Return the policy that prediction evaluates: uniform (S, A), or an optimal one [S]."""
    return tabular.uniform_policy(mdp) if spec.options.evaluated == "random" else tabular.solve(mdp).policy


def target(spec: PlaybackSpec, mdp: MDP) -> FloatArray:
    """Return the values [S] to reach: the exact V_π for prediction, V* for all other algorithms."""
    if ALGORITHMS[spec.algorithm].family == "prediction":
        return tabular.evaluate(mdp, evaluated_policy(spec, mdp))
    return tabular.solve(mdp).value


def _frames(spec: PlaybackSpec, mdp: MDP, goal: FloatArray) -> Iterator[Frame]:
    frames = {"planning": _planned, "prediction": _predicted, "control": _learned}
    return frames[ALGORITHMS[spec.algorithm].family](spec, mdp, goal)


def best_actions(q: FloatArray) -> NDArray[np.int64]:
    """Return [S]: for each state, the sum of the codes (1, 2, 4, 8) of all actions that are best up to rounding."""
    best = q.max(axis=1, keepdims=True)
    return np.asarray((q >= best - TIE * (1 + np.abs(best))) @ np.array([1, 2, 4, 8]))


def _of_policy(policy: NDArray[np.int64] | FloatArray) -> NDArray[np.int64]:
    return 1 << policy.astype(np.int64) if policy.ndim == 1 else best_actions(policy.astype(np.float64))


def _gap(value: FloatArray, goal: FloatArray) -> float:
    return float(np.abs(value - goal).max())


def _planned(spec: PlaybackSpec, mdp: MDP, goal: FloatArray) -> Iterator[Frame]:
    named = {"sweeps": spec.options.sweeps} if spec.algorithm == "modified_policy_iteration" else {}
    first = np.zeros(mdp.n_states) if spec.value is None else np.where(mdp.is_terminal, 0.0, spec.value)
    yield Frame(0, "start", first, best_actions(tabular.q_values(mdp, first)), 0.0, _gap(first, goal))
    for index, sweep in enumerate(_PLANNERS[spec.algorithm](mdp, value=first, **named), 1):
        held = sweep.chosen is not None
        shown = _of_policy(np.asarray(sweep.chosen)) if held else best_actions(tabular.q_values(mdp, sweep.value))
        bound = sweep.error_bound if np.isfinite(sweep.error_bound) else None
        changed = sweep.changed if sweep.step == "improve" else None
        yield Frame(index, sweep.step, sweep.value, shown, sweep.residual, _gap(sweep.value, goal), bound, changed)
        if index >= MOST_SWEEPS:
            raise ValueError(f"The playback stops after {MOST_SWEEPS:,} sweeps; use a smaller discount, which needs fewer.")


def _predicted(spec: PlaybackSpec, mdp: MDP, goal: FloatArray) -> Iterator[Frame]:
    options, policy = spec.options, evaluated_policy(spec, mdp)
    shown = _of_policy(policy)
    value = np.zeros(mdp.n_states) if spec.value is None else np.where(mdp.is_terminal, 0.0, spec.value)
    yield Frame(0, "start", value, shown, 0.0, _gap(value, goal))
    played: list[Episode] = []

    def kept(episodes: Iterator[Episode]) -> Iterator[Episode]:
        for episode in episodes:
            played[:] = [episode]
            yield episode

    episodes = kept(tabular.rollouts(mdp, policy, MOST_STAGES * options.episodes, seed=options.seed, max_steps=EPISODE_STEPS))
    if spec.algorithm == "td":
        estimates = tabular.td(episodes, mdp.n_states, mdp.gamma, alpha=options.step_size, value=value)
    else:
        estimates = tabular.monte_carlo(episodes, mdp.n_states, mdp.gamma, value=value)
    last = before = value
    for count, estimate in enumerate(estimates, 1):
        if count % options.episodes == 0:
            index, change, error = count // options.episodes, _gap(estimate, last), _gap(estimate, goal)
            yield Frame(index, "learn", estimate, shown, change, error, episode=played[0], before=before)
            last = estimate
        before = estimate


def _learned(spec: PlaybackSpec, mdp: MDP, goal: FloatArray) -> Iterator[Frame]:
    options = spec.options
    q = first_q(spec, mdp)
    last = q.max(axis=1)
    yield Frame(0, "start", last, best_actions(q), 0.0, _gap(last, goal), q=q)
    named: dict[str, Any] = {} if spec.algorithm == "monte_carlo" else {"alpha": options.step_size}
    named |= {"epsilon": options.exploration, "seed": options.seed, "max_steps": EPISODE_STEPS}
    learning = _LEARNERS[spec.algorithm](mdp, MOST_STAGES * options.episodes, q=q, **named)
    before = q
    for learned in learning:
        if (learned.index + 1) % options.episodes == 0:
            value, shown = learned.q.max(axis=1), best_actions(learned.q)
            index, change, error = (learned.index + 1) // options.episodes, _gap(value, last), _gap(value, goal)
            yield Frame(index, "learn", value, shown, change, error, q=learned.q, episode=learned.episode, before=before)
            last = value
        before = learned.q


def first_q(spec: PlaybackSpec, mdp: MDP) -> FloatArray:
    """Return the initial Q (S, A) of control: the spec's Q, or one backup of its V, or zeros."""
    if spec.q is not None:
        q = spec.q
    elif spec.value is not None:
        q = tabular.q_values(mdp, np.where(mdp.is_terminal, 0.0, spec.value))
    else:
        q = np.zeros((mdp.n_states, mdp.n_actions))
    return np.where(mdp.is_terminal[:, None], 0.0, q)
