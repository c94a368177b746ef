"""Communication between the processes (ranks) that train together. A single process sends nothing.

All communication goes through a `World`: broadcasts from rank 0, sums, gathers, and exchanges. All processes must make the same
calls in the same order.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from psigrad.errors import UserError

T = TypeVar("T")
P = TypeVar("P")
# Error texts of gloo when another process is gone, for which torch has no exception class.
_SIGNS = ("gloo", "onnection closed by peer", "onnection reset by peer", "roken pipe", "Timed out waiting", "wait timeout")
# The number of gradient values that are summed in one message.
BUCKET = 1 << 22
# Seconds in which the remaining processes must report after an error, so that its message can name the lost process.
ROLL_CALL = 5.0


class RankLost(UserError):
    """Raised when another process of the run has ended or does not answer. See that process's output for the reason."""

    exit_status = 75  # EX_TEMPFAIL of sysexits.h: the same command may resume


class Division(NamedTuple):
    """The division of the processes into groups.

    `replicate` is the number of full copies of the model. `tensor` is the number of processes that compute a layer together
    (tensor parallelism). `context` is the number of processes that share the tokens of a sequence (context parallelism).
    """

    replicate: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def team(self) -> int:
        """The number of processes that compute one micro-batch together. Their ranks are adjacent, such as 0 … team - 1."""
        return self.tensor * self.context


class World(Protocol):
    """The communication of this process (number `rank`) with all `size` processes that train together."""

    rank: int
    """The number of this process: 0 … size - 1. Rank 0 writes the run folder."""
    size: int
    """The number of processes."""
    lockstep: bool
    """True if the model is sharded (fsdp), so that all processes must make the same number of forward passes."""
    division: Division
    """The groups of processes that compute together."""

    def broadcast(self, value: T) -> T:
        """Return the value that rank 0 passed."""

    def all_gather(self, value: T) -> list[T]:
        """Return the values that all processes passed, in the order of their ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by its sum over all processes, in place."""

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send `parts[r]` to each rank r. Return the parts that this process received, in the order of the sending ranks."""


class Alone:
    """The `World` of a single process. It does not communicate."""

    rank, size, lockstep, division = 0, 1, False, Division()

    def broadcast(self, value: T) -> T:
        """Return the value: this process is rank 0."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return a list that has only the value."""
        return [value]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the tensor: it is the sum over one process."""
        return x

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Return `parts`: its only part is from this process to itself."""
        return list(parts)


ALONE: World = Alone()


class Ranks:
    """The `World` of a torch.distributed process group: `group`, or by default the group of all processes."""

    def __init__(self, *, lockstep: bool = False, group: Any = None, division: Division | None = None) -> None:
        self.rank, self.size, self.lockstep, self.group = dist.get_rank(), dist.get_world_size(), lockstep, group
        self.division = division or Division()

    def new_group(self) -> Ranks:
        """Return a `World` of the same processes with a new process group, for a thread that communicates during training steps.

        All processes must call this.
        """
        limit = timedelta(hours=4)  # a thread may wait longer than a step for a disk or a sampler
        return Ranks(lockstep=self.lockstep, group=dist.new_group(backend="gloo", timeout=limit), division=self.division)

    def broadcast(self, value: T) -> T:
        """Return the value that rank 0 passed."""
        box: list[Any] = [value if self.rank == 0 else None]
        with convert_errors():
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        found: T = box[0]
        return found

    def all_gather(self, value: T) -> list[T]:
        """Return the values that all processes passed, in the order of their ranks."""
        box: list[Any] = [None] * self.size
        with convert_errors():
            dist.all_gather_object(box, value, group=self.group)
        return box

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by its sum over all processes, in place."""
        with convert_errors():
            dist.all_reduce(x, group=self.group)
        return x

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send `parts[r]` to each rank r. Return the parts that this process received, in the order of the sending ranks."""
        sizes = torch.tensor([len(part) for part in parts])
        theirs = torch.empty_like(sizes)
        given = torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8))
        with convert_errors():
            dist.all_to_all_single(theirs, sizes, group=self.group)
            found = torch.empty(int(theirs.sum()), dtype=torch.uint8)
            dist.all_to_all_single(found, given, theirs.tolist(), sizes.tolist(), group=self.group)
        return [part.numpy().tobytes() for part in found.split(theirs.tolist())]


