"""Broadcasts of weights from the trainer's process to the processes of an engine on another machine or GPU.

Each engine has its own group: NCCL between GPUs, through vLLM's communicator, or gloo between CPUs. A group never waits forever.
An operation that takes longer than `LIMIT` raises `BroadcastLostError` and ends the group, since an engine may have died midway,
and NCCL would wait for it. torch's NCCL process group is not used: its watchdog kills the whole process when a peer is gone.

A bucket of weights is one buffer of bytes. Each weight starts at a multiple of `STEP`, which is an alignment for every dtype.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
Kind = Literal["nccl", "gloo"]
# The timeout in seconds for joining a group, and for each bucket.
LIMIT = 120.0
# The polling interval in seconds.
_OFTEN = 0.001
STEP = 16
LOST = "The broadcast of weights"


class BroadcastLostError(Exception):
    """An error for a group with a lost or late member. The group can send nothing more."""


class Meeting(NamedTuple):
    """The address at which the processes of a group connect. The trainer is rank 0, the engine's are ranks 1 to `size` - 1."""

    kind: Kind
    host: str
    port: int
    size: int


class Span(NamedTuple):
    """The position of one weight in a bucket: its bytes `first` to `end`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True)
class Contents:
    """The description of a bucket: its weights in order. `sums` of their bits identify unchanged weights."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    sums: list[int]

    def spans(self) -> Iterator[Span]:
        """Yield the position of each weight."""
        first = 0
        for name, kind, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            dtype = getattr(torch, kind)
            end = first + math.prod(shape) * dtype.itemsize
            yield Span(name, dtype, tuple(shape), first, end)
            first = -(-end // STEP) * STEP

    @property
    def size(self) -> int:
        """The size of the buffer in bytes."""
        return max((span.end for span in self.spans()), default=0)


def pack(bucket: Mapping[str, Tensor], sums: list[int]) -> tuple[Contents, Tensor]:
    """Return (description, buffer) of a bucket, in host memory, which is pinned for weights on a GPU."""
    kinds = [str(weight.dtype).removeprefix("torch.") for weight in bucket.values()]
    contents = Contents(list(bucket), kinds, [list(weight.shape) for weight in bucket.values()], sums)
    pinned = any(weight.is_cuda for weight in bucket.values())
    buffer = torch.empty(contents.size, dtype=torch.uint8, pin_memory=pinned)
    for span, weight in zip(contents.spans(), bucket.values(), strict=True):
        buffer[span.first : span.end].copy_(weight.contiguous().view(-1).view(torch.uint8), non_blocking=pinned)
    if pinned:
        torch.cuda.current_stream().synchronize()
    return contents, buffer


def unpack(contents: Contents, buffer: Tensor) -> dict[str, Tensor]:
    """Return the weights of a bucket as views of its buffer."""
    return {s.name: buffer[s.first : s.end].view(s.dtype).view(s.shape) for s in contents.spans()}


class BroadcastGroup:
    """One process's side of a broadcast group. Its buffers are on `device`."""

    def __init__(self, store: TCPStore, device: torch.device) -> None:
        self.device, self._store = device, store

    def send(self, buffer: Tensor) -> None:
        """Broadcast from rank 0 to all. Raises `BroadcastLostError`."""
        self._broadcast(buffer.to(self.device, non_blocking=True))

    def receive(self, size: int) -> Tensor:
        """Receive `size` bytes from rank 0. Raises `BroadcastLostError`."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._broadcast(buffer)
        return buffer

    def end(self) -> None:
        """Leave the group."""

    def _broadcast(self, buffer: Tensor) -> None:
        raise NotImplementedError


class GlooGroup(BroadcastGroup):
    """A broadcast group between CPUs, by gloo."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        super().__init__(store, device)
        self._group: Any = torch.distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=LIMIT))

    def _broadcast(self, buffer: Tensor) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=LIMIT)
        try:
            self._group.broadcast([buffer], options).wait(timedelta(seconds=LIMIT))
        except RuntimeError as error:
            raise BroadcastLostError(f"{LOST} failed ({str(error).splitlines()[0][-200:]})") from error


class NCCLGroup(BroadcastGroup):
    """A broadcast group between GPUs, by NCCL through the communicator of vLLM's weight transfer, on the current stream."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        super().__init__(store, device)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        with unpinned_nccl_env():
            self._communicator = PyNcclCommunicator(StatelessProcessGroup(rank, size, store), device)
        if self._communicator.disabled:  # a disabled communicator silently sends nothing
            raise BroadcastLostError("vLLM did not find the library NCCL")

    def _broadcast(self, buffer: Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._communicator.broadcast(buffer, src=0, stream=stream)
        done, end = stream.record_event(), time.monotonic() + LIMIT
        while not done.query():
            if time.monotonic() > end:
                self.end()
                raise BroadcastLostError(f"{LOST} did not end within {LIMIT:.0f} s")
            time.sleep(_OFTEN)

    def end(self) -> None:
        """Destroy the communicator. This also ends an operation that is waiting on the GPU."""
        self._communicator.destroy()


_KINDS: dict[str, Callable[..., BroadcastGroup]] = {"nccl": NCCLGroup, "gloo": GlooGroup}


def listen() -> TCPStore:
    """Return a new TCP store at which the processes of a group connect, on a free port (its `port`)."""
    return TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=LIMIT), wait_for_workers=False)


def join(meeting: Meeting, rank: int, device: torch.device) -> BroadcastGroup:
    """Join a group as a process of the engine, with `rank` 1 or more.

    Raises `BroadcastLostError` if the others can't be reached in time.
    """
    try:
        store = TCPStore(meeting.host, meeting.port, timeout=timedelta(seconds=LIMIT), wait_for_workers=False)
        store.set(f"came {rank}", "")
    except (RuntimeError, OSError) as error:
        raise BroadcastLostError(f"the trainer cannot be reached at {meeting.host}:{meeting.port}") from error
    group = _in_time(lambda: _KINDS[meeting.kind](store, rank, meeting.size, device))
    store.set(f"joined {rank}", "")
    return group


def gather_group(store: TCPStore, kind: Kind, size: int, device: torch.device, given_up: Callable[[], bool]) -> BroadcastGroup:
    """Form a group as the trainer, when all others have connected.

    Raises `BroadcastLostError` if they can't join, or if `given_up()` returns True.
    """
    while not store.check([f"came {rank}" for rank in range(1, size)]):
        if given_up():
            raise BroadcastLostError("nobody came")
        time.sleep(0.05)
    group = _in_time(lambda: _KINDS[kind](store, 0, size, device))
    try:
        store.wait([f"joined {rank}" for rank in range(1, size)], timedelta(seconds=LIMIT))
    except RuntimeError as error:
        raise BroadcastLostError("not all processes of vLLM's engine joined the broadcast") from error
    return group


def _in_time(make: Callable[[], T]) -> T:
    """Return the result of `make`, which forms a group. Raises `BroadcastLostError` after `LIMIT`, since that has no time-out."""
    found: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            found.put((True, make()))
        except Exception as error:
            found.put((False, error))

    threading.Thread(target=work, name="a group is built", daemon=True).start()
    try:
        made, what = found.get(timeout=LIMIT)
    except queue.Empty:
        raise BroadcastLostError(f"the processes did not connect within {LIMIT:.0f} s") from None
    if not made:
        raise BroadcastLostError(str(what).splitlines()[0][:200] if str(what) else type(what).__name__) from what
    result: T = what
    return result
