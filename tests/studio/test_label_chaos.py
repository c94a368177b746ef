"""Labellers over HTTP while the server is killed with SIGKILL: what was acknowledged is there, once."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import label_checks
import private_postgres
import pytest
from sqlalchemy import select

from psigrad_studio.labels import database, intake, invites, passwords, people, projects
from psigrad_studio.labels.projects import ProjectSettings
from psigrad_studio.labels.schema import Vote

CHOICES = ("left", "right", "tie", "both_bad")


class Server:
    """`psigrad studio` in a process of its own, on one port however often it is killed."""

    def __init__(self, where: str, folder: Path) -> None:
        # not one of those that other studios look for: they would take it while this one is down
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.command = [sys.executable, "-m", "psigrad", "studio", str(folder), "--no-open"]
        self.command += ["--port", str(self.port), "--database", where]
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert "enter?key=" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL


@dataclass
class Labeller:
    """A browser that sends again, with the same key, until there is an answer."""

    server: Server
    project: int
    token: str
    csrf: str
    seed: int
    sent: dict[str, str] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    open: str = ""
    repeated: int = 0

    def ask(self, path: str, content: dict) -> tuple[int, dict]:
        headers = {
            "Cookie": f"psigrad-desk-{self.server.port}={self.token}",
            "X-Psigrad-CSRF": self.csrf,
            "Origin": f"http://127.0.0.1:{self.server.port}",
            "Content-Type": "application/json",
        }
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
            try:
                connection.request("POST", path, json.dumps(content), headers)
                response = connection.getresponse()
                found = response.status, json.loads(response.read())
                if found[0] not in (429, 500, 503):
                    return found
            except (http.client.HTTPException, ConnectionResetError, ValueError):
                self.repeated += "key" in content  # it had been sent: whether it was stored, nobody knows
            except OSError:
                pass  # nobody listens now
            finally:
                connection.close()
            time.sleep(0.02)

    def submit(self, action: str, content: dict) -> None:
        key = str(uuid.uuid4())
        self.sent[key] = action
        self.open = key
        status, body = self.ask(f"/api/label/{action}", {**content, "key": key})
        if status == 200:
            self.acknowledged[key] = body["vote"]
        else:
            assert status == 409, (status, body)
        self.open = ""

    def run(self) -> None:
        draw = random.Random(self.seed)
        while True:
            status, body = self.ask("/api/label/next", {"project": self.project})
            assert status == 200, body
            if body["task"] is None:
                return
            action = draw.choices(("vote", "skip", "undo"), (90, 4, 6))[0]
            task = {"assignment": body["task"]["assignment"]}
            what = {"vote": task | {"choice": draw.choice(CHOICES)}, "skip": task, "undo": {"project": self.project}}
            self.submit(action, what[action])


def storm(where: str, folder: Path, labellers: int, tasks: int, kills: int) -> tuple[int, int]:
    """(rows stored, submissions that broke off in the middle and were sent again). The server is killed until that has happened
    after so many kills.
    """
    db = database.connect(where)
    owner = people.local(db)
    project = projects.create(db, owner, ProjectSettings("chaos", overlap=2, lease_s=10))
    intake.add_rows(db, owner, project, [{"prompt": f"question {i}", "completions": ["x", "y"]} for i in range(tasks)])
    logins = [
        invites.accept(db, invites.invite(db, owner, project, "labeller"), f"p{n}", "a long password") for n in range(labellers)
    ]
    server = Server(where, folder)
    crowd = [Labeller(server, project, login.token, login.csrf, n) for n, login in enumerate(logins)]
    threads = [threading.Thread(target=person.run) for person in crowd]
    draw = random.Random(labellers)
    try:
        for thread in threads:
            thread.start()
        caught = 0
        while caught < kills:
            before = sum(p.repeated for p in crowd)
            goal = sum(len(p.acknowledged) for p in crowd) + draw.randrange(5, 12)
            while sum(len(p.acknowledged) for p in crowd) < goal:
                assert any(thread.is_alive() for thread in threads), "everything was labelled before the kills were over"
                time.sleep(0.001)
            while not any(p.open for p in crowd):
                time.sleep(0)
            server.kill()
            server.start()
            caught += sum(p.repeated for p in crowd) > before
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
    finally:
        server.process.kill()
        server.process.communicate()
    rows = check(db, project, crowd)
    # a task may be left to somebody who skipped it, and to nobody else
    progress = projects.progress(db, owner, project)
    assert progress.wanted - progress.answered <= progress.skipped
    db.close()
    return rows, sum(p.repeated for p in crowd)


def check(db: database.Database, project: int, crowd: list[Labeller]) -> int:
    """Every acknowledged row is there exactly once, as what was sent, and nothing that nobody sent."""
    with db.session(write=False) as session:
        rows = session.execute(select(Vote.key, Vote.id, Vote.action).where(Vote.project_id == project)).all()
    stored = {key: number for key, number, _ in rows}
    acknowledged = {key: number for person in crowd for key, number in person.acknowledged.items()}
    sent = {key: action for person in crowd for key, action in person.sent.items()}
    assert len(stored) == len(rows) and len(acknowledged) == sum(len(p.acknowledged) for p in crowd)
    assert acknowledged.items() <= stored.items(), "an acknowledged answer is gone"
    assert stored == acknowledged, "an answer is stored that nobody was told of"
    assert all(sent[key] == action for key, _, action in rows)
    assert label_checks.faults(db) == []
    assert "vote" in Counter(row[2] for row in rows)
    return len(rows)


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch):
    monkeypatch.setattr(passwords, "COST", passwords.ScryptCost(log_n=4, r=1, p=1))


@pytest.fixture
def postgres() -> Iterator[str]:
    with private_postgres.server() as url:
        yield url + "postgres"


@pytest.mark.slow
def test_eight_labellers_and_a_server_that_is_killed(tmp_path):
    rows, broken = storm(str(tmp_path / "labels.db"), tmp_path, labellers=8, tasks=60, kills=2)
    print(f"\n{rows} rows; {broken} submissions broke off and were sent again")
    assert broken >= 2


@pytest.mark.long
@pytest.mark.parametrize("labellers", [8, 32])
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgresql"))])
def test_many_labellers_and_kills(kind, tmp_path, labellers, request):
    where = str(tmp_path / "labels.db") if kind == "sqlite" else request.getfixturevalue("postgres")
    rows, broken = storm(where, tmp_path, labellers, tasks=600, kills=20)
    print(f"\n{rows} rows; {broken} submissions broke off and were sent again")
    assert broken >= 20


def test_negative_control_a_lost_and_an_unknown_answer_are_noticed(tmp_path):
    db = database.connect(tmp_path / "labels.db")
    owner = people.local(db)
    project = projects.create(db, owner, ProjectSettings("control"))
    with pytest.raises(AssertionError, match="is gone"):
        check(db, project, [Labeller(None, project, "", "", 0, {"k": "vote"}, {"k": 1})])
    from psigrad_studio.labels import assignments

    intake.add_rows(db, owner, project, [{"prompt": "q", "completions": ["x", "y"]}])
    assignments.vote(
        db, owner, assignments.next_task(db, owner, project).assignment, assignments.LabelAnswer(choice="left"), "a key for it"
    )
    with pytest.raises(AssertionError, match="nobody was told"):
        check(db, project, [])
    db.close()
