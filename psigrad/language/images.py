"""Images as text and as token ids: a mark in a message's content, and one id per image token that says which image it is of.

An image's mark is its SHA-256 between two object replacement characters (U+FFFC), so a prompt with images is a plain string. Each
of its tokens is an id of at least `FIRST`, made of 46 bits of the SHA-256 and of the token's place in the image. A prompt with
images is thus a plain list of ids too: caches, packing and resumed runs never take two images for one, and no id of the
vocabulary ever stands for an image. The embedding (`models/vision.py`) turns these ids into features.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from psigrad.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = re.compile("\ufffc([0-9a-f]{64})\ufffc")
FIRST = 1 << 62
"""The smallest id of an image token."""
_PLACES = 16
COLUMNS = ("images", "image")
"""The columns of a dataset that have images."""
MOST_PIXELS = 89_478_485
"""The most pixels of an image: the number from which Pillow warns of a decompression bomb."""
# Pillow's other readers start programs (EPS) or are rarely tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


@dataclass(frozen=True)
class Picture:
    """The source of an image: a file or its bytes, and the SHA-256 of the bytes."""

    digest: str
    width: int
    height: int
    """The numbers of pixels of the upright image, as `open` returns it."""
    path: Path | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the file. Raises `UserError` if it has changed since it was first read."""
        if self.data is not None or self.path is None:
            return self.data or b""
        try:
            found = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"The image {self.path} cannot be read any more ({error.strerror}); put it back.") from None
        if hashlib.sha256(found).hexdigest() != self.digest:
            raise UserError(f"The image {self.path} has changed since the run began; put the old file back.")
        return found

    def open(self) -> Image:
        """Return the pixels in RGB, upright, on white where the image is transparent."""
        return upright(self.read())


class Sight(Protocol):
    """The form of an image in the prompts of a model family; `see` attaches it to a tokenizer."""

    @property
    def placeholder(self) -> str:
        """The text that the chat template writes for an image."""

    @property
    def token_id(self) -> int:
        """The id of the token that stands for one feature of an image."""

    @property
    def version(self) -> str:
        """A hash of everything that the model's view of an image depends on besides the image."""

    def save(self, folder: Path) -> None:
        """Write the processor's files beside a model."""

    def expand(self, picture: Picture) -> str:
        """Return the text of an image in a prompt, with the token of `token_id` once per feature."""

    def count(self, picture: Picture) -> int:
        """Return the number of an image's features."""


_SIGHT = "psigrad_sight"


def see(tokenizer: Any, sight: Sight | None) -> None:
    """Allow images in prompts of this tokenizer. With None, prompts are text alone."""
    setattr(tokenizer, _SIGHT, sight)


def sight_of(tokenizer: Any) -> Any:
    """Return the `Sight` of a tokenizer; None if its model reads text alone."""
    return getattr(tokenizer, _SIGHT, None)


_album: dict[str, Picture] = {}
_by_first: dict[int, str] = {}
_run: list[Path] = []


def keep(picture: Picture) -> str:
    """Remember an image for this process, and return its mark. Images are known by content, so the same image is kept once."""
    other = _by_first.setdefault(first_id(picture.digest), picture.digest)
    if other != picture.digest:
        raise UserError(
            f"The images {_album[other].path} and {picture.path} share 46 bits of their SHA-256; change a pixel of one."
        )
    if picture.digest not in _album or picture.data is not None:
        _album[picture.digest] = _stored(picture, _run[0]) if _run else picture
    return f"\ufffc{picture.digest}\ufffc"


def is_known(digest: str) -> bool:
    """Return True if this process has the image."""
    return digest in _album


def forget(digest: str) -> None:
    """Drop an image that nothing refers to any more."""
    if (held := _album.pop(digest, None)) is not None:
        _by_first.pop(first_id(held.digest), None)


def keep_in(folder: Path | None, digests: Iterable[str] = ()) -> None:
    """Keep a run's images in this folder: those of its rows, `digests`, and all that it reads later. None ends that.

    Bytes become files that are named by their SHA-256. Of images that are files already, paths.jsonl has the path. A later start
    of the run, and other processes, find them there.
    """
    _run[:] = [] if folder is None else [folder]
    if folder is None:
        return
    found = [_album[digest] for digest in dict.fromkeys(digests)]
    _album.update({one.digest: _stored(one, folder) for one in found})
    paths = {one.digest: one for one in found if one.data is None and one.path is not None and one.path.parent != folder}
    if lines := [json.dumps([digest, str(one.path), one.width, one.height]) for digest, one in sorted(paths.items())]:
        _write(folder / "paths.jsonl", "".join(f"{line}\n" for line in lines).encode())


def _stored(picture: Picture, folder: Path) -> Picture:
    """Return the image as a file of the folder if it is bytes."""
    if picture.data is None:
        return picture
    with _opened(picture.data) as image:
        place = folder / f"{picture.digest}.{str(image.format).lower()}"
    if not place.exists():
        _write(place, picture.data)
    return replace(picture, path=place, data=None)


