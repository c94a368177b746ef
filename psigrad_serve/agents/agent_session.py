"""One session of an agent on one row: the tokens of its requests and of the policy's answers, and the resulting trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.chat.dialect import specials_of
from psigrad.language.data.chat.messages import Message
from psigrad.language.data.chat.turns import Conversation
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode, encode_after, prompt_ids
from psigrad.language.rollout.types import Completion, SamplingParams, Trajectory
from psigrad_serve.agents.token_tree import Asked, Heard, TokenTree


class SessionOver(Exception):
    """An error for a request whose session has ended or has reached its limit of requests."""


@dataclass
class Session:
    """The requests of one agent on one row, all in one thread, and their answers. After the end, requests raise `SessionOver`."""

    index: int
    """The index of the row in its dataset."""
    k: int
    row: Row
    tree: TokenTree
    params: SamplingParams
    """The run's sampling settings. A request can only lower `max_tokens` and add stop tokens, since the run trains on them."""
    tokenizer: Any
    most: int
    """The maximum number of requests that are answered."""
    over: bool = False
    fault: str = ""
    answers: list[tuple[Row, Message, str]] = field(default_factory=list)
    """(request, answer as a message, the policy's text) in the order of the answers."""
    cut: bool = False
    """True if the length limit cut the last answer."""

    def read(self, request: Row, ids: tuple[int, ...]) -> tuple[Row, tuple[int, ...]]:
        """Return a request and its tokens, rendered with the row's chat template arguments unless the request has its own."""
        own, name = self.row.columns.get("chat_template_kwargs"), "chat_template_kwargs"
        if not own or name in request.columns or not isinstance(request.prompt, list):
            return request, ids
        request = replace(request, columns={**request.columns, name: own})
        return request, tuple(prompt_ids(self.tokenizer, request, strict=False))

    def ask(self, request: Row, ids: tuple[int, ...]) -> Asked:
        """Add a request with the tokens `ids` to the session. Return the tokens that the policy reads, and the answer's seed.

        Raises `SessionOver`.
        """
        if self.over:
            raise SessionOver("This session is over.")
        if len(self.tree.asked) >= self.most:
            self.fault = f"the agent sent the policy more than {self.most} requests (agent_calls)"
            raise SessionOver(f"This session has reached its limit of {self.most} answers (agent_calls).")
        return self.tree.ask(self._text(request, ids), partial(encode_after, self.tokenizer), lambda: ids)

    def _text(self, request: Row, ids: tuple[int, ...]) -> str:
        if isinstance(request.prompt, list):
            return Conversation(self.tokenizer, request).prompt(request.prompt)
        return request.prompt or self._words(ids)  # plain completions may be requested by tokens

    def _words(self, ids: tuple[int, ...]) -> str:
        return images.decode(self.tokenizer, ids, clean_up_tokenization_spaces=False)

    def answer(self, asked: Asked, request: Row, completion: Completion, reply: Message, whole: bool) -> None:
        """Record an answer: its tokens and the client's message `reply`. `whole` is False if `reply` lacks some of the text."""
        if not completion.ids or self.over:
            return
        text = decode(self.tokenizer, completion.ids)
        self.tree.answer(asked.number, self._heard(asked, request, completion, reply, whole), completion)
        self.answers.append((request, reply, text))
        self.cut = completion.finish_reason == "length"

    def _heard(self, asked: Asked, request: Row, completion: Completion, reply: Message, whole: bool) -> Heard:
        """Return the text with which a later request must begin to continue this one: the request and its answer, rendered."""
        prompt = self._text(request, asked.prompt_ids)
        if not isinstance(request.prompt, list):
            return Heard(prompt, prompt + self._words(completion.ids))
        conversation, messages = Conversation(self.tokenizer, request), request.prompt
        if not whole or messages[-1]["role"] == "assistant":
            return Heard(prompt)
        try:
            said = conversation.render([*messages, reply]).rstrip()
        except UserError:  # a template may be unable to write the policy's answer
            return Heard(prompt)
        ends = conversation.special.findall(conversation.closing(reply))
        end = ends[-1] if ends else ""
        return Heard(prompt, said.removesuffix(end), end, completion.ids[-1] in specials_of(self.tokenizer).ids)

    def trajectory(self, version: int) -> Trajectory:
        """Return the session's trajectory. After a fault, or without an answer, it has a reason and no reward."""
        flat = self.tree.flat()
        base = Trajectory(self.index, self.k, self.tree.prompt_ids, Completion((), (), (), "stop", self.tree.seed), version)
        if flat is None:
            return replace(base, reason=self.fault or "the agent sent the policy no request", turns=0, answer="")
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
        """Return the messages of the last request and its answer, from the policy's first turn on."""
        request, reply, _ = self.answers[-1]
        before = request.prompt if isinstance(request.prompt, list) else []
        first = next((i for i, message in enumerate(before) if message["role"] == "assistant"), len(before))
        return [*before[first:], reply]
