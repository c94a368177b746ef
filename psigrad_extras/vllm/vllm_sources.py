"""The sources of an engine's weights, and how they are sent: the model beside the engine, or a trainer elsewhere.

A model beside the engine sends buckets as handles to GPU memory, or as files. A trainer elsewhere broadcasts to the engine's
processes. Weights that came through Ray's object store are sent as files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psigrad.errors import UserError
from psigrad.language.models.language_model import LanguageModel
from psigrad_extras.vllm import vllm_weights
from psigrad_extras.vllm.broadcast import Contents, unpack

Known = dict[str, tuple[tuple[int, ...], int]]
"""The shape and bit sum of each weight that an engine last received."""
Say = Callable[..., None]


class Source(ABC):
    """A source of an engine's weights; `own` is True for those of the model beside it."""

    own = True

    @abstractmethod
    def mark(self) -> object:
        """Return a value that changes when the weights do."""

    @abstractmethod
    def send(self, say: Say, known: Known, readback: bool, version: int) -> Known:
        """Send all weights in buckets as number `version`, and compare what the engine then computes with."""


class ModelWeights(Source):
    """The weights of a model beside the engine. If the engine is on the GPUs `at` of this machine, they stay in GPU memory."""

    def __init__(self, model: LanguageModel, at: Sequence[torch.device]) -> None:
        self._model, self._at = model, at

    def mark(self) -> object:
        """See `vllm_weights.fingerprint`."""
        return vllm_weights.fingerprint(self._model)

    def send(self, say: Say, known: Known, readback: bool, version: int) -> Known:
        """See `Source`. Weights in GPU memory are gathered again for the comparison."""
        turned = vllm_weights.transposed(self._model.network)
        weights = lambda: vllm_weights.outgoing(self._model)  # noqa: E731
        if not self._at:
            return send_files(weights, vllm_weights.size_of(self._model), turned, say, known, readback, version)
        found: Known = {}
        say("start")
        for bucket in vllm_weights.in_buckets(weights()):
            found |= _looked_at(bucket)
            told, memory = vllm_weights.as_handle(bucket, self._at)
            say("load", told)
            del memory
        say("finish", version)
        for bucket in vllm_weights.in_buckets(weights()) if readback else ():
            told, memory = vllm_weights.as_handle(bucket, self._at)
            say("compare", told, turned)
            del memory
        return found


@dataclass(frozen=True)
class Delivery(Source):
    """The weights of a trainer elsewhere. Without `stored` buckets they are broadcast, all of them once for each of `passes`."""

    number: int
    buckets: tuple[Contents, ...]
    passes: tuple[str, ...]
    turned: tuple[str, ...]
    stored: tuple[Any, ...] = ()

    own = False

    def mark(self) -> object:
        """Return the number of the version."""
        return self.number

    def send(self, say: Say, known: Known, readback: bool, version: int) -> Known:
        """See `Source`."""
        if self.stored:
            size = sum(contents.size for contents in self.buckets)
            return send_files(self._weights, size, list(self.turned), say, known, readback, version)
        found, turned, told = self._looked_at(), list(self.turned), [{"contents": asdict(contents)} for contents in self.buckets]
        changed = [name for name, value in found.items() if known.get(name, value) != value]
        for kind in self.passes:
            if kind == "load":
                say("start")
            for bucket in told:
                say(kind, bucket, *{"choose": (changed, turned), "compare": (turned,)}.get(kind, ()))
            if kind == "load":
                say("finish", version)
        return found

    def check(self, known: Known) -> None:
        """Raises `UserError` if the weights do not fit the engine's model."""
        sent = self._looked_at()
        for name in [*sent, *known]:
            theirs, own = (one[name][0] if name in one else None for one in (sent, known))
            if theirs != own:
                raise UserError(
                    f"The trainer's weight {name} has the shape {theirs} and the sampler's {own}: the two have different models. "
                    "Install the same psigrad and transformers on all machines, and give them the same model."
                )

    def _looked_at(self) -> Known:
        return {s.name: (s.shape, value) for c in self.buckets for s, value in zip(c.spans(), c.sums, strict=True)}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for contents, array in zip(self.buckets, self.stored, strict=True):
            yield from unpack(contents, torch.from_numpy(array.copy())).items()


def send_files(
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    size: int,
    turned: list[str],
    say: Say,
    known: Known,
    readback: bool,
    version: int,
) -> Known:
    """Send weights of `size` bytes in files, written once; with `readback` they are kept until compared."""
    found: Known = {}
    with vllm_weights.shared_folder(size if readback else 2 * vllm_weights.BUCKET) as folder:
        buckets = _files(weights(), folder, found, known)
        if readback:
            buckets = list(buckets)
            for told, changed in buckets:
                say("choose", told, changed, turned)
        say("start")
        for told, _ in buckets:
            say("load", told)
            if not readback:
                Path(told["path"]).unlink()
        say("finish", version)
        for told, _ in buckets if readback else ():
            say("compare", told, turned)
    return found


def _files(
    weights: Iterable[tuple[str, Tensor]], folder: Path, found: Known, known: Known
) -> Iterable[tuple[dict[str, Any], list[str]]]:
    """Yield the engine's description of each bucket, and the names of the weights that changed since the last update."""
    for bucket in vllm_weights.in_buckets(weights):
        found |= (own := _looked_at(bucket))
        yield vllm_weights.as_file(bucket, folder), [name for name, value in own.items() if known.get(name, value) != value]


def _looked_at(bucket: dict[str, Tensor]) -> Known:
    sums = vllm_weights.bit_sums(list(bucket.values()))
    return {name: (tuple(weight.shape), value) for (name, weight), value in zip(bucket.items(), sums, strict=True)}
