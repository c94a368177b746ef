"""vLLM's engine in a process of its own, which answers the trainer through the pipes of a worker.

Weights come as a safetensors file in shared memory, through vLLM's own interface for weight transfer (`vllm_transfer.py`). What
the engine then computes with is read back (`vllm_readback.py`).
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

BACKEND = "psigrad"
# Seconds between two signs of life while completions are written.
PULSE = 1.0
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is the engine's already
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it pins itself to cores that the trainer uses
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

Answer = list[Any]


def service(payload: dict[str, Any]) -> Callable[[Any], Iterator[Answer]]:
    """See `psigrad.processes.workers.child.Service`."""
    return partial(answered, Engine(**payload))


def answered(engine: Engine, message: tuple[str, tuple[Any, ...]]) -> Iterator[Answer]:
    """What `engine.name` yields for ("name", arguments), or why it could not."""
    name, arguments = message
    try:
        yield from getattr(engine, name)(*arguments)
    except Exception as error:
        yield ["failed", reason(error)]


def reason(error: Exception) -> str:
    """The first line of what went wrong."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@dataclass
class Engine:
    """vLLM with the model in `folder`; `settings` go to `vllm.LLM`. With `sleep` nothing stays on the GPU between uses."""

    folder: str
    threads: int
    sleep: bool
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS=str(self.threads))
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        torch.set_num_threads(self.threads)
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform

        try:
            self.llm = LLM(
                model=self.folder,
                enforce_eager=current_platform.is_cpu(),  # compiling costs minutes there and gains little
                enable_prefix_caching=True,  # a prompt is computed once for its group
                logprobs_mode="processed_logprobs",  # under the distribution that the token was drawn from
                skip_tokenizer_init=True,
                generation_config="vllm",
                worker_extension_cls="psigrad.language.rollout.samplers.vllm_transfer.WeightUpdates",
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                enable_sleep_mode=self.sleep,
                disable_log_stats=True,
                **self.settings,
            )
        except (ValueError, RuntimeError, ImportError, AssertionError) as error:
            raise RuntimeError(reason(error)) from error
        self.asleep = False
        self.llm.init_weight_transfer_engine({"init_info": {}})

    def update(self, path: str, version: int, changed: list[str], transposed: list[str], probe: list[int]) -> Iterator[Answer]:
        """Load the weights in the file, and tell what of it did not arrive: ["updated", version, wrong, unknown, stale tokens].

        `changed` are the weights that are others than before. After the update no token of `probe`, which is cached before it,
        may come from the cache.
        """
        self._wake()
        self._cached(probe)
        self.llm.collective_rpc("psigrad_choose", args=(path, changed, transposed))
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"path": path}})
        self.llm.finish_weight_update(str(version))
        compared = self.llm.collective_rpc("psigrad_compare", args=(path, transposed))
        self.llm.reset_prefix_cache()
        wrong = sorted({name for found, _ in compared for name in found})
        unknown = sorted({name for _, found in compared for name in found})
        yield ["updated", int(self.llm.get_weight_version()), wrong, unknown, self._cached(probe)]

    def sample(self, flat: list[tuple[int, Sequence[int], int]], params: dict[str, Any], version: int) -> Iterator[Answer]:
        """Completions of (number, prompt, seed), each as soon as it is there: ["completion", number, ids, log-probs, why]."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._wake()
        if (held := self.llm.get_weight_version()) != str(version):
            raise RuntimeError(f"it holds version {held} of the weights and {version} was sent")
        engine = self.llm.llm_engine
        for stale in list(engine.output_processor.request_states):  # of a turn that was given up
            engine.abort_request([stale])
        numbers = {}
        for number, prompt, seed in flat:
            own = SamplingParams(seed=seed, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **params)
            numbers[engine.add_request(f"{number}", {"prompt_token_ids": list(prompt)}, own)] = number
        seen = time.monotonic()
        while engine.has_unfinished_requests():
            for out in engine.step():
                if out.finished:
                    yield ["completion", int(out.request_id), *_written(out.outputs[0])]
                    seen = time.monotonic()
            if time.monotonic() - seen > PULSE:
                yield ["alive"]
                seen = time.monotonic()
        if self.sleep:
            self.llm.sleep(level=1)
            self.asleep = True
        yield ["done"]

    def prompt_logprobs(self, probe: list[int]) -> Iterator[Answer]:
        """["logprobs", those of the tokens of `probe` behind its first, at temperature 1, as base64 of float32]."""
        from vllm import SamplingParams

        self._wake()
        [out] = self.llm.generate(
            [{"prompt_token_ids": probe}], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False
        )
        found = [step[token].logprob for step, token in zip(out.prompt_logprobs[1:], probe[1:], strict=True)]
        yield ["logprobs", _text(np.asarray(found, np.float32))]

    def _cached(self, probe: list[int]) -> int:
        """How many tokens of it came from the prefix cache; they are in it afterwards, where it fills a block."""
        from vllm import SamplingParams

        [out] = self.llm.generate([{"prompt_token_ids": probe}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        return int(out.num_cached_tokens or 0)

    def _wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False


def _written(out: Any) -> tuple[str, str, str]:
    """(ids, log-probs, why it ended); numbers as base64 of int32 and float32."""
    logprobs = [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
    ids, values = np.asarray(list(out.token_ids), np.int32), np.asarray(logprobs, np.float32)
    return _text(ids), _text(values), "stop" if out.finish_reason == "stop" else "length"


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()
