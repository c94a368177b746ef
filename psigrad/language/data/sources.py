"""Checked rows from files, folders, hub names, tasks or any iterable. Errors name file, line, column and reason."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from psigrad.config import Data
from psigrad.config.sections import parse_columns
from psigrad.errors import UserError, nearest, several
from psigrad.language.data import dataset_layouts, image_rows, image_urls
from psigrad.language.data.chat.messages import is_trained
from psigrad.language.data.dataset_layouts import Log, to_turns
from psigrad.language.data.dataset_rows import FORMS, MAX_DEPTH, BadRow, Row, RowError, find_form, rows_of
from psigrad.language.data.named_datasets import SINGLE, keep_images_encoded, read_named
from psigrad.language.data.row_files import RawRow, Records
from psigrad.language.data.splits import parse_split
from psigrad.seeds import permutation

_SHOWN = 5
_WEIGHT = re.compile(r"^(.+):(\d+(?:\.\d*)?|\.\d+)$")


@dataclass(frozen=True)
class LoadedRows:
    """The valid rows, the rows skipped with `bad_rows="skip"`, and the number of rows for each note on how rows were read."""

    rows: list[Row]
    skipped: list[BadRow]
    recognised: Mapping[str, int] = field(default_factory=dict)


def load(
    dataset: str,
    *,
    form: str,
    split: str = "train",
    bad_rows: Literal["stop", "skip"] = "stop",
    max_rows: int = 0,
    columns: Mapping[str, str] | None = None,
    single: Sequence[str] = SINGLE,
    urls: bool = False,
) -> LoadedRows:
    """Load the rows of a file (JSONL, JSON, Parquet, CSV or TSV), a folder of such files, a saved or hub dataset, or a task.

    "openai/gsm8k:main" is a hub dataset and its configuration, "task:NAME" a reasoning-gym task. `form` is a key of `FORMS` or
    "sft". `split` can include a slice: train[:90%]. If the source has no splits, any name in `single` means all its rows. With
    `max_rows` only the first rows are read. `columns` renames columns (`dataset_layouts.map_columns`). `urls` downloads images.

    Raise `UserError` for malformed rows, or skip them with `bad_rows="skip"`.
    """
    records = read_named(dataset, split, streaming=max_rows > 0, single=single)
    place = Path(dataset).expanduser()
    base = place if place.is_dir() else place.parent if place.is_file() else Path()
    records = islice(records, max_rows) if max_rows else records
    return _collect(records, form, dataset, bad_rows, columns or {}, base, urls)


def from_rows(
    iterable: Iterable[object],
    form: str,
    source: str = "rows",
    bad_rows: Literal["stop", "skip"] = "stop",
    columns: Mapping[str, str] | None = None,
    urls: bool = False,
) -> LoadedRows:
    """Check rows in memory: a list of dicts, a `datasets.Dataset`, or any iterable of mappings. Errors call the rows `source`.

    `load` explains the other arguments.
    """
    if isinstance(iterable, Mapping):
        parts = ", ".join(map(str, iterable))
        raise UserError(f"The dataset is a mapping with the keys {parts}; give the rows of one key as a list or Dataset.")
    records = (RawRow(f"{source}:{i}", _to_plain(raw)) for i, raw in enumerate(keep_images_encoded(remove_format(iterable)), 1))
    return _collect(records, form, source, bad_rows, columns or {}, Path(), urls)


def remove_format(rows: Any) -> Any:
    """Return rows whose values are Python's own types, by removing the format of a `datasets.Dataset`, such as "torch"."""
    return rows.with_format(None) if hasattr(rows, "with_format") else rows


