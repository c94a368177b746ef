"""Scorers without worker processes: reward models, and weighted sums of other scorers."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from psigrad.errors import UserError
from psigrad.language.data.chat.dialect import specials_of
from psigrad.language.data.chat.messages import Message
from psigrad.language.data.dataset_layouts import to_turns
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import example, prompt_ids
from psigrad.language.models.packing import Groups, Ids, pack_by_tokens
from psigrad.language.models.scalar_model import STEP_SEPARATOR, ScalarModel
from psigrad.language.rewards import Failed, Result, Samples, Scored, Scorer, Scoring, Unscored
from psigrad.language.rollout.scoring import concatenate, transcript_of
from psigrad.language.training.offline.reward_task import step_values

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class ModelScorer:
    """A reward model as a `Scorer`.

    With `same_tokens`, it reads the policy's tokens where possible. Otherwise it renders the text with its own template.
    """

    name: str
    model: ScalarModel
    same_tokens: bool
    micro_batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.separator and not self.same_tokens:
            raise UserError(
                f"The process reward model {self.name} and the policy differ in tokenizer, chat template or plain_prompts, so "
                "the steps cannot be found in a completion's tokens; train the reward model from a model of the policy's family."
            )

    @property
    def separator(self) -> str:
        """The text that ends a step, for a process reward model; empty if the model scores complete texts."""
        return str(getattr(self.model.network.config, STEP_SEPARATOR, "") or "")

    def begin(self) -> Scoring:
        """Return a `Scoring` that scores all groups after sampling has ended, because the policy needs the device until then."""
        return Scoring(self._score_groups)

    def _score_groups(self, groups: Sequence[Samples]) -> list[Result]:
        with _ONE_AT_A_TIME:  # concurrent collector threads would each use the memory of a pass
            return self.score(concatenate(groups))

    def score(self, samples: Samples) -> list[Result]:
        """Return the model's score of every completion."""
        own = None if samples.prompt_ids is None else list(zip(samples.prompt_ids, samples.completion_ids, strict=True))
        if self.separator and own is not None:
            return self._where_it_fits(own, self._by_steps)
        rows = [self._row(samples, i) for i in range(len(samples))]
        pairs = [self._tokens(row, own[i] if own else None) for i, row in enumerate(rows)]
        return self._where_it_fits(pairs, self._by_texts)

    def _where_it_fits(self, pairs: Sequence[tuple[Ids, Ids]], score: Callable[..., list[Result]]) -> list[Result]:
        """Apply `score` to the texts that fit the model's maximum length. Return its results, and `Unscored` for longer texts."""
        long = [describe_overflow(self.model, pair) for pair in pairs]
        found = iter(score([pair for pair, why in zip(pairs, long, strict=True) if not why]))
        return [Unscored(f"the reward model {self.name} cannot read {why}") if why else next(found) for why in long]

    def _by_texts(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Result]:
        return [self._result(value) for value in score_all(self.model, pairs, self.micro_batch_tokens)]

    def _row(self, samples: Samples, i: int) -> Row:
        """Return completion `i` as a dataset row."""
        prompt, completion = samples.prompts[i], samples.completions[i]
        if isinstance(prompt, str) and not isinstance(completion, str):
            # Messages cannot follow a text, so one of the two is converted.
            talks = bool(self.model.tokenizer.chat_template) and not self.model.plain_prompts
            turn: Message = {"role": "user", "content": prompt}
            prompt, completion = ([turn], completion) if talks else (prompt, transcript_of(completion))
        columns = {name: values[i] for name, values in samples.columns.items() if values[i] is not None}
        return to_turns(self.model.tokenizer, Row("a completion", prompt, completion, columns=columns), self.model.plain_prompts)

    def _tokens(self, row: Row, own: tuple[Ids, Ids] | None) -> tuple[Ids, Ids]:
        """Return (prompt tokens, completion tokens): those of the policy, `own`, where possible; otherwise those of `row`."""
        end = self._ends[isinstance(row.prompt, str)] if self.same_tokens and own else None
        if end is None or own is None:
            return [], answer_ids(self.model, row)  # the prompt is among them
        if not end:
            return own
        prompt, ids = own[0], list(own[1])
        other = int(bool(ids) and ids[-1] in specials_of(self.model.tokenizer).ids)  # drops a different stop token
        written = next((k for k in range(len(end), 0, -1) if ids[-k:] == end[:k]), other)
        return prompt, [*ids[: len(ids) - written], *end]

    @cached_property
    def _ends(self) -> dict[bool, list[int] | None]:
        return {plain: answer_end(self.model.tokenizer, plain) for plain in (True, False)}

    @torch.no_grad()
    def _by_steps(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Result]:
        """Return the reward of each (prompt tokens, completion tokens): the mean of σ(score) over the completion's n steps.

        The result also has each step's σ(score)/n, with the index of the step's last token.
        """
        found: list[Result] = [Scored(0.0, {self.name: 0.0})] * len(pairs)
        ends = [step_ends(self.model.tokenizer, completion, self.separator) for _, completion in pairs]
        wanted = [i for i, places in enumerate(ends) if places]
        lengths = [len(pairs[i][0]) + len(pairs[i][1]) for i in wanted]
        for part in pack_by_tokens(lengths, self.micro_batch_tokens):
            chosen = [wanted[place] for place in part]
            texts = [([*pairs[i][0], *pairs[i][1]], [len(pairs[i][0]) + end for end in ends[i]]) for i in chosen]
            for i, values in zip(chosen, step_values(self.model, texts), strict=True):
                right = torch.sigmoid(values.float()).tolist()
                steps = tuple((end, r / len(right)) for end, r in zip(ends[i], right, strict=True))
                found[i] = Scored(0.0, {self.name: math.fsum(right) / len(right)}, steps)
        return found

    def _result(self, value: float) -> Result:
        if not math.isfinite(value):
            return Unscored(f"the reward model {self.name} returned {value}")
        return Scored(value, {self.name: value})