def _write(place: Path, data: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{uuid.uuid4().hex[:8]}")
    beside.write_bytes(data)
    os.replace(beside, place)


def _recall(begins: str) -> Iterable[Picture]:
    """Return the images of the run's folder whose SHA-256 starts like this."""
    for folder in _run:
        for file in folder.glob(f"{begins}*.*"):
            with _opened(file.read_bytes()) as image:
                yield Picture(file.stem, *_size_of(image), file)
        if (paths := folder / "paths.jsonl").exists():
            for digest, path, width, height in map(json.loads, paths.read_text().splitlines()):
                if digest.startswith(begins):
                    yield Picture(digest, width, height, Path(path))


def picture(digest: str) -> Picture:
    """Return a known image. Raises `UserError` for an unknown one."""
    if digest not in _album and (found := next(iter(_recall(digest)), None)) is not None:
        keep(found)
    if digest not in _album:
        raise UserError(f"The image {digest[:12]}… is not among the images of this run; read its rows first.")
    return _album[digest]


def first_id(digest: str) -> int:
    """Return the id of an image's first token."""
    return FIRST | int(digest[:12], 16) >> 2 << _PLACES


def split_id(token: int) -> tuple[Picture, int]:
    """Return the image of a token's id, and the token's place in it."""
    place = token & (1 << _PLACES) - 1
    first = token - place
    if first not in _by_first:
        begins = f"{(first ^ FIRST) >> _PLACES << 2:012x}"[:11]
        for one in _recall(begins):
            if first_id(one.digest) == first:
                keep(one)
    known = _by_first.get(first)
    if known is None:
        raise UserError("A prompt has tokens of an image that is not among the images of this run; read its rows first.")
    return _album[known], place


def without_images(ids: Iterable[int], token_id: int) -> list[int]:
    """Return ids of the vocabulary alone, with `token_id` in place of image tokens: for text to read, and for other engines."""
    return [token_id if token >= FIRST else token for token in ids]


def decode(tokenizer: Any, ids: Iterable[int], **options: Any) -> str:
    """Return the text of ids for readers, with a label in place of each image, such as [image 640×480 3fa2b1]."""
    kept, labels = [], []
    sight = sight_of(tokenizer)
    for token in ids:
        if token < FIRST:
            kept.append(token)
        elif sight is not None and (one := label_of(token)):
            kept.append(sight.token_id)
            labels.append(one)
    made = tokenizer.decode(kept, **options)
    text = made if isinstance(made, str) else "".join(made)
    word = str(tokenizer.convert_ids_to_tokens(sight.token_id)) if sight is not None and labels else ""
    for one in labels:
        text = text.replace(word, one, 1)
    return text


def label(digest: str) -> str:
    """Return how an image is shown in text: its size if it is known, and the start of its SHA-256."""
    known = _album.get(digest)
    return f"[image {f'{known.width}×{known.height} ' if known else ''}{digest[:6]}]"


def shown(text: str) -> str:
    """Return a text with labels in place of its marks."""
    return MARK.sub(lambda mark: label(mark[1]), text) if "\ufffc" in text else text


def label_of(token: int) -> str:
    """Return the label of the image whose first token this is; empty for later ones. The id itself has the label's digits."""
    place = token & (1 << _PLACES) - 1
    return "" if place else label(_by_first.get(token) or f"{(token ^ FIRST) >> _PLACES << 2:012x}")


def parts_of(content: str) -> list[dict[str, Any]]:
    """Return a content as the parts that a chat template reads. An image's part has its SHA-256 and its size, too."""

    def part(digest: str) -> dict[str, Any]:
        known = picture(digest)
        return {"type": "image", "sha256": digest, "width": known.width, "height": known.height}

    pieces = MARK.split(content)
    parts = [part(piece) if i % 2 else {"type": "text", "text": piece} for i, piece in enumerate(pieces)]
    return [part for part in parts if part.get("text") != "" or len(parts) == 1]


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with images as parts of the content; see `parts_of`."""
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and "\ufffc" in content and MARK.search(content):
            message = {**message, "content": parts_of(content)}
        found.append(message)
    return found


def recorded(prompt: str | Sequence[Mapping[str, Any]]) -> str | Sequence[Mapping[str, Any]]:
    """Return a prompt as rollouts.jsonl stores it. A text with images becomes a message with parts."""
    if isinstance(prompt, str):
        return in_parts([{"role": "user", "content": prompt}]) if MARK.search(prompt) else prompt
    return in_parts(prompt)


def for_rewards(said: Any) -> Any:
    """Return a prompt or a completion as reward functions and environments receive it: without marks, messages with parts."""
    return MARK.sub("", said) if isinstance(said, str) else in_parts(said) if isinstance(said, list) else said


def open_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with images opened by Pillow, which TRL's reward functions expect; workers open them, not the trainer."""
    return {name: _open_all(value) if name in COLUMNS else value for name, value in columns.items()}


def _open_all(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_open_all(one) for one in value]
    given = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value
    with contextlib.suppress(OSError, ValueError):  # not an image: another column of that name
        if isinstance(given, str) and given.startswith("data:"):
            return _opened(base64.b64decode(given.partition(",")[2]))
        if isinstance(given, bytes | str | os.PathLike):
            return _opened(given if isinstance(given, bytes) else Path(given).read_bytes())
    return value


def marked(text: str, messages: Iterable[Mapping[str, Any]], sight: Sight | None) -> tuple[str, list[tuple[int, int]]]:
    """Return what a template rendered, with the messages' marks in place of the family's placeholders.

    The second value has, for each image, the place of its placeholder and by how much the mark is longer. Raises `ValueError` if
    the template leaves an image out or writes it elsewhere, and if a text contains the placeholder.
    """
    wanted = [
        part
        for m in messages
        if isinstance(m.get("content"), list) and any("sha256" in part for part in m["content"])
        for part in m["content"]
    ]
    if not wanted:
        return text, []
    if sight is None:
        raise ValueError("it has an image, and the model reads text alone; use a vision-language model")
    at, made, moves, word = 0, "", [], sight.placeholder
    for part in wanted:
        piece = word if "sha256" in part else part["text"].strip()
        found = text.find(piece, at)
        if found < 0:
            raise ValueError("the chat template leaves out an image, or writes it elsewhere than the row")
        made += text[at:found] + (f"\ufffc{part['sha256']}\ufffc" if "sha256" in part else piece)
        moves += [(found, 66 - len(word))] if "sha256" in part else []
        at = found + len(piece)
    if (count := text.count(word)) != len(moves):
        raise ValueError(f"the chat template writes {count} times {word!r} for {len(moves)} images")
    return made + text[at:], moves


def written(text: str, sight: Sight | None) -> tuple[str, list[Picture]]:
    """Return a text with its marks written out for the tokenizer, and its images in order.

    Raises `UserError` if the model reads text alone.
    """
    if "\ufffc" not in text:
        return text, []
    found = [picture(digest) for digest in MARK.findall(text)]
    if not found:
        return text, []
    if sight is None:
        raise UserError("The prompt has an image, and the model reads text alone; give a vision-language model.")
    return MARK.sub(lambda mark: sight.expand(picture(mark[1])), text), found


def with_images(ids: Sequence[int], pictures: Sequence[Picture], sight: Sight) -> list[int]:
    """Return encoded ids with each image's own ids in place of the placeholder's.

    Raises `UserError` if the number of placeholders is not the number of features, as when a text contains one itself.
    """
    own = [first_id(one.digest) + place for one in pictures for place in range(sight.count(one))]
    if (count := sum(token == sight.token_id for token in ids)) != len(own):
        raise UserError(
            f"The text has {count} image tokens, and its {len(pictures)} images have {len(own)} features; leave "
            f"{sight.placeholder!r} out of the text."
        )
    left = iter(own)
    return [next(left) if token == sight.token_id else token for token in ids]


def upright(data: bytes, *, small: bool = False) -> Image:
    """Return the pixels of an encoded image in RGB; see `rgb`. Of an animation this is the first frame.

    If `small`, a JPEG is decoded at an eighth of its size, which still reads all of its data. Raises whatever Pillow raises, and
    `ValueError` for more than `MOST_PIXELS`.
    """
    with _opened(data) as image:
        if (count := image.width * image.height) > MOST_PIXELS:
            raise ValueError(f"it has {count:,} pixels, and the most is {MOST_PIXELS:,}")
        if small:
            image.draft("RGB", (image.width // 8, image.height // 8))
        return rgb(image)


def rgb(image: Image) -> Image:
    """Return an image in RGB: turned by its EXIF orientation, on white where it is transparent, 16-bit grey scaled to 8 bits."""
    import numpy as np
    from PIL import Image, ImageOps

    found: Image.Image = ImageOps.exif_transpose(image)
    if 0 in found.size or found.mode == "F":
        raise ValueError(f"it has {found.width} × {found.height} pixels of mode {found.mode}; expected some, of whole numbers")
    if found.mode.startswith("I"):
        grey = np.asarray(found).astype(np.float32).clip(0, 65535) / 257
        found = Image.fromarray(grey.round().astype(np.uint8))
    if found.has_transparency_data:
        white = Image.new("RGBA", found.size, "white")
        found = Image.alpha_composite(white, found.convert("RGBA"))
    return found.convert("RGB")


def inspect(data: bytes) -> tuple[tuple[int, int], bool]:
    """Return the upright size of an encoded image after decoding all of it, and True if it is animated."""
    upright(data, small=True)
    with _opened(data) as image:
        return _size_of(image), image.format != "MPO" and bool(getattr(image, "is_animated", False))


def media_type(data: bytes) -> str:
    """Return the media type of an encoded image, such as image/png."""
    from PIL import Image

    with _opened(data) as image:
        # Phones write JPEG files with a second picture, which Pillow calls MPO; other readers take them for JPEG.
        return Image.MIME["JPEG" if image.format == "MPO" else str(image.format)]


def _size_of(image: Image) -> tuple[int, int]:
    if image.format == "TIFF":
        image.load()  # which turns it; some versions of Pillow have its upright size before, too
    turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if turned else (image.width, image.height)


def _opened(data: bytes) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=FORMATS)
