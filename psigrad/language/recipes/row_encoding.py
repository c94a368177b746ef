"""Tokenization of a run's rows by several processes. A later run with the same data and settings reads the cached result."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from psigrad.cache_folder import cache_folder
from psigrad.config import Data
from psigrad.errors import UserError
from psigrad.language import data as data_room
from psigrad.language import images
from psigrad.language import rewards as rewards_room
from psigrad.language.data import row_cache
from psigrad.language.data.chat import rendering
from psigrad.language.data.chat.dialect import cache_specials
from psigrad.language.data.dataset_layouts import Log
from psigrad.language.data.dataset_rows import BadRow, Row, RowError
from psigrad.language.data.image_rows import digests_of
from psigrad.language.data.row_cache import ArrowSequence, PreparedRows, batch_of, pack, unpack
from psigrad.language.data.sources import parse_mixture
from psigrad.processes.proc import die_with_parent
from psigrad.records import pins
from psigrad.runs import machine
from psigrad.runs.journal import Journal

R = TypeVar("R")
T = TypeVar("T")
RowFilter = Callable[[Any], tuple[Any, Mapping[str, int]]]
"""A function (encoded row) -> (the part to train on, or None to drop the row; counts by name, which are summed over rows)."""

Encoded = tuple[tuple[int, bytes], list[BadRow], Counter[str]]
_AT_ONCE = 1024
# Below this number of rows, extra processes and a cache file cost more than they save: a row takes half a millisecond.
FEW = 4000


@dataclass(frozen=True)
class Encoder(Generic[R]):
    """The encoding of rows for training: `encode` tokenizes a row, and `filter`, if given, trims or drops the result."""

    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[R], Any]
    filter: RowFilter | None = None
    encode_batch: Callable[[Sequence[R]], None] | None = None
    """A function that gets a batch of rows before `encode` gets each of them, for work that is faster on many rows at once."""

    def __call__(self, rows: Sequence[R]) -> tuple[list[Any], list[BadRow], Counter[str]]:
        """Return (the encoded rows, the rows that cannot be encoded, the filter's counts summed over the rows)."""
        found, refused, counts = [], list[BadRow](), Counter[str]()
        with cache_specials(self.tokenizer):
            if self.encode_batch is not None:
                self.encode_batch(rows)
            for row in rows:
                try:
                    made = self.encode(row)
                except RowError as error:
                    refused.append(error.bad)
                    continue
                if self.filter is not None:
                    made, counted = self.filter(made)
                    counts.update(counted)
                if made is not None:
                    found.append(made)
        return found, refused, counts


def encode_rows(rows: Sequence[R], encoder: Encoder[R], data: Data, log: Log | None = None) -> tuple[Sequence[Any], Counter[str]]:
    """Return (the encoded rows, the filter's counts summed over the rows).

    A row that cannot be encoded raises `UserError` or, with `bad_rows: skip`, is dropped.
    """
    if len(rows) < FEW and data.num_proc <= 1:
        made: Sequence[Any]
        made, refused, counts = encoder(rows)
    else:
        found = list(_batches(rows, encoder, data.num_proc))
        made = ArrowSequence([row_cache.deserialise(*batch) for batch, _, _ in found], unpack)
        refused, counts = [bad for _, some, _ in found for bad in some], sum((more for _, _, more in found), Counter[str]())
    if refused and (data.bad_rows == "stop" or len(refused) == len(rows)):
        more = f" (and {len(refused) - 1} more of {len(rows)})" if len(refused) > 1 else ""
        raise UserError(f"{str(refused[0]).rstrip('.')}{more}; or skip such rows with --bad-rows skip.")
    if refused and log is not None:
        kept = len(rows) - len(refused)
        text = f"{len(refused)} of {len(rows)} rows were rejected and skipped. The first one is {refused[0]}."
        log("rows_refused", text, count=len(refused), kept=kept, reasons=[str(bad) for bad in refused[:5]])
    return made, counts


def _batches(rows: Sequence[Any], encoder: Encoder[Any], processes: int) -> Iterator[Encoded]:
    """Yield the encoded rows, in order, as Arrow batches. If `processes` is 0, choose the number of processes."""
    spans = [slice(start, start + _AT_ONCE) for start in range(0, len(rows), _AT_ONCE)]
    here = machine.cores() if sys.platform == "linux" else 1
    count = min(processes or (here if len(rows) >= FEW else 1), len(spans))
    if count <= 1:
        yield from (_encode(encoder, rows[span]) for span in spans)
        return
    # Forked processes have the rows and the tokenizer without a copy. They call nothing of torch, whose threads a fork loses.
    pool = ProcessPoolExecutor(count, get_context("fork"), initializer=_begin, initargs=(rows, encoder))
    try:
        with pool:
            yield from pool.map(_encode_span, spans)
    except BrokenProcessPool:
        raise UserError(
            f"One of the {count} encoding processes ended, perhaps out of memory; set num_proc below {count}."
        ) from None


_work: dict[str, Any] = {}


def _begin(rows: Sequence[Any], encoder: Encoder[Any]) -> None:
    gc.freeze()  # never collect the parent's objects here: that may end threads or sockets, which a fork loses
    die_with_parent()
    os.setsid()  # signals to the parent's group, by Ctrl-C or `timeout`, are for the parent to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work.update(rows=rows, encoder=encoder)


def _encode_span(span: slice) -> Encoded:
    return _encode(_work["encoder"], _work["rows"][span])


def _encode(encoder: Encoder[Any], rows: Sequence[Any]) -> Encoded:
    made, refused, counts = encoder(rows)
    return row_cache.serialise(batch_of(list(map(pack, made)))), refused, counts


def prepare(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    settings: Sequence[Any],
    journal: Journal,
    make: Callable[[Log], PreparedRows[T]],
) -> PreparedRows[T]:
    """Return the prepared rows, from `make` or from the cache of an earlier run with the same data, tokenizer and `settings`."""
    folder = journal.folder.path / "images"
    images.store_in(folder)

    def prepared(log: Log) -> PreparedRows[T]:
        made = make(log)
        images.store_in(folder, [digest for row in (*made.rows, *made.held_out) for digest in digests_of(row)])
        return made

    world, key = journal.world, _key(data, tokenizer, settings)
    place = cache_folder("rows") / f"{key}.arrow" if key else None
    if world.rank == 0 or place is None:
        try:
            found = _prepare_or_load(place, journal.log, prepared)
        finally:
            world.broadcast(None)  # the other ranks now read the cache, or prepare the rows too
        return found
    world.broadcast(None)
    return _prepare_or_load(place, journal.log, prepared)


def _prepare_or_load(path: Path | None, log: Log, make: Callable[[Log], PreparedRows[T]]) -> PreparedRows[T]:
    if path is not None and (kept := row_cache.read(path)) is not None:
        prepared, told = kept
        for kind, text, facts in told:
            log(kind, text, **facts)
        return prepared
    told = []

    def hear(kind: str, text: str, **facts: Any) -> None:
        told.append((kind, text, facts))
        log(kind, text, **facts)

    made = make(hear)
    if path is None:
        return made
    made = replace(made, sums=sum_parts(made))
    row_cache.write(path, made, told, row_cache.limit())
    kept = row_cache.read(path)
    return made if kept is None else kept[0]


def sum_parts(prepared: PreparedRows[Any]) -> dict[str, str]:
    """Return {"dataset": the SHA-256 of the training rows, "eval_dataset": the SHA-256 of the held-out rows}."""
    names = [f.name for f in fields(Row) if f.name not in ("source", "plain_prompt")]
    parts = {"dataset": prepared.rows, "eval_dataset": prepared.held_out}
    return pins.hash_parts(
        {part: [[getattr(row, n) for n in names] for row in map(_drop_images, rows)] for part, rows in parts.items()}
    )


def _drop_images(row: Row) -> Row:
    """Return the row for hashing. Drop its image columns if its text already contains the SHA-256 of each image."""
    own = {name: value for name, value in row.columns.items() if name not in images.COLUMNS}
    return replace(row, columns=own) if len(own) < len(row.columns) and digests_of(row) else row


def _key(data: Data, tokenizer: PreTrainedTokenizerBase, settings: Sequence[Any]) -> str:
    """Return the cache key, a SHA-256 of everything that rows and tokens depend on; "" if the rows are not cached."""
    names = [share.dataset for given in (data.dataset, data.eval_dataset) if given for share in parse_mixture(given)]
    if not all(isinstance(name, str) for name in names) or not row_cache.limit():
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not type(tokenizer).__module__.startswith("transformers."):
        return ""
    paths = [Path(name).expanduser() for name in names]
    if sum(map(_size, paths)) < FEW * 100 or not all(map(Path.exists, paths)):
        return ""
    settled = getattr(tokenizer, rendering.RENDER_SETTINGS, None)
    held = {
        "files": [pins.identify_data(name) for name in names],
        "data": {name: value for name, value in asdict(data).items() if name != "num_proc"},
        "settings": settings,
        "tokenizer": [backend.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map, str(type(tokenizer))],
        # Exclude file names, which differ in a checkpoint.
        "flags": {name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool)},
        "settled": repr(settled and (settled.kwargs, settled.rows)),
        "day": rendering.day_of(tokenizer).isoformat() if rendering.reads_clock(tokenizer) else "",
        "code": [_code(), *(version(name) for name in ("transformers", "tokenizers", "jinja2", "pyarrow"))],
    }
    return hashlib.sha256(json.dumps(held, sort_keys=True, default=repr).encode()).hexdigest()


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


@functools.cache
def _code() -> str:
    """Return the SHA-256 of the code that reads and encodes rows. Another psigrad version may encode a row differently."""
    rooms = (data_room, rewards_room)
    files = [Path(__file__), *(file for room in rooms for file in sorted(Path(room.__path__[0]).rglob("*.py")))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
