"""Gymnasium environments stepped together, with every way of starting an episode again told apart.

When an episode of a vector environment ends, Gymnasium may start the next one in the following step, whose action counts for
nothing (`NEXT_STEP`, its default since 1.0), in the same step (`SAME_STEP`), or not at all until it is told to (`DISABLED`).
Here all three give the same `Step`: what followed the action, whether the episode ended and how, and whether the policy chose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from psigrad.control.convolutions import Image
from psigrad.control.distributions import Array, Categorical, Distribution, Normal
from psigrad.errors import UserError
from psigrad.importing import imported_callable, imported_module
from psigrad.workers.child import reason_for

# From this many copies on, one numpy program for all of them beats a Python loop over them.
_WORTH_VECTORISING = 8


@dataclass(frozen=True, eq=False)
class VectorStep:
    """What one step of E environments gave."""

    observation: Array
    """[E, D] what the policy sees next: of a new episode, where one has begun."""
    reward: Array
    """[E] float32."""
    terminated: Array
    """[E] bool: the episode ended for good; what follows is worth 0."""
    truncated: Array
    """[E] bool: the episode was cut, by a time limit say; what would have followed is worth V of the last observation."""
    chosen: Array
    """[E] bool: False where the step only began a new episode, whatever the action."""
    last: dict[int, Array]
    """The final observation [D] of each environment whose episode ended, where `observation` already shows the next one."""


class Environments:
    """E copies of an environment behind one interface: flat observations [E, D] in, float32 or the uint8 of an image, and actions
    of the distribution out.
    """

    def __init__(self, vector: VectorEnv[Any, Any, Any] | Serial) -> None:
        self._env = vector
        self.count: int = vector.num_envs
        self.mode = _mode(vector)
        self.distribution, self.to_env = _actions(vector.single_action_space)
        self._space = vector.single_observation_space
        self.size, self._flatten = _observations(self._space)
        self.image = _image(self._space)
        # bytes stay bytes: a replay buffer of them takes a quarter of the room
        self.dtype = np.uint8 if self.image and self.image.bytes else np.float32
        self._resting = np.zeros(self.count, bool)
        if isinstance(vector, VectorEnv) and type(vector.unwrapped.action_space) is spaces.MultiDiscrete:
            vector.unwrapped.action_space = _Unchecked(vector.unwrapped.action_space)

    def reset(self, seed: int) -> Array:
        """New episodes everywhere; the observations [E, D]."""
        self._resting[:] = False
        # Gymnasium gives environment i the seed `seed + i`
        try:
            raw = self._env.reset(seed=seed % 2**31)[0]
        except Exception as error:
            raise self._fault("reset", error) from error
        return self._flat(raw)

    def step(self, actions: Array) -> VectorStep:
        """Act in every environment."""
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
                finals = self._flatten(np.stack([infos["final_obs"][i] for i in where]))
                last = dict(zip(where.tolist(), finals, strict=True))
            else:
                last = {int(i): observation[i].copy() for i in where}
                fresh = self._flatten(self._env.reset(options={"reset_mask": ended})[0])
                observation = np.where(ended[:, None], fresh, observation)
        return VectorStep(observation, np.asarray(reward, np.float32), terminated, truncated, chosen, last)

    def flat(self, observation: Any) -> tuple[Array, bool]:
        """[E, D] of one observation (then True) or a batch of them, as the environment gives them. Raises `UserError` for
        others.
        """
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            raise UserError("The observation is a tuple (observation, info), as `reset` returns it; give its first part alone.")
        given, shape = np.asarray(observation), self._space.shape or ()
        if given.shape == shape:
            return self._flatten(given[None]), True
        if given.shape[1:] == shape and given.ndim == len(shape) + 1:
            return self._flatten(given), False
        raise UserError(f"The observation has shape {given.shape}; expected {shape}, or a batch of such.")

    def _flat(self, raw: Any) -> Array:
        if np.shape(raw)[1:] != self._space.shape:
            raise UserError(
                f"The environment gave an observation of shape {np.shape(raw)[1:]}, and its observation_space says "
                f"{self._space.shape}; make them agree."
            )
        return self._flatten(raw)

    def _fault(self, did: str, error: Exception) -> UserError:
        if isinstance(error, UserError):
            return error
        hint = f" {_RETURNS}" if "unpack" in str(error) else ""
        return UserError(f"{reason_for(f'The environment, in {did},', error)}. Mend the environment.{hint}")

    @property
    def env(self) -> VectorEnv[Any, Any, Any] | Serial:
        """The environments themselves."""
        return self._env

    @property
    def spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Of one observation and of one action."""
        return self._space, self._env.single_action_space

    def close(self) -> None:
        """Give back what the environments hold."""
        self._env.close()


