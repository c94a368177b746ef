"""Conversion of Gymnasium's spaces: observations to flat numbers, actions to distributions, and spaces to JSON."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from psigrad.control.networks.convolutions import Image
from psigrad.control.networks.distributions import Array, Categorical, Distribution, MultiCategorical, Normal
from psigrad.errors import UserError

Space = spaces.Space[Any]
Spaces = tuple[Space, Space]
"""The spaces of one observation and of one action."""


def actions(space: Space) -> tuple[Distribution, Callable[[Array], Array]]:
    """Return the distribution over a space's actions, and a function from its samples to the environments' actions.

    Raises `UserError` for a space that no distribution covers.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return Categorical(int(space.n)), (lambda a: a + start) if start else (lambda a: a)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        choices, first = _choices(space)
        shape, dtype = space.shape, space.dtype
        return MultiCategorical(choices), lambda a: (a + first).reshape(-1, *shape).astype(dtype, copy=False)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high, shape = space.low.reshape(-1), space.high.reshape(-1), space.shape
        return Normal(len(low)), lambda a: np.clip(a, low, high).reshape(-1, *shape).astype(space.dtype, copy=False)
    raise UserError(
        f"The action space is {space}; expected Discrete, MultiDiscrete, MultiBinary or a Box of real numbers; convert "
        "the actions by a gymnasium.ActionWrapper."
    )


def observations(space: Space) -> tuple[int, Callable[[Any], Array]]:
    """Return D, and a function from the E observations of a vector environment to flat numbers [E, D].

    D is the number of values of a flat observation. Their order is that of `gymnasium.spaces.flatten`, but the channels of
    stacked frames are next to each other. Raises `UserError` for a space that cannot be flattened. The function raises
    `IndexError` for a discrete value outside its space.
    """
    if isinstance(space, spaces.Discrete):
        eye, start = np.eye(int(space.n), dtype=np.float32), int(space.start)
        return int(space.n), lambda o: _rows(eye, np.asarray(o) - start)
    if isinstance(space, spaces.Box | spaces.MultiBinary) and len(space.shape) <= 4:
        size, seen = math.prod(space.shape), image(space)
        dtype = np.uint8 if seen is not None and seen.bytes else np.float32
        mixed = len(space.shape) == 4 and seen is not None and seen.channels_last  # to [E, height, width, frames, channels]
        moved = (lambda o: np.moveaxis(np.asarray(o), 1, 3)) if mixed else np.asarray
        return size, lambda o: np.ascontiguousarray(moved(o), dtype=dtype).reshape(len(o), size)
    if isinstance(space, spaces.MultiDiscrete):
        choices, first = _choices(space)
        eyes = [np.eye(n, dtype=np.float32) for n in choices]

        def one_hot(o: Any) -> Array:
            chosen = np.asarray(o).reshape(len(o), -1) - first
            return np.concatenate([_rows(eye, chosen[:, k]) for k, eye in enumerate(eyes)], 1)

        return sum(choices), one_hot
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys, parts = list(_parts(space)), list(_parts(space).values())
        if sum(picture(part)[1] is not None for part in parts) > 1:
            raise UserError(
                f"The observation has several images, {space}; expected at most one. Choose one with "
                "gymnasium.wrappers.FilterObservation, or stack the images as channels of one image."
            )
        flattened = [observations(part) for part in parts]
        # The bytes of an image are scaled here, since an array with other numbers cannot be uint8.
        makers = [(key, make) for key, (_, make) in zip(keys, flattened, strict=True)]
        return sum(size for size, _ in flattened), lambda o: np.concatenate([_scale(make(o[key])) for key, make in makers], 1)
    raise UserError(
        f"The observation space is {space}; expected Discrete, MultiDiscrete, MultiBinary, a Box of numbers or an image, or a "
        "Dict or Tuple of these. Wrap the environment, for example with wrappers=gymnasium.wrappers:FlattenObservation or "
        "minigrid.wrappers:ImgObsWrapper."
    )


def _rows(eye: Array, chosen: Array) -> Array:
    """Return one-hot rows, which are rows of `eye`. Raises `IndexError` for indices outside 0 … n − 1, negative ones included."""
    if chosen.size and chosen.min() < 0:
        raise IndexError(f"{chosen.min()} is below 0")
    found: Array = eye[chosen]
    return found


def image(space: Space) -> Image | None:
    """Return the `Image` of a Box with three dimensions (four for stacked frames); None for any other space.

    Two equal neighbouring dimensions are height and width. Otherwise the smaller of the first and the last is the channels.
    """
    if not (isinstance(space, spaces.Box) and len(space.shape) in (3, 4)):
        return None
    *frames, a, b, c = space.shape
    last = c <= a if (a == b) == (b == c) else a == b
    channels, height, width = (c, a, b) if last else (a, b, c)
    return Image(math.prod(frames) * channels, height, width, last, space.dtype == np.uint8)


