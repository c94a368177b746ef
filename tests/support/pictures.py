"""Pictures drawn on the spot, and a tokenizer that reads them as Idefics 3 does: the image's tokens between wrapping tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vision_models import template

from psigrad.language import images
from psigrad.language.models import tiny
from psigrad.language.models.tiny import EDGE, IMAGE, WHOLE
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler

PARTS_CHATML = template(IMAGE)


@dataclass(frozen=True)
class Wrapped:
    """One feature for each started 8 pixels of width, in the order of Idefics 3's tokens."""

    token_id: int
    placeholder: str = IMAGE
    version: str = "1"

    def expand(self, picture: images.Picture) -> str:
        return EDGE + WHOLE + IMAGE * self.count(picture) + EDGE

    def count(self, picture: images.Picture) -> int:
        return -(-picture.width // 8)


def tokenizer(chat_template: str = PARTS_CHATML, image_format: bool = True) -> Any:
    made = tiny.tokenizer(["how many red squares are there user assistant system tool\n"] * 3, 300)
    made.add_special_tokens({"additional_special_tokens": [EDGE, WHOLE, IMAGE]})
    made.chat_template = chat_template
    if image_format:
        images.attach_image_format(made, Wrapped(made.convert_tokens_to_ids(IMAGE)))
    return made


class Brief(EmbeddedSampler):
    """Ends a turn at every second token of the vocabulary: a random model hardly ever draws the end of a turn."""

    def __init__(self, model: Any, settings: Any = None) -> None:
        super().__init__(model, 8)

    def steps(self, requests: Any, params: Any, cache: Any = None) -> Any:
        return super().steps(requests, replace(params, stop_token_ids=tuple(range(0, 290, 2))), cache)

    def dialogue(self, prompts: Any, params: Any) -> Any:
        return super().dialogue(prompts, replace(params, stop_token_ids=tuple(range(0, 290, 2))))
