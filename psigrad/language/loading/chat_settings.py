"""What a run settles about a tokenizer before anything is rendered: its chat template, the template's arguments, EOS and date."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from psigrad.config import Model
from psigrad.errors import UserError, kind_of, nearest, reason_of
from psigrad.language.data.chat.arguments import check_arguments, templates_of
from psigrad.language.data.chat.rendering import settle
from psigrad.records.checkpoint import MANIFEST


def settle_chat(tokenizer: PreTrainedTokenizerBase, settings: Model, checkpoint: Path | None = None, network: Any = None) -> None:
    """Give the tokenizer the template and the EOS that the settings name, and the run's date: that of its start, which a
    `checkpoint` has. What a `network` has no embedding for is refused when it is first met.
    """
    if settings.eos_token:
        words = tokenizer.get_vocab()
        if settings.eos_token not in words:
            near = nearest(settings.eos_token, words) or "."
            raise UserError(f"eos_token {settings.eos_token!r} is no token of the model's tokenizer{near}")
        tokenizer.eos_token = settings.eos_token
    if settings.chat_template_path:
        tokenizer.chat_template = _read_template(settings.chat_template_path)
    began = _first_day(checkpoint) if checkpoint is not None else None
    rows = int(network.config.get_text_config().vocab_size) if network is not None else 0
    today = date.fromisoformat(began) if began else date.today()
    kwargs = template_kwargs(settings.chat_template_kwargs)
    check_arguments(templates_of(tokenizer), kwargs)
    settle(tokenizer, kwargs, today, rows)


def _first_day(checkpoint: Path) -> str | None:
    """The date that a checkpoint has, given as a whole or as a part of one: the folder of its reference or critic."""
    whole = next((folder for folder in (checkpoint, checkpoint.parent) if (folder / MANIFEST).exists()), None)
    day: str | None = None if whole is None else json.loads((whole / MANIFEST).read_text()).get("date")
    return day


def template_kwargs(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template, given as an object or as JSON text of one."""
    wanted = "give an object, as '{\"enable_thinking\": false}'"
    try:
        kwargs = json.loads(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise UserError(f"chat_template_kwargs {given!r} is no JSON ({error}); {wanted}.") from None
    if not isinstance(kwargs, Mapping):
        raise UserError(f"chat_template_kwargs is {kind_of(kwargs)}; {wanted}.")
    return dict(kwargs)


def _read_template(path: str) -> Any:
    """The template in a Jinja file, in a folder's chat_template.jinja, or of the tokenizer of a folder or hub model."""
    place = Path(path).expanduser()
    place = place / "chat_template.jinja" if (place / "chat_template.jinja").is_file() else place
    if place.is_file():
        return place.read_text(encoding="utf-8")
    if place.suffix == ".jinja":
        raise UserError(f"There is no file {path!r}; give chat_template_path a Jinja file, or a model whose template it is.")
    try:
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=False).chat_template
    except (OSError, ValueError) as error:
        raise UserError(
            f"chat_template_path {path!r} cannot be read ({reason_of(error)}); give a Jinja file or a model."
        ) from error
    if not found:
        raise UserError(f"The tokenizer of {path!r} has no chat template; give chat_template_path a Jinja file or another model.")
    return found