class _Unchecked(spaces.MultiDiscrete):
    """A space that does not check the policy's own actions: Gymnasium's check took a twentieth of A2C's time."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        super().__init__(space.nvec, dtype=space.dtype, start=space.start)

    def contains(self, x: Any) -> bool:
        """Always True."""
        return True


class Serial:
    """Environments in a plain loop, each begun again in the step that ends it (`SAME_STEP`).

    For a handful of cheap environments: Gymnasium's own `SyncVectorEnv` takes twice the time over copies and infos.
    """

    def __init__(self, envs: Sequence[gym.Env[Any, Any]]) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        """As `VectorEnv.reset`."""
        seeds = [None] * self.num_envs if seed is None else range(seed, seed + self.num_envs)
        return np.stack([_begun(env.reset(seed=s)) for env, s in zip(self.envs, seeds, strict=True)]), {}

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """As `VectorEnv.step`."""
        n = self.num_envs
        reward, terminated, truncated = np.empty(n, np.float32), np.empty(n, bool), np.empty(n, bool)
        seen, finals = [], {}
        for i, env in enumerate(self.envs):
            observation, reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if terminated[i] or truncated[i]:
                finals[i] = observation
                observation = _begun(env.reset())
            seen.append(observation)
        return np.stack(seen), reward, terminated, truncated, {"final_obs": finals}

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


def _begun(returned: Any) -> Any:
    """The observation that `reset` returned. An array of two numbers would unpack as well, so the type is asked."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UserError(f"The environment's reset returned a value of type {type(returned).__name__}. {_RETURNS}")
    return returned[0]


_RETURNS = "Gymnasium's reset returns (observation, info), and its step (observation, reward, terminated, truncated, info)."
# Gymnasium's own "module:Name-v0": it imports the module, which registers the name.
_VERSION = re.compile(r"-v\d+$")
Made = str | gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | Serial | Callable[[], gym.Env[Any, Any]]


def single(env: str, wrappers: Sequence[str] = (), **kwargs: Any) -> gym.Env[Any, Any]:
    """One environment of a registered id in its wrappers, the first one innermost."""
    made: gym.Env[Any, Any] = gym.make(registered(env), **kwargs)
    for name in wrappers:
        made = imported_callable(name, "wrapper")(made)
        if not isinstance(made, gym.Env):
            raise UserError(f"The wrapper {name!r} gave a {type(made).__name__}; expected an environment of Gymnasium.")
    return made


def make(env: Made, count: int = 1, vectorization: str = "auto", wrappers: Sequence[str] = (), **kwargs: Any) -> Environments:
    """`count` copies of an environment: a registered id, "file.py:Class" or "module:Class", a function that makes one, a single
    environment, or a vector environment.

    `vectorization` is "auto", "serial", or one of Gymnasium's: "sync", "async", "vector_entry_point". `wrappers` are for an id.
    Raises `UserError` for an unknown id, a package that is missing, or spaces that no policy here can handle.
    """
    if wrappers and not isinstance(env, str):
        raise UserError(f"The wrappers {list(wrappers)} are for an environment's id; wrap the one that you give yourself.")
    if isinstance(env, VectorEnv | Serial):
        return Environments(env)
    if isinstance(env, gym.Env):
        if count != 1:
            raise UserError(
                f"One environment object was given and {count} are wanted; give a function that makes one, or n_envs=1."
            )
        return Environments(Serial([env]))
    if callable(env):
        return Environments(Serial([_called(env) for _ in range(count)]))
    if not isinstance(env, str):
        raise UserError(
            f"The environment is of type {type(env).__name__}; expected an id such as CartPole-v1, an environment of Gymnasium, "
            "a vector environment, or a function that makes one."
        )
    given, env = env, registered(env)
    try:
        spec = spec_of(env)
        if vectorization == "auto":
            whole = spec.vector_entry_point is not None and count >= _WORTH_VECTORISING and not wrappers
            vectorization = "vector_entry_point" if whole else "serial"
        if vectorization == "serial":
            return Environments(Serial([single(env, wrappers, **kwargs) for _ in range(count)]))
        if wrappers and vectorization == "vector_entry_point":
            raise UserError("An environment's own vector form takes no wrappers; set vectorization to serial, sync or async.")
        around = [imported_callable(name, "wrapper") for name in wrappers]
        more: dict[str, Any] = {"wrappers": around} if around else {}
        return Environments(gym.make_vec(env, count, vectorization_mode=vectorization, **more, **kwargs))
    except gym.error.DependencyNotInstalled as error:
        raise UserError(
            f"{given} needs a package that is not installed ({error}); run: pip install 'psigrad[control]'"
        ) from error
    except (gym.error.Error, ModuleNotFoundError, TypeError) as error:
        message = str(error).strip().rstrip(".")
        raise UserError(
            f"The environment {given!r} cannot be made: {message}; give an id that Gymnasium knows, as CartPole-v1, or "
            "module:Name-v0 where a module registers it."
        ) from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{reason_for(f'The environment {given!r}', error)} when it was made. Mend the environment.") from error


