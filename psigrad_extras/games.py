"""Three small text environments with a known best strategy, for small models on a laptop.

Each has `rows(count, seed)` for episodes, `demonstrations(count, seed)` for imitation beforehand, and the return of the best
strategy.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

Row = dict[str, Any]
_NUMBER = re.compile(r"-?\d+")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class TextEnvironment(ABC):
    """A text environment that also makes demonstrations of careless play, of at most `longest` turns."""

    longest: ClassVar[int] = 100

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> None:
        """Start an episode with the row's columns."""

    @abstractmethod
    def step(self, completion: str) -> tuple[str, float, bool]:
        """Return (answer, reward, done) for the policy's turn."""

    @classmethod
    @abstractmethod
    def rows(cls, count: int, seed: int) -> list[Row]:
        """Return rows for `count` episodes."""

    @abstractmethod
    def careless(self, rng: random.Random, talk: list[dict[str, str]]) -> str:
        """Return the next turn of a careless player, given the conversation so far."""

    @classmethod
    def demonstrations(cls, count: int, seed: int) -> list[Row]:
        """Return demonstrations of careless play (`careless`)."""
        rng, made = random.Random(seed), []
        for row in cls.rows(count, seed):
            game, talk = cls(), list(row["prompt"])
            game.reset(row)
            for left in reversed(range(cls.longest)):
                talk.append(_turn("assistant", game.careless(rng, talk)))
                observation, _, done = game.step(talk[-1]["content"])
                if done or not left:
                    break
                talk.append(_turn("user", observation))
            made.append({"messages": talk})
        return made


@dataclass
class GuessNumber(TextEnvironment):
    """A game of guessing a secret number from 1 to `high`. The answer to a wrong guess is "higher" or "lower".

    The reward for the right guess is 1 − 0.1 · (number of guesses before it). A guess that the previous answers rule out, or that
    is not a number, has the reward −0.2. The best strategy is to halve the interval.
    """

    high: ClassVar[int] = 7
    secret: int = 0
    guesses: int = 0
    open: tuple[int, int] = (1, 7)

    def reset(self, row: Mapping[str, Any]) -> None:
        """Start an episode with the row's secret."""
        self.secret, self.open = int(row["secret"]), (1, self.high)

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Compare the guess with the secret, and return (answer, reward, done)."""
        found = _NUMBER.fullmatch(completion.strip())
        self.guesses += 1
        if found is None:
            return "a number please", -0.2, False
        guess, (low, high) = int(found.group()), self.open
        if guess == self.secret:
            return "", 1 - 0.1 * (self.guesses - 1), True
        cost = 0.0 if low <= guess <= high else -0.2
        self.open = (max(low, guess + 1), high) if guess < self.secret else (low, min(high, guess - 1))
        return "higher" if guess < self.secret else "lower", cost, False

    @classmethod
    def rows(cls, count: int, seed: int) -> list[Row]:
        """Return rows with uniformly drawn secrets."""
        rng = random.Random(seed)
        return [{"prompt": [_turn("user", f"1 to {cls.high}?")], "secret": rng.randint(1, cls.high)} for _ in range(count)]

    def careless(self, rng: random.Random, talk: list[dict[str, str]]) -> str:
        """Return a guess: half of the guesses are random numbers, and half are random possible ones."""
        return str(rng.randint(*self.open) if rng.random() < 0.5 else rng.randint(1, self.high))


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> int:
    """Return the value of an expression with +, −, × and whole numbers. Raises `ValueError` for anything else."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=number) if type(number) is int:  # True is an int too
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"{expression!r} is not a sum, difference or product of whole numbers")

    if len(expression) > 100:
        raise ValueError("the expression is longer than 100 characters")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression") from error


