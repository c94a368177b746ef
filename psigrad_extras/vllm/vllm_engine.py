"""vLLM's engine in a separate process, and the check that it computes with the weights it was sent.

The process answers the trainer through a worker's pipes. Weights come in buckets through vLLM's interface for weight transfer.
Its backend `ipc` is used if trainer and engine share a GPU. Otherwise weights come in safetensors files in shared memory, or by
broadcast from a trainer on another machine (`vllm_transfer.py`). An adapter is sent as vLLM's LoRA. The weights with which the
engine then computes are read back and compared bit for bit (`vllm_readback.py`).
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

BACKEND = "psigrad"
# Seconds of decoding before new completions may join.
SLICE = 0.1
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process already is the engine's
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise it pins itself to cores that the trainer uses
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

Answer = list[Any]
Part = tuple[dict[str, Any], list[tuple[int, list[int], int]]]


def service(payload: dict[str, Any]) -> Callable[[Any], Iterator[Answer]]:
    """Start an engine, and return the function that answers requests. See `psigrad.processes.workers.child.Service`."""
    return partial(answer, Engine(**payload))


def answer(engine: Engine, message: tuple[str, tuple[Any, ...]]) -> Iterator[Answer]:
    """Call the engine's method that the message ("name", arguments) names. Yield its answers and ["done"].

    If it raises, yield ["failed", reason] as the last answer.
    """
    name, arguments = message
    try:
        alone: dict[str, Callable[..., Any]] = {"join": join, "rest": rest}
        yield from (alone[name](engine, *arguments) if name in alone else getattr(engine, name)(*arguments)) or ()
        yield ["done"]
    except Exception as error:
        yield ["failed", reason(error)]


def join(engine: Engine, meeting: tuple[Any, ...]) -> Iterator[Answer]:
    """Connect the engine's processes to the trainer for broadcasts. Yield ["joined", "" or the reason of a failure]."""
    why = ""
    try:
        engine.llm.collective_rpc("psigrad_join", args=(tuple(meeting),))
    except Exception as error:
        why = reason(error)
    yield ["joined", why]


def rest(engine: Engine, level: int) -> None:
    """Free the GPU until the next use. Level 1 copies the weights to the host. Level 2 drops them, so an update must follow."""
    engine.llm.sleep(level=level)
    engine.asleep = True


