"""Distillation from a teacher behind a server, of which the most probable tokens are known, and from one with another tokenizer.

Both are enumerated on small vocabularies: the expected gradient over all completions is that of a loss written down here.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from teachers import BY_TEXT, distil, make_foreign, make_same, metrics
from tiny_jobs import online_config
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from psigrad.config import Evaluation, Sampling
from psigrad.errors import UserError
from psigrad.language.loading.teacher import Teacher, TeacherOutput, align, text_ends
from psigrad.language.models import tiny
from psigrad.language.models.language_model import Divergence, load
from psigrad.language.models.packing import Groups
from psigrad.language.models.stats import Top
from psigrad.language.recipes import online
from psigrad.objective import PolicyOutputs
from psigrad.objective.parts.ratio import span_kl

EOS = 0


def words(*vocabulary: str, merges=()):
    """A tokenizer of these words; the first ends a text."""
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=vocabulary[0])


class Policy:
    """As much of a policy as a teacher reads."""

    def __init__(self, tokenizer, ends=(EOS,)):
        self.tokenizer, self.eos_token_ids = tokenizer, ends


def table(seed: int, prefixes, width: int) -> dict[tuple[int, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(width, generator=generator, dtype=torch.float64) for p in prefixes}


def log_prob(logits, ids) -> torch.Tensor:
    """[t] log-probs of tokens, each by the logits behind those before it."""
    return torch.stack([logits[ids[:t]].log_softmax(0)[token] for t, token in enumerate(ids)])


def teacher_of(logits, policy, tokenizer) -> Teacher:
    def ask(groups, temperature, top):
        return [TeacherOutput(log_prob(logits, own[0])) for own in groups.completions]

    return Teacher(ask, policy, tokenizer, spans=True, max_length=99)


def expected_gradients(logits, completions, teacher) -> list[torch.Tensor]:
    """By each table of logits: Σ over completions of π(y) · gradient of what the library makes of y."""
    leaves, total = list(logits.values()), torch.zeros((), dtype=torch.float64)
    for y in completions:
        logp = log_prob(logits, y)
        ends, theirs = teacher.pieces(Groups([(1,)], [[y]]), 1.0)
        kl = span_kl(logp[None], ends, theirs.double())
        total = total + logp.sum().exp().detach() * kl.sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def assert_same(found, expected):
    assert max(float(g.abs().max()) for g in expected) > 0.01, "an oracle of zeros proves nothing"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_longer_tokens_than_the_teachers_give_the_kl_of_each_token_as_text():
    """The policy says a, ab or its end; the teacher a, b or its end. Σ over visited states of KL(π(·|s) ‖ q(text of ·|s))."""
    policy, teachers = words("<e>", "a", "ab"), words("<e>", "a", "b")
    prefixes = [(), (1,), (2,)]
    own = {p: x.requires_grad_() for p, x in table(1, prefixes, 3).items()}
    q = table(2, [p for n in range(5) for p in itertools.product((1, 2), repeat=n)], 3)
    spelt = {EOS: (EOS,), 1: (1,), 2: (1, 2)}
    completions = [(EOS,), *[(a, b) for a in (1, 2) for b in (EOS, 1, 2)]]
    found = expected_gradients(own, completions, teacher_of(q, Policy(policy), teachers))
    total = torch.zeros((), dtype=torch.float64)
    for state in prefixes:
        reached = log_prob(own, state).sum().exp().detach() if state else 1.0
        before = tuple(itertools.chain(*(spelt[token] for token in state)))
        log_q = torch.stack([log_prob(q, (*before, *spelt[token]))[len(before) :].sum() for token in (0, 1, 2)])
        log_pi = own[state].log_softmax(0)
        total = total + reached * (log_pi.exp() * (log_pi - log_q)).sum()
    assert_same(found, torch.autograd.grad(total, list(own.values())))


def test_shorter_tokens_than_the_teachers_give_the_kl_of_what_they_spell():
    """The policy says a or b, twice; the teacher aa, ab, ba or bb at once. KL(π(yy') ‖ q(yy')), the whole of it."""
    policy, teachers = (
        words("<e>", "a", "b"),
        words("<e>", "a", "b", "aa", "ab", "ba", "bb", merges=itertools.product("ab", "ab")),
    )
    own = {p: x.requires_grad_() for p, x in table(3, [(), (1,), (2,)], 3).items()}
    with torch.no_grad():
        for x in own.values():
            x[EOS] = -torch.inf  # it never ends early
    q = table(4, [()], 7)
    pairs = list(itertools.product((1, 2), repeat=2))
    found = expected_gradients(own, pairs, teacher_of(q, Policy(policy), teachers))
    pi = torch.stack([log_prob(own, y).sum() for y in pairs])
    log_q = q[()].log_softmax(0)[3:]
    assert_same(found, torch.autograd.grad((pi.exp() * (pi - log_q)).sum(), list(own.values())))
    kl = span_kl(log_prob(own, (1, 2))[None], *teacher_of(q, Policy(policy), teachers).pieces(Groups([(1,)], [[(1, 2)]]), 1.0))
    kl = kl.detach()  # it stands where the piece ends
    assert kl[0, 0] == 0 and float(kl[0, 1]) == pytest.approx(float((pi[1] - log_q[1]).detach()), abs=1e-6)


def test_pieces_end_where_tokens_of_both_do():
    assert align([1, 2, 5], [2, 3, 5]) == [(2, 1), (3, 3)]
    assert align([1, 1, 4], [1, 4]) == [(2, 1), (3, 2)]  # a token without text belongs to what stands before
    assert align([-1, 1], [1]) == [(2, 1)] and align([2], [1]) == []
    tokenizer = tiny.tokenizer(["say a: b"], 270)
    ids = tokenizer("é b").input_ids
    assert text_ends(tokenizer, ids)[0] == "é b" and text_ends(tokenizer, ids)[1][:2] == [-1, 1]
    assert text_ends(tokenizer, ids[:1]) == ("", [-1])


def test_what_is_cut_within_a_character_or_behind_the_last_common_end_teaches_nothing():
    logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    kl = span_kl(logp, torch.tensor([[False, True, False]]), torch.tensor([[0.0, -1.0, 0.0]]))
    assert kl.tolist() == [[0.0, -2.0, 0.0]]
    assert torch.autograd.grad(kl.sum(), logp)[0].tolist() == [[-2.0, -2.0, 0.0]]


def test_the_baseline_is_the_mean_of_the_pieces_of_other_completions():
    teacher = teacher_of({}, None, None)
    logp = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]], requires_grad=True)
    ends = torch.tensor([[True, True], [False, True]])
    teacher.store_pieces(ends, torch.tensor([[-2.0, -2.0], [0.0, -1.0]]), logp.detach())
    made = teacher.add_kl(PolicyOutputs(logp), torch.tensor([0, 1])).kl
    assert made.tolist() == [[1.0, 0.0], [0.0, -3.0]]  # d of three pieces: 1 and 0; −3
    # less −3, the only other piece, and less (1 + 0) / 2
    assert torch.autograd.grad(made.sum(), logp)[0].tolist() == [[4.0, 3.0], [-3.5, -3.5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("teachers")


@pytest.fixture(scope="module")
def pair(job, folder):
    """The policy, and a teacher with the same tokens."""
    return load(str(job / "base")), load(make_same(job, folder / "teacher"))


@pytest.mark.parametrize("kind", ["exact", "exact_forward", "exact_js"])
def test_the_most_probable_tokens_give_a_lower_bound_that_is_the_divergence_where_they_are_all(kind, pair):
    policy, teacher = pair
    groups = Groups([(3, 4, 5), (6, 7)], [[(8, 9), (10,)], [(11, 12, 13)]])
    whole = policy.evaluate(groups, kl_to=Divergence(teacher, kind, 0.3)).kl
    before = torch.zeros_like(whole)
    for k in (1, 20, policy.vocabulary):
        logp, top = teacher.most_probable(groups, k)
        torch.testing.assert_close(logp, teacher.evaluate(groups).logp)
        part = policy.evaluate(groups, kl_to=Divergence(top, kind, 0.3)).kl
        assert bool((part >= before - 1e-6).all() and (part <= whole + 1e-5).all())
        before = part.detach()
    torch.testing.assert_close(part, whole, atol=1e-5, rtol=1e-4)
    parameters = list(policy.trainable().values())
    ours, exact = (torch.autograd.grad(x.sum(), parameters, retain_graph=True) for x in (part, whole))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, exact, strict=True))


def test_the_rest_counts_as_one_token():
    """π = (½, ¼, ¼), q = (½, ⅜, ⅛), of which the first is known: KL of (½, ½) from (½, ½) is 0; of two, worked by hand."""
    from psigrad.language.models.stats import TokenStatsRequest

    logits, log_q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.5, 0.375, 0.125]]).log()
    wanted = TokenStatsRequest(reference_head=lambda hidden: hidden)
    found = [float(wanted.of(logits, torch.zeros(1).long(), Top(torch.arange(k)[None], log_q[:, :k]))[2]) for k in (1, 2, 3)]
    exact = 0.25 * math.log(0.25 / 0.375) + 0.25 * math.log(0.25 / 0.125)
    assert found == pytest.approx([0.0, exact, exact], abs=1e-6)


@pytest.mark.parametrize(("logits", "theirs"), [([0.0, math.log(3)], [0.0, 0.0, 5.0]), ([0.0, math.log(3), 7.0], [0.0, 0.0])])
def test_a_teacher_whose_head_has_another_width_is_compared_on_the_tokens_of_both(logits, theirs):
    """Qwen2.5-1.5B has 151,936 rows and the 7B 152,064, for the same tokens. π = (¼, ¾) and q = (½, ½) on those of both."""
    from psigrad.language.models.stats import TokenStatsRequest

    wanted = TokenStatsRequest(reference_head=lambda hidden: hidden)
    kl = wanted.of(torch.tensor([logits]), torch.zeros(1).long(), torch.tensor([theirs]))[2]
    assert float(kl) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)


@pytest.fixture(scope="module")
def foreign(folder):
    """A teacher that cuts the same texts otherwise."""
    return make_foreign(folder / "foreign")


def test_a_teacher_with_another_tokenizer_teaches_by_pieces_of_text(job, foreign, tmp_path):
    kl = metrics(distil(job, tmp_path / "run", 30, reference=foreign, algorithm=BY_TEXT, num_generations=8), "kl")
    assert sum(kl[-6:]) / 6 < 0.7 * sum(kl[:3]) / 3
    told = [json.loads(line).get("rule") for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert not {"flat_reward", "dead_groups"} & set(told)  # a teacher rewards nothing, and that is no fault
    with pytest.raises(UserError, match=r"foreign differs from the model's, so .+estimator='exact'.+algorithm.kl.estimator=span"):
        distil(job, tmp_path / "other", 1, reference=foreign)


def test_settings_that_do_not_fit_are_refused(job, foreign, tmp_path):
    with pytest.raises(UserError, match=r"estimator is span.+has the model's tokenizer; set .* to exact or k1\+"):
        distil(job, tmp_path / "same", 1, reference=str(job / "base"), algorithm=BY_TEXT)
    with pytest.raises(UserError, match=r"reference_model and reference_top_k are for a reference server, but reference is"):
        distil(job, tmp_path / "here", 1, reference=str(job / "base"), reference_model="x", reference_top_k=3)
    with pytest.raises(UserError, match=r"temperature is 0.7, but the server http://127.0.0.1:9/v1 returns"):
        distil(job, tmp_path / "warm", 1, reference="http://127.0.0.1:9/v1", sampling=Sampling(temperature=0.7))
    with pytest.raises(UserError, match=r"foreign is a server, or its tokenizer differs from the model's, but eval_kl needs"):
        made = replace(online_config(job, tmp_path / "kl", "distill"), reward=(), reference=foreign, algorithm=BY_TEXT)
        online.run(replace(made, evaluation=Evaluation(eval_kl=True)))
