"""Rewards that come with psigrad, and wrappers of other libraries'. Each has TRL's signature and names its columns."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
from typing import Any

from psigrad.errors import UserError
from psigrad.importing import imported_callable
from psigrad.language.rewards.code import Code
from psigrad.language.rewards.outcomes import Failure, text_of, transcript_of
from psigrad.language.rewards.rubric import Rubric


def exact(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where the completion, stripped of white space at its ends, is the column `answer`; else 0. None where there is no
    answer.
    """
    return [None if a is None else float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


# A sign counts only where it is none of subtraction or hyphen: the last number of "7-5" is 5. A fraction is one number: were
# it two, 3/2 would pass for 1/2.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+(?!\w))?")


@dataclass(frozen=True)
class Numeric:
    """1 where the last number in the completion equals the last one in the column `answer` within `tolerance`, else 0.

    The tolerance is relative where the answer is above 1, else absolute. None where the answer has no number.
    """

    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise UserError(f"numeric: tolerance is {self.tolerance}; it must be 0 or more.")

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
        """1.0, 0.0 or None for each completion."""
        return [self._one(text_of(c), a) for c, a in zip(completions, answer, strict=True)]

    def _one(self, text: str, answer: Any) -> float | None:
        wanted, found = _last_number(str(answer)), _last_number(text)
        if wanted is None:
            return None  # the row has no number to compare with: not applicable, and not the policy's fault
        return float(found is not None and abs(found - wanted) <= self.tolerance * max(1.0, abs(wanted)))


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").partition("/")
    divisor = float(below or 1)
    value = float(above) / divisor if divisor else inf
    return value if isfinite(value) else None


def math(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 where math-verify finds the completion's expression equal to the column `answer`; None where the answer cannot be parsed.

    An unparsable gold answer must not count as a hit: open-r1 once gave 1.0 for it.
    """
    from math_verify import parse, verify

    # its time-outs need the main thread's SIGALRM; the pool's own stops what hangs, so the warning that they are off is noise
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    out: list[float | None] = []
    for completion, wanted in zip(completions, answer, strict=True):
        gold = parse(str(wanted), parsing_timeout=None) or parse(f"${wanted}$", parsing_timeout=None)
        if wanted is None or all(isinstance(form, str) for form in gold):
            out.append(None)
            continue
        out.append(float(verify(gold, parse(text_of(completion), parsing_timeout=None), timeout_seconds=None)))
    return out


@dataclass(frozen=True)
class Format:
    """1 where the whole completion matches `pattern`: by default reasoning in <think>, then an answer in <answer>."""

    pattern: str = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"format: pattern {self.pattern!r} is not a regular expression ({error}).") from error

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """1.0 or 0.0 for each completion."""
        return [float(re.fullmatch(self.pattern, text_of(c), re.DOTALL) is not None) for c in completions]


def reasoning_gym(
    completions: Sequence[Any], task: Sequence[str], answer: Sequence[Any], metadata: Sequence[Any], **columns: Any
) -> list[float | Failure]:
    """The score of the reasoning-gym task named in the column `task`, for rows made by `psigrad.language.data.tasks`.

    Some of its scorers (prime_factorization's, boxnet's, game_of_life's) raise on text that they cannot read. One that reads
    its own answer is sound, so the completion is at fault: a `Failure`.
    """
    entries = [{"question": "", "answer": a, "metadata": m} for a, m in zip(answer, metadata, strict=True)]
    return [
        _reasoning_gym(name, _scorer(name), text_of(c).strip(), entry)
        for c, name, entry in zip(completions, task, entries, strict=True)
    ]


def _reasoning_gym(task: str, scorer: Callable[..., float], text: str, entry: dict[str, Any]) -> float | Failure:
    try:
        return float(scorer(text, entry))
    except Exception as error:
        scorer(entry["answer"], entry)  # raises where the row is at fault, which is ours
        return Failure(f"the scorer of {task} cannot read it ({type(error).__name__})")


@cache
def _scorer(task: str) -> Callable[..., float]:
    """reasoning-gym builds a whole dataset to get at its scorer, which takes a tenth of a second; once is enough."""
    import reasoning_gym as gym

    scorer: Callable[..., float] = gym.get_score_answer_fn(task)
    return scorer


def similarity(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 − edits / length: how near the completion is to the column `answer`. Edits are Levenshtein's (1966), the length is the
    longer text's. None where there is no answer.
    """
    return [
        None if a is None else _similarity(text_of(c).strip(), str(a).strip()) for c, a in zip(completions, answer, strict=True)
    ]


def _similarity(a: str, b: str) -> float:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return 1 - row[-1] / max(len(a), len(b), 1)


@dataclass(frozen=True)
class Length:
    """-penalty · tokens / max_completion_length: a plain cost of length, 0 for an empty completion."""

    max_completion_length: int = 256
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_completion_length <= 0:
            raise UserError(f"length: max_completion_length is {self.max_completion_length}; it must be above 0.")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """One cost per completion, from 0 down to `-penalty` at the longest allowed length."""
        return [0.0 - self.penalty * len(ids) / self.max_completion_length for ids in completion_ids]


@dataclass(frozen=True)
class SoftOverlong:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    With n tokens, L = max_completion_length, C = soft_punish_cache:
    0 for n <= L - C; (L - C - n) / C for L - C < n <= L; -1 for n > L.
    """

    max_completion_length: int = 256
    soft_punish_cache: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.soft_punish_cache <= self.max_completion_length:
            raise UserError(
                f"soft_overlong: soft_punish_cache is {self.soft_punish_cache}; it must be above 0 and at most "
                f"max_completion_length ({self.max_completion_length})."
            )

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """One cost per completion, from 0 down to -1, by its length in tokens."""
        free = self.max_completion_length - self.soft_punish_cache
        return [max(-1.0, min(0.0, (free - len(ids)) / self.soft_punish_cache)) for ids in completion_ids]


@dataclass(frozen=True)
class Verl:
    """A verl reward: `compute_score(data_source, solution_str, ground_truth, extra_info)` -> number or {"score": number, …}.

    Reads verl's columns: `data_source`, `reward_model` ({"ground_truth": …}; or a column `ground_truth`) and `extra_info`.
    """

    function: str = ""
    whole_conversation: bool = False
    """Whether `solution_str` is all that was said, tools and environment too, in place of what the policy said last."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score per completion, from verl's columns."""
        compute = _import_wrapped("verl", self.function)
        count = len(completions)
        sources, extras = (columns.get(name) or [None] * count for name in ("data_source", "extra_info"))
        models = columns.get("reward_model") or [{"ground_truth": g} for g in columns.get("ground_truth") or [None] * count]
        scores: list[float | None] = []
        for completion, source, model, extra in zip(completions, sources, models, extras, strict=True):
            read = transcript_of if self.whole_conversation else text_of
            score = compute(source, read(completion), (model or {}).get("ground_truth"), extra)
            scores.append(score["score"] if isinstance(score, Mapping) else score)
        return scores


@dataclass(frozen=True)
class Verifiers:
    """A verifiers rubric function: any of `prompt, completion, answer, info, state` by argument name -> number; may be async.

    `answer` and `info` are the columns of that name.
    """

    function: str = ""
    whole_conversation: bool = True

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """One score per completion."""
        rubric = _import_wrapped("verifiers", self.function)
        wanted = inspect.signature(rubric).parameters
        scores: list[float | None] = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            given: dict[str, Any] = {"prompt": prompt, "completion": completion, "state": {}}
            given |= {name: (columns.get(name) or [None] * len(completions))[i] for name in ("answer", "info")}
            value = rubric(**{name: given[name] for name in wanted if name in given})
            scores.append(_run(value) if inspect.iscoroutine(value) else value)
        return scores


def _run(coroutine: Any) -> float | None:
    import asyncio  # a third of a worker's start-up, and few rewards need it

    value: float | None = asyncio.run(coroutine)
    return value


@cache
def _import_wrapped(kind: str, function: str) -> Callable[..., Any]:
    """The function that an adapter wraps."""
    if not function:
        raise UserError(f"The reward {kind!r} wraps a function; write it as {{reward: {kind}, function: module:name}}.")
    found: Callable[..., Any] = imported_callable(function, "reward")
    return found


NAMES: dict[str, Callable[..., Any]] = {
    "exact": exact,
    "numeric": Numeric(),
    "math": math,
    "format": Format(),
    "reasoning_gym": reasoning_gym,
    "similarity": similarity,
    "length": Length(),
    "soft_overlong": SoftOverlong(),
    "code": Code(),
    "rubric": Rubric(),
    "verl": Verl(),
    "verifiers": Verifiers(),
}
