"""Environments, tools and agents that draw pictures, apart from everything heavy: the workers that run them import this file."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image


def draw(colour: Any = "red", size: tuple[int, int] = (16, 8), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


class Gallery:
    """Answers a turn with a picture as wide as the number of the turn, in one of the forms of an observation."""

    def reset(self, row: Any) -> Any:
        self.turn = 0
        return None

    def step(self, completion: str) -> tuple[Any, float, bool]:
        self.turn += 1
        picture = draw("red", (8 * self.turn, 8))
        said = {"type": "text", "text": "next"}
        forms = [picture, [said, picture], [{"role": "user", "content": [{"type": "image", "image": picture}, said]}]]
        return forms[self.turn - 1] if self.turn <= 3 else "", 1.0, self.turn == 4


def look(width: int) -> Any:
    """Look around.

    Args:
        width: How far to look.
    """
    return ["seen:", draw("blue", (width, 8))] if width else "nothing"


class Painter:
    """Opens with a picture, and answers a turn with one whose colour depends on what was said; for two turns."""

    def reset(self, row: Any) -> Any:
        self.turn = 0
        return draw("yellow", (20, 12))

    def step(self, completion: str) -> tuple[Any, float, bool]:
        self.turn += 1
        drawn = draw((sum(map(ord, completion)) % 256, 40 * self.turn, 9), (12 + 8 * self.turn, 20))
        return ["you painted ", drawn], sum(c in "abcdefgh \n" for c in completion) / 8, self.turn == 3


def drawing_agent(row, client):
    """Sends the row as it is, and then a picture of what was said."""
    messages = list(row["prompt"])
    for turn in range(2):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        data = base64.b64encode(encoded(draw((sum(map(ord, said)) % 256, 9, turn), (20, 12)))).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [part, {"type": "text", "text": "on"}]}]
    return sum(c in "abcdefgh \n" for c in said) / 8
