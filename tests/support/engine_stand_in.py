"""A stand-in for vLLM's engine process. It speaks the same protocol, to the letter, and has no model: a completion is a hash of
the weights that it holds, the prompt and the seed, and all log-probs of the probe are 0.

PSIGRAD_TEST_ENGINE names what goes wrong in it: it "dies", "hangs" or "fails" while it samples; it is "mute" or "broken" at each
start; it "misses" an update or "keeps" its cache; it "refuses" adapters, or is "without" them from the start. Of broadcasts it
"breaks" or is "late" at the second bucket, or stays "apart". What it was asked goes to PSIGRAD_TEST_LOG, where that names a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
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
    if log := os.environ.get("PSIGRAD_TEST_LOG"):
        Path(f"{log}.environment").write_text(json.dumps(dict(os.environ)))
    if fault == "mute":
        os._exit(3)
    if fault == "broken":
        raise RuntimeError("no kernel for it")
    settings = payload["settings"]
    if fault == "without" and settings.get("enable_lora"):
        raise RuntimeError("Tiny does not support LoRA yet.")
    folder = Path(payload["folder"])
    assert json.loads((folder / "config.json").read_text())["architectures"]
    below = [load_file(path) for path in folder.glob("*.safetensors")]
    assert (settings.get("load_format") == "dummy") != bool(below), "whole weights come by an update, a base from its folder"
    held = {"version": 0, "weights": {name: w for part in below for name, w in part.items()}, "at": "settle"}
    return partial(answered, {**held, "room": settings["max_model_len"]}, fault)


# What may follow what in an update.
AFTER = {
    "begin": ("settle",),
    "choose": ("begin", "choose"),
    "start": ("begin", "choose"),
    "load": ("start", "load"),
    "finish": ("load",),
    "compare": ("finish", "compare"),
    "adapt": ("begin",),
    "settle": ("finish", "compare", "adapt"),
}


def answered(state: dict[str, Any], fault: str, message: Any) -> Iterator[list[Any]]:
    """What the engine answers to one request."""
    name, arguments = message
    if name == "join":
        yield ["joined", join(fault, *arguments)]
        yield ["done"]
        return
    if log := os.environ.get("PSIGRAD_TEST_LOG"):
        what = names_in(arguments[0]) if name in ("choose", "load", "compare") else arguments if name == "rest" else ""
        with open(log, "a") as file:
            file.write(f"{name} {what}\n")
    texts = {"begin": arguments[:1], "settle": arguments[:1], "prompt_logprobs": arguments[0] if arguments else ()}.get(name, ())
    if too_long := [len(given) for given in texts if len(given) >= state["room"]]:  # a token is written behind it
        yield ["failed", f"maximum context length is {state['room']} tokens, and the prompt contains {too_long[0]}"]
    elif name == "sample":
        assert state["at"] == "settle"
        yield from sampled(state, fault, *arguments)
    elif name == "rest":
        assert state["at"] == "settle" and not state["flight"]
        if arguments[0] == 2:
            state["weights"] = {"dropped": np.zeros(1)}  # what is sampled now is another completion
        yield ["done"]
    elif name == "prompt_logprobs":
        yield ["logprobs", text(np.zeros(sum(map(len, arguments[0])) - len(arguments[0]), np.float32))]
        yield ["done"]
    else:
        assert state["at"] in AFTER[name] and not state.get("flight"), f"{name} after {state['at']}"
        state["at"] = name
        yield from updated(state, fault, name, arguments)


def updated(state: dict[str, Any], fault: str, name: str, arguments: Any) -> Iterator[list[Any]]:
    """A step of an update. All weights of it are new, and what was compared is what was loaded."""
    if name == "begin":
        state |= {"new": {}, "compared": {}, "changed": []}
    if name == "choose":
        state["changed"] += arguments[1]
        if "contents" in arguments[0]:
            read(arguments[0])
    if name == "load":
        if "contents" in arguments[0] and state["new"] and fault in ("breaks", "late"):
            os._exit(9) if fault == "breaks" else time.sleep(60)
        state["new"] |= read(arguments[0])
    if name == "compare":
        state["compared"] |= read(arguments[0])
    if name == "finish":
        state |= {"version": arguments[0], "weights": state["new"]}
    if name == "adapt":
        if fault == "refuses":
            yield ["failed", "expected target modules in q_proj"]
            return
        assert (Path(arguments[0]) / "adapter_config.json").exists()
        base = {n: w for n, w in state["weights"].items() if ".lora_" not in n}
        state |= {"version": arguments[1], "weights": base | load_file(Path(arguments[0]) / "adapter_model.safetensors")}
    if name == "settle":
        assert not state["compared"] or state["compared"].keys() == state["new"].keys()
        wrong = sorted(state["changed"]) if fault == "misses" else []
        yield ["updated", state["version"], wrong, [], 130 if fault == "keeps" and state["version"] > 1 else 0]
    yield ["done"]


GROUP: list[Any] = []


def join(fault: str, meeting: tuple[Any, ...]) -> str:
    """Meet the trainer in a real group."""
    if fault == "apart":
        return "no way to the trainer"
    import torch

    from psigrad_extras.vllm import broadcast

    GROUP[:] = [broadcast.join(broadcast.Meeting(*meeting), 1, torch.device("cpu"))]
    return ""


def names_in(bucket: dict[str, Any]) -> list[str]:
    """What is in a bucket, which comes only once."""
    return sorted(bucket["contents"]["names"] if "contents" in bucket else read(bucket))


def read(bucket: dict[str, Any]) -> dict[str, Any]:
    """The weights of a bucket: in a file, from a broadcast, or as vLLM's `ipc` takes them apart, whose handle is here a file."""
    if "path" in bucket:
        return load_file(bucket["path"])
    if "contents" in bucket:
        from psigrad_extras.vllm import broadcast

        contents = broadcast.Contents(**bucket["contents"])
        return {name: w.numpy() for name, w in broadcast.unpack(contents, GROUP[0].receive(contents.size)).items()}
    ((gpu, (buffer, size)),) = bucket["ipc_handles"].items()
    packed = np.fromfile(buffer, np.uint8)
    assert gpu == "GPU-of-the-trainer" and len(packed) == size == sum(bucket["tensor_sizes"])
    pieces = np.split(packed, np.cumsum(bucket["tensor_sizes"])[:-1])
    columns = zip(bucket["names"], bucket["dtype_names"], bucket["shapes"], pieces, strict=True)
    return {name: piece.view(kind).reshape(shape) for name, kind, shape, piece in columns}