def _to_plain(value: Any, depth: int = 0) -> Any:
    """Return a row's `value` with arrays and tensors as lists and numbers; unchanged if its `depth` is above `MAX_DEPTH`."""
    if depth > MAX_DEPTH:  # the checks reject such depths
        return value
    if isinstance(value, dict):
        made = {name: _to_plain(inner, depth + 1) for name, inner in value.items()}
        return made if any(made[name] is not inner for name, inner in value.items()) else value
    if isinstance(value, list | tuple):
        items = [_to_plain(inner, depth + 1) for inner in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if value is None or type(value) in (str, bool, int, float) or not callable(getattr(value, "tolist", None)):
        return value
    return _to_plain(value.tolist(), depth + 1)


def hold_out(parts: Sequence[Sequence[Row]], counts: Sequence[int], seed: int = 0) -> tuple[list[list[Row]], list[Row]]:
    """Return (the training rows of each dataset in `parts`, the held-out rows of all), in their original order.

    About `counts[i]` rows of dataset i are held out: if possible, all rows of a prompt together.
    """
    for part, count in zip(parts, counts, strict=True):
        check_held_out(count, len(part))
    keys: list[list[Any]] = [[_prompt_key(row) for row in part] for part in parts]
    held, taken = _draw(counts, seed, keys)
    for place, part in enumerate(parts):
        if counts[place] and not taken[place]:
            keys[place] = [(place, row.source) for row in part]  # both answers of a pair have one source
            held |= _draw([counts[place]], seed, [keys[place]])[0]
    train = [[row for row, key in zip(part, own, strict=True) if key not in held] for part, own in zip(parts, keys, strict=True)]
    return train, [row for row, key in zip(chain(*parts), chain(*keys), strict=True) if key in held]


def check_held_out(count: int, total: int) -> None:
    """Raise `UserError` if `count` is negative, or if holding out `count` of `total` rows leaves none to train on."""
    if not 0 <= count < total:
        raise UserError(
            f"Cannot hold out {count} of {total} rows; lower eval_prompts (--eval-prompts), set it to 0 for no evaluation, or "
            "name held-out rows with --eval-dataset."
        )


def log_held_out(count: int, total: int, selection: str, log: Log | None) -> None:
    """Log the number of held-out rows, the total number of rows, and how the held-out rows were selected."""
    if log is not None and count:
        are = "is" if count == 1 else "are"
        text = f"{count} of {total} rows, {selection}, {are} held out; --eval-prompts sets their number."
        log("held_out", text, count=count, rows=total)


def _warn_of_leaks(train: Iterable[Row], held_out: Sequence[Row], log: Log) -> None:
    """Log how many held-out rows have a prompt that is also in the training rows."""
    keys = [_prompt_key(row) for row in held_out]
    trained = set(keys).intersection(map(_prompt_key, train)) if keys else ()
    if count := sum(key in trained for key in keys):
        has = several(count, "held-out row", "has", "have")
        text = f"{has} a prompt that is also in the training rows, so figures on them may measure memorisation."
        log("held_out_seen", text, count=count)


def _draw(counts: Sequence[int], seed: int, keys: Sequence[Sequence[Any]]) -> tuple[set[Any], list[int]]:
    """Draw rows at random, about `counts[i]` of dataset i. Return (their keys, the number of drawn rows of each dataset).

    `keys[i]` has one key for each row of dataset i. Rows with the same key are drawn together.
    """
    parts, held, taken = [Counter(own) for own in keys], set[Any](), [0] * len(keys)
    for most in (1, 2):  # 2: for a dataset whose prompts all have more rows than its count
        for place, (own, count) in enumerate(zip(parts, counts, strict=True)):
            groups = list(own)
            for i in permutation(len(groups), seed, "held out") if count else ():
                if taken[place] >= (count if most == 1 else 1):
                    break
                then = [n + part[groups[i]] for n, part in zip(taken, parts, strict=True)]
                bounds = zip(then, taken, counts, keys, strict=True)
                if all(new == n or new <= min(most * c, len(rows) - 1) for new, n, c, rows in bounds) and groups[i] not in held:
                    held.add(groups[i])
                    taken = then
    return held, taken


def _prompt_key(row: Row) -> bytes:
    """Return a hash of the text that a model reads before its first answer, or of the whole text if the row is plain text."""
    asked = to_turns(None, row).prompt or row.completion
    read = list(takewhile(lambda turn: not is_trained(turn), row.messages)) if row.messages else asked
    return blake2b(json.dumps(read, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def _collect(
    records: Records, form: str, name: str, bad_rows: str, columns: Mapping[str, str], base: Path, urls: bool
) -> LoadedRows:
    """Check the records of the dataset `name`; see `load`. Image paths are relative to the row's file, which is under `base`."""
    if form not in (known := ["sft", *FORMS]):
        raise UserError(f"The dataset form {form!r} is unknown; it must be one of {', '.join(known)}{nearest(form, known)}")
    if bad_rows not in ("stop", "skip"):
        raise UserError(f"bad_rows is {bad_rows!r}; it must be 'stop' or 'skip'.")
    rows, bad, fits, hint = [], [], "", ""
    recognised: Counter[str] = Counter()
    renamed = {new: name for name, new in columns.items() if name != new and not dataset_layouts.is_template(new)}
    for record in image_urls.download(records, columns) if urls else records:
        if isinstance(record, BadRow):
            bad.append(record)
            continue
        value, found, given = record.value, list[str](), record.value
        try:
            if isinstance(value, Mapping):
                value = dataset_layouts.map_columns(value, columns, record.source) if columns else value
                own = base / Path(record.source.rpartition(":")[0]).parent
                marked, notes = image_rows.insert_marks(value, record.source, own)
                given = given if marked is value else marked
                value, found = dataset_layouts.translate(marked, form, record.source)
                found += notes
            made = rows_of(value, form, record.source)
            if isinstance(given, Mapping) and isinstance(value, Mapping) and (found or columns or "chosen" in value):
                made = [replace(row, raw_paths=dataset_layouts.to_raw_paths(given, value)) for row in made]
            rows += made
            recognised.update(found)
        except RowError as error:
            found_at = error.bad
            if isinstance(value, Mapping) and isinstance(given, Mapping):
                place = dataset_layouts.to_raw_path(given, value, found_at.column)
                found_at = replace(found_at, column=renamed.get(place, place))
            bad.append(found_at)
            if len(bad) == 1 and isinstance(value, Mapping) and not columns:
                fits, hint = find_form(value), dataset_layouts.suggest_columns(value, form)
    if bad and (bad_rows == "stop" or not rows):
        raise UserError(_summary(name, form, len(rows) + len(bad), bad, fits, hint))
    if not rows:
        raise UserError(f"{name} has no rows; at least one {form} row was expected.")
    return LoadedRows(rows, bad, dict(recognised))


def _summary(name: str, form: str, total: int, bad: list[BadRow], fits: str, hint: str) -> str:
    if len(bad) == total and len({(row.column, row.reason) for row in bad}) == 1:
        shown = f"{bad[0]}" + ("; the others likewise" if total > 1 else "")
    else:
        shown = "; ".join(str(row) for row in bad[:_SHOWN]) + (f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
    cure = "fix these rows, or skip malformed rows with --bad-rows skip"
    if len(bad) == total:
        cure = f"no {form} row is left; " + (f"these are rows of the form {fits} (docs/data.md)" if fits else "fix the rows")
    return f"{name} has {len(bad)} malformed of {total} rows ({shown}); {cure}{hint}."


class MixturePart(NamedTuple):
    """One of several datasets, and its weight, which is None if none is given."""

    dataset: Any
    weight: float | None


def parse_mixture(dataset: object) -> list[MixturePart]:
    """Return one `MixturePart` for each name in the list `dataset`. In "a.jsonl:0.7", 0.7 is the weight of a.jsonl.

    A `dataset` that is not a list of names is the only part.
    """
    if not isinstance(dataset, list | tuple) or not dataset or not all(isinstance(name, str) for name in dataset):
        return [MixturePart(dataset, None)]
    shares = [MixturePart(m[1], float(m[2])) if (m := _WEIGHT.match(text)) else MixturePart(text, None) for text in dataset]
    weighted = [share for share in shares if share.weight is not None]
    if weighted and len(weighted) < len(shares):
        bare = next(share.dataset for share in shares if share.weight is None)
        raise UserError(
            f"Some datasets have a weight, but {bare!r} has none; give all of them one, such as {bare}:0.5, or none of them."
        )
    if any(share.weight == 0 for share in weighted):
        raise UserError(f"A dataset has weight 0 in {', '.join(map(str, dataset))}; remove it.")
    return shares


def quotas(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers with the sum `total`, in the ratio of `weights`. Each differs from its exact value by at most 1."""
    ends = [round(total * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def mix(parts: Sequence[Sequence[Row]], weights: Sequence[float | None], seed: int) -> list[Row]:
    """Join the rows of the datasets `parts`. Without weights, every row occurs once.

    With weights, rows are repeated or left out, so that each dataset has its share of the same total number.
    """
    rows: list[Row] = []
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(parts):
        return [row for part in parts for row in part]
    for place, (part, quota) in enumerate(zip(parts, quotas(sum(map(len, parts)), given), strict=True)):
        again, more = divmod(quota, len(part))
        rows += [*part] * again + [part[i] for i in sorted(permutation(len(part), seed, "mixture", place)[:more])]
    return rows


# The default numbers of held-out rows: of prompts, and of comparisons, which need no sampling. Without an eval dataset, at most
# one in `ONE_OF` rows is held out.
HELD_OUT, _HELD_OUT_PAIRS, ONE_OF = 64, 256, 10


def read_rows(data: Data, form: str, eval_prompts: int | None, seed: int, log: Log | None = None) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows). Held-out rows come from the eval dataset if there is one, else from all datasets.

    `eval_prompts` is their number. With None, the form and the number of rows decide.
    """
    shares = parse_mixture(data.dataset)
    parts = _read_each(data, form, shares, data.split, log, single=SINGLE[:1])
    total = sum(len(part.rows) for part in parts)
    usual = _HELD_OUT_PAIRS if form in ("preference", "unpaired-preference", "stepwise") else HELD_OUT
    usual = usual if data.eval_dataset else min(usual, total // ONE_OF)
    wanted = usual if eval_prompts is None else eval_prompts
    rows, held_out_rows, which = [part.rows for part in parts], list[Row](), "drawn at random"
    if data.eval_dataset:
        given = read_dataset(data, form, data.eval_dataset, data.eval_split, log)
        held_out_rows = given.rows
        if wanted < len(given.rows):  # rows that are not drawn are not trained on either, so single rows of a prompt may be drawn
            drawn = _draw([wanted], seed, [[row.source for row in given.rows]])[0]
            held_out_rows = [row for row in given.rows if row.source in drawn]
    elif wanted:
        sizes = [len(part.rows) if share.weight is None else share.weight for part, share in zip(parts, shares, strict=True)]
        counts = quotas(wanted, sizes)
        if eval_prompts is None:  # a dataset may have few rows and a large weight
            counts = [min(n, -(-len(part.rows) // ONE_OF), len(part.rows) - 1) for part, n in zip(parts, counts, strict=True)]
        rows, held_out_rows = hold_out(rows, counts, seed)
        if len(held_out_rows) != sum(counts):
            which = f"drawn at random, always all rows of a prompt together ({sum(counts)} were requested)"
    if not data.eval_dataset:
        log_held_out(len(held_out_rows), total, which, log)
    if log is not None:
        _warn_of_leaks(chain.from_iterable(rows), held_out_rows, log)
    return mix(rows, [share.weight for share in shares], seed), held_out_rows


def read_dataset(data: Data, form: str, dataset: Any, split: str, log: Log | None = None) -> LoadedRows:
    """Return the rows and the skipped rows of one or several datasets as one `LoadedRows`. Raise `UserError` as `load` does."""
    parts = _read_each(data, form, parse_mixture(dataset), split, log)
    return LoadedRows([row for part in parts for row in part.rows], [bad for part in parts for bad in part.skipped])


def form_of(data: Data) -> str:
    """Return the form that fits the first dataset's first row, or "". Prompt-completion, messages and text count as "sft"."""
    first = parse_mixture(data.dataset)[0].dataset
    for form in ("preference", "unpaired-preference", "stepwise", "sft", "prompt-only"):
        with contextlib.suppress(UserError):
            _read_one(replace(data, max_rows=1), form, first, data.split)
            return form
    return ""


def _read_each(
    data: Data, form: str, shares: Sequence[MixturePart], split: str, log: Log | None, single: Sequence[str] = SINGLE
) -> list[LoadedRows]:
    """Return the `LoadedRows` of each dataset in `shares`. Log the layouts and the skipped rows. `single`: see `load`."""
    parts = [_read_one(data, form, share.dataset, split, single) for share in shares]
    if log is None:
        return parts
    for what, count in sum((Counter(part.recognised) for part in parts), Counter[str]()).items():
        log("rows_recognised", f"In {several(count, 'row')} {what}.", what=what, count=count)
    if bad := [row for part in parts for row in part.skipped]:
        log("rows_skipped", describe_skipped(bad), count=len(bad))
    return parts


def describe_skipped(bad: Sequence[BadRow]) -> str:
    """Return a sentence on the skipped rows `bad`: the most common reasons, each with its number of rows and one example."""
    first: dict[str, BadRow] = {}
    counts: Counter[str] = Counter()
    for row in bad:
        reason = str(row).removeprefix(f"{row.source}: ")
        first.setdefault(reason, row)
        counts[reason] += 1
    kinds = [f"{count} because {reason} ({first[reason].source})" for reason, count in counts.most_common(_SHOWN)]
    rest = len(bad) - sum(count for _, count in counts.most_common(_SHOWN))
    more = [f"{rest} for other reasons"] if rest else []
    return f"{several(len(bad), 'malformed row', 'is', 'are')} left out: {'; '.join([*kinds, *more])}."


def _read_one(data: Data, form: str, dataset: Any, split: str, single: Sequence[str] = SINGLE) -> LoadedRows:
    columns = parse_columns(data.columns)
    if not isinstance(dataset, str):
        part = parse_split(split)
        some = part.take(remove_format(dataset)) if part.is_slice and not isinstance(dataset, Mapping) else dataset
        some = islice(remove_format(some), data.max_rows) if data.max_rows else some
        return from_rows(some, form, bad_rows=data.bad_rows, columns=columns, urls=data.image_urls)
    if not dataset:
        raise UserError(
            "No dataset was given; name a JSONL or Parquet file, a folder or a hub dataset with --dataset (data.dataset)."
        )
    how: dict[str, Any] = {"bad_rows": data.bad_rows, "max_rows": data.max_rows, "urls": data.image_urls}
    return load(dataset, form=form, split=split, columns=columns, single=single, **how)
