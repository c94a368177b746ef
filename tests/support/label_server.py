"""A process full of labellers, as a label server is: run by test_chaos.py, which kills it.

Each thread is one person. Before a submission its key goes into the ledger, after the acknowledgement the number of the vote;
what a killed process left open is submitted again with the same key by the next one, as a browser would.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import uuid
from pathlib import Path

from psigrad_studio.labels import assignments, database
from psigrad_studio.labels.assignments import LabelAnswer
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Busy, Conflict


class Ledger:
    """One file for each person, a line in one write. A kill can tear the write of a line that crosses a page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if not path.read_bytes().endswith(b"\n"):
            os.write(self.file, b"\n")

    def write(self, **row: object) -> None:
        os.write(self.file, (json.dumps(row) + "\n").encode())

    def open(self) -> list[dict]:
        """What was submitted and never acknowledged or refused."""
        rows = read(self.path)
        over = {row["key"] for row in rows if row["what"] != "sent"}
        return [row for row in rows if row["what"] == "sent" and row["key"] not in over]


def read(path: Path) -> list[dict]:
    """The whole lines. A torn one is of a call that wasn't made yet, or of an answer that will be asked for again."""
    rows = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def submit(db: database.Database, person: Person, project: int, ledger: Ledger, row: dict) -> None:
    """Make the call of a row until it is answered, and write the answer down."""
    while True:
        try:
            if row["action"] == "undo":
                receipt = assignments.undo(db, person, project, row["key"])
            elif row["action"] == "skip":
                receipt = assignments.skip(db, person, row["assignment"], row["key"])
            else:
                receipt = assignments.vote(db, person, row["assignment"], LabelAnswer(choice=row["choice"]), row["key"])
        except Busy:
            continue
        except Conflict as error:
            return ledger.write(what="refused", key=row["key"], why=str(error))
        return ledger.write(what="acknowledged", key=row["key"], vote=receipt.vote)


def label(db: database.Database, person: Person, project: int, ledger: Ledger) -> None:
    """Label until nothing is left; now and then skip or undo."""
    draw = random.Random(person.id)
    for row in ledger.open():
        submit(db, person, project, ledger, row)
    while True:
        try:
            shown = assignments.next_task(db, person, project)
        except Busy:
            continue
        if shown is None:
            return
        action = draw.choices(("vote", "skip", "undo"), (90, 4, 6))[0]
        row = {"action": action, "key": str(uuid.uuid4()), "assignment": shown.assignment}
        row |= {"choice": draw.choice(assignments.CHOICES)} if action == "vote" else {}
        ledger.write(what="sent", **row)
        submit(db, person, project, ledger, row)


def label_together(db: database.Database, project: int, folder: Path, people: list[int]) -> None:
    """All these people label, each in a thread, until nothing is left for them."""
    threads = []
    for number in people:
        person, ledger = Person(number, f"person {number}"), Ledger(folder / f"{number}.jsonl")
        threads.append(threading.Thread(target=label, args=(db, person, project, ledger)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    where, project, folder, *people = sys.argv[1:]
    label_together(database.connect(where), int(project), Path(folder), list(map(int, people)))
    print("done")


if __name__ == "__main__":
    main()
