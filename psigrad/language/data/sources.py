"""From files, folders, hub names, tasks or any iterable to checked rows; a fault is named by file, line, column and reason."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from psigrad import redaction
from psigrad.config import Data
from psigrad.config.sections import columns_of
from psigrad.errors import UserError, name_reason, nearest, several
from psigrad.language.data import posted_forms, tasks
from psigrad.language.data.chat.messages import is_trained
from psigrad.language.data.dataset_rows import FORMS, BadRow, Row, RowError, find_form, rows_of, show
from psigrad.language.data.posted_forms import Tell, as_turns
from psigrad.language.data.row_files import READERS, Raw, Records, read_file
from psigrad.seeds import permutation

_SHOWN = 5
_SPLITS = {"train": "train training", "validation": "validation valid val dev", "test": "test testing eval evaluation"}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words.split()}
_WEIGHT = re.compile(r"^(.+):(\d+(?:\.\d*)?|\.\d+)$")
_network = {"missing": False}


@dataclass(frozen=True)
class LoadedRows:
    """The good rows in the order of the source, those that were left out (`bad_rows="skip"`), and what other form was recognised
    in how many (`posted_forms`).
    """

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
) -> LoadedRows:
    """The rows of a JSONL, JSON, Parquet, CSV or TSV file, a folder of them or of `Dataset.save_to_disk`, or a hub dataset.

    In a folder whose file names carry split words (train, validation, test and their usual variants) only the files of `split`
    are read; a single file is read whole. A hub configuration is named after a colon: "openai/gsm8k:main". "task:NAME" makes rows
    of a reasoning-gym task. With `max_rows` only the first ones are read, and a hub dataset is streamed; `columns` renames some
    (`posted_forms.map_columns`).
    Raises UserError naming file, line, column and reason; with `bad_rows="skip"` malformed rows are left out and returned as
    `skipped`, and only a file that can't be read on raises.
    """
    records = _records(dataset, split, streaming=max_rows > 0)
    return _collect(islice(records, max_rows) if max_rows else records, form, dataset, bad_rows, columns or {})


def from_rows(
    iterable: Iterable[object],
    form: str,
    source: str = "rows",
    bad_rows: Literal["stop", "skip"] = "stop",
    columns: Mapping[str, str] | None = None,
) -> LoadedRows:
    """The same checks for rows that are in memory: a list of dicts, a `datasets.Dataset`, any iterable of mappings."""
    if isinstance(iterable, Mapping):
        parts = ", ".join(map(str, iterable))
        raise UserError(f"The dataset is a mapping of {parts}; give one of them: a name, or rows as a list or datasets.Dataset.")
    return _collect((Raw(f"{source}:{i}", raw) for i, raw in enumerate(iterable, 1)), form, source, bad_rows, columns or {})


def holdout(parts: Sequence[Sequence[Row]], counts: Sequence[int], seed: int = 0) -> tuple[list[list[Row]], list[Row]]:
    """(the rows of each part to train on, held-out rows of all parts), in the order of the source; of each part about as many are
    held out as `counts` says, drawn by `seed`.

    All rows of a prompt, in whichever part, are on one side. Prompts are taken in random order while they fit; if none of a part
    does, one with at most twice the rows that are wanted; if none has so few, rows are drawn whatever their prompts, and only the
    two answers of a pair stay together. UserError if no row is left to train on.
    """
    for part, count in zip(parts, counts, strict=True):
        check_held_out(count, len(part))
    keys: list[list[Any]] = [[_prompt_key(row) for row in part] for part in parts]
    held, taken = _draw(counts, seed, keys)
    for place, part in enumerate(parts):
        if counts[place] and not taken[place]:
            keys[place] = [(place, row.source) for row in part]
            held |= _draw([counts[place]], seed, [keys[place]])[0]
    train = [[row for row, key in zip(part, own, strict=True) if key not in held] for part, own in zip(parts, keys, strict=True)]
    return train, [row for row, key in zip(chain(*parts), chain(*keys), strict=True) if key in held]


def check_held_out(count: int, total: int) -> None:
    """Raises `UserError` where no row is left to train on."""
    if not 0 <= count < total:
        raise UserError(
            f"Holding out {count} of {total} rows is not possible; set eval_prompts (--eval-prompts) to fewer, 0 for no "
            "evaluation, or give held-out rows of their own (--eval-dataset)."
        )


def tell_held_out(count: int, total: int, which: str, tell: Tell | None) -> None:
    """Say how many rows are held out of how many, and which these are."""
    if tell is not None and count:
        are = "is" if count == 1 else "are"
        text = f"{count} of {total} rows, {which}, {are} held out; --eval-prompts sets their number."
        tell("held_out", text, count=count, rows=total)


def _tell_seen(train: Iterable[Row], held_out: Sequence[Row], tell: Tell) -> None:
    """Say how many held-out rows have a prompt that is trained on."""
    keys = [_prompt_key(row) for row in held_out]
    trained = set(keys).intersection(map(_prompt_key, train)) if keys else ()
    if count := sum(key in trained for key in keys):
        has = several(count, "held-out row", "has", "have")
        text = f"{has} a prompt that is trained on too: what is measured there may be memory."
        tell("held_out_seen", text, count=count)


def _draw(counts: Sequence[int], seed: int, keys: Sequence[Sequence[Any]]) -> tuple[set[Any], list[int]]:
    """(keys, how many rows of each part have them): about as many as `counts` says, in the order of a permutation of the keys."""
    parts, held, taken = [Counter(own) for own in keys], set[Any](), [0] * len(keys)
    for most in (1, 2):
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
    """A hash of what a model reads before its first answer: of a conversation the turns before the first that is trained. A row
    of text alone goes by its text.
    """
    asked = as_turns(None, row).prompt or row.completion
    read = list(takewhile(lambda turn: not is_trained(turn), row.messages)) if row.messages else asked
    return blake2b(json.dumps(read, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def _collect(records: Records, form: str, name: str, bad_rows: str, columns: Mapping[str, str]) -> LoadedRows:
    if form not in (known := ["sft", *FORMS]):
        raise UserError(f"The form {form!r} is unknown; it must be one of {', '.join(known)}{nearest(form, known)}")
    if bad_rows not in ("stop", "skip"):
        raise UserError(f"bad_rows is {bad_rows!r}; it must be 'stop' or 'skip'.")
    rows, bad, fits, hint = [], [], "", ""
    recognised: Counter[str] = Counter()
    for record in records:
        if isinstance(record, BadRow):
            bad.append(record)
            continue
        value, found = record.value, list[str]()
        try:
            if isinstance(value, Mapping):
                value = posted_forms.map_columns(value, columns, record.source) if columns else value
                value, found = posted_forms.translate(value, form, record.source)
            made = rows_of(value, form, record.source)
            if isinstance(record.value, Mapping) and isinstance(value, Mapping) and (found or columns or "chosen" in value):
                made = [replace(row, places=posted_forms.places_of(record.value, value)) for row in made]
            rows += made
            recognised.update(found)
        except RowError as error:
            found_at = error.bad
            if isinstance(value, Mapping) and isinstance(record.value, Mapping):
                found_at = replace(found_at, column=posted_forms.place_in(record.value, value, found_at.column))
            bad.append(found_at)
            if len(bad) == 1 and isinstance(value, Mapping) and not columns:
                fits, hint = find_form(value), posted_forms.usual_names(value, form)
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
    cure = "mend them, or set bad_rows=skip to leave them out"
    if len(bad) == total:
        cure = f"none is left for the form {form}; " + (f"they fit the form {fits} (docs/data.md)" if fits else "mend them")
    return f"{name} has {len(bad)} malformed of {total} rows ({shown}); {cure}{hint}."


def _records(dataset: str, split: str, streaming: bool = False) -> Records:
    if dataset.startswith("task:"):
        return (Raw(f"{dataset}:{i}", raw) for i, raw in enumerate(tasks.rows_by_name(dataset), 1))
    try:
        path = Path(dataset).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"The dataset {show(dataset)} can't be a path ({error}); give a file, a folder or a hub name.") from None
    if not dataset.strip():
        raise UserError("The dataset name is empty; give a JSONL, JSON, Parquet or CSV file, a folder of them, or a hub name.")
    if is_folder:
        return _folder(path, split)
    if exists and not path.is_file():  # a pipe or a device may never end
        raise UserError(f"The dataset {show(dataset)} is no regular file; give a file, a folder or a hub name.")
    if exists:
        return read_file(path, path.name)
    if path.suffix in READERS or dataset.startswith((".", "/", "~")) or "\\" in dataset:
        raise UserError(
            f"There is no file or folder {show(dataset)}; give an existing path or a hub name{_neighbour(path) or '.'}"
        )
    file, _, behind = dataset.partition(":")
    if Path(file).suffix in READERS:
        raise UserError(
            f"The dataset {show(dataset)} has {show(behind)} behind a file's name. A weight stands there, a number, and only "
            "beside other datasets: --dataset a.jsonl:0.7 b.jsonl:0.3."
        )
    return _hub(dataset, split, streaming)


def _neighbour(path: Path) -> str:
    """The most similar name in the folder that the path points into."""
    return nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else ""


def _folder(path: Path, split: str) -> Records:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        yield from _read_saved(path, split)
        return
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.suffix in READERS and file.is_file())
    names = [name for name in names if not any(part.startswith((".", "dataset_info")) for part in name.split("/"))]
    if not names:
        raise UserError(f"The folder {path} holds no {', '.join(READERS)} file; put the data there or name another folder.")
    splits = {name: _split_of(name) for name in names}
    if any(splits.values()):
        wanted = _SPLIT_OF.get(split, split)
        names = [name for name in names if splits[name] == wanted]
        if not names:
            found = ", ".join(sorted({found for found in splits.values() if found}))
            raise UserError(f"The folder {path} holds no files of the split {split!r}; it has {found}. Name one of these.")
    for name in names:
        yield from read_file(path / name, name)


def _split_of(name: str) -> str:
    """The split that a file's name speaks of, as on the hub: data/train-00000-of-00002.parquet is train."""
    words = re.split(r"[^a-z]+", name.rsplit(".", 1)[0].lower())
    return next((_SPLIT_OF[word] for word in words if word in _SPLIT_OF), "")


