"""The draw and its filters, against transformers' own warpers and against counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from psigrad import seeds
from psigrad.kernels.kernels import kernels
from psigrad.language.rollout.samplers import distribution
from psigrad.language.rollout.samplers.distribution import draw, filter_logits, inverse
from psigrad.language.rollout.types import SamplingParams


@pytest.fixture(params=[pytest.param("kernel", marks=pytest.mark.needs("compiler")), "tensors"])
def means(request, monkeypatch):
    """What draws: the native kernel, or tensor operations, its oracle and its fallback."""
    if request.param == "tensors":
        monkeypatch.setattr(distribution, "kernels", lambda: "switched off")
    else:
        assert not isinstance(kernels(), str), kernels()
    return request.param


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' warpers in transformers' order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)] if params.temperature != 1 else [])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(logits.shape[0], 1, dtype=torch.long), logits).log_softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.6),
        SamplingParams(1, top_k=5),
        SamplingParams(1, top_p=0.8),
        SamplingParams(1, min_p=0.1),
        SamplingParams(1, temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
        SamplingParams(1, top_p=1e-9),
    ],
    ids=str,
)
def test_the_filtered_distribution_is_transformers(params):
    logits = 2 * torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(
        filter_logits(logits / params.temperature, params).log_softmax(-1).exp(), warped(logits, params).exp(), atol=1e-6
    )


@pytest.mark.parametrize(
    "params", [SamplingParams(1), SamplingParams(1, temperature=0.7, top_k=6), SamplingParams(1, min_p=0.2)], ids=str
)
def test_tokens_come_as_often_as_the_distribution_says(params, means):
    n = 200_000
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(3))
    drawn = draw(logits.expand(n, 10), params, np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.int64))
    expected = warped(logits, params).exp()[0].double()
    counts = torch.bincount(drawn.ids, minlength=10).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi2 = float(((counts - n * expected)[possible] ** 2 / (n * expected)[possible]).sum())
    assert chi2 < 33  # 99.98 % quantile at 10 degrees of freedom, for a fixed set of seeds
    log_q = warped(logits, params)[0]
    assert torch.allclose(drawn.sampling_logprobs, log_q[drawn.ids], atol=1e-5)
    log_pi = (logits / params.temperature).log_softmax(-1)[0]
    assert torch.allclose(drawn.logprobs, log_pi[drawn.ids], atol=1e-5)


@pytest.mark.parametrize(("top_k", "by_hand"), [(2, [0, 0.6, 0.4, 0]), (0, [0, 0.5, 1 / 3, 1 / 6])])
def test_a_forbidden_token_is_never_drawn(top_k, by_hand, means):
    """Of 0.4, 0.3, 0.2 and 0.1 the first is forbidden, before the two most probable are taken."""
    logits, params = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log(), SamplingParams(1, top_k=top_k, forbidden=(0,))
    assert distribution.probabilities(logits, params)[0].tolist() == pytest.approx(by_hand)
    n = 20_000
    found = draw(logits.expand(n, -1), params, np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.int64))
    shares = found.ids.bincount(minlength=4) / n
    assert shares[0] == 0 and shares.tolist() == pytest.approx(by_hand, abs=0.015)  # four standard errors
    assert torch.allclose(found.sampling_logprobs.exp(), torch.tensor(by_hand)[found.ids], atol=1e-6)
    assert torch.allclose(found.logprobs.exp(), torch.tensor([0.4, 0.3, 0.2, 0.1])[found.ids], atol=1e-6)


def test_a_row_of_which_a_forbidden_token_is_drawn_anew_depends_on_nothing_else(means):
    """Neither on the rows beside it, of which some draw once and others twice, nor on their seeds and counters."""
    logits, params = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), SamplingParams(1, forbidden=(0, 1, 2))
    given = np.arange(40, dtype=np.uint64) // 2, np.arange(40, dtype=np.int64) % 5
    once, drawn = draw(logits, SamplingParams(1), *given).ids, draw(logits, params, *given)
    alone = [draw(logits[i : i + 1], params, given[0][i : i + 1], given[1][i : i + 1]) for i in range(40)]
    assert 5 < (once < 3).sum() < 35 and bool((drawn.ids >= 3).all())
    assert drawn.ids.tolist() == [int(one.ids) for one in alone]
    assert drawn.logprobs.tolist() == pytest.approx([float(one.logprobs) for one in alone], abs=1e-6)


def test_greedy_takes_the_most_probable_token_with_certainty():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, SamplingParams(1, temperature=0), np.arange(50, dtype=np.uint64), np.zeros(50, dtype=np.int64))
    assert torch.equal(drawn.ids, logits.argmax(-1))
    assert torch.equal(drawn.sampling_logprobs, torch.zeros(50))
    assert torch.allclose(drawn.logprobs, logits.log_softmax(-1).amax(-1))


def test_the_last_draw_before_one_never_lands_on_an_impossible_token(monkeypatch, means):
    monkeypatch.setattr(seeds, "uniform", lambda s, c: np.full(len(s), 1 - 2.0**-53))
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    assert int(draw(logits, SamplingParams(1), np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64)).ids) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 5, 1024, 1025, 5000, 151_936])
def test_the_kernel_draws_what_tensor_operations_draw(size, dtype, monkeypatch):
    logits = (3 * torch.randn(40, size, generator=torch.Generator().manual_seed(size))).to(dtype)
    logits[:, 1::7] = -torch.inf
    given = np.arange(40, dtype=np.uint64), np.arange(40, dtype=np.int64)
    for temperature in (1.0, 0.6):
        ours = draw(logits, SamplingParams(1, temperature=temperature), *given)
        with monkeypatch.context() as patch:
            patch.setattr(distribution, "kernels", lambda: "switched off")
            theirs = draw(logits, SamplingParams(1, temperature=temperature), *given)
        # two exponentials that differ in their last digit may put u on either side of a border
        assert (ours.ids == theirs.ids).float().mean() >= 0.97
        same = ours.ids == theirs.ids
        assert torch.allclose(ours.logprobs[same], theirs.logprobs[same], atol=5e-6)


def test_nothing_is_drawn_in_pieces_that_is_not_drawn_whole(monkeypatch):
    """The filtered draw works through a few rows at a time."""
    logits = 3 * torch.randn(10, 3000, generator=torch.Generator().manual_seed(2))
    given = SamplingParams(1, top_p=0.9), np.arange(10, dtype=np.uint64), np.zeros(10, dtype=np.int64)
    whole = draw(logits, *given)
    monkeypatch.setattr(distribution, "_AT_ONCE", 7000)
    pieces = draw(logits, *given)
    assert torch.equal(pieces.ids, whole.ids)
    assert torch.equal(pieces.logprobs, whole.logprobs) and torch.equal(pieces.sampling_logprobs, whole.sampling_logprobs)


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30])
def test_next_to_no_temperature_takes_the_most_probable_token(temperature, means):
    logits = 5 * torch.randn(200, 60, generator=torch.Generator().manual_seed(4))
    logits[:, ::3] = -torch.inf
    drawn = draw(
        logits, SamplingParams(1, temperature=temperature), np.arange(200, dtype=np.uint64), np.zeros(200, dtype=np.int64)
    )
    top = logits.topk(2).values
    clear = top[:, 0] - top[:, 1] > 0.1
    assert torch.equal(drawn.ids[clear], logits.argmax(-1)[clear])
    assert (drawn.logprobs[clear].abs() < 1e-6).all()
    assert (drawn.logprobs <= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_rows_give_no_tokens(temperature, means):
    given = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    drawn = draw(torch.empty(0, 50), SamplingParams(1, temperature=temperature), *given)
    assert drawn.ids.shape == drawn.logprobs.shape == drawn.sampling_logprobs.shape == (0,)


def test_logits_that_are_no_numbers_give_log_probs_that_are_none(means):
    logits = torch.randn(3, 3000)
    logits[0, 5], logits[1] = torch.nan, -torch.inf
    drawn = draw(logits, SamplingParams(1), np.zeros(3, dtype=np.uint64), np.zeros(3, dtype=np.int64))
    assert drawn.logprobs.isnan().tolist() == [True, True, False]
    assert ((drawn.ids >= 0) & (drawn.ids < 3000)).all()


def slow_inverse(weights, u):
    """One sum over all weights, in float64."""
    sums = weights.double().cumsum(-1)
    return torch.searchsorted(sums, u * sums[:, -1:], right=True)[:, 0]


@pytest.mark.parametrize("size", [1, 7, 1024, 2048, 2049, 5000, 20480])
@pytest.mark.parametrize("kind", ["flat", "peaked", "sparse"])
def test_the_inverse_by_blocks_is_that_of_one_sum(size, kind):
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(400, size, generator=generator)
    if kind == "peaked":
        weights = (weights / weights.amax(-1, keepdim=True)) ** 40
    elif kind == "sparse":
        weights *= torch.rand(400, size, generator=generator) < 3 / size
        weights[:, size // 2] += 1e-3
    u = torch.rand(400, 1, generator=generator, dtype=torch.float64)
    assert torch.equal(inverse(weights, u), slow_inverse(weights, u))


@pytest.mark.needs("compiler")
def test_rare_tokens_of_a_large_vocabulary_are_reached():
    """Each of 9,000 tokens of a share of 1e-12 has its own u; sums in float32, the control, find few of them."""
    weights = torch.full((1, 10_000), 1e-12)
    weights[0, 500] = 1.0
    share, wanted = weights[0, 0].double(), torch.arange(1000, 10_000)
    u = ((1 + (wanted.double() - 0.5) * share) / (1 + 9999 * share))[:, None]  # exact: one long sum would drift by a token
    many = weights.expand(len(wanted), -1)
    assert torch.equal(inverse(many, u), wanted)
    ids, _ = kernels().draw(many.log(), u[:, 0].contiguous(), 1.0)
    assert (ids - wanted).abs().max() <= 1  # its exponential is right to 1e-7: 9,000 of them drift by a thousandth of a token
    short = torch.searchsorted(weights.cumsum(-1).expand(len(wanted), -1).contiguous(), u.float(), right=True)[:, 0]
    assert (short == wanted).float().mean() < 0.1


@pytest.mark.parametrize("size", [40, 3000])
def test_what_rounding_leaves_over_lands_on_the_last_weight(size):
    weights = torch.rand(5, size)
    weights[:, size - 7 :] = 0
    assert inverse(weights, torch.full((5, 1), 1 - 2.0**-53, dtype=torch.float64)).tolist() == [size - 8] * 5
    assert inverse(weights, torch.ones(5, 1, dtype=torch.float64)).tolist() == [size - 8] * 5


def test_log_probs_of_a_large_vocabulary_are_log_softmax(means):
    logits = 3 * torch.randn(6, 50_000, generator=torch.Generator().manual_seed(1))
    for params in (SamplingParams(1), SamplingParams(1, temperature=0.5, top_k=100), SamplingParams(1, temperature=0)):
        drawn = draw(logits, params, np.arange(6, dtype=np.uint64), np.zeros(6, dtype=np.int64))
        scaled = logits / (params.temperature or 1.0)
        wanted = scaled.log_softmax(-1).gather(1, drawn.ids[:, None])[:, 0]
        assert torch.allclose(drawn.logprobs, wanted, atol=1e-5)
