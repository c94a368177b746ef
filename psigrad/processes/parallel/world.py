"""The processes that train together. One alone is a world too: then every sum is the number itself, and nothing is sent.

Whatever processes must agree on goes through their `World`: a value of rank 0, a sum, what each of them has. All of them make
the same calls in the same order.
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
# What gloo says, for which torch has no exception of its own, when another process is gone.
_SIGNS = ("gloo", "onnection closed by peer", "onnection reset by peer", "roken pipe", "Timed out waiting", "wait timeout")
# Numbers that are summed in one message.
BUCKET = 1 << 22
# Seconds in which those that have lost another say so, that the silent one can be named.
ROLL_CALL = 5.0


class RankLost(UserError):
    """Another process of the run has ended or does not answer. That process says why."""

    exit_status = 75  # EX_TEMPFAIL of sysexits.h: the same command may go on


class Division(NamedTuple):
    """How processes that hold a model in shards are divided besides: groups that hold it each (`replicate`), processes that
    compute every layer together (`tensor`), and those that divide the tokens of every row (`context`).
    """

    replicate: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def team(self) -> int:
        """How many compute one micro-batch together. They stand beside each other: ranks k·team … (k + 1)·team - 1."""
        return self.tensor * self.context


class World(Protocol):
    """Processes that train together, as one of them, the `rank`-th of `size`, sees them."""

    rank: int
    """This process: 0 … size - 1. Rank 0 owns the run folder."""
    size: int
    """How many there are."""
    lockstep: bool
    """Whether all of them must make the same number of forward passes: they hold a model in shards."""
    division: Division
    """Who computes together."""

    def broadcast(self, value: T) -> T:
        """The value that rank 0 gives."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """What each gives, by rank."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all of them, in place of `x`."""
        ...

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """What each has for this one, by rank; `parts[rank]` is what this one has for another."""
        ...


class Alone:
    """The world of one process."""

    rank, size, lockstep, division = 0, 1, False, Division()

    def broadcast(self, value: T) -> T:
        """The value itself."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """The value as the only one."""
        return [value]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The tensor itself."""
        return x

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """The part itself."""
        return list(parts)


ALONE: World = Alone()


