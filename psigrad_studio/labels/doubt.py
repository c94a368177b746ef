"""Active selection of the next pair: the one about which a reward model is most uncertain.

If the scores of two completions are close, the model's probability of either side is close to one half. The model then learns
most from an answer (uncertainty sampling: Lewis and Gale 1994).
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from psigrad_studio.labels import people
from psigrad_studio.labels.database import writes
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Refusal
from psigrad_studio.labels.schema import LabelTask, Origin, Project, Seat, TaskItem

EXPLORED = 0.1
"""The share of pairs that get a random place in the order, so that confident errors of a model are found as well."""


@writes
def order_by_doubt(session: Session, person: Person, project_id: int) -> int:
    """Sort the pairs that nobody has started by the gap between the rewards of their completions, smallest first.

    Return the number of pairs with both rewards. The other pairs come last. A completion's reward is the one in the rows imported
    last. To use a newer reward model, run `psigrad score`, import the rows again, then sort. Raises `Refusal` if the project does
    not ask for pairs, or if no pair has two rewards.
    """
    project = people.require(session, person, project_id, "manage")
    if project.kind != "pair":
        raise Refusal("Only a project of pairs can be sorted by uncertainty.")
    gaps = _gaps(session, project)
    known = sum(gap is not None for gap in gaps.values())
    if not known:
        raise Refusal("No pair has a reward for both of its completions; import rows with rewards, as psigrad score writes them.")
    for turn, task in enumerate(order(gaps, project.seed)):
        session.execute(update(Seat).where(Seat.task_id == task, Seat.user_id.is_(None)).values(turn=turn))
    people.note(session, person, project_id, "ordered by doubt", pairs=known)
    return known


def order(gaps: Mapping[int, float | None], seed: int) -> list[int]:
    """Return the pairs sorted by gap, with those without a gap last. A share `EXPLORED` gets random places, drawn from `seed`."""
    chance = random.Random(f"{seed} doubt")
    known = [task for _, task in sorted((gap, task) for task, gap in gaps.items() if gap is not None)]
    anywhere = {task for task in known if chance.random() < EXPLORED}
    found = [task for task in known if task not in anywhere]
    for task in sorted(anywhere):
        found.insert(chance.randrange(len(found) + 1), task)
    return found + [task for task, gap in gaps.items() if gap is None]


def _gaps(session: Session, project: Project) -> dict[int, float | None]:
    """Return pair -> gap between its two rewards; None if one is missing."""
    items = select(TaskItem.task_id, TaskItem.completion_id).join(LabelTask, LabelTask.id == TaskItem.task_id)
    items = items.where(LabelTask.project_id == project.id)
    placed = session.execute(items.order_by(TaskItem.task_id)).all()
    brought = select(Origin.completion_id, Origin.about)
    brought = brought.where(Origin.completion_id.in_(items.with_only_columns(TaskItem.completion_id)))
    rewards: dict[int, float] = {}
    for completion, about in session.execute(brought.order_by(Origin.id)):
        if isinstance(about.get("reward"), int | float):
            rewards[completion] = float(about["reward"])
    pairs: dict[int, list[float | None]] = {}
    for task, completion in placed:
        pairs.setdefault(task, []).append(rewards.get(completion))
    return {task: None if None in pair else abs(pair[0] - pair[1]) for task, pair in pairs.items()}  # type: ignore[operator]