def picture(space: Space) -> tuple[int, Image | None]:
    """Return (the image's start in the flat observation, the image) for the first image in a space; (0, None) if it has none."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return 0, image(space)
    at = 0
    for part in _parts(space).values():
        inner, found = picture(part)
        if found is not None:
            return at + inner, found
        at += observations(part)[0]
    return 0, None


def _scale(part: Array) -> Array:
    return part.astype(np.float32) / 255 if part.dtype == np.uint8 else part


def stack(space: Space, items: Sequence[Any]) -> Any:
    """Return a batch of observations, as from a vector environment. A Dict becomes a dictionary of arrays."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        room: Any = create_empty_array(space, len(items))
        return concatenate(space, items, room)
    return np.stack(items)


def batch_of(space: Space, observation: Any) -> tuple[Any, bool]:
    """Return (a batch of one, True) for one observation, or (observation, False) for a batch.

    Raises `UserError` for any other shape.
    """
    shapes = list(_shapes(space, observation))
    if all(found == shape for found, shape in shapes):
        return stack(space, [observation]), True
    for found, shape in shapes:
        if found[1:] != shape or len(found) != len(shape) + 1:
            raise UserError(f"The observation has shape {found}; expected {shape}, or a batch of them.")
    return observation, False


def _shapes(space: Space, observation: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (actual shape, expected shape) for each array of an observation. Raises `UserError` if parts are missing."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield np.shape(observation), space.shape or ()
        return
    parts = _parts(space)
    keyed = isinstance(observation, Mapping) if isinstance(space, spaces.Dict) else isinstance(observation, tuple | list)
    if not keyed or set(observation if isinstance(observation, Mapping) else range(len(observation))) != set(parts):
        raise UserError(
            f"The observation is of type {type(observation).__name__}; expected a value for each of {list(parts)}, as in {space}."
        )
    for key, part in parts.items():
        yield from _shapes(part, observation[key])


def to_json(space: Space) -> dict[str, Any]:
    """Return a space as values that JSON can represent. `from_json` is the inverse."""
    kind: dict[str, Any] = {"type": type(space).__name__}
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {key: to_json(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [to_json(part) for part in space.spaces]}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    kind["dtype"] = np.dtype(space.dtype).name if space.dtype is not None else None
    if isinstance(space, spaces.Discrete):
        return {**kind, "type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {**kind, "type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    assert isinstance(space, spaces.Box)
    bounds = {"low": _bounds(space.low), "high": _bounds(space.high)}
    return {**kind, "type": "Box", **bounds, "shape": list(space.shape)}


def from_json(stored: Mapping[str, Any]) -> Space:
    """Return the space that `to_json` converted."""
    kind = stored["type"]
    if kind == "Dict":
        return spaces.Dict(OrderedDict((key, from_json(part)) for key, part in stored["spaces"].items()))
    if kind == "Tuple":
        return spaces.Tuple([from_json(part) for part in stored["spaces"]])
    if kind == "MultiBinary":
        return spaces.MultiBinary(stored["n"])
    dtype: Any = np.dtype(stored["dtype"])
    if kind == "Discrete":
        return spaces.Discrete(stored["n"], start=stored["start"], dtype=dtype.type)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(stored["nvec"]), dtype=dtype.type, start=np.array(stored["start"]))
    low, high = (np.broadcast_to(np.array(stored[side]).astype(dtype), stored["shape"]) for side in ("low", "high"))
    return spaces.Box(low, high, dtype=dtype.type)


def _bounds(values: Array) -> Any:
    """Return a space's bounds as values that JSON can represent: one number if all are equal; infinity as a text for numpy."""
    if values.size and (values == values.flat[0]).all():
        values = values.reshape(-1)[0]
    return values.tolist() if np.isfinite(values).all() else values.astype(str).tolist()


def _choices(space: spaces.MultiDiscrete | spaces.MultiBinary) -> tuple[tuple[int, ...], Array]:
    """Return (the number of options of each of the K choices, the first option of each [K])."""
    if isinstance(space, spaces.MultiBinary):
        count = math.prod(space.shape)
        return (2,) * count, np.zeros(count, np.int64)
    return tuple(int(n) for n in space.nvec.reshape(-1)), space.start.reshape(-1)


def _parts(space: spaces.Dict | spaces.Tuple[Any]) -> dict[Any, Space]:
    return dict(space.spaces if isinstance(space, spaces.Dict) else enumerate(space.spaces))
