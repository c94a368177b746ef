r"""The reward for multiple-choice answers, and three benchmarks as prompts with few-shot examples, as in lm-eval's harness.

The benchmarks and their columns:
gsm8k: `question`, `answer` ("… #### 72"). math: `problem`, `solution` (with a \boxed{…}), perhaps `answer`. mmlu: `question`,
`choices` (or the columns A, B, C, D), `answer` (the number of a choice from 0, or its letter), perhaps `subject`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import BadRow, Row, RowError, name_columns
from psigrad.language.rewards.golds import accepted, blank
from psigrad.language.rewards.math_answers import Math
from psigrad.language.rewards.numeric import without_emphasis
from psigrad.language.rollout.scoring import text_of

_SAID = re.compile(
    r"\\boxed\{\s*(?:\\text\{)?\(?([A-Z])\b|(?:answer|choice|option)\s*(?:is|:)?[\s*:]*\(?([A-Z])\b(?!['’])", re.IGNORECASE
)
_ALONE = re.compile(r"\W*([A-Za-z])\W*(?:\n|$)")
_FIRST = re.compile(r"\W*([A-Za-z])\b(?!['’])")


@dataclass(frozen=True)
class Choice:
    r"""A reward of 1 if the completion chooses an accepted letter, otherwise 0.

    The column `answer` holds one accepted choice or a list of them, each as a letter or as a number from 0. The chosen letter is
    the first line if that is a letter. Otherwise it is the last letter in a \boxed{…} or after "answer is", "choice" or "option".
    Otherwise it is the letter that the completion begins with. The reward is None if the answer is empty.
    """

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return 1.0, 0.0 or None for each completion."""
        golds = [[letter_of(one) for one in accepted(a)] for a in answer]
        return [float(read_choice(text_of(c)) in own) if own else None for c, own in zip(completions, golds, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `UserError` for an answer that is not a choice."""
        for gold in accepted(row.get("answer")):
            letter_of(gold)


def letter_of(answer: Any) -> str:
    """Return the letter of a choice: C for 2, for "c" and for "(C)". Raise `UserError` for anything else."""
    if letter := _letter(answer):
        return letter
    raise UserError(f"the answer {str(answer)[:60]!r} is neither a letter nor the number of a choice, counted from 0")


def _letter(answer: Any) -> str:
    text = str(answer).strip().strip("().").upper()
    if re.fullmatch(r"\d{1,2}", text) and int(text) < 26:
        return chr(ord("A") + int(text))
    return text if re.fullmatch(r"[A-Z]", text) else ""


def read_choice(text: str) -> str:
    """Return the letter that a completion chooses; empty if it chooses none."""
    text = without_emphasis(text)
    if alone := _ALONE.match(text):
        return alone[1].upper()
    said = [one or other for one, other in _SAID.findall(text)]
    first = _FIRST.match(text)
    return (said[-1] if said else first[1] if first else "").upper()


@dataclass(frozen=True)
class BenchmarkReward:
    """A benchmark's reward: the reward `compare` of the completion up to the first `stop`.

    A base model continues after its answer with the next question, which `stop` cuts off.
    """

    name: str
    compare: Math | Choice
    stop: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return 1.0, 0.0 or None for each completion."""
        texts = map(text_of, completions)
        return self.compare([text.split(self.stop)[0] if self.stop else text for text in texts], **columns)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `UserError` for an answer that cannot be compared."""
        if blank(row.get("answer")):
            raise UserError("the row has no answer")
        self.compare.check_row(row)


@dataclass(frozen=True)
class Benchmark:
    """The format of a benchmark's questions and answers."""

    asked: str
    """The column with the question."""
    template: str
    worked: str
    """The column with an example's answer."""
    stop: str
    """The text that a base model writes after its answer, which ends the answer; empty for none."""
    head: str = ""
    """A text before the question, with the row's columns filled in; left out if the row lacks one of them."""

    def text(self, columns: Mapping[str, Any]) -> str:
        """Return the text of the question as it is written in the prompt, without the answer."""
        return self.template.format(**{name: str(value) for name, value in columns.items()})

    def example(self, columns: Mapping[str, Any]) -> str:
        """Return the question with its answer, and the separator before the next question."""
        return f"{self.text(columns)} {str(columns[self.worked]).strip()}\n\n"


_LETTERS = "ABCDEFGHIJ"
BENCHMARKS = {
    "gsm8k": Benchmark("question", "Question: {question}\nAnswer:", "answer", "\n\nQuestion:"),
    "math": Benchmark("problem", "Problem:\n{problem}\n\nSolution:", "solution", "\n\nProblem:"),
    "mmlu": Benchmark("question", "{question}\n{choices}\nAnswer:", "answer", "",
                      "The following are multiple choice questions (with answers) about {subject}.\n\n"),
}  # fmt: skip


def as_prompts(name: str, rows: Sequence[Row], shots: Sequence[Row]) -> list[Row]:
    """Return the rows as prompts that start with the few-shot examples `shots`. The column `answer` gets the expected answer.

    Raise `RowError` for a row that lacks a column.
    """
    benchmark = BENCHMARKS[name]
    examples = "".join(benchmark.example(_columns(name, shot)) for shot in shots)
    made = []
    for row in rows:
        columns = _columns(name, row)
        subject = str(columns.get("subject") or "").replace("_", " ")
        head = benchmark.head.format(subject=subject) if subject else ""
        answer = columns[benchmark.worked if blank(columns.get("answer")) else "answer"]
        prompt = f"{head}{examples}{benchmark.text(columns)}"
        made.append(replace(row, prompt=prompt, columns={**row.columns, "answer": answer}))
    return made


def letters_of(columns: Mapping[str, Any]) -> str:
    """Return the letters of a row's choices."""
    given = columns.get("choices")
    if isinstance(given, list | tuple):
        return _LETTERS[: len(given)]
    return "".join(letter for letter in _LETTERS if not blank(columns.get(letter)))


def _columns(name: str, row: Row) -> dict[str, Any]:
    columns, benchmark = dict(row.columns), BENCHMARKS[name]
    if name == "mmlu":
        given, answer, letters = columns.get("choices"), columns.get("answer"), letters_of(columns)
        choices = given if isinstance(given, list | tuple) else [columns[letter] for letter in letters]
        if len(letters) > 1 and not blank(answer):
            if (letter := _letter(answer)) not in [*letters]:
                raise RowError(BadRow(row.source, "answer", f"is {answer!r}, which is not one of the {len(letters)} choices"))
            listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=False))
            columns |= {"choices": listed, "answer": letter}
        else:
            columns.pop("choices", None)
    needed = {benchmark.asked, benchmark.worked, *(["choices"] if name == "mmlu" else [])}
    if lacking := sorted(one for one in needed if blank(columns.get(one))):
        reason = f"is missing in a row of the benchmark {name} (found: {name_columns(row.columns)})"
        raise RowError(BadRow(row.source, lacking[0], reason))
    return columns