def reason(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@dataclass
class Engine:
    """A vLLM engine for the model in `folder`. `settings` are passed to `vllm.LLM`. With `sleep`, it frees the GPU between uses.

    The methods answer requests: they yield lists, or return nothing.
    """

    folder: str
    threads: int
    sleep: bool
    settings: dict[str, Any]
    devices: str = ""
    """The engine's CUDA_VISIBLE_DEVICES. Each rank's engine runs on that rank's GPU."""
    handles: bool = False
    """True if trainer and engine share a GPU, so that weights are passed as handles to GPU memory."""

    def __post_init__(self) -> None:
        os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS=str(self.threads))
        if self.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.devices
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        torch.set_num_threads(self.threads)
        from vllm import LLM
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform

        try:
            self.llm = LLM(
                model=self.folder,
                enforce_eager=current_platform.is_cpu(),  # compiling takes minutes on a CPU and gains little
                enable_prefix_caching=True,  # a group's prompt is computed once
                logprobs_mode="processed_logprobs",  # of the distribution from which the token was drawn
                skip_tokenizer_init=True,
                generation_config="vllm",
                worker_extension_cls="psigrad_extras.vllm.vllm_transfer.WeightUpdates",
                weight_transfer_config=WeightTransferConfig(backend="ipc" if self.handles else BACKEND),
                enable_sleep_mode=self.sleep,
                disable_log_stats=True,
                **self.settings,
            )
        except (ValueError, RuntimeError, ImportError, AssertionError) as error:
            raise RuntimeError(reason(error)) from error
        self.asleep, self.lora, self.slept = False, None, False
        self.llm.init_weight_transfer_engine({"init_info": {"packed": True} if self.handles else {}})

    def begin(self, probe: list[int]) -> None:
        """Prepare an update: wake the weights, and fill the cache with a probe that the update must evict."""
        self.slept = self.asleep
        if self.slept:  # the KV cache is empty, and wakes only after the weights
            self.llm.wake_up(tags=["weights"])
        else:
            self._cached(probe)

    def choose(self, bucket: dict[str, Any], changed: list[str], transposed: list[str]) -> None:
        """Choose what is compared after the update, given a bucket of the new weights. See `vllm_readback.Readback.choose`."""
        self.llm.collective_rpc("psigrad_choose", args=(bucket, changed, transposed))

    def start(self) -> None:
        """Start an update of the weights."""
        self.llm.start_weight_update()

    def load(self, bucket: dict[str, Any]) -> None:
        """Load the weights of a bucket."""
        self.llm.update_weights({"update_info": bucket})

    def finish(self, version: int) -> None:
        """Finish the update to a version."""
        self.llm.finish_weight_update(str(version))

    def compare(self, bucket: dict[str, Any], transposed: list[str]) -> None:
        """Compare the engine's weights with a bucket of those sent. See `vllm_readback.Readback.compare`."""
        self.llm.collective_rpc("psigrad_compare", args=(bucket, transposed))

    def adapt(self, folder: str, version: int, readback: bool) -> None:
        """Replace the previous adapter with the one in `folder`, which the trainer deletes afterwards."""
        from vllm.lora.request import LoRARequest

        if self.lora is not None:
            self.llm.llm_engine.remove_lora(self.lora.lora_int_id)
        self.lora = LoRARequest(f"policy {version}", version, folder)
        self.llm.llm_engine.add_lora(self.lora)
        if readback:
            self.llm.collective_rpc("psigrad_compare_adapter", args=(folder, version))

    def settle(self, probe: list[int]) -> Iterator[Answer]:
        """Finish an update and report what did not arrive.

        Yield ["updated", version, wrong weights, parameters that can't be compared, number of `probe`'s tokens still cached].
        """
        found = self.llm.collective_rpc("psigrad_found")
        if self.slept:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = self.slept = False
        self.llm.reset_prefix_cache()
        wrong, unknown = (sorted({name for names in kind for name in names}) for kind in zip(*found, strict=True))
        yield ["updated", self._held(), wrong, unknown, self._cached(probe)]

    def _held(self) -> int:
        return int(self.llm.get_weight_version()) if self.lora is None else int(self.lora.lora_int_id)

    def sample(self, parts: list[Part], dropped: list[int], version: int) -> Iterator[Answer]:
        """Add completions, cancel the `dropped` ones, and decode for `SLICE` seconds.

        Yield ["completion", number, ids, log-probs, finish reason] for each that ends. `parts` are (settings, [(number, prompt,
        seed)]).
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._wake()
        if (held := self._held()) != version:
            raise RuntimeError(f"vLLM has version {held} of the weights, but version {version} was sent")
        engine = self.llm.llm_engine
        engine.abort_request([f"{number}" for number in dropped])
        for params, flat in parts:
            for number, prompt, seed in flat:
                own = SamplingParams(seed=seed, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **params)
                engine.add_request(f"{number}", {"prompt_token_ids": prompt}, own, lora_request=self.lora)
        end = time.monotonic() + SLICE
        while engine.has_unfinished_requests() and time.monotonic() < end:
            for out in engine.step():
                if out.finished:
                    yield ["completion", int(out.request_id), *_written(out.outputs[0])]

    def prompt_logprobs(self, probe: list[list[int]]) -> Iterator[Answer]:
        """Yield ["logprobs", base64 of float32]: the log-probs at temperature 1 of each text's tokens after its first."""
        from vllm import SamplingParams

        self._wake()
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        texts = [{"prompt_token_ids": text} for text in probe]
        outs = self.llm.generate(texts, asked, use_tqdm=False, lora_request=self.lora)
        found = [
            step[token].logprob
            for out, text in zip(outs, probe, strict=True)
            for step, token in zip(out.prompt_logprobs[1:], text[1:], strict=True)
        ]
        yield ["logprobs", _text(np.asarray(found, np.float32))]

    def _cached(self, probe: list[int]) -> int:
        """Evaluate the probe, and return how many of its tokens came from the prefix cache. Afterwards it is cached."""
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, detokenize=False)
        [out] = self.llm.generate([{"prompt_token_ids": probe}], asked, use_tqdm=False, lora_request=self.lora)
        return int(out.num_cached_tokens or 0)

    def _wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False


def _written(out: Any) -> tuple[str, str, str]:
    """Return (ids, log-probs, finish reason); numbers are base64 of int32 and float32."""
    logprobs = [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
    ids, values = np.asarray(list(out.token_ids), np.int32), np.asarray(logprobs, np.float32)
    return _text(ids), _text(values), "stop" if out.finish_reason == "stop" else "length"


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()
