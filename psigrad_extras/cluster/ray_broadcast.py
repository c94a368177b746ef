"""Weights to vLLM's engines on the cluster by broadcasts, from the trainer's process to those of one engine at a time.

Each sampler has a group of its own with the trainer, and takes a version when it is given a task of it. So nobody waits for all:
with a lag one sampler may still write by the weights that another has left, and samplers come and go. Versions are held in the
trainer's host memory while a task may want them. They are gathered there first, in the order that all processes of the trainer
share, and sent later: a gather that waits in the middle for an engine would stop the others' collectives.

What can't be reached, or is late, is given up: that sampler gets weights through Ray's object store, or is started again where it
was in the middle of an update. After `FAILURES` in a row all go that way.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from psigrad.errors import reason_of
from psigrad_extras.vllm import broadcast, vllm_weights
from psigrad_extras.vllm.broadcast import BroadcastGroup, Contents, Kind, Meeting
from psigrad_extras.vllm.vllm_sources import Delivery

FAILURES = 3
# Seconds that a sampler which has joined waits for the trainer's word that it did.
_SOON = 10.0
Tell = Callable[..., None]
Buckets = tuple[tuple[Contents, Tensor], ...]


@dataclass(frozen=True)
class Version:
    """Published weights: their number, and where the cluster keeps them."""

    number: int
    place: Any
    buckets: Buckets = ()
    """In the trainer's process the weights themselves, where they are sent from there."""
    stored: list[Any] = field(default_factory=list)
    """And where the cluster keeps them too, once somebody had to get them that way."""


class _Link:
    """The trainer's end of one sampler's group. A thread of its own makes it, and sends what is in the queue."""

    def __init__(self, store: TCPStore) -> None:
        self.store, self.ready = store, None
        self.group: BroadcastGroup | None = None
        self.settled = threading.Event()
        self.queue = queue.SimpleQueue[Buckets | None]()
        self.offered: Version | None = None
        self.closed = False

    def close(self) -> None:
        """End the thread and the group."""
        self.closed = True
        self.queue.put(None)
        if self.group is not None:
            self.group.end()


class Broadcasts:
    """The trainer's ends of all groups. `address()` is where its machine is found, `size` how many processes a group has,
    `passes` what an update has each bucket sent for, `turned` the weights that vLLM keeps transposed.
    """

    def __init__(
        self,
        kind: Kind,
        address: Callable[[], str],
        size: int,
        device: torch.device,
        passes: tuple[str, ...],
        turned: list[str],
        tell: Tell,
    ) -> None:
        self.kind, self.address, self.size, self.device = kind, address, size, device
        self._passes, self._turned, self._tell = passes, tuple(turned), tell
        self._links: weakref.WeakKeyDictionary[Any, _Link] = weakref.WeakKeyDictionary()
        self._failures, self._over, self._lock = 0, False, threading.Lock()
        self.sent = 0
        """Versions that have gone to a sampler whole."""

    def meet(self, worker: Any) -> Any:
        """Have a new worker get ready and join; the reference to its answer."""
        if self._over:
            return worker.ready.remote()
        link = self._links[worker] = _Link(broadcast.listen())
        link.ready = worker.ready.remote(tuple(Meeting(self.kind, self.address(), link.store.port, self.size)))
        weakref.finalize(worker, link.close).atexit = False
        threading.Thread(target=self._serve, args=(link, weakref.ref(worker)), name="weights to a sampler", daemon=True).start()
        return link.ready

    def publish(self, ray: Any, number: int, weights: Iterator[tuple[str, Tensor]]) -> Version:
        """A new version of weights under a checkpoint's names."""
        bucketed = vllm_weights.in_buckets(weights)
        buckets = tuple(broadcast.pack(bucket, vllm_weights.bit_sums(list(bucket.values()))) for bucket in bucketed)
        version = Version(number, [ray.put(self._delivery(number, buckets))], buckets)
        if self._over:
            self._store(ray, version)
        return version

    def bring(self, ray: Any, version: Version, worker: Any) -> Version:
        """What a worker is told of the version it is to sample with; where that comes by broadcast, it begins. Of one version a
        worker is always told the same, whichever of its tasks it begins with.
        """
        link = self._links.get(worker)
        if link is None:
            return self._store(ray, version)
        if link.offered is None or link.offered.number != version.number:
            direct = not self._over and self._joined(ray, link)
            link.offered = Version(version.number, version.place) if direct else self._store(ray, version)
            if direct:
                link.queue.put(version.buckets)
        return link.offered

    def close(self) -> None:
        """End all groups."""
        for link in list(self._links.values()):
            link.close()

    def _delivery(self, number: int, buckets: Buckets, stored: tuple[Any, ...] = ()) -> Delivery:
        return Delivery(number, tuple(contents for contents, _ in buckets), self._passes, self._turned, stored)

    def _store(self, ray: Any, version: Version) -> Version:
        """The version through Ray's object store."""
        if not version.stored:
            arrays = tuple(buffer.numpy() for _, buffer in version.buckets)
            version.stored.append(ray.put(self._delivery(version.number, version.buckets, arrays)))
        return Version(version.number, version.stored)

    def _joined(self, ray: Any, link: _Link) -> bool:
        if not link.settled.is_set():
            why = ray.get(link.ready)  # who is given tasks has answered
            if why:
                link.closed = True
                self._note_failure(why)
            link.settled.wait(0.0 if why else _SOON)
            link.settled.set()
        return link.group is not None and not link.closed

    def _serve(self, link: _Link, worker: weakref.ref[Any]) -> None:
        """Make the group, and send each version that is asked for."""
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            try:
                link.group = broadcast.gather_group(link.store, self.kind, self.size, self.device, lambda: link.closed)
            except Exception as error:
                if not link.closed:
                    link.settled.set()
                    self._note_failure(reason_of(error))
                return
            link.settled.set()
            while (buckets := link.queue.get()) is not None:
                try:
                    for _ in self._passes:
                        for _, buffer in buckets:
                            link.group.send(buffer)
                except Exception as error:  # the trainer's GPU may have no room for a bucket
                    self._lose(link, worker(), reason_of(error))
                    return
                with self._lock:
                    self._failures, self.sent = 0, self.sent + 1

    def _lose(self, link: _Link, worker: Any, why: str) -> None:
        """A sampler in the middle of an update has some new weights and some old: it ends, if it has not already."""
        if link.closed:
            return
        link.close()
        self._note_failure(why)
        if worker is not None:
            import ray

            with contextlib.suppress(Exception):
                ray.kill(worker)

    def _note_failure(self, why: str) -> None:
        with self._lock:
            if self._over:
                return
            self._failures += 1
            self._over = self._failures >= FAILURES
        ours = "From here on all weights go" if self._over else "It is started again, or gets them"
        text = f"Weights did not reach a sampler by {self.kind}: {why}. {ours} through Ray's object store."
        self._tell("transfer_failed", text, reason=why)
