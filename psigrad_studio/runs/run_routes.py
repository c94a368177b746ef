"""The routes of the runs page. Requests name runs by identifiers; no text of a request becomes a path."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from psigrad.config.nested import flatten
from psigrad.errors import UserError
from psigrad.records.signals import SIGNALS
from psigrad.records.warnings import BY_NAME, RULES
from psigrad_studio.json_api import RequestForm, json_response, taking_turns
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.labels import projects
from psigrad_studio.runs import rollout_views
from psigrad_studio.runs.alert_kinds import alert_of
from psigrad_studio.runs.curves import curves
from psigrad_studio.runs.rollout_index import RolloutQuery
from psigrad_studio.runs.run_cache import RunCache
from psigrad_studio.runs.run_table import table
from psigrad_studio.runs.tokens import config_of
from psigrad_studio.security import Refused
from psigrad_studio.studio_settings import StudioSettings

FIRST_ROWS = "first_rows"
MOST_RUNS, MOST_TABLE, MOST_STREAMS = 40, 10_000, 32
"""The maximum number of runs in a request for curves, of runs in a table, and of pages that follow runs live."""
LOOK_SECONDS, STREAM_SECONDS = 0.5, 600.0
OWN_PROJECT = "Sent from runs"
INSTRUCTIONS = "Which of the two completions answers the prompt better?"
Work = Callable[[], AbstractContextManager[None]]
Id = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Row = Annotated[int, Field(ge=0, lt=10**9)]


class Have(RequestForm):
    """The data that the page already has of a run: the generation, and the number of points of each curve."""

    id: Id
    generation: int = 0
    have: Annotated[dict[str, Annotated[int, Field(ge=0)]], Field(max_length=500, default_factory=dict)]


class CurvesForm(RequestForm):
    """Curves of several runs: those in `names`, or the default ones."""

    runs: Annotated[list[Have], Field(max_length=MOST_RUNS)]
    names: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=500)] | None = None
    axis: Literal["step", "time", "tokens"] = "step"


class RunForm(RequestForm):
    """A request body with the identifier of a run."""

    run: Id


class TableForm(RequestForm):
    """A request for a table of runs."""

    runs: Annotated[list[Id], Field(max_length=MOST_TABLE)]


class NotesForm(RunForm):
    """A user's tags and note on a run."""

    tags: Annotated[list[Annotated[str, Field(max_length=40)]], Field(max_length=20)]
    note: Annotated[str, Field(max_length=10_000)] = ""


class RolloutsForm(RunForm):
    """A `RolloutQuery`, and the requested part of the result."""

    step: Finite | None = None
    kind: Literal["train", "eval", "episode", "other"] | None = None
    status: Literal["scored", "failed", "unscored"] | None = None
    low: Finite | None = None
    high: Finite | None = None
    zero: bool = False
    text: Annotated[str, Field(max_length=200)] = ""
    order: Literal["newest", "oldest", "best", "worst"] = "newest"
    first: Row = 0
    count: Annotated[int, Field(ge=1, le=200)] = 50


class GroupForm(RunForm):
    """A request for the group of a rollout. `generation` is that of the list from which the rollout was chosen."""

    n: Row
    generation: int = 0


class SendForm(GroupForm):
    """Two completions of one group for a labelling project. Without a project, the default project is used."""

    other: Row
    project: Annotated[int, Field(ge=1)] | None = None


def router(settings: StudioSettings, labels: LabelStore) -> APIRouter:
    """Return the routes of the runs page."""
    routes, cache = APIRouter(prefix="/api/runs"), RunCache(settings.runs)
    work = partial(taking_turns, threading.BoundedSemaphore(max(2, settings.work_at_once)))

    @routes.get("")
    def listed() -> Response:
        with work():
            entries, whole = cache.entries(settings.work_seconds)
            return json_response(
                {
                    "folder": str(settings.runs),
                    "runs": entries,
                    "whole": whole and all(entry["whole"] for entry in entries),
                    "more": cache.finder.more,
                    "signals": [asdict(signal) for signal in SIGNALS],
                    "rules": [{"title": rule.title, "says": rule.advice} for rule in RULES],
                }
            )

    @routes.post("/curves")
    def drawn(form: CurvesForm) -> Response:
        with work():
            found = [curves(cache, one.id, one.generation, one.have, form.names, form.axis) for one in form.runs]
            return json_response(found)

    @routes.post("/about")
    def about(form: RunForm) -> Response:
        with work():
            return json_response(_about(cache, form.run, settings.work_seconds))

    @routes.get("/picture")
    def picture(run: str = "") -> Response:
        found = cache.picture(run) if run else b""
        if found is None:
            raise HTTPException(404)
        return Response(found, media_type="image/gif")

    _live(routes, cache)
    _side_by_side(routes, cache, work)
    _completions(routes, cache, settings, labels, work)
    return routes


def _side_by_side(routes: APIRouter, cache: RunCache, work: Work) -> None:
    @routes.post("/table")
    def tabled(form: TableForm) -> Response:
        with work():
            return json_response(table(cache, form.runs))

    @routes.post("/notes")
    def noted(form: NotesForm) -> Response:
        return json_response(cache.notes.put(cache.place(form.run).name, form.tags, form.note))


