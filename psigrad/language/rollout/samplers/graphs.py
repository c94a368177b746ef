"""Decoding steps that are recorded once and replayed: on a GPU a small model's step is hundreds of launches, each of which takes
longer than its kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.cache import Decode, KVCache

# What makes of a function without arguments its replay, and the tensor that each replay fills.
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def on_cuda(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A CUDA graph of `run`, which runs twice for it: what it allocates and chooses at first is not to be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


class Recorded:
    """The decoding steps of a model on a cache whose slots have all their room from the beginning.

    A recording has the shape that it was made with: of 1, 2, 4, … slots, of which the last may be empty. Those write keys and
    values where the next prompt will overwrite them, and nobody reads their logits.
    """

    def __init__(self, model: LanguageModel, cache: KVCache, record: Recorder = on_cuda) -> None:
        self.model, self.cache, self.record = model, cache, record
        self._steps: dict[int, tuple[Tensor, Tensor, Callable[[], None], Tensor]] = {}

    def logits(self, last: Tensor) -> Tensor:
        """[active, V] after one more token [active] in every active slot; overwritten by the next step."""
        active = self.cache.active
        size = min(1 << (active - 1).bit_length(), self.cache.slots)
        if size not in self._steps:
            self._steps[size] = self._recorded(size)
        tokens, places, replay, out = self._steps[size]
        tokens[:active, 0] = last
        places[:active] = self.cache.lengths
        places[active:] = 0
        replay()
        self.cache.lengths = self.cache.lengths + 1
        return out[:active]

    def _recorded(self, size: int) -> tuple[Tensor, Tensor, Callable[[], None], Tensor]:
        # in the slots that are at work the recording writes where this very step will
        tokens = torch.zeros(size, 1, dtype=torch.long, device=self.model.device)
        places = torch.zeros(size, dtype=torch.long, device=self.model.device)
        places[: self.cache.active] = self.cache.lengths

        def run() -> Tensor:
            step = Decode.at(self.cache, places)
            return self.model.head(self.model.forward(tokens, places[:, None], step)[:, 0])

        return tokens, places, *self.record(run)
