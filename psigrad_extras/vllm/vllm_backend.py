"""vLLM behind the `Sampler` protocol.

The engine runs in a separate process and gets the trainer's weights, or only its adapter (`vllm_weights.py`), when they have
changed. After each update, the engine's weights are read back and compared bit for bit with those sent (`vllm_readback.py`), and
its prefix cache must be empty. At the start, its log-probs of test texts (the probe) must match the trainer's. An engine that
dies or stops responding is restarted. Its unfinished completions are sampled again, and the finished ones are kept.
"""

from __future__ import annotations

import os
import selectors
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import check_room
from psigrad.language.rollout.types import Completion, Dialogue, Request, Sampler, SamplingParams
from psigrad.processes.parallel.world import RankLost
from psigrad.processes.workers.worker_pool import SharedWait, Worker, WorkerGone
from psigrad_extras.vllm import vllm_setup, vllm_weights
from psigrad_extras.vllm.broadcast import LOST
from psigrad_extras.vllm.flight import Flight, Snapshot, Ticket, numbers, settings_of
from psigrad_extras.vllm.vllm_engine import SLICE
from psigrad_extras.vllm.vllm_probe import SPREAD, TOLERANCE, Truth, distance, drawn_tokens, truth_of, truth_of_shards
from psigrad_extras.vllm.vllm_setup import AdapterRefusedError, EngineLostError
from psigrad_extras.vllm.vllm_sources import Delivery, Known, ModelWeights, Source

SERVICE = "psigrad_extras.vllm.vllm_engine:service"
# Seconds within which an engine must start; seconds without a response after which it counts as lost.
START, PATIENCE = 1800.0, 300.0
# The number of consecutive losses of engines, with no completion or update between them, at which sampling fails.
LOSSES = 3
# Tokens of the probe of the prefix cache, more than one block. After an update, they must not be cached.
CACHED = 130

Log = Callable[..., None]


