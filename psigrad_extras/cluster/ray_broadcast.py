"""Broadcasts of weights to vLLM's engines on the cluster, from the trainer's process to the processes of one engine at a time.

Each sampler shares a group with the trainer, and gets a version of the weights with the first task that needs it. So no sampler
waits for another: some may still use the previous version, and samplers may be lost or join. The trainer keeps versions in host
memory while a task may need them. Weights are first gathered, in the same order on all of the trainer's processes, and sent
later. A gather that waited for an engine would block the other processes' collectives.

A sampler that is unreachable or late gets its weights through Ray's object store. If it was in the middle of an update, it is
restarted. After `FAILURES` consecutive failures, all samplers use the object store.
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
# The seconds that a joined sampler waits for the trainer's confirmation.
_SOON = 10.0
Log = Callable[..., None]
Buckets = tuple[tuple[Contents, Tensor], ...]


@dataclass(frozen=True)
class Version:
    """One published version of the weights: its number, and `place`, Ray's reference to the description of its transfer."""

    number: int
    place: Any
    buckets: Buckets = ()
    """The weights in the trainer's process, if it broadcasts them."""
    stored: list[Any] = field(default_factory=list)
    """Ray's reference to the weights in the object store, once a sampler has needed them from there."""


class _Link:
    """The trainer's end of one sampler's group. A thread forms the group, and sends the buckets of weights in the queue."""

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
    """The trainer's side of the broadcasts to all samplers.

    `address()` returns the trainer's host, and `size` is the number of processes in a group. An update sends each bucket once
    for each of `passes` ("load", "compare"). `turned` are the names of the weights that vLLM stores transposed.
    """

    def __init__(
        self,
        kind: Kind,
        address: Callable[[], str],
        size: int,
        device: torch.device,
        passes: tuple[str, ...],
        turned: list[str],
        log: Log,
    ) -> None:
        self.kind, self.address, self.size, self.device = kind, address, size, device
        self._passes, self._turned, self._log = passes, tuple(turned), log
        self._links: weakref.WeakKeyDictionary[Any, _Link] = weakref.WeakKeyDictionary()
        self._failures, self._over, self._lock = 0, False, threading.Lock()
        self.sent = 0
        """The number of complete transfers of a version to a sampler."""

    def meet(self, worker: Any) -> Any:
        """Start a new worker and let it join a group with the trainer. Return Ray's reference to its answer."""
        if self._over:
            return worker.ready.remote()
        link = self._links[worker] = _Link(broadcast.listen())
        link.ready = worker.ready.remote(tuple(Meeting(self.kind, self.address(), link.store.port, self.size)))
        weakref.finalize(worker, link.close).atexit = False
        threading.Thread(target=self._serve, args=(link, weakref.ref(worker)), name="weights to a sampler", daemon=True).start()
        return link.ready

    def publish(self, ray: Any, number: int, weights: Iterator[tuple[str, Tensor]]) -> Version:
        """Return a new version of the weights, which are named as in a checkpoint, ready to be sent."""
        bucketed = vllm_weights.in_buckets(weights)
        buckets = tuple(broadcast.pack(bucket, vllm_weights.bit_sums(list(bucket.values()))) for bucket in bucketed)
        version = Version(number, [ray.put(self._delivery(number, buckets))], buckets)
        if self._over:
            self._store(ray, version)
        return version

    def bring(self, ray: Any, version: Version, worker: Any) -> Version:
        """Return the version to send with a worker's task. If it comes by broadcast, also queue the broadcast.

        For one version, a worker gets the same answer for all of its tasks.
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
        """End the groups of all samplers."""
        for link in list(self._links.values()):
            link.close()

    def _delivery(self, number: int, buckets: Buckets, stored: tuple[Any, ...] = ()) -> Delivery:
        return Delivery(number, tuple(contents for contents, _ in buckets), self._passes, self._turned, stored)

    def _store(self, ray: Any, version: Version) -> Version:
        """Return the version with its weights in Ray's object store, where they are put on first use."""
        if not version.stored:
            arrays = tuple(buffer.numpy() for _, buffer in version.buckets)
            version.stored.append(ray.put(self._delivery(version.number, version.buckets, arrays)))
        return Version(version.number, version.stored)

    def _joined(self, ray: Any, link: _Link) -> bool:
        if not link.settled.is_set():
            why = ray.get(link.ready)  # a worker with tasks has answered already
            if why:
                link.closed = True
                self._note_failure(why)
            link.settled.wait(0.0 if why else _SOON)
            link.settled.set()
        return link.group is not None and not link.closed

    def _serve(self, link: _Link, worker: weakref.ref[Any]) -> None:
        """Form a sampler's group, then send each version in its queue. This runs in the link's thread."""
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
                except Exception as error:  # the trainer's GPU may lack memory for a bucket
                    self._lose(link, worker(), reason_of(error))
                    return
                with self._lock:
                    self._failures, self.sent = 0, self.sent + 1

    def _lose(self, link: _Link, worker: Any, why: str) -> None:
        """Kill a sampler that was in the middle of an update, because it has a mix of new and old weights."""
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
        ours = "From now on all weights are" if self._over else "The sampler is restarted, or its weights are"
        text = f"A sampler did not receive the weights by {self.kind} ({why}). {ours} sent through Ray's object store."
        self._log("transfer_failed", text, reason=why)
