"""The peak memory of a run, item by item.

The size of the activations comes from `activations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from psigrad.kernels.processor import multiplies_bfloat16
from psigrad.language.models.fused.caches import HEAD_LIMIT, LIMIT
from psigrad.language.models.logprobs import CHUNK_ELEMENTS, CHUNK_ON_GPU, TILE_ELEMENTS, TILE_ON_GPU
from psigrad.language.rollout.samplers.cache import BLOCK
from psigrad.language.rollout.samplers.grouped import SHORTEST
from psigrad.optim.gradients import HELD
from psigrad_extras.preflight.plan.activations import Terms
from psigrad_extras.preflight.plan.arithmetic import Work, token_bytes
from psigrad_extras.preflight.plan.shape import Shape

# The bytes of a process that has no model or tensor: Python, torch and transformers (on a GPU also the CUDA context).
BASELINE = {"cpu": 430 << 20, "cuda": 600 << 20}
# The additional bytes of each of several processes: gloo's buffers, and for shards torch's compiler, which DTensor imports.
# Measured on the workloads W1 and SFT with 2 and 4 processes.
AMONG_OTHERS = {"ddp": 50 << 20, "fsdp": 190 << 20}
# The allocator's memory beyond the tensors that are alive at the peak, measured on the workloads W0 to W4. SLACK is a share of
# the bytes that are allocated and freed within a step. BLOCKS counts blocks of the size of a trained head, under autograd and
# with the gradient in closed form. With the settings of `keep_freed_memory`, glibc returns no freed memory to the kernel, and a
# new large block rarely fits between old ones. With gradient checkpointing, freed blocks are returned.
SLACK = {"cpu": 0.2, "returned": 0.0, "cuda": 0.1}
BLOCKS = {"cpu": (7.5, 0.25), "cuda": (0.0, 0.0)}
# The float32 copies of a chunk of logits that the backward pass of its log-probs needs at once. Entropy needs two more.
CHUNKS = 5
KEPT, COPY, CACHE, ENGINE = "kept from sampling", "sampling copy", "KV cache", "vLLM's engine"
# The share of the freed activations of sampling that a critic's larger blocks fit into. Fitted on PPO in four shapes.
REFILLED = 0.25

Phase = Literal["weights", "held", "sample", "train", "load"]


@dataclass(frozen=True)
class MemoryItem:
    """One item of memory: its bytes, and the phase that needs it.

    The phases are weights (always), held (from the first step on), sample, train, and load.
    """

    name: str
    bytes: float
    phase: Phase
    note: str = ""


@dataclass(frozen=True)
class ModelRole:
    """The memory of one model of the run: policy, reference, critic, or reward model.

    `learns` counts the trained parameters, and `width` is the bytes per weight. `coarse` counts the weights whose moments in the
    optimiser have 8 bits. `recomputed` counts the gradients that are recomputed instead of stored.
    """

    name: str
    parameters: int
    learns: int
    width: int
    adapter: int = 0
    coarse: int = 0
    recomputed: int = 0
    copied: bool = True
    """True if gradients of half-precision weights are copied to float32 for the optimiser. AdamW needs no such copy."""
    several: bool = False
    """True if gradients are summed over several passes. The sum is float32, also for half-precision weights."""
    masters: int = 4
    """The bytes of a half-precision weight's float32 master: 4; 2 if only its lower half is stored; 0 without one."""
    saved: float = 0.0
    """The bytes that quantisation of the weights saves."""

    def items(self) -> list[MemoryItem]:
        """Return the items of the weights and, if the model is trained, of gradients, float32 masters and AdamW's moments."""
        size = self.width * self.parameters + 4 * self.adapter - self.saved
        note = f"{count(self.parameters)} × {self.width} bytes" + (", with quantised layers" if self.saved else "")
        found = [MemoryItem(self.name, size, "weights", note)]
        learns, width = (self.adapter, 4) if self.adapter else (self.learns, self.width)
        if not learns:
            return found
        half = width < 4
        stored = learns - self.recomputed
        each = 4 if half and self.several else width + 4 * (half and self.copied)
        note = count(stored) + (f", {count(self.recomputed)} recomputed" if self.recomputed else "")
        found.append(MemoryItem(f"{self.name}: gradients", stored * each, "held", note))
        coarse, masters = min(self.coarse, learns), self.masters * half
        moments = learns * (8 + masters) - coarse * (8 - 2.03125)  # a scale of 4 bytes for 256 of each moment
        note = ("two moments in 8 bits" if coarse else "two moments") + (" and float32 masters" if masters else "")
        found.append(MemoryItem(f"{self.name}: optimizer", moments, "held", note))
        return found


