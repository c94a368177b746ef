"""Images of dataset rows and of environments' observations: read, checked, and replaced by marks in text (`language.images`).

The forms are TRL's: images are in content parts of messages, or in a column `images` or `image`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from psigrad.errors import name_reason, several
from psigrad.language import images
from psigrad.language.data.chat.messages import Fail
from psigrad.language.data.dataset_rows import BadRow, Row, RowError, role_of
from psigrad.language.images import COLUMNS, MARK, Picture

_ASKED = ("prompt", "messages", "conversations", "conversation")
_ANSWERS = ("completion", "chosen", "rejected")
_KINDS = ("image", "image_url", "input_image")
_SOURCES = ("image", "image_url", "url", "path", "bytes")
MOVES = "an animated image is read as its first frame"


def insert_marks(raw: Mapping[str, Any], source: str, base: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return (a raw row whose texts have a mark, `images.MARK`, for each image; notes on how the images were read).

    In this row, the column `images` or `image` has all images. Paths are relative to `base`. Errors name `source`.
    """

    def fail(column: str, reason: str) -> NoReturn:
        raise RowError(BadRow(source, column, reason))

    given = {name: raw[name] for name in COLUMNS if raw.get(name) is not None}
    if len(given) > 1:
        fail("image", "and images are both given; remove one of the two columns")
    column, held = next(iter(given.items()), ("", []))
    several_given = isinstance(held, list | tuple)
    held = list(held) if several_given else [held]
    conversations = [name for name in (*_ASKED, *_ANSWERS) if is_conversation(raw.get(name))]
    has_images = bool(held) or any(is_image(part) for name in conversations for turn in raw[name] for part in _parts(turn))
    refuse_marks(raw, fail, "\ufffc" if has_images else "")
    if not has_images:
        return raw, []
    reader = _Reader(base, fail)
    other = f"; give a column without images another name: --columns {column}=other"
    marks = [reader.mark(one, f"{column}[{i}]" if several_given else column, other) for i, one in enumerate(held)]
    made, first = dict(raw), _count_placeholders(raw["prompt"]) if "prompt" in conversations else 0
    for name in conversations:
        begun = first if name in _ANSWERS else 0
        wanted = begun + _count_placeholders(raw[name])
        if wanted not in (0, len(marks)) and not (name == "prompt" and set(_ANSWERS).intersection(conversations)):
            have = several(len(marks), "image", "is", "are")
            fail(
                name,
                f"has {several(wanted, 'image part')} without an image, but {have} in the column {column or 'images'}",
            )
        rest = iter(marks[begun:])
        made[name] = [reader.turn(turn, f"{name}[{i}]", rest) for i, turn in enumerate(raw[name])]
    if marks and not any(_count_placeholders(raw[name]) for name in conversations):
        _put_first(made, conversations, "".join(marks), column, fail)
    kept = [_anchored(one, base) for one in held or reader.found]
    made[column or "images"] = kept if several_given or not held else kept[0]
    return made, [MOVES] if reader.moves else []


def _anchored(given: Any, base: Path) -> Any:
    """Return the image `given`, with a path relative to `base` made absolute, since reward functions run in another folder."""
    path = (given.get("bytes") or given.get("path")) if isinstance(given, Mapping) else given
    return str(_path(path, base)) if isinstance(path, str | os.PathLike) and not str(path).startswith("data:") else given


def _path(text: str | os.PathLike[str], base: Path) -> Path:
    return (base / Path(os.fspath(text).removeprefix("file://")).expanduser()).absolute()


def _put_first(made: dict[str, Any], conversations: list[str], marks: str, column: str, fail: Fail) -> None:
    """Insert `marks` at the start of the user's first message in the row `made`.

    `conversations` names the columns with messages. Errors name `column`.
    """
    asked = [name for name in conversations if name in _ASKED] or [name for name in conversations if made.get("prompt") is None]
    for name in asked:
        place = next((i for i, turn in enumerate(made[name]) if role_of(turn) == "user"), None)
        if place is None:
            fail(column, f"has images, but {name} has no user's turn for them; add one")
        turn = made[name][place]
        content = "value" if "value" in turn and "role" not in turn else "content"
        said = turn.get(content) or ""
        said = [{"type": "text", "text": marks}, *said] if isinstance(said, list) else marks + str(said)
        made[name] = [*made[name][:place], {**turn, content: said}, *made[name][place + 1 :]]
    if not asked:  # the prompt is text
        name = next((name for name in ("prompt", "instruction") if isinstance(made.get(name), str)), "")
        if not name:
            fail(column, "has images, but the row has neither a prompt nor messages for them; add one of these")
        made[name] = marks + made[name]