def describe_overflow(model: ScalarModel, pair: tuple[Ids, Ids]) -> str:
    """Return what the model cannot read, such as "9 tokens, since it has 8 positions"; "" if the pair fits the model."""
    tokens = sum(map(len, pair))
    return f"{tokens} tokens, since it has {model.max_length} positions" if tokens > model.max_length else ""


def answer_ids(model: ScalarModel, row: Row) -> Ids:
    """Return the tokens of `row`, rendered as in the reward model's training. The value at the last token is the score."""
    return example(model.tokenizer, to_turns(model.tokenizer, row, model.plain_prompts)).ids


def answer_end(tokenizer: Any, plain: bool) -> list[int] | None:
    """Return the tokens that end every answer. With `plain`, answers are text without a chat template.

    Return None if the template writes something, such as an empty thinking block, before the answer.
    """
    rows = [Row("a test conversation", "a", text) for text in ("b", "c")]
    rows = rows if plain else [to_turns(tokenizer, row) for row in rows]
    try:
        head, (one, other) = list(prompt_ids(tokenizer, rows[0])), (example(tokenizer, row).ids for row in rows)
    except UserError:  # the template does not support the test conversation
        return []
    if one[: len(head)] != head or one[len(head)] == other[len(head)]:
        return None
    same = itertools.takewhile(lambda both: both[0] == both[1], zip(reversed(one), reversed(other), strict=False))
    return [token for token, _ in same][::-1]


def step_ends(tokenizer: Any, ids: Ids, separator: str) -> list[int]:
    """Return the index of each step's last token. A step ends at a token whose text contains the separator.

    The last token before EOS ends the last step, with or without a separator.
    """
    ends = [i for i, token in enumerate(ids) if separator in tokenizer.decode([token])]
    last = len(ids) - 1
    while last >= 0 and ids[last] == tokenizer.eos_token_id:
        last -= 1
    return ends if last < 0 or (ends and ends[-1] >= last) else [*ends, last]


@torch.no_grad()
def score_all(model: ScalarModel, pairs: Sequence[tuple[Ids, Ids]], budget: int) -> list[float]:
    """Return the score of every (prompt, completion), in forward passes of at most `budget` tokens.

    A prompt that several adjacent pairs share is computed once.
    """
    scores = [0.0] * len(pairs)
    for part in pack_by_tokens([len(p) + len(c) for p, c in pairs], budget):
        prompts: list[Ids] = []
        completions: list[list[Ids]] = []
        for i in part:
            prompt, completion = pairs[i]
            if not prompt:  # an unsplit text: its first token serves as the prompt
                prompt, completion = completion[:1], completion[1:]
            if not prompts or list(prompts[-1]) != list(prompt):
                prompts.append(prompt)
                completions.append([])
            completions[-1].append(completion)
        for i, value in zip(part, model.scores(Groups(prompts, completions)).tolist(), strict=True):
            scores[i] = value
    return scores


@dataclass(frozen=True)
class Mixture:
    """A weighted sum of several scorers. A completion stays unscored if one of the scorers cannot score it."""

    scorers: Sequence[Scorer]
    weights: Sequence[float]

    def begin(self) -> Scoring:
        """Return a `Scoring` that passes each group to all scorers at once, so that no scorer waits for another."""
        return MixedScoring([scorer.begin() for scorer in self.scorers], self.weights)


class MixedScoring(Scoring):
    """The `Scoring` that `Mixture.begin` returns. It sends groups to all scorers and adds their weighted rewards."""

    def __init__(self, parts: Sequence[Scoring], weights: Sequence[float]) -> None:
        self._parts, self._weights = parts, weights

    def add(self, group: Samples) -> None:
        """Send one group to every scorer."""
        for part in self._parts:
            part.add(group)

    def poll(self) -> None:
        """Let every scorer collect finished results without waiting."""
        for part in self._parts:
            part.poll()

    def results(self) -> list[Result]:
        """Wait for all scorers, and return the weighted sum of each completion's rewards."""
        return [self._add(results) for results in zip(*(part.results() for part in self._parts), strict=True)]

    def _add(self, results: Sequence[Result]) -> Result:
        total, fault = 0.0, None
        parts: dict[str, float | None] = {}
        steps: list[tuple[int, float]] = []
        for result, weight in zip(results, self._weights, strict=True):
            if isinstance(result, Unscored):
                return result
            parts |= result.parts
            total += weight * result.value
            steps += [(place, weight * reward) for place, reward in getattr(result, "steps", ())]
            fault = fault or (result if isinstance(result, Failed) else None)
        return Scored(total, parts, tuple(steps)) if fault is None else Failed(total, fault.reason, parts)