def count(parameters: float) -> str:
    """Return a count as text, such as 5.1 M or 8.19 B."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g} {unit}"
    return f"{parameters:.0f}"


def cache_bytes(work: Work, policy: Shape, kept: Terms, width: int, device: str = "cpu") -> float:
    """Return the bytes of the KV cache at full length, over all slots.

    The fused decoder stores a prompt once for its group. Decoding with CUDA graphs does so too, with room for twice the prompts
    that are decoded at once, or for all prompts of the step, and rounds lengths up (`embedded._graph_size`).
    """
    prompt, completion = work.lengths.longest_prompt, work.lengths.longest_completion
    prompts = math.ceil(work.slots / work.members) if kept.fused else work.slots
    if device == "cuda" and work.members > 1 and prompt >= SHORTEST:
        prompts = min(work.slots, math.ceil(2 * work.slots / work.members), work.rows)
        prompt, completion = (-(-x // 256) * 256 for x in (prompt, completion))
    elif device == "cuda":
        completion = -(-(prompt + completion) // 256) * 256 - prompt
    own, shared = work.slots * completion, prompts * prompt
    if kept.fused:  # the fused decoder allocates whole blocks
        own = work.slots * math.ceil(completion / BLOCK) * BLOCK
    # The fused decoder stores prompts in float32, in the order in which it reads them.
    return policy.cached * (own * (kept.fused or width) + shared * (4 if kept.fused else width))


def engine_item(work: Work, policy: Shape, width: int, taken: float, sleeps: bool = False) -> tuple[MemoryItem, float]:
    """Return (vLLM's item of `taken` bytes, the bytes that it lacks for the weights and the cache of one longest sequence)."""
    weights, own = width * policy.parameters / work.tensor, token_bytes(policy, width) / work.tensor
    least = weights + own * (work.lengths.longest_prompt + work.lengths.longest_completion)
    note = f"weights, and cache for {count(max(0.0, taken - weights) / own)} tokens"
    note += f"; at least {least / 1e9:.3g} GB are needed" if least > taken else ""
    return MemoryItem(ENGINE, taken, "sample" if sleeps else "held", note), max(0.0, least - taken)


def share_asleep(held: PeakMemory, work: Work, policy: Shape, width: int, memory: float, margin: float) -> float:
    """Return the share of the GPU's memory that vLLM's engine can have if it sleeps during training, in steps of 0.05.

    It is at most the engine's present share, and at most the memory that training leaves free, less `margin`. Return 0 if there
    is no engine, if it sleeps already, or if its weights and one text need more.
    """
    awake = sum(item.bytes for item in held.items if item.name == ENGINE and item.phase == "held")
    if not awake:
        return 0.0
    free = memory / (1 + margin) - held.baseline - held.of("weights") - held.of("held") + awake - held.slack
    share = min(work.engine, math.floor(20 * free / (1 + SLACK[held.allocator]) / memory) / 20)
    return 0.0 if share <= 0 or engine_item(work, policy, width, share * memory)[1] else share


def forward_and_back(work: Work, shape: Shape, kept: Terms, recompute: bool) -> tuple[float, float]:
    """Return (bytes that a model's largest forward pass keeps for its backward pass, bytes that the backward pass needs)."""
    carried = work.micro_completions * work.lengths.prompt
    return kept.bytes_for(shape.layers, work.micro_tokens, carried, recompute=recompute), _backward(shape, work.micro_tokens)


def recomputed_gradients(work: Work, shape: Shape, fused: bool, *, head: bool) -> tuple[int, int]:
    """Return how many parameters (of the head, of the embeddings) have gradients that are recomputed instead of stored.

    With gradient checkpointing (`optim/gradients.py`), this is done for the `head` and, with the fused decoder, for the
    embeddings, if all tokens of an optimiser step fit. Tied embeddings count as the head. Equal tokens are counted separately.
    """
    room, rows = HELD * shape.vocabulary, math.ceil(work.rows / work.minibatches)
    looked_up, predicted = rows * work.group, rows * work.trained * work.lengths.completion
    closed = head and _is_closed(work, shape)
    if head and shape.tied:
        return shape.head * (closed and fused and predicted + looked_up <= room), 0
    return shape.head * (closed and predicted <= room), shape.vocabulary * shape.hidden * (fused and looked_up <= room)


def passing(
    work: Work,
    policy: Shape,
    kept: Terms,
    device: str,
    *,
    width: int,
    recompute: bool,
    learns_head: bool,
    critic: tuple[Shape, Terms] | None = None,
) -> list[MemoryItem]:
    """Return the items that are allocated and freed within a step. `critic` is a separate critic, if there is one."""
    note = f"{work.micro_tokens} tokens" + (", recomputed layer by layer" if recompute else "")
    activations, backward = forward_and_back(work, policy, kept, recompute)
    held = None
    if work.keeps and kept.fused:
        held = _kept_item(kept_size(work, policy, kept), work.keeps)
    there = held.bytes if held is not None and held.phase == "held" else 0.0
    if there:
        # Besides those kept, a pass needs copies of one layer; one step in twenty, and in later passes, it computes all again.
        activations = max(activations - there, activations / policy.layers)
        note += ", besides the kept activations"
    found = [
        MemoryItem("activations", activations, "train", note),
        MemoryItem("backward pass", backward, "train", "gradients of one layer's activations"),
        _head(work, policy, width, learns_head, device),
    ]
    if kept.fused not in (0, width):
        found.append(MemoryItem("weights cast", kept.fused * policy.matrices, "held", "in the type of the matrix products"))
    if held is not None:
        found.append(held)
    if critic is not None:
        # The critic learns after the policy, whose activations are freed by then.
        more = sum(forward_and_back(work, *critic, recompute)) - activations - backward - REFILLED * there
        found += [MemoryItem("critic's activations", more, "train", "what exceeds the policy's freed activations")] * (more > 0)
    if work.samples and not work.engine:
        slots = f"{work.slots} sequences"
        phase: Phase = "held" if device == "cuda" else "sample"  # recorded steps keep their cache while the run trains
        found.append(MemoryItem(CACHE, cache_bytes(work, policy, kept, width, device), phase, slots))
        if kept.fused == 4 or (kept.fused and multiplies_bfloat16()):
            layer = kept.fused * policy.matrices // policy.layers
            whole = min(policy.layers, LIMIT // layer)
            head = kept.fused * policy.head
            says = f"{whole} layers and the head, packed for decoding"
            found.append(MemoryItem("packed weights", whole * layer + head * (head <= HEAD_LIMIT), "sample", says))
        # Log-probs, and in float64 the probabilities and their cumulative sum.
        found.append(
            MemoryItem("sampler's logits", work.slots * policy.vocabulary * 24, "sample", f"{slots} × {policy.vocabulary}")
        )
    return found


def kept_size(work: Work, policy: Shape, kept: Terms) -> float:
    """Return the bytes of all activations of a step that sampling computes and training can reuse."""
    return kept.token * policy.layers * work.rows * (work.lengths.prompt + work.members * work.lengths.completion)


def _kept_item(size: float, limit: float) -> MemoryItem:
    """Return the item of the activations that are kept from sampling until the update. Those beyond the limit are dropped."""
    if size <= limit:
        return MemoryItem(KEPT, size, "held", "so that training needs no forward pass")
    return MemoryItem(KEPT, limit, "sample", f"dropped above {limit / 1e9:.1f} GB")


def _backward(policy: Shape, tokens: int) -> float:
    """Return the bytes of gradients in one layer's backward pass: those of its feed-forward block and the residual stream."""
    return 4.0 * tokens * (3 * policy.inner + 3 * policy.hidden)


def _logits(work: Work, policy: Shape) -> int:
    """Return the number of logits in the largest micro-batch."""
    return min(work.micro_tokens, work.micro_completions * work.lengths.completion) * policy.vocabulary


def _is_closed(work: Work, policy: Shape) -> bool:
    """Return True if the head's gradient is computed in closed form (`models/logprobs.py`)."""
    return _logits(work, policy) > TILE_ELEMENTS and work.closed_head


def head_slack(work: Work, policy: Shape, width: int, device: str) -> float:
    """Return the bytes of free but unusable blocks that the allocator holds because of a trained head."""
    return BLOCKS[device][_is_closed(work, policy)] * width * policy.head


def _head(work: Work, policy: Shape, width: int, learns_head: bool, device: str) -> MemoryItem:
    """Return the item of the head: a chunk of logits with its backward pass, and the head's gradient before accumulation."""
    whole, closed = _logits(work, policy), _is_closed(work, policy)
    both = 4.0 if width == 4 else 4.0 + width  # bytes of half-precision numbers and their float32 copies
    chunk = float(width) if device == "cuda" else both  # a GPU's kernels overwrite the logits
    limit = TILE_ELEMENTS if closed else CHUNK_ELEMENTS
    if device == "cuda":
        limit *= TILE_ON_GPU if closed else CHUNK_ON_GPU
    elements = min(whole, limit)
    size = elements * (chunk if closed else 4.0 * (CHUNKS + 2 * work.entropy))
    if learns_head and not (closed and width == 4):
        # The gradient before accumulation, and the sum so far, if there is one.
        size += (both if closed else 4.0) * policy.head * (1 + (work.micro_batches > 1 and (whole > limit or policy.tied)))
    return MemoryItem(
        "head",
        size,
        "train",
        f"{count(whole / policy.vocabulary)} targets × {policy.vocabulary}, at most {limit >> 20} Mi logits at once",
    )


def load_items(parts: list[ModelRole]) -> list[MemoryItem]:
    """Return the item of the memory-mapped file from which weights are read. Its pages count as long as it is mapped."""
    return [MemoryItem("weights file", max(p.parameters * p.width for p in parts), "load", "memory-mapped while read")]


@dataclass(frozen=True)
class PeakMemory:
    """The memory items of a process and their peak, which is the permanent items plus the largest phase.

    `process` is a key of `BASELINE`, `allocator` a key of `SLACK`, and `beside_head` the bytes of `head_slack`.
    """

    items: tuple[MemoryItem, ...]
    allocator: str
    process: str
    beside_head: float

    def of(self, phase: Phase) -> float:
        """Return the bytes of one phase's items."""
        return sum(item.bytes for item in self.items if item.phase == phase)

    @property
    def slack(self) -> float:
        """The bytes that the allocator holds beyond the living tensors."""
        comes_and_goes = (i for i in self.items if i.phase in ("train", "sample") or i.name == KEPT)
        rest = sum(i.bytes for i in comes_and_goes if i.name != "head")
        return self.beside_head + SLACK[self.allocator] * rest

    @property
    def baseline(self) -> float:
        """The bytes of the process itself."""
        return BASELINE[self.process]

    @property
    def phase(self) -> Phase:
        """The phase in which the peak occurs."""
        phases: tuple[Phase, ...] = ("train", "sample", "load")
        return max(phases, key=self._beside_weights)

    @property
    def peak(self) -> float:
        """The bytes at the peak."""
        return self.baseline + self.of("weights") + self._beside_weights(self.phase)

    def _beside_weights(self, phase: Phase) -> float:
        return self.of("load") if phase == "load" else self.of("held") + self.of(phase) + self.slack


def roles_of(
    policy: ModelRole, reference: Shape | None, critic: tuple[Shape, int] | None, rewards: list[tuple[str, Shape]]
) -> list[ModelRole]:
    """Return all models of the run: the policy and, if given, the reference, the critic and the reward models.

    `critic` is (shape, number of recomputed gradients).
    """
    found = [policy]
    if reference is not None:
        found.append(ModelRole("reference", reference.parameters, 0, policy.width))
    if critic is not None:
        size = critic[0].scalar_parameters
        own = replace(
            policy,
            name="critic",
            parameters=size,
            learns=size,
            adapter=0,
            saved=0.0,
            recomputed=critic[1],
            coarse=size if policy.coarse else 0,
        )
        found.append(own)
    return found + [ModelRole(f"reward model {name}", shape.scalar_parameters, 0, policy.width) for name, shape in rewards]


def sharded_items(parts: list[ModelRole], policy: Shape, ranks: int, samples: bool, once: bool) -> Iterator[MemoryItem]:
    """Yield the items of one of `ranks` processes with sharded models.

    They are its shards, the layers that are gathered for computing, and, if it `samples`, a full copy of the model. If gradients
    are reduced only `once` in a step, they are stored in full until then.
    """
    for part in parts:
        for item in part.items():
            whole = item.name.startswith("reward model")
            yield item if whole else replace(item, bytes=item.bytes / ranks, note=f"{item.note}, a shard of {ranks}")
    width, layer = parts[0].width, policy.matrices / policy.layers
    ends = policy.head + (0 if policy.tied else policy.vocabulary * policy.hidden)
    yield MemoryItem("whole weights", width * (ends + 2 * layer), "train", "unsharded embedding, head and two layers")
    learns = parts[0].learns > 0
    yield MemoryItem("whole gradients", learns * (width + 4) * (ends + layer), "train", "unsharded embedding, head and layer")
    if once:
        yield MemoryItem("gradients of a step", 4 * (parts[0].adapter or parts[0].learns), "train", "unsharded, on each process")
    if samples:
        yield MemoryItem(COPY, width * policy.parameters, "weights", "unsharded, on each process")


def by_weights(parameters: float, *, critic: bool, width: int = 2) -> dict[str, float]:
    """Return model -> bytes by the common rule of thumb, which ignores gradients and activations.

    Policy and critic count three times (weights and AdamW's two moments, all of `width` bytes per number). Reference and reward
    model count once.
    """
    one = parameters * width
    return {"policy": 3 * one, "reference": one, **({"critic": 3 * one} if critic else {}), "reward model": one}
