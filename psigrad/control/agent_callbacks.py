"""The callbacks that `learn` calls after every line of metrics: evaluation, saving policies, early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from psigrad.control import policies
from psigrad.control.agents import DQN, Agent, Callback, evaluate_policy
from psigrad.errors import UserError

MEAN_RETURN = "eval/return/mean"


class _Every:
    """A timer that is due after every `freq` steps of each copy of the environment, which is how Stable-Baselines3 counts."""

    def __init__(self, name: str, freq: Any) -> None:
        if not isinstance(freq, int) or freq < 1:
            raise UserError(f"{name} is {freq!r}; expected a whole number of steps, 1 or more.")
        self._freq, self._next = freq, 0

    def due(self, agent: Agent) -> bool:
        steps = self._freq * agent.settings.n_envs
        self._next = self._next or agent._learns_from + steps
        if agent.num_timesteps < self._next:
            return False
        self._next = agent.num_timesteps + steps
        return True


class EvalCallback:
    """A callback that evaluates on `eval_env` (default: new copies of the agent's) every `eval_freq` steps of each copy.

    The number of steps is checked after each line of metrics. The best policy is saved as the folder `best_model` in
    `best_model_save_path`. `log_path` is a folder for `evaluations.npz`, in the format of Stable-Baselines3: timesteps [E],
    results and ep_lengths [E, n]. `callback_after_eval` is called with the agent and the metrics after every evaluation, and
    `callback_on_new_best` after one that was the best so far. If one of them returns False, training ends. `evaluations` has the
    steps and the mean return of each evaluation. Raises `UserError` for other arguments of Stable-Baselines3, unless their values
    have no effect.
    """

    def __init__(
        self,
        eval_env: Any = None,
        *,
        callback_on_new_best: Callback | None = None,
        callback_after_eval: Callback | None = None,
        n_eval_episodes: int = 20,
        eval_freq: int = 10_000,
        best_model_save_path: str | Path | None = None,
        log_path: str | Path | None = None,
        deterministic: bool = True,
        verbose: int = 0,
        **foreign: Any,
    ) -> None:
        policies.refuse(foreign, "EvalCallback", ("eval_env", "eval_freq", "n_eval_episodes", "best_model_save_path"))
        for call in (callback_on_new_best, callback_after_eval):
            if call is not None:
                policies.check_callback(call)
        self.eval_env, self.n_eval_episodes, self.deterministic, self.verbose = eval_env, n_eval_episodes, deterministic, verbose
        self.best = None if best_model_save_path is None else Path(best_model_save_path) / "best_model"
        self.on_new_best, self.after_eval = callback_on_new_best, callback_after_eval
        self.evaluations: list[tuple[int, float]] = []
        self.log = None if log_path is None else Path(log_path)
        self._played: list[tuple[int, list[float], list[int]]] = []
        self._every = _Every("eval_freq", eval_freq)

    def __call__(self, agent: Agent, figures: Mapping[str, float]) -> bool:
        """Evaluate if it is due. Return False, which ends training, if one of the two callbacks returned False."""
        if not self._every.due(agent):
            return True
        played = evaluate_policy(agent, self.eval_env, self.n_eval_episodes, self.deterministic, return_episode_rewards=True)
        mean, std = float(np.mean(played[0])), float(np.std(played[0]))
        self._log(agent.num_timesteps, *played)
        agent._logged(agent.num_timesteps, {MEAN_RETURN: mean, "eval/length/mean": float(np.mean(played[1]))})
        is_best = all(mean > seen for _, seen in self.evaluations)
        self.evaluations.append((agent.num_timesteps, mean))
        if self.verbose:
            print(f"{agent.num_timesteps} steps: return {mean:.2f} ± {std:.2f} over {self.n_eval_episodes} episodes")
        if is_best and self.best is not None:
            agent.save(self.best)
        asked = [call for call in (self.on_new_best if is_best else None, self.after_eval) if call is not None]
        return False not in [call(agent, {**figures, MEAN_RETURN: mean}) for call in asked]

    def _log(self, steps: int, returns: list[float], lengths: list[int]) -> None:
        self._played.append((steps, returns, lengths))
        if self.log is not None:
            self.log.mkdir(parents=True, exist_ok=True)
            timesteps, results, ep_lengths = (np.array(part) for part in zip(*self._played, strict=True))
            np.savez(self.log / "evaluations.npz", timesteps=timesteps, results=results, ep_lengths=ep_lengths)


class StopTrainingOnRewardThreshold:
    """A `callback_on_new_best` of an `EvalCallback` that ends training when the mean return reaches `reward_threshold`."""

    def __init__(self, reward_threshold: float, verbose: int = 0) -> None:
        self.reward_threshold, self.verbose = reward_threshold, verbose

    def __call__(self, agent: Agent, figures: Mapping[str, float]) -> bool:
        """Return False if the threshold is reached. Raises `UserError` without an `EvalCallback`, whose metrics it needs."""
        if MEAN_RETURN not in figures:
            raise UserError(
                "StopTrainingOnRewardThreshold reads the figures of an evaluation; pass it to an EvalCallback: "
                "EvalCallback(callback_on_new_best=StopTrainingOnRewardThreshold(…))."
            )
        reached = figures[MEAN_RETURN] >= self.reward_threshold
        if reached and self.verbose:
            print(f"{agent.num_timesteps} steps: training ends, because the return is {figures[MEAN_RETURN]:.2f}")
        return not reached


class CheckpointCallback:
    """A callback that saves the policy every `save_freq` steps of each copy, as the folder `save_path`/`name_prefix`_N_steps.

    With `save_replay_buffer`, the transitions of a DQN are saved as `name_prefix`_replay_buffer_N_steps.safetensors. Raises
    `UserError` for other arguments of Stable-Baselines3, unless their values have no effect.
    """

    def __init__(
        self,
        save_freq: int,
        save_path: str | Path,
        name_prefix: str = "rl_model",
        save_replay_buffer: bool = False,
        verbose: int = 0,
        **foreign: Any,
    ) -> None:
        policies.refuse(foreign, "CheckpointCallback", ("save_freq", "save_path", "name_prefix", "save_replay_buffer"))
        self.save_replay_buffer = save_replay_buffer
        self.save_path, self.name_prefix, self.verbose = Path(save_path), name_prefix, verbose
        self._every = _Every("save_freq", save_freq)

    def __call__(self, agent: Agent, figures: Mapping[str, float]) -> None:
        """Save the agent if it is due."""
        if self._every.due(agent):
            saved = agent.save(self.save_path / f"{self.name_prefix}_{agent.num_timesteps}_steps")
            if self.save_replay_buffer and isinstance(agent, DQN):
                agent.save_replay_buffer(self.save_path / f"{self.name_prefix}_replay_buffer_{agent.num_timesteps}_steps")
            if self.verbose:
                print(f"saved {saved}")
