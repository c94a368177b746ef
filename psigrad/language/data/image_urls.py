"""Images that rows name by URL. They are downloaded into the cache, once, if the setting `data.image_urls` allows it."""

from __future__ import annotations

import hashlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any

from psigrad import __version__
from psigrad.cache_folder import cache_folder
from psigrad.errors import UserError, name_reason
from psigrad.language import images
from psigrad.language.data.dataset_rows import BadRow
from psigrad.language.data.image_rows import is_conversation, is_image, read, source_of
from psigrad.language.data.row_files import RawRow, Records

MOST_BYTES = 1 << 28
"""The maximum size of a downloaded file in bytes."""
_ROWS, _THREADS = 256, 16
_WAITS = (1.0, 4.0)
"""The seconds before the second and the third try of a download."""


def download(records: Records, columns: Mapping[str, str]) -> Records:
    """Yield records in which the path of a downloaded file replaces each image's http or https URL.

    A record with an image that cannot be downloaded becomes a `BadRow`. `columns`: see `sources.load`.
    """
    renamed = [pair for pair in columns.items() if set(pair).intersection(images.COLUMNS)]
    names, succeeded = {*images.COLUMNS, *(name for pair in renamed for name in pair)}, False
    with ThreadPoolExecutor(_THREADS, "download") as threads:
        while chunk := list(islice(records, _ROWS)):
            urls = dict.fromkeys(url for record in chunk if isinstance(record, RawRow) for url in _urls_of(record.value, names))
            found = dict(zip(urls, threads.map(fetch, urls), strict=True))
            succeeded = succeeded or any(isinstance(one, Path) for one in found.values())
            if found and not succeeded:
                url, why = next(iter(found.items()))
                raise UserError(
                    f"None of {len(found)} images could be downloaded. The first is {url}, which {why}. "
                    "Check the URLs and the network."
                )
            for record in chunk:
                yield _local(record, names, found) if isinstance(record, RawRow) else record


def _urls_of(raw: object, names: set[str]) -> list[str]:
    """Return the URLs of a raw row's images; see `_replace` for `names`."""
    found: list[str] = []

    def keep(url: str, place: str) -> str:
        found.append(url)
        return url

    _replace(raw, names, keep)
    return found


def _local(record: RawRow, names: set[str], found: Mapping[str, Path | str]) -> RawRow | BadRow:
    """Return a record with file paths in place of its URLs, or a `BadRow` if a download failed. `found[url]` is `fetch(url)`."""
    bad: list[BadRow] = []

    def change(url: str, place: str) -> str:
        if isinstance(one := found[url], str):
            bad.append(BadRow(record.source, place, f"is the URL {url[:200]}, which {one}"))
        return str(one)

    value = _replace(record.value, names, change)
    return bad[0] if bad else RawRow(record.source, value)


def _replace(raw: object, names: set[str], change: Callable[[str, str], str]) -> object:
    """Return a raw row with `change(url, path in the row)` in place of each image's URL, in columns `names` and in messages."""
    if not isinstance(raw, Mapping):
        return raw

    def one(given: Any, place: str) -> Any:
        return change(given, place) if isinstance(given, str) and given.startswith(("http://", "https://")) else given

    def part(given: Any, place: str) -> Any:
        if not (isinstance(given, Mapping) and is_image(given)):
            return given
        changed = one(own := source_of(given), place)
        return given if changed is own else {"type": "image", "image": changed}

    def turn(given: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        name = "value" if "value" in given and "content" not in given else "content"
        parts = given.get(name)
        if not isinstance(parts, list):
            return given
        return {**given, name: [part(inner, f"{place}.{name}[{i}]") for i, inner in enumerate(parts)]}

    made = dict(raw)
    for name, value in raw.items():
        if name in names:
            each = isinstance(value, list | tuple)
            made[name] = [one(inner, f"{name}[{i}]") for i, inner in enumerate(value)] if each else one(value, name)
        elif is_conversation(value):
            made[name] = [turn(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    return made


def fetch(url: str) -> Path | str:
    """Download an image into the cache and return its file, or the reason if this fails."""
    place = cache_folder("images") / hashlib.sha256(url.encode()).hexdigest()
    if place.exists():
        return place
    data = _download(url)
    if isinstance(data, str):
        return data
    try:
        read(data, Path())
    except ValueError as error:
        return f"gives no image: the answer {error}"  # it follows "the URL …, which"
    images.write_whole(place, data)
    return place


def _download(url: str) -> bytes | str:
    """Return the bytes that the server sends, or the reason why there are none."""
    request, why = urllib.request.Request(url, headers={"User-Agent": f"psigrad/{__version__}"}), ""
    for wait in (*_WAITS, None):
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                data: bytes = answer.read(MOST_BYTES + 1)
            return data if len(data) <= MOST_BYTES else f"has more than {MOST_BYTES >> 20} MB"
        except urllib.error.HTTPError as error:
            why = f"the server refuses with status {error.code}"
            if error.code < 500:
                break
        except (OSError, HTTPException, ValueError) as error:
            why = f"cannot be downloaded ({name_reason(error)})"
        if wait is not None:
            time.sleep(wait)
    return why
