"""Raw rows of a dataset that is given by name: a file, a folder, a dataset of the hub, or a task."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from psigrad import redaction
from psigrad.errors import UserError, name_reason, nearest
from psigrad.language.data import tasks
from psigrad.language.data.dataset_rows import show
from psigrad.language.data.row_files import READERS, RawRow, Records, kind_of_file, read_file
from psigrad.language.data.splits import SplitSlice, canonical_split, parse_split, split_of

SINGLE = ("train", "test")
"""The split names that select all rows of a source without splits, such as a file. Training accepts only the first, evaluation
both."""
# Data files that psigrad does not read. A folder with one is rejected: otherwise a part of the dataset would be missing silently.
_OTHER = "parquet arrow feather orc avro xlsx xls zip tar tgz 7z pkl npz npy h5 hdf5 db sqlite"
_UNREAD = frozenset(f".{ending}" for ending in _OTHER.split())
_network = {"missing": False}


def read_named(dataset: str, split: str, *, streaming: bool = False, single: Sequence[str] = SINGLE) -> Records:
    """Return the raw rows of a split or its slice. If the source has no splits, any name in `single` means all its rows."""
    part = parse_split(split)
    if dataset.startswith("task:"):
        _check_single(part, dataset, "", single)
        return part.take(RawRow(f"{dataset}:{i}", raw) for i, raw in enumerate(tasks.rows_by_name(dataset), 1))
    try:
        path = Path(dataset).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"The dataset {show(dataset)} can't be a path ({error}); give a file, a folder or a hub name.") from None
    if not dataset.strip():
        raise UserError("The dataset name is empty; give a JSONL, JSON, Parquet or CSV file, a folder of them, or a hub name.")
    if is_folder:
        return part.take(_folder(path, part, single))
    if exists and not path.is_file():  # a pipe or a device may never end
        raise UserError(f"The dataset {show(dataset)} is not a regular file; give a file, a folder or a hub name.")
    if exists:
        _check_single(part, path.name, split_of(path.stem), single)
        return part.take(read_file(path, path.name))
    if kind_of_file(path.name) or dataset.startswith((".", "/", "~")) or "\\" in dataset:
        raise UserError(
            f"There is no file or folder {show(dataset)}; give an existing path or a hub name{_suggest_file(path) or '.'}"
        )
    file, _, behind = dataset.partition(":")
    if kind_of_file(file):
        raise UserError(
            f"The dataset {show(dataset)} has {show(behind)} after the file's name; only a weight can "
            "follow it, as in --dataset a.jsonl:0.7 b.jsonl:0.3."
        )
    return _hub(dataset, split, streaming)


def _check_single(part: SplitSlice, name: str, own: str, single: Sequence[str]) -> None:
    """Raise `UserError` unless the split of `part` is `own` or one of `single`. The error names the source `name`."""
    if canonical_split(part.name) not in (own, *single):
        cut = f"{own or single[0]}[:90%]"
        reason = f"{name} has only one split, and it is not {part.name!r}"
        raise UserError(f"{reason}; leave out the split's name, or give a slice, such as {cut}.")


def _suggest_file(path: Path) -> str:
    """Return a hint for an error message: the file in the path's folder whose name is most similar; "" if none is similar."""
    return nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else ""


def _folder(path: Path, part: SplitSlice, single: Sequence[str]) -> Records:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        yield from _read_saved(path, part, single)
        return
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    names = [name for name in names if not any(word.startswith((".", "dataset_info")) for word in name.split("/"))]
    # `rglob` follows no link to a folder, so the rows behind it would be missing silently
    if odd := next((n for n in names if (path / n).is_dir() or (kind_of_file(n) and not (path / n).is_file())), ""):
        raise UserError(
            f"The folder {path} has {odd}, which is neither a regular file nor a link to one; "
            "put a regular file in its place, or move it elsewhere."
        )
    read = [name for name in names if kind_of_file(name)]
    if not read:
        raise UserError(f"The folder {path} has no {', '.join(READERS)} file; put the data there or name another folder.")
    if unread := next(
        (name for name in names if name not in read and _UNREAD.intersection(Path(name.lower()).suffixes[-2:])), ""
    ):
        raise UserError(f"The folder {path} has {read[0]}, but also {unread}, which cannot be read; convert or move {unread}.")
    splits = {name: split_of(name.rsplit(".", 1)[0]) for name in read}
    if not any(splits.values()):
        _check_single(part, f"The folder {path}", "", single)
    else:
        read = [name for name in read if splits[name] == canonical_split(part.name)]
        found = ", ".join(sorted({found for found in splits.values() if found}))
        if not read:
            raise UserError(f"The folder {path} has no files of the split {part.name!r}; name one of its splits: {found}.")
        if other := next((name for name, own in splits.items() if not own), ""):
            raise UserError(
                f"The folder {path} has files of the splits {found}, but {other} has no split in its name; rename or move it."
            )
    for name in read:
        yield from read_file(path / name, name)


