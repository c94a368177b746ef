"""A game for small vision-language models: count the squares of a colour in a picture, then find one in a second picture."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

Row = dict[str, Any]
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
CELLS, PIXELS = 3, 8
PLACES = [f"{column}{row + 1}" for row in range(CELLS) for column in "abc"]
MOST = 3
"""The maximum number of squares of the colour in question."""


@dataclass(frozen=True)
class Board:
    """A picture of `CELLS` × `CELLS` cells, each `PIXELS` pixels wide, with the colours of some cells."""

    colours: dict[str, str]

    def draw(self) -> Image.Image:
        """Return the picture, with white lines between the cells."""
        picture = Image.new("RGB", (CELLS * PIXELS,) * 2, "white")
        for place, colour in self.colours.items():
            row, column = divmod(PLACES.index(place), CELLS)
            corner = (column * PIXELS + 1, row * PIXELS + 1, (column + 1) * PIXELS - 1, (row + 1) * PIXELS - 1)
            picture.paste(COLOURS[colour], corner)
        return picture


def boards(seed: int) -> tuple[str, Board, Board]:
    """Return (a colour, a board with 0 to `MOST` squares of it, a board with exactly one)."""
    rng = random.Random(seed)
    colour = rng.choice(list(COLOURS))
    others = [name for name in COLOURS if name != colour]

    def board(count: int) -> Board:
        places = rng.sample(PLACES, count + rng.randint(1, 4))
        return Board({place: colour if i < count else rng.choice(others) for i, place in enumerate(places)})

    return colour, board(rng.randint(0, MOST)), board(1)


@dataclass
class Squares:
    """An environment with two questions: how many squares of a colour a board has, and where the one on a second board is.

    Each right answer has the reward 0.5.
    """

    where: str = ""
    count: str = ""
    second: Board = field(default_factory=lambda: Board({}))
    asked: int = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """Start a game with the row's boards."""
        colour, first, self.second = boards(int(row["seed"]))
        self.asked, self.count = 0, str(list(first.colours.values()).count(colour))
        self.where = next(place for place, own in self.second.colours.items() if own == colour)

    def step(self, completion: str) -> tuple[Any, float, bool]:
        """Judge an answer. After the first one, show the second board and ask where the square is."""
        self.asked += 1
        right = completion.strip() == (self.count if self.asked == 1 else self.where)
        if self.asked == 2:
            return "", 0.5 * right, True
        return [{"type": "image", "image": self.second.draw()}, {"type": "text", "text": "Where?"}], 0.5 * right, False


def rows(folder: Path, count: int, first_seed: int) -> list[Row]:
    """Draw the first boards in `folder`, and return rows that ask for the count. Game i has the seed `first_seed` + i."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for seed in range(first_seed, first_seed + count):
        colour, first, _ = boards(seed)
        first.draw().save(folder / f"{seed}.png")
        parts = [{"type": "image"}, {"type": "text", "text": f"How many {colour}?"}]
        images = [str(folder / f"{seed}.png")]
        made.append({"prompt": [{"role": "user", "content": parts}], "images": images, "seed": seed})
    return made


def demonstrations(given: list[Row], folder: Path, wrong_share: float, seed: int) -> list[Row]:
    """Return demonstrations of the game. A share `wrong_share` of the counts is wrong by one, and of the places by one cell.

    A wrong place is a random neighbouring cell, so the right one is the most frequent even if half of the places are wrong.
    """
    rng, made = random.Random(seed), []
    for row in given:
        game = Squares()
        game.reset(row)
        place, count = PLACES.index(game.where), int(game.count)
        if rng.random() < wrong_share:
            count += 1 if count == 0 or rng.random() < 0.5 else -1
        if rng.random() < wrong_share:
            place = rng.choice([other for other in range(CELLS**2) if _distance(place, other) == 1])
        file = folder / f"{row['seed']}-second.png"
        game.second.draw().save(file)
        talk = [
            *row["prompt"],
            _said(str(count)),
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where?"}]},
        ]
        made.append({"messages": [*talk, _said(PLACES[place])], "images": [*row["images"], str(file)]})
    return made


def _distance(place: int, other: int) -> int:
    """Return the number of steps from one cell to another, along rows and columns."""
    return sum(abs(a - b) for a, b in zip(divmod(place, CELLS), divmod(other, CELLS), strict=True))


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
