"""What a worker does for environments and tools: holds the episodes, and answers by number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from psigrad.language.rollout.episodes.environments import Environment, Fault, Observation, Step, opened, rows_of, stepped
from psigrad.processes.workers import unpack
from psigrad.processes.workers.child import reason_for
from psigrad.processes.workers.shipping import Packed


def service(payload: Packed) -> Callable[[Any], Iterator[Any]]:
    """The worker's service for an environment's packed factory.

    A request is ("rows", count, seed), or ("play", a list of (number, "reset" or "step", row or text)); each of these is
    answered by itself. A number's "reset" begins its episode anew.
    """
    factory = unpack(payload)
    episodes: dict[int, Environment] = {}

    def answer(message: Any) -> Iterator[Any]:
        if message[0] == "rows":
            try:
                yield rows_of(factory, *message[1:])
            except (Exception, SystemExit) as error:
                yield reason_for("the environment's rows()", error)
            return
        for number, what, given in message[1]:
            if what == "reset":
                try:
                    episodes[number] = factory()
                except (Exception, SystemExit) as error:
                    yield encoded(Fault(reason_for("the environment", error)))
                    continue
                yield encoded(opened(episodes[number], given))
            elif number in episodes:
                yield encoded(stepped(episodes[number], given))
            else:
                yield encoded(Fault("the environment could not be made"))

    return answer


def encoded(result: Observation | Step | Fault | None) -> Any:
    """A result as JSON."""
    if isinstance(result, Fault):
        return {"fault": result.reason}
    if isinstance(result, Step):
        found: dict[str, Any] = {"observation": result.observation, "reward": result.reward, "done": result.done}
    else:
        found = {"observation": result}
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"fault": f"the environment's observation is not JSON: {error}"}
    return found


def decoded(content: Any, what: str) -> Observation | Step | Fault | None:
    """The inverse of `encoded`. Raises `ValueError` for what is no result."""
    match content:
        case {"fault": str(reason)}:
            return Fault(reason)
        case {"observation": observation, "reward": float() | int() as reward, "done": bool(done)} if what == "step":
            return Step(observation, float(reward), done)
        case {"observation": observation} if what == "reset":
            said: Observation | None = observation
            return said
    raise ValueError(f"{content!r} is no answer to {what}")