class _Reader:
    """The reader of one row's images. `found` lists the images in its content parts. `moves` is True if any image is animated."""

    def __init__(self, base: Path, fail: Fail) -> None:
        self.base, self.fail, self.found, self.moves = base, fail, list[Any](), False

    def turn(self, turn: Any, where: str, rest: Iterator[str]) -> Any:
        """Return the message `turn` with a mark in place of each image. Errors name `where`, the message's place in the row.

        A placeholder, {"type": "image"}, gets the next mark of `rest`.
        """
        if not any(map(is_image, _parts(turn))):
            return turn
        if role_of(turn) == "assistant":
            self.fail(where, "has an image in the assistant's turn; models write only text")
        name = "value" if "value" in turn and "role" not in turn else "content"
        return {**turn, name: [self.part(part, f"{where}.{name}[{i}]", rest) for i, part in enumerate(turn[name])]}

    def part(self, part: Any, where: str, rest: Iterator[str]) -> Any:
        """Return a content part. An image part becomes a text part with the image's mark. `where` and `rest`: see `turn`."""
        if not is_image(part):
            return part
        own = source_of(part)
        if own is None:
            return {"type": "text", "text": next(rest)}
        self.found.append(own)
        return {"type": "text", "text": self.mark(own, where)}

    def mark(self, given: Any, where: str, advice: str = "") -> str:
        """Read and register the image `given`. Return its mark (`images.MARK`). Errors name `where` and end with `advice`."""
        try:
            picture, moves = read(given, self.base)
        except (OSError, ValueError) as error:
            self.fail(where, f"{error}{advice}")
        self.moves = self.moves or moves
        return images.register(picture)


def read(given: Any, base: Path) -> tuple[Picture, bool]:
    """Read an image and return (the image, True if it is animated).

    `given` is a path (relative to `base`), bytes, a data URL, Arrow's {"bytes", "path"}, or a Pillow image. Raises
    `ValueError` with the reason if it cannot be read.
    """
    if isinstance(given, Mapping):
        given = given.get("bytes") or given.get("path")
    if _is_pillow(given):
        file = io.BytesIO()
        images.rgb(given).save(file, "PNG")  # the same bytes for the same pixels and the same Pillow
        return _of_bytes(file.getvalue())
    if isinstance(given, bytes | bytearray | memoryview):
        return _of_bytes(bytes(given))
    if not isinstance(given, str | os.PathLike):
        raise ValueError(f"is of type {type(given).__name__!r}; give a path, bytes, a data URL, or a Pillow image")
    text = os.fspath(given)
    if text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise ValueError('is a data URL without ";base64"; expected "data:image/png;base64,…"')
        try:
            return _of_bytes(base64.b64decode("".join(body.split()), validate=True))
        except binascii.Error as error:
            raise ValueError(f"is a data URL that is not base64 ({error})") from None
    if "://" in text[:16] and not text.startswith("file://"):
        advice = "save the image and give its path (training downloads images if data.image_urls is true)"
        raise ValueError(f"is the URL {text[:60]}; {advice}")
    try:
        path = _path(text, base)
        if not path.is_file():
            raise ValueError(f"is {text[:120]!r}, and {f'{path} is a folder' if path.is_dir() else f'there is no file {path}'}")
        found = path.stat()
        return _of_file(path, found.st_size, found.st_mtime_ns, found.st_ino)
    except OSError as error:
        raise ValueError(f"is {text[:120]!r}, which cannot be read ({error.strerror})") from None


@functools.lru_cache(maxsize=65536)
def _of_file(path: Path, *stat: int) -> tuple[Picture, bool]:
    """Read an image file and return (the image, True if it is animated). `stat` makes the cache read a changed file again."""
    return _of_bytes(path.read_bytes(), path)


def _of_bytes(data: bytes, path: Path | None = None) -> tuple[Picture, bool]:
    if not data:
        raise ValueError("has no bytes; an encoded image was expected, such as a PNG file")
    try:
        size, moves = images.inspect(data)
    except Exception as error:  # a decoder can raise anything
        name = f"the file {path}" if path is not None else f"{len(data)} bytes"
        unknown = type(error).__name__ == "UnidentifiedImageError"  # its message has an object's address, which means nothing
        why = f"expected {', '.join(images.FORMATS)}" if unknown else name_reason(error)
        raise ValueError(f"is {name}, which cannot be read as an image ({why})") from None
    return Picture(hashlib.sha256(data).hexdigest(), *size, path, None if path is not None else data), moves


def observation_text(content: Any) -> Any:
    """Return an observation with a mark (`images.MARK`) in place of each image. A list of content parts becomes one text.

    Raises `ValueError` for an image that cannot be read.
    """

    def join(parts: list[Any]) -> str:
        return "".join(
            images.register(read(source_of(part), Path())[0]) if is_image(part) else plain(_text(part)) for part in parts
        )

    def plain(text: str) -> str:
        if MARK.search(text):
            raise ValueError("has U+FFFC and a SHA-256 in its text, which psigrad reserves for images; remove them")
        return text

    return _each_content(content, join, plain)


