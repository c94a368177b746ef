"""The conversion of trajectories to the arguments of TRL's reward functions: text and columns instead of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psigrad.language.data.chat.messages import Message
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import completion_for_reward, opened_thought, special_token_remover
from psigrad.language.rollout.collectors import PendingRewards, ToSamples
from psigrad.language.rollout.scoring import Samples, Scorer, turns_of
from psigrad.language.rollout.types import Trajectory


def reward_view(
    tokenizer: Any = None, plays: bool = False, skip_special_tokens: bool = True
) -> Callable[[Mapping[int, Row]], ToSamples]:
    """Return the `to_samples` function of a `ScoredRollout`. It turns trajectories into the samples that reward functions get.

    With `plays`, samples also have the policy's own turns and tokens. With `skip_special_tokens`, the policy's text has no
    special tokens.
    """
    hide = special_token_remover(tokenizer) if skip_special_tokens and tokenizer is not None else _keep

    def to_samples(rows: Mapping[int, Row]) -> ToSamples:
        names = sorted({name for row in rows.values() for name in row.columns})
        return lambda group: _samples(group, rows, names, tokenizer, plays, hide)

    return to_samples


def _samples(
    group: Sequence[Trajectory],
    rows: Mapping[int, Row],
    names: Sequence[str],
    tokenizer: Any,
    plays: bool,
    hide: Callable[..., str],
) -> Samples:
    """Return the samples of a group. `plays`: see `reward_view`.

    `rows` are dataset rows by index, and `names` the columns that samples get. `hide` removes special tokens from a text.
    """
    sources = [rows[t.row] for t in group]
    texts = [hide(t.text, () if t.branches else t.completion.ids) if t.answer is None else hide(t.answer) for t in group]
    shown = [
        [_hidden(message, hide) for message in t.messages] or completion_for_reward(row, text)
        for row, t, text in zip(sources, group, texts, strict=True)
    ]
    turns = [[*map(hide, t.policy_turns)] or turns_of(completion) for t, completion in zip(group, shown, strict=True)]

    @functools.cache  # a group has one prompt
    def opened(ids: tuple[int, ...]) -> str:
        tag = opened_thought(tokenizer, ids)
        return tag if hide(tag) == tag else ""

    return Samples(
        prompts=[row.dataset_prompt for row in sources],
        completions=shown,
        completion_ids=[list(t.completion.ids) for t in group],
        columns={name: [row.columns.get(name) for row in sources] for name in names},
        prompt_ids=[t.prompt_ids for t in group],
        policy_turns=turns if plays else None,
        policy_ids=[list(t.policy_ids) for t in group] if plays else None,
        opened_thoughts=None if tokenizer is None else [opened(t.prompt_ids) for t in group],
    )


def _keep(text: str, ids: Sequence[int] = ()) -> str:
    """Return `text` unchanged; its tokens `ids` are ignored."""
    return text


def _hidden(message: Message, hide: Callable[..., str]) -> Message:
    """Return the message, without its special tokens if it is the policy's. `hide` removes them."""
    said = message.get("content")
    return {**message, "content": hide(said)} if message.get("role") == "assistant" and isinstance(said, str) else message


def score(scorer: Scorer | None, trajectories: Sequence[Trajectory], rows: Mapping[int, Row]) -> list[Trajectory]:
    """Return the trajectories with the scorer's and the environment's rewards. `rows[t.row]` is trajectory t's dataset row."""
    view = reward_view(plays=any(t.mask for t in trajectories))
    rewards = PendingRewards(scorer, view({t.row: rows[t.row] for t in trajectories}))
    rewards.add_all(trajectories)
    return rewards.assign_to(trajectories)
