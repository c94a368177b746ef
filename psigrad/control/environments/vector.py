"""Vector environments of Gymnasium, with one interface for all modes in which the next episode is started.

When an episode of a vector environment ends, Gymnasium starts the next one in one of three modes: in the following step, which
ignores its action (`NEXT_STEP`, the default since 1.0), in the same step (`SAME_STEP`), or on request only (`DISABLED`).
Here all three give the same `VectorStep`: the outcome of the action, the end of the episode, and whether the action was used.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import TimeLimit

from psigrad import extras
from psigrad.control.environments import spaces as meanings
from psigrad.control.networks.distributions import Array
from psigrad.errors import UserError, kind_of, nearest
from psigrad.importing import imported_callable, imported_module
from psigrad.processes.workers.child import reason_for

RETURNS = "Gymnasium's reset returns (observation, info), and its step (observation, reward, terminated, truncated, info)."
# An evaluated episode without any other limit is cut after this many steps, since it might never end.
# Atari games end after 27,000 steps.
MOST_STEPS = 30_000
# From this many copies on, one numpy program for all is faster than a Python loop over them.
_WORTH_VECTORISING = 8


class Serial:
    """A vector environment that steps its environments in a loop, and restarts each in the step that ends its episode.

    It is for a few cheap environments, and its mode is `SAME_STEP`. Gymnasium's `SyncVectorEnv` takes twice the time, because it
    copies observations and collects infos.
    """

    def __init__(self, envs: Sequence[gym.Env[Any, Any]]) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        """Start an episode in each environment, and return (observations, infos), as `VectorEnv.reset` does."""
        seeds = [None] * self.num_envs if seed is None else range(seed, seed + self.num_envs)
        return self._stack([_begun(env.reset(seed=s)) for env, s in zip(self.envs, seeds, strict=True)]), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Act in each environment, and return (observations, rewards, terminated, truncated, infos), as `VectorEnv.step` does."""
        n = self.num_envs
        reward, terminated, truncated = np.empty(n, np.float32), np.empty(n, bool), np.empty(n, bool)
        seen, finals = [], {}
        for i, env in enumerate(self.envs):
            observation, reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if terminated[i] or truncated[i]:
                # Some simulators return the same array each time, which their reset overwrites.
                finals[i] = copy.deepcopy(observation)
                observation = _begun(env.reset())
            seen.append(observation)
        return self._stack(seen), reward, terminated, truncated, {"final_obs": finals}

    def _stack(self, seen: Sequence[Any]) -> Any:
        return meanings.stack(self.single_observation_space, seen)

    def render(self) -> tuple[Any, ...]:
        """Return the frame of each environment, as `VectorEnv.render` does."""
        return tuple(env.render() for env in self.envs)

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


class Absent(gym.Env[Any, Any]):
    """A stand-in for the environment of a policy that was loaded without one.

    It has the spaces, but `reset` raises `UserError`.
    """

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], reason: str) -> None:
        self.observation_space, self.action_space, self.reason = observation_space, action_space, reason

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Raise `UserError`: there is no environment to play in."""
        raise UserError(
            f"This policy was loaded without an environment: {self.reason.rstrip('.')}. Call agent.set_env(env), or load it "
            "again with env=…."
        )


def _begun(returned: Any) -> Any:
    """Return the observation in the result of an environment's `reset`. Raises `UserError` if that is not (observation, info).

    The type is checked, since an array of two numbers would unpack as well.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UserError(f"The environment's reset returned a value of type {type(returned).__name__}. {RETURNS}")
    return returned[0]


@dataclass(frozen=True, eq=False)
class VectorStep:
    """The result of one step of E environments."""

    observation: Array
    """[E, D] the observation for the policy's next action: that of a new episode if one has started."""
    reward: Array
    """[E] float32."""
    terminated: Array
    """[E] bool: the episode ended in a terminal state, after which the value is 0."""
    truncated: Array
    """[E] bool: the episode was cut, for example by a time limit, so the last observation still has value."""
    chosen: Array
    """[E] bool: False if the step only started a new episode and ignored the action."""
    last: dict[int, Array]
    """The final observation [D] of each environment whose episode ended, if `observation` is already that of the next one."""


