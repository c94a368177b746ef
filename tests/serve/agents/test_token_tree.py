"""A session as a tree of tokens: what goes on, what begins a branch, and that the gradient of all branches together is right.

The estimator is held against exact enumeration: a policy that is a table of logits for each context, every session of an agent
weighed with its probability, and the gradient of the expected reward by autograd through the same sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from psigrad import seeds
from psigrad.cli.mathematics import CREDIT, explain
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.types import Branch, Collected, Completion, Trajectory
from psigrad.language.training.online.batching import inputs_of, micro_batches, outputs_by_row, rows_of, to_batch
from psigrad.objective import PolicyGradient, PolicyOutputs
from psigrad.objective.parts.advantage import leave_one_out, total_return
from psigrad.objective.parts.aggregate import sequence_sum
from psigrad.objective.parts.ratio import none
from psigrad.objective.parts.surrogate import score
from psigrad_serve.agents.token_tree import Heard, TokenTree

# All that the policy of these tests can answer: of one and of two tokens.
REPLIES = ("a", "ba", "bb")
Ask = Callable[[str], str]


def chars(text: str) -> list[int]:
    return [ord(c) for c in text]


class Scripted:
    """A session in which the policy answers with these texts, token by character."""

    def __init__(self, replies: tuple[str, ...]) -> None:
        self.tree, self.replies = TokenTree(7, tuple(chars("q:"))), iter(replies)

    def ask(self, text: str) -> str:
        asked = self.tree.ask(text, lambda before, new: chars(new), lambda: chars(text))
        reply = next(self.replies)
        logs = (-1.0,) * len(reply)
        self.tree.answer(asked.number, Heard(text, text + reply), Completion(tuple(chars(reply)), logs, logs, "stop", asked.seed))
        return reply


def two_branches(ask: Ask) -> float:
    """The question, a sub-agent that knows the answer, and the question's second turn."""
    first = ask("q:")
    checked = ask(f"check {first}?")
    last = ask(f"q:{first}|{checked}|")
    return 1.0 * (first == "ba") + 2.0 * (checked != last) + 0.5 * (last == "a")


def three_branches(ask: Ask) -> float:
    """The same with the second turn tried twice: a sibling that shares the first answer."""
    first = ask("q:")
    checked = ask(f"check {first}?")
    tries = [ask(f"q:{first}|{checked}|") for _ in range(2)]
    return 1.0 * (first == "ba") + 2.0 * (checked != tries[0]) - 1.5 * (tries[1] == "bb") * (first == "a")


def trajectory_of(agent: Callable[[Ask], float], replies: tuple[str, ...]) -> Trajectory:
    session = Scripted(replies)
    reward = agent(session.ask)
    flat = session.tree.flat()
    completion = Completion(tuple(flat.ids), tuple(flat.logprobs), tuple(flat.sampling_logprobs), "stop", 7)
    return Trajectory(0, 0, flat.prompt_ids, completion, 0, reward=reward, mask=tuple(flat.mask), branches=tuple(flat.branches))


class Table:
    """A policy of a logit for "a" and one for "b" behind each text that ends in something else than a whole reply."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}
        self.random = torch.Generator().manual_seed(0)

    def logp(self, context: tuple[int, ...], token: int) -> torch.Tensor:
        if context not in self.logits:
            self.logits[context] = torch.randn(2, generator=self.random, dtype=torch.float64).requires_grad_()
        return self.logits[context].log_softmax(0)["ab".index(chr(token))]

    def evaluate(self, groups: Groups) -> PolicyOutputs:
        """Log-probs of each piece, NaN for what is no token of the policy's."""
        pieces = [(tuple(p), c) for p, own in zip(groups.prompts, groups.completions, strict=True) for c in own]
        width = max(len(ids) for _, ids in pieces)
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        rows = []
        for prompt, ids in pieces:
            found = [self.logp((*prompt, *ids[:t]), x) if chr(x) in "ab" else nan for t, x in enumerate(ids)]
            rows.append(torch.stack([*found, *[nan] * (width - len(ids))]))
        return PolicyOutputs(torch.stack(rows))

    def probability(self, trajectory: Trajectory) -> torch.Tensor:
        """That of a whole session: each answer once, behind what it was asked."""
        total = torch.zeros((), dtype=torch.float64)
        for context in trajectory.contexts:
            for t, token in enumerate(context.ids):
                if trajectory.mask[context.start + t]:
                    total = total + self.logp((*context.prompt_ids, *context.ids[:t]), token)
        return total.exp()


