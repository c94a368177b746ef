"""Reinforcement learning on a Gymnasium environment, from settings to a policy on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from psigrad import report
from psigrad.config import ControlConfig, Run
from psigrad.config.load import load, to_dict
from psigrad.control import hyperparameters as tuned
from psigrad.control import learning as loop
from psigrad.control import methods as control_catalog
from psigrad.control import vector
from psigrad.control.actor_critic import ActorCritic, is_discrete
from psigrad.control.dqn import DQN
from psigrad.control.flat_optimizer import FlatOptimizer
from psigrad.control.learning import Judge, Method, Progress
from psigrad.control.on_policy import OnPolicy
from psigrad.control.rollouts import Collector
from psigrad.control.trpo import TRPO
from psigrad.control.vector import Environments, Normalizer
from psigrad.errors import UserError, nearest
from psigrad.objective import PolicyGradient, catalog
from psigrad.objective.advantage import needs_of
from psigrad.training import session
from psigrad.training.session import Result

MODEL_CONFIG = "config.json"
_EVALUATORS = 16  # environments that an evaluation plays on at once


def names() -> list[str]:
    """Algorithms of control: policy gradients, TRPO and DQN."""
    return [*control_catalog.names(), "trpo", "dqn"]


def run(config: ControlConfig) -> Result:
    """Train a policy on `config.env` by `config.algorithm`, with the run folder, checkpoints and report of every other run.

    Goes on from the newest checkpoint of the run folder where there is one. Raises `UserError` on mistakes of the user.
    """
    if config.run.max_steps:
        raise UserError("Control counts steps of the environment: set total_timesteps in place of max_steps.")
    method = build(config)
    judge = judge_for(config) if config.eval_episodes else None
    try:
        with session.open_run(config, "control") as journal:
            found = session.newest_checkpoint(journal)
            progress = Progress() if found is None else loop.read(found, method)
            journal.folder.event("started" if found is None else "resumed", step=method.timesteps)
            loop.train(method, judge, journal, journal.folder.checkpoints, progress)
            model = journal.folder.save_model(lambda folder: save_policy(folder, method))
            if config.video:
                from psigrad.control import video as film

                film.record(method, journal.folder.path / "episode.gif")
            journal.folder.flush()
            journal.folder.event("finished")
            written = report.write([journal.folder.path]) if config.run.report else None
            before, after = session.evaluations(journal.folder.path)
            return Result(journal.folder.path, model, written, before, after)
    finally:
        method.collector.envs.close()
        if judge is not None:
            judge.envs.close()


def settings(algorithm: Any, env: Any, given: Mapping[str, Any] | None = None) -> ControlConfig:
    """Settings for an algorithm on an environment: the tuned ones, and over them what is given (dotted or plain names)."""
    given = dict(given or {})
    named, place = name_of(algorithm), env if isinstance(env, str) else getattr(getattr(env, "spec", None), "id", "")
    first = tuned.settings_for(named, place or "") if given.get("tuned", True) else {}
    values = {**first, **{_dotted(name): value for name, value in given.items()}}
    # what is no plain value is set after loading, which knows JSON alone
    plain = {name: value for name, value in values.items() if name not in ("env", "algorithm")}
    return replace(load(ControlConfig, flags=plain), algorithm=algorithm, env=env)


def _dotted(name: str) -> str:
    """A setting's place: learning_rate, net_arch -> network.net_arch. Raises `UserError` for an unknown one."""
    blank = to_dict(ControlConfig())
    places = {key: key for key in blank}
    for section in ("network", "dqn", "trpo", "run"):
        places |= {key: f"{section}.{key}" for key in blank[section]}
        places |= {f"{section}.{key}": f"{section}.{key}" for key in blank[section]}
    if name not in places:
        raise UserError(f"There is no setting {name!r}{nearest(name, places) or '; see the settings page.'}")
    return places[name]


def name_of(algorithm: Any) -> str:
    """The name that tuned settings go by."""
    if isinstance(algorithm, PolicyGradient):
        return algorithm.name
    return str(algorithm.get("preset", "")) if isinstance(algorithm, Mapping) else str(algorithm)


