"""The routes of the grid page: frames of an algorithm on a grid world, and the numbers behind one cell's value."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from psigrad.errors import UserError
from psigrad.tabular import GridWorld
from psigrad_studio.backups import evaluated_probabilities, model_backup, updates
from psigrad_studio.json_api import RequestForm, json_response, taking_turns
from psigrad_studio.playback import ALGORITHMS, Frame, Playback, PlaybackCache, PlaybackOptions, PlaybackSpec
from psigrad_studio.studio_settings import StudioSettings

SIDE = 20
MOST_NUMBERS = 60_000
"""The maximum number of numbers in one response. For larger grids, it contains fewer frames."""
UPDATES_SHOWN = 3
Number = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, lt=SIDE, strict=True)]
# JSON has no tuples, so these two types accept lists. Their elements are still checked strictly.
Place = Annotated[tuple[Index, Index], Field(strict=False)]
Prize = Annotated[tuple[Index, Index, Annotated[Number, Field(strict=True)]], Field(strict=False)]


class WorldForm(RequestForm):
    """A `GridWorld` as the page sends it."""

    rows: Annotated[int, Field(ge=1, le=SIDE)]
    columns: Annotated[int, Field(ge=1, le=SIDE)]
    prizes: Annotated[list[Prize], Field(max_length=SIDE * SIDE)]
    walls: Annotated[list[Place], Field(max_length=SIDE * SIDE)]
    start: Place | None = None
    slip: Annotated[float, Field(ge=0, le=1)]
    step_reward: Number
    gamma: Annotated[float, Field(ge=0, le=1)]


class OptionsForm(RequestForm):
    """`PlaybackOptions` with limits, as the page sends them."""

    sweeps: Annotated[int, Field(ge=0, le=100)] = 5
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.2
    step_size: Annotated[float, Field(ge=0, le=1)] = 0.2
    episodes: Annotated[int, Field(ge=1, le=100)] = 10
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    evaluated: Literal["random", "best"] = "random"


class PlaybackForm(RequestForm):
    """The inputs of a playback: world, algorithm, options, and optional start values."""

    world: WorldForm
    algorithm: Annotated[str, Field(max_length=40)]
    options: OptionsForm = OptionsForm()
    value: Annotated[list[Number], Field(max_length=SIDE * SIDE)] | None = None
    q: Annotated[list[Annotated[list[Number], Field(max_length=4)]], Field(max_length=SIDE * SIDE)] | None = None


class FramesForm(PlaybackForm):
    """A request for `count` frames of a playback, from frame `first` on."""

    first: Annotated[int, Field(ge=0, le=10_000)] = 0
    count: Annotated[int, Field(ge=1, le=400)] = 100


class BackupForm(PlaybackForm):
    """A request for the numbers behind one cell's value in a frame."""

    frame: Annotated[int, Field(ge=0, le=10_000)]
    cell: Place


def router(settings: StudioSettings) -> APIRouter:
    """Return the routes of the grid page."""
    routes, playbacks = APIRouter(prefix="/api/grid"), PlaybackCache(settings.cache_bytes)
    at_work = threading.BoundedSemaphore(settings.work_at_once)

    def played(form: PlaybackForm, count: int) -> Playback:
        try:
            return playbacks.playback(_spec(form), count, settings.work_seconds)
        except ValueError as error:
            raise UserError(str(error)) from error

    @routes.get("/algorithms")
    async def algorithms() -> Response:
        return json_response([{"name": name, **asdict(algorithm)} for name, algorithm in ALGORITHMS.items()])

    @routes.post("/frames")
    def frames(form: FramesForm) -> Response:
        with taking_turns(at_work):
            count = min(form.count, max(1, MOST_NUMBERS // (form.world.rows * form.world.columns * 5)))
            return json_response(_stretch(played(form, form.first + count), form.first, count))

    @routes.post("/backup")
    def backup(form: BackupForm) -> Response:
        with taking_turns(at_work):
            return json_response(_backup(played(form, form.frame + 1), form.frame, form.cell))

    return routes


def _stretch(playback: Playback, first: int, count: int) -> dict[str, Any]:
    return {
        "frames": [_frame(frame) for frame in playback.frames[first : first + count]],
        "known": len(playback.frames),
        "ended": playback.ended,
        "length": playback.length,
        "note": playback.note,
        "target": playback.target.tolist(),
        "map": playback.spec.world.to_text(),
    }


def _backup(playback: Playback, index: int, cell: tuple[int, int]) -> dict[str, Any]:
    if index >= len(playback.frames):
        raise UserError(f"There is no frame {index}; the playback has {len(playback.frames)} frames so far, counted from 0.")
    frame, state = playback.frames[index], playback.spec.world.state(cell)
    found, actions = updates(playback, frame, state), model_backup(playback, frame, state)
    policy = evaluated_probabilities(playback, state)
    return {
        "value": float(frame.value[state]),
        "terminal": bool(playback.mdp.is_terminal[state]),
        "gamma": playback.mdp.gamma,
        "actions": [asdict(action) for action in actions],
        "policy": policy,
        "expected": None if policy is None else sum(p * action.q for p, action in zip(policy, actions, strict=False)),
        "q": None if frame.q is None else frame.q[state].tolist(),
        "updates": [asdict(update) for update in found[-UPDATES_SHOWN:]],
        "visits": len(found),
        "alpha": playback.spec.options.step_size,
    }


def _spec(form: PlaybackForm) -> PlaybackSpec:
    if form.algorithm not in ALGORITHMS:
        raise UserError(f"There is no algorithm {form.algorithm!r}; expected one of {', '.join(ALGORITHMS)}.")
    world = _world(form.world)
    states = world.rows * world.columns
    value = None if form.value is None else np.array(form.value, dtype=np.float64)
    if value is not None and value.shape != (states,):
        raise UserError(f"value has {value.size} numbers; expected {states}, one for each cell.")
    if form.q is not None and (len(form.q) != states or any(len(row) != 4 for row in form.q)):
        raise UserError(f"q has {len(form.q)} rows; expected {states} rows of 4 numbers.")
    q = None if form.q is None else np.array(form.q, dtype=np.float64)
    return PlaybackSpec(world, form.algorithm, PlaybackOptions(**form.options.model_dump()), value, q)


def _world(form: WorldForm) -> GridWorld:
    prizes = {(row, column): worth for row, column, worth in form.prizes}
    walls = frozenset(form.walls)
    return GridWorld(form.rows, form.columns, prizes, walls, form.slip, form.step_reward, True, form.start, form.gamma)


def _frame(frame: Frame) -> dict[str, Any]:
    episode = frame.episode
    return {
        "index": frame.index,
        "step": frame.step,
        "value": frame.value.tolist(),
        "actions": frame.actions.tolist(),
        "residual": frame.residual,
        "error": frame.error,
        "bound": frame.error_bound,
        "changed": frame.changed,
        "q": None if frame.q is None else frame.q.tolist(),
        "episode": None
        if episode is None
        else {
            "states": episode.states.tolist(),
            "return": float(episode.rewards.sum()),
            "terminated": episode.terminated,
        },
    }