@dataclass
class Calculator(TextEnvironment):
    """A question for the product of two two-digit numbers, with a calculator.

    If the policy writes "= 12*34", the calculator answers with the value. Any other number is the policy's final answer. The
    reward is 1 for the right answer, minus 0.05 for each use of the calculator. The best strategy is to use it once and copy the
    result.
    """

    answer: int = 0
    uses: int = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """Start an episode with the row's answer."""
        self.answer = int(row["answer"])

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Answer an expression by the calculator, or judge the policy's final answer."""
        text = completion.strip()
        if text.startswith("="):
            self.uses += 1
            try:
                return str(calculate(text[1:])), 0.0, False
            except ValueError:
                return "error", 0.0, False
        found = _NUMBER.fullmatch(text)
        right = found is not None and int(found.group()) == self.answer
        return "", max(0.0, 1 - 0.05 * self.uses) if right else 0.0, True

    @classmethod
    def rows(cls, count: int, seed: int) -> list[Row]:
        """Return rows with pairs of two-digit numbers."""
        rng = random.Random(seed)
        pairs = [(rng.randint(11, 99), rng.randint(11, 99)) for _ in range(count)]
        return [{"prompt": [_turn("user", f"{a}*{b}?")], "answer": a * b} for a, b in pairs]

    def careless(self, rng: random.Random, talk: list[dict[str, str]]) -> str:
        """Return the next turn: half of the answers are guesses, and a third of the calculator's uses compute a sum."""
        if self.uses:
            return talk[-1]["content"]
        question = talk[0]["content"].rstrip("?")
        if rng.random() < 0.5:
            return f"= {question if rng.random() < 2 / 3 else question.replace('*', '+')}"
        return str(self.answer + rng.choice((-10, -1, 1, 10, 100)))


@dataclass
class TextGrid(TextEnvironment):
    """A walk on a 4×4 grid to a goal, by the letters n, s, e, w. The goal or a trap ends it.

    The reward is 1 at the goal, −1 in the trap, and −0.05 for every other step. A step against the edge stays in its cell.
    """

    size: ClassVar[int] = 4
    longest = 12
    moves: ClassVar[dict[str, tuple[int, int]]] = {"n": (0, -1), "s": (0, 1), "e": (1, 0), "w": (-1, 0)}
    at: tuple[int, int] = (0, 0)
    goal: tuple[int, int] = (0, 0)
    trap: tuple[int, int] = (0, 0)

    def reset(self, row: Mapping[str, Any]) -> None:
        """Start an episode with the row's start, goal and trap."""
        self.at, self.goal, self.trap = (tuple(row[name]) for name in ("start", "goal", "trap"))

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Move by the first letter of the completion. Any other text counts as a step that stays in the cell."""
        dx, dy = self.moves.get(completion.strip()[:1], (0, 0))
        x, y = self.at[0] + dx, self.at[1] + dy
        self.at = (min(max(x, 0), self.size - 1), min(max(y, 0), self.size - 1))
        if self.at == self.goal:
            return "", 1.0, True
        if self.at == self.trap:
            return "", -1.0, True
        return self.describe(self.at, self.goal, self.trap), -0.05, False

    @staticmethod
    def describe(at: tuple[int, int], goal: tuple[int, int], trap: tuple[int, int]) -> str:
        """Return the observation as text: the positions of the walker, the goal and the trap."""
        return f"at {at[0]}{at[1]} goal {goal[0]}{goal[1]} trap {trap[0]}{trap[1]}"

    @classmethod
    def rows(cls, count: int, seed: int) -> list[Row]:
        """Return rows with three different cells: start, goal and trap."""
        rng = random.Random(seed)
        cells = [(x, y) for x in range(cls.size) for y in range(cls.size)]
        made = []
        for _ in range(count):
            start, goal, trap = rng.sample(cells, 3)
            row = {"prompt": [_turn("user", cls.describe(start, goal, trap))], "start": start, "goal": goal, "trap": trap}
            made.append({name: list(value) if isinstance(value, tuple) else value for name, value in row.items()})
        return made

    def careless(self, rng: random.Random, talk: list[dict[str, str]]) -> str:
        """Return a move. Two thirds of the moves are right, and the others are random."""
        (x, y), (gx, gy) = self.at, self.goal
        right = ("e" if gx > x else "w") if gx != x else ("s" if gy > y else "n")
        return right if rng.random() < 2 / 3 else rng.choice("nsew")


GAMES: dict[str, Any] = {"guess": GuessNumber, "calculator": Calculator, "grid": TextGrid}
