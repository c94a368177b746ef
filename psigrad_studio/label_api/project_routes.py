"""The routes for administrators: create, change and close projects, and import completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from psigrad.errors import UserError
from psigrad_studio.json_api import RequestForm, json_response
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.label_api.task_routes import ProjectForm
from psigrad_studio.labels import doubt, intake, projects
from psigrad_studio.labels.completion_groups import ROLLOUTS
from psigrad_studio.labels.intake import TaskOptions
from psigrad_studio.labels.projects import ProjectSettings
from psigrad_studio.labels.questions import MOST
from psigrad_studio.runs.run_finder import RunFinder

MOST_RUNS = 500
Count = Annotated[int, Field(ge=0, le=10**6)]
Short = Annotated[str, Field(max_length=200)]


class QuestionForm(RequestForm):
    """The fields of a `questions.Question`."""

    name: Short
    kind: Short = "better"
    ask: Annotated[str, Field(max_length=2000)] = ""
    options: list[Short] = Field(default_factory=list, max_length=30)
    top: Count = 5
    required: bool = True
    why: bool = False
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)] = 1.0


class SettingsForm(RequestForm):
    """The fields of `projects.ProjectSettings`."""

    name: Short
    kind: Short = "pair"
    instructions: Annotated[str, Field(max_length=20_000)] = ""
    overlap: Count = 1
    lease_s: Count = 600
    ties: bool = True
    both_bad: bool = True
    strengths: Count = 0
    questions: list[QuestionForm] = Field(default_factory=list, max_length=MOST)
    overall: bool = True
    checks: Count = 10


class ChangeForm(ProjectForm):
    """The fields that `projects.change` may change, and `closed`. Missing fields stay unchanged."""

    name: Short | None = None
    instructions: Annotated[str, Field(max_length=20_000)] | None = None
    overlap: Count | None = None
    lease_s: Count | None = None
    ties: bool | None = None
    both_bad: bool | None = None
    strengths: Count | None = None
    questions: list[QuestionForm] | None = Field(None, max_length=MOST)
    checks: Count | None = None
    closed: bool | None = None


class TaskOptionsForm(RequestForm):
    """The fields of `intake.TaskOptions`."""

    prompts: Count | None = None
    per_prompt: Count | None = None
    ranked: Count = 5
    overlap: Count | None = None
    overlap_share: Annotated[float, Field(ge=0, le=1, strict=False)] = 1.0
    priority: Annotated[int, Field(gt=-(10**6), lt=10**6)] = 0
    shuffle: bool = True
    gold: bool = False


class ImportForm(ProjectForm):
    """The text of a JSONL file, and a name for it."""

    text: str
    name: Short = "rows"
    sampler: Short | None = None
    making: TaskOptionsForm = TaskOptionsForm()


class ImportRunForm(ProjectForm):
    """A run by its name in the list, and which of its rollouts to import."""

    run: Short
    kind: Annotated[str, Field(pattern="^(train|eval)$")] | None = "train"
    first: Count | None = None
    last: Count | None = None
    across_steps: bool = False
    making: TaskOptionsForm = TaskOptionsForm()


class WithdrawForm(ProjectForm):
    """The arguments of `intake.withdraw`."""

    since: Annotated[int, Field(ge=0, lt=2**63)]
    until: Annotated[int, Field(ge=0, lt=2**63)]


class PairForm(ProjectForm):
    """Two completions of one prompt. Each has `completion`, and its origin if known."""

    prompt: Any
    first: dict[str, Any]
    second: dict[str, Any]


def add_routes(routes: APIRouter, store: LabelStore) -> None:
    """Add the routes for administrators."""

    @routes.post("/create")
    def create(form: SettingsForm, request: Request) -> Response:
        return json_response({"project": projects.create(store.db, store.asking(request), ProjectSettings(**form.model_dump()))})

    @routes.post("/change")
    def change(form: ChangeForm, request: Request) -> Response:
        person, given = store.asking(request), form.model_dump(exclude={"project", "closed"}, exclude_none=True)
        if given:
            projects.change(store.db, person, form.project, given)
        if form.closed is not None:
            projects.close(store.db, person, form.project, form.closed)
        return json_response({"changed": sorted(given)})

    @routes.post("/import")
    def bring_in(form: ImportForm, request: Request) -> Response:
        making = TaskOptions(**form.making.model_dump())
        with store.slowly():
            rows, since, who = list(rows_of(form.text, form.name)), store.db.clock(), store.asking(request)
            added = intake.add_rows(store.db, who, form.project, rows, making, source=form.name, sampler=form.sampler)
            return json_response({**vars(added), "since": since, "until": store.db.clock()})

    @routes.post("/withdraw")
    def withdraw(form: WithdrawForm, request: Request) -> Response:
        return json_response(intake.withdraw(store.db, store.asking(request), form.project, form.since, form.until))

    @routes.get("/runs")
    def runs(request: Request) -> Response:
        store.administrator(request)
        return json_response(list(_runs(store.settings.runs)))

    @routes.post("/import-run")
    def bring_in_a_run(form: ImportRunForm, request: Request) -> Response:
        person = store.administrator(request)
        if (folder := _runs(store.settings.runs).get(form.run)) is None:
            raise UserError(f"There is no run {form.run!r} with rollouts in the runs folder; choose one from the list.")
        last = 10**9 if form.last is None else form.last
        steps = None if form.first is None and form.last is None else range(form.first or 0, last + 1)
        with store.slowly():
            since = store.db.clock()
            added = intake.add_run(
                store.db,
                person,
                form.project,
                folder,
                TaskOptions(**form.making.model_dump()),
                kind=form.kind,
                steps=steps,
                across_steps=form.across_steps,
                name=form.run,  # the relative path: two folders may both have a run seed-0
            )
            return json_response({**vars(added), "since": since, "until": store.db.clock()})

    _add_pairs(routes, store)


def _add_pairs(routes: APIRouter, store: LabelStore) -> None:
    @routes.post("/order")
    def order(form: ProjectForm, request: Request) -> Response:
        return json_response({"pairs": doubt.order_by_doubt(store.db, store.asking(request), form.project)})

    @routes.post("/pair")
    def pair(form: PairForm, request: Request) -> Response:
        return json_response(store.send_pair(request, form.project, form.prompt, form.first, form.second))


def rows_of(text: str, name: str) -> Iterator[Any]:
    """Yield the rows of a JSONL text. Raises `UserError` naming the line."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}:{number} is not JSON ({error}); expected one object per line.") from error


def _runs(folder: Path) -> dict[str, Path]:
    """Return name -> folder of the runs with rollouts, the newest first. Names and search are those of the Runs page."""
    found = RunFinder(folder, (ROLLOUTS,)).places().values()
    newest = sorted(found, key=lambda run: (-(run.path / ROLLOUTS).stat().st_mtime, run.name))
    return {run.name: run.path for run in newest[:MOST_RUNS]}
