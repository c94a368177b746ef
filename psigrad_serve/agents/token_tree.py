"""The requests of an agent's session and the policy's answers, as a tree of tokens.

If a request's text starts with an earlier request and its answer, it keeps their tokens exactly as they were read and sampled,
and only its new text is tokenised. Any other request starts a branch: a sub-agent, a retry, a summary, or a history that was
edited or that the chat template rewrites. So each sampled token occurs once, after exactly the tokens that the policy read before
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from psigrad import seeds
from psigrad.language.rollout.types import Branch, Completion

Encode = Callable[[str, str], Sequence[int]]
"""(text before, text) -> the tokens of `text`, tokenised in the context of the text before it."""


class Asked(NamedTuple):
    """A running request: the tokens that the policy reads, the seed of its answer, and the request that it continues, if any."""

    number: int
    prompt_ids: tuple[int, ...]
    seed: int
    parent: int | None


@dataclass(frozen=True)
class Heard:
    """The text of an answered request, by which a later request is recognised as its continuation."""

    prompt: str
    """The request as text."""
    said: str = ""
    """The text of the request and its answer, without the mark that ends the turn; "" if no request can continue it."""
    end: str = ""
    """The mark that ends the answer's turn when the conversation continues, or ""."""
    ended: bool = False
    """True if the policy sampled that mark, so that the answer's tokens include it."""

    def begins(self, text: str) -> bool:
        """Return True if a request with this text continues this one: it starts with all of this request's text and answer."""
        return bool(self.said) and text.startswith(self.prompt) and text.startswith(self.said + self.end)

    def rest(self, text: str) -> str:
        """Return the new part of a continuing request's text, after that of this request and its answer."""
        return text[len(self.said) + (len(self.end) if self.ended else 0) :]


@dataclass
class TokenTree:
    """The requests of one session, in the order in which they came.

    `seed` is the session's seed and `prompt_ids` its row's prompt. The seeds of the requests that continue this prompt turn by
    turn are those of an episode in this process, so the same tokens are sampled. The seed of every other request is a hash of its
    content. So neither the tokens nor the order of the branches depend on the order in which concurrent requests arrive.
    """

    seed: int
    prompt_ids: tuple[int, ...]
    asked: list[Asked] = field(default_factory=list)
    answers: dict[int, tuple[Heard, Completion]] = field(default_factory=dict)
    main: list[int] = field(default_factory=list)
    """The numbers of the requests that continue the row's prompt turn by turn."""

    def ask(self, text: str, encode: Encode, fresh: Callable[[], Sequence[int]]) -> Asked:
        """Add a request with this text, and return its tokens and seed. `fresh()` returns the tokens of a new branch."""
        found = [n for n, (heard, _) in self.answers.items() if heard.begins(text)]
        parent = max(found, key=lambda n: (len(self.answers[n][0].said), n), default=None)
        if parent is None:
            ids = tuple(fresh())
        else:
            heard, _ = self.answers[parent]
            new = heard.rest(text)
            before = heard.end if heard.ended else heard.said
            ids = (*self._read(parent), *(encode(before, new) if new else ()))
        begins = parent is None and not self.main and ids == self.prompt_ids
        if begins or (parent is not None and self.main[-1:] == [parent]):
            turn = len(self.main)
            seed = self.seed if turn == 0 else seeds.derive(self.seed, "turn", turn)
            self.main.append(len(self.asked))
        else:
            seed = seeds.derive(self.seed, *self._key(ids, len(self.asked)))
        self.asked.append(Asked(len(self.asked), ids, seed, parent))
        return self.asked[-1]

    def answer(self, number: int, heard: Heard, completion: Completion) -> None:
        """Record the policy's answer to a request."""
        self.answers[number] = heard, completion

    def _key(self, ids: tuple[int, ...], before: int) -> tuple[str, int, int]:
        """Return a key that is independent of arrival order: a hash of the tokens, and the number of earlier equal requests."""
        digest = hashlib.sha256(repr(ids).encode()).digest()
        same = sum(other.prompt_ids == ids and other.number not in self.main for other in self.asked[:before])
        return "branch", int.from_bytes(digest[:8], "little"), same

    def _read(self, number: int) -> tuple[int, ...]:
        """Return a request's tokens followed by those of its answer."""
        return (*self.asked[number].prompt_ids, *self.answers[number][1].ids)

    def chains(self) -> list[list[int]]:
        """Return the answered requests in chains, in which each request continues the previous one.

        Each request is in one chain. The first chain starts with the row's prompt, if there is one.
        """
        depth: dict[int | None, int] = {None: 0}
        for number in sorted(self.answers):
            depth[number] = depth[self.asked[number].parent] + 1
        first = set(self.main)
        key = {n: (n not in first, self._key(self.asked[n].prompt_ids, n)) for n in self.answers}
        chains: list[list[int]] = []
        for number in sorted(self.answers, key=lambda n: (depth[n], key[n])):
            parent = self.asked[number].parent
            own = next((chain for chain in chains if chain[-1] == parent), None)
            chains.append([number]) if own is None else own.append(number)
        return sorted(chains, key=lambda chain: key[chain[0]])

    def completions(self) -> list[Completion]:
        """Return all answers, chain by chain, except that the answer that arrived last is last."""
        last = next(reversed(self.answers), None)
        before = [number for chain in self.chains() for number in chain if number != last]
        return [self.answers[number][1] for number in (*before, last) if number is not None]

    def flat(self) -> Flat | None:
        """Return the session as one sequence of tokens after the first chain's prompt, or None if it has no answers."""
        chains = self.chains()
        if not chains:
            return None
        flat = Flat(self.asked[chains[0][0]].prompt_ids)
        for chain in chains:
            known = self.asked[chain[0]].prompt_ids
            if chain is not chains[0]:
                flat.branches.append(Branch(len(flat.ids), known))
            for number in chain:
                flat.read(self.asked[number].prompt_ids[len(known) :])
                flat.write(self.answers[number][1])
                known = self._read(number)
        return flat


@dataclass
class Flat:
    """A session as one sequence for the trainer: its tokens, a mask of the sampled ones, and their log-probs."""

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy read and did not sample."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.sampling_logprobs += [0.0] * len(ids)

    def write(self, completion: Completion) -> None:
        """Append tokens that the policy sampled."""
        self.ids += completion.ids
        self.mask += [True] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.sampling_logprobs += completion.sampling_logprobs
