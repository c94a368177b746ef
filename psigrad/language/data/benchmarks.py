r"""Rows of the shape of well-known benchmarks as prompts: the question as their harness puts it, behind worked examples.

gsm8k: `question`, `answer` ("… #### 72"). math: `problem`, `solution` (with a \boxed{…}), perhaps `answer`. mmlu: `question`,
`choices` (or the columns A, B, C, D), `answer` (the number of a choice from 0, or its letter), perhaps `subject`.

Source: Cobbe et al. 2021, arXiv:2110.14168; Hendrycks et al. 2021, arXiv:2103.03874 and arXiv:2009.03300. The templates are those
of EleutherAI's lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psigrad.language.data.dataset_rows import BadRow, Row, RowError, name_columns


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark's rows are asked and answered."""

    asked: str
    """The column with the question."""
    template: str
    worked: str
    """The column with an example's answer."""
    stop: str
    """What a base model goes on with behind its answer, which ends it; empty: nothing."""
    head: str = ""
    """What stands before everything else, where the row has its columns."""

    def text(self, columns: Mapping[str, Any]) -> str:
        """The question as it is asked."""
        return self.template.format(**{name: str(value) for name, value in columns.items()})

    def example(self, columns: Mapping[str, Any]) -> str:
        """The question with its answer, and what parts it from the next."""
        return f"{self.text(columns)} {str(columns[self.worked]).strip()}\n\n"


_LETTERS = "ABCDEFGHIJ"
BENCHMARKS = {
    "gsm8k": Benchmark("question", "Question: {question}\nAnswer:", "answer", "\n\nQuestion:"),
    "math": Benchmark("problem", "Problem:\n{problem}\n\nSolution:", "solution", "\n\nProblem:"),
    "mmlu": Benchmark("question", "{question}\n{choices}\nAnswer:", "answer", "",
                      "The following are multiple choice questions (with answers) about {subject}.\n\n"),
}  # fmt: skip


def as_prompts(name: str, rows: Sequence[Row], shots: Sequence[Row]) -> list[Row]:
    """The rows as prompts behind the examples `shots`, with what is compared in the column `answer`. Raises `RowError` for a row
    that lacks a column.
    """
    benchmark = BENCHMARKS[name]
    examples = "".join(benchmark.example(_columns(name, shot)) for shot in shots)
    made = []
    for row in rows:
        columns = _columns(name, row)
        subject = str(columns.get("subject") or "").replace("_", " ")
        head = benchmark.head.format(subject=subject) if subject else ""
        answer = columns.get("answer") or columns[benchmark.worked]
        prompt = f"{head}{examples}{benchmark.text(columns)}"
        made.append(replace(row, prompt=prompt, columns={**row.columns, "answer": answer}))
    return made


def letters_of(columns: Mapping[str, Any]) -> str:
    """The letters of a row's choices."""
    given = columns.get("choices")
    return (
        _LETTERS[: len(given)]
        if isinstance(given, list | tuple)
        else "".join(x for x in _LETTERS if columns.get(x) not in (None, ""))
    )


def _columns(name: str, row: Row) -> dict[str, Any]:
    columns, benchmark = dict(row.columns), BENCHMARKS[name]
    if name == "mmlu":
        given = columns.get("choices")
        choices = list(given) if isinstance(given, list | tuple) else [columns[letter] for letter in letters_of(columns)]
        answer = columns.get("answer")
        if len(choices) > 1 and answer is not None:
            number = int(answer) if str(answer).strip().isdigit() else _LETTERS.find(str(answer).strip().upper())
            if not 0 <= number < len(choices):
                raise RowError(BadRow(row.source, "answer", f"is {answer!r}, which is none of {len(choices)} choices"))
            listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False))
            columns |= {"choices": listed, "answer": _LETTERS[number]}
        else:
            columns.pop("choices", None)
    needed = {benchmark.asked, benchmark.worked, *(["choices"] if name == "mmlu" else [])}
    if lacking := sorted(one for one in needed if columns.get(one) in (None, "")):
        reason = f"is missing in a row of the shape {name} (found: {name_columns(row.columns)})"
        raise RowError(BadRow(row.source, lacking[0], reason))
    return columns
