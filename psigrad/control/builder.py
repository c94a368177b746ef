"""Building a trainer from settings (environments, network and optimiser), and saving and loading policies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from psigrad import redaction
from psigrad.config import Optim, Run
from psigrad.config.fields import unread_by
from psigrad.config.load import load, to_dict
from psigrad.config.nested import flatten
from psigrad.control import hyperparameters, policies
from psigrad.control.environments import vector
from psigrad.control.environments.collector import Collector, Normalizer
from psigrad.control.environments.spaces import from_json, to_json
from psigrad.control.environments.vector import Absent, Environments
from psigrad.control.methods import presets
from psigrad.control.methods.dqn import DQNTrainer
from psigrad.control.methods.on_policy import OnPolicyTrainer
from psigrad.control.methods.trainer import Actor, Trainer
from psigrad.control.methods.trpo import TRPOTrainer
from psigrad.control.networks.actor_critic import ActorCritic
from psigrad.control.networks.distributions import Categorical
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError, nearest
from psigrad.objective import PolicyGradient, catalog
from psigrad.objective.parts.advantage import needs_of
from psigrad.optim import Optimizer
from psigrad.optim.flat_rules import Adam, RMSprop

MODEL_CONFIG = "config.json"


class OwnTrainer(NamedTuple):
    """The trainer of an algorithm that is not just a policy gradient, and the preset with its psi and critic's loss, if any."""

    make: Callable[..., Trainer]
    preset: str | None


TRAINERS = {"trpo": OwnTrainer(TRPOTrainer, "ppo"), "dqn": OwnTrainer(DQNTrainer, None)}


def names() -> list[str]:
    """Return the names of control's algorithms: the presets of policy gradients, and the names in `TRAINERS`."""
    return [*presets.names(), *TRAINERS]


def settings(algorithm: Any, env: Any, given: Mapping[str, Any] | None = None) -> ControlConfig:
    """Return the settings of an algorithm on an environment: the tuned ones, overridden by `given` (dotted or plain names)."""
    given = dict(given or {})
    named, place = name_of(algorithm), env if isinstance(env, str) else getattr(getattr(env, "spec", None), "id", "")
    first = hyperparameters.settings_for(named, place or "") if given.get("tuned", True) else {}
    if isinstance(env, gym.Env) and "n_envs" not in given:
        first = hyperparameters.one_copy(first)
    values = {**first, **{_locate(name): value for name, value in given.items()}}
    # The environment and the algorithm may be objects, which `load` cannot handle, so they are set afterwards.
    plain = {name: value for name, value in values.items() if name not in ("env", "algorithm")}
    return replace(load(ControlConfig, flags=plain), algorithm=algorithm, env=env)


def _locate(name: str) -> str:
    """Return the dotted name of a setting: "net_arch" -> "network.net_arch". Raises `UserError` for an unknown one."""
    blank = to_dict(ControlConfig())
    places = {key: key for key in blank}
    for section in ("network", "dqn", "trpo", "run"):
        places |= {key: f"{section}.{key}" for key in blank[section]}
        places |= {f"{section}.{key}": f"{section}.{key}" for key in blank[section]}
    if name not in places:
        raise UserError(f"There is no setting {name!r}{nearest(name, places) or '; see the settings page.'}")
    return places[name]


def name_of(algorithm: Any) -> str:
    """Return the name of an algorithm in the tables of tuned settings."""
    if isinstance(algorithm, PolicyGradient):
        return algorithm.name
    return str(algorithm.get("preset", algorithm.get("name", ""))) if isinstance(algorithm, Mapping) else str(algorithm)


