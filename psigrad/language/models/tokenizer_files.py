"""Tokenizers of folders and hub models. Their files are untrusted, so they are checked before they are read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from psigrad.language.models.towers import file_of

MOST_ADDED = 100_000
"""The maximum number of added tokens of a tokenizer. The tokenizers library's time grows with the square of this number."""
MOST_GROWTH = 1024
"""The maximum number of characters into which a normaliser or decoder may turn one character, and of items in a template."""


def read_tokenizer(path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub model. It accepts images in prompts if the model's type is in `vision.FAMILIES`.

    Raises `ValueError` if the tokenizer is missing, empty or rejected by `check_tokenizer`.
    """
    from transformers import AutoTokenizer

    check_tokenizer(os.fspath(path))
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    # For Qwen, Gemma and GPT-2, transformers creates an empty tokenizer if the files are missing.
    if not set(found.get_vocab()) - set(found.all_special_tokens):
        raise ValueError(
            "the model has no tokenizer; save one in its folder with tokenizer.save_pretrained, or copy its base model's files"
        )
    from psigrad.language.models.vision import attach  # imported here, since few models have images

    attach(found, os.fspath(path))
    return found


def check_tokenizer(path: str) -> None:
    """Raise `ValueError` if the tokenizer at `path` could lengthen a text too much, or would take minutes to load."""
    added = 0
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
        if (file := file_of(path, name)) is None:
            continue
        held = json.loads(file.read_bytes())
        if not isinstance(held, dict):
            raise ValueError(f"its {name} is not a JSON object")
        named = held if name == "added_tokens.json" else held.get("added_tokens") or held.get("added_tokens_decoder") or ()
        added = max(added, len(named), len(held.get("additional_special_tokens") or ()))
        for kind in ("normalizer", "decoder", "post_processor"):
            if (growth := _growth(held.get(kind))) > MOST_GROWTH:
                raise ValueError(f"the {kind} of its tokenizer can make a text {growth:.3g} times as long; use another tokenizer")
    if added > MOST_ADDED:
        raise ValueError(
            f"its tokenizer has {added:,} added tokens, more than {MOST_ADDED:,}; move them into its ordinary vocabulary"
        )


def _growth(part: Any) -> float:
    """Return the factor by which `part` of tokenizer.json can lengthen a text; for a template, the number of its items."""
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "TemplateProcessing":
        return float(max(len(part.get("single", ())), len(part.get("pair", ()))))
    pattern = part.get("pattern")
    matched = len(pattern.get("String", "")) if isinstance(pattern, dict) else 1
    texts = [text for name in ("content", "prepend", "prefix", "replacement") if isinstance(text := part.get(name), str)]
    return math.prod((max(1.0, len(text) / max(1, matched)) for text in texts), start=math.prod(map(_growth, _inner(part))))


def _inner(part: dict[str, Any]) -> Iterator[Any]:
    for name in ("normalizers", "decoders", "processors"):
        yield from part.get(name) or ()