class Ranks:
    """The world of a torch.distributed process group: of `group`, or the one that was made first."""

    def __init__(self, *, lockstep: bool = False, group: Any = None, division: Division | None = None) -> None:
        self.rank, self.size, self.lockstep, self.group = dist.get_rank(), dist.get_world_size(), lockstep, group
        self.division = division or Division()

    def beside(self) -> Ranks:
        """The same processes with messages of their own, for a thread that works beside the steps. All of them must call it."""
        limit = timedelta(hours=4)  # a thread may wait for a disk, or for a sampler, for longer than a step
        return Ranks(lockstep=self.lockstep, group=dist.new_group(backend="gloo", timeout=limit), division=self.division)

    def broadcast(self, value: T) -> T:
        """The value that rank 0 gives."""
        box: list[Any] = [value if self.rank == 0 else None]
        with name_losses():
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        found: T = box[0]
        return found

    def all_gather(self, value: T) -> list[T]:
        """What each gives, by rank."""
        box: list[Any] = [None] * self.size
        with name_losses():
            dist.all_gather_object(box, value, group=self.group)
        return box

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all of them, in place of `x`."""
        with name_losses():
            dist.all_reduce(x, group=self.group)
        return x

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """What each has for this one, by rank; `parts[rank]` is what this one has for another."""
        sizes = torch.tensor([len(part) for part in parts])
        theirs = torch.empty_like(sizes)
        given = torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8))
        with name_losses():
            dist.all_to_all_single(theirs, sizes, group=self.group)
            found = torch.empty(int(theirs.sum()), dtype=torch.uint8)
            dist.all_to_all_single(found, given, theirs.tolist(), sizes.tolist(), group=self.group)
        return [part.numpy().tobytes() for part in found.split(theirs.tolist())]


@contextlib.contextmanager
def name_losses() -> Iterator[None]:
    """Whatever torch raises when another process is gone, as a `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS):
            raise
        silent = [str(rank) for rank in silent_ranks(_store(), dist.get_rank(), dist.get_world_size(), ROLL_CALL)]
        who = f"Process {', '.join(silent)} of 0 to {dist.get_world_size() - 1}" if silent else "Another process"
        raise RankLost(
            f"{who} of this run has ended or does not answer, and its own message says why. The same command goes on from the "
            "newest checkpoint."
        ) from error


def silent_ranks(store: Any, rank: int, size: int, seconds: float) -> list[int]:
    """The ranks that do not say within so many seconds that they have lost another, as those do that wait for one. Where the
    store itself does not answer it is rank 0, whose machine has it.
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
        return [0] if rank and isinstance(error, RuntimeError) else []


def _store() -> Any:
    """Where the processes of the group found each other; torch has no public name for it."""
    with contextlib.suppress(RuntimeError, AttributeError, ValueError):
        return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def join_world(
    *, device: str = "cpu", lockstep: bool = False, minutes: float = 30.0, division: Division | None = None
) -> Iterator[World]:
    """The world that this process was started in: by `psigrad … --processes N`, torchrun, SLURM or Ray Train, whose environment
    variables RANK and WORLD_SIZE say so; else it is alone. A process that gets no answer for `minutes` ends. Raises `UserError`
    where so many processes cannot have the `division`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if division is not None and (size % math.prod(division) or (division != Division() and not lockstep)):
        raise UserError(
            f"dp_replicate_size, tp_size and cp_size are {', '.join(map(str, division))}, and the number of processes is {size}; "
            "give strategy=fsdp, and a number that the product of the three divides."
        )
    if size == 1 and not lockstep:
        yield ALONE
        return
    given = dist.is_initialized()  # Ray Train makes the group itself
    if given and "cpu:" not in (have := dist.get_backend_config()):
        raise UserError(
            f"The process group that is there ({have}) carries nothing between CPUs; make it with backend cpu:gloo,cuda:nccl (in "
            'Ray Train: torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl")).'
        )
    if not given:
        _make_group(device, size, minutes)
    try:
        with name_losses():
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
        raise UserError(f"device is {device!r} and there are {size} processes, each with a GPU of its own; give device=cuda.")
    if cuda:
        local, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= here:
            raise UserError(f"The {local + 1} processes or more of this machine want a GPU each, and it has {here}; start fewer.")
        torch.cuda.set_device(local)
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
    elif folder := os.environ.get("PSIGRAD_RANKS"):
        store = FileStore(os.path.join(folder, "store"), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    elif (attempt := os.environ.get("TORCHELASTIC_RESTART_COUNT")) is not None:
        # torchrun's store outlives a restart of the ranks, with the addresses of those that are dead
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
        tcp = TCPStore(address, port, size, is_master=hosts, timeout=limit)
        named = PrefixStore(f"attempt {attempt}", tcp)
        dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=limit)
    else:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=limit)


def agree(world: World, what: Mapping[str, str]) -> None:
    """Raise `UserError` where the processes do not have the same of something, by its name."""
    each = world.all_gather(dict(what))
    for name in what:
        others = [rank for rank, own in enumerate(each) if own.get(name) != each[0].get(name)]
        if others:
            raise UserError(
                f"Rank {others[0]} of {world.size} has another {name.replace('_', ' ')} than rank 0; start all processes with "
                "the same settings, files and versions."
            )


def sum_figures(world: World, figures: Mapping[str, float]) -> dict[str, float]:
    """The sum of each figure over those that have it, in the order of the ranks: the same bits on all of them. Who compute
    together count once.
    """
    each = world.all_gather(dict(figures))[:: world.division.team]
    names = dict.fromkeys(name for own in each for name in own)
    return {name: math.fsum(own.get(name, 0.0) for own in each) for name in names} if world.size > 1 else dict(figures)


def shares_of(world: World) -> int:
    """Into how many shares a step is divided: one for each process, or for each team that computes together."""
    return world.size // world.division.team


def shard(world: World, parts: Sequence[T], rank: int | None = None) -> list[tuple[T, float]]:
    """The share of this rank, or of another, in what all ranks do: every `shares_of(world)`-th part, each with weight 1.

    In lockstep ranks with a part less do the first one once more, with weight 0.
    """
    shares = shares_of(world)
    own = [(part, 1.0) for part in parts[(world.rank if rank is None else rank) // world.division.team :: shares]]
    rounds = -(-len(parts) // shares)
    return own + [(parts[0], 0.0)] * (rounds - len(own)) if world.lockstep and parts else own


def each_once(world: World, parts: Sequence[P], of: Callable[[P], T]) -> list[T]:
    """What `of` finds in each part, in their order; each rank looks at its share, and all of them get the whole.

    In lockstep all ranks call it as often.
    """
    every = world.all_gather([of(part) for part, _ in shard(world, parts)])[:: world.division.team]
    return [every[i % len(every)][i // len(every)] for i in range(len(parts))]


def sum_gradients(world: World, parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its sum over the ranks, added up in at least float32.

    What no rank has a gradient for keeps none, so that nobody decays it; where only some have one, the others add zeros. Small
    gradients travel together.
    """
    if world.size == 1 or not parameters:
        return
    counts = world.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters])).tolist()
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


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one type in groups of at most `BUCKET` numbers, or alone."""
    bucket: list[Tensor] = []
    for p in parameters:
        if bucket and (p.dtype != bucket[0].dtype or sum(q.numel() for q in bucket) + p.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket
