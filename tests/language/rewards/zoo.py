"""Reward functions that misbehave. Imports little: workers load this file again after every hang."""

from __future__ import annotations

import asyncio
import ctypes
import decimal
import fractions
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psigrad.language.rollout.scoring import Failure


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


class Fussy(Failure):
    """Cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def _raise(error: BaseException) -> float:
    raise error


def _forever() -> float:
    while True:
        pass


def _power() -> float:
    return float(9**9**9**9)  # one C call that never lets go of the interpreter lock


def _deaf() -> float:
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _forever()


def _blocked() -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    return _forever()


def _child() -> float:
    """A hang with a grandchild that would outlive a kill of the worker alone; its number is left in a file."""
    import subprocess

    process = subprocess.Popen(["sleep", "60"])
    with open(os.environ["ZOO_CHILD"], "w") as stream:
        stream.write(str(process.pid))
    return _forever()


def _print() -> float:
    print("x" * 100_000)
    os.write(1, b"\0\1\2" * 1000)
    sys.stdout.write("not a frame")
    sys.__stdout__.write("\n")
    os.system("echo from a shell")
    return 1.0


HANGS: dict[str, Callable[[], float]] = {
    "loop": _forever,
    "power": _power,
    "sleep": lambda: time.sleep(60) or 0.0,
    "deaf": _deaf,
    "blocked": _blocked,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP) or 0.0,
    "child": _child,
}
DEATHS: dict[str, Callable[[], float]] = {
    "os._exit": lambda: os._exit(0),
    "segfault": lambda: float(len(ctypes.string_at(0))),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL) or 0.0,
}
RAISES: dict[str, Callable[[], float]] = {
    "raise": lambda: _raise(ValueError("boom")),
    "sys.exit": lambda: sys.exit(3),
    "unprintable": lambda: _raise(Unprintable()),
    "long": lambda: _raise(ValueError("x" * 1_000_000)),
    "surrogate": lambda: _raise(ValueError("\ud800\0")),
    "recursion": lambda: _raise(RecursionError("deep")),
    "memory": lambda: _raise(MemoryError()),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "ok": lambda: 1.0,
    "half": lambda: 0.5,
    "none": lambda: None,
    "print": _print,
    "fail": lambda: _raise(Failure("no answer tag")),
    "fussy": lambda: _raise(Fussy("no", "answer")),
    "failure": lambda: Failure("no answer tag"),
    "fussy value": lambda: Fussy("no", "answer"),
}


def act(completions: list[str], **columns: Any) -> list[Any]:
    """Each completion names what to do for it."""
    every = {**HANGS, **DEATHS, **RAISES, **OTHERS}
    return [every[text]() for text in completions]


UNDER_WAY = [0]


async def crowd(completions: list[str], **columns: Any) -> list[float]:
    """How many calls are under way with this one; "stuck" does not end."""
    UNDER_WAY[0] += 1
    await asyncio.sleep(60.0 if "stuck" in completions else 0.05)
    UNDER_WAY[0] -= 1
    return [float(UNDER_WAY[0] + 1)] * len(completions)


async def act_async(completions: list[str], **columns: Any) -> list[Any]:
    await asyncio.sleep(0)
    return act(completions)


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def rank_in_group(completions: list[str]) -> list[float]:
    """Depends on who is shown together; takes no columns."""
    return [float(sorted(completions).index(text)) for text in completions]


def columns_only(answer: list[str], prompts: list[str]) -> list[float]:
    return [float(a == p) for a, p in zip(answer, prompts, strict=True)]


def json_fields(completions: list[str], label: list[str]) -> list[float]:
    return [2.0 * bool(json.loads(own)) for own in label]


def one(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def positional_default(completions: list[str], scale: float = 2.0) -> list[float]:
    return [scale] * len(completions)


def hang_on_marked(completions: list[str], **columns: Any) -> list[float]:
    for text in completions:
        if text.startswith("hang"):
            time.sleep(60)
    return length(completions)


def fault_of_odd(completions: list[str], **columns: Any) -> list[Any]:
    return [Failure("odd") if text == "odd" else 1.0 for text in completions]


def nan_for_odd(completions: list[str], **columns: Any) -> list[float]:
    return [float("nan") if text == "odd" else 1.0 for text in completions]


def _tensor(count: int, grad: bool = False) -> Any:
    import torch

    return torch.ones(count, requires_grad=grad) * 1.0


def _array(kind: str, count: int) -> Any:
    import numpy as np

    return {
        "array": np.ones(count),
        "array int": np.ones(count, dtype=np.int32),
        "array bool": np.ones(count, dtype=bool),
        "array column": np.ones((count, 1)),
        "array scalar": np.array(1.0),
        "numpy scalars": [np.float32(1.0)] * count,
        "numpy vectors": [np.ones(2)] * count,
    }[kind]


def of_kind(completions: list[str], kind: list[str]) -> Any:
    """Return what the column `kind` names, which is the same for all."""
    n = len(completions)
    name = kind[0]
    if "array" in name or "numpy" in name:
        return _array(name, n)
    made: dict[str, Callable[[], Any]] = {
        "list": lambda: [1.0] * n,
        "tuple": lambda: (1.0,) * n,
        "range": lambda: range(1, 1 + n),
        "ints": lambda: [1] * n,
        "bools": lambda: [True] * n,
        "fraction": lambda: [fractions.Fraction(1, 1)] * n,
        "decimal": lambda: [decimal.Decimal(1)] * n,
        "tensor": lambda: _tensor(n),
        "tensor on graph": lambda: _tensor(n, grad=True),
        "tensor scalars": lambda: list(_tensor(n)),
        "tensor rows": lambda: [_tensor(2)] * n,
        "nones": lambda: [None] * n,
        "nan": lambda: [float("nan")] * n,
        "inf": lambda: [float("inf")] * n,
        "huge int": lambda: [10**400] * n,
        "complex": lambda: [1j] * n,
        "strings": lambda: ["1"] * n,
        "lists": lambda: [[1.0]] * n,
        "none": lambda: None,
        "float": lambda: 1.0,
        "string": lambda: "1" * n,
        "bytes": lambda: b"1" * n,
        "dict": lambda: dict.fromkeys(range(n), 1.0),
        "set": lambda: {float(i) for i in range(n)},
        "generator": lambda: (1.0 for _ in range(n)),
        "short": lambda: [1.0] * (n - 1),
        "long": lambda: [1.0] * (n + 1),
        "empty": list,
    }
    return made[name]()


async def of_kind_async(completions: list[str], kind: list[str]) -> Any:
    await asyncio.sleep(0)
    return of_kind(completions, kind)


@dataclass(frozen=True)
class Times:
    """A callable with a parameter."""

    factor: float = 1.0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [self.factor] * len(completions)

    def method(self, completions: list[str], **columns: Any) -> list[float]:
        return [10 * self.factor] * len(completions)


TWICE = Times(2.0)


def knows_the_step(completions, trainer_state, **columns):
    return [float(trainer_state.global_step) for _ in completions]
