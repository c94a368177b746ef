"""The import of completions into a project, and the creation of tasks. Importing the same rows again adds nothing."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from psigrad import seeds
from psigrad.redaction import escape
from psigrad_studio.labels import completion_groups, people
from psigrad_studio.labels.completion_groups import PromptGroup
from psigrad_studio.labels.database import Database, now, reads, writes
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Refusal
from psigrad_studio.labels.schema import (
    Assignment,
    Audit,
    LabelTask,
    Origin,
    Project,
    Seat,
    StoredCompletion,
    StoredPrompt,
    TaskItem,
)

CHUNK = 200
"""The number of prompts stored in one transaction. Labelling can continue between two of them."""


@dataclass(frozen=True)
class TaskOptions:
    """The options for creating tasks from imported completions."""

    prompts: int | None = None
    """The maximum number of prompts, drawn at random; None: all. In a run's rollouts, a prompt counts once for each step."""
    per_prompt: int | None = None
    """The maximum number of tasks of a prompt, drawn at random; None: one for every pair of completions, or for each to rate."""
    ranked: int = 5
    """The maximum number of completions in one ranking."""
    overlap: int | None = None
    """The number of answers to each task, by different people; None uses the project's value."""
    overlap_share: float = 1.0
    """The share of tasks that `overlap` people answer. The others are answered once."""
    priority: int = 0
    """The priority. Tasks of a higher priority are given out first."""
    shuffle: bool = True
    """True to give out the tasks in random order."""
    gold: bool = False
    """True to treat chosen and rejected of preference rows as known answers for attention checks (see `ProjectSettings.checks`).
    """

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("prompts", self.prompts is None or self.prompts >= 1, "1 or more"),
            ("per_prompt", self.per_prompt is None or self.per_prompt >= 1, "1 or more"),
            ("ranked", 2 <= self.ranked <= 12, "2 to 12"),
            ("overlap", self.overlap is None or 1 <= self.overlap <= 1000, "1 to 1000"),
            ("overlap_share", 0 <= self.overlap_share <= 1, "0 to 1"),
            ("priority", abs(self.priority) < 10**6, "less than a million"),
        ):
            if not ok:
                raise Refusal(f"{name} is {getattr(self, name)}; expected {expected}.")