def expected_gradients(
    agent, calls: int, method: PolicyGradient, size: int, fault=lambda t: t
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the library's loss in expectation over all groups of `size` sessions, minus that of the expected reward)."""
    table = Table()
    sessions = [trajectory_of(agent, replies) for replies in itertools.product(REPLIES, repeat=calls)]
    chance = torch.stack([table.probability(t) for t in sessions])
    assert abs(float(chance.detach().sum()) - 1) < 1e-12, "every session once"
    wanted = -sum(p * t.reward for p, t in zip(chance, sessions, strict=True))
    drawn = list(itertools.product(range(len(sessions)), repeat=size))
    rows = [[fault(sessions[i]) for i in members] for members in drawn]
    batch = to_batch(rows)
    prepared = method.prepare(batch, {})
    weight = torch.stack([chance[list(members)].prod() for members in drawn]).detach() * len(drawn)
    # the loss is linear in the advantage: all groups in one batch, each with its probability
    prepared = replace(prepared, advantage=prepared.advantage * weight.repeat_interleave(size)[:, None])
    totals, loss = method.totals(prepared), 0.0
    micros = micro_batches(batch, torch.ones(len(batch.mask), dtype=torch.bool), 4096)
    assert len(micros) > 1 or size == 1
    for micro in micros:
        outputs = outputs_by_row(table.evaluate(inputs_of(batch, micro)), batch, micro)
        loss = loss + method.loss(prepared.select(rows_of(micro)), outputs, totals, {}).value
    logits = list(table.logits.values())
    grads = [torch.autograd.grad(x, logits, retain_graph=True, allow_unused=True) for x in (loss, wanted)]
    return tuple(torch.cat([torch.zeros(2) if g is None else g for g in own]) for own in grads)


REINFORCE = PolicyGradient(total_return(), none, score, sequence_sum)
RLOO = PolicyGradient(leave_one_out, none, score, sequence_sum)
CASES = [
    pytest.param(two_branches, 3, REINFORCE, 1, id="two branches"),
    pytest.param(three_branches, 4, REINFORCE, 1, id="three branches"),
    pytest.param(two_branches, 3, RLOO, 2, id="two branches, groups"),
]


@pytest.mark.parametrize(("agent", "calls", "method", "size"), CASES)
def test_the_gradient_of_all_branches_is_that_of_the_expected_reward(agent, calls, method, size):
    found, wanted = expected_gradients(agent, calls, method, size)
    assert wanted.abs().max() > 0.05, "an oracle of zeros proves nothing"
    assert (found - wanted).abs().max() < 1e-6  # rewards and weights are float32


def read_twice(trajectory: Trajectory) -> Trajectory:
    """A planted double count: the answer that two branches share is trained in both."""
    reply = trajectory.completion.ids[: trajectory.mask.index(False)]
    held = trajectory.completion
    logs = (*held.logprobs, *held.logprobs[: len(reply)])
    completion = replace(held, ids=(*held.ids, *reply), logprobs=logs, sampling_logprobs=logs)
    branches = (*trajectory.branches, Branch(len(held.ids), trajectory.prompt_ids))
    return replace(trajectory, completion=completion, mask=(*trajectory.mask, *[True] * len(reply)), branches=branches)


@pytest.mark.parametrize(("agent", "calls"), [(two_branches, 3), (three_branches, 4)])
def test_negative_control_a_token_that_counts_in_two_branches_biases_the_gradient(agent, calls):
    found, wanted = expected_gradients(agent, calls, REINFORCE, 1, read_twice)
    assert (found - wanted).abs().max() > 0.01


def test_every_answer_stands_once_behind_what_it_was_asked():
    t = trajectory_of(three_branches, ("ba", "bb", "a", "bb"))
    read = {("".join(map(chr, c.prompt_ids)), "".join(map(chr, c.ids))) for c in t.contexts}
    assert read == {("q:", "ba|bb|a"), ("check ba?", "bb"), ("q:ba|bb|", "bb")}
    assert "".join(chr(x) for x, own in zip(t.completion.ids, t.mask, strict=True) if own) == "baabbbb"
    assert t.num_chosen == len("ba" + "bb" + "a" + "bb")
    assert Collected.from_json(Collected([t], [[t]], 1, {}).to_json()).trajectories == [t]


def test_the_row_s_own_prompt_and_its_turns_have_the_seeds_of_an_episode():
    session = Scripted(("a",) * 4)
    three_branches(session.ask)
    given = [asked.seed for asked in session.tree.asked]
    assert given[0] == 7 and given[2] == seeds.derive(7, "turn", 1)
    assert len(set(given)) == 4, "tokens that share their seed are not drawn one by one"


def test_requests_at_once_give_the_same_tree_in_whatever_order_they_come():
    def tree(order) -> TokenTree:
        made = TokenTree(7, tuple(chars("q:")))
        asked = [made.ask(text, lambda before, new: chars(new), lambda text=text: chars(text)) for text in order]
        for one in reversed(asked):
            text, reply = "".join(map(chr, one.prompt_ids)), "ab"[one.seed % 2]
            made.answer(one.number, Heard(text, text + reply), Completion((ord(reply),), (-1.0,), (-1.0,), "stop", one.seed))
        return made

    texts = ["x?", "y?", "q:", "x?", "z?"]
    whole = [tree(order).flat() for order in (texts, texts[::-1], sorted(texts))]
    assert whole[0] == whole[1] == whole[2] and len(whole[0].branches) == 4
    assert whole[0].prompt_ids == tuple(chars("q:"))


@pytest.mark.parametrize(
    ("heard", "text", "rest"),
    [
        pytest.param(Heard("u:1 A:", "u:1 A:x", "<e>", True), "u:1 A:x<e>u:2 A:", "u:2 A:", id="the end was sampled"),
        pytest.param(Heard("u:1 A:", "u:1 A:x", "<e>", False), "u:1 A:x<e>u:2 A:", "<e>u:2 A:", id="a cut answer gets its end"),
        pytest.param(Heard("u:1 A:", "u:1 A:x", "<e>", True), "u:1 A:y<e>u:2 A:", None, id="an edited answer"),
        pytest.param(Heard("u:1 A:<t>", "u:1 A:x", "<e>", True), "u:1 A:x<e>u:2 A:", None, id="a prompt that is rewritten"),
        pytest.param(Heard("u:1 A:"), "u:1 A:x<e>u:2 A:", None, id="an answer that nobody can go on from"),
    ],
)
def test_a_request_goes_on_only_where_nothing_before_it_is_said_otherwise(heard, text, rest):
    assert heard.begins(text) == (rest is not None)
    if rest is not None:
        assert heard.rest(text) == rest


def test_explain_names_the_rule_of_credit(capsys):
    assert explain(["grpo"]) == 0
    assert f"agents (--agent): {CREDIT}" in capsys.readouterr().out
    assert explain(["dpo"]) == 0
    assert "--agent" not in capsys.readouterr().out, "preferences are not sampled by agents"
