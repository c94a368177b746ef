"""What only a CUDA device runs, against the same without it: `make test-gpu`."""

from __future__ import annotations

import random

import pytest
import torch
from in_memory import make

from psigrad import compiled
from psigrad.config import Optim
from psigrad.language.models import logprobs, tiny
from psigrad.language.models.hf_attention import unpad
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups, pack
from psigrad.language.models.stats import TokenStatsRequest
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams, State
from psigrad.language.training.online.collect import collect
from psigrad.language.training.online.online_rl import learn
from psigrad.optim import Optimizer
from psigrad.step import Clock

pytestmark = pytest.mark.gpu
GROUPS = Groups(
    prompts=((3, 1, 2), (2, 5, 4, 1, 3), (7,)), completions=(((4, 2, 1), (1,)), ((3, 3), (2, 1, 4, 5)), ((1, 2, 3, 4, 5),))
)


def model_on(device: str):
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    made = prepare(tiny.model("qwen3", len(tokenizer)).to(device), tokenizer)
    with torch.no_grad():
        for p in made.network.parameters():
            p.mul_(2)
    return made


def trained(model, recompute: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = Optimizer(model.trainable(), Optim(), recompute=recompute)
    norms = [optimizer.step([lambda: -model.evaluate(GROUPS).logp.sum()], 1e-3) for _ in range(3)]
    return norms, [p.detach().cpu() for p in model.trainable().values()]


@pytest.mark.parametrize("how", ["sdpa", "flex", "recompute"])
def test_three_steps_are_those_of_the_cpu(how):
    model = model_on("cuda")
    if how == "flex":
        model.attend("flex")
    norms, weights = trained(model, recompute=how == "recompute")
    expected, others = trained(model_on("cpu"))
    assert norms == pytest.approx(expected, rel=1e-3)
    assert max(float((a - b).abs().max()) for a, b in zip(weights, others, strict=True)) < 1e-3


@pytest.mark.parametrize("how", ["varlen", "flex"])
def test_attention_without_padding_has_the_gradient_of_the_padded_one(how):
    """In half precision, where they differ by rounding: against float32, no further than the padded one, four times over."""
    layout = pack(GROUPS, "cuda").layout
    draws = torch.Generator("cuda").manual_seed(0)
    exact = [torch.randn(1, heads, layout.rows, 64, device="cuda", generator=draws) for heads in (4, 2, 2)]
    slope = torch.randn(1, layout.rows, 4, 64, device="cuda", generator=draws)

    def passed(one, dtype):
        given = [x.to(dtype, copy=True).requires_grad_() for x in exact]
        out = one.attend(0, *given, 0.125, None)
        out.backward(slope.to(dtype))
        return [x.float() for x in (out.detach(), *(x.grad for x in given))]

    right = passed(layout, torch.float32)
    apart = [
        [float((a - b).norm()) for a, b in zip(passed(one, torch.bfloat16), right, strict=True)]
        for one in (unpad(layout, how), layout)
    ]
    assert all(ours <= 4 * theirs for ours, theirs in zip(*apart, strict=True))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dapo", "top_entropy", "gdpo", "distill", "online_dpo"])
def test_a_run_on_the_device_learns_what_one_on_the_cpu_learns(algorithm):
    """From the same completions: one step of the whole online loop."""

    def weights(device: str):
        run = make(tiny.tokenizer(["say a: b"], 270), algorithm, steps=1, device=device)
        state = State(algorithm=run.algorithm.initial_state())
        collected = collect(make(tiny.tokenizer(["say a: b"], 270), algorithm, steps=1), 0, 0, Clock())
        learn(run, collected.groups, state, 1e-3)
        return [p.detach().cpu() for p in run.model.trainable().values()]

    pairs = zip(weights("cuda"), weights("cpu"), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-3


def test_a_recorded_step_writes_what_a_step_writes():
    rng, model = random.Random(0), model_on("cuda")
    requests = [
        Request(tuple(rng.randrange(5, 260) for _ in range(n)), tuple(rng.getrandbits(63) for _ in range(m)))
        for n, m in [(3, 4), (12, 1), (7, 6), (20, 2)]
    ]
    plain, recorded = (
        EmbeddedSampler(model, 8, cuda_graphs=on).sample(requests, SamplingParams(max_tokens=24)) for on in (False, True)
    )
    pairs = [(a, b) for ours, theirs in zip(plain, recorded, strict=True) for a, b in zip(ours, theirs, strict=True)]
    # a product of another width rounds otherwise, and one draw in thousands falls to the next token
    assert sum(a.ids == b.ids for a, b in pairs) >= len(pairs) - 1
    assert all(a.logprobs == pytest.approx(b.logprobs, abs=1e-3) for a, b in pairs if a.ids == b.ids)


@pytest.mark.parametrize("kernels", [True, False], ids=["triton", "torch"])
def test_the_log_probs_of_a_large_vocabulary_and_their_gradient_are_those_of_float64(kernels, monkeypatch):
    if kernels:
        assert compiled.gpu_kernels(torch.zeros(1, device="cuda")) is not None
    else:
        monkeypatch.setattr(logprobs, "gpu_kernels", lambda x: None)
    draws = torch.Generator("cuda").manual_seed(0)
    head = torch.nn.Linear(64, 151_936, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = (8 * torch.randn(500, 64, device="cuda", generator=draws)).bfloat16().requires_grad_()
    logits = head(hidden).detach()
    ids = logits.argmax(1)
    found = logprobs.token_stats(hidden, ids, head, 151_936, TokenStatsRequest(0.7)).logp
    found.sum().backward()
    right = torch.log_softmax(logits.double() / 0.7, -1)
    torch.testing.assert_close(found.double(), right.gather(1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-4)
    slope = (torch.nn.functional.one_hot(ids, 151_936) - right.exp()) / 0.7 @ head.weight.double()
    assert float((hidden.grad.double() - slope).norm() / slope.norm()) < 0.01
