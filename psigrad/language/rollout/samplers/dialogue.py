"""Episodes whose keys, values and states stay cached between turns, so that a turn computes only its new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from psigrad.language.images import FIRST
from psigrad.language.models.attention import on_device
from psigrad.language.models.fused.caches import PackedWeights
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.cache import KVCache, SharedCache, prefill
from psigrad.language.rollout.samplers.distribution import draw
from psigrad.language.rollout.types import Completion, Dialogue, NextTurn, SamplingParams

# A decoding step costs as much as the prefill of this many tokens, even with few sequences.
STEP = 8


class SlotCache(KVCache):
    """A `KVCache` with numbered slots. `select_slots` chooses the slots to decode. The other slots keep their tokens."""

    def __init__(self, slots: int, longest: int, packed_weights: PackedWeights | None = None) -> None:
        """Create `slots` empty slots with room for `longest` tokens each. `packed_weights` caches the model's packed matrices."""
        super().__init__(slots, longest, packed_weights)
        self._numbers = np.arange(slots)
        """[slots] the number of the slot that each row of the tensors belongs to."""
        self._shifts = torch.zeros(slots, dtype=torch.long)
        """[slots] the position of each slot's next token minus its index in the slot, by the slot's number."""

    @property
    def selection(self) -> np.ndarray:
        """The arguments of `select_slots` for the active slots, as an array [3, active]: prompt, number of tokens, slot."""
        self._shifts[torch.from_numpy(self._numbers[: self.active])] = self.shifts
        # The prompt is always 0, since only the slots of a `SharedCache` share prompts.
        return np.stack([0 * self._numbers[: self.active], self.lengths.numpy(), self._numbers[: self.active]])

    def select_slots(self, prompt: np.ndarray, lengths: np.ndarray, slots: np.ndarray) -> None:
        """Move `slots` to the first rows, which the next steps decode. They have `lengths` tokens. `prompt` is ignored."""
        numbers, rows = self._numbers.copy(), np.arange(self.slots)
        for row, slot in enumerate(slots):
            here = int(np.flatnonzero(numbers == slot)[0])
            for table in (numbers, rows):
                table[[row, here]] = table[[here, row]]
        moved = np.flatnonzero(rows != np.arange(self.slots))
        to, source = torch.from_numpy(moved), torch.from_numpy(rows[moved])
        for x in (*(x for pair in self.layers.values() for x in pair), *self.states.values()):
            x[to] = x[source]
        self._numbers, self.lengths = numbers, torch.from_numpy(lengths.copy())
        self.shifts = self._shifts[torch.from_numpy(slots[: len(lengths)].copy())]

    def retain_slots(self, prompt: np.ndarray, slots: np.ndarray) -> None:
        """Keep the tokens of `slots` for a later selection. Other slots may be overwritten. No slot is active afterwards."""
        self.select_slots(prompt, self._numbers[:0], np.setdiff1d(self._numbers, slots))


class CachedDialogue(Dialogue):
    """The `Dialogue` (episodes of several turns) of the embedded sampler on a CPU.

    In a later turn, an episode first reads the environment's tokens, one per decoding step. If this is impossible or too slow,
    all episodes of the turn are prefilled again.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> None:
        self.model, self.params = model, params
        self.contexts = [list(prompt) for prompt in prompts]
        self.stops = np.array(sorted({*model.eos_token_ids, *params.stop_token_ids}))
        room = (len(prompts), model.max_length)
        self.cache: SharedCache | SlotCache
        if (decoder := model.decoder) is None:
            self.cache = SlotCache(*room, None if model.module_kernels is None else PackedWeights())
        else:
            self.cache = SharedCache(*room, decoder.heads, decoder.dtype, decoder.may_dequantise)
        self.cached = np.zeros(len(prompts), dtype=bool)
        """[episodes] True if the cache has the episode's tokens."""
        # For each episode: its prompt in the cache, the number of cached tokens after it, and its slot.
        self.prompt, self.lengths, self.slots = (np.zeros(len(prompts), dtype=np.int64) for _ in range(3))
        self.prefilled = 0
        """The number of tokens computed by prefills so far."""

    @torch.inference_mode()
    def turns(self, next_turns: Mapping[int, NextTurn]) -> Iterator[tuple[int, Completion]]:
        """Sample the next turn of each episode in `next_turns`. Reuse cached keys and values if possible; see `Dialogue`."""
        self.model.switch(training=False)
        unread = {}
        for i, (ids, _, restart) in next_turns.items():
            # The last token of the previous turn was drawn but never read.
            unread[i] = [*self.contexts[i][-1:], *ids]
            self.contexts[i] = [*([] if restart else self.contexts[i]), *ids]
            self.cached[i] &= not restart
        live = sorted(next_turns)
        longest, total = max(map(len, unread.values())), sum(len(self.contexts[i]) for i in live)
        vision = self.model.vision
        whole = vision is not None and (vision.axes or vision.two_way)  # a new image must then be read in one pass
        images = whole and any(token >= FIRST for ids in unread.values() for token in ids)
        restart = images or not self.cached[live].all() or longest * max(STEP, len(live)) > total
        if not restart:
            live = sorted(live, key=lambda i: self.prompt[i])
            self.cache.select_slots(self.prompt[live], self.lengths[live], self.slots[live])
        turn = _Turn(self, live, {i: one.seed for i, one in next_turns.items()})
        if restart:
            turn.write(self._prefill(live), np.arange(len(live)))
        yield from turn.decode(self.cache, {} if restart else unread)

    def _prefill(self, live: Sequence[int]) -> torch.Tensor:
        """Prefill all tokens of the n episodes `live`, whose slots are then active. Return their last logits [n, V]."""
        firsts = [n for n, i in enumerate(live) if n == 0 or self.contexts[i] != self.contexts[live[n - 1]]]
        copies = on_device(np.cumsum([n in set(firsts) for n in range(len(live))]) - 1, self.model.device)
        prompts = [self.contexts[live[n]] for n in firsts]
        waiting = np.setdiff1d(np.flatnonzero(self.cached), live)
        self.cache.retain_slots(self.prompt[waiting], self.slots[waiting])
        logits = prefill(self.model, self.cache, prompts, copies, None)
        self.prompt[live], self.lengths[live], self.slots[live] = self.cache.selection
        self.cached[live] = True
        self.prefilled += sum(map(len, prompts))
        return logits


