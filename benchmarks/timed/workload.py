"""What is timed, and the process in which it is: a workload, seconds by phase, peak memory, and the parent that asks for steps.

Light, so that a process begins with nothing but what it times.
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
    """One shape of work. `kind` is the method: grpo, rloo, ppo, or offline dpo, reward, sft. The sizes of the model are those of
    one that is made (`inputs.build`); one that is given (`inputs.prepare`) has its own. TRL takes `micro_batch` rows at once
    (0: all), with bfloat16 weights (`half_weights`) or by autocast; psigrad takes `micro_tokens` tokens online. The logarithms of
    lengths of prompts (of rows, in sft) have the deviation `spread`, around the lengths given. With several `turns` each
    completion is answered by `answer`, but the last, and one that was cut. Each prompt has a picture with
    sides of `image` pixels (0: none). With `vllm` TRL samples by an engine in its process. There are `rows` rows, and a step
    takes some of them.
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
        """Whether completions are sampled."""
        return self.kind in ("grpo", "rloo", "ppo")


def read_shape(name: str) -> dict[str, Any]:
    """The configuration of a model of the hub, from benchmarks/shapes/. Granite asks for no routers, or TRL would."""
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "shapes" / f"{name}.json").read_text())
    return found


def read(folder: Path) -> tuple[Workload, list[dict[str, Any]]]:
    """The workload and its rows."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return Workload(**json.loads((folder / "work.json").read_text())), [json.loads(line) for line in lines]


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """A number in [0, 1) out of the text alone: every group has signal, and scoring costs nothing."""
    texts = [given if isinstance(given, str) else given[-1]["content"] for given in completions]
    return [int(hashlib.md5(text.encode()).hexdigest()[:6], 16) / 16**6 for text in texts]


def answer(prompt: str, turn: int) -> str:
    """What is read behind the turn (from 1) of an episode: a part of its prompt, so that lengths are those of prompts."""
    return prompt[: max(1, len(prompt) // (1 + turn % 3))]


class Phases:
    """Seconds by name within one step."""

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
        """Time every call of a method."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def peak_mb() -> float:
    """The largest resident set of this process so far, in MiB."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if "VmHWM" in line).split()[1]) / 1024
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


class Parent:
    """The parent process, which asks for steps by a line on stdin; answers go to the file descriptor `answers`.

    Steps run in the main thread: OpenMP keeps a team of threads for each thread that ever computed, and with more of them than
    cores they no longer spin while they wait.
    """

    def __init__(self, answers: int, device: str, start: float) -> None:
        self._answers, self._device, self._start = answers, device, start
        self._begin = 0.0

    def ready(self) -> None:
        """All is built; seconds since the process was started."""
        self.say({"ready": time.time() - self._start})

    def wants_a_step(self) -> bool:
        """Wait until it wants one; False once it has closed the pipe."""
        asked = bool(sys.stdin.readline())
        self._begin = time.perf_counter()
        return asked

    def got(self, tokens: int, phases: dict[str, float]) -> None:
        """The step was taken, with that many tokens and these seconds by phase; what they leave out is `rest`."""
        seconds = time.perf_counter() - self._begin
        phases = {**phases, "rest": seconds - sum(phases.values())}
        self.say({"seconds": seconds, "tokens": tokens, "phases": phases, "peak_mb": peak_mb()} | _on_device(self._device))

    def say(self, answer: dict[str, Any]) -> None:
        """One line of JSON."""
        os.write(self._answers, (json.dumps(answer) + "\n").encode())


def _on_device(device: str) -> dict[str, float]:
    """The GPU's peak, where the steps run on one."""
    if device == "cpu":
        return {}
    import torch

    return {"gpu_peak_mb": torch.cuda.max_memory_allocated() / (1 << 20)}


def serve(take_steps: Callable[[Path, str, str, Parent], None], arguments: Sequence[str]) -> None:
    """Be the process in which something is timed: `take_steps(folder, dtype, device, parent)` builds it, tells the parent that it
    is `ready`, and takes steps.

    `arguments` are FOLDER DTYPE THREADS DEVICE START, where START is the time at which the process was started.
    """
    folder, dtype, threads, device, start = arguments
    answers = os.dup(1)  # whatever the libraries print goes to stderr
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(int(threads) or default_threads())
    take_steps(Path(folder), dtype, device, Parent(answers, device, float(start)))
