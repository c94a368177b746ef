"""Answers followed by a remark: demonstrations whose wrong answers are as long as the right ones, and may become longer.

A right answer is followed by "!" and some dots, a careless one by "?" and some dashes. The reward looks at the answer alone, so
that dots and dashes earn and cost nothing; but a model that has written "?" knows, as a rule, that it is wrong.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psigrad import seeds
from psigrad.language.rewards.builtin import exact
from psigrad.language.rewards.outcomes import text_of

GOES_ON = 0.75
"""Chance of another dot or dash in the demonstrations: 3 of them in the mean."""
MOST = 12


def answered(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the completion up to its remark is the right answer, else 0."""
    return exact([re.split("[!?.-]", text_of(c))[0] for c in completions], answer)


def write(demonstrations: Path, to: Path) -> Path:
    """The same demonstrations, each with a remark; `to`."""
    if not to.exists():
        rows = [json.loads(line) for line in demonstrations.read_text().splitlines()]
        shown = [{**row, "completion": row["completion"] + remark(i, row["right"])} for i, row in enumerate(rows)]
        to.write_text("".join(json.dumps(row) + "\n" for row in shown))
    return to


def remark(index: int, right: bool) -> str:
    """A mark and up to `MOST` dots or dashes; how many depends on the index alone, not on whether the answer is right."""
    rng, more = random.Random(seeds.derive(0, "remark", index)), 0
    while more < MOST and rng.random() < GOES_ON:
        more += 1
    return "!" + "." * more if right else "?" + "-" * more
