"""The stand-in for pycosat finds every assignment, and no other: against a list of all of them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import scripts

FILE = Path(__file__).parents[2] / "tools" / "pycosat" / "pycosat.py"


@pytest.fixture(scope="module")
def solver():
    return scripts.load("tools/pycosat/pycosat.py")


def by_trying(clauses):
    names = sorted({abs(literal) for clause in clauses for literal in clause})
    for signs in itertools.product((1, -1), repeat=len(names)):
        chosen = [name * sign for name, sign in zip(names, signs, strict=True)]
        if all(any(literal in chosen for literal in clause) for clause in clauses):
            yield chosen


def test_it_finds_what_trying_all_finds(solver):
    numbers, counts = random.Random(0), set()
    for _ in range(300):
        names = numbers.randint(1, 6)
        clauses = [
            tuple(numbers.choice((-1, 1)) * numbers.randint(1, names) for _ in range(numbers.randint(1, 3)))
            for _ in range(numbers.randint(1, 12))
        ]
        wanted, found = list(by_trying(clauses)), list(solver.itersolve(clauses))
        assert sorted(found) == sorted(wanted)
        assert solver.solve(clauses) in wanted or (not wanted and solver.solve(clauses) == "UNSAT")
        counts.add(min(len(wanted), 2))
    assert counts == {0, 1, 2}, "with none, one and several"


def test_logic_puzzles_are_the_same_by_it(solver, monkeypatch):
    import reasoning_gym
    from reasoning_gym.logic.contrib.logic_puzzle import sat_utils

    made = [list(itertools.islice(reasoning_gym.create_dataset("zebra_puzzles", size=3, seed=3), 3))]
    monkeypatch.setattr(sat_utils, "pycosat", solver)
    made.append(list(itertools.islice(reasoning_gym.create_dataset("zebra_puzzles", size=3, seed=3), 3)))
    assert made[0] == made[1]
    # negative control: a solver that finds none makes others
    monkeypatch.setattr(solver, "itersolve", lambda *_: iter(()))
    assert made[0] != list(itertools.islice(reasoning_gym.create_dataset("zebra_puzzles", size=3, seed=3), 3))