# Completions that it writes until others may join.
SLICE = 2


def sampled(state: dict[str, Any], fault: str, parts: Any, dropped: Any, version: int) -> Iterator[list[Any]]:
    """The next completions of those that it is at, one by one; the fault strikes after the third, once."""
    assert version == state["version"]
    flight = state.setdefault("flight", {})
    for number in dropped:
        flight.pop(number, None)  # it may be written already
    flight |= {number: (prompt, seed, params) for params, flat in parts for number, prompt, seed in flat}
    if log := os.environ.get("PSIGRAD_TEST_LOG"):
        with open(f"{log}.flight", "a") as file:
            file.write(f"{sorted(flight)}\n")
    for number in list(flight)[:SLICE]:
        once = Path(os.environ["PSIGRAD_TEST_ONCE"])
        if state.setdefault("written", 0) == 3 and fault in ("dies", "hangs", "fails") and not once.exists():
            once.touch()
            if fault == "dies":
                os._exit(9)
            if fault == "fails":
                yield ["failed", "out of pages"]
                return
            time.sleep(60)
        state["written"] += 1
        prompt, seed, params = flight.pop(number)
        ids = completion(state["weights"], prompt, seed, params["max_tokens"])
        why = "stop" if ids[-1] in params["stop_token_ids"] else "length"
        yield ["completion", number, text(np.asarray(ids, np.int32)), text(-np.ones(len(ids), np.float32)), why]
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
