"""A workload, and the process that is timed: seconds by phase, peak memory, and the parent that requests steps.

The module imports little, so that the process starts with only what it times.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psigrad.runs.machine import default_threads


@dataclass(frozen=True)
class Workload:
    """The work of a step. `kind` is the method: grpo, rloo, ppo, or offline dpo, reward, sft. The model's sizes apply to a
    generated model (`inputs.build`), not to a given one (`inputs.prepare`). TRL takes `micro_batch` rows per forward pass (0:
    all), with bfloat16 weights (`half_weights`) or autocast; psigrad takes `micro_tokens` tokens online. `spread` is the standard
    deviation of the logarithms of prompt lengths (sft: row lengths). With several `turns`, `answer` answers every completion
    except the last one and one that was cut. Each prompt has an image of `image` × `image` pixels (0: none). With `vllm`, TRL
    samples with vLLM in its process. The dataset has `rows` rows.
    """

    name: str
    says: str
    kind: str = "grpo"
    hidden: int = 256
    layers: int = 6
    vocabulary: int = 64
    prompts: int = 16
    generations: int = 8
    prompt_tokens: int = 12
    completion_tokens: int = 64
    beta: float = 0.0
    iterations: int = 1
    lora_rank: int = 0
    quantize_base: str = ""
    spread: float = 0.0
    turns: int = 1
    image: int = 0
    rows: int = 512
    micro_batch: int = 0
    micro_tokens: int = 4096
    half_weights: bool = False
    gradient_checkpointing: bool = False
    attention: str = "auto"
    cuda_graphs: bool = True
    vllm: bool = False
    steps: int = 5

    @property
    def online(self) -> bool:
        """True if completions are sampled."""
        return self.kind in ("grpo", "rloo", "ppo")


def read_shape(name: str) -> dict[str, Any]:
    """Return a hub model's configuration, from benchmarks/shapes/. Granite's router loss is off, or TRL would add it."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "shapes" / f"{name}.json").read_text())
    return found


def read(folder: Path) -> tuple[Workload, list[dict[str, Any]]]:
    """Return the workload and its rows."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return Workload(**json.loads((folder / "work.json").read_text())), [json.loads(line) for line in lines]


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Return a number in [0, 1) that depends only on the text. Every group has signal, and scoring takes no time."""
    texts = [given if isinstance(given, str) else given[-1]["content"] for given in completions]
    return [int(hashlib.md5(text.encode()).hexdigest()[:6], 16) / 16**6 for text in texts]


def answer(prompt: str, turn: int) -> str:
    """Return the environment's answer after a turn (from 1): a part of the prompt, so that lengths vary like the prompts'."""
    return prompt[: max(1, len(prompt) // (1 + turn % 3))]


class Phases:
    """The seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to the phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def around(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method as phase `name`."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def peak_mb() -> float:
    """Return the largest resident set of this process so far, in MiB."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) / 1024
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


class Parent:
    """The parent process. It requests a step by a line on stdin. Answers go to the file descriptor `answers`.

    Steps run in the main thread: OpenMP keeps a team of threads for each thread that ever computed. With more such threads than
    cores, they no longer spin while they wait.
    """

    def __init__(self, answers: int, device: str, start: float) -> None:
        self._answers, self._device, self._start = answers, device, start
        self._begin = 0.0

    def ready(self) -> None:
        """Report that everything is built, and the seconds since the process was started."""
        self.say({"ready": time.time() - self._start})

    def wants_a_step(self) -> bool:
        """Wait until the parent requests a step. Return False if it has closed the pipe."""
        asked = bool(sys.stdin.readline())
        self._begin = time.perf_counter()
        return asked

    def got(self, tokens: int, phases: dict[str, float]) -> None:
        """Report a step, its tokens and its seconds by phase. The remaining seconds are the phase `rest`."""
        seconds = time.perf_counter() - self._begin
        phases = {**phases, "rest": seconds - sum(phases.values())}
        self.say({"seconds": seconds, "tokens": tokens, "phases": phases, "peak_mb": peak_mb()} | _on_device(self._device))

    def say(self, answer: dict[str, Any]) -> None:
        """Send one line of JSON."""
        os.write(self._answers, (json.dumps(answer) + "\n").encode())


def _on_device(device: str) -> dict[str, float]:
    """Return the GPU's peak memory if the steps run on a GPU."""
    if device == "cpu":
        return {}
    import torch

    return {"gpu_peak_mb": torch.cuda.max_memory_allocated() / (1 << 20)}


def serve(take_steps: Callable[[Path, str, str, Parent], None], arguments: Sequence[str]) -> None:
    """Run the process that is timed: `take_steps(folder, dtype, device, parent)` builds the workload, reports `ready`, and takes
    steps.

    `arguments` are FOLDER DTYPE THREADS DEVICE START, where START is the time at which the process was started.
    """
    folder, dtype, threads, device, start = arguments
    answers = os.dup(1)  # what the libraries print goes to stderr
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(int(threads) or default_threads())
    take_steps(Path(folder), dtype, device, Parent(answers, device, float(start)))
