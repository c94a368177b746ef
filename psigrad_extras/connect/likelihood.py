"""The likelihood of given texts under a model, and a test of everyday knowledge that training may have damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from psigrad.language import data
from psigrad.language.data.dataset_rows import BadRow, Row, RowError
from psigrad.language.data.templates import encode_after, prompt_ids
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups, Ids
from psigrad.language.rewards.benchmarks import letters_of
from psigrad.language.rollout.types import Completion

EVERYDAY = Path(data.__file__).parent / "everyday.jsonl"
"""A file of 110 sentence starts, each with two or four endings, of which one is right: 60 facts that every child knows, and 50
points of English grammar. No item is about arithmetic."""
_CHOICES = "give a list of choices, or the columns A, B, …, or remove --likelihood"


class Likelihood(NamedTuple):
    """The log p(continuation | context) in nats. `greedy` is True if greedy decoding would write the continuation."""

    logp: float
    greedy: bool


class Chosen(NamedTuple):
    """The result of an item of `EVERYDAY`: True if the most likely ending is the right one, and the right one's log p in nats."""

    right: bool
    logp: float


@torch.no_grad()
def likelihoods(model: LanguageModel, asked: Sequence[tuple[Ids, Ids]], micro_batch_tokens: int = 4096) -> list[Likelihood]:
    """Return the likelihood of each (context, continuation), given as token ids, by packed forward passes.

    A shared context is computed once. No context may be empty, since the first token must follow something.
    """
    contexts: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(asked):
        contexts.setdefault(tuple(context), []).append(i)
    found: list[Likelihood] = [Likelihood(0.0, True)] * len(asked)
    part: list[tuple[tuple[int, ...], list[int]]] = []
    size = 0
    for context, places in [*contexts.items(), ((), [])]:
        length = len(context) + sum(len(asked[i][1]) for i in places)
        if part and (not places or size + length > micro_batch_tokens):
            _fill(model, asked, part, found)
            part, size = [], 0
        part.append((context, places))
        size += length
    return found


def _fill(
    model: LanguageModel,
    asked: Sequence[tuple[Ids, Ids]],
    part: Sequence[tuple[tuple[int, ...], list[int]]],
    found: list[Likelihood],
) -> None:
    groups = Groups([context for context, _ in part], [[asked[i][1] for i in places] for _, places in part])
    stats, targets = model.stats(groups, accuracy=True)
    assert stats.hit is not None
    order = [i for _, places in part for i in places]
    logps: list[list[float]] = [[] for _ in order]
    hits = [True] * len(order)
    for n, logp, hit in zip(targets.n.tolist(), stats.logp.tolist(), stats.hit.tolist(), strict=True):
        logps[n].append(logp)
        hits[n] = hits[n] and bool(hit)
    for n, i in enumerate(order):
        found[i] = Likelihood(math.fsum(logps[n]), hits[n])


def likeliest_letters(model: LanguageModel, rows: Sequence[Row]) -> list[tuple[tuple[int, ...], Completion, int, str]]:
    """Return (prompt tokens, the most likely letter as a completion, 0 as version, the letter as text) for each question.

    After a plain text, the letter has a space before it, as in lm-eval. At the start of an assistant's turn, it has none. Raises
    `RowError` for a row without choices.
    """
    prompts = [tuple(prompt_ids(model.tokenizer, row)) for row in rows]
    written: list[list[tuple[str, tuple[int, ...]]]] = []
    for row in rows:
        gap, text = (" ", row.prompt) if isinstance(row.prompt, str) else ("", "")
        letters = letters_of(row.columns)
        if not letters:
            raise RowError(BadRow(row.source, "choices", f"is missing, and --likelihood compares choices; {_CHOICES}"))
        written.append([(x, tuple(encode_after(model.tokenizer, str(text), gap + x))) for x in letters])
    asked = [(prompt, ids) for prompt, own in zip(prompts, written, strict=True) for _, ids in own]
    found = iter(likelihoods(model, asked))
    made = []
    for prompt, own in zip(prompts, written, strict=True):
        logps = [next(found).logp for _ in own]
        best = max(range(len(own)), key=logps.__getitem__)
        letter, ids = own[best]
        # The log-prob belongs to the whole letter, which almost always is one token.
        logprobs = (logps[best], *[0.0] * (len(ids) - 1))
        made.append((prompt, Completion(ids, logprobs, logprobs, "stop", 0), 0, letter))
    return made


def everyday(model: LanguageModel) -> list[Chosen]:
    """Return the model's result for each item of `EVERYDAY`."""
    items = [json.loads(line) for line in EVERYDAY.read_text().splitlines()]
    asked = []
    for item in items:
        context = model.tokenizer(item["query"])["input_ids"]
        asked += [(context, encode_after(model.tokenizer, item["query"], f" {choice}")) for choice in item["choices"]]
    found = iter(likelihoods(model, asked))
    chosen = []
    for item in items:
        logps = [next(found).logp for _ in item["choices"]]
        chosen.append(Chosen(max(range(len(logps)), key=logps.__getitem__) == item["gold"], logps[item["gold"]]))
    return chosen
