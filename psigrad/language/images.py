"""Images in text and in token ids: a mark in a message's content, and one id per image token, which encodes the image.

An image's mark is its SHA-256 between two object replacement characters (U+FFFC), so a prompt with images is a plain string. An
image token's id is at least `FIRST`. It is made of 46 bits of the SHA-256 and of the token's index in the image. A prompt with
images is thus a plain list of ids too. Caches, packing and resumed runs never confuse two images, and no id of the vocabulary
ever represents an image. The embedding (`models/vision.py`) turns these ids into features.
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
"""The columns of a dataset that may have images."""
MOST_PIXELS = 89_478_485
"""The maximum number of pixels of an image. Above it, Pillow warns of a decompression bomb."""
# Pillow's other readers start programs (EPS) or are rarely tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


@dataclass(frozen=True)
class Picture:
    """An image that is not decoded: its file or its encoded bytes, and the SHA-256 of the bytes."""

    digest: str
    width: int
    height: int
    """`width` and `height` are the size in pixels of the upright image, as `open` returns it."""
    path: Path | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the image's encoded bytes. Raises `UserError` if its file is missing or has changed since the first read."""
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
        return decode_upright(self.read())


class ImageFormat(Protocol):
    """The form of images in a model family's prompts: a placeholder token for each feature.

    `attach_image_format` attaches it to a tokenizer.
    """

    @property
    def placeholder(self) -> str:
        """The text that the chat template writes for an image."""

    @property
    def token_id(self) -> int:
        """The id of the placeholder token in the vocabulary."""

    @property
    def version(self) -> str:
        """A hash of all settings that affect an image's pixel values, such as the image processor's."""

    def save(self, folder: Path) -> None:
        """Write the image processor's files into a model's folder."""

    def expand(self, picture: Picture) -> str:
        """Return the text of an image in a prompt, with the placeholder token once per feature."""

    def count(self, picture: Picture) -> int:
        """Return the number of the image's features."""


_IMAGE_FORMAT = "psigrad_image_format"


def attach_image_format(tokenizer: Any, image_format: ImageFormat | None) -> None:
    """Attach an `ImageFormat` to a tokenizer, so that its prompts may have images. With None, prompts are text only."""
    setattr(tokenizer, _IMAGE_FORMAT, image_format)


def image_format_of(tokenizer: Any) -> Any:
    """Return the `ImageFormat` that `attach_image_format` attached to a tokenizer; None if its model reads only text."""
    return getattr(tokenizer, _IMAGE_FORMAT, None)


_register: dict[str, Picture] = {}
_by_first: dict[int, str] = {}
_run: list[Path] = []


def register(picture: Picture) -> str:
    """Register an image in this process, and return its mark. An image with the same content is registered only once."""
    other = _by_first.setdefault(first_id(picture.digest), picture.digest)
    if other != picture.digest:
        raise UserError(
            f"The images {_register[other].path} and {picture.path} have the same 46 bits of SHA-256 that identify an image; "
            "change a pixel of one."
        )
    if picture.digest not in _register or picture.data is not None:
        _register[picture.digest] = _store(picture, _run[0]) if _run else picture
    return f"\ufffc{picture.digest}\ufffc"


def is_registered(digest: str) -> bool:
    """Return True if an image with this SHA-256 is registered in this process."""
    return digest in _register


def unregister(digest: str) -> None:
    """Remove an image from the register, once nothing refers to it."""
    if (held := _register.pop(digest, None)) is not None:
        _by_first.pop(first_id(held.digest), None)


