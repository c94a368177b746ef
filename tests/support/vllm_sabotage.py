"""vLLM's engine with faults that can be switched on: what runs in its process in place of psigrad's own service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# dropped, negated: part of the names of weights that don't arrive, or with the wrong sign. head: a tied head is not packed again.
# cache: the prefix cache is not emptied.
FAULTS: dict[str, Any] = {"dropped": None, "negated": None, "head": False, "cache": False}


def service(payload: dict[str, Any]) -> Callable[[Any], Iterator[list[Any]]]:
    """psigrad's service, which also answers ("faults", the new ones)."""
    from psigrad_extras.vllm import vllm_engine

    made = vllm_engine.Engine(**payload)
    from psigrad_extras.vllm import vllm_transfer

    repack, reset = vllm_transfer.repack_head, made.llm.reset_prefix_cache

    def receive(self: Any, info: Any) -> None:
        sent = self.weights_of(info)
        kept = {name: w for name, w in sent.items() if not (FAULTS["dropped"] and FAULTS["dropped"] in name)}
        with torch.device(self.device):
            self.model.load_weights((n, -w if FAULTS["negated"] and FAULTS["negated"] in n else w) for n, w in kept.items())

    vllm_transfer.BucketTransfer.receive_weights = receive  # type: ignore[method-assign]
    vllm_transfer.repack_head = lambda model: None if FAULTS["head"] else repack(model)  # type: ignore[assignment]
    made.llm.reset_prefix_cache = lambda: True if FAULTS["cache"] else reset()

    def answered(message: tuple[str, Any]) -> Iterator[list[Any]]:
        if message[0] == "faults":
            FAULTS.update(dict.fromkeys(FAULTS), **message[1])
            yield ["set"]
        else:
            yield from vllm_engine.answer(made, message)

    return answered


def switch(sampler: Any, **faults: Any) -> None:
    """Have the engine of `sampler` commit these faults from now on, and no others."""
    sampler._worker.ask(("faults", faults), 60.0)
    assert sampler._heard() == ("answer", ["set"])
