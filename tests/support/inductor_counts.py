"""Counts of what torch.compile would launch: inductor's kernels, calls of other kernels, and the bytes that its kernels move.

Nothing is built, so that no compiler runs and the results of the compiled functions are undefined.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Launches:
    """The numbers of all graphs together."""

    graphs: int = 0
    kernels: int = 0
    calls: int = 0
    """Products and operations outside the generated kernels."""
    bytes: int = 0
    """The bytes that generated kernels read and write."""


@contextlib.contextmanager
def counting(monkeypatch: Any, found: Launches) -> Iterator[None]:
    """Add what is compiled in the length of the block to `found`."""
    from torch._inductor import async_compile, compile_fx, config, graph, scheduler

    def generated(code: str) -> None:
        body = code[code.index("def call(") :]
        found.graphs += 1
        found.kernels += len(re.findall(r"^\s+(?:cpp|triton)_\w+\(", body, re.MULTILINE))
        found.calls += len(re.findall(r"extern_kernels\.\w+\(|= torch\.ops\.\w+\.\w+", body))

    own = scheduler.Scheduler.codegen

    def counted(self: Any) -> Any:
        found.bytes += sum(node.get_read_write_buffers_sizes() for node in self.nodes if not node.is_extern())
        return own(self)

    torch._dynamo.reset()
    # no compiler is asked what the processor can do, which takes seconds
    with config.patch({"force_disable_caches": True, "cpp.vec_isa_ok": True}), monkeypatch.context() as patch:
        patch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda *given, **named: lambda *numbers: None)
        patch.setattr(graph.GraphLowering, "save_output_code", staticmethod(generated))
        patch.setattr(scheduler.Scheduler, "codegen", counted)
        logging.getLogger(compile_fx.__name__).setLevel(logging.ERROR)
        yield
    torch._dynamo.reset()
