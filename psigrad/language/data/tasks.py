"""Procedural tasks from reasoning-gym as dataset rows, and imperfect demonstrations of them.

The demo's task, to spell a word backward, needs no other library. Its rows and scores equal reasoning-gym's bit for bit.
"""

from __future__ import annotations

import functools
import lzma
import random
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from psigrad import extras, seeds
from psigrad.errors import UserError, nearest

TASK = "spell_backward"
SHORTEST, LONGEST = 3, 8


@functools.cache
def load_words() -> tuple[str, ...]:
    """Return 88,186 words of 3 to 8 letters from Webster's Second (1934, public domain), in the order of reasoning-gym's file."""
    packed = resources.files("psigrad.language.data").joinpath("words.txt.xz").read_bytes()
    return tuple(lzma.decompress(packed).decode().split("\n"))


def can_spell(name: str, settings: dict[str, Any]) -> bool:
    """Return True if `spell_rows` can make this task with these settings; reasoning-gym makes all others."""
    if name != TASK or not settings.keys() <= {"min_word_len", "max_word_len"}:
        return False
    shortest, longest = settings.get("min_word_len", 3), settings.get("max_word_len", 10)  # reasoning-gym's defaults
    return bool(SHORTEST <= shortest <= longest <= LONGEST)


def spell_rows(size: int, seed: int, *, min_word_len: int = SHORTEST, max_word_len: int) -> list[dict[str, Any]]:
    """Return `size` rows that ask to spell a word backward. The word of row i depends only on `seed` + i and the two lengths."""
    known, found = [word for word in load_words() if min_word_len <= len(word) <= max_word_len], []
    lengths = {"difficulty": {"word_len": (min_word_len, max_word_len)}}
    for i in range(size):
        word = random.Random(seed + i).choice(known)
        about = {"source_dataset": TASK, "source_index": i, "word": word, "word_len": len(word), **lengths}
        prompt = f"Spell this word backward (example: sun -> nus): {word}"
        found.append({"prompt": prompt, "answer": word[::-1], "task": TASK, "metadata": about})
    return found


def score_spelling(text: str, entry: dict[str, Any]) -> float:
    """Return 1 if `text` is the answer, 0.8 if it continues after it, else the share of matching letters, as in reasoning-gym."""
    said, answer, share = text.lower(), entry["answer"].lower(), 0.0
    if said == answer:
        return 1.0
    for place in range(min(len(said), len(answer))):
        share += (said[place] == answer[place]) / len(answer)  # one at a time, for reasoning-gym's rounding
    return 0.8 if share == 1 else share


def import_reasoning_gym() -> Any:
    """Return the optional module reasoning_gym, or raise `UserError` if it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"Tasks need reasoning-gym, which is not installed. Run `{extras.install_command('tasks')}`. It needs a C compiler "
            "and Python's headers (on Debian gcc and python3-dev). The demo's task, "
            "task:spell_backward,max_word_len=8, needs none of this."
        ) from error
    return reasoning_gym


def task_names() -> list[str]:
    """Return the names of reasoning-gym's tasks."""
    import_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def generate(name: str, size: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """Return `size` rows of a reasoning-gym task: `prompt`, `answer`, `task` and `metadata`.

    The `reasoning_gym` reward can score them. Row i depends on (seed, i) only.
    """
    if can_spell(name, settings):
        return spell_rows(size, seed, **settings)
    reasoning_gym, known = import_reasoning_gym(), task_names()
    if name not in known:
        raise UserError(f"There is no reasoning-gym task {name!r}; `psigrad tasks` lists them{nearest(name, known) or '.'}")
    dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "task": name, "metadata": entry["metadata"]} for entry in dataset
    ]


def generate_distinct(name: str, size: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """Return `size` rows with different prompts, shuffled with `seed`. Raise `UserError` if a task has too few prompts."""
    rows: dict[str, dict[str, Any]] = {}
    drawn = 0
    while len(rows) < size and drawn < 20 * size:
        for row in generate(name, 2 * size, seed + drawn, **settings):
            rows.setdefault(row["prompt"], row)
        drawn += 2 * size
    if len(rows) < size:
        raise UserError(
            f"The task {name!r} gave {len(rows)} different prompts in {drawn} draws, not {size}; lower its size, or change "
            "its settings so that more prompts are possible."
        )
    # A task draws its rare prompts late: without shuffling, the last rows would differ from the first.
    drawn_first = list(rows.values())[:size]
    return [drawn_first[place] for place in seeds.permutation(size, seed, "distinct", name)]


def rows_by_name(text: str) -> list[dict[str, Any]]:
    """Return the rows of "task:NAME" or "task:NAME,size=2000,max_value=60": different prompts in a random order.

    `size` (default 1,000) and `seed` (0) are psigrad's settings. The task defines all others. Raise `UserError` for unknown ones.
    """
    name, *settings = text.removeprefix("task:").split(",")
    given: dict[str, Any] = {"size": 1000, "seed": 0}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign:
            raise UserError(f"{text!r} has {setting!r}; expected settings such as task:{name},size=2000,max_value=60.")
        given[key] = _number(value)
    size, seed = given.pop("size"), given.pop("seed")
    if not isinstance(size, int) or not isinstance(seed, int) or size < 1:
        raise UserError(f"{text!r} has size {size} and seed {seed}; expected whole numbers, size at least 1.")
    try:
        return generate_distinct(name, size, seed, **given)
    except (TypeError, AssertionError, ValueError) as error:  # reasoning-gym checks settings by assertions
        if isinstance(error, UserError):
            raise
        raise UserError(f"The task {name!r} cannot be made with {given}: {error}; see its settings in reasoning-gym.") from error


def _number(text: str) -> int | float | bool | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def demonstrations(
    rows: Sequence[dict[str, Any]], wrong_share: float, mistake: Callable[[str, random.Random], str], seed: int
) -> list[dict[str, Any]]:
    """Return prompt-completion rows. In a share of about `wrong_share`, the completion is `mistake(answer, rng)`.

    The column `right` is True for a right completion.
    """
    shown = []
    for i, row in enumerate(rows):
        rng = random.Random(seeds.derive(seed, "demonstration", i))
        wrong = rng.random() < wrong_share
        answer = mistake(row["answer"], rng) if wrong else row["answer"]
        shown.append(
            {"prompt": row["prompt"], "completion": f" {answer}", "answer": row["answer"], "right": answer == row["answer"]}
        )
    return shown


def swap_ending(answer: str, rng: random.Random) -> str:
    """Return the answer with its last two characters swapped, a slip that is likely in a word spelt backward."""
    return answer[:-2] + answer[:-3:-1]
