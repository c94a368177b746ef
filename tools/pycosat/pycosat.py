"""What reasoning-gym uses of pycosat, in Python: `make install` takes it on a machine without a C compiler or Python's headers.

pycosat has no wheels; reasoning-gym starts it for one task, logic puzzles, and imports it for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Clauses = list[frozenset[int]]


def itersolve(clauses: Iterable[Iterable[int]]) -> Iterator[list[int]]:
    """Every assignment that satisfies all clauses, as the names in order, negative where false."""
    asked = [frozenset(clause) for clause in clauses]
    names = sorted({abs(literal) for clause in asked for literal in clause})
    for found in _models([clause for clause in asked if not any(-literal in clause for literal in clause)], frozenset(), names):
        yield sorted(found, key=abs)


def solve(clauses: Iterable[Iterable[int]]) -> list[int] | str:
    """One such assignment, or "UNSAT"."""
    return next(itersolve(clauses), "UNSAT")


def _models(clauses: Clauses | None, chosen: frozenset[int], names: list[int]) -> Iterator[frozenset[int]]:
    """By Davis, Putnam, Logemann and Loveland."""
    while clauses is not None and (unit := next((clause for clause in clauses if len(clause) < 2), None)) is not None:
        if not unit:
            return
        (literal,) = unit
        clauses, chosen = _with(clauses, literal), chosen | {literal}
    if clauses is None:
        return
    if clauses:
        literal = min(min(clauses, key=len), key=abs)
    else:
        literal = next((name for name in names if name not in chosen and -name not in chosen), 0)
        if not literal:
            yield chosen
            return
    for one in (literal, -literal):
        yield from _models(_with(clauses, one), chosen | {one}, names)


def _with(clauses: Clauses, literal: int) -> Clauses | None:
    """What is left to satisfy where a literal is true; None where that cannot be."""
    left = []
    for clause in clauses:
        if literal in clause:
            continue
        if -literal in clause:
            clause = clause - {-literal}
            if not clause:
                return None
        left.append(clause)
    return left
