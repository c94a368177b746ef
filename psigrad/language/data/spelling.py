"""The demo's task, which needs no other library: words to spell backward, made and scored as by reasoning-gym, to the bit."""

from __future__ import annotations

import functools
import lzma
import random
from importlib import resources
from typing import Any

TASK = "spell_backward"
SHORTEST, LONGEST = 3, 8


@functools.cache
def words() -> tuple[str, ...]:
    """88,186 words of 3 to 8 letters from Webster's Second (1934, in the public domain), in the order of reasoning-gym's file."""
    packed = resources.files("psigrad.language.data").joinpath("words.txt.xz").read_bytes()
    return tuple(lzma.decompress(packed).decode().split("\n"))


def makes(name: str, settings: dict[str, Any]) -> bool:
    """Whether `rows` can make this task with these settings; reasoning-gym makes every other one."""
    if name != TASK or not settings.keys() <= {"min_word_len", "max_word_len"}:
        return False
    shortest, longest = settings.get("min_word_len", 3), settings.get("max_word_len", 10)  # its defaults
    return bool(SHORTEST <= shortest <= longest <= LONGEST)


def rows(size: int, seed: int, *, min_word_len: int = SHORTEST, max_word_len: int) -> list[dict[str, Any]]:
    """`size` rows of words between these lengths; row i depends on `seed` + i only."""
    known, found = [word for word in words() if min_word_len <= len(word) <= max_word_len], []
    lengths = {"difficulty": {"word_len": (min_word_len, max_word_len)}}
    for i in range(size):
        word = random.Random(seed + i).choice(known)
        about = {"source_dataset": TASK, "source_index": i, "word": word, "word_len": len(word), **lengths}
        prompt = f"Spell this word backward (example: sun -> nus): {word}"
        found.append({"prompt": prompt, "answer": word[::-1], "task": TASK, "metadata": about})
    return found


def score(text: str, entry: dict[str, Any]) -> float:
    """1 for the answer in any case of letters, else the share of its places that hold its letter; 0.8 for it with more behind."""
    said, answer, share = text.lower(), entry["answer"].lower(), 0.0
    if said == answer:
        return 1.0
    for place in range(min(len(said), len(answer))):
        share += (said[place] == answer[place]) / len(answer)  # one at a time, for reasoning-gym's rounding
    return 0.8 if share == 1 else share