def build(config: ControlConfig, envs: Environments | None = None) -> Method:
    """The method with its environments, fresh weights and optimiser. Raises `UserError` on mistakes of the user."""
    algorithm = resolve(config)
    envs = envs or vector.make(config.env, config.n_envs, config.vectorization, **config.env_kwargs)
    if envs.count != config.n_envs:  # a vector environment was given
        config = replace(config, n_envs=envs.count)
    has_critic = isinstance(algorithm, PolicyGradient) and algorithm.needs_critic
    of_actions = isinstance(algorithm, PolicyGradient) and "action_value" in needs_of(algorithm.psi)
    if of_actions and not is_discrete(envs.distribution):
        raise UserError(
            f"{name_of(algorithm)} values each numbered action and this environment's are continuous; choose a2c or ppo."
        )
    network = ActorCritic(
        envs.size,
        envs.distribution,
        config.network.net_arch,
        config.network.activation,
        config.network.critic,
        config.network.n_critics if has_critic else 0,
        of_actions=of_actions,
    )
    normalizer = Normalizer(envs.size, envs.count, config.gamma, config.normalize_observations, config.normalize_rewards)
    collector = Collector(envs, normalizer)
    optimizer = FlatOptimizer(network.flat, config.optimizer, config.adam_epsilon, config.max_grad_norm)
    if not isinstance(algorithm, PolicyGradient):
        network.towers.initialise(config.run.seed)
        return DQN(config, network, optimizer, collector)
    network.initialise(config.run.seed, config.network.log_std_init)
    kind = TRPO if config.algorithm == "trpo" else OnPolicy
    return kind(config, algorithm, network, optimizer, collector)


def resolve(config: ControlConfig) -> PolicyGradient | str:
    """The policy gradient asked for, with the settings' numbers in its parts; "dqn" is none. Raises `UserError`."""
    if config.algorithm == "dqn":
        return "dqn"
    spec = config.algorithm
    if isinstance(spec, str) and ":" not in spec and spec not in (*names(), *catalog.METHODS):
        raise UserError(f"There is no algorithm {spec!r} for control; expected {', '.join(names())}{nearest(spec, names())}")
    # TRPO's surrogate is its own; psi and the critic's loss are PPO's
    algorithm = control_catalog.resolve("ppo" if spec == "trpo" else spec)
    return control_catalog.adjusted(
        algorithm,
        gamma=config.gamma,
        lam=config.gae_lambda,
        normalize=config.normalize_advantage,
        clip_range=config.clip_range,
        ent_coef=config.ent_coef,
        vf_coef=config.vf_coef,
    )


def judge_for(config: ControlConfig) -> Judge:
    """Evaluation on environments of their own; a vector environment that was given cannot be copied, so none for it."""
    if not isinstance(config.env, str) and not callable(config.env):
        raise UserError("An environment object cannot be copied for evaluation; give its id or a function, or eval_episodes=0.")
    count = min(config.eval_episodes, _EVALUATORS if isinstance(config.env, str) else config.n_envs)
    envs = vector.make(config.env, count, config.vectorization, **config.env_kwargs)
    return Judge(envs, config.eval_episodes, config.deterministic_eval)


def save_policy(folder: Path, method: Method) -> None:
    """What acting needs: weights, settings, and how observations are shown."""
    method.network.save(folder)
    saved = {**_plain(method.config), "normalizer": method.collector.normalizer.state(), "timesteps": method.timesteps}
    (folder / MODEL_CONFIG).write_text(json.dumps(saved, indent=1) + "\n")


def _plain(config: ControlConfig) -> dict[str, Any]:
    named = config.env if isinstance(config.env, str) else getattr(getattr(config.env, "spec", None), "id", None) or ""
    algorithm = config.algorithm.name if isinstance(config.algorithm, PolicyGradient) else config.algorithm
    return to_dict(replace(config, env=named, algorithm=algorithm))


def load_policy(folder: Path, env: Any = None) -> Method:
    """A method with the saved weights, on `env` or the environment it was trained on. Raises `UserError` where there is none."""
    file = folder / MODEL_CONFIG
    if not file.exists():
        raise UserError(f"{folder} holds no policy of control ({MODEL_CONFIG} is missing); give a folder that `save` wrote.")
    saved = json.loads(file.read_text())
    normalizer, timesteps = saved.pop("normalizer"), saved.pop("timesteps")
    config = load(ControlConfig, flags=saved)
    if env is not None:
        config = replace(config, env=env)
    method = build(replace(config, run=Run(seed=config.run.seed, threads=config.run.threads)))
    method.network.load(folder)
    method.collector.normalizer.restore(normalizer)
    method.timesteps = timesteps
    return method


def seeded(seed: int) -> np.random.Generator:
    """Chance for acting."""
    return np.random.Generator(np.random.SFC64(seed))
