"""Images of requests, which are data URLs in content parts. They become marks in the text (`language.images`)."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from psigrad.language import images
from psigrad.language.data import image_rows
from psigrad.language.data.dataset_rows import Row
from psigrad_serve.api_errors import ApiError
from psigrad_serve.engine.engine import SamplingEngine

MOST_PIXELS = 4 * images.MOST_PIXELS
"""The maximum number of pixels of all images of a request together."""
KEPT_BYTES = 1 << 30
"""The maximum number of bytes of cached images. Beyond this, images that no running request has are dropped, the oldest first."""


class HeldImages:
    """The images of a request that is being read. They are kept while this object lives."""

    def __init__(self) -> None:
        self.digests: list[str] = []


class Pictures:
    """The cache of images of a server's requests. One is decoded at a time, so that their memory does not add up."""

    def __init__(self, engine: SamplingEngine) -> None:
        self.engine, self.image_format = engine, images.image_format_of(engine.model.tokenizer)
        self._decoding, self._lock = threading.Lock(), threading.Lock()
        self._own: dict[str, int] = {}
        """Digest -> bytes of each image that this server has added to the cache, the oldest first."""
        self._used: Counter[str] = Counter()
        """The number of rows, and of requests that are being read, with an image."""
        self._released: deque[Sequence[str]] = deque()
        """Images of rows that are gone. They are counted later, since a finalizer may run while a thread has the lock."""

    @property
    def refusal(self) -> str:
        """The end of an error sentence that says why this server reads no images; empty if it reads them."""
        if self.image_format is None:
            return "an image, but this model reads only text; remove it, or serve a vision-language model (Qwen 3.5: --vision)"
        return "" if self.engine.steers else "an image, but this server's sampler reads only text; serve with --sampler embedded"

    def marked(self, messages: Sequence[Any], rest: Mapping[str, Any]) -> tuple[list[Any], HeldImages]:
        """Return messages in OpenAI's format with marks for images, and an object that keeps the images until a row does.

        A part can have the key "at": its place in the request's body, for error messages.

        Raises `ApiError` for an image that cannot be read, for images beyond the limits, and for a mark in a text of the messages
        or of the `rest` of the request, which would let a client read another client's image.
        """
        refuse_marks({"messages": messages, **rest})
        made, left, held = list(messages), [MOST_PIXELS, self.engine.model.max_length], HeldImages()
        weakref.finalize(held, self._released.append, held.digests)
        for i, message in enumerate(made):
            content = message.get("content")
            if not isinstance(content, list) or not any(map(image_rows.is_image, content)):
                continue
            if message.get("role") == "assistant":
                where = f"messages[{i}].content"
                raise ApiError(f"{where} has an image in the assistant's turn; this model writes only text.", param=where)
            made[i] = {
                **message,
                "content": [self._part(part, f"messages[{i}].content[{k}]", left, held) for k, part in enumerate(content)],
            }
        return made, held

    def _part(self, part: Any, place: str, left: list[int], held: HeldImages) -> Any:
        if not image_rows.is_image(part):
            return part
        place, given = str(part.get("at", place)), image_rows.source_of(part)
        if self.refusal:
            raise ApiError(f"{place} is {self.refusal}.", param=place)
        if not isinstance(given, str) or not given.startswith("data:"):
            what = f"the URL {given[:60]}" if isinstance(given, str) else "no URL"
            why = f"{place} is an image with {what}, and this server downloads nothing; send a data URL, data:image/png;base64,…"
            raise ApiError(f"{why}.", param=place, code="invalid_image_url")
        with self._decoding:
            try:
                picture, _ = image_rows.read(given, Path())
            except ValueError as error:
                raise ApiError(f"{place} {error}.", param=place, code="invalid_image") from None
        left[0] -= picture.width * picture.height
        left[1] -= self.image_format.count(picture)
        if left[0] < 0:
            why = f"The request's images have more than {MOST_PIXELS:,} pixels; send smaller ones, or fewer."
            raise ApiError(why, param=place, code="image_too_large")
        if left[1] < 0:
            most = self.engine.model.max_length
            why = f"The request's images have more tokens than this model's {most} positions; send smaller ones, or fewer."
            raise ApiError(why, param=place, code="context_length_exceeded")
        with self._lock:
            if picture.digest in self._own or not images.is_registered(picture.digest):
                self._own[picture.digest] = self._own.pop(picture.digest, len(picture.data or b""))
            held.digests.append(picture.digest)
            self._used[picture.digest] += 1
            return {"type": "text", "text": images.register(picture)}

    def shown_ids(self, ids: Sequence[int]) -> list[int]:
        """Return a prompt's tokens with the vocabulary's placeholder in place of image tokens, as clients expect them."""
        return list(ids) if self.image_format is None else images.replace_image_ids(ids, self.image_format.token_id)

    def hold(self, row: Row) -> None:
        """Keep a request's images in the cache as long as its `row` exists."""
        if digests := image_rows.digests_of(row):
            with self._lock:  # requests are read in threads
                self._used.update(digests)
                weakref.finalize(row, self._released.append, digests)
                self._drop()

    def _drop(self) -> None:
        while self._released:
            self._used.subtract(self._released.popleft())
        held = sum(self._own.values())
        for digest, size in list(self._own.items()):
            if held <= KEPT_BYTES:
                break
            if self._used[digest] <= 0:
                held -= self._own.pop(digest, size)
                del self._used[digest]
                images.unregister(digest)


def refuse_marks(texts: Mapping[str, Any]) -> None:
    """Raise `ApiError` if one of a request's texts contains the mark of an image."""

    def fail(place: str, reason: str) -> NoReturn:
        raise ApiError(f"{place} {reason}.", param=place)

    image_rows.refuse_marks(texts, fail, "")
