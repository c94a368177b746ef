"""The output of workers on a cluster, in a file of the run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The maximal size of the file in bytes.
LOG_BYTES = 64 << 20


@contextlib.contextmanager
def keep_output(kind: str, file: Path) -> Iterator[None]:
    """During the block, append the output of actors of the class `kind` to `file`, with time, kind, process and machine.

    Ray also prints that output on the terminal, but drops lines that come too often.
    """
    try:
        # Ray has no public interface for receiving these lines.
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as streams
    except ImportError:
        yield
        return
    name = f"psigrad {kind}"
    with file.open("a", buffering=1, encoding="utf-8") as stream:

        def write(data: dict[str, Any]) -> None:
            if data.get("actor_name") != kind or stream.closed or stream.tell() > LOG_BYTES:
                return
            begin = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {kind} {data.get('pid')}@{data.get('ip')}"
            with contextlib.suppress(OSError, ValueError):  # a full disk must not end Ray's thread
                stream.writelines(f"{begin}: {line}\n" for line in data.get("lines", ()))
                if stream.tell() > LOG_BYTES:
                    stream.write(f"psigrad: workers print more than {LOG_BYTES >> 20} MiB; the rest is dropped\n")

        streams.add_handler(name, write)
        try:
            yield
        finally:
            streams.remove_handler(name)