class _Turn:
    """One turn of several episodes. Row j of a decoding step belongs to episode `rows[j]`, whose turn has not ended yet."""

    def __init__(self, dialogue: CachedDialogue, live: Sequence[int], seeds: Mapping[int, int]) -> None:
        self.dialogue, self.seeds = dialogue, seeds
        self.ended: list[int] = []
        """The episodes whose turn has ended since the last call of `_pop_ended`."""
        self.rows = np.array(live, dtype=np.int64)
        self.ids: dict[int, list[int]] = {i: [] for i in live}
        self.logprobs: dict[int, list[float]] = {i: [] for i in live}
        self.sampling_logprobs: dict[int, list[float]] = {i: [] for i in live}

    def decode(self, cache: SharedCache | SlotCache, unread: dict[int, list[int]]) -> Iterator[tuple[int, Completion]]:
        """Decode token by token. Yield (episode, completion) when a turn ends. An episode first reads its `unread` tokens."""
        model = self.dialogue.model
        yield from self._pop_ended()
        while len(self.rows):
            reading = [len(unread.get(i, ())) > 1 for i in self.rows]
            last = [unread[i].pop(0) if unread.get(i) else self.ids[i][-1] for i in self.rows]
            step = cache.decode()
            hidden = model.forward(on_device(last, model.device)[:, None], step.positions[:, None], step, None)
            drawing = np.flatnonzero(~np.array(reading))
            if len(drawing):
                logits = model.head(hidden[torch.from_numpy(drawing).to(model.device), 0], cache.exact, cache.packed_weights)
                self.write(logits, drawing)
                yield from self._pop_ended()

    def write(self, logits: torch.Tensor, indices: np.ndarray) -> None:
        """Draw one token per row of `logits` for the episodes `rows[indices]`. If a turn ends, remove its episode from `rows`."""
        dialogue, rows = self.dialogue, self.rows[indices]
        counts = np.array([len(self.ids[i]) for i in rows])
        drawn = draw(logits, dialogue.params, np.array([self.seeds[i] for i in rows], dtype=np.uint64), counts)
        columns = (drawn.ids.tolist(), drawn.logprobs.tolist(), drawn.sampling_logprobs.tolist())
        ended = np.zeros(len(self.rows), dtype=bool)
        for place, i, token, logp, sampling in zip(indices, rows.tolist(), *columns, strict=True):
            self.ids[i].append(token)
            self.logprobs[i].append(logp)
            self.sampling_logprobs[i].append(sampling)
            ended[place] = token in dialogue.stops or len(self.ids[i]) == dialogue.params.max_tokens
        if ended.any():
            cache, order = dialogue.cache, np.flatnonzero(~ended)
            self.ended += self.rows[ended].tolist()
            selection = cache.selection
            dialogue.lengths[self.rows[ended]] = selection[1, ended]
            cache.select_slots(*selection.take(order, axis=1))
            self.rows = self.rows[order]

    def _pop_ended(self) -> list[tuple[int, Completion]]:
        ended, self.ended = self.ended, []
        return [(i, self._completion(i)) for i in ended]

    def _completion(self, i: int) -> Completion:
        """Return the completion that episode `i` sampled in this turn, and append it to the episode's context."""
        ids = self.ids[i]
        self.dialogue.contexts[i] += ids
        return Completion(
            ids=tuple(ids),
            logprobs=tuple(self.logprobs[i]),
            sampling_logprobs=tuple(self.sampling_logprobs[i]),
            finish_reason="stop" if ids[-1] in self.dialogue.stops else "length",
            seed=self.seeds[i],
        )