def build(config: ControlConfig, envs: Environments | None = None, like: str | None = None) -> Trainer:
    """Return a trainer with its environments, initial weights and optimiser.

    If the method is unknown but `like` names a preset with the same network, return an `Actor`, which can only act. Raises
    `UserError` on invalid settings or data.
    """
    unknown = ""
    try:
        algorithm = resolve(config)
    except ValueError as error:
        if like is None:
            raise
        algorithm, unknown = presets.resolve(like), str(error)
    _refuse_unread(config)
    envs = envs or vector.make(config.env, config.n_envs, config.vectorization, config.wrappers, **config.env_kwargs)
    if envs.count != config.n_envs:  # a vector environment was given
        config = replace(config, n_envs=envs.count)
    if any(width < 1 for width in config.network.net_arch):
        raise UserError(f"net_arch is {list(config.network.net_arch)}; expected widths of 1 or more.")
    has_critic = algorithm is not None and algorithm.needs_critic
    of_actions = algorithm is not None and "action_value" in needs_of(algorithm.psi)
    if of_actions and not isinstance(envs.distribution, Categorical):
        raise UserError(
            f"{name_of(algorithm)} needs discrete actions, one at a time, and this environment's are continuous or several at "
            "once; choose a2c or ppo."
        )
    network = ActorCritic(
        envs.size,
        envs.distribution,
        config.network.net_arch,
        config.network.activation,
        config.network.critic,
        config.network.n_critics if has_critic else 0,
        of_actions=of_actions,
        image=envs.image,
        at=envs.image_at,
        cnn=config.network.cnn,
    )
    normalizer = Normalizer(envs.size, envs.count, config.gamma, config.normalize_observations, config.normalize_rewards)
    collector = Collector(envs, normalizer)
    rule = Adam(config.adam_epsilon) if config.optimizer == "adam" else RMSprop(config.adam_epsilon)
    optimizer = Optimizer({"flat": network.flat}, Optim(max_grad_norm=config.max_grad_norm), rule=rule)
    if unknown:
        return Actor(unknown, config, network, optimizer, collector)
    make: Callable[..., Trainer] = TRAINERS[config.algorithm].make if has_own_trainer(config.algorithm) else OnPolicyTrainer
    if algorithm is None:
        network.towers.initialise(config.run.seed)
        return make(config, network, optimizer, collector)
    network.initialise(config.run.seed, config.network.log_std_init)
    return make(config, algorithm, network, optimizer, collector)


def _refuse_unread(config: ControlConfig) -> None:
    """Raise `UserError` for a setting that differs from its default and that the algorithm does not read.

    `CnnPolicy` sets how its critic shares layers, also for algorithms without a critic.
    """
    given, usual = (flatten(to_dict(one)) for one in (config, ControlConfig()))
    images = policies.SETTINGS[policies.CNN]
    of_policy = images if all(given[name] in (value, [*value]) for name, value in images.items()) else {}
    for name in sorted(unread_by(ControlConfig, name_of(config.algorithm)) - of_policy.keys()):
        if given[name] != usual[name]:
            raise UserError(f"{name} is {given[name]}, but {name_of(config.algorithm)} does not read it; remove it.")


def has_own_trainer(algorithm: Any) -> bool:
    """Return True if this is the name of an algorithm in `TRAINERS`."""
    return isinstance(algorithm, str) and algorithm in TRAINERS


def resolve(config: ControlConfig) -> PolicyGradient | None:
    """Return the policy gradient that the settings define, with numbers such as gamma in its parts; None for DQN.

    Raises `UserError` for an unknown algorithm.
    """
    spec = config.algorithm
    if has_own_trainer(spec):
        spec = TRAINERS[spec].preset
    if spec is None:
        return None
    if isinstance(spec, str) and ":" not in spec and spec not in (*names(), *catalog.METHODS):
        if advice := policies.elsewhere(spec):
            raise UserError(f"There is no algorithm {spec!r} for control: {advice}.")
        raise UserError(f"There is no algorithm {spec!r} for control; expected {', '.join(names())}{nearest(spec, names())}")
    return presets.adjust(presets.resolve(spec), config)


def save_policy(folder: Path, trainer: Trainer) -> None:
    """Save all that the policy needs to act, as files of a folder: weights, settings, observation statistics, and spaces."""
    trainer.network.save(folder)
    envs, normalizer = trainer.collector.envs, trainer.collector.normalizer
    saved = {**_plain(trainer.config), "normalizer": normalizer.state(), "timesteps": trainer.timesteps}
    saved["spaces"] = [to_json(space) for space in envs.spaces]
    of_states = "a2c" if trainer.network.n_critics else "reinforce_total_return"
    saved["network_of"] = "q_actor_critic" if trainer.network.of_actions else of_states
    (folder / MODEL_CONFIG).write_text(json.dumps(saved, indent=1) + "\n")


