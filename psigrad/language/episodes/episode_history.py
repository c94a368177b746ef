"""A conversation as the policy reads it, turn by turn: what the chat template renders of its messages, as a server would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from psigrad.errors import UserError
from psigrad.language.data.chat.rendering import tools_of
from psigrad.language.data.chat.turns import Talk, turn_form
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import Reading, observation_ids, read_on, words_of
from psigrad.language.episodes.environments import Message, Observation
from psigrad.language.episodes.tools import CallForm


def as_messages(said: Observation) -> list[Message]:
    """Text is a turn of the user."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


@dataclass
class EpisodeHistory:
    """What the policy has read and written of a row's conversation.

    What it reads next is what the chat template renders of the messages. Tokens stay as they were sampled as long as that goes
    on from them, and a past that the template rewrites (Qwen3 drops what was thought) is read anew. So a turn is sampled in the
    context in which it would be trained as a demonstration. Where no template has words for what was said (a call that cannot be
    read, a prompt that is text), what was sampled stays, and what is heard is put behind it.
    """

    tokenizer: Any
    row: Row
    form: CallForm
    """How the policy writes calls of tools, which the template is given as calls."""
    messages: list[Message]
    known: str
    """All that was read and written, as text; empty where no template has words for it."""

    @classmethod
    def of(cls, tokenizer: Any, row: Row, form: CallForm) -> EpisodeHistory:
        """That of a row whose prompt has been read."""
        if not isinstance(row.prompt, list):
            return cls(tokenizer, row, form, [], "")
        return cls(tokenizer, row, form, list(row.prompt), Talk(tokenizer, row).prompt(row.prompt))

    def copy(self) -> EpisodeHistory:
        """One that goes on in its own way."""
        return replace(self, messages=list(self.messages))

    def say(self, before: int, ids: Sequence[int], text: str) -> None:
        """A turn of the policy, behind the token `before`."""
        if not self.known:
            return
        self.known += words_of(self.tokenizer, before, ids)
        begun = self.messages.pop()["content"] if self.messages[-1]["role"] == "assistant" else ""
        self.messages.append({"role": "assistant", "content": begun + text})

    def read(self, said: Observation) -> Reading:
        """What the policy reads if it hears this; its text is empty where no template has words for it."""
        if self.known and (turn := self._turn(said)) is not None:
            try:
                return read_on(self.tokenizer, self.row, [*self.messages[:-1], turn, *as_messages(said)], self.known)
            except UserError:  # a template need not be able to say what the policy says
                pass
        return Reading("", observation_ids(self.tokenizer, self.row, said), False)

    def hear(self, said: Observation, reading: Reading) -> None:
        """This is heard, of which the reading is what `read` gave."""
        self.known = reading.text
        if self.known and (turn := self._turn(said)) is not None:
            self.messages = [*self.messages[:-1], turn, *as_messages(said)]

    def _turn(self, said: Observation) -> Message | None:
        """The policy's turn as the template is given it, where this is said to it; None where a tool answers what is no call."""
        text, before = self.messages[-1]["content"], self.messages[-2]["role"] if len(self.messages) > 1 else "user"
        form = turn_form(Talk(self.tokenizer, self.row), before)
        if all(message["role"] != "tool" for message in as_messages(said)):
            return form.read_back(text)
        functions = [tool.get("function", tool) for tool in tools_of(self.row) or ()]
        parameters = {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}
        return self.form.turn(text, parameters, form)
