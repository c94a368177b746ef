"""What processes that train together send for the gradient of one optimiser step, by how many micro-batches it has."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import rank_gradients
import torch.distributed as dist
from rank_gradients import CASES, groups_of, load
from torch.utils._python_dispatch import TorchDispatchMode

from psigrad.config import Optim
from psigrad.optim import Optimizer, add_up
from psigrad.processes.parallel.world import World

# By which name, and at which place, torch's collectives are given the larger of their tensors.
LARGER = {
    "all_reduce": ("tensor", 0),
    "all_gather_single": ("output", 0),
    "reduce_scatter_single": ("input", 1),
}


class Reads(TorchDispatchMode):
    """How often the host reads numbers from a tensor. `Tensor.tolist` dispatches nothing, so its caller counts it."""

    total = 0

    def count(self, read):
        self.total += 1
        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def count_collectives() -> tuple[Counter, Counter, Counter]:
    """From now on (calls, bytes of the whole tensor, seconds in them) of this process, by the name of the collective."""
    calls, sizes, seconds = Counter(), Counter(), Counter()

    def watch(name: str, argument: str, place: int) -> None:
        real = getattr(dist, name)

        def watched(*given, **named):
            whole = named[argument] if argument in named else given[place]
            calls[name] += 1
            sizes[name] += whole.numel() * whole.element_size()
            begin = time.perf_counter()
            try:
                return real(*given, **named)
            finally:
                seconds[name] += time.perf_counter() - begin

        setattr(dist, name, watched)

    for name, where in LARGER.items():
        watch(name, *where)
    return calls, sizes, seconds


def main(world: World, folder: str, out: str, budgets: str, prompts: str = "24", once: str = "") -> None:
    """Write `out`: for each budget of a micro-batch, a step of SFT of the same rows. Shards may reduce their gradients `once`."""
    counted = calls, sizes, spent = count_collectives()
    found = []
    for budget in map(int, budgets.split(",")):
        model, _ = load(CASES["sft"], Path(folder), world)
        reduces = model.shard_root.set_requires_gradient_sync if once else None
        optimizer, count = Optimizer(model.trainable(), Optim(), world=world, reduces=reduces), []
        rank_gradients.BUDGET = budget
        losses = CASES["sft"].losses(CASES["sft"], world, model, None, groups_of(int(prompts)), "")
        timed = [_counting(loss, count) for loss in losses]
        world.all_gather(None)
        for one in counted:
            one.clear()
        begin = time.perf_counter()
        add_up([optimizer], timed)
        seconds = time.perf_counter() - begin
        weights = sum(p.numel() * p.element_size() for p in model.trainable().values())
        sent = {"calls": dict(calls), "bytes": dict(sizes), "spent": sum(spent.values())}
        found.append({"micro": len(count), "seconds": seconds, "weights": weights, **sent})
        calls.clear()
        with Reads() as reads:
            norm = optimizer.norm(lambda x: reads.count(x.tolist()))
        found[-1] |= {"norm": norm, "norm calls": dict(calls), "norm reads": reads.total}
    if world.rank == 0:
        Path(out).write_text(json.dumps(found))


def _counting(loss, count):
    def counted():
        count.append(1)
        return loss()

    return counted
