"""A cache of models in memory, with a queue. A model serves one request at a time, in order of arrival."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psigrad.errors import UserError
from psigrad.records.report.terminal import show_size
from psigrad_studio.checkpoint_list import Checkpoint
from psigrad_studio.security import Refused

if TYPE_CHECKING:
    from psigrad.language.models.language_model import LanguageModel

LONGEST_LINE = 8


@dataclass(eq=False)
class ModelTurn:
    """A place in the queue for some models. The caller must always call `leave` at the end."""

    models: frozenset[Checkpoint]
    _line: list[ModelTurn]
    _changed: threading.Condition = field(repr=False)

    def ahead(self, wait: float = 0.0) -> int:
        """Return the number of requests before this one in the queue for its models. First wait up to `wait` s for a change."""
        with self._changed:
            before = self._count()
            if before and wait:
                self._changed.wait_for(lambda: self._count() < before, wait)
            return self._count()

    def leave(self) -> None:
        """Release the place, so that the next request can proceed."""
        with self._changed:
            if self in self._line:
                self._line.remove(self)
            self._changed.notify_all()

    def _count(self) -> int:
        return sum(bool(other.models & self.models) for other in self._line[: self._line.index(self)])


class ModelCache:
    """A cache of at most `most_bytes` of weights. The least recently used model is freed first. Models in use are never freed."""

    def __init__(self, most_bytes: int, load: Callable[[Checkpoint], LanguageModel] = Checkpoint.open) -> None:
        self.most_bytes, self._load = most_bytes, load
        self._loaded: OrderedDict[Checkpoint, LanguageModel | None] = OrderedDict()
        self._line: list[ModelTurn] = []
        self._changed = threading.Condition()

    def join(self, wanted: Sequence[Checkpoint]) -> ModelTurn:
        """Return a place in the queue. Raises `Refused` if the queue is full."""
        with self._changed:
            if len(self._line) >= LONGEST_LINE:
                raise Refused(429, "busy", f"{LONGEST_LINE} answers are already in progress or waiting; try again in a moment.")
            turn = ModelTurn(frozenset(wanted), self._line, self._changed)
            self._line.append(turn)
            return turn

    def has(self, wanted: Checkpoint) -> bool:
        """Return True if the model is in memory."""
        with self._changed:
            return self._loaded.get(wanted) is not None

    def get(self, wanted: Checkpoint) -> LanguageModel:
        """Return the model, and load it if needed. Call this only when nobody is ahead in the queue.

        Raises `UserError` if the model does not fit in memory or cannot be loaded.
        """
        with self._changed:
            model = self._loaded.get(wanted)
            if model is not None:
                self._loaded.move_to_end(wanted)
                return model
            freed = self._make_room(wanted)
            self._loaded[wanted] = None  # reserve the memory while it loads
        if freed:
            gc.collect()  # modules refer to one another in cycles
        try:
            model = self._load(wanted)
        except BaseException:
            with self._changed:
                del self._loaded[wanted]
            raise
        with self._changed:
            self._loaded[wanted] = model
        return model

    def _make_room(self, wanted: Checkpoint) -> int:
        """Free unused models, the least recently used first, until `wanted` fits. Return the number of freed models."""
        if wanted.bytes > self.most_bytes:
            raise UserError(
                f"{wanted.name} has {show_size(wanted.bytes)} of weights, but the studio keeps at most "
                f"{show_size(self.most_bytes)} in memory; start it with a larger --model-memory (in GB)."
            )
        in_use, before = {model for turn in self._line for model in turn.models}, len(self._loaded)
        for old in list(self._loaded):
            if self._held() + wanted.bytes > self.most_bytes and old not in in_use:
                del self._loaded[old]
        if self._held() + wanted.bytes > self.most_bytes:
            raise UserError(
                f"There is not enough memory for {wanted.name} and the models in use; try again when those models have answered."
            )
        return before - len(self._loaded)

    def _held(self) -> int:
        return sum(model.bytes for model in self._loaded)