@contextlib.contextmanager
def convert_errors() -> Iterator[None]:
    """Convert the error that torch raises for a lost process to `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS):
            raise
        silent = [str(rank) for rank in silent_ranks(_store(), dist.get_rank(), dist.get_world_size(), ROLL_CALL)]
        who = f"Process {', '.join(silent)} of 0 to {dist.get_world_size() - 1}" if silent else "Another process"
        raise RankLost(
            f"{who} of this run has ended or does not answer; see its own message. Repeat the command to resume from the "
            "newest checkpoint."
        ) from error


def silent_ranks(store: Any, rank: int, size: int, seconds: float) -> list[int]:
    """Report `rank` to the `store`, and return the ranks that do not report to it within `seconds`.

    Each rank that lost contact with another rank must call this function.
    """
    try:
        store.set_timeout(timedelta(seconds=seconds))
        store.set(f"waits {rank}", "")
        missing, end = set(range(size)), time.monotonic() + seconds
        while missing and time.monotonic() < end:
            missing -= {other for other in missing if store.check([f"waits {other}"])}
            time.sleep(0.05 if missing else 0.0)
        return sorted(missing)
    except (RuntimeError, AttributeError) as error:
        # The store is on the machine of rank 0.
        return [0] if rank and isinstance(error, RuntimeError) else []


def _store() -> Any:
    """Return the key-value store through which the processes found each other. torch.distributed has no public name for it."""
    with contextlib.suppress(RuntimeError, AttributeError, ValueError):
        return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def join_world(
    *, device: str = "cpu", lockstep: bool = False, minutes: float = 30.0, division: Division | None = None
) -> Iterator[World]:
    """Yield the `World` of this process. The environment variables RANK and WORLD_SIZE give its rank and size.

    A sharded model needs `lockstep`. Calls to the `World` fail after `minutes` minutes without an answer.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if division is not None and (size % math.prod(division) or (division != Division() and not lockstep)):
        raise UserError(
            f"dp_replicate_size, tp_size and cp_size ({', '.join(map(str, division))}) need strategy=fsdp and a multiple of "
            f"{math.prod(division)} processes. This run has {size}; change these settings or the number of processes."
        )
    if size == 1 and not lockstep:
        yield ALONE
        return
    given = dist.is_initialized()  # Ray Train makes the group itself
    if given and "cpu:" not in (have := dist.get_backend_config()):
        raise UserError(
            f"The existing process group ({have}) cannot communicate between CPUs; create it with backend cpu:gloo,cuda:nccl (in "
            'Ray Train: torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl")).'
        )
    if not given:
        _make_group(device, size, minutes)
    try:
        with convert_errors():
            yield Ranks(lockstep=lockstep, division=division)
            if not given:
                dist.barrier()
    finally:
        if not given:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def _make_group(device: str, size: int, minutes: float) -> None:
    rank, limit = int(os.environ.get("RANK", "0")), timedelta(minutes=minutes)
    cuda = device.startswith("cuda")
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda and size > 1 and torch.device(device).index is not None:
        raise UserError(f"device is {device!r}, but each of the {size} processes needs its own GPU; give device=cuda.")
    if cuda:
        local, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= here:
            raise UserError(
                f"This machine has {here} GPUs, but at least {local + 1} processes, which need one each; start fewer processes."
            )
        torch.cuda.set_device(local)
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
    elif folder := os.environ.get("PSIGRAD_RANKS"):
        store = FileStore(os.path.join(folder, "store"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    elif (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT")) is not None:
        # torchrun's store outlives a restart of the ranks, with the addresses of dead ones
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
        tcp = TCPStore(address, port, size, is_master=hosts, timeout=limit)
        named = PrefixStore(f"attempt {attempt}", tcp)
        dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=limit)
    else:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=limit)


def check_equal(world: World, values: Mapping[str, str]) -> None:
    """Raise `UserError` if the processes do not all have the same `values`."""
    each = world.all_gather(dict(values))
    for name in values:
        others = [rank for rank, own in enumerate(each) if own.get(name) != each[0].get(name)]
        if others:
            raise UserError(
                f"Rank {others[0]} of {world.size} has a different {name.replace('_', ' ')} from rank 0; start all processes "
                "with the same settings, files and versions."
            )


def sum_figures(world: World, figures: Mapping[str, float]) -> dict[str, float]:
    """Return each figure's sum over the processes that have it. The result is bitwise the same on all processes.

    Processes that compute a micro-batch together count as one.
    """
    each = world.all_gather(dict(figures))[:: world.division.team]
    names = dict.fromkeys(name for own in each for name in own)
    return {name: math.fsum(own.get(name, 0.0) for own in each) for name in names} if world.size > 1 else dict(figures)


def num_teams(world: World) -> int:
    """Return the number of teams: sets of processes that compute a micro-batch together. Each team has its own micro-batches."""
    return world.size // world.division.team


def shard(world: World, parts: Sequence[T], rank: int | None = None) -> list[tuple[T, float]]:
    """Return [(part, weight), …] for the parts of a step that this process, or the process `rank`, computes.

    The weight is 1. With `world.lockstep`, a process with one part fewer than others gets an extra part, with weight 0.
    """
    shares = num_teams(world)
    own = [(part, 1.0) for part in parts[(world.rank if rank is None else rank) // world.division.team :: shares]]
    rounds = -(-len(parts) // shares)
    return own + [(parts[0], 0.0)] * (rounds - len(own)) if world.lockstep and parts else own


def map_shared(world: World, parts: Sequence[P], of: Callable[[P], T]) -> list[T]:
    """Return `of(part)` for each part, in order. Each rank computes a share of the parts, and all ranks get the complete list.

    With `world.lockstep`, all ranks call `of` the same number of times.
    """
    every = world.all_gather([of(part) for part, _ in shard(world, parts)])[:: world.division.team]
    return [every[i % len(every)][i // len(every)] for i in range(len(parts))]


def sum_gradients(world: World, parameters: Sequence[Tensor], failed: bool = False) -> bool:
    """Replace each parameter's gradient by its sum over the ranks, computed in at least float32, and return False.

    If one of several ranks passes `failed`, sum nothing, and return True on all of them.
    """
    if world.size == 1 or not parameters:
        return False
    *counts, failures = world.all_reduce(torch.tensor([*(float(p.grad is not None) for p in parameters), float(failed)])).tolist()
    if failures:
        return True
    # If no rank has a gradient, it stays None, so that the optimiser does not decay the parameter.
    learns = [p for p, count in zip(parameters, counts, strict=True) if count]
    for bucket in _buckets(learns):
        for p in bucket:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in bucket if p.grad is not None]
        first = gradients[0]
        if len(bucket) == 1 and first.dtype in (torch.float32, torch.float64) and first.is_contiguous():
            world.all_reduce(first)
            continue
        wide = torch.promote_types(first.dtype, torch.float32)
        flat = world.all_reduce(torch.cat([g.flatten().to(wide) for g in gradients]))
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))
    return False


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters with the same dtype and at most `BUCKET` elements. A larger parameter gets its own list."""
    bucket: list[Tensor] = []
    for p in parameters:
        if bucket and (p.dtype != bucket[0].dtype or sum(q.numel() for q in bucket) + p.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket
