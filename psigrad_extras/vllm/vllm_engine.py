"""vLLM's engine in a process of its own, which answers the trainer through the pipes of a worker, and the proof that it computes
with the weights it was sent.

Weights come as a safetensors file in shared memory, through vLLM's own interface for weight transfer (`vllm_transfer.py`). What
the engine then computes with is read back and compared bit for bit (`Readback`).

vLLM keeps weights in another arrangement than a checkpoint: q, k and v in one matrix, gate and up in one, the shares of several
devices apart, and on CPUs copies in the layout of the kernel, which nothing can read. Those are read by multiplying: the product
with a column of the identity is a column of the matrix, exactly.

An update that did not reach a weight is always noticed. Stored weights are compared whole. Of a packed matrix some columns are
read, and before the update they are chosen so that among them is one in which the old weight differs from the new.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
    return partial(answer, Engine(**payload))


def answer(engine: Engine, message: tuple[str, tuple[Any, ...]]) -> Iterator[Answer]:
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
    devices: str = ""
    """CUDA_VISIBLE_DEVICES: each rank's engine is on the rank's own."""

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
                enforce_eager=current_platform.is_cpu(),  # compiling costs minutes there and gains little
                enable_prefix_caching=True,  # a prompt is computed once for its group
                logprobs_mode="processed_logprobs",  # under the distribution that the token was drawn from
                skip_tokenizer_init=True,
                generation_config="vllm",
                worker_extension_cls="psigrad_extras.vllm.vllm_transfer.WeightUpdates",
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
        slept = self.asleep
        if slept:  # its cache is empty, and comes when the weights have passed through
            self.llm.wake_up(tags=["weights"])
        else:
            self._cached(probe)
        self.llm.collective_rpc("psigrad_choose", args=(path, changed, transposed))
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"path": path}})
        self.llm.finish_weight_update(str(version))
        compared = self.llm.collective_rpc("psigrad_compare", args=(path, transposed))
        if slept:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
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

    def prompt_logprobs(self, probe: list[list[int]]) -> Iterator[Answer]:
        """["logprobs", those of the tokens of each text behind its first, at temperature 1, as base64 of float32]."""
        from vllm import SamplingParams

        self._wake()
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outs = self.llm.generate([{"prompt_token_ids": text} for text in probe], asked, use_tqdm=False)
        found = [
            step[token].logprob
            for out, text in zip(outs, probe, strict=True)
            for step, token in zip(out.prompt_logprobs[1:], text[1:], strict=True)
        ]
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


# Columns of a packed matrix that are read in any case.
COLUMNS = 8


class Piece(NamedTuple):
    """What one sent weight becomes in a parameter of vLLM's, on this device: its rows from `first` on."""

    name: str
    first: int
    values: Tensor

    def of(self, matrix: Tensor) -> Tensor:
        """The rows of it in `matrix`."""
        return matrix[self.first : self.first + len(self.values)]


class Held(NamedTuple):
    """A module of vLLM's with one of its parameters, and of what it is made. Without pieces nobody knows."""

    name: str
    module: Any
    parameter: Tensor
    pieces: list[Piece]

    @property
    def packed(self) -> bool:
        """Whether it multiplies by a copy of its own."""
        multiplies = self.name.endswith(".weight") and bool(_kinds(self.module) & _MULTIPLY)
        return multiplies and hasattr(self.module, "cpu_linear")


_MULTIPLY = {"LinearBase", "ParallelLMHead"}


@dataclass
class Readback:
    """Compares `model`, a module of vLLM's, with weights that were sent to it; `tied` heads are made of the embedding."""

    model: Any
    tied: bool
    columns: dict[str, list[int]] = field(default_factory=dict)

    def choose(self, sent: Mapping[str, Tensor], changed: Collection[str], transposed: Collection[str] = ()) -> None:
        """Before an update: choose the columns of packed matrices that will be read after it. Each weight in `changed` differs in
        one of them.
        """
        self.columns = {
            layer.name: _telling(layer, [p for p in layer.pieces if p.name in changed])
            for layer in self.layers(sent, transposed)
            if layer.packed
        }

    def wrong(self, sent: Mapping[str, Tensor], transposed: Collection[str] = ()) -> list[str]:
        """The sent weights that the model does not compute with, and its own that nothing was sent for."""
        found: dict[str, None] = {}
        for layer in self.layers(sent, transposed):
            for piece in layer.pieces:
                if not len(piece.values):
                    found[f"{piece.name} (not sent)"] = None
                elif layer.parameter.numel() and not _equal(piece.of(layer.parameter), piece.values):
                    found[piece.name] = None
            if layer.packed:
                chosen = self.columns.get(layer.name) or _order(layer)[:COLUMNS]
                read = _read(layer, chosen)
                for piece in layer.pieces:
                    if len(piece.values) and not _equal(piece.of(read), piece.values[:, chosen]):
                        found[piece.name] = None
        return list(found)

    def unknown(self, sent: Mapping[str, Tensor], transposed: Collection[str] = ()) -> list[str]:
        """Parameters whose arrangement is not known here, so that they can't be compared."""
        return [layer.name for layer in self.layers(sent, transposed) if not layer.pieces]

    def layers(self, sent: Mapping[str, Tensor], transposed: Collection[str]) -> Iterator[Held]:
        """Every parameter of the model."""
        fused = getattr(self.model, "packed_modules_mapping", {})
        embedding = next((f"{n}.weight" for n, m in self.model.named_modules() if _is_embedding(m)), "")
        for name, module in self.model.named_modules():
            head, _, last = name.rpartition(".")
            for leaf, parameter in module.named_parameters(recurse=False):
                sources = [".".join(filter(None, (head, one, leaf))) for one in fused.get(last, [last])]
                if self.tied and "ParallelLMHead" in _kinds(module) and sources[0] not in sent and leaf == "weight":
                    sources = [embedding]
                yield Held(f"{name}.{leaf}", module, parameter, _pieces(module, leaf, parameter, sources, sent, transposed))


def _pieces(
    module: Any, leaf: str, parameter: Tensor, sources: list[str], sent: Mapping[str, Tensor], transposed: Collection[str]
) -> list[Piece]:
    """What the sources become; one of no rows where it was not sent, and none at all where the shapes do not fit."""
    pieces, first = [], 0
    for place, source in enumerate(sources):
        if source not in sent:
            pieces.append(Piece(source, first, torch.empty(0)))
            continue
        whole = sent[source].T if source in transposed else sent[source]
        values = _share(module, leaf, place, len(sources), whole)
        if values is None:
            return []
        pieces.append(Piece(source, first, values))
        first += len(values)
    sizes = [p.values.shape for p in pieces if len(p.values)]
    rows = max((p.first + len(p.values) for p in pieces), default=0)
    if parameter.numel() and sizes and (sizes[0][1:] != parameter.shape[1:] or rows > len(parameter)):
        return []
    return pieces


def _share(module: Any, leaf: str, place: int, count: int, whole: Tensor) -> Tensor | None:
    """The part of a weight that this device holds, by the rules of vLLM's parallel layers; None: nobody knows."""
    kinds, size, rank = _kinds(module), getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
    if _is_embedding(module) or "ParallelLMHead" in kinds:
        shard = module.shard_indices
        return whole[shard.org_vocab_start_index : shard.org_vocab_end_index]
    if size == 1 or "ReplicatedLinear" in kinds:
        return whole
    if "QKVParallelLinear" in kinds:
        if count != 3:
            return None
        heads, block = (module.num_heads, rank) if place == 0 else (module.num_kv_heads, rank // module.num_kv_head_replicas)
        return whole.narrow(0, block * heads * module.head_size, heads * module.head_size)
    if "ColumnParallelLinear" in kinds:
        return whole.chunk(size, 0)[rank] if count > 1 or "MergedColumnParallelLinear" not in kinds else None
    if "RowParallelLinear" in kinds and leaf == "weight":
        return whole.chunk(size, 1)[rank]
    return whole if whole.ndim == 1 else None


def _kinds(module: Any) -> set[str]:
    """The names of a module's classes: vLLM is not imported to tell them apart."""
    return {kind.__name__ for kind in type(module).__mro__}


def _is_embedding(module: Any) -> bool:
    return "VocabParallelEmbedding" in _kinds(module) and "ParallelLMHead" not in _kinds(module)


def _equal(own: Tensor, sent: Tensor) -> bool:
    return own.shape == sent.shape and torch.equal(own.detach(), sent.to(own.device, own.dtype))


def _width(layer: Held) -> int:
    return int(next(p.values.shape[1] for p in layer.pieces if len(p.values)))


def _order(layer: Held) -> list[int]:
    """All columns in an order that is new each time."""
    known = any(len(piece.values) for piece in layer.pieces)
    return torch.randperm(_width(layer)).tolist() if known else []


def _read(layer: Held, columns: list[int]) -> Tensor:
    """[rows, columns] of the matrix that the layer multiplies by."""
    dtype = next(p.values.dtype for p in layer.pieces if len(p.values))
    one = torch.zeros(len(columns), _width(layer), dtype=dtype)
    one[torch.arange(len(columns)), columns] = 1
    found: Tensor = layer.module.cpu_linear(one, layer.parameter, None)
    return found.reshape(len(columns), -1).T


def _telling(layer: Held, wanted: list[Piece]) -> list[int]:
    """Columns to read: some by chance, and for each of the wanted pieces one in which it is not what the layer has now."""
    order, missing, chosen, size = _order(layer), list(wanted), list[int](), COLUMNS
    while order and (missing or not chosen):
        block, order, size = order[:size], order[size:], size * 2
        read = _read(layer, block)
        chosen = chosen or block[:COLUMNS]
        for piece in list(missing):
            differs = (piece.of(read) != piece.values[:, block]).any(0).nonzero()
            if len(differs):
                missing.remove(piece)
                chosen.append(block[int(differs[0])])
    return list(dict.fromkeys(chosen))
