"""How fast rows of chat become tokens: `python benchmarks/rows.py TOKENIZER [--rows 100000] [--turns 1]`.

`psigrad sft` is started twice on rows of psigrad's own pages, and ends where its rows are tokens. The first start encodes them,
on all cores, and keeps them; the second finds them kept. What is printed is rows a second at the first and seconds at the second.
TOKENIZER is a folder or the name of one on the hub.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from psigrad.config import Data, Model, Run, SFTConfig
from psigrad.language.models import tiny
from psigrad.language.recipes import sft
from psigrad.runs.machine import cores, provenance

WORDS = 30  # of a turn


def make(folder: Path, tokenizer: str, rows: int, turns: int) -> None:
    """A model as small as the vocabulary lets it be, and conversations of so many answers."""
    draw, own = random.Random(0), AutoTokenizer.from_pretrained(tokenizer)
    tiny.model("qwen3", len(own), hidden=16, layers=1, heads=2, max_length=2048).save_pretrained(folder / "model")
    own.save_pretrained(folder / "model")
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    words = " ".join(page.read_text() for page in pages).split()

    def said(role: str) -> dict[str, str]:
        begin = draw.randrange(len(words) - WORDS)
        return {"role": role, "content": " ".join(words[begin : begin + WORDS])}

    with (folder / "rows.jsonl").open("w") as stream:
        for _ in range(rows):
            stream.write(json.dumps({"messages": [said(role) for _ in range(turns) for role in ("user", "assistant")]}) + "\n")


class Enough(Exception):
    """The rows are there."""


def start(folder: Path) -> None:
    """`psigrad sft` up to its rows: prints the seconds that they took, how many there are, and the tokens of one."""
    prepare = sft.prepare

    def timed(*given: Any) -> Any:
        begin = time.perf_counter()
        found = prepare(*given)
        seconds, some = time.perf_counter() - begin, found.made[:100]
        print(json.dumps([seconds, len(found.made), sum(len(one.ids) for row in some for one in row) / len(some)]))
        raise Enough

    sft.prepare = timed
    run = Run(output_dir=str(folder / f"run-{os.getpid()}"), max_steps=1, progress=False, report=False)
    with contextlib.suppress(Enough):
        sft.run(SFTConfig(model=Model(path=str(folder / "model")), data=Data(dataset=str(folder / "rows.jsonl")), run=run))


def main() -> None:
    """Start it twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=1, help="answers of a conversation")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), given.tokenizer, given.rows, given.turns)
        kept = {**os.environ, "PSIGRAD_CACHE": str(Path(name) / "cache")}
        command = [sys.executable, __file__, "--start", name]
        first, second = (
            json.loads(subprocess.run(command, env=kept, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
            for _ in range(2)
        )
    assert first[1:] == second[1:], "the second start has other rows"
    print(f"{given.rows} rows of {given.turns} answers, {first[2]:.0f} tokens; {cores()} cores, {provenance('cpu')['processor']}")
    print(f"first start: {first[0]:.1f} s, {given.rows / first[0]:.0f} rows a second; second start: {second[0]:.2f} s")


if __name__ == "__main__":
    start(Path(sys.argv[2])) if sys.argv[1:2] == ["--start"] else main()