@dataclass(frozen=True)
class Added:
    """The counts of an import.

    `repeated` counts completions that existed already, `alone` prompts with too few different completions to compare, `unusable`
    rows that were empty or damaged, `known` tasks that existed already, and `checks` new tasks with a known answer.
    """

    prompts: int = 0
    completions: int = 0
    tasks: int = 0
    repeated: int = 0
    alone: int = 0
    unusable: int = 0
    known: int = 0
    checks: int = 0

    def __add__(self, other: Added) -> Added:
        return Added(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def add_rows(
    database: Database,
    person: Person,
    project_id: int,
    rows: Iterable[Mapping[str, Any]],
    making: TaskOptions | None = None,
    *,
    source: str = "rows",
    sampler: str | None = None,
    run: str | None = None,
) -> Added:
    """Import rows; see `completion_groups.gather` for their columns.

    Raises `UserError` naming row and column, and then stores nothing.
    """
    placed = ((f"{source}:{i}", row) for i, row in enumerate(rows, 1))
    return _add_placed(database, person, project_id, placed, making or TaskOptions(), sampler, run)


def add_file(
    database: Database,
    person: Person,
    project_id: int,
    path: str | Path,
    making: TaskOptions | None = None,
    *,
    sampler: str | None = None,
    run: str | None = None,
) -> Added:
    """Import a JSONL file: prompts with completions, pairs, or the output of `psigrad sample`."""
    return _add_placed(database, person, project_id, completion_groups.lines(Path(path)), making or TaskOptions(), sampler, run)


def add_run(
    database: Database,
    person: Person,
    project_id: int,
    folder: str | Path,
    making: TaskOptions | None = None,
    *,
    kind: str | None = "train",
    steps: range | None = None,
    across_steps: bool = False,
    name: str | None = None,
) -> Added:
    """Import the rollouts of a run. Completions of one prompt are compared within a step, or with `across_steps` over all steps.

    `kind` is "train", "eval" or None for both. `name` is the run's name in the exported lineage; None: the name of its folder.
    """
    making, path = making or TaskOptions(), Path(folder)
    name = name or (path if path.is_dir() else path.parent).resolve().name
    damaged: list[str] = []
    rows = completion_groups.rollouts(path, kind, steps, damaged)
    # A run writes its rows in order of steps.
    steps_of_run = (batch for _, batch in itertools.groupby(rows, key=lambda placed: placed[1]["step"]))
    batches: Iterable[Iterable[tuple[str, Any]]] = [rows] if across_steps else steps_of_run
    _kind(database, person, project_id)
    found = [completion_groups.gather(batch, run=name, skip_unusable=True) for batch in batches]
    groups = [group for each in found for group in each.groups.values()]
    return _store_all(database, person, project_id, groups, making) + Added(
        unusable=len(damaged) + sum(each.unusable for each in found)
    )


def add_pair(
    database: Database, person: Person, project_id: int, prompt: Any, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Added:
    """Add a task with two completions of one prompt to a project, before all waiting tasks.

    `first` and `second` have `completion` and its known origin: `run` and `sampler`; `step`, `row`, `k` and the other fields of a
    rollout's row; `source`. All of it is in the lineage of the export. A conversation's prompt is a list of messages; its
    completions may then be strings. Raises `Refusal` if the project does not ask for pairs, or if both completions are equal.
    """
    if _kind(database, person, project_id) != "pair":
        raise Refusal("This project is not a project of pairs; send the two completions to one that is.")
    rows = []
    for one in (first, second):
        completion = one.get("completion")
        if isinstance(prompt, list) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        known = {name: one[name] for name in (*completion_groups.LINEAGE, "completion") if one.get(name) is not None}
        rows.append(known | {"prompt": prompt, "completion": completion})
    if rows[0]["completion"] == rows[1]["completion"]:
        raise Refusal("The two completions are equal; nobody can choose between them.")
    placed = ((str(row.get("source") or "pair"), row) for row in rows)
    return _add_placed(database, person, project_id, placed, TaskOptions(priority=1), None, None)


@writes
def withdraw(session: Session, person: Person, project_id: int, since: int, until: int) -> dict[str, int]:
    """Remove the tasks that this person's imports made from `since` to `until` (milliseconds since 1970, both included).

    Tasks that somebody has begun stay. Return {"tasks": number of removed ones, "begun": number of those that stay}.
    """
    people.require(session, person, project_id, "manage")
    mine = select(Audit.at).where(Audit.project_id == project_id, Audit.user_id == person.id, Audit.action == "imported")
    mine = mine.where(Audit.at.between(since, until))
    made = select(LabelTask.id).where(LabelTask.project_id == project_id, LabelTask.created_at.in_(mine))
    begun = set(
        session.scalars(made.where(LabelTask.id.in_(select(Assignment.task_id).where(Assignment.project_id == project_id))))
    )
    gone = [task for task in session.scalars(made) if task not in begun]
    for part in _parts(gone):
        for table, column in ((Seat, Seat.task_id), (TaskItem, TaskItem.task_id), (LabelTask, LabelTask.id)):
            session.execute(delete(table).where(column.in_(part)))
    people.note(session, person, project_id, "withdrew", tasks=len(gone))
    return {"tasks": len(gone), "begun": len(begun)}


def _add_placed(
    database: Database,
    person: Person,
    project_id: int,
    rows: Iterable[tuple[str, Any]],
    making: TaskOptions,
    sampler: str | None,
    run: str | None,
) -> Added:
    _kind(database, person, project_id)
    found = completion_groups.gather(rows, run=run, sampler=sampler, gold=making.gold)
    return _store_all(database, person, project_id, list(found.groups.values()), making)


@reads
def _kind(session: Session, person: Person, project_id: int) -> str:
    """Return the kind of the project. Raise an error unless the person may import.

    It is called before any file is read, so that strangers learn nothing.
    """
    return people.require(session, person, project_id, "manage").kind


def _store_all(database: Database, person: Person, project_id: int, groups: list[PromptGroup], making: TaskOptions) -> Added:
    order = seeds.permutation(len(groups), "order", project_id, len(groups)).tolist()[: making.prompts]
    groups = [groups[i] for i in (order if making.shuffle else sorted(order))]
    total = Added()
    for start in range(0, len(groups), CHUNK):
        total += _store(database, person, project_id, groups[start : start + CHUNK], making)
    return total


@writes
def _store(session: Session, person: Person, project_id: int, groups: list[PromptGroup], making: TaskOptions) -> Added:
    project = people.require(session, person, project_id, "manage")
    prompts, new_prompts = _keyed(
        session,
        StoredPrompt,
        "project_id",
        {(project_id, completion_groups.digest(g.prompt)): {"content": g.prompt, "columns": g.columns} for g in groups},
    )
    owned = [(prompts[project_id, completion_groups.digest(g.prompt)], g) for g in groups]
    completions, new_completions = _keyed(
        session,
        StoredCompletion,
        "prompt_id",
        {(prompt, h): {"content": found[0].content} for prompt, g in owned for h, found in g.completions.items()},
    )
    origins = {
        (completions[prompt, h], completion_groups.digest(one.about)): _origin(one.about)
        for prompt, g in owned
        for h, found in g.completions.items()
        for one in found
    }
    _keyed(session, Origin, "completion_id", origins)
    tasks = {key: value for prompt, g in owned for key, value in _tasks(project, prompt, g, making)}
    new_tasks, known, checks = _store_tasks(session, project, tasks, completions, making)
    added = Added(
        prompts=new_prompts,
        completions=new_completions,
        tasks=new_tasks,
        repeated=sum(len(found) - 1 for g in groups for found in g.completions.values()),
        alone=sum(len(g.completions) < 2 for g in groups) if not project.kind.startswith("rating") else 0,
        known=known,
        checks=checks,
    )
    people.note(session, person, project_id, "imported", prompts=new_prompts, completions=new_completions, tasks=new_tasks)
    return added


def _keyed(
    session: Session, model: Any, parent: str, wanted: Mapping[tuple[int, str], Mapping[str, Any]]
) -> tuple[dict[tuple[int, str], int], int]:
    """Return ((parent, hash) -> the row's number, the number of created rows) for a table. Missing rows are created."""
    column = getattr(model, parent)
    there: dict[tuple[int, str], int] = {}
    for part in _parts(wanted):
        parents, hashes = {key[0] for key in part}, {key[1] for key in part}
        rows = session.execute(select(column, model.hash, model.id).where(column.in_(parents), model.hash.in_(hashes)))
        there |= {(p, h): n for p, h, n in rows if (p, h) in wanted}
    missing = [{parent: p, "hash": h, **rest} for (p, h), rest in wanted.items() if (p, h) not in there]
    if missing:
        made = session.execute(insert(model).returning(column, model.hash, model.id), missing)
        there |= {(p, h): n for p, h, n in made}
    return there, len(missing)


def _parts(keys: Iterable[Any], size: int = 1000) -> Iterator[list[Any]]:
    rest = iter(keys)
    while part := list(itertools.islice(rest, size)):
        yield part


def _origin(about: Mapping[str, Any]) -> dict[str, Any]:
    step = about.get("step")
    return {
        "sampler": escape(str(about["sampler"])) if "sampler" in about else None,
        "run": escape(str(about["run"])) if "run" in about else None,
        "step": step if type(step) is int and abs(step) < 2**63 else None,
        "about": dict(about),
    }


def _tasks(
    project: Project, prompt: int, group: PromptGroup, making: TaskOptions
) -> Iterator[tuple[tuple[int, str], dict[str, Any]]]:
    """Yield ((project, hash), columns) of each task of a prompt.

    The columns include its completions' hashes in order of place.
    """
    for chosen in _sets(project, prompt, group, making):
        # Sort by hash, which is as good as random, so the better sampler is not always a.
        placed = sorted(chosen)
        best = placed.index(group.best) if group.best in placed and project.kind == "pair" else None
        yield (project.id, completion_groups.digest([prompt, placed])), {"prompt_id": prompt, "gold": best, "placed": placed}


def _sets(project: Project, prompt: int, group: PromptGroup, making: TaskOptions) -> list[tuple[str, ...]]:
    hashes = list(group.completions)
    draw: list[Hashable] = [project.seed, "tasks", prompt]
    if project.kind == "ranking":
        if len(hashes) < 2:
            return []
        parts = -(-len(hashes) // making.ranked)
        mixed = [hashes[i] for i in seeds.permutation(len(hashes), *draw)]  # type: ignore[arg-type]
        found = [tuple(mixed[i::parts]) for i in range(parts)]
        found = [part for part in found if len(part) > 1]
    elif project.kind == "pair":
        found = list(itertools.combinations(hashes, 2))
    else:
        found = [(h,) for h in hashes]
    if making.per_prompt is not None and making.per_prompt < len(found):
        order = seeds.permutation(len(found), *draw, "some")  # type: ignore[arg-type]
        found = [found[i] for i in sorted(order[: making.per_prompt])]
    return found


def _store_tasks(
    session: Session,
    project: Project,
    tasks: dict[tuple[int, str], dict[str, Any]],
    completions: Mapping[tuple[int, str], int],
    making: TaskOptions,
) -> tuple[int, int, int]:
    """Store tasks with their items and seats.

    Return the numbers of new tasks, of existing ones, and of new ones with a known answer.
    """
    keys = list(tasks)
    if making.shuffle:
        keys = [keys[i] for i in seeds.permutation(len(keys), project.seed, "shuffle", len(keys))]
    at = now(session)
    there: set[str] = set()
    for part in _parts(keys):
        there |= set(
            session.scalars(
                select(LabelTask.hash).where(LabelTask.project_id == project.id, LabelTask.hash.in_([k[1] for k in part]))
            )
        )
    fresh = [key for key in keys if key[1] not in there]
    columns = {k: {"prompt_id": tasks[k]["prompt_id"], "gold": tasks[k]["gold"], "created_at": at} for k in fresh}
    numbers, _ = _keyed(session, LabelTask, "project_id", columns)
    items, seats = [], []
    for key in fresh:
        number, prompt = numbers[key], tasks[key]["prompt_id"]
        for place, h in enumerate(tasks[key]["placed"]):
            items.append({"task_id": number, "place": place, "completion_id": completions[prompt, h]})
        seat = {"project_id": project.id, "task_id": number, "turn": -making.priority, "done": False}
        seats += [seat] * (0 if project.checks and tasks[key]["gold"] is not None else _seats(project, key[1], making))
    if fresh:
        session.execute(insert(TaskItem), items)
    if seats:
        session.execute(insert(Seat), seats)
    return len(fresh), len(there), sum(tasks[key]["gold"] is not None for key in fresh)


def _seats(project: Project, task_hash: str, making: TaskOptions) -> int:
    overlap = making.overlap or project.overlap
    drawn = seeds.derive(project.seed, "overlap", task_hash) / 2**63
    return overlap if drawn < making.overlap_share else 1
