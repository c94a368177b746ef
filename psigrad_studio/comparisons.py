"""Blind comparisons of two checkpoints.

The order of display is drawn here, the models' names are revealed after the choice, and the choice is stored with the labels.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from psigrad.errors import UserError
from psigrad_studio.chat_answers import ChatAnswer
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.labels import assignments, intake, people, projects
from psigrad_studio.labels.assignments import LabelAnswer
from psigrad_studio.labels.completion_groups import digest, gather
from psigrad_studio.labels.database import Database, reads
from psigrad_studio.labels.refusals import Conflict
from psigrad_studio.labels.schema import LabelTask, StoredPrompt

PROJECT = "Chat comparisons"
INSTRUCTIONS = "Which answer is better? These pairs come from the chat page, from two unnamed checkpoints."
MOST_OPEN = 200


@dataclass
class ChatComparison:
    """Two answers to one question. `sides[i]` is the side of answer i: 0 left, 1 right."""

    answers: tuple[ChatAnswer, ChatAnswer]
    sides: tuple[int, int]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    result: dict[str, Any] | None = None
    """The response to the user's choice; None before it."""

    @property
    def shown(self) -> list[ChatAnswer]:
        """Return the answers in display order: left, right."""
        return [self.answers[self.sides.index(side)] for side in (0, 1)]


class ChatComparisons:
    """The store of the newest `MOST_OPEN` comparisons, in memory, so that a restart of the studio loses them."""

    def __init__(self, labels: LabelStore) -> None:
        self._labels = labels
        self._known: OrderedDict[str, ChatComparison] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, first: ChatAnswer, second: ChatAnswer) -> ChatComparison:
        """Return a new comparison of two answers, with a random order of display."""
        left = secrets.randbelow(2)
        comparison = ChatComparison((first, second), (left, 1 - left))
        with self._lock:
            self._known[comparison.id] = comparison
            while len(self._known) > MOST_OPEN:
                self._known.popitem(last=False)
        return comparison

    def choose(self, comparison_id: str, choice: str) -> dict[str, Any]:
        """Store a choice (left, right, tie, both_bad), and return the models' names and the result of storing.

        A second choice changes nothing and returns the first result.
        """
        with self._lock:
            comparison = self._known.get(comparison_id)
            if comparison is None:
                raise UserError("This comparison has expired; ask the question again.")
            if any(answer.reason is None for answer in comparison.answers):
                raise UserError("The answers are still being written; choose when both are complete.")
            if comparison.result is None:
                names = [answer.checkpoint.name for answer in comparison.shown]
                comparison.result = {"names": names, "choice": choice, **_store(self._labels.db, comparison, choice)}
            return comparison.result

    def undo(self, comparison_id: str) -> dict[str, Any]:
        """Undo a stored choice. No second choice is possible, since the user knows the names by then.

        Raises `Conflict` if another answer was given in that project since.
        """
        with self._lock:
            comparison = self._known.get(comparison_id)
            if comparison is None or comparison.result is None or comparison.result.get("vote") is None:
                raise UserError("No choice of this comparison is stored, so there is nothing to undo.")
            person = people.local(self._labels.db)
            project, vote = comparison.result["project"], comparison.result["vote"]
            assignments.undo(self._labels.db, person, project, f"chat-undo-{comparison.id}", only=vote)
            return {"undone": True}


def _store(database: Database, comparison: ChatComparison, choice: str) -> dict[str, Any]:
    """Store the pair and the choice as a label. Return a mapping with the project's number, or with the reason of a failure."""
    left, right = comparison.shown
    if not left.text.strip() or not right.text.strip():
        return {"project": None, "note": "One of the answers is empty, so the choice was not stored."}
    if left.text == right.text:
        return {"project": None, "note": "The two answers are the same, so the choice was not stored."}
    if left.prompt != right.prompt:
        return {"project": None, "note": "The two models were given different prompts, so the choice was not stored."}
    if not isinstance(left.prompt, str) and not all(message["content"] for message in left.prompt):
        return {"project": None, "note": "An earlier message is empty, so the choice was not stored."}
    person, rows = people.local(database), [_row(answer) for answer in comparison.answers]
    try:
        project = projects.pairs_project(database, person, PROJECT, INSTRUCTIONS)
        intake.add_rows(database, person, project, rows, intake.TaskOptions(shuffle=False), source="chat")
        task, places = _task(database, project, rows)
        display = [places[comparison.sides.index(side)] for side in (0, 1)]
        receipt = assignments.record(database, person, task, display, LabelAnswer(choice=choice), f"chat-{comparison.id}")
    except Conflict as error:
        return {"project": None, "note": str(error)}
    return {"project": project, "note": "", "vote": receipt.vote}


def _row(answer: ChatAnswer) -> dict[str, Any]:
    """Return an answer as a row for `intake.add_rows`. Answers of a run's checkpoints keep run and step."""
    checkpoint, talks = answer.checkpoint, not isinstance(answer.prompt, str)
    content = [{"role": "assistant", "content": answer.text}] if talks else answer.text
    row: dict[str, Any] = {
        "prompt": answer.prompt,
        "completion": content,
        "sampler": checkpoint.name,
        "finish_reason": answer.reason,
    }
    if checkpoint.run is not None:
        row["run"] = checkpoint.run
    if checkpoint.step is not None:
        row |= {"step": checkpoint.step, "k": 0, "kind": "chat", "seed": answer.seed}
    return row


@reads
def _task(session: Session, project_id: int, rows: Sequence[Mapping[str, Any]]) -> tuple[int, list[int]]:
    """Return (the labelling task made from `rows`, the place of each row's completion in the task)."""
    placed_rows = ((f"chat:{i}", row) for i, row in enumerate(rows, 1))
    group = next(iter(gather(placed_rows).groups.values()))
    hashes, placed = list(group.completions), sorted(group.completions)
    prompts = select(StoredPrompt.id).where(StoredPrompt.project_id == project_id, StoredPrompt.hash == digest(group.prompt))
    prompt = session.scalars(prompts).one()
    tasks = select(LabelTask.id).where(LabelTask.project_id == project_id, LabelTask.hash == digest([prompt, placed]))
    return session.scalars(tasks).one(), [placed.index(h) for h in hashes]
