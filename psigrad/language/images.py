"""Images as text and as token ids: a mark in a message's content, and one id per image token that says which image it is of.

An image's mark is its SHA-256 between two object replacement characters (U+FFFC), so a prompt with images is a plain string. Each
of its tokens is an id of at least `FIRST`, made of 46 bits of the SHA-256 and of the token's place in the image. A prompt with
images is thus a plain list of ids too: caches, packing and resumed runs never take two images for one, and no id of the
vocabulary ever stands for an image. The embedding (`models/vision.py`) turns these ids into features.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from psigrad.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = re.compile("\ufffc([0-9a-f]{64})\ufffc")
FIRST = 1 << 62
"""The smallest id of an image token."""
_PLACES = 16


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
    """How a model family writes an image in its prompts; `see` attaches it to a tokenizer."""

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
    """Let prompts of this tokenizer contain images, or with None let them not."""
    setattr(tokenizer, _SIGHT, sight)


def sight_of(tokenizer: Any) -> Any:
    """Return the `Sight` of a tokenizer; None if its model reads text alone."""
    return getattr(tokenizer, _SIGHT, None)


_album: dict[str, Picture] = {}
_by_first: dict[int, str] = {}


def keep(picture: Picture) -> str:
    """Remember an image for this process, and return its mark. Images are known by content, so the same image is kept once."""
    _album.setdefault(picture.digest, picture)
    other = _by_first.setdefault(first_id(picture.digest), picture.digest)
    if other != picture.digest:
        raise UserError(
            f"The images {_album[other].path} and {picture.path} share 46 bits of their SHA-256; change a pixel of one."
        )
    return f"\ufffc{picture.digest}\ufffc"


def picture(digest: str) -> Picture:
    """Return a known image. Raises `UserError` for an unknown one."""
    if digest not in _album:
        raise UserError(f"The image {digest[:12]}… is not among the images of this run; read its rows first.")
    return _album[digest]


def first_id(digest: str) -> int:
    """Return the id of an image's first token."""
    return FIRST | int(digest[:12], 16) >> 2 << _PLACES


def split_id(token: int) -> tuple[Picture, int]:
    """Return the image of a token's id, and the token's place in it."""
    place = token & (1 << _PLACES) - 1
    known = _by_first.get(token - place)
    if known is None:
        raise UserError("A prompt has tokens of an image that is not among the images of this run; read its rows first.")
    return _album[known], place


def without_images(ids: Iterable[int], token_id: int) -> list[int]:
    """Return ids of the vocabulary alone, with `token_id` in place of image tokens: for text to read, and for other engines."""
    return [token_id if token >= FIRST else token for token in ids]


def written(text: str, sight: Sight | None) -> tuple[str, list[Picture]]:
    """Return a text with its marks written out for the tokenizer, and its images in order.

    Raises `UserError` if the model has no images, and if the text itself contains the family's placeholder.
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


def upright(data: bytes) -> Image:
    """Return the pixels of an encoded image in RGB: turned by its EXIF orientation, on white where it is transparent."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data)) as opened:
        found: Image.Image = ImageOps.exif_transpose(opened)
        if found.has_transparency_data:
            white = Image.new("RGBA", found.size, "white")
            found = Image.alpha_composite(white, found.convert("RGBA"))
        return found.convert("RGB")