def _read_saved(path: Path, split: str) -> Records:
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            if split not in saved:
                raise UserError(f"{path} has no split {split!r}; it has {', '.join(saved)}. Name one of these.")
            saved = saved[split]
        yield from (Raw(f"{path.name}:{i}", raw) for i, raw in enumerate(saved, 1))
    except UserError:
        raise
    except Exception as error:  # a damaged folder fails in Arrow, json or datasets, each with types of its own
        raise UserError(
            f"The saved dataset {path} can't be read ({name_reason(error)}); save it again with save_to_disk."
        ) from error


def _hub(dataset: str, split: str, streaming: bool) -> Records:
    import datasets

    name, _, config = dataset.partition(":")
    go_offline_without_network()
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, config or None, split=split, streaming=streaming)
        yield from (Raw(f"{dataset}[{split}]:{i}", raw) for i, raw in enumerate(rows, 1))
    except Exception as error:  # no network, no such name, split or configuration: datasets raises a dozen types
        raise UserError(
            f"{show(dataset)} is neither a file or folder here{_neighbour(Path(dataset))} nor a dataset that the hub could load "
            f"(split {split!r}: {name_reason(error)}); check the name, the split and the network."
        ) from error


def go_offline_without_network() -> None:
    """Use what was downloaded before where the hub's name leads nowhere, as without a network.

    huggingface_hub would ask for every file five times, a minute in all, before it looks at what is there.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if (constants.HF_HUB_OFFLINE and not _network["missing"]) or {"http", "https", "all"} & getproxies().keys():
        return  # asked for by the user; or the proxy knows the name
    hub = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(hub, None)
        _network["missing"] = False
    except OSError:
        if not _network["missing"]:
            redaction.say(f"No network: {hub} has no address here. What was downloaded before is used.")
        _network["missing"] = True
    constants.HF_HUB_OFFLINE = _network["missing"]


class Share(NamedTuple):
    """A dataset of several, and its weight; None where none is given."""

    dataset: Any
    weight: float | None


def parse_mixture(dataset: object) -> list[Share]:
    """The datasets of a list of names, "a.jsonl:0.7" with a weight behind it; anything else is one dataset.

    Raises `UserError` where only some have a weight, or one is 0.
    """
    if not isinstance(dataset, list | tuple) or not dataset or not all(isinstance(name, str) for name in dataset):
        return [Share(dataset, None)]
    shares = [Share(m[1], float(m[2])) if (m := _WEIGHT.match(text)) else Share(text, None) for text in dataset]
    weighted = [share for share in shares if share.weight is not None]
    if weighted and len(weighted) < len(shares):
        bare = next(share.dataset for share in shares if share.weight is None)
        raise UserError(f"Some datasets have a weight and {bare!r} has none; give each one, as {bare}:0.5, or none at all.")
    if any(share.weight == 0 for share in weighted):
        raise UserError(f"A dataset has weight 0 in {', '.join(map(str, dataset))}; leave it out.")
    return shares


def quotas(total: int, weights: Sequence[float]) -> list[int]:
    """`total` divided in proportion to the weights, each within 1 of its share: ends are rounded, so nothing is lost."""
    ends = [round(total * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def mix(parts: Sequence[Sequence[Row]], weights: Sequence[float | None], seed: int) -> list[Row]:
    """As many rows as all datasets have together, of which each has its share.

    Without weights that is every row once. Else a dataset of n rows with quota q gives each of them ⌊q/n⌋ or ⌈q/n⌉ times; which
    ones come once more depends on the seed and the place of the dataset alone. Training shuffles them anew in every epoch.
    """
    rows: list[Row] = []
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(parts):
        return [row for part in parts for row in part]
    for place, (part, quota) in enumerate(zip(parts, quotas(sum(map(len, parts)), given), strict=True)):
        again, more = divmod(quota, len(part))
        rows += [*part] * again + [part[i] for i in sorted(permutation(len(part), seed, "mixture", place)[:more])]
    return rows


# Rows that are held out where their number is not given: prompts, and comparisons, which cost no sampling; and of how many rows
# at most one is.
HELD_OUT, _HELD_OUT_PAIRS, ONE_OF = 64, 256, 10


def read_rows(
    data: Data, form: str, eval_prompts: int | None, seed: int, tell: Tell | None = None
) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows. Without an eval dataset `eval_prompts` rows, drawn by `seed`, are held out; where that is
    None a tenth of the rows (of each of several datasets too), and no more than 64 (of comparisons 256).

    Of several datasets each gives its share of both. `tell` hears what was recognised, left out and held out.
    """
    shares = parse_mixture(data.dataset)
    parts = _read_each(data, form, shares, data.split, tell)
    total = sum(len(part.rows) for part in parts)
    usual = _HELD_OUT_PAIRS if form in ("preference", "unpaired-preference", "stepwise") else HELD_OUT
    usual = usual if data.eval_dataset else min(usual, total // ONE_OF)
    wanted = usual if eval_prompts is None else eval_prompts
    rows, held_out_rows, which = [part.rows for part in parts], list[Row](), "drawn at random"
    if data.eval_dataset:
        given = read_dataset(data, form, data.eval_dataset, data.eval_split, tell)
        held_out_rows = given.rows
        if wanted < len(given.rows):  # what is not drawn is not trained on either, so a prompt may be on both sides
            drawn = _draw([wanted], seed, [[row.source for row in given.rows]])[0]
            held_out_rows = [row for row in given.rows if row.source in drawn]
    elif wanted:
        sizes = [len(part.rows) if share.weight is None else share.weight for part, share in zip(parts, shares, strict=True)]
        counts = quotas(wanted, sizes)
        if eval_prompts is None:  # a dataset may have few rows and much weight
            counts = [min(n, -(-len(part.rows) // ONE_OF), len(part.rows) - 1) for part, n in zip(parts, counts, strict=True)]
        rows, held_out_rows = holdout(rows, counts, seed)
        if len(held_out_rows) != sum(counts):
            which = f"drawn at random by whole prompts where {sum(counts)} were wanted"
    if not data.eval_dataset:
        tell_held_out(len(held_out_rows), total, which, tell)
    if tell is not None:
        _tell_seen(chain.from_iterable(rows), held_out_rows, tell)
    return mix(rows, [share.weight for share in shares], seed), held_out_rows


def read_dataset(data: Data, form: str, dataset: Any, split: str, tell: Tell | None = None) -> LoadedRows:
    """The rows of one dataset, or of several one after the other; a missing name is refused."""
    parts = _read_each(data, form, parse_mixture(dataset), split, tell)
    return LoadedRows([row for part in parts for row in part.rows], [bad for part in parts for bad in part.skipped])


def form_of(data: Data) -> str:
    """The form that the first row of the first dataset has; empty where it has none. Of an answered prompt it is "sft"."""
    first = parse_mixture(data.dataset)[0].dataset
    for form in ("preference", "unpaired-preference", "stepwise", "sft", "prompt-only"):
        with contextlib.suppress(UserError):
            _read_one(replace(data, max_rows=1), form, first, data.split)
            return form
    return ""


def _read_each(data: Data, form: str, shares: Sequence[Share], split: str, tell: Tell | None) -> list[LoadedRows]:
    """The rows of each dataset. `tell` hears what form other than ours they have, and how many were left out."""
    parts = [_read_one(data, form, share.dataset, split) for share in shares]
    if tell is None:
        return parts
    for what, count in sum((Counter(part.recognised) for part in parts), Counter[str]()).items():
        tell("rows_recognised", f"In {several(count, 'row')} {what}.", what=what, count=count)
    if bad := [row for part in parts for row in part.skipped]:
        tell(
            "rows_skipped", f"{several(len(bad), 'malformed row', 'is', 'are')} left out; the first is {bad[0]}.", count=len(bad)
        )
    return parts


def _read_one(data: Data, form: str, dataset: Any, split: str) -> LoadedRows:
    columns = columns_of(data.columns)
    if not isinstance(dataset, str):
        some = islice(dataset, data.max_rows) if data.max_rows else dataset
        return from_rows(some, form, bad_rows=data.bad_rows, columns=columns)
    if not dataset:
        raise UserError(
            "No dataset was given; name a JSONL or Parquet file, a folder or a hub dataset with --dataset (data.dataset)."
        )
    return load(dataset, form=form, split=split, bad_rows=data.bad_rows, max_rows=data.max_rows, columns=columns)