class Environments:
    """E copies of an environment behind one interface: flat observations [E, D], and actions as the policy samples them.

    Observations are float32, or uint8 for an image of bytes.
    """

    def __init__(self, vector: VectorEnv[Any, Any, Any] | Serial) -> None:
        self._env = vector
        self.count: int = vector.num_envs
        self.mode = _mode(vector)
        self.distribution, self.to_env = meanings.actions(vector.single_action_space)
        self._space = vector.single_observation_space
        self.size, self._flatten = meanings.observations(self._space)
        self.image_at, self.image = meanings.picture(self._space)
        # Bytes stay bytes, so that a replay buffer takes a quarter of the memory.
        self.dtype = np.uint8 if (seen := meanings.image(self._space)) and seen.bytes else np.float32
        self._resting = np.zeros(self.count, bool)
        self.cut_at = 0
        """The number of steps after which psigrad, not the environment, cuts an episode; 0: never."""
        if isinstance(vector, VectorEnv) and type(vector.unwrapped.action_space) is spaces.MultiDiscrete:
            vector.unwrapped.action_space = _Unchecked(vector.unwrapped.action_space)

    def reset(self, seed: int) -> Array:
        """Start new episodes in all environments and return the observations [E, D]."""
        self._resting[:] = False
        # Gymnasium gives environment i the seed `seed + i`.
        try:
            raw = self._env.reset(seed=seed % 2**31)[0]
        except Exception as error:
            raise self._fault("reset", error) from error
        return self._flat(raw)

    def step(self, actions: Array) -> VectorStep:
        """Take the policy's actions in the environments, and return the outcome."""
        try:
            raw, reward, terminated, truncated, infos = self._env.step(self.to_env(actions))
        except Exception as error:
            raise self._fault("step", error) from error
        observation, chosen = self._flat(raw), ~self._resting
        ended = terminated | truncated
        last: dict[int, Array] = {}
        if self.mode is AutoresetMode.NEXT_STEP:
            self._resting = ended
        elif ended.any():
            where = ended.nonzero()[0]
            if self.mode is AutoresetMode.SAME_STEP:
                finals = self._flatten(meanings.stack(self._space, [infos["final_obs"][i] for i in where]))
                last = dict(zip(where.tolist(), finals, strict=True))
            else:
                last = {int(i): observation[i].copy() for i in where}
                fresh = self._flatten(self._env.reset(options={"reset_mask": ended})[0])
                observation = np.where(ended[:, None], fresh, observation)
        return VectorStep(observation, np.asarray(reward, np.float32), terminated, truncated, chosen, last)

    def flat(self, observation: Any) -> tuple[Array, bool]:
        """Return (the flat observation [1, D], True) for one observation, or (flat observations [E, D], False) for a batch.

        Raises `UserError` for anything else.
        """
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            raise UserError("The observation is a tuple (observation, info), as `reset` returns it; give only its first part.")
        batch, single = meanings.batch_of(self._space, observation)
        try:
            return self._flatten(batch), single
        except (IndexError, ValueError) as error:
            raise UserError(
                f"The observation is {observation!r}; expected a value in the observation_space {self._space}."
            ) from error

    def _flat(self, raw: Any) -> Array:
        if self._space.shape is not None and np.shape(raw)[1:] != self._space.shape:
            raise UserError(
                f"The environment gave an observation of shape {np.shape(raw)[1:]}, but its observation_space has the shape "
                f"{self._space.shape}; change one of the two."
            )
        try:
            return self._flatten(raw)
        except IndexError as error:
            raise UserError(
                f"The environment gave an observation outside its observation_space {self._space}; change one of the two."
            ) from error

    def _fault(self, did: str, error: Exception) -> UserError:
        if isinstance(error, UserError):
            return error
        hint = f" {RETURNS}" if "unpack" in str(error) else ""
        return UserError(f"The environment's {reason_for(did, error)}. Fix the environment.{hint}")

    @property
    def env(self) -> VectorEnv[Any, Any, Any] | Serial:
        """The underlying environments."""
        return self._env

    @property
    def ends(self) -> bool:
        """True if every episode is known to end, by `cut_at` or by a limit that the environment declares."""
        return self.cut_at > 0 or _has_limit(self._env.envs[0] if isinstance(self._env, Serial) else self._env)

    @property
    def absent(self) -> bool:
        """True if these are only the spaces of a policy that was loaded without an environment."""
        return isinstance(self._env, Serial) and isinstance(self._env.envs[0], Absent)

    @property
    def spaces(self) -> meanings.Spaces:
        """The spaces of one observation and of one action."""
        return self._space, self._env.single_action_space

    def close(self) -> None:
        """Close the environments and release their resources."""
        self._env.close()