def _plain(config: ControlConfig) -> dict[str, Any]:
    named = config.env if isinstance(config.env, str) else getattr(getattr(config.env, "spec", None), "id", None) or ""
    return dict(redaction.clear(to_dict(replace(config, env=named, algorithm=_write(config.algorithm)))))


def _write(method: Any) -> Any:
    """Return a method in a form that JSON can represent and that loads as the same method: its name, or its parts' names.

    If a custom part has no importable name, return {"name": …} with the method's name, which does not load as a method.
    """
    parts = to_dict(replace(ControlConfig(), algorithm=method))["algorithm"]
    if parts == method:
        return method
    if isinstance(method, PolicyGradient):
        del parts["part"]
    for form in (name_of(method), parts):
        with suppress(ValueError, TypeError):
            if presets.resolve(json.loads(json.dumps(form))) == presets.resolve(method):
                return form
    return {"name": name_of(method)}


def load_policy(folder: Path, env: Any = None, algorithm: Any = None) -> Trainer:
    """Return a trainer with a saved policy's weights, on `env` or the environment that the policy was trained on.

    If that environment cannot be made, its place is taken by its spaces alone. The method is `algorithm` or the saved one. If the
    saved one cannot be loaded, the trainer can only act. Raises `UserError` if the folder has no policy.
    """
    saved = _read_saved(folder)
    normalizer, timesteps, kept = saved.pop("normalizer"), saved.pop("timesteps"), saved.pop("spaces", None)
    like = saved.pop("network_of", None)
    config, envs = load(ControlConfig, flags=saved), None
    if algorithm is not None:
        config, like = replace(config, algorithm=algorithm), None
    if env is not None:
        config = replace(config, env=env, n_envs=1 if isinstance(env, gym.Env) else config.n_envs)
    else:
        config, envs = _make_own_environments(folder, config, kept)
    trainer = build(replace(config, run=Run(seed=config.run.seed, threads=config.run.threads)), envs, like)
    trainer.network.load(folder)
    if isinstance(trainer, DQNTrainer):
        trainer.target.copy_(trainer.network.flat.detach())
    trainer.collector.normalizer.restore(normalizer)
    trainer.timesteps = timesteps
    return trainer


def _make_own_environments(folder: Path, config: ControlConfig, kept: Any) -> tuple[ControlConfig, Environments]:
    """Return (settings, environments), with new copies of the environment that a policy was trained on.

    If it cannot be made, return `Absent` environments with the saved spaces `kept`.
    """
    try:
        if not config.env:
            raise UserError(f"{folder} was trained on an environment without an id; load the policy with env=….")
        return config, vector.make(config.env, config.n_envs, config.vectorization, config.wrappers, **config.env_kwargs)
    except UserError as error:
        if kept is None:
            raise
        reason = str(error) if config.env else "the saved environment has no id"
        observation_space, action_space = map(from_json, kept)
        absent = partial(Absent, observation_space, action_space, reason)
        return replace(config, env=absent), vector.make(absent, config.n_envs)


def _read_saved(folder: Path) -> dict[str, Any]:
    """Return the values that `save_policy` wrote. Raises `UserError` if it did not write this folder."""
    file = folder / MODEL_CONFIG
    try:
        saved = json.loads(file.read_text()) if file.exists() else None
    except ValueError:
        saved = None
    if isinstance(saved, dict) and "normalizer" in saved:
        return saved
    found = f"{MODEL_CONFIG} is missing" if not file.exists() else f"its {MODEL_CONFIG} does not describe one"
    inner = folder / "model"
    advice = f"give {inner}" if (inner / MODEL_CONFIG).exists() else "give a folder that `save` wrote, or a run's model folder"
    raise UserError(f"{folder} holds no control policy ({found}); {advice}.")
