"""Answers followed by a remark: demonstrations whose wrong answers are as long as the right ones, and may become longer.

A right answer is followed by "!", a careless one by "?", and either by some dots. The reward looks at the answer alone, so the
dots earn and cost nothing; but a model that has written "?" mostly knows that it is wrong.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psigrad import seeds
from psigrad.rewards.builtin import exact
from psigrad.rewards.outcomes import text_of

GOES_ON = 0.75
"""Chance of another dot in the demonstrations: 3 dots in the mean."""
MOST = 12


def answered(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the completion up to its remark is the right answer, else 0."""
    return exact([re.split("[!?.]", text_of(c))[0] for c in completions], answer)


def write(demonstrations: Path, to: Path) -> Path:
    """The same demonstrations, each with a remark; `to`."""
    if not to.exists():
        rows = [json.loads(line) for line in demonstrations.read_text().splitlines()]
        shown = [{**row, "completion": row["completion"] + remark(i, row["right"])} for i, row in enumerate(rows)]
        to.write_text("".join(json.dumps(row) + "\n" for row in shown))
    return to


def remark(index: int, right: bool) -> str:
    """A mark and up to `MOST` dots; how many depends on the index alone, not on whether the answer is right."""
    rng, dots = random.Random(seeds.derive(0, "remark", index)), 0
    while dots < MOST and rng.random() < GOES_ON:
        dots += 1
    return ("!" if right else "?") + "." * dots
