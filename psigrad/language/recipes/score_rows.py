"""The rewards of existing completions: a check of reward functions before any training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from psigrad import redaction
from psigrad.config import Reward
from psigrad.config.sections import parse_columns
from psigrad.errors import UserError
from psigrad.language.data.dataset_layouts import to_turns
from psigrad.language.data.dataset_rows import Row, column_names
from psigrad.language.data.sources import describe_skipped, from_rows, load
from psigrad.language.data.templates import example
from psigrad.language.loading.model_source import load_tokenizer
from psigrad.language.recipes.scorers import samples_of
from psigrad.language.rewards import RewardPool, resolve
from psigrad.language.rewards.builtin import Length, SoftOverlong
from psigrad.language.rewards.row_checks import row_faults
from psigrad.language.rollout.scoring import Failed, Result, Scored, Unscored, explain_unscored

FORM = "prompt-completion"


@dataclass(frozen=True)
class RowScore:
    """The reward of one row."""

    source: str
    """The file and line, or the number of the row."""
    result: Result
    """The reward and its parts (`Scored`), or the reason why there is none (`Failed`, `Unscored`)."""
    seconds: float
    """The time that the reward functions took, including the round trip to the worker process."""

    def row(self) -> dict[str, Any]:
        """Return the score as a dictionary for a line of JSON: source, status, reward, parts, reason, seconds."""
        about: dict[str, Any] = {"source": self.source, "status": type(self.result).__name__.lower()}
        about["reward"] = None
        if not isinstance(self.result, Unscored):
            about |= {"reward": self.result.value, "parts": self.result.parts}
        if not isinstance(self.result, Scored):
            about["reason"] = self.result.reason
        return {**about, "seconds": round(self.seconds, 6)}


def score(
    rewards: Sequence[Reward],
    rows: str | Iterable[Mapping[str, Any]],
    *,
    weights: Sequence[float] = (),
    split: str = "test",
    tokenizer: str = "",
    timeout: float = 10.0,
    columns: str | Mapping[str, str] = "",
    bad_rows: Literal["stop", "skip"] = "stop",
) -> list[RowScore]:
    """Score prompt-completion rows by reward functions, in a worker process. Return the scores in the order of the rows.

    `rows` is a file, folder or hub dataset with a `split`, or rows from Python; `columns` renames columns. The functions also
    receive the rows' other columns, and `completion_ids` if `tokenizer` names a model. A reward is the sum of the functions'
    values, each times its weight in `weights` (by default 1). A call has at most `timeout` seconds. `bad_rows="skip"` drops
    malformed rows.
    """
    if not rewards:
        raise UserError("No reward was given; name one with --reward, such as exact or my_module:my_reward.")
    specs = [resolve(reward) for reward in rewards]
    counting = [spec.name for spec in specs if isinstance(spec.function, Length | SoftOverlong)]
    if counting and not tokenizer:
        raise UserError(f"The reward {counting[0]} counts tokens; use --tokenizer to name the model whose tokenizer counts them.")
    named = isinstance(rows, str | os.PathLike)
    if named and not rows:
        raise UserError("No dataset was given; name a file of prompt-completion rows with --dataset.")
    renamed = parse_columns(columns)
    if named:
        read = load(str(rows), form=FORM, split=split, columns=renamed, bad_rows=bad_rows)
    else:
        read = from_rows(list(rows), FORM, columns=renamed, bad_rows=bad_rows)
    if read.skipped:
        redaction.log("rows_skipped", describe_skipped(read.skipped))
    ids_of, names = _ids(tokenizer), column_names(read.rows)
    samples = [replace(samples_of([row], names), completion_ids=[ids_of(row)]) for row in read.rows]
    faults = row_faults(specs, samples, timeout=timeout)
    found = []
    with RewardPool(specs, weights=weights, timeout=timeout) as pool:
        for row, one, fault in zip(read.rows, samples, faults, strict=True):
            scoring = pool.begin()
            start = time.perf_counter()
            scoring.add(one)
            (result,) = scoring.results()
            found.append(RowScore(row.source, Unscored(fault) if fault else result, time.perf_counter() - start))
    return found


def check_scored(scores: Sequence[RowScore]) -> None:
    """Raise `UserError` if no row has a reward. The message gives the most common reason for that."""
    reasons = [s.result.reason if isinstance(s.result, Unscored) else None for s in scores]
    if scores and all(reasons):
        raise UserError(f"{explain_unscored(reasons, [s.source for s in scores])} Fix the reward function or the dataset.")


def summary(scores: Sequence[RowScore]) -> str:
    """Return one line: the number of rows, the mean reward, the numbers of failed and unscored rows, the median time."""
    values = [s.result.value for s in scores if isinstance(s.result, Scored | Failed)]
    failed = sum(isinstance(s.result, Failed) for s in scores)
    mean = f"mean reward {sum(values) / len(values):.4g}" if values else "no reward"
    slow = sorted(s.seconds for s in scores)[len(scores) // 2] if scores else 0.0
    return f"{len(scores)} rows: {mean}, {failed} failed, {len(scores) - len(values)} unscored, {1000 * slow:.2g} ms for a row"


def _ids(tokenizer: str) -> Callable[[Row], list[int]]:
    """Return a function (row) -> the token ids of the row's completion. Without a `tokenizer`, it returns []."""
    if not tokenizer:
        return lambda row: []
    loaded = load_tokenizer(tokenizer)

    def ids_of(row: Row) -> list[int]:
        whole = example(loaded, to_turns(loaded, row))
        return [token for token, own in zip(whole.ids, whole.mask, strict=True) if own]

    return ids_of
