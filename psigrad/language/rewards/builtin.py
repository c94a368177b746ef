"""The built-in rewards, and wrappers of other libraries' rewards. Each has TRL's signature and takes its columns by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from psigrad import extras
from psigrad.errors import UserError
from psigrad.importing import imported_callable
from psigrad.language.data import tasks
from psigrad.language.rewards.benchmarks import Choice
from psigrad.language.rewards.code import Code
from psigrad.language.rewards.golds import accepted, normalise, spellings
from psigrad.language.rewards.math_answers import Math
from psigrad.language.rewards.numeric import Numeric
from psigrad.language.rewards.reward_worker import finish
from psigrad.language.rollout.scoring import Failure, text_of, transcript_of


@dataclass(frozen=True)
class Exact:
    """A reward of 1 if the completion equals the answer in the column `answer`, or one of a list of answers; otherwise 0.

    White space at both ends, and Unicode variants of a letter or a space (NFC, no-break spaces), make no difference. A number
    can be written with an exponent or in plain decimals. The reward is None if there is no answer.
    """

    __name__ = "exact"
    quick_check = True

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return 1.0, 0.0 or None for each completion."""
        golds = [spellings(one) for one in answer]
        return [float(normalise(text_of(c)) in ways) if ways else None for c, ways in zip(completions, golds, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `UserError` for an answer that cannot be compared."""
        accepted(row.get("answer"))


_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
_THOUGHT_AND_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"


exact, math = Exact(), Math()


@dataclass(frozen=True)
class Format:
    """A reward of 1 if the whole completion matches `pattern`, otherwise 0.

    The default pattern is one block of reasoning in <think>, then one answer in <answer>, with no such tags inside the two blocks
    and only white space around them. If the prompt ends with <think>, which some chat templates write before each answer, the
    default pattern is matched with that tag before the completion.
    """

    pattern: str = _THOUGHT_AND_ANSWER

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(f"format: pattern {self.pattern!r} is not a regular expression ({error}).") from error

    def __call__(self, completions: Sequence[Any], opened_thoughts: Sequence[str] = (), **columns: Any) -> list[float]:
        """Return 1.0 or 0.0 for each completion."""
        begun = opened_thoughts if opened_thoughts and self.pattern == _THOUGHT_AND_ANSWER else [""] * len(completions)
        texts = [tag + text_of(c) for tag, c in zip(begun, completions, strict=True)]
        return [float(re.fullmatch(self.pattern, text, re.DOTALL) is not None) for text in texts]


def reasoning_gym(
    completions: Sequence[Any], task: Sequence[str], metadata: Sequence[Any], answer: Sequence[Any] = (), **columns: Any
) -> list[float | Failure | None]:
    """Return the scores of the reasoning-gym task named in the column `task`, for rows of `psigrad.language.data.tasks`.

    The score is None if a row has no task. Some scorers of reasoning-gym (such as that of prime_factorization) raise on text that
    they cannot parse. If such a scorer can still parse the row's own answer, the completion is at fault, and its score is a
    `Failure`. Otherwise the error is raised.
    """
    entries = [{"question": "", "answer": a, "metadata": m} for a, m in zip(answer or [None] * len(task), metadata, strict=True)]
    return [
        None if name is None else _reasoning_gym(name, _scorer(name), text_of(c).strip(), entry)
        for c, name, entry in zip(completions, task, entries, strict=True)
    ]


def _reasoning_gym(task: str, scorer: Callable[..., float], text: str, entry: dict[str, Any]) -> float | Failure:
    if task in _BOARDS:
        entry = {**entry, "metadata": _as_tuples(entry["metadata"])}
    try:
        return float(scorer(text, entry))
    except Exception as error:
        scorer(entry["answer"], entry)  # raises if the row is at fault
        return Failure(f"the scorer of {task} cannot read the answer ({type(error).__name__})")


_BOARDS = ("arc_agi", "rearc")  # their scorers compare boards of tuples, which files store as lists


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_tuples(inner) for key, inner in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


@cache
def _scorer(task: str) -> Callable[..., float]:
    """Return the scorer of a task.

    It is cached, because reasoning-gym builds a whole dataset to get the scorer, which takes a tenth of a second.
    """
    if task == tasks.TASK:
        return tasks.score_spelling
    scorer: Callable[..., float] = tasks.import_reasoning_gym().get_score_answer_fn(task)
    return scorer


@dataclass(frozen=True)
class Similarity(Exact):
    """A reward of 1 − edits / length: the similarity to the nearest accepted answer of the column `answer`.

    Edits are Levenshtein's (1966), and the length is the longer text's. The reward is None if there is no answer.
    """

    __name__ = "similarity"

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return a share from 0 to 1, or None, for each completion."""
        texts, golds = [normalise(text_of(c)) for c in completions], [spellings(one) for one in answer]
        return [max((_alike(text, way) for way in ways), default=None) for text, ways in zip(texts, golds, strict=True)]


similarity = Similarity()


def _alike(a: str, b: str) -> float:
    return 1 - _edits(a, b) / max(len(a), len(b), 1)


def _edits(a: str, b: str) -> int:
    """Return Levenshtein's distance.

    Two integers encode a column of the distance table. Bit i of the first is set if cell i is one more than the cell above it,
    bit i of the second if it is one less. Thus even two of the longest completions are compared in a fraction of a second.
    Source: Myers 1999, Hyyrö 2003.
    """
    places: dict[str, int] = {}
    for i, letter in enumerate(b):
        places[letter] = places.get(letter, 0) | 1 << i
    whole = (1 << len(b)) - 1
    more, less, edits = whole, 0, len(b)
    for letter in a:
        here = places.get(letter, 0)
        either = here | less
        across = (((here & more) + more) ^ more) | here
        up, down = less | ~(across | more) & whole, more & across
        edits += (up >> len(b) - 1 & 1) - (down >> len(b) - 1 & 1) if b else 1
        up, down = up << 1 | 1, down << 1
        more, less = (down | ~(either | up)) & whole, up & either & whole
    return edits


@dataclass(frozen=True)
class Length:
    """A reward of -penalty · tokens / max_completion_length: a linear cost of length, 0 for an empty completion."""

    max_completion_length: int = 256
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_completion_length <= 0:
            raise UserError(f"length: max_completion_length is {self.max_completion_length}; it must be above 0.")

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        """Return one cost per completion, from 0 down to `-penalty` at the longest allowed length."""
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
        """Return one cost per completion, from 0 down to -1, by its length in tokens."""
        free = self.max_completion_length - self.soft_punish_cache
        return [max(-1.0, min(0.0, (free - len(ids)) / self.soft_punish_cache)) for ids in completion_ids]


@dataclass(frozen=True)
class Verl:
    """A wrapper of a verl reward: `compute_score(data_source, solution_str, ground_truth, extra_info)` -> number or {"score": …}.

    It reads verl's columns: `data_source`, `reward_model` ({"ground_truth": …}; or a column `ground_truth`) and `extra_info`.
    """

    function: str = ""
    whole_conversation: bool = False
    """True if `solution_str` is the whole transcript, with the turns of tools and environment. False: the policy's last turn."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return one score per completion, from verl's columns."""
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
    """A wrapper of a verifiers rubric function, which may be async.

    It takes any of `prompt, completion, answer, info, state` by argument name, and returns a number. `answer` and `info` are the
    columns with these names.
    """

    function: str = ""
    whole_conversation: bool = True

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return one score per completion."""
        rubric = _import_wrapped("verifiers", self.function)
        wanted = inspect.signature(rubric).parameters
        scores: list[float | None] = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            given: dict[str, Any] = {"prompt": prompt, "completion": completion, "state": {}}
            given |= {name: (columns.get(name) or [None] * len(completions))[i] for name in ("answer", "info")}
            value = rubric(**{name: given[name] for name in wanted if name in given})
            scores.append(finish(value) if inspect.isawaitable(value) else value)
        return scores


@cache
def _import_wrapped(kind: str, function: str) -> Callable[..., Any]:
    """Return the function that the reward `kind` ("verl" or "verifiers") wraps, imported from its name `function`."""
    if not function:
        raise UserError(f"The reward {kind!r} needs a function to wrap; write it as {{reward: {kind}, function: module:name}}.")
    found: Callable[..., Any] = imported_callable(function, "reward")
    return found


# The rewards of psigrad_extras/judges/, which are imported on first use.
BESIDE = ("rubric", "ranking", "ifeval")
NAMES: dict[str, Callable[..., Any] | None] = {
    "exact": exact,
    "choice": Choice(),
    "numeric": Numeric(),
    "math": math,
    "format": Format(),
    "reasoning_gym": reasoning_gym,
    "similarity": similarity,
    "length": Length(),
    "soft_overlong": SoftOverlong(),
    "code": Code(),
    **dict.fromkeys(BESIDE),
    "verl": Verl(),
    "verifiers": Verifiers(),
}


def find_reward(name: str) -> Callable[..., Any]:
    """Return the reward of one of `NAMES`."""
    found: Callable[..., Any] = NAMES[name] or extras.load("judges").NAMES[name]
    return found
