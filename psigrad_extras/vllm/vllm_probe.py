"""The reference for an engine's log-probs: texts that the model writes, evaluated in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from psigrad.language.models import sharded
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.probe import in_precision
from psigrad.processes.parallel.world import Ranks

# The bounds on the mean absolute difference of log-probs. In float32, another order of summation changes them by about 1e-6 here,
# and by 1e-5 in large models. In half precision, the engine's distance from the trainer's float32 log-probs may be 1.1 times that
# of the trainer's own half-precision log-probs, over all tokens of the probe.
TOLERANCE, SPREAD = 1e-4, 1.1
# The number of texts, and the tokens of each.
TEXTS, LENGTH = 16, 128
# (the texts, their log-probs in float32, the mean distance from these of log-probs in the trainer's precision).
Truth = tuple[list[list[int]], Tensor, float]


def log_probs(model: LanguageModel, probe: Sequence[Sequence[int]]) -> Tensor:
    """Return the trainer's log-probs of each text's tokens after its first, concatenated."""
    return torch.cat([_log_probs_of(model, text) for text in probe])


@torch.no_grad()
def _log_probs_of(model: LanguageModel, text: Sequence[int]) -> Tensor:
    ids = torch.tensor([list(text)], device=model.device)
    logp = model.network(ids).logits[0, :-1].float().log_softmax(-1)
    found: Tensor = logp.gather(-1, ids[0, 1:, None])[:, 0].cpu()
    return found


def distance(one: Tensor, other: Tensor) -> float:
    """Return the mean absolute difference of two tensors."""
    return float((one - other).abs().mean())


def exactly(model: LanguageModel, probe: Sequence[Sequence[int]]) -> tuple[Tensor, float]:
    """Return (the log-probs in float32, the mean distance from them of log-probs in the model's precision).

    The distance is that with the trainer's attention or with plain attention, whichever is larger; 0 in float32. One correct
    computation in bfloat16 may be a few percent farther from float32 than another. An error of 1 % in a layer is detectable over
    two thousand tokens, but not over a hundred.
    """
    hf = model.network
    if hf.dtype in (torch.float32, torch.float64):
        return log_probs(model, probe), 0.0
    with in_precision(hf, torch.float32):
        exact = log_probs(model, probe)
    own, before = distance(log_probs(model, probe), exact), hf.config._attn_implementation
    with contextlib.suppress(ValueError, TypeError, ImportError):
        try:
            hf.set_attn_implementation("eager")
            own = max(own, distance(log_probs(model, probe), exact))
        finally:
            hf.set_attn_implementation(before)
    return exact, own


@torch.no_grad()
def written(model: LanguageModel, texts: int, length: int) -> list[list[int]]:
    """Return token ids of texts sampled from the model.

    Random ids would not do: for them, two correct computations in bfloat16 differ widely.
    """
    hf, draw = model.network, torch.Generator().manual_seed(0)
    first = model.tokenizer.bos_token_id if model.tokenizer.bos_token_id is not None else model.eos_token_ids[0]
    ids = torch.full((texts, 1), first, device=model.device)
    out = hf(input_ids=ids, use_cache=True)
    while ids.shape[1] < min(length, model.max_length - 1):
        chances = out.logits[:, -1, : model.vocabulary].float().softmax(-1)
        drawn = torch.multinomial(chances.cpu(), 1, generator=draw).to(model.device)
        ids = torch.cat([ids, drawn], 1)
        out = hf(input_ids=drawn, past_key_values=out.past_key_values, use_cache=True)
    rows: list[list[int]] = ids.tolist()
    return rows


def truth_of(model: LanguageModel) -> Truth:
    """Return the `Truth` of a model: texts that it writes, and their log-probs in float32."""
    probe = written(model, TEXTS, LENGTH)
    return probe, *exactly(model, probe)


def truth_of_shards(model: LanguageModel, whole: Callable[[], LanguageModel] | None) -> Truth:
    """Return the `Truth` of a sharded model, from a full copy on the host of rank 0."""
    assert whole is not None
    twin = whole() if Ranks().rank == 0 else None
    learns, own = set(model.trainable()), {} if twin is None else dict(twin.network.named_parameters())
    with torch.no_grad():
        for name, weight in sharded.gather(model, learns):
            if own:
                own[name].copy_(weight)
    return Ranks().broadcast(None if twin is None else truth_of(twin))  # type: ignore[return-value]


def drawn_tokens(model: LanguageModel, count: int) -> list[int]:
    """Return token ids drawn with a fixed seed."""
    ids: list[int] = np.random.default_rng(0).integers(0, model.vocabulary, min(count, model.max_length - 1)).tolist()
    return ids
