"""Many people label at once in processes that are killed with SIGKILL while they write: what was acknowledged is there, once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import label_checks
import label_server
import pytest
from sqlalchemy import func, select

from psigrad_studio.labels import database, intake, invites, people, projects
from psigrad_studio.labels.projects import ProjectSettings
from psigrad_studio.labels.schema import Vote


@pytest.fixture
def scratch(tmp_path) -> Path:
    """On the disk, where SQLite takes its time: labelling must not end before the kills."""
    return tmp_path


def prepare(db, labellers: int, tasks: int, overlap: int) -> tuple[int, list[int]]:
    owner = people.local(db)
    project = projects.create(db, owner, ProjectSettings("chaos", overlap=overlap, seed=1, lease_s=10))
    bring(db, project, range(tasks))
    crowd = []
    for n in range(labellers):
        token = invites.invite(db, owner, project, "labeller")
        crowd.append(invites.accept(db, token, f"person {n}", "a password for all").person.id)
    return project, crowd


def bring(db, project: int, numbers: range) -> None:
    rows = [{"prompt": f"question {i}", "completions": ["x", "y"]} for i in numbers]
    intake.add_rows(db, people.local(db), project, rows)


class Server:
    """A process with some of the people, started again whenever it was killed."""

    def __init__(self, where: str, project: int, folder: Path, crowd: list[int]) -> None:
        self.command = [sys.executable, label_server.__file__, where, str(project), str(folder), *map(str, crowd)]
        self.ledgers = [folder / f"{n}.jsonl" for n in crowd]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def written(self) -> int:
        return sum(path.stat().st_size for path in self.ledgers if path.exists())

    def open_ends(self) -> int:
        """Submissions that were sent and not answered: what a kill catches in the middle."""
        rows = [row for path in self.ledgers if path.exists() for row in label_server.read(path)]
        return sum(1 if row["what"] == "sent" else -1 for row in rows)


def rage(servers: list[Server], kills: int, step: int, seed: int, more: Callable[[], None]) -> int:
    """Kill servers, each time some bytes of a ledger later, until `kills` of them died in the middle of a submission; how many
    died in all. Where everything was labelled before, `more` tasks are brought.
    """
    draw, died, caught = random.Random(seed), 0, 0
    while caught < kills:
        alive = [s for s in servers if s.process.poll() is None]
        if not alive:
            finish(servers)
            more()
            for server in servers:
                server.start()
            continue
        victims = draw.sample(alive, draw.randint(1, len(alive)))
        target = victims[0].written() + draw.randrange(1, step)
        while victims[0].written() < target and victims[0].process.poll() is None:
            time.sleep(0.0005)
        for victim in victims:
            victim.process.send_signal(signal.SIGKILL)
        for victim in victims:
            _, complaints = victim.process.communicate()
            if victim.process.returncode == 0:
                continue
            assert victim.process.returncode == -signal.SIGKILL, complaints
            died += 1
            caught += victim.open_ends() > 0
            victim.start()
    return died


def finish(servers: list[Server]) -> None:
    for server in servers:
        out, complaints = server.process.communicate(timeout=3000)
        assert (server.process.returncode, out) == (0, "done\n"), complaints


def label_the_rest(db, project: int, folder: Path, crowd: list[int]) -> None:
    """Everybody comes back for as long as anything is left to do: who found every seat taken had gone, and one of those who
    sat there may have skipped.
    """
    before, now = -1, rows_stored(db)
    while now > before:
        label_server.label_together(db, project, folder, crowd)
        before, now = now, rows_stored(db)


def rows_stored(db) -> int:
    with db.session(write=False) as session:
        return session.scalar(select(func.count()).select_from(Vote))


def check(db, project: int, folder: Path, crowd: list[int], wanted: int) -> list[str]:
    """Every acknowledged row is there exactly once, and nothing that nobody sent; what each did."""
    sent, acknowledged = {}, {}
    for number in crowd:
        for row in label_server.read(folder / f"{number}.jsonl"):
            if row["what"] == "sent":
                assert row["key"] not in sent
                sent[row["key"]] = (number, row["action"])
            elif row["what"] == "acknowledged":
                assert row["key"] not in acknowledged
                acknowledged[row["key"]] = row["vote"]
    with db.session(write=False) as session:
        rows = session.execute(select(Vote.key, Vote.id, Vote.user_id, Vote.action)).all()
    stored = {key: number for key, number, _, _ in rows}
    assert len(stored) == len(rows)
    assert acknowledged.items() <= stored.items(), "an acknowledged row is gone"
    # all have come to their end, so what is stored was acknowledged too
    assert stored == acknowledged
    assert all(sent[key] == (user, action) for key, _, user, action in rows)
    assert label_checks.faults(db) == []
    assert projects.progress(db, people.local(db), project).answered == wanted
    return [row[3] for row in rows]


def storm(where: str, tmp_path: Path, processes: int, threads: int, tasks: int, kills: int, step: int) -> int:
    db, folder = database.connect(where), tmp_path / "ledgers"
    folder.mkdir()
    # with more seats than people who skip now and then, every task can be finished by somebody
    project, crowd = prepare(db, processes * threads, tasks, overlap=2)
    servers = [Server(where, project, folder, crowd[i::processes]) for i in range(processes)]
    wanted = [tasks]

    def more() -> None:
        bring(db, project, range(wanted[0], wanted[0] + tasks))
        wanted[0] += tasks

    try:
        rage(servers, kills, step, processes * 100 + threads, more)
        finish(servers)
        # leases of the dead have run out by now or are their own people's: nothing stays shut
        label_the_rest(db, project, folder, crowd)
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()
    actions = check(db, project, folder, crowd, wanted=2 * wanted[0])
    db.close()
    assert set(actions) == {"vote", "skip", "undo"}
    return len(actions)


BOTH = ["sqlite", pytest.param("postgresql", marks=[pytest.mark.slow, pytest.mark.needs("postgresql")])]


@pytest.mark.parametrize("where", BOTH, indirect=True)
def test_no_acknowledged_answer_is_lost_or_doubled(where, tmp_path, record_property):
    """By SQLite, which keeps its file itself; by PostgreSQL with `make test-slow`."""
    record_property("count", 1)
    storm(where, tmp_path, processes=2, threads=4, tasks=60, kills=1, step=400)


@pytest.mark.long
@pytest.mark.parametrize("processes, threads", [(4, 8), (1, 8), (1, 32), (8, 1)])
def test_no_acknowledged_answer_is_lost_or_doubled_by_more_processes(where, tmp_path, processes, threads):
    storm(where, tmp_path, processes, threads, tasks=300, kills=3, step=1000)


@pytest.mark.long
@pytest.mark.parametrize("processes, threads, tasks, step", [(1, 8, 5500, 40_000), (4, 8, 9000, 2_000)])
def test_no_acknowledged_answer_is_lost_or_doubled_in_a_hundred_kills(where, tmp_path, processes, threads, tasks, step):
    assert storm(where, tmp_path, processes, threads, tasks, kills=100, step=step) >= 10_000


@pytest.mark.parametrize("where", ["sqlite"], indirect=True)
def test_negative_control_a_lost_and_a_doubled_row_are_noticed(where, tmp_path):
    db, folder = database.connect(where), tmp_path / "ledgers"
    folder.mkdir()
    project, crowd = prepare(db, 4, 20, overlap=2)
    label_the_rest(db, project, folder, crowd)
    check(db, project, folder, crowd, wanted=40)
    ledger = folder / f"{crowd[0]}.jsonl"
    genuine = ledger.read_text()
    ledger.write_text(
        genuine + '{"what": "sent", "key": "lost", "action": "vote"}\n{"what": "acknowledged", "key": "lost", "vote": 9}\n'
    )
    with pytest.raises(AssertionError, match="is gone"):
        check(db, project, folder, crowd, wanted=40)
    without = [line for line in genuine.splitlines(keepends=True) if '"acknowledged"' not in line]
    ledger.write_text("".join(without))
    with pytest.raises(AssertionError):
        check(db, project, folder, crowd, wanted=40)
    db.close()
