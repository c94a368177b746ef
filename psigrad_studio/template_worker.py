"""A separate process for chat templates and tokenizers.

They come with a model, and a template is a program. The process has time and memory limits and is killed if it exceeds them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from psigrad.errors import UserError
from psigrad.processes.workers.child import Service, text_of
from psigrad.processes.workers.worker_pool import Lost, WorkerPool
from psigrad_studio.chat_question import ChatQuestion, abilities

if TYPE_CHECKING:
    from psigrad_studio.checkpoint_list import Checkpoint

SECONDS, MEMORY_GB = 20.0, 2.0
_REMEMBERED = 1000


class TemplateWorker:
    """A worker that answers one question at a time. After its template was killed once, a model is refused."""

    def __init__(self, seconds: float = SECONDS, memory_gb: float = MEMORY_GB) -> None:
        self._limits: dict[str, Any] = {"timeout": seconds, "memory_gb": memory_gb}
        self._lock = threading.Lock()
        self._pool: WorkerPool[Any] | None = None
        self._known: dict[tuple[Checkpoint, bool], dict[str, Any]] = {}

    def abilities(self, checkpoint: Checkpoint) -> tuple[bool, bool]:
        """Return `chat_question.abilities` of a model's tokenizer. Raises `UserError` if it cannot be loaded or exceeds the
        limits.
        """
        talks, follows = self._ask(checkpoint, None)
        return talks, follows

    def prompt(self, checkpoint: Checkpoint, question: ChatQuestion) -> tuple[Any, list[int]]:
        """Return the prompt of a question, and its tokens. Raises `UserError` as `abilities` does."""
        prompt, ids = self._ask(checkpoint, question)
        return prompt, ids

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
            self._pool = None

    def _ask(self, checkpoint: Checkpoint, question: ChatQuestion | None) -> Any:
        about = question is None
        if (known := self._known.get((checkpoint, about))) is None:
            with self._lock:
                known = self._answer(checkpoint, question)
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                if "killed" in known:
                    self._known |= {(checkpoint, True): known, (checkpoint, False): known}
                elif about and "answer" in known:
                    self._known[checkpoint, True] = known
        if "refused" in known:
            raise UserError(known["refused"])
        return known["answer"]

    def _answer(self, checkpoint: Checkpoint, question: ChatQuestion | None) -> dict[str, Any]:
        if self._pool is None:
            code, what = f"{__name__}:service", "chat templates"
            self._pool = WorkerPool[Any](code, None, {}, lambda call, content: dict(content), what=what, **self._limits)
        pool = self._pool
        while not (free := pool.idle()):
            list(pool.answers(wait=True))  # wait until the worker has loaded
        pool.ask(free[0], (checkpoint, question), [checkpoint])
        while True:
            for _, _, answer in pool.answers(wait=True):
                if not isinstance(answer, Lost):
                    return dict(answer)
                most = f"{self._limits['timeout']:g} s or {self._limits['memory_gb']:g} GB"
                why = f"The chat template of {checkpoint.name} takes more than {most}; choose another model."
                return {"killed": True, "refused": why}


@lru_cache(maxsize=1)
def shared() -> TemplateWorker:
    """Return the process that all of a studio's models share."""
    return TemplateWorker()


def service(payload: None) -> Service:
    """Return the service that runs in the worker."""
    from transformers import AutoTokenizer  # noqa: F401  # seconds, that no question is to be charged for

    from psigrad.language.data.templates import prompt_ids

    tokenizer_of = lru_cache(maxsize=2)(lambda checkpoint: checkpoint.tokenizer())

    def answer(asked: tuple[Checkpoint, ChatQuestion | None]) -> Iterator[dict[str, Any]]:
        checkpoint, question = asked
        try:
            tokenizer = tokenizer_of(checkpoint)
            if question is None:
                yield {"answer": abilities(tokenizer)}
                return
            row = question.row(tokenizer)
            yield {"answer": [row.prompt, prompt_ids(tokenizer, row)]}
        except UserError as error:
            yield {"refused": str(error)}
        except Exception as error:  # a template is a program and can raise anything
            yield {"refused": f"The chat template of {checkpoint.name} raised {text_of(error)}; choose another model."}

    return answer
