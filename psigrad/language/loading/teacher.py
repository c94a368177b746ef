"""Teachers: references that run on a server, or whose tokenizer differs from the policy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.templates import decode_after, encode_after
from psigrad.language.models.language_model import Divergence, LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.models.stats import Top
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.online.annotators.reference import inputs_for_reference
from psigrad.language.training.online.batching import MicroBatch, compute_by_row, reference_inputs_of
from psigrad.language.training.online.online_run import Annotator
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Prepared
from psigrad.objective.batch import copy_to
from psigrad.objective.parts.ratio import span_kl
from psigrad.processes.parallel.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from psigrad.language.training.online.online_run import OnlineRun

_HALF = "\ufffd"
_CONTEXT = 8  # tokens of a prompt that precede a text when it is tokenised


@dataclass(frozen=True)
class TeacherOutput:
    """A teacher's evaluation of one completion: each token's log-prob [T] and, on request, the k most probable tokens [T, k]."""

    logp: Tensor
    top: Top | None = None


Ask = Callable[[Groups, float, int], Sequence[TeacherOutput]]
"""A function (prompts with completions in the teacher's tokens, temperature, k) -> the evaluation of each completion, in order.
"""


@dataclass(frozen=True)
class Teacher:
    """A teacher that serves as the reference of the KL term.

    If its tokenizer differs from the policy's (`spans`), the KL compares pieces of text. A piece ends wherever a token ends in
    both tokenizations of the text.
    """

    ask: Ask
    policy: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    spans: bool
    max_length: int
    top_k: int = 0
    name: str = ""
    """The teacher's folder or address, for messages."""
    _cache: dict[Any, TeacherOutput] = field(default_factory=dict, repr=False)
    _pieces: list[Tensor] = field(default_factory=list, repr=False)
    """For the last batch: a mask [N, T] of the ends of text pieces, the teacher's log-probs of these, and baselines [N]."""

    @property
    def is_own_reference(self) -> bool:
        """Always False, since a teacher is never the policy."""
        return False

    def clear(self) -> None:
        """Discard the evaluations and the text pieces of the last batch."""
        self._cache.clear()
        self._pieces.clear()

    def check(self, algorithm: PolicyGradient) -> None:
        """Raise `UserError` if this teacher cannot provide the KL term of the algorithm."""
        kind = "" if algorithm.kl is None else algorithm.kl.estimator
        if self.spans and kind != "span":
            raise UserError(
                f"The tokenizer of the teacher {self.name} differs from the model's, so {algorithm.name or 'the method'} cannot "
                f"compare the two models token by token (estimator={kind!r}). Set algorithm.kl.estimator=span, which compares "
                "pieces of text that end at a token boundary of both tokenizers."
            )

    def log_probs(self, groups: Groups, temperature: float) -> Tensor:
        """Return the teacher's log-prob [n, T] of each token of the completions, padded with zeros."""
        said = self._evaluate(groups, temperature, 0)
        return torch.nn.utils.rnn.pad_sequence([one.logp for one in said], batch_first=True)

    def top(self, groups: Groups, temperature: float) -> Top:
        """Return the ids and log-probs [n, T, `top_k`] of the teacher's most probable tokens at each place of a completion."""
        tops = [one.top for one in self._evaluate(groups, temperature, self.top_k) if one.top is not None]
        ids, logp = ([getattr(top, name) for top in tops] for name in ("ids", "logp"))
        return Top(*(torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (ids, logp)))

    def store_pieces(self, ends: Tensor, theirs: Tensor, logp: Tensor) -> None:
        """Store a batch's text pieces for `add_kl`. `ends`, `theirs` and `logp` have the shape [N, T].

        `ends` is True at the last token of each piece. There, `theirs` has the teacher's log-prob of the piece. `logp` is the
        policy's log-prob of each token.
        """
        d = torch.where(ends, span_kl(logp, ends, theirs), 0.0).sum(1)
        count = ends.sum(1)
        # A completion's baseline is the mean KL of the other completions' pieces.
        others = (count.sum() - count).clamp(min=1)
        self._pieces[:] = [ends, theirs, (d.sum() - d) / others]

    def add_kl(self, evaluation: PolicyOutputs, rows: Tensor) -> PolicyOutputs:
        """Return `evaluation`, the policy's outputs for `rows` of the batch, with the KL of the text pieces if any are stored."""
        if not self._pieces:
            return evaluation
        ends, theirs, baseline = (copy_to(x[rows], evaluation.logp.device) for x in self._pieces)
        return replace(evaluation, kl=span_kl(evaluation.logp, ends, theirs, baseline))

    def _evaluate(self, groups: Groups, temperature: float, top: int) -> list[TeacherOutput]:
        rows = [(tuple(p), tuple(c), top) for p, own in zip(groups.prompts, groups.completions, strict=True) for c in own]
        new = list(dict.fromkeys(row for row in rows if row not in self._cache))
        if new:
            asked = Groups([p for p, _, _ in new], [[c] for _, c, _ in new])
            self._cache.update(zip(new, self.ask(asked, temperature, top), strict=True))
        return [self._cache[row] for row in rows]

    def pieces(self, groups: Groups, temperature: float) -> tuple[Tensor, Tensor]:
        """Return (`ends`, `theirs`) of `store_pieces` for the completions."""
        rows = [(tuple(p), tuple(c)) for p, own in zip(groups.prompts, groups.completions, strict=True) for c in own]
        read = [self._translate(prompt, ids) for prompt, ids in rows]
        said = self._evaluate(Groups([p for p, _ in rows], [[ids] for ids, _ in read]), temperature, 0)
        width = max(len(ids) for _, ids in rows)
        ends, theirs = torch.zeros(len(rows), width, dtype=torch.bool), torch.zeros(len(rows), width)
        for n, ((_, cuts), one) in enumerate(zip(read, said, strict=True)):
            before = 0
            for stop, other in cuts:
                ends[n, stop - 1], theirs[n, stop - 1] = True, one.logp[before:other].sum()
                before = other
        return ends, theirs

    def _translate(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return (the completion `ids` in the teacher's tokens, the ends of its text pieces in both tokenizations).

        An end is (number of policy tokens, number of teacher tokens). `prompt` is in teacher tokens.
        """
        eos, finished = self.tokenizer.eos_token_id, bool(ids) and ids[-1] in self.policy.eos_token_ids
        body = ids[:-1] if finished else ids
        text, own = text_ends(self.policy.tokenizer, body)
        theirs = encode_after(self.tokenizer, images.decode(self.tokenizer, prompt[-_CONTEXT:]), text) if text else []
        read, ends = text_ends(self.tokenizer, theirs)
        if read != text:  # the teacher's tokens cannot express it exactly, so it is one piece
            ends = [*[-1] * (len(theirs) - 1), len(text)] if theirs else []
        room = self.max_length - len(prompt)
        cuts = align(own, ends) + ([(len(ids), len(theirs) + 1)] if finished else [])
        read_ids = (*theirs, eos) if finished or not theirs else tuple(theirs)
        return read_ids[: max(room, 1)], [cut for cut in cuts if cut[1] <= room]


@dataclass(frozen=True)
class TeacherReference(Annotator):
    """An `Annotator` that adds a teacher's data for the KL term: log-probs of tokens or of text pieces, or top-k tokens."""

    teacher: Teacher
    gives_reference = True

    def columns(self, run: OnlineRun, batch: Batch, step: int, cache: Any) -> Batch:
        """Add the teacher's log-probs to the batch as `logp_ref`. If the KL compares pieces of text, store the pieces instead."""
        algorithm, budget, temperature = run.algorithm, run.config.micro_batch_tokens, run.params.temperature
        self.teacher.clear()
        if not isinstance(algorithm, PolicyGradient):
            return batch
        if algorithm.kl is not None and algorithm.kl.estimator == "span":
            self._settle_pieces(batch, budget, temperature, run.world)
        if not algorithm.needs_reference or algorithm.needs_exact_kl:
            return batch
        of = lambda x: self.teacher.log_probs(x, temperature)  # noqa: E731
        return replace(batch, logp_ref=compute_by_row(batch, budget, of, world=run.world, inputs=inputs_for_reference))

    def _settle_pieces(self, batch: Batch, budget: int, temperature: float, world: World) -> None:
        """Compute the teacher's log-probs of a batch's pieces of text, and store them with `Teacher.store_pieces`."""

        def ask(part: int) -> Tensor:
            of = lambda inputs: self.teacher.pieces(inputs, temperature)[part].float()  # noqa: E731
            return compute_by_row(batch, budget, of, world=world, inputs=inputs_for_reference)

        ends, theirs = ask(0), ask(1)
        self.teacher.store_pieces(ends > 0, theirs, batch.logp_old)

    def divergence(self, run: OnlineRun, batch: Batch, micro: MicroBatch) -> Divergence | None:
        """Return the teacher's most probable tokens as a `Divergence`, from which the policy's forward pass computes the KL.

        Return None if the KL term does not need these tokens. See `Annotator`.
        """
        algorithm, inputs = run.algorithm, reference_inputs_of(batch, micro)
        if not isinstance(algorithm, PolicyGradient) or not algorithm.needs_exact_kl or algorithm.kl is None:
            return None
        if algorithm.kl.estimator == "span" or inputs is None:
            return None
        return Divergence(self.teacher.top(inputs, run.params.temperature), algorithm.kl.estimator, algorithm.kl.mixture)

    def add_terms(
        self, run: OnlineRun, part: Prepared, outputs: PolicyOutputs, rows: Tensor, sums: LossSums
    ) -> tuple[Prepared, PolicyOutputs]:
        """Return (`part`, the result of `Teacher.add_kl` for `outputs` and `rows`); see `Annotator`."""
        return part, self.teacher.add_kl(outputs, rows)


def is_address(reference: str) -> bool:
    """Return True if the setting `reference` is the address of a server."""
    return reference.startswith(("http://", "https://"))


def text_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return (the text of the tokens `ids` without an incomplete last character, the end of each token).

    A token's end is the length of the text up to and including it, or -1 if the token ends inside a character.
    """
    text, ends, new = "", [], []
    before = ids[0] if ids else 0
    for token in ids:
        new.append(token)
        piece = decode_after(tokenizer, before, new)
        if piece.endswith(_HALF):
            ends.append(-1)
            continue
        text += piece
        ends.append(len(text))
        before, new = token, []
    return text, ends


def align(own: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
    """Return each place where a token ends in both tokenizations of a text, as (own tokens before it, other tokens before it).

    `own` and `others` are token ends from `text_ends`.
    """
    mine, theirs = ({end: i + 1 for i, end in enumerate(ends) if end > 0} for ends in (own, others))
    return [(mine[end], theirs[end]) for end in sorted(mine.keys() & theirs.keys())]


def of_model(model: LanguageModel, policy: LanguageModel, name: str) -> Teacher:
    """Return a teacher for a local `model` whose tokenizer differs from the policy's. `name` is its name in messages."""

    def ask(groups: Groups, temperature: float, top: int) -> list[TeacherOutput]:
        with torch.no_grad():
            logp = model.evaluate(groups, temperature=temperature).logp.cpu()
        return [TeacherOutput(row[: len(own[0])]) for row, own in zip(logp, groups.completions, strict=True)]

    return Teacher(ask, policy, model.tokenizer, True, model.max_length, name=name)