def store_in(folder: Path | None, digests: Iterable[str] = ()) -> None:
    """Store a run's images in this folder: those of its rows (`digests`), and those registered later as bytes. With None, stop.

    Images given as bytes become files named by their SHA-256. paths.jsonl lists the paths of the rows' other images. A resumed
    run, and other processes, find the images through this folder.
    """
    _run[:] = [] if folder is None else [folder]
    if folder is None:
        return
    found = [_register[digest] for digest in dict.fromkeys(digests)]
    _register.update({one.digest: _store(one, folder) for one in found})
    paths = {one.digest: one for one in found if one.data is None and one.path is not None and one.path.parent != folder}
    if lines := [json.dumps([digest, str(one.path), one.width, one.height]) for digest, one in sorted(paths.items())]:
        write_whole(folder / "paths.jsonl", "".join(f"{line}\n" for line in lines).encode())


def _store(picture: Picture, folder: Path) -> Picture:
    """Write an image that was given as bytes to the folder, and return the `Picture` of the file. Return others unchanged."""
    if picture.data is None:
        return picture
    with _open(picture.data) as image:
        place = folder / f"{picture.digest}.{str(image.format).lower()}"
    if not place.exists():
        write_whole(place, picture.data)
    return replace(picture, path=place, data=None)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it, so that readers see all of it or nothing. Make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{uuid.uuid4().hex[:8]}")
    beside.write_bytes(data)
    os.replace(beside, path)


def _find_stored(prefix: str) -> Iterable[Picture]:
    """Yield the images of the run's folder whose SHA-256 starts with `prefix`."""
    for folder in _run:
        for file in folder.glob(f"{prefix}*.*"):
            with _open(file.read_bytes()) as image:
                yield Picture(file.stem, *_size_of(image), file)
        if (paths := folder / "paths.jsonl").exists():
            for digest, path, width, height in map(json.loads, paths.read_text().splitlines()):
                if digest.startswith(prefix):
                    yield Picture(digest, width, height, Path(path))


def picture(digest: str) -> Picture:
    """Return the image with this SHA-256. Raises `UserError` if neither this process nor the run's folder has it."""
    if digest not in _register and (found := next(iter(_find_stored(digest)), None)) is not None:
        register(found)
    if digest not in _register:
        raise UserError(f"No image of this run has the SHA-256 {digest[:12]}…; load the dataset that contains it first.")
    return _register[digest]


def first_id(digest: str) -> int:
    """Return the id of an image's first token."""
    return FIRST | int(digest[:12], 16) >> 2 << _PLACES


def split_id(token: int) -> tuple[Picture, int]:
    """Return (the image that an image token belongs to, the token's index in that image)."""
    place = token & (1 << _PLACES) - 1
    first = token - place
    if first not in _by_first:
        begins = f"{(first ^ FIRST) >> _PLACES << 2:012x}"[:11]
        for one in _find_stored(begins):
            if first_id(one.digest) == first:
                register(one)
    known = _by_first.get(first)
    if known is None:
        raise UserError("A prompt has tokens of an image that this run has not read; load the dataset that contains it first.")
    return _register[known], place


def replace_image_ids(ids: Iterable[int], token_id: int) -> list[int]:
    """Return ids of the vocabulary only: `token_id` replaces image tokens. Tokenizers and other engines need this."""
    return [token_id if token >= FIRST else token for token in ids]


def decode(tokenizer: Any, ids: Iterable[int], **options: Any) -> str:
    """Return the text of ids for display, with a label in place of each image, such as [image 640×480 3fa2b1]."""
    kept, labels = [], []
    image_format = image_format_of(tokenizer)
    for token in ids:
        if token < FIRST:
            kept.append(token)
        elif image_format is not None and (one := label_of(token)):
            kept.append(image_format.token_id)
            labels.append(one)
    made = tokenizer.decode(kept, **options)
    text = made if isinstance(made, str) else "".join(made)
    word = str(tokenizer.convert_ids_to_tokens(image_format.token_id)) if image_format is not None and labels else ""
    for one in labels:
        text = text.replace(word, one, 1)
    return text


def label(digest: str) -> str:
    """Return an image's label for display: its size if it is known, and the start of its SHA-256."""
    known = _register.get(digest)
    return f"[image {f'{known.width}×{known.height} ' if known else ''}{digest[:6]}]"


