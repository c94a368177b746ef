"""The two sources of an engine's weights, and how they send them: a model on the same machine, or a trainer on another one.

A model on the same machine sends buckets as handles to GPU memory, or as files. A trainer on another machine broadcasts to the
engine's processes. Weights that came through Ray's object store are sent as files.
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
"""Name -> (shape, bit sum) of each weight that an engine received last."""
Say = Callable[..., None]


class Source(ABC):
    """A source of an engine's weights. `own` is True for the model in this process."""

    own = True

    @abstractmethod
    def mark(self) -> object:
        """Return a value that changes whenever the weights change."""

    @abstractmethod
    def send(self, say: Say, known: Known, readback: bool, version: int) -> Known:
        """Send all weights to the engine in buckets, as the update `version`, and let it compare them if `readback` is set.

        `known` is the return value of the previous update. Return shapes and bit sums of the sent weights.
        """


class ModelWeights(Source):
    """The weights of a model in this process. If the engine uses the same GPUs `at`, they are not copied to the host."""

    def __init__(self, model: LanguageModel, at: Sequence[torch.device]) -> None:
        self._model, self._at = model, at

    def mark(self) -> object:
        """Return the model's `vllm_weights.fingerprint`, which changes with the weights."""
        return vllm_weights.fingerprint(self._model)

    def send(self, say: Say, known: Known, readback: bool, version: int) -> Known:
        """Send the weights as handles to GPU memory, or as files. See `Source`.

        Weights in GPU memory are gathered a second time for the comparison.
        """
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
    """One version of the weights of a trainer on another machine or GPU.

    If there are `stored` buckets, they contain the weights. Otherwise all buckets are broadcast, once for each of `passes`.
    """

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
        """Let the engine receive the weights by broadcast, or send the stored ones as files. See `Source`."""
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
        """Raise `UserError` if the weights do not fit the engine's model."""
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
    """Send weights of `size` bytes as files, which are written once. With `readback`, they are kept until they are compared."""
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
    """Write each bucket to a file. Yield (its description for the engine, names of weights changed since the last update)."""
    for bucket in vllm_weights.in_buckets(weights):
        found |= (own := _looked_at(bucket))
        yield vllm_weights.as_file(bucket, folder), [name for name, value in own.items() if known.get(name, value) != value]


def _looked_at(bucket: dict[str, Tensor]) -> Known:
    sums = vllm_weights.bit_sums(list(bucket.values()))
    return {name: (tuple(weight.shape), value) for (name, weight), value in zip(bucket.items(), sums, strict=True)}
