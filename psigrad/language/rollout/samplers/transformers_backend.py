"""A sampler that calls transformers' `generate`. It is slower than the embedded sampler, and serves to check it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, __version__

from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.distribution import draw
from psigrad.language.rollout.samplers.embedded import PolicyWeights, check_room
from psigrad.language.rollout.types import Completion, DrawnToken, FinishReason, Request, SamplingParams


class _Drawer(LogitsProcessor):
    """A logits processor that draws a token with psigrad's random numbers, and sets all other logits to -inf."""

    def __init__(self, params: SamplingParams, seeds: np.ndarray) -> None:
        self.params, self.seeds = params, seeds
        self.logprobs: list[Tensor] = []
        self.sampling_logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = draw(scores, self.params, self.seeds, np.full(len(self.seeds), len(self.logprobs)))
        self.logprobs.append(drawn.logprobs)
        self.sampling_logprobs.append(drawn.sampling_logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn.ids[:, None], 0.0)  # a greedy search returns this token


class TransformersSampler(PolicyWeights):
    """A sampler that runs transformers' `generate` on left-padded batches of up to `max_batch` sequences; see `Sampler`."""

    engine = f"transformers {__version__}"

    def __init__(self, model: LanguageModel, max_batch: int = 256, exact: bool = True) -> None:
        self.model, self.max_batch, self.exact = model, max_batch, exact

    @torch.inference_mode()
    def steps(
        self, requests: list[Request], params: SamplingParams, cache: ActivationCache | None = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Sample all requests, then yield all completions together; see `Sampler`. Raises `UserError` if a prompt is too long."""
        check_room(self.model, requests, params)
        self.model.network.eval()
        flat = [(request.prompt_ids, seed) for request in requests for seed in request.seeds]
        done = iter(
            [c for i in range(0, len(flat), self.max_batch) for c in self._generate(flat[i : i + self.max_batch], params)]
        )
        yield [(place, [next(done) for _ in request.seeds]) for place, request in enumerate(requests)]

    @torch.inference_mode()
    def stream(self, request: Request, params: SamplingParams) -> Iterator[DrawnToken]:
        """Yield one completion's tokens as they are drawn: the same tokens as from `sample`. The request must have one seed."""
        check_room(self.model, [request], params)
        self.model.network.eval()
        stops = {*self.model.eos_token_ids, *params.stop_token_ids}
        seed, cache = np.array(request.seeds, dtype=np.uint64), None
        ids = torch.tensor([request.prompt_ids], device=self.model.device)
        for place in range(params.max_tokens):
            out = self.model.network(input_ids=ids, past_key_values=cache, use_cache=True)
            drawn, cache = draw(out.logits[:, -1], params, seed, np.array([place])), out.past_key_values
            ids = drawn.ids[:, None]
            yield DrawnToken(int(ids), float(drawn.logprobs), float(drawn.sampling_logprobs))
            if int(ids) in stops:
                return

    def _generate(self, batch: list[tuple[tuple[int, ...], int]], params: SamplingParams) -> list[Completion]:
        stops = sorted({*self.model.eos_token_ids, *params.stop_token_ids})
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt, _ in batch], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch], device=self.model.device)
        drawer = _Drawer(params, np.array([seed for _, seed in batch], dtype=np.uint64))
        config = GenerationConfig(max_new_tokens=params.max_tokens, do_sample=False, eos_token_id=stops, pad_token_id=stops[0])
        # `generate` fills missing values from the model's own config (Qwen2.5's has a repetition penalty). The copy's is empty.
        bare: Any = copy.copy(self.model.network)
        bare.generation_config = GenerationConfig()
        out = bare.generate(ids, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList([drawer]))
        tokens = out[:, width:].tolist()
        logprobs, sampling = (torch.stack(x, 1).float().tolist() for x in (drawer.logprobs, drawer.sampling_logprobs))
        return [_completion(tokens[i], logprobs[i], sampling[i], set(stops), seed) for i, (_, seed) in enumerate(batch)]


def _completion(ids: list[int], logprobs: list[float], sampling: list[float], stops: set[int], seed: int) -> Completion:
    """Return the completion up to and including its first stop token. `sampling` has the log-probs after top-k, top-p, min-p."""
    count = next((t + 1 for t, token in enumerate(ids) if token in stops), len(ids))
    reason: FinishReason = "stop" if ids[count - 1] in stops else "length"
    return Completion(tuple(ids[:count]), tuple(logprobs[:count]), tuple(sampling[:count]), reason, seed)
