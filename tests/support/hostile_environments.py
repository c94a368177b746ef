"""Environments that do what they must not, by what the policy's text asks for. Each counts its turns."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time


class Counting:
    """Answers "NAME n" to its n-th turn; the row's `name` is its name."""

    def reset(self, row):
        self.name, self.turn = row.get("name", "x"), 0
        return None

    def step(self, text):
        self.turn += 1
        self.act(text)
        return f"{self.name} {self.turn}", float(self.turn), text == "end"

    def act(self, text):
        if text == "hang":
            time.sleep(60)
        if text == "exit":
            os._exit(0)
        if text == "sys.exit":
            sys.exit(0)
        if text == "raise":
            raise ValueError("the board fell over")
        if text == "memory":
            bytearray(4 << 30)
        if text == "segfault":
            os.kill(os.getpid(), 11)
        if text == "fork" and os.fork() == 0:
            sys.exit(0)
        if text.startswith("child "):
            subprocess.Popen(["sleep", text.split()[1]], start_new_session=True)
            time.sleep(60)
        if text == "print":
            for _ in range(100):
                sys.stderr.write("y" * (1 << 20))


class Sleepy(Counting):
    """Takes its time, another each time; three turns."""

    def step(self, text):
        time.sleep(random.random() / 50)
        said, _, _ = super().step("")
        return said, float(len(text)), self.turn == 3


class Odd(Counting):
    """Returns what is no step."""

    def step(self, text):
        return {
            "none": None,
            "reward": ("a", "much", False),
            "nan": ("a", float("nan"), False),
            "object": (object(), 1.0, False),
        }[text]


class BadReset(Counting):
    """Hangs or raises at its start, as its row says."""

    def reset(self, row):
        self.act(row["name"])
        return super().reset(row)


class NoWay(Counting):
    """Looks for the network and writes where it must not."""

    def act(self, text):
        import socket

        if text == "network":
            socket.create_connection(("127.0.0.1", 1), timeout=1)
        if text.startswith("write "):
            with open(text.split()[1], "w") as stream:
                stream.write("x")
        if text == "temporary":
            import tempfile

            tempfile.NamedTemporaryFile().close()


def slow_tool(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


class Exiting:
    """What ended a run with status 0 and no model."""

    def reset(self, row):
        return None

    def step(self, text):
        os._exit(0)


class Half(Counting):
    """Every fourth episode hangs, by its row."""

    def step(self, text):
        if self.name == "hangs":
            time.sleep(60)
        return "", float("a" in text), True
