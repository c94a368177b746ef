"""A team's own sandbox service, over HTTP.

`POST URL` with {"programs": [{"source", "stdin", "expressions"}], "limits": {"seconds", "wall_seconds", "memory_mb", "processes",
"output_kb", "files_mb", "packages"}}; the answer is {"outcomes": [{"status", "code", "stdout", "stderr", "seconds", "answers"}]},
one for each program in order. `answers` holds for each expression {"value": V} or {"error": TEXT}, where V is tagged JSON: null,
booleans, strings and finite floats as they are, {"int": "0x2a"}, {"float": "nan"}, {"list": [V, …]}, {"tuple": […]},
{"set": […]}, {"dict": [[V, V], …]}, and the other tags of `executor`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from psigrad.processes.sandbox.executor import Limits, Program, ProgramOutcome, SandboxError, decode_values

_LARGEST = 64 << 20
# Seconds beyond the programs' own: a service has a queue.
_PATIENCE = 30.0


class RemoteExecutor:
    """An `Executor` that asks the service at `url`; `token` is sent as a bearer token."""

    def __init__(self, url: str, token: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise SandboxError(f"The sandbox service {url!r} is not a URL; it must begin with http:// or https://.")
        self.url, self.token = url, token

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """See `Executor`."""
        body = json.dumps(
            {"programs": [_sent(p) for p in programs], "limits": {**asdict(limits), "wall_seconds": limits.wall}}
        ).encode()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.token}"} if self.token else {})}
        try:
            request = urllib.request.Request(self.url, body, headers)
            with urllib.request.urlopen(
                request, timeout=limits.wall * sum(1 + len(p.expressions) for p in programs) + _PATIENCE
            ) as reply:
                found = json.loads(reply.read(_LARGEST))
            outcomes = [_outcome(one, program) for one, program in zip(found["outcomes"], programs, strict=True)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SandboxError(
                f"The sandbox service {self.url} gave no usable answer ({type(error).__name__}: {error})."
            ) from error
        return outcomes


def _sent(program: Program) -> dict[str, Any]:
    return {"source": program.source, "stdin": program.stdin, "expressions": program.expressions}


def _outcome(found: dict[str, Any], program: Program) -> ProgramOutcome:
    if found["status"] not in ("exited", "timeout", "memory", "output"):
        raise ValueError(f"unknown status {found['status']!r}")
    lines = [json.dumps(answer).encode() for answer in found.get("answers", ())]
    return ProgramOutcome(
        found["status"],
        int(found.get("code", 0)),
        str(found.get("stdout", "")),
        str(found.get("stderr", "")),
        decode_values(lines, len(program.expressions)),
        float(found.get("seconds", 0.0)),
    )
