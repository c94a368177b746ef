"""The subject of `psigrad check`: a model with prompts and completions, and the result of one check on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from psigrad import redaction
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.data.dataset_layouts import to_model_rows
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.sources import form_of, from_rows, read_rows
from psigrad.language.data.templates import prompt_ids
from psigrad.language.loading import samplers
from psigrad.language.loading.load_model import load_model
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.conversation import offer_tools
from psigrad.language.recipes.row_encoding import Encoder, encode_rows
from psigrad.language.recipes.row_limits import check_images
from psigrad.language.rollout.types import Prompt, Prompts, Request, Sampler, SamplingParams, Trajectory

# The number of prompts, of completions per prompt, and the limit of tokens in a completion.
PROMPTS, COMPLETIONS, TOKENS = 4, 3, 24
TEXTS = ("The capital of France is", "2 + 2 =", "Once upon a time there was a little", "def add(a, b):")
# Dtype -> bounds on the mean difference of log-probs in nats, and of gradients as a share of their norm. Sums in another order
# differ by about 1e-6 in float32. bfloat16 has 8 bits, and rounding accumulates in a deep network.
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 2e-1)}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    what: str
    value: float
    bound: float
    control: float
    """The value under a planted fault."""
    seconds: float = 0.0
    note: str = ""

    @property
    def verdict(self) -> str:
        """The verdict: ok, failed, or unproven if the planted fault stays within the bound."""
        if not self.value <= self.bound:
            return "failed"
        return "ok" if self.control > self.bound else "unproven"

    def row(self) -> dict[str, Any]:
        """Return the result as JSON: name, what, value, bound, control, verdict, seconds, note."""
        return vars(self) | {"verdict": self.verdict, "seconds": round(self.seconds, 3)}


@dataclass
class Subject:
    """The model to check, with prompts and its completions."""

    config: OnlineConfig
    model: LanguageModel
    sampler: Sampler
    params: SamplingParams
    dataset: list[Prompt]
    prompts: list[Prompt]
    trajectories: list[list[Trajectory]]
    samples: bool = True
    """False if the run samples no completions, so that a prompt may fill all positions but one."""

    @property
    def groups(self) -> Groups:
        """The prompts, each with all its completions."""
        completions = [[t.completion.ids for t in group] for group in self.trajectories]
        return Groups([group[0].prompt_ids for group in self.trajectories], completions)

    @property
    def alone(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """(prompt, completion) for every completion."""
        return [(t.prompt_ids, t.completion.ids) for group in self.trajectories for t in group]

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds for differences of log-probs and of gradients, by the model's dtype."""
        return BOUNDS.get(self.model.network.dtype, BOUNDS[torch.bfloat16])

    @torch.no_grad()
    def logp(self, groups: Groups, **how: Any) -> list[Tensor]:
        """Return the log-probs [length] of each completion under the model."""
        found = self.model.evaluate(groups, **how).logp
        lengths = [len(ids) for group in groups.completions for ids in group]
        return [row[:length] for row, length in zip(found, lengths, strict=True)]


def _rows(config: OnlineConfig, model: LanguageModel) -> list[Row]:
    """Return the rows of the dataset as prompts, whatever its type. For a dataset of plain texts, return these texts."""
    if not config.data.dataset:
        return from_rows([{"prompt": text} for text in TEXTS], "prompt-only").rows
    try:
        read = read_rows(config.data, "prompt-only", 0, config.run.seed)[0]
    except UserError:
        if (form := form_of(config.data)) in ("", "prompt-only"):
            raise
        read = read_rows(config.data, form, 0, config.run.seed)[0]
    rows = [Row(row.source, prompt=row.prompt or row.completion, columns=row.columns, raw_paths=row.raw_paths) for row in read]
    return to_model_rows(model.tokenizer, [rows], config.data.plain_prompts)[0]


def load_subject(config: OnlineConfig, *, samples: bool = True) -> Subject:
    """Load the model, and sample shortened completions with the run's settings."""
    model = load_model(config.model, config.run, None)
    short = replace(config.sampling, max_completion_length=min(TOKENS, config.sampling.max_completion_length))
    rows = offer_tools(config, _rows(config, model))
    check_images(config, model, rows)
    encoder = Encoder(model.tokenizer, lambda i: (i, prompt_ids(model.tokenizer, rows[i])))
    dataset = list(Prompts(rows, encode_rows(range(len(rows)), encoder, config.data, redaction.log)[0]))
    room = model.max_length - short.max_completion_length
    fitting = sorted((p for p in dataset if 0 < len(p.ids) <= room), key=lambda p: len(p.ids))
    unlike = list({tuple(p.ids): p for p in fitting}.values())  # with equal prompts, some errors would not be detected
    prompts = (unlike if len(unlike) > 1 else fitting)[:PROMPTS]
    if len(prompts) < 2:
        raise UserError("The check needs two prompts that fit into the model; give more or shorter prompts.")
    params = samplers.sampling_params(short, model, [p.row for p in prompts])
    sampler = samplers.make(config.sampling, model)
    groups = []  # different lengths, so that errors of padding and packing are detected
    for place, prompt in enumerate(prompts):
        request = Request(prompt.ids, tuple(range(100 * place, 100 * place + COMPLETIONS)))
        (completions,) = sampler.sample([request], replace(params, max_tokens=max(2, params.max_tokens - 3 * place)))
        groups.append([Trajectory(prompt.index, k, prompt.ids, c, 0) for k, c in enumerate(completions)])
    return Subject(config, model, sampler, params, dataset, prompts, groups, samples)