def label_images(text: str) -> str:
    """Return a text for display, with labels in place of image marks."""
    return MARK.sub(lambda mark: label(mark[1]), text) if "\ufffc" in text else text


def label_of(token: int) -> str:
    """Return an image's label if the token is the image's first one, otherwise "".

    If the image is not registered, the label is made from the bits of the SHA-256 in the id.
    """
    place = token & (1 << _PLACES) - 1
    return "" if place else label(_by_first.get(token) or f"{(token ^ FIRST) >> _PLACES << 2:012x}")


def parts_of(content: str) -> list[dict[str, Any]]:
    """Split a message's content into the parts that a chat template reads. An image's part also has its SHA-256 and size."""

    def part(digest: str) -> dict[str, Any]:
        known = picture(digest)
        return {"type": "image", "sha256": digest, "width": known.width, "height": known.height}

    pieces = MARK.split(content)
    parts = [part(piece) if i % 2 else {"type": "text", "text": piece} for i, piece in enumerate(pieces)]
    return [part for part in parts if part.get("text") != "" or len(parts) == 1]


def split_contents(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with each content that has images split into parts; see `parts_of`."""
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and "\ufffc" in content and MARK.search(content):
            message = {**message, "content": parts_of(content)}
        found.append(message)
    return found


def record_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str | Sequence[Mapping[str, Any]]:
    """Return a prompt as rollouts.jsonl stores it. A text with images becomes a user message with parts."""
    if isinstance(prompt, str):
        return split_contents([{"role": "user", "content": prompt}]) if MARK.search(prompt) else prompt
    return split_contents(prompt)


def remove_marks(value: Any) -> Any:
    """Return a prompt or completion for reward functions and environments: text without marks, messages with images as parts."""
    return MARK.sub("", value) if isinstance(value, str) else split_contents(value) if isinstance(value, list) else value


def open_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with images opened by Pillow, as TRL's reward functions expect. Call it in a worker, not in the trainer."""
    return {name: _open_all(value) if name in COLUMNS else value for name, value in columns.items()}


def _open_all(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_open_all(one) for one in value]
    given = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value
    with contextlib.suppress(OSError, ValueError):  # not images: the column only has the name
        if isinstance(given, str) and given.startswith("data:"):
            return _open(base64.b64decode(given.partition(",")[2]))
        if isinstance(given, bytes | str | os.PathLike):
            return _open(given if isinstance(given, bytes) else Path(given).read_bytes())
    return value


def insert_marks(
    text: str, messages: Iterable[Mapping[str, Any]], image_format: ImageFormat | None
) -> tuple[str, list[tuple[int, int]]]:
    """Replace the placeholders of images in a rendered text by marks. Return (the text, a shift for each image).

    A shift is (the index of the placeholder, the number of characters by which the mark is longer). Raises `ValueError` if the
    model reads only text, the template drops or moves an image, or a text contains the placeholder.
    """
    wanted = [
        part
        for m in messages
        if isinstance(m.get("content"), list) and any("sha256" in part for part in m["content"])
        for part in m["content"]
    ]
    if not wanted:
        return text, []
    if image_format is None:
        raise ValueError(
            "the row has an image, and the model reads only text; use a vision-language model with its image processor (Qwen "
            "3.5: --vision)"
        )
    at, made, moves, word = 0, "", [], image_format.placeholder
    for part in wanted:
        piece = word if "sha256" in part else part["text"].strip()
        found = text.find(piece, at)
        if found < 0:
            raise ValueError("the chat template drops an image of the row, or moves it to another place in the text")
        made += text[at:found] + (f"\ufffc{part['sha256']}\ufffc" if "sha256" in part else piece)
        moves += [(found, 66 - len(word))] if "sha256" in part else []
        at = found + len(piece)
    if (count := text.count(word)) != len(moves):
        raise ValueError(f"the chat template writes {word!r} {count} times; expected {len(moves)}, one per image")
    return made + text[at:], moves


def expand_marks(text: str, image_format: ImageFormat | None) -> tuple[str, list[Picture]]:
    """Return (a text for the tokenizer with placeholder tokens in place of image marks, the images in order).

    Raises `UserError` if the model reads only text.
    """
    if "\ufffc" not in text:
        return text, []
    found = [picture(digest) for digest in MARK.findall(text)]
    if not found:
        return text, []
    if image_format is None:
        raise UserError(
            "A prompt has an image, and the model reads only text; give a vision-language model with its processor (Qwen 3.5: "
            "--vision)."
        )
    return MARK.sub(lambda mark: image_format.expand(picture(mark[1])), text), found


def insert_image_ids(ids: Sequence[int], pictures: Sequence[Picture], image_format: ImageFormat) -> list[int]:
    """Return encoded ids in which each image's own ids replace its placeholder tokens.

    Raises `UserError` if there are more or fewer placeholders than features, for example because a text contains one.
    """
    own = [first_id(one.digest) + place for one in pictures for place in range(image_format.count(one))]
    if (count := sum(token == image_format.token_id for token in ids)) != len(own):
        raise UserError(
            f"The text has {count} image tokens, but its {len(pictures)} images need {len(own)} of them; remove "
            f"{image_format.placeholder!r} from the text."
        )
    left = iter(own)
    return [next(left) if token == image_format.token_id else token for token in ids]


def decode_upright(data: bytes, *, small: bool = False) -> Image:
    """Return the pixels of an encoded image in RGB; see `rgb`. For an animation, return the first frame.

    If `small`, a JPEG is decoded at an eighth of its size, which still reads all of its data. Raises whatever Pillow raises, and
    `ValueError` for more than `MOST_PIXELS`.
    """
    with _open(data) as image:
        if (count := image.width * image.height) > MOST_PIXELS:
            raise ValueError(f"the image has {count:,} pixels; at most {MOST_PIXELS:,} are allowed")
        if small:
            image.draft("RGB", (max(image.width // 8, 1), max(image.height // 8, 1)))
        return rgb(image)


def rgb(image: Image) -> Image:
    """Return an image in RGB: turned by its EXIF orientation, on white where it is transparent, 16-bit grey scaled to 8 bits."""
    import numpy as np
    from PIL import Image, ImageOps

    found: Image.Image = ImageOps.exif_transpose(image)
    if 0 in found.size or found.mode == "F":
        raise ValueError(
            f"the image has {found.width} × {found.height} pixels of mode {found.mode}; expected at least 1 pixel, in integers"
        )
    if found.mode.startswith("I"):
        grey = np.asarray(found).astype(np.float32).clip(0, 65535) / 257
        found = Image.fromarray(grey.round().astype(np.uint8))
    if found.has_transparency_data:
        white = Image.new("RGBA", found.size, "white")
        found = Image.alpha_composite(white, found.convert("RGBA"))
    return found.convert("RGB")


def inspect(data: bytes) -> tuple[tuple[int, int], bool]:
    """Decode all of an encoded image. Return ((width, height) of the upright image, True if it is animated)."""
    decode_upright(data, small=True)
    with _open(data) as image:
        return _size_of(image), image.format != "MPO" and bool(getattr(image, "is_animated", False))


def media_type(data: bytes) -> str:
    """Return the media type of an encoded image, such as image/png."""
    from PIL import Image

    with _open(data) as image:
        # Phones write JPEG files with a second picture, which Pillow calls MPO; other readers read them as JPEG.
        return Image.MIME["JPEG" if image.format == "MPO" else str(image.format)]


def _size_of(image: Image) -> tuple[int, int]:
    if image.format == "TIFF":
        image.load()  # turns the image; some versions of Pillow have the upright size before that too
    turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if turned else (image.width, image.height)


def _open(data: bytes) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=FORMATS)
