"""One session of an agent on one row: how its requests read for the policy, and the trajectory that becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from psigrad.errors import UserError
from psigrad.language.data.chat.dialect import specials_of
from psigrad.language.data.chat.messages import Message
from psigrad.language.data.chat.turns import Talk
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode, encode_after, prompt_ids
from psigrad.language.rollout.types import Completion, SamplingParams, Trajectory
from psigrad_serve.agents.token_tree import Asked, Heard, TokenTree


class SessionOver(Exception):
    """A request is not answered any more: its session has ended, or has had all the requests that one may have."""


@dataclass
class Session:
    """What one agent asks on one row. Requests come in one thread, and none when the session is `over`."""

    index: int
    """Of the row in its dataset."""
    k: int
    row: Row
    tree: TokenTree
    params: SamplingParams
    """The run's: of a request only `max_tokens` is heard, since what is trained is this one distribution."""
    tokenizer: Any
    most: int
    """Requests that are answered."""
    over: bool = False
    fault: str = ""
    answers: list[tuple[Row, Message, str]] = field(default_factory=list)
    """(request, answer as a message, the policy's text) in the order of the answers."""
    cut: bool = False
    """Whether the length limit cut the last answer."""

    def read(self, request: Row, ids: tuple[int, ...]) -> tuple[Row, tuple[int, ...]]:
        """A request and its tokens as the row's own arguments of the chat template have them, where it has none."""
        own, name = self.row.columns.get("chat_template_kwargs"), "chat_template_kwargs"
        if not own or name in request.columns or not isinstance(request.prompt, list):
            return request, ids
        request = replace(request, columns={**request.columns, name: own})
        return request, tuple(prompt_ids(self.tokenizer, request))

    def ask(self, request: Row, ids: tuple[int, ...]) -> Asked:
        """A request, whose own tokens are `ids`, as the policy reads it, and the seed of its answer. Raises `SessionOver`."""
        if self.over:
            raise SessionOver("This session is over.")
        if len(self.tree.asked) >= self.most:
            self.fault = f"the agent asked the policy more than {self.most} times (agent_calls)"
            raise SessionOver(f"This session has had its {self.most} answers (agent_calls).")
        return self.tree.ask(self._text(request, ids), partial(encode_after, self.tokenizer), lambda: ids)

    def _text(self, request: Row, ids: tuple[int, ...]) -> str:
        if isinstance(request.prompt, list):
            return Talk(self.tokenizer, request).prompt(request.prompt)
        return request.prompt or self._words(ids)  # plain completions may be asked for by tokens

    def _words(self, ids: tuple[int, ...]) -> str:
        text: Any = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return str(text)

    def answer(self, asked: Asked, request: Row, completion: Completion, reply: Message, whole: bool) -> None:
        """Enter an answer as its client gets it; `whole` is False where a stop string cut something off its text."""
        if not completion.ids or self.over:
            return
        text = decode(self.tokenizer, completion.ids)
        self.tree.answer(asked.number, self._heard(asked, request, completion, reply, whole), completion)
        self.answers.append((request, reply, text))
        self.cut = completion.finish_reason == "length"

    def _heard(self, asked: Asked, request: Row, completion: Completion, reply: Message, whole: bool) -> Heard:
        """How a longer request begins that goes on from this one: as the chat template writes the answer that was given."""
        prompt = self._text(request, asked.prompt_ids)
        if not isinstance(request.prompt, list):
            return Heard(prompt, prompt + self._words(completion.ids))
        talk, messages = Talk(self.tokenizer, request), request.prompt
        if not whole or messages[-1]["role"] == "assistant":
            return Heard(prompt)
        try:
            said = talk.render([*messages, reply]).rstrip()
        except UserError:  # a template need not be able to say what the policy says
            return Heard(prompt)
        ends = talk.special.findall(talk.closing(reply))
        end = ends[-1] if ends else ""
        return Heard(prompt, said.removesuffix(end), end, completion.ids[-1] in specials_of(self.tokenizer).ids)

    def trajectory(self, version: int) -> Trajectory:
        """All of it. One that has a fault, or in which nothing was asked, is never scored."""
        flat = self.tree.flat()
        base = Trajectory(self.index, self.k, self.tree.prompt_ids, Completion((), (), (), "stop", self.tree.seed), version)
        if flat is None:
            return replace(base, reason=self.fault or "the agent asked the policy nothing", turns=0, answer="")
        completion = Completion(
            ids=tuple(flat.ids),
            logprobs=tuple(flat.logprobs),
            sampling_logprobs=tuple(flat.sampling_logprobs),
            finish_reason="length" if self.cut else "stop",
            seed=self.tree.seed,
        )
        return replace(
            base,
            prompt_ids=flat.prompt_ids,
            completion=completion,
            text=decode(self.tokenizer, flat.ids),
            reason=self.fault,
            mask=tuple(flat.mask),
            turns=len(self.answers),
            messages=() if isinstance(self.row.dataset_prompt, str) else tuple(self._conversation()),
            policy_turns=tuple(decode(self.tokenizer, completion.ids) for completion in self.tree.completions()),
            branches=tuple(flat.branches),
            answer=self.answers[-1][2],
        )

    def _conversation(self) -> Sequence[Message]:
        """The conversation of the last answer, from the policy's first turn in it on."""
        request, reply, _ = self.answers[-1]
        before = request.prompt if isinstance(request.prompt, list) else []
        first = next((i for i, message in enumerate(before) if message["role"] == "assistant"), len(before))
        return [*before[first:], reply]