def _read_saved(path: Path, part: SplitSlice, single: Sequence[str]) -> Records:
    from datasets import DatasetDict, load_from_disk

    try:
        _reject_compressed(path)
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            if part.name not in saved:
                raise UserError(f"{path} has no split {part.name!r}; name one of its splits: {', '.join(saved)}.")
            saved = saved[part.name]
        else:
            _check_single(part, str(path), str(saved.split or ""), single)
        # a format such as "torch" is saved too, but rewards get plain values
        yield from (RawRow(f"{path.name}:{i}", raw) for i, raw in enumerate(keep_images_encoded(saved.with_format(None)), 1))
    except UserError:
        raise
    except Exception as error:  # a damaged folder raises Arrow's, json's or datasets' own error types
        raise UserError(
            f"The saved dataset {path} can't be read ({name_reason(error)}); save it again with save_to_disk."
        ) from error


def _reject_compressed(path: Path) -> None:
    """Raise `UserError` for a saved dataset with compressed buffers, which pyarrow expands without a limit."""
    import pyarrow as pa

    found = path / "dataset_dict.json"
    for split in json.loads(found.read_text())["splits"] if found.exists() else [""]:
        for file in json.loads((path / split / "state.json").read_text())["_data_files"]:
            with pa.memory_map(str(path / split / file["filename"])) as source:
                for message in pa.ipc.MessageReader.open_stream(source):
                    buffer = message.metadata.to_pybytes()
                    # The metadata is a flatbuffer. Field 2 of its first table is the record batch or, in a dictionary message,
                    # a table whose field 1 is the record batch. A record batch that has a field 3 is compressed.
                    place = _flatbuffer_field(buffer, int.from_bytes(buffer[:4], "little"), 2)
                    if message.type == "dictionary":
                        place = _flatbuffer_field(buffer, _follow(buffer, place), 1)
                    if message.type != "schema" and _flatbuffer_field(buffer, _follow(buffer, place), 3):
                        raise UserError(
                            f"{path / split} has compressed buffers, which psigrad cannot read; save it again with save_to_disk."
                        )


def _follow(buffer: bytes, place: int) -> int:
    """Return the index of the table to which the flatbuffer's offset at index `place` points."""
    return place + int.from_bytes(buffer[place : place + 4], "little")


def _flatbuffer_field(buffer: bytes, table: int, number: int) -> int:
    """Return the index of a field of the flatbuffer's table at index `table`, or 0 if the field is missing."""
    fields = table - int.from_bytes(buffer[table : table + 4], "little", signed=True)
    entry, size = 4 + 2 * number, int.from_bytes(buffer[fields : fields + 2], "little")
    offset = int.from_bytes(buffer[fields + entry : fields + entry + 2], "little") if entry < size else 0
    return table + offset if offset else 0


def keep_images_encoded(rows: Any) -> Iterable[Any]:
    """Return the rows of a `datasets.Dataset` without decoding images. psigrad identifies an image by its bytes' SHA-256."""
    if "Image(" not in str(getattr(rows, "features", "")):
        return rows  # type: ignore[no-any-return]
    return (row for batch in rows.with_format("arrow").iter(64) for row in batch.to_pylist())


def _hub(dataset: str, split: str, streaming: bool) -> Records:
    import datasets

    name, _, config = dataset.partition(":")
    part = parse_split(split)
    streaming = streaming and not part.needs_total
    go_offline_without_network()
    try:  # a stream has no slices
        asked = part.name if streaming else split
        rows: Iterable[Any] = datasets.load_dataset(name, config or None, split=asked, streaming=streaming)
        records = (RawRow(f"{dataset}[{split}]:{i}", raw) for i, raw in enumerate(keep_images_encoded(rows), 1))
        yield from part.take(records) if streaming else records
    except Exception as error:  # no network, no such name, split or configuration: datasets raises a dozen types
        raise UserError(
            f"There is no file or folder {show(dataset)}, and no dataset of this name could be loaded from the hub (split "
            f"{split!r}: {name_reason(error)}); check the name, the split and the network{_suggest_file(Path(dataset)) or '.'}"
        ) from error


def go_offline_without_network() -> None:
    """Make huggingface_hub use only downloaded files if the hub's host name does not resolve."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if (constants.HF_HUB_OFFLINE and not _network["missing"]) or {"http", "https", "all"} & getproxies().keys():
        return  # requested by the user, or the proxy resolves the name
    hub = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(hub, None)
        _network["missing"] = False
    except OSError:
        if not _network["missing"]:
            redaction.say(f"No network: the address of {hub} cannot be found, so earlier downloads are used.")
        _network["missing"] = True
    # Without a network, huggingface_hub would try each file for a minute before it uses the downloaded one.
    constants.HF_HUB_OFFLINE = _network["missing"]