def _completions(routes: APIRouter, cache: RunCache, settings: StudioSettings, labels: LabelStore, work: Work) -> None:
    @routes.post("/rollouts")
    def rollouts(form: RolloutsForm) -> Response:
        wanted = RolloutQuery(**{name: getattr(form, name) for name in RolloutQuery.__dataclass_fields__})
        with work():
            index = cache.rollouts(form.run)
            return json_response(rollout_views.listed(index, wanted, form.first, form.count, settings.work_seconds))

    @routes.post("/group")
    def group(form: GroupForm) -> Response:
        with work():
            place, index = cache.place(form.run), cache.rollouts(form.run)
            found = rollout_views.group(index, form.n, form.generation, place.path, settings.runs, settings.work_seconds)
            picture = found["kind"] == "episode" and cache.picture(form.run) is not None
            return json_response({**found, "picture": picture})

    @routes.get("/projects")
    def offered(request: Request) -> Response:
        found = projects.mine(labels.db, labels.asking(request))
        ready = [p for p in found if p.settings.kind == "pair" and "manage" in p.may and p.closed_at is None]
        return json_response([{"id": p.id, "name": p.settings.name} for p in ready])

    @routes.post("/send")
    def send(form: SendForm, request: Request) -> Response:
        place, index, person = cache.place(form.run), cache.rollouts(form.run), labels.asking(request)
        prompt, first, second = rollout_views.pair(index, form.n, form.other, form.generation, place.name)
        project = form.project or projects.pairs_project(labels.db, person, OWN_PROJECT, INSTRUCTIONS)
        added = labels.send_pair(request, project, prompt, first, second)
        name = projects.info(labels.db, person, project).settings.name
        return json_response({"project": project, "name": name, **asdict(added)})


def _about(cache: RunCache, run: str, seconds: float) -> dict[str, Any]:
    place, history, index = cache.place(run), cache.history(run), cache.rollouts(run)
    history.read()
    index.read(seconds)
    found, told = [], [event for event in history.events if event.get("kind") != FIRST_ROWS]
    for alert in history.alerts(history.state):
        by = BY_NAME[alert.rule].worst
        worst = index.worst(alert.worst_step, by) or index.worst(alert.step, by)
        said = rollout_views.dead_said(index, alert.worst_step) if alert.rule in ("dead_groups", "flat_reward") else ""
        found.append({**alert_of(alert), "said": said, "rollouts": rollout_views.briefs(index, worst)})
    return {
        **cache.entry(run),
        "alerts": found,
        "settings": {key: str(value)[:300] for key, value in flatten(config_of(place.path)).items()},
        "events": [{str(k)[:60]: str(v)[:300] for k, v in event.items()} for event in told[-40:]],
        "first_rows": _first_rows(history.events),
        "picture": cache.picture(run) is not None,
        "rollouts": len(index),
        "index_generation": index.generation,
    }


def _first_rows(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the run's first rows as its model read them, from the events. Parts of another shape than runs write are dropped."""
    rows = next((event.get("rows") for event in reversed(events) if event.get("kind") == FIRST_ROWS), None)
    found = [row for row in rows if isinstance(row, list) and len(row) == 2] if isinstance(rows, list) else []
    return [
        {"title": str(title)[:300], "pieces": [[str(part)[:4000] for part in piece[:2]] for piece in pieces if len(piece) == 2]}
        for title, pieces in found[:6]
        if isinstance(pieces, list) and all(isinstance(piece, list) for piece in pieces)
    ]


def _live(routes: APIRouter, cache: RunCache) -> None:
    streams = threading.BoundedSemaphore(MOST_STREAMS)

    @routes.get("/live")
    async def live(request: Request, runs: str = "") -> Response:
        known = cache.finder.places()
        ids = [run for run in runs.split(",")[:MOST_RUNS] if run in known]
        if not ids:
            return Response(b"", media_type="text/event-stream")
        if not streams.acquire(blocking=False):
            raise Refused(429, "busy", "Too many pages follow runs at the same time; close one.")
        return StreamingResponse(_events(cache, ids, streams, request.app.state.ending), media_type="text/event-stream")


async def _events(
    cache: RunCache, ids: list[str], streams: threading.BoundedSemaphore, ending: threading.Event
) -> AsyncIterator[str]:
    """Yield server-sent events with the list entry of each run that has changed, and the version of its metrics."""
    seen: dict[str, Any] = {}
    try:
        looks = int(STREAM_SECONDS / LOOK_SECONDS)
        yield ": following\n\n"
        for look in range(looks):
            for run in ids:
                if ending.is_set():
                    return
                # an ended run may be resumed, so it is checked too, but less often
                if run in seen and seen[run]["state"] != "running" and look % 6:
                    continue
                entry = await run_in_threadpool(_entry, cache, run)
                told = {k: v for k, v in (entry or {}).items() if k != "written"}
                if entry is not None and told != {k: v for k, v in seen.get(run, {}).items() if k != "written"}:
                    seen[run] = entry
                    yield f"id: {entry['generation']}.{entry['version']}\ndata: {bytes(json_response(entry).body).decode()}\n\n"
            if look % 30 == 29:
                yield ": still here\n\n"
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        streams.release()


def _entry(cache: RunCache, run: str) -> dict[str, Any] | None:
    try:
        return cache.entry(run)
    except UserError:
        return None