class VLLMSampler(Sampler):
    """A sampler with at most `max_batch` concurrent sequences in a vLLM engine with the weights of `model`.

    `memory` is the share of a GPU's memory for the engine's weights and cache. On a CPU, the cache takes VLLM_CPU_KVCACHE_SPACE
    GB, by default 1. The model is divided among `tensor_parallel_size` devices, the first of which is `device`, by default the
    model's. With `sleep`, the engine frees the GPU after sampling. If updates send all weights, the sleeping engine drops its
    weights; otherwise (an adapter, or sharded weights) they move to host memory. Without `readback`, updates are not compared.
    `log(kind, text, **fields)` reports lost engines.

    The weights of a sharded model are gathered for an update, so all processes must call `snapshot` together. `whole()` then
    returns a full copy of the loaded model on the host of rank 0, for the first comparison. For such a model, a lost engine ends
    the run.

    Each completion has its own seed. The same seed gives the same tokens in the same batch on the same machine. They differ from
    the embedded sampler's, and rounding may change them in another batch. `version` counts the updates.

    Raises `UserError` if vLLM is missing, does not support the model, or disagrees with the trainer.
    """

    def __init__(
        self,
        model: LanguageModel,
        max_batch: int = 256,
        *,
        memory: float = 0.4,
        tensor_parallel_size: int = 1,
        device: str = "",
        sleep: bool = False,
        longest: int = 0,
        readback: bool = True,
        log: Log | None = None,
        whole: Callable[[], LanguageModel] | None = None,
        service: str = SERVICE,
    ) -> None:
        where = torch.device(device) if device else model.device
        vllm_setup.check_setup(where, tensor_parallel_size, sleep)
        self.model, self.version, self.losses, self.engine = model, 0, 0, vllm_setup.engine_name()
        self._log, self._service, self._sleep, self._readback = log or redaction.log, service, sleep, readback
        self._alone = not vllm_weights.why_merged(model)
        first, shares = where.index or 0, model.device.type == where.type == "cuda"
        at = [torch.device("cuda", first + k) for k in range(tensor_parallel_size)] if shares else []
        self._handles, self._empty = bool(at), False
        self.overlaps = bool(device) and where != model.device
        if sleep and self.overlaps:
            raise UserError(f"sampling.vllm_sleep frees the trainer's GPU, but the engine is on {where}; remove vllm_sleep.")
        self._settings = {
            "dtype": str(model.network.dtype).removeprefix("torch."),
            # with room for the probes and one more token
            "max_model_len": min(model.max_length, max(longest, CACHED + 1) if longest else 1 << 20),
            "max_num_seqs": max_batch,
            "gpu_memory_utilization": memory,
            "tensor_parallel_size": tensor_parallel_size,
        }
        self._devices = vllm_setup.devices_of(where, tensor_parallel_size, os.environ)
        self._worker: Worker | None = None
        self._sent: object = None
        self._known: Known = {}
        self._source: Source = ModelWeights(model, at)
        self._in_a_row = 0
        self._closed: UserError | None = None
        self._flight, self._watch, self._asked, self._passing = Flight(), SharedWait(), False, threading.Lock()
        truth = None if model.shard_root is None else truth_of_shards(model, whole)
        self._until(self.synchronise)
        try:
            self._until(lambda: self.verify(truth))
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._fail(UserError("This vLLM sampler was closed; create a new one."))

    def _fail(self, error: UserError) -> UserError:
        """Close the sampler and return this error, which all later calls raise, since callers may run in other threads."""
        self._closed = self._closed or error
        self._end()
        return error

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Update the engine's weights if they have changed, then sample. Yield each request when it is complete. See `Sampler`.

        Raises `UserError` if a prompt leaves no room for `max_tokens`, or after `LOSSES` consecutive losses of the engine.
        """
        if self.model.shard_root is None:
            self._until(self.synchronise)
        yield from self.write(requests, params)

    def write(
        self, requests: list[Request], params: SamplingParams, more: Callable[[], list[Request]] = list
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample with the engine's current weights. `more` is called meanwhile, and the requests that it returns join."""
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
        """Return episodes that are sampled with the current weights. See `Sampler`."""
        at = self.snapshot() if self.model.shard_root is None else Snapshot(self)
        return at.dialogue(prompts, params)

    def _wait(self, ticket: Ticket) -> list[tuple[int, list[Completion]]]:
        """Return the complete requests of a caller. If there are none, wait for at most `SLICE` seconds."""
        with self._watch:
            if not ticket.complete:
                self._watch.look(self._exchange, SLICE)
            return ticket.take()

    def _exchange(self) -> None:
        """Collect finished completions and submit new requests. One thread at a time does this for all waiting callers."""
        try:
            if self._worker is None or self._empty:
                with self._watch:
                    self._renew(self._source.mark())
            if not self._asked:  # the engine may be asleep
                self._make_room()
                self._ask_on()
            for _, number, *written in self._hear("sample"):
                with self._watch:
                    self._flight.land(number, *written)
                self._in_a_row = 0
            self._asked = False
            if self._flight.busy:
                self._ask_on()
            elif self._sleep:
                self._empty = not self._alone and self.model.shard_root is None
                self._say("rest", 1 + self._empty)
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
        """Update the engine's weights, and return a sampler with them. Processes with a sharded model must call this together."""
        self._until(self.synchronise)
        return Snapshot(self)

    def take(self, delivery: Delivery) -> Sampler:
        """Return a sampler with the weights of a trainer on another machine or GPU, instead of the model's.

        A lost engine cannot get them again, which raises `RankLost`. Raises `UserError` if the weights belong to another model.
        """
        delivery.check(self._known)
        self._source = delivery
        return self.snapshot()

    def synchronise(self) -> None:
        """Send the trainer's weights to the engine if they have changed. Raises `UserError` if it computes with others."""
        now = self._source.mark()
        if self._worker is not None and not vllm_weights.changed_anywhere(self.model, now != self._sent):
            return
        with self._watch:
            while self._flight.busy or self._asked:  # a completion keeps the weights it started with
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
        """Return the mean absolute difference between the log-probs of test texts in the engine and in the trainer (float32).

        Raises `UserError` if it exceeds rounding.
        """
        probe, exact, allowed = truth or truth_of(self.model)
        gap, bound = distance(self.engine_log_probs(probe), exact), max(TOLERANCE, SPREAD * allowed)
        if not gap <= bound:
            raise UserError(
                f"vLLM's log-probs differ from the trainer's in float32 by a mean of {gap:.2g}; expected at most {bound:.2g}. "
                "vLLM has the same weights but computes this model differently; use sampler=embedded."
            )
        return gap

    def engine_log_probs(self, probe: list[list[int]]) -> Tensor:
        """Return the engine's log-probs of these texts, concatenated as by `vllm_probe.log_probs`."""
        ((_, found),) = self._answers("prompt_logprobs", probe)
        return torch.tensor(numbers(found, np.float32))

    def _update(self) -> None:
        """Send all weights. If one did not arrive as it was sent, close the sampler and raise `UserError`."""
        held, wrong, unknown, stale = self._transfer()
        self._in_a_row, self._empty = 0, False
        if wrong or unknown or stale or held != self.version:
            missed = wrong or [f"{name} (stored in an unknown layout)" for name in unknown]
            more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
            what = f"the engine's weight {missed[0]}{more} differs from the weight that was sent" if missed else ""
            what = what or (
                f"the prefix cache kept {stale} tokens from old weights" if stale else f"the engine still has version {held}"
            )
            said = f"vLLM did not apply update {self.version} of the weights: {what}. Use sampler=embedded."
            raise self._fail(UserError(said))

    def _transfer(self) -> tuple[int, list[str], list[str], int]:
        """Send all weights to the running engine.

        Return (the version that the engine then has, weights that it does not compute with, parameters that can't be compared,
        number of tokens that are still in its prefix cache).
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
        """Return torch's cached free memory to the GPU before a sleeping engine wakes."""
        if self._sleep:
            torch.cuda.empty_cache()

    def _with_policy(self, request: Request, group: list[Completion], params: SamplingParams) -> list[Completion]:
        """Return the completions with the policy's log-probs.

        With top-k, top-p or min-p, the engine reports only those of the filtered distribution, so the trainer recomputes them.
        """
        if not params.filtered or params.temperature == 0:
            return group
        if self.model.shard_root is not None or not self._source.own:
            what = "A sharded model" if self._source.own else "A sampler whose model is never updated"
            raise UserError(f"{what} cannot compute the log-probs that top_p, top_k and min_p need; remove these settings.")
        inputs = Groups([request.prompt_ids], [[c.ids for c in group]])
        with torch.no_grad(), self._passing:
            logp = self.model.evaluate(inputs, temperature=params.temperature).logp.float().cpu()
        return [
            Completion(c.ids, tuple(logp[k, : len(c.ids)].tolist()), c.sampling_logprobs, c.finish_reason, c.seed)
            for k, c in enumerate(group)
        ]

    def _start(self) -> None:
        """Start an engine from the model's configuration (weights follow), or from a copy of the base model for an adapter."""
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
            passed = vllm_setup.engine_variables()
            self._worker = Worker(self._service, payload, {}, name="vLLM's engine", variables=passed, start_limit=START)
            self._finalizer = weakref.finalize(self, self._worker.kill)
            kind, content = self._heard()
        self._known = {}
        if kind == "broken":
            reason = content.partition(": ")[2] or content
            if self._alone and "lora" in reason.lower():
                return self._merge(reason)
            raise self._fail(_unfit(reason))

    def _merge(self, reason: str) -> None:
        """Restart the engine, which from now on gets all weights, with the adapter merged."""
        self._alone = False
        self._end()
        self._log("adapter_merged", f"vLLM cannot load the adapter ({reason}), so it gets the merged weights.", reason=reason)
        self._start()

    def _end(self) -> str:
        """End the process and return how it ended."""
        worker, self._worker = self._worker, None
        if worker is None:
            return ""
        self._finalizer.detach()
        return worker.kill()

    def _until(self, work: Callable[[], Any]) -> None:
        """Run `work` until it succeeds. After each loss of the engine, the next try starts a new one."""
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
        if self.model.shard_root is not None or not self._source.own:  # only other processes could resend weights
            raise self._fail(RankLost(f"{lost} Repeat the command to resume from the newest checkpoint.")) from error
        self.losses += 1
        self._in_a_row += 1
        if self._in_a_row >= LOSSES:
            said = (
                f"vLLM's engine was lost {self._in_a_row} times in a row, the last time because {error}; see vLLM's output. Give "
                "vLLM more memory (sampling.vllm_memory, VLLM_CPU_KVCACHE_SPACE) or sample with sampler=embedded."
            )
            raise self._fail(UserError(said)) from error
        self._log("engine_lost", f"{lost} A new engine starts, and samples the unfinished completions again.", reason=str(error))

    def _say(self, name: str, *arguments: Any) -> None:
        for _ in self._answers(name, *arguments):
            pass

    def _answers(self, name: str, *arguments: Any) -> Iterator[list[Any]]:
        """Ask the engine and return its answers."""
        self._ask(name, *arguments)
        return self._hear(name)

    def _ask(self, name: str, *arguments: Any) -> None:
        if self._worker is None:
            raise EngineLostError("the engine was not running")
        self._worker.ask((name, arguments), PATIENCE)

    def _hear(self, name: str) -> Iterator[list[Any]]:
        while (answer := self._heard()[1])[0] != "done":
            if answer[0] == "failed":
                if name == "adapt":
                    raise AdapterRefusedError(answer[1])
                if LOST in answer[1]:
                    raise EngineLostError(answer[1])
                raise self._fail(_unfit(answer[1]))
            yield answer

    def _heard(self) -> tuple[str, Any]:
        """Return the next answer. Raises `EngineLostError`."""
        worker = self._worker
        assert worker is not None
        try:
            while (message := worker.poll()) is None:
                if time.monotonic() > worker.deadline:
                    self._end()
                    raise EngineLostError("the engine did not answer in time")
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
    """Connect the engine to a trainer on another machine or GPU, for broadcasts. Return "", or the reason of a failure."""
    try:
        ((_, why),) = sampler._answers("join", meeting)
    except EngineLostError as error:
        sampler._lost(error)
        return str(error)
    return str(why)


def _unfit(reason: str) -> UserError:
    return UserError(f"vLLM cannot run this model ({reason}); sample with sampler=embedded.")