def observation_json(content: Any) -> Any:
    """Return an observation with data URLs in place of images, for JSON. Raises `ValueError` if an image cannot be read."""

    def part(one: Any) -> Any:
        if not is_image(one):
            return {"type": "text", "text": _text(one)}
        return {"type": "image", "image": _data_url(read(source_of(one), Path())[0].read())}

    return _each_content(content, lambda parts: list(map(part, parts)), str)


def _each_content(content: Any, of_parts: Callable[[list[Any]], Any], of_text: Callable[[str], str]) -> Any:
    if isinstance(content, list) and content and all(isinstance(one, Mapping) and "role" in one for one in content):
        return [{**m, "content": _each_content(m["content"], of_parts, of_text)} if "content" in m else m for m in content]
    if has_parts(content):
        return of_parts(content if isinstance(content, list) else [content])
    return of_text(content) if isinstance(content, str) else content


def has_parts(content: Any) -> bool:
    """Return True if an observation is a Pillow image, a content part, or a list of content parts."""
    parts = content if isinstance(content, list) and content else [content] if not isinstance(content, str) else [None]
    return all(is_image(part) or isinstance(_text(part), str) for part in parts)


def digests_of(row: Row) -> list[str]:
    """Return the SHA-256 of each image of a row, in order."""
    return [digest for text in (row.prompt, row.completion, row.messages, row.rejected) for digest in _digests_in(text)]


def _digests_in(value: Any) -> list[str]:
    turns = value if isinstance(value, list) else [value]
    texts = [turn.get("content") if isinstance(turn, Mapping) else turn for turn in turns]
    return [digest for text in texts if isinstance(text, str) and "\ufffc" in text for digest in MARK.findall(text)]


def to_data_urls(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the messages with each image part, as made by `images.split_contents`, in OpenAI's form with a data URL."""

    def part(one: Mapping[str, Any]) -> Mapping[str, Any]:
        if "sha256" not in one:
            return one
        return {"type": "image_url", "image_url": {"url": _data_url(images.picture(one["sha256"]).read())}}

    contents = [(m, m.get("content")) for m in messages]
    return [{**m, "content": list(map(part, content))} if isinstance(content, list) else m for m, content in contents]


def to_agent_row(row: Row, *, as_json: bool = False) -> dict[str, Any]:
    """Return a row's prompt and columns for an agent, with messages in OpenAI's form and their images as data URLs.

    If `as_json`, image objects in columns become data URLs too.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return list(map(plain, value))
        return value if value is None or isinstance(value, str) else _data_url(read(value, Path())[0].read())

    made = {"prompt": images.remove_marks(row.dataset_prompt), **row.columns}
    if isinstance(made["prompt"], list):
        made["prompt"] = to_data_urls(made["prompt"])
    return made | {name: plain(made[name]) for name in COLUMNS if as_json and name in made}


def to_json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON values, with images (paths or data URLs) in the column `images` instead of marks in the texts."""
    texts = [row.get("prompt"), row.get("completion")]
    found = [images.picture(digest) for text in texts for digest in _digests_in(text)]
    if not found:
        return dict(row)
    own = {name: value for name, value in row.items() if name not in COLUMNS}
    made = {name: images.remove_marks(row[name]) for name in ("prompt", "completion") if name in row}
    return {**own, **made, "images": [_data_url(one.data) if one.data is not None else str(one.path) for one in found]}


def _data_url(data: bytes) -> str:
    return f"data:{images.media_type(data)};base64,{base64.b64encode(data).decode()}"


def is_conversation(value: Any) -> bool:
    """Return True if a column's value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def _parts(turn: Mapping[str, Any]) -> list[Any]:
    content = turn.get("content", turn.get("value"))
    return content if isinstance(content, list) else []


def _count_placeholders(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(is_image(part) and source_of(part) is None for turn in messages for part in _parts(turn))


def _is_pillow(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_image(part: Any) -> bool:
    """Return True for a content part that is an image."""
    return _is_pillow(part) or (isinstance(part, Mapping) and part.get("type") in _KINDS)


def source_of(part: Any) -> Any:
    """Return the image that a content part contains, such as a path or URL; None if it contains none."""
    if not isinstance(part, Mapping):
        return part
    found = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    return found.get("url", found) if isinstance(found, Mapping) else found


def _text(part: Any) -> Any:
    return part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) and "role" not in part else None


def refuse_marks(raw: Mapping[str, Any], fail: Fail, further: str) -> None:
    """Call `fail` if a text in `raw` has an image mark or, if `further` is not "", any U+FFFC, which delimits marks."""
    stack: list[tuple[str, Any]] = list(raw.items())  # no recursion: rows may be deep
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            if "\ufffc" in value and (further or MARK.search(value)):
                fail(path, "has the character U+FFFC, which psigrad reserves for images; remove it")
        elif isinstance(value, Mapping):
            stack += [(f"{path}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            stack += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
