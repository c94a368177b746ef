"""An executor of programs that calls a user's own sandbox service over HTTP.

`POST URL` with {"programs": [{"source", "stdin", "expressions"}], "limits": {"seconds", "wall_seconds", "memory_mb", "processes",
"output_kb", "files_mb", "packages"}}; the answer is {"outcomes": [{"status", "code", "stdout", "stderr", "seconds", "answers"}]},
one for each program in order. `answers` holds for each expression {"value": V} or {"error": TEXT}, where V is tagged JSON: null,
booleans, strings and finite floats as they are, {"int": "0x2a"}, {"float": "nan"}, {"list": [V, …]}, {"tuple": […]},
{"set": […]}, {"dict": [[V, V], …]}, and the other tags of `executor`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from psigrad.processes.sandbox.executor import Limits, Program, ProgramOutcome, SandboxError, decode_values
from psigrad_extras.connect.endpoint import NoAnswerError, ask

# Extra seconds beyond the programs' own time limits, since requests may wait in the service's queue.
_PATIENCE = 30.0


class RemoteExecutor:
    """An `Executor` that calls the service at `url`. `token` is sent as a bearer token."""

    def __init__(self, url: str, token: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise SandboxError(f"The sandbox service {url!r} is not a URL; it must begin with http:// or https://.")
        self.url, self.token = url, token

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """Run the programs on the service. See `Executor`."""
        body = {"programs": [_sent(p) for p in programs], "limits": {**asdict(limits), "wall_seconds": limits.wall}}
        seconds = limits.wall * sum(1 + len(p.expressions) for p in programs) + _PATIENCE
        try:
            found = ask(self.url, body, key=self.token, seconds=seconds)
            outcomes = [_outcome(one, program) for one, program in zip(found["outcomes"], programs, strict=True)]
        except (NoAnswerError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error if isinstance(error, NoAnswerError) else f"{type(error).__name__}: {error}"
            raise SandboxError(f"The sandbox service {self.url} gave no usable answer ({why}).") from error
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