def _called(make: Callable[[], Any]) -> gym.Env[Any, Any]:
    """The environment that a function or class of the user's makes."""
    try:
        made = make()
    except Exception as error:
        name = getattr(make, "__name__", type(make).__name__)
        raise UserError(f"{reason_for(f'The environment {name}', error)} when it was made. Mend the environment.") from error
    if not isinstance(made, gym.Env):
        raise UserError(
            f"The function of the environment returned a value of type {type(made).__name__}; expected one of Gymnasium's "
            "environments."
        )
    return made


def spec_of(env: str) -> gym.envs.registration.EnvSpec:
    """What is registered under an id; "module:id" imports the module that registers it first, as `gymnasium.make` does."""
    module, _, name = registered(env).rpartition(":")
    if module:  # here and not by Gymnasium alone: a module in the current folder is found too
        imported_module(module, "environment's module")
    return gym.spec(name)


def registered(env: str) -> str:
    """The id of an environment. A class of the user's, "file.py:Class" or "module:Class", is registered under one."""
    if ":" not in env or _VERSION.search(env):
        return env
    known = f"psigrad/{env.rpartition(':')[2]}-v0"
    made = imported_callable(env, "environment")
    if known not in gym.registry or gym.registry[known].entry_point is not made:
        gym.registry.pop(known, None)
        gym.register(known, made)
    return known


def source(env: Made) -> Any:
    """The class or function behind an environment, whose code a run pins."""
    if isinstance(env, str):
        entry = spec_of(env).entry_point
        return gym.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return type(env.unwrapped) if isinstance(env, gym.Env) else env


def check_spaces(given: Environments, held: Environments) -> None:
    """Raises `UserError` where the spaces of the environments given are not those that a policy was made for."""
    if given.spaces != held.spaces:
        found, wanted = (f"observations {o} and actions {a}" for o, a in (given.spaces, held.spaces))
        raise UserError(f"The environment has {found}; expected {wanted}, which this policy was made for.")


def _mode(vector: Any) -> AutoresetMode:
    mode = vector.metadata.get("autoreset_mode")
    try:
        # wrappers of Gymnasium's own may leave a plain string
        return AutoresetMode(mode) if isinstance(mode, str) else AutoresetMode(mode.value)
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"The vector environment's metadata has autoreset_mode={mode!r}; expected one of Gymnasium's AutoresetMode: without "
            "it psigrad cannot tell which steps the policy chose."
        ) from error


def _actions(space: spaces.Space[Any]) -> tuple[Distribution, Callable[[Array], Array]]:
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return Categorical(int(space.n)), (lambda a: a + start) if start else (lambda a: a)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high, shape = space.low.reshape(-1), space.high.reshape(-1), space.shape
        return Normal(len(low)), lambda a: np.clip(a, low, high).reshape(-1, *shape).astype(space.dtype, copy=False)
    raise UserError(f"The action space is {space}; expected Discrete or a Box of real numbers; wrap the environment.")


def _observations(space: spaces.Space[Any]) -> tuple[int, Callable[[Array], Array]]:
    if isinstance(space, spaces.Discrete):
        eye, start = np.eye(int(space.n), dtype=np.float32), int(space.start)
        return int(space.n), lambda o: eye[np.asarray(o) - start]
    if isinstance(space, spaces.Box) and len(space.shape) <= 3:
        size, image = int(np.prod(space.shape)), _image(space)
        dtype = np.uint8 if image is not None and image.bytes else np.float32
        return size, lambda o: np.ascontiguousarray(o, dtype=dtype).reshape(len(o), size)
    raise UserError(
        f"The observation space is {space}; expected Discrete, a Box of numbers, or one of images (three dimensions); wrap the "
        "environment, with gymnasium.wrappers.FlattenObservation or minigrid.wrappers:ImgObsWrapper for example (wrappers=…)."
    )


def _image(space: spaces.Space[Any]) -> Image | None:
    """The image that an observation is: a Box of three dimensions. The least of the outer two is that of the channels."""
    if not (isinstance(space, spaces.Box) and len(space.shape) == 3):
        return None
    last = space.shape[2] <= space.shape[0]
    channels, height, width = (space.shape[2], *space.shape[:2]) if last else space.shape
    return Image(channels, height, width, last, space.dtype == np.uint8)
