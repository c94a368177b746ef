"""The agents of control, with the interface of Stable-Baselines3: `learn`, `predict`, `save`, `load`.

    from psigrad.control import PPO
    agent = PPO("CartPole-v1").learn(100_000)
    action, _ = agent.predict(observation, deterministic=True)

Every setting of `psigrad control` is a keyword argument: learning_rate, n_steps, net_arch, buffer_size, … The defaults are the
tuned settings of the algorithm on the environment, if there are any (`tuned=False` disables them).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from psigrad import extras
from psigrad.config.load import to_dict
from psigrad.control import builder, policies
from psigrad.control.environments import vector
from psigrad.control.methods.dqn import DQNTrainer
from psigrad.control.methods.trainer import Trainer, generator
from psigrad.control.networks.distributions import Array
from psigrad.control.run import play_episodes
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError, kind_of
from psigrad.paths import absolute
from psigrad.records import checkpoint
from psigrad.runs.machine import prepared_torch
from psigrad.runs.progress import bar

# A function that `learn` calls after every line of metrics. If it returns False, training ends.
Callback = Callable[["Agent", Mapping[str, float]], bool | None]

Log = Callable[[int, Mapping[str, float]], None]
"""A function (steps so far, metrics) that logs one line of metrics."""


class Agent:
    """A policy on a Gymnasium environment, trained with `algorithm`: any preset's name, a `PolicyGradient`, "trpo" or "dqn".

    `env` is an id, a function that makes an environment, an environment, or a vector environment. The argument order of
    Stable-Baselines3 works too: `PPO("MlpPolicy", env)`, or `PPO("CnnPolicy", env)` for images. So do its `policy_kwargs`
    net_arch (a list) and activation_fn. `verbose=1` prints every line of metrics. `tensorboard_log` is a folder for TensorBoard.
    Raises `UserError` for an unknown setting, or if settings, algorithm and environment do not fit together.
    """

    algorithm: ClassVar[Any] = None

    def __init__(
        self,
        policy: Any = None,
        env: Any = None,
        *,
        algorithm: Any = None,
        verbose: int = 0,
        policy_kwargs: Mapping[str, Any] | None = None,
        tensorboard_log: str | Path | None = None,
        **settings: Any,
    ) -> None:
        if policy is None:
            policy, env = env, None
        named = policies.policy_name(policy, env)
        env = policy if named is None else env
        chosen = self.algorithm if algorithm is None else algorithm
        if chosen is None:
            raise UserError('No algorithm was given; for example Agent("CartPole-v1", algorithm="ppo").')
        of_policy = {**policies.SETTINGS[named or policies.MLP], **policies.translate_kwargs(policy_kwargs or {})}
        config = builder.settings(chosen, env, {"threads": 1, **of_policy, **policies.drop_foreign(settings)})
        with prepared_torch(config.run):
            self._hold(builder.build(config), tensorboard_log)
        policies.check(named, self._trainer.collector.envs)
        self.verbose = verbose

    def _hold(self, trainer: Trainer, tensorboard_log: str | Path | None) -> None:
        self._trainer, self._begun, self.verbose = trainer, False, 0
        self.tensorboard_log, self._learns_from = tensorboard_log, trainer.timesteps
        self._logged: Log = lambda steps, figures: None
        self._rng = generator(trainer.config.run.seed)

    @property
    def settings(self) -> ControlConfig:
        """The current `ControlConfig`."""
        return self._trainer.config

    @property
    def num_timesteps(self) -> int:
        """The number of steps of training so far."""
        return self._trainer.timesteps

    @property
    def observation_space(self) -> Any:
        """The Gymnasium space of one observation."""
        return self._trainer.collector.envs.spaces[0]

    @property
    def action_space(self) -> Any:
        """The Gymnasium space of one action."""
        return self._trainer.collector.envs.spaces[1]

    def learn(
        self,
        total_timesteps: int | None = None,
        callback: Callback | Sequence[Callback] | None = None,
        log_interval: int | None = None,
        progress_bar: bool = False,
        **foreign: Any,
    ) -> Self:
        """Train for `total_timesteps` more steps (default: the setting).

        Schedules, such as that of the learning rate, restart with each call. With `reset_num_timesteps=False`, they continue.
        `verbose` prints every `log_interval`-th line of metrics; for DQN, it prints after every `log_interval` episodes, as
        Stable-Baselines3 does. With `tensorboard_log`, metrics are logged to its subfolder `tb_log_name`_N. Each call starts a
        new one, except with `reset_num_timesteps=False`. `num_timesteps` keeps counting in both cases. Each callback is called
        with the agent and every line of metrics, and ends training if it returns False. `foreign` accepts other arguments of
        Stable-Baselines3 if their values have no effect. Raises `UserError` for other values, for a number of steps below 1, and
        for callbacks that are not functions.
        """
        trainer, name = self._trainer, str(foreign.pop("tb_log_name", type(self).__name__))
        again = foreign.get("reset_num_timesteps") is False
        policies.refuse(foreign, "learn", ("total_timesteps", "callback", "log_interval", "progress_bar"))
        shown = policies.PrintedLines(log_interval, trainer)
        callbacks = list(callback) if isinstance(callback, Sequence) else [] if callback is None else [callback]
        for call in callbacks:
            policies.check_callback(call)
        start = self._learns_from = trainer.timesteps
        steps = trainer.config.total_timesteps if total_timesteps is None else total_timesteps
        if not isinstance(steps, int | float) or not 1 <= steps < float("inf"):
            raise UserError(f"total_timesteps is {steps!r}; expected a whole number of 1 or more.")
        goal = start + int(steps)
        trainer.start = trainer.start if again else start
        trainer.config = replace(trainer.config, total_timesteps=goal)
        began = time.monotonic()
        logging = _logging_to(self.tensorboard_log, name, again)
        shows = bar("steps", goal, enabled=progress_bar, done=start)
        with prepared_torch(trainer.config.run), shows as advance, logging as self._logged:
            if not self._begun:
                trainer.restart()
                self._begun = True
            while trainer.timesteps < goal:
                before = trainer.timesteps
                figures = trainer.train_interval()
                advance(trainer.timesteps - before, f"return {figures.get('rollout/ep_rew_mean', float('nan')):.1f}")
                self._logged(trainer.timesteps, figures)
                if self.verbose and shown.due():
                    clock = {"time/fps": (trainer.timesteps - start) / (time.monotonic() - began)}
                    print(policies.table({**clock, "time/total_timesteps": trainer.timesteps, **figures}))
                if [call for call in callbacks if call(self, {"timesteps": trainer.timesteps, **figures}) is False]:
                    break
        return self

    def predict(
        self, observation: Any, state: None = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Array, None]:
        """Return (actions for the environment, None) for one observation or for a batch of them from a vector environment.

        `state` and `episode_start` are arguments of Stable-Baselines3 for recurrent policies. psigrad has no recurrent policies,
        so the returned state is None.
        """
        network, collector = self._trainer.network, self._trainer.collector
        flat, single = collector.envs.flat(observation)
        noise = None if deterministic else network.distribution.noise(self._rng, (len(flat),))
        actions = collector.envs.to_env(network.act(collector.normalizer.see(flat), noise))
        return (actions[0] if single else actions), None

    def get_env(self) -> Any:
        """Return the training environments: a vector environment of Gymnasium, or psigrad's `Serial` with the same methods.

        Return None for a policy that was loaded without environments.
        """
        envs = self._trainer.collector.envs
        return None if envs.absent else envs.env

    def set_env(self, env: Any) -> None:
        """Replace the training environments by others with the same spaces.

        `env` is an id, a function that makes an environment, an environment or a vector environment.
        Raises `UserError` if their spaces differ from those of the policy.
        """
        trainer = self._trainer
        now, settings = trainer.collector.envs, trainer.config
        count = now.count if isinstance(env, str) or callable(env) else 1
        made = vector.make(env, count, settings.vectorization, settings.wrappers if isinstance(env, str) else ())
        vector.check_spaces(made, now)
        trainer.set_environments(made, env)
        self._begun = False

    def save(self, path: str | Path) -> Path:
        """Save the policy as a folder with `model.safetensors` and `config.json`, and return its path.

        `load` reads this folder. The `model/` of a run folder has the same format. Raises `UserError` if the folder holds a
        model that is not a policy of psigrad.
        """
        folder = absolute(path)
        policies.check_place(folder)
        builder.save_policy(folder, self._trainer)
        return folder

    @classmethod
    def load(
        cls, path: str | Path, env: Any = None, tensorboard_log: str | Path | None = None, algorithm: Any = None, **foreign: Any
    ) -> Self:
        """Load a saved policy, on `env` or the environment that it was trained on. Training can continue with a new optimiser.

        If there is no `env`, and the environment of training has no id or cannot be made, the policy can only act. It then needs
        `set_env` for training or evaluation. A method with custom functions that cannot be imported by name is not saved. To
        train such a policy, give the method as `algorithm`. `foreign` accepts Stable-Baselines3's `device` and other arguments if
        their values have no effect. Raises `UserError` for others, for a folder without a policy, and for a policy of another
        algorithm.
        """
        policies.refuse(foreign, "load", ("path", "env", "tensorboard_log", "algorithm"))
        path = policies.strip_zip(absolute(path))
        agent = cls.__new__(cls)
        agent._hold(builder.load_policy(Path(path), env, algorithm), tensorboard_log)
        saved = builder.name_of(agent.settings.algorithm)
        if algorithm is None and cls.algorithm not in (None, saved):
            agent.close()
            raise UserError(f"{path} holds a policy of {saved}, not of {cls.algorithm}; load it by Agent.load.")
        return agent

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(policies.no_attribute(type(self).__name__, name, to_dict(ControlConfig())))

    def close(self) -> None:
        """Close the environments."""
        self._trainer.collector.envs.close()


@contextmanager
def _logging_to(root: str | Path | None, name: str, again: bool) -> Iterator[Log]:
    """Yield a logger to TensorBoard in a new folder `root`/`name`_N, or with `again` in the newest. Without `root`, log nothing.

    Raises `UserError` if TensorBoard is not installed.
    """
    if root is None:
        yield lambda steps, figures: None
        return
    numbers = [int(n) for path in Path(root).glob(f"{name}_*") if (n := path.name.removeprefix(f"{name}_")).isdecimal()]
    newest = max(numbers, default=0)
    folder = Path(root) / f"{name}_{max(1, newest if again else newest + 1)}"
    (tracker,) = extras.load("trackers").open_trackers(["tensorboard"], folder, {})
    try:
        yield tracker.log
    finally:
        tracker.close()


def evaluate_policy(
    agent: Agent,
    env: Any = None,
    n_eval_episodes: int = 100,
    deterministic: bool = True,
    *,
    seed: int = 0,
    return_episode_rewards: bool = False,
    **foreign: Any,
) -> tuple[Any, Any]:
    """Return the mean and standard deviation of the return over `n_eval_episodes` complete episodes.

    With `return_episode_rewards`, return the returns and the lengths of the episodes as two lists. If `env` (default: the
    agent's) is an id or a function, new environments are made. An environment object is used itself and stays open. If the
    agent trains on it, training continues with new episodes. An episode is cut after `eval_max_steps` (a setting of the agent)
    steps, with a `UserWarning`; 0 means 30,000 if the environment declares no limit. `foreign` accepts arguments of
    Stable-Baselines3 whose values have no effect, such as `warn`. Raises `UserError` for others, if the spaces differ from those
    of the policy, and for less than one episode.
    """
    policies.refuse(foreign, "evaluate_policy", ("env", "n_eval_episodes", "deterministic", "seed", "return_episode_rewards"))
    if not isinstance(agent, Agent):
        raise UserError(f"evaluate_policy got {kind_of(agent)} in place of an agent; give what PPO(…), DQN(…) or load returned.")
    config, trainer = agent.settings, agent._trainer
    if not isinstance(n_eval_episodes, int) or n_eval_episodes < 1:
        raise UserError(f"n_eval_episodes is {n_eval_episodes!r}; expected a whole number of 1 or more.")
    source = config.env if env is None else env
    fresh = isinstance(source, str) or callable(source)
    wrappers = config.wrappers if isinstance(source, str) else ()
    count, limit = min(n_eval_episodes, 16) if fresh else 1, config.eval_max_steps
    envs = vector.make(source, count, config.vectorization, wrappers, limit, **config.env_kwargs)
    vector.check_spaces(envs, trainer.collector.envs)
    returns, lengths, cut = play_episodes(trainer, envs, n_eval_episodes, seed, deterministic)
    if cut:
        warnings.warn(
            f"{cut} of {len(lengths)} evaluated episodes were cut after {max(lengths):,} steps; their return so far counts. The "
            "setting eval_max_steps changes the limit.",
            stacklevel=2,
        )
    if fresh:
        envs.close()
    elif source is config.env or source is agent.get_env():
        trainer.restart()
    return (returns, lengths) if return_episode_rewards else (float(np.mean(returns)), float(np.std(returns)))


class PPO(Agent):
    """An agent of proximal policy optimisation with the clipped surrogate (Schulman et al. 2017)."""

    algorithm = "ppo"


class A2C(Agent):
    """An agent of advantage actor-critic (Mnih et al. 2016)."""

    algorithm = "a2c"


class REINFORCE(Agent):
    """An agent of REINFORCE with a learned baseline (Williams 1992)."""

    algorithm = "reinforce"


class TRPO(Agent):
    """An agent of trust region policy optimisation (Schulman et al. 2015)."""

    algorithm = "trpo"


class DQN(Agent):
    """An agent of deep Q-learning (Mnih et al. 2015), or of Double DQN with `double_q=True`."""

    algorithm = "dqn"
    _trainer: DQNTrainer

    def save_replay_buffer(self, path: str | Path) -> Path:
        """Save the transitions of the replay buffer, which `save` does not, as a safetensors file, and return its path."""
        file = policies.tensors_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save_tensors(file, self._trainer.replay.tensors())
        return file

    def load_replay_buffer(self, path: str | Path) -> None:
        """Replace the transitions by those that `save_replay_buffer` saved. If they are more than `buffer_size`, keep the last.

        Raises `UserError` if there is no such file, or if its observations have another shape.
        """
        file = policies.tensors_file(path)
        if not file.is_file():
            raise UserError(f"There is no file {str(file)!r}; give the path that save_replay_buffer returned.")
        try:
            self._trainer.replay.take(checkpoint.load_tensors(file))
        except ValueError as error:
            raise UserError(f"{file} is not a replay buffer of this agent: {error}.") from error