class _Unchecked(spaces.MultiDiscrete):
    """An action space that accepts any action, since Gymnasium's check of each action took a twentieth of A2C's time."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        super().__init__(space.nvec, dtype=space.dtype, start=space.start)

    def contains(self, x: Any) -> bool:
        """Return True for any action."""
        return True


# Gymnasium's notation "module:Name-v0", for which it imports the module, which registers the name.
_VERSION = re.compile(r"-v\d+$")
Made = str | gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | Serial | Callable[[], gym.Env[Any, Any]]


def single(env: str, wrappers: Sequence[str] = (), **kwargs: Any) -> gym.Env[Any, Any]:
    """Return one environment of a registered id with these wrappers, of which the first one is innermost."""
    made: gym.Env[Any, Any] = gym.make(register(env), **kwargs)
    for name in wrappers:
        made = imported_callable(name, "wrapper")(made)
        if not isinstance(made, gym.Env):
            raise UserError(f"The wrapper {name!r} gave {kind_of(made)}; expected an environment of Gymnasium.")
    return made


def make(
    env: Made, count: int = 1, vectorization: str = "auto", wrappers: Sequence[str] = (), limit: int | None = None, **kwargs: Any
) -> Environments:
    """Return `count` copies of an environment as `Environments`.

    `env` is a registered id, "file.py:Class" or "module:Class", a function that makes one, a single environment, or a vector
    environment. `vectorization` is "auto", "serial", or one of Gymnasium's: "sync", "async", "vector_entry_point". `wrappers`
    need an id. `limit` is for evaluations: episodes are cut after this many steps; 0: after `MOST_STEPS` if the environment
    declares no limit. Raises `UserError` for an unknown id, a missing package, or spaces that no policy here can handle.
    """
    if wrappers and not isinstance(env, str):
        raise UserError(f"The wrappers {list(wrappers)} need an environment's id; wrap your environment object yourself.")
    if isinstance(env, Serial) and limit is not None:
        return _serial(env.envs, limit)
    if isinstance(env, VectorEnv | Serial):
        return Environments(env)
    if isinstance(env, gym.Env):
        if count != 1:
            raise UserError(
                f"One environment object was given, but n_envs is {count}; give a function that makes one, or n_envs=1."
            )
        return _serial([env], limit)
    if callable(env):
        return _serial([_call(env) for _ in range(count)], limit)
    if not isinstance(env, str):
        raise UserError(
            f"The environment is of type {type(env).__name__}; expected an id such as CartPole-v1, an environment of Gymnasium, "
            "a vector environment, or a function that makes one."
        )
    given, env = env, register(env)
    try:
        spec = spec_of(env)
        _check_keywords(given, spec, kwargs)
        if vectorization == "auto":
            whole = spec.vector_entry_point is not None and count >= _WORTH_VECTORISING and not (wrappers or limit)
            vectorization = "vector_entry_point" if whole else "serial"
        if vectorization == "serial":
            return _serial([single(env, wrappers, **kwargs) for _ in range(count)], limit)
        if wrappers and vectorization == "vector_entry_point":
            raise UserError("The environment's vectorised version takes no wrappers; set vectorization to serial, sync or async.")
        around = [imported_callable(name, "wrapper") for name in wrappers]
        steps = 0 if vectorization == "vector_entry_point" else _cut_at(limit, spec)
        around += [partial(TimeLimit, max_episode_steps=steps)] if steps else []
        made = Environments(gym.make_vec(env, count, vectorization_mode=vectorization, wrappers=around or None, **kwargs))
        made.cut_at = steps
        return made
    except gym.error.DependencyNotInstalled as error:
        raise UserError(
            f"{given} needs a package that is not installed ({error}). Run `{extras.install_command('control')}`."
        ) from error
    except (gym.error.Error, ModuleNotFoundError, TypeError) as error:
        message = str(error).strip().rstrip(".")
        raise UserError(
            f"The environment {given!r} cannot be made: {message}; give an id that Gymnasium knows, such as CartPole-v1, or "
            "module:Name-v0 if a module registers it."
        ) from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{reason_for(f'The environment {given!r}', error)} when it was made. Fix the environment.") from error


def _serial(envs: Sequence[gym.Env[Any, Any]], limit: int | None) -> Environments:
    steps = _cut_at(limit, getattr(envs[0], "spec", None))
    made = Environments(Serial([TimeLimit(env, steps) for env in envs] if steps else envs))
    made.cut_at = steps
    return made


def _cut_at(limit: int | None, spec: gym.envs.registration.EnvSpec | None) -> int:
    """Return the number of steps after which `make` cuts an episode; 0: never."""
    return 0 if limit is None else limit or (0 if _declares(spec) else MOST_STEPS)


def _has_limit(env: Any) -> bool:
    return _declares(getattr(env, "spec", None))


def _declares(spec: gym.envs.registration.EnvSpec | None) -> bool:
    return spec is not None and (spec.max_episode_steps or 0) > 0


def _call(make: Callable[[], Any]) -> gym.Env[Any, Any]:
    """Call the user's function or class and return its environment. Raises `UserError` if it fails or returns something else."""
    try:
        made = make()
    except Exception as error:
        name = getattr(make, "__name__", type(make).__name__)
        raise UserError(f"{reason_for(f'The environment {name}', error)} when it was made. Fix the environment.") from error
    if not isinstance(made, gym.Env):
        raise UserError(
            f"The function that makes the environment returned a value of type {type(made).__name__}; return an environment of "
            "Gymnasium."
        )
    return made


