"""The single-file GRPO of examples/ and the library compute the same loss and the same gradient."""

from __future__ import annotations

import random

import pytest
import scripts
import torch

from psigrad.config.algorithms import resolve
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.objective import Batch, terminal


@pytest.fixture(scope="module")
def one_file():
    return scripts.load("examples/grpo_in_one_file.py")


@pytest.mark.parametrize("off_policy", [False, True])
def test_the_one_file_grpo_equals_the_library(one_file, off_policy):
    tokenizer = tiny.tokenizer(["hello"], 270)
    model = prepare(tiny.model("qwen3", len(tokenizer)), tokenizer)
    reference = prepare(tiny.model("qwen3", len(tokenizer), seed=1), tokenizer)
    rng = random.Random(0)
    prompts = [[rng.randrange(260) for _ in range(n)] for n in (4, 7)]
    completions = [[[rng.randrange(260) for _ in range(rng.randint(1, 9))] for _ in range(4)] for _ in prompts]
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 1.0, 0.25]])
    parameters = list(model.trainable().values())

    groups = Groups(prompts, completions)
    evaluation = model.evaluate(groups)
    lengths = torch.tensor([len(c) for cs in completions for c in cs])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    noise = 0.3 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * off_policy
    logp_old = evaluation.logp.detach() + noise
    batch = Batch(
        mask=mask,
        reward=terminal(rewards.flatten(), mask),
        logp_old=logp_old,
        group=torch.tensor([0] * 4 + [1] * 4),
        logp_ref=reference.evaluate(groups).logp.detach(),
    )
    grpo = resolve("grpo")
    prepared = grpo.prepare(batch, grpo.initial_state())
    ours = grpo.loss(prepared, evaluation, grpo.totals(prepared), prepared.state).value

    theirs = 0.0
    for g, prompt in enumerate(prompts):
        width = max(len(c) for c in completions[g])
        old = logp_old[4 * g : 4 * g + 4, :width] if off_policy else None
        theirs = theirs + one_file.group_loss(model.network, reference.network, prompt, completions[g], rewards[g], old) / len(
            prompts
        )

    assert abs(float(ours.detach()) - float(theirs.detach())) < 1e-6
    for a, b in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_the_one_file_samples_what_its_loss_can_read(one_file):
    tokenizer = tiny.tokenizer(["hello"], 270)
    model = tiny.model("qwen3", len(tokenizer)).eval()
    torch.manual_seed(0)
    completions = one_file.sample(model, [5, 6, 7], tokenizer.eos_token_id)
    assert len(completions) == one_file.GROUP_SIZE
    assert all(1 <= len(c) <= one_file.MAX_NEW_TOKENS and tokenizer.eos_token_id not in c[:-1] for c in completions)
    loss = one_file.group_loss(model, model, [5, 6, 7], completions, torch.arange(8.0))
    loss.backward()
    assert abs(float(loss.detach())) < 1e-5  # on-policy advantages of a group add up to zero
    assert any(float(p.grad.abs().max()) > 0 for p in model.parameters())
