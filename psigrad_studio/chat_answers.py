"""The generation of chat answers: one answer, or two token by token in turn, so that speed does not reveal the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from psigrad import seeds
from psigrad.config import Sampling
from psigrad.errors import UserError
from psigrad.language.data.chat.messages import Message
from psigrad.language.data.templates import decode, prompt_ids
from psigrad_studio.chat_question import ChatQuestion
from psigrad_studio.checkpoint_list import Checkpoint
from psigrad_studio.model_cache import ModelCache, ModelTurn

if TYPE_CHECKING:
    from psigrad.language.models.language_model import LanguageModel

Say = Callable[[Mapping[str, Any]], None]
Reason = Literal["stop", "length", "stopped"]
_UNFINISHED = "\ufffd"


@dataclass
class ChatAnswer:
    """The answer of one model."""

    checkpoint: Checkpoint
    prompt: str | list[Message] = ""
    seed: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: Reason | None = None
    """The reason why the answer ended; None while it is generated."""


def converse(
    models: ModelCache,
    turn: ModelTurn,
    question: ChatQuestion,
    answers: Sequence[ChatAnswer],
    sides: Sequence[int],
    stop: threading.Event,
    say: Say,
) -> None:
    """Wait for the models, load the missing ones, generate the answers, and report events through `say`.

    At the end, `turn`, the place in the queue for the models, is always released. `sides[i]` is the side of the page that shows
    answer i. Events name sides and never models. Errors are reported as events too.
    """
    try:
        before = 0
        while not stop.is_set() and (ahead := turn.ahead(wait=1.0 if before else 0.0)):
            if ahead != before:
                say({"event": "waiting", "ahead": ahead})
            before = ahead
        if not all(models.has(answer.checkpoint) for answer in answers):
            say({"event": "loading"})
        loaded = [] if stop.is_set() else [models.get(answer.checkpoint) for answer in answers]
        # With one seed, an answer is the same alone and next to another model's. If a model is compared with itself, the second
        # answer gets another seed.
        again = [answer.checkpoint == answers[0].checkpoint and i > 0 for i, answer in enumerate(answers)]
        writers = [_Writer(*each) for each in zip(loaded, [question] * len(loaded), answers, again, strict=False)]
        say({"event": "writing"})
        _write(writers, sides, stop, say)
        # Report in the order of the sides, because the order of the models would reveal which is which.
        for side, answer in sorted(zip(sides, answers, strict=True), key=lambda pair: pair[0]):
            answer.reason = answer.reason or "stopped"
            said = {"reason": answer.reason, "tokens": len(answer.ids), "text": answer.text}
            say({"event": "written", "side": side, **said, "seed": question.seed})
    except UserError as error:
        say({"event": "failed", "message": str(error)})
    finally:
        turn.leave()


def _write(writers: Sequence[_Writer], sides: Sequence[int], stop: threading.Event, say: Say) -> None:
    """Generate one token of each answer in turn. The left answer always comes first, so the order reveals no model."""
    order = sorted(range(len(writers)), key=lambda i: sides[i])
    try:
        while not stop.is_set() and any(writers[i].answer.reason is None for i in order):
            for i in order:
                if writers[i].answer.reason is None and (text := writers[i].step()):
                    say({"event": "text", "side": sides[i], "text": text})
    finally:
        for writer in writers:
            writer.engine.close()


class _Writer:
    """The state of an answer that is being generated.

    Text is sent only when it is final: the first bytes of a multi-byte character wait for the others.
    """

    def __init__(self, model: LanguageModel, question: ChatQuestion, answer: ChatAnswer, again: bool) -> None:
        from psigrad.language.loading.samplers import make as sampler_for
        from psigrad.language.loading.samplers import sampling_params
        from psigrad_serve.engine.engine import SamplingEngine

        row = question.row(model.tokenizer)
        ids = tuple(prompt_ids(model.tokenizer, row))
        room = model.max_length - len(ids)
        if room < 1:
            raise UserError(
                f"The conversation has {len(ids)} tokens but this model takes at most {model.max_length}; start a new "
                "conversation, or shorten the message."
            )
        wanted = Sampling(max_completion_length=min(question.max_tokens, room), top_p=question.top_p)
        params = sampling_params(wanted, model, [row], question.temperature)
        self.model, self.answer, self.most = model, answer, params.max_tokens
        self.stops = {*model.eos_token_ids, *params.stop_token_ids}
        answer.prompt, answer.seed = row.prompt or "", seeds.derive(question.seed, "chat", int(again))
        self.engine = SamplingEngine(model, 1, sampler_for(wanted, model))
        self.stream = self.engine.submit(ids, params, answer.seed)
        self.tokens = iter(self.stream)

    def step(self) -> str:
        """Draw a token, and return the text that became final."""
        token, answer = next(self.tokens).id, self.answer
        answer.ids.append(token)
        if token in self.stops or len(answer.ids) == self.most:
            answer.reason = "stop" if token in self.stops else "length"
        text = decode(self.model.tokenizer, answer.ids)
        if answer.reason is None:
            text = text.rstrip(_UNFINISHED)
        new = text[len(answer.text) :] if text.startswith(answer.text) else ""
        answer.text = text if new or answer.reason else answer.text
        return new