def _check_keywords(given: str, spec: gym.envs.registration.EnvSpec, kwargs: Mapping[str, Any]) -> None:
    """Raise `UserError` for an argument that the environment's class or function does not have."""
    entry = spec.entry_point
    made = gym.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    try:
        parameters = inspect.signature(made).parameters if callable(made) else {}
    except ValueError:  # code in C may have no signature
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = {*parameters, *inspect.signature(gym.make).parameters, "render_mode"}
    for name in kwargs:
        if name not in known:
            own = ", ".join(parameters) or "none"
            form = "; write them as {name: value}, with a space after the colon" if ":" in name else nearest(name, parameters)
            raise UserError(f"env_kwargs has {name!r}, which {given} does not take; it takes {own}{form or '.'}")


def spec_of(env: str) -> gym.envs.registration.EnvSpec:
    """Return the spec of a registered id. "module:id" first imports the module that registers it, as `gymnasium.make` does."""
    module, _, name = register(env).rpartition(":")
    if module:  # `gymnasium.make` would not find a module in the current folder
        imported_module(module, "environment's module")
    return gym.spec(name)


def register(env: str) -> str:
    """Return the id of an environment. A user's class, "file.py:Class" or "module:Class", is registered first."""
    if ":" not in env or _VERSION.search(env):
        return env
    known = f"psigrad/{env.rpartition(':')[2]}-v0"
    made = imported_callable(env, "environment")
    if known not in gym.registry or gym.registry[known].entry_point is not made:
        gym.registry.pop(known, None)
        gym.register(known, made)
    return known


def source(env: Made) -> Any:
    """Return the user's class or function that makes an environment, so that a run can pin its code."""
    if isinstance(env, str):
        entry = spec_of(env).entry_point
        return gym.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return type(env.unwrapped) if isinstance(env, gym.Env) else env


def check_spaces(given: Environments, held: Environments) -> None:
    """Raise `UserError` if the spaces of the environments `given` differ from those of `held`, on which a policy was trained."""
    if given.spaces != held.spaces:
        found, wanted = (f"observations {o} and actions {a}" for o, a in (given.spaces, held.spaces))
        raise UserError(f"The environment has {found}; expected {wanted}, which this policy was made for.")


def _mode(vector: Any) -> AutoresetMode:
    mode = vector.metadata.get("autoreset_mode")
    try:
        # Some wrappers of Gymnasium give the mode as a string instead of the enum.
        return AutoresetMode(mode) if isinstance(mode, str) else AutoresetMode(mode.value)
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"The vector environment's metadata has autoreset_mode={mode!r}; set it to a value of AutoresetMode, since "
            "without it psigrad cannot know which steps the policy chose."
        ) from error
