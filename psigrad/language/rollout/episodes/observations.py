"""What an environment says, cut to the tokens that there is room for, before all of it is tokenised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psigrad.language.rollout.episodes.environments import Message, Observation

# Characters for each token that there is room for, of which an answer is read at most: text has four or so, code two or three.
CHARACTERS = 16
# Stands where the rest was.
MARK = "…"


def fit(
    render: Callable[[Observation], Sequence[int]], said: Observation, limit: int
) -> tuple[Sequence[int], Observation] | None:
    """(tokens, what they say) of the observation, or of a beginning of it with at most `limit` tokens; None where there is no
    room for any of it. `render` gives its tokens, with what the chat template writes around it.
    """
    size = length(said)
    kept = min(size, CHARACTERS * limit)
    while limit > 0 and (kept > 0 or kept == size):
        shown = said if kept == size else cut(said, kept)
        ids = render(shown)
        if len(ids) <= limit:
            return ids, shown
        kept = min(kept - 1, kept * limit // len(ids))
    return None


def length(said: Observation) -> int:
    """Characters of an observation, of all its messages together."""
    return len(said) if isinstance(said, str) else sum(len(_text(message)) for message in said)


def cut(said: Observation, kept: int) -> Observation:
    """The first `kept` characters. All messages stay, since each tool call wants its answer; those behind the cut are empty."""
    if isinstance(said, str):
        return said[:kept] + MARK
    shown: list[Message] = []
    for message in said:
        text = _text(message)
        whole = len(text) <= kept
        shown.append(message if whole else {**message, "content": text[:kept] + MARK})
        kept = max(0, kept - len(text))
    return shown


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
