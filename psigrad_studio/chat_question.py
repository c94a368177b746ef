"""A user's question to a model, and its prompt: a conversation if the model has a chat template, otherwise plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from psigrad.errors import UserError
from psigrad.language.data.chat.messages import Message
from psigrad.language.data.dataset_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "a probe of the template"


@dataclass(frozen=True)
class ChatQuestion:
    """A conversation that ends with a user's message, and the sampling settings of the answer. `max_tokens` is an upper bound."""

    messages: tuple[Message, ...]
    system: str = ""
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def row(self, tokenizer: PreTrainedTokenizerBase) -> Row:
        """Return the prompt for the model: the conversation, or, without a chat template, the last message as plain text."""
        talks, follows = abilities(tokenizer)
        if not talks:
            return Row("the prompt", prompt=str(self.messages[-1]["content"]))
        if self.system and not follows:
            raise UserError("This model's chat template does not support a system prompt; leave it empty.")
        first = [{"role": "system", "content": self.system}] if self.system else []
        return Row("the conversation", prompt=[*first, *(dict(message) for message in self.messages)])


def abilities(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Return (True if a tokenizer has a chat template, True if the template supports a system prompt).

    Raises `UserError` for a template that exceeds the limits of `chat.limits`.
    """
    from psigrad.language.data.chat.limits import TemplateLimit
    from psigrad.language.data.chat.rendering import render

    if not tokenizer.chat_template:
        return False, False
    talk: list[Message] = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}]
    try:
        return True, _PROBE in render(tokenizer, {"tools": None}, talk, generation_prompt=True)
    except TemplateLimit:
        raise
    except Exception:  # a template is a program and can raise anything
        return True, False
