"""The result of a run as an object: its figures as tables, its model, and its notebook display."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psigrad import extras
from psigrad.errors import UserError
from psigrad.records.read import auto_class
from psigrad.records.row_lines import read_steps
from psigrad.records.rows import first_and_last, headline, merge_by_step

if TYPE_CHECKING:
    import pandas
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The number of rows of a history that a notebook displays.
_SHOWN = 10


class MetricsHistory(list[dict[str, Any]]):
    """The rows of metrics.jsonl, ordered by "step". Each has the figures of a training step or of an evaluation.

    `pandas.DataFrame(history)` has the same rows; `to_pandas()` merges the rows of each step into one.
    """

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table indexed by "step", with one row for each step: its training metrics and its evaluation metrics."""
        import pandas

        rows = list(merge_by_step(self).values())
        return pandas.DataFrame(rows).set_index("step").sort_index() if rows else pandas.DataFrame()

    def series(self, name: str) -> tuple[list[int], list[Any]]:
        """Return (steps, values) of one metric."""
        rows = [row for row in self if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self[-_SHOWN:] for name in row))
        lines = [[_format(row.get(name)) for name in names] for row in self[-_SHOWN:]]
        note = f"<p>the last {len(lines)} of {len(self)} rows</p>" if len(self) > _SHOWN else ""
        return note + _table(names, lines)


@dataclass(frozen=True)
class Result:
    """The result of a run: its folder, the trained model's folder, and the evaluations `before` and `after` training."""

    folder: Path
    model: Path
    report: Path | None
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def history(self) -> MetricsHistory:
        """The rows of metrics.jsonl, read once."""
        return MetricsHistory(read_steps(self.folder / "metrics.jsonl"))

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest value of every metric, by name: {"reward": 0.91, "eval/exact/mean": 0.78, …}."""
        return {name: value for row in self.history for name, value in row.items()}

    def load(self, **options: Any) -> PreTrainedModel:
        """Load the trained model with transformers; `options` go to `from_pretrained`. An adapter is loaded with its base model.

        Raise `UserError` if the run has not saved a language model.
        """
        import transformers

        config, adapter = self.model / "config.json", self.model / "adapter_config.json"
        if not config.exists() and not adapter.exists():
            raise UserError(f"{self.model} is not a language model; load a control agent with its class, such as PPO.load.")
        model: PreTrainedModel = getattr(transformers, auto_class(self.model)).from_pretrained(self.model, **options)
        return model

    def push_to_hub(self, repo_id: str, *, private: bool = False, revision: str = "") -> str:
        """Upload the model with its card to the hub, as `psigrad push` does, and return the repository's address.

        Raise `UserError` for an invalid name, a missing or rejected token, and an unreachable hub.
        """
        address: str = extras.load("hub").push(self.folder, repo_id, private=private, revision=revision)
        return address

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the trained model."""
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.model)
        return tokenizer

    def _repr_html_(self) -> str:
        """Return the notebook display: the held-out metrics before and after, and the paths."""
        names = [name for name in self.after if name.startswith("eval/") and not name.endswith(("/low", "/high"))]
        ends = first_and_last(self.before, self.after)
        lines = [
            [name.removeprefix("eval/"), *(_format(figures.get(name)) for figures in ends), _interval(self.after, name)]
            for name in names
        ]
        steps = [f"step {figures.get('step', 0)}" for figures in ends]
        table = _table(["held-out", *steps, "95 % interval"], lines) if lines else ""
        places = {"folder": self.folder, "model": self.model, **({"report": self.report} if self.report else {})}
        where = "".join(f"<li>{name}: <code>{html.escape(str(path))}</code></li>" for name, path in places.items())
        return f"<div><p>{self._verdict()}</p>{table}<ul>{where}</ul></div>"

    def _verdict(self) -> str:
        """Return one line of HTML: the main held-out metric before and after training."""
        first, last = headline(self.before), headline(self.after)
        if first is None or last is None or first.name != last.name:
            return f"<b>{html.escape(self.folder.name)}</b>"
        bounds = f" [{last.low:.3g}, {last.high:.3g}]" if (last.low or 0.0) < (last.high or 0.0) else ""
        name = html.escape(last.name)
        return f"<b>{html.escape(self.folder.name)}</b>: held-out {name} {first.value:.3g} → {last.value:.3g}{bounds}"


def _interval(row: Mapping[str, Any], name: str) -> str:
    stem = name.removesuffix("/mean")
    low, high = row.get(f"{stem}/low"), row.get(f"{stem}/high")
    return "" if low is None or high is None or low == high else f"[{_format(low)}, {_format(high)}]"


def _format(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(names: list[str], lines: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
