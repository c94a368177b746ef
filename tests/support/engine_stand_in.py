"""A stand-in for vLLM's engine process. It speaks the same protocol and has no model: a completion is a hash of the weights that
it holds, the prompt and the seed, and all log-probs of the probe are 0.

PSIGRAD_TEST_ENGINE names what goes wrong in it: it "dies", "hangs" or "fails" while it samples; it is "mute" or "broken" at each
start; it "misses" an update or "keeps" its cache.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def service(payload: dict[str, Any]) -> Callable[[Any], Iterator[list[Any]]]:
    """See `psigrad_extras.vllm.vllm_engine.service`."""
    fault = os.environ.get("PSIGRAD_TEST_ENGINE", "")
    if fault == "mute":
        os._exit(3)
    if fault == "broken":
        raise RuntimeError("no kernel for it")
    assert (Path(payload["folder"]) / "config.json").exists()
    return partial(answered, {"version": 0, "weights": {}}, fault)


def answered(state: dict[str, Any], fault: str, message: Any) -> Iterator[list[Any]]:
    """What the engine answers to one request."""
    name, arguments = message
    if name == "update":
        path, version, changed, _, _ = arguments
        state |= {"version": version, "weights": load_file(path)}
        wrong = sorted(changed) if fault == "misses" else []
        yield ["updated", version, wrong, [], 130 if fault == "keeps" and version > 1 else 0]
    elif name == "prompt_logprobs":
        yield ["logprobs", text(np.zeros(sum(map(len, arguments[0])) - len(arguments[0]), np.float32))]
    else:
        yield from sampled(state, fault, *arguments)


def sampled(state: dict[str, Any], fault: str, flat: Any, params: dict[str, Any], version: int) -> Iterator[list[Any]]:
    """Completions one by one; the fault strikes after the third, once."""
    assert version == state["version"]
    for count, (number, prompt, seed) in enumerate(flat):
        once = Path(os.environ["PSIGRAD_TEST_ONCE"])
        if count == 3 and fault in ("dies", "hangs", "fails") and not once.exists():
            once.touch()
            if fault == "dies":
                os._exit(9)
            if fault == "fails":
                yield ["failed", "out of pages"]
                return
            time.sleep(60)
        ids = completion(state["weights"], prompt, seed, params["max_tokens"])
        yield ["completion", number, text(np.asarray(ids, np.int32)), text(-np.ones(len(ids), np.float32)), "length"]
        yield ["alive"]
    yield ["done"]


def completion(weights: dict[str, Any], prompt: Any, seed: int, length: int) -> tuple[int, ...]:
    """The ids of one."""
    digest = hashlib.sha256(repr((list(prompt), seed)).encode())
    for name in sorted(weights):
        digest.update(np.asarray(weights[name], np.float32).tobytes())
    return tuple(digest.digest()[:length])


def text(array: Any) -> str:
    """Numbers as they go through the pipe."""
    return base64.b64encode(array.tobytes()).decode()
