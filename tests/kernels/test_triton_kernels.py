"""The kernels for a GPU, interpreted by Triton on a CPU, against float64; `make test-gpu` runs them on a GPU."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from kernel_choices import cut_head, without_adamw_kernels
from torch.nn import functional as F

from psigrad.language.models import logprobs
from psigrad.language.models.logprobs import token_stats
from psigrad.language.models.stats import TokenStatsRequest
from psigrad.optim import low_memory
from psigrad.optim.low_memory import LowMemoryAdamW, join, split
from psigrad.optim.rules import StepSize, Update


@pytest.fixture
def kernels(monkeypatch):
    """The kernels in place of torch's operations, wherever these are asked for."""
    found = importlib.import_module("psigrad.kernels.triton_kernels")
    monkeypatch.setattr(low_memory, "gpu_kernels", lambda x: found)
    monkeypatch.setattr(logprobs, "gpu_kernels", lambda x: found)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_of_adamw_on_a_divided_master_is_that_of_float64(kernels, monkeypatch, dtype):
    without_adamw_kernels(monkeypatch)
    monkeypatch.setattr(low_memory, "adamw", None)  # PyTorch's
    draw, first, size = torch.Generator().manual_seed(0), 70_001, 2_500  # more than two programs, and not three
    x, g = torch.randn(size, generator=draw), torch.randn(size, generator=draw).to(dtype)
    m, v = 0.1 * torch.randn(size, generator=draw), 0.01 * torch.rand(size, generator=draw)
    given = g.clone()
    wide, pulled = x.double(), g.double() / 2  # a norm of 6 where 3 is the most
    m64, v64 = 0.9 * m.double() + 0.1 * pulled, 0.99 * v.double() + 0.01 * pulled**2
    right = wide - 0.01 * 0.1 * wide - 0.01 / (1 - 0.9**3) * m64 / (v64.sqrt() / math.sqrt(1 - 0.99**3) + 1e-8)
    stored, remainder = split(x, first)
    state = {"step": torch.tensor(2.0), "exp_avg": m, "exp_avg_sq": v, "remainder": remainder}
    rule = LowMemoryAdamW((0.9, 0.99), 1e-8, eight_bits=False, seed=0, remainders=True)
    rule.step([Update("w", stored, g, state, 0.1, None, first)], StepSize(0.01, 6.0, 3.0))
    found = join(stored, remainder, first)
    for a, b in ((found, right), (m, m64), (v, v64)):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-7)
    assert torch.equal(stored, low_memory.dither(found, first)) and not torch.equal(stored, low_memory.dither(found, first + 1))
    assert torch.equal(g, given) and state["step"] == 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype, gap", [(torch.float32, 3e-5), (torch.bfloat16, 8e-3)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["triton", "torch"])
def test_log_probs_and_their_gradient_are_those_of_float64(request, monkeypatch, how, dtype, gap, temperature):
    kernels = request.getfixturevalue("kernels") if how == "triton" else None
    cut_head(monkeypatch, 5 * 4_500, on_gpu=True)  # two chunks, whose rows take two blocks of 4,096
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 4_500, bias=False).to(dtype)
    hidden, ids = (16 * torch.randn(7, 16, generator=draw)).to(dtype).requires_grad_(), torch.randint(4_500, (7,), generator=draw)
    logits = F.linear(hidden, head.weight).detach()  # rounded as the head rounds them
    ids[1:] = logits[1:].argmax(1)  # whose gradient is nearly 0, so that it shows every error
    if kernels is not None:
        seen = []
        monkeypatch.setattr(logprobs, "gpu_kernels", lambda x: seen.append(len(x)) or kernels)
    stats = token_stats(hidden, ids, head, 4_500, TokenStatsRequest(temperature, entropy="figure", accuracy=True))
    log_pi = torch.log_softmax(logits.double() / temperature, -1)
    torch.testing.assert_close(stats.logp.double(), log_pi.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), torch.special.entr(log_pi.exp()).sum(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(stats.hit, (logits.argmax(1) == ids).float())
    slope = torch.tensor([0.0, -1.0, -0.5, 0.3, 1.0, 1.5, 2.0])
    found = torch.autograd.grad((slope * stats.logp).sum(), [hidden, head.weight])
    back = slope[:, None].double() / temperature * (F.one_hot(ids, 4_500) - log_pi.exp())
    for a, b in zip(found, (back @ head.weight.double(), back.t() @ hidden.double()), strict=True):
        assert float(((a.double() - b).norm() / b.norm()).detach()) < gap
    assert kernels is None or seen == [5, 2, 5, 2]


def test_tokens_that_a_model_never_says_add_nothing_and_the_first_of_equal_ones_is_the_most_probable(kernels):
    logits = torch.tensor([[1.0, 3.0, -math.inf, 3.0], [-math.inf, -math.inf, 0.0, -math.inf]])
    logp, chosen, entropy, best = kernels.log_probs(logits, torch.tensor([0, 2]), 1.0)
    total = math.e + 2 * math.e**3
    assert logp.tolist() == pytest.approx([1 - math.log(total), 0.0]) and chosen.tolist() == [1.0, 0.0]
    assert entropy.tolist() == pytest.approx([math.log(total) - (math.e + 6 * math.e**3) / total, 0.0])
    assert best.tolist() == [1, 2]


def test_a_logit_that_is_no_number_makes_the_log_prob_none(kernels):
    logits = torch.zeros(2, 5_000)
    logits[0, 4_500] = math.nan
    logp, *_ = kernels.log_probs(logits, torch.tensor([0, 0]), 1.0)
    assert math.isnan(logp[0]) and float(logp[1]) == pytest.approx(-math.log(5_000))
