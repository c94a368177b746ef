"""A conversation as the policy reads it, turn by turn: the chat template's rendering of its messages, as on a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from psigrad.errors import UserError
from psigrad.language.data.chat.rendering import tools_of
from psigrad.language.data.chat.turns import Conversation, turn_form
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import Reading, decode_after, next_reading, observation_ids
from psigrad.language.episodes.environments import Message, Observation
from psigrad.language.episodes.tools import CallForm


def as_messages(said: Observation) -> list[Message]:
    """Return the observation as messages. Text becomes a user turn."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


@dataclass
class EpisodeHistory:
    """The conversation of one episode, as the policy has read and written it.

    The policy's next input is the chat template's rendering of the messages. As long as the rendering starts with the text so
    far, the sampled tokens stay, and only the new text is appended. If the template rewrites the past (Qwen3 drops the thinking),
    the new rendering replaces the context. So a turn is sampled in the same context as a demonstration has in training. If the
    template cannot render the messages (an unreadable call, a text prompt), the observation is appended to the tokens so far.
    """

    tokenizer: Any
    row: Row
    form: CallForm
    """The syntax of the policy's tool calls. The template receives the parsed calls."""
    messages: list[Message]
    known: str
    """The text that the policy has read and written so far; empty if no template can render it."""

    @classmethod
    def of(cls, tokenizer: Any, row: Row, form: CallForm) -> EpisodeHistory:
        """Return the history of an episode that has only the row's prompt yet."""
        if not isinstance(row.prompt, list):
            return cls(tokenizer, row, form, [], "")
        return cls(tokenizer, row, form, list(row.prompt), Conversation(tokenizer, row).prompt(row.prompt))

    def copy(self) -> EpisodeHistory:
        """Return an independent copy."""
        return replace(self, messages=list(self.messages))

    def say(self, before: int, ids: Sequence[int], text: str) -> None:
        """Add a turn of the policy: its tokens `ids`, which follow the token `before`, and its `text`."""
        if not self.known:
            return
        self.known += decode_after(self.tokenizer, before, ids)
        begun = self.messages.pop()["content"] if self.messages[-1]["role"] == "assistant" else ""
        self.messages.append({"role": "assistant", "content": begun + text})

    def read(self, said: Observation) -> Reading:
        """Return the tokens of this observation, which the policy reads before its next turn, and the text of the conversation.

        The text is empty if no template can render the conversation. Nothing is added to the history.
        """
        if self.known and (turn := self._turn(said)) is not None:
            try:
                return next_reading(self.tokenizer, self.row, [*self.messages[:-1], turn, *as_messages(said)], self.known)
            except UserError:  # a template need not be able to render what the policy wrote
                pass
        return Reading("", observation_ids(self.tokenizer, self.row, said), False)

    def hear(self, said: Observation, reading: Reading) -> None:
        """Add an observation to the history. `reading` is what `read` returned for it."""
        self.known = reading.text
        if self.known and (turn := self._turn(said)) is not None:
            self.messages = [*self.messages[:-1], turn, *as_messages(said)]

    def _turn(self, said: Observation) -> Message | None:
        """Return the policy's last turn as the message that the template receives, with parsed calls if `said` answers calls.

        Return None if `said` answers calls, but the turn has no call or a malformed one.
        """
        text, before = self.messages[-1]["content"], self.messages[-2]["role"] if len(self.messages) > 1 else "user"
        form = turn_form(Conversation(self.tokenizer, self.row), before)
        if all(message["role"] != "tool" for message in as_messages(said)):
            return form.read_back(text)
        functions = [tool.get("function", tool) for tool in tools_of(self.row) or ()]
        parameters = {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}
        return self.form.turn(text, parameters, form)
