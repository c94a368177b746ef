"""The same tensors through TRL's own loss: value to 1e-5 and gradient with respect to every log-probability.

`GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss` run unchanged on a stand-in trainer whose forward pass hands back our
leaf. Where TRL's normalisation differs, the psigrad side states the part that matches: TRL's "dr_grpo" divides by
max_completion_length (fixed_length), and truncated rows stay in TRL's row count, so filters are left out here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from psigrad.config.algorithms import resolve
from psigrad.language.models.stats import TokenStatsRequest
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, terminal
from psigrad.objective.parts.aggregate import fixed_length, token_mean, top_entropy
from psigrad.objective.parts.critic import bonus
from psigrad.objective.parts.off_policy import off_policy_mask
from psigrad.objective.parts.ratio import KL, masked_importance, truncated_importance
from psigrad.objective.parts.surrogate import clip, dual_clip, truncated_weight

N, T, GROUP_SIZE, MAX_LENGTH = 8, 6, 4, 9


class Tensors:
    """Log-probs far enough apart that clipping on both sides happens."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(N, T, generator=g)

        self.mask = torch.arange(T) < torch.randint(1, T + 1, (N,), generator=g)[:, None]
        self.logp = normal(1.0) - 2
        self.old = self.logp + normal(0.25)
        self.ref = self.logp + normal(0.4)
        self.sampler: torch.Tensor | None = self.old + normal(0.6)
        self.entropy = normal(1.0).exp()
        self.scores = torch.randn(N, generator=g)
        self.group = torch.arange(N) // GROUP_SIZE


def ours(method: PolicyGradient, x: Tensors):
    leaf = x.logp.clone().requires_grad_()
    entropy = x.entropy.clone().requires_grad_()
    batch = Batch(x.mask, terminal(x.scores, x.mask), x.old, x.group, logp_ref=x.ref, logp_sampler=x.sampler, entropy=x.entropy)
    prepared = method.prepare(batch, {})
    loss = method.loss(prepared, PolicyOutputs(leaf, entropy=entropy), method.totals(prepared), {})
    loss.value.backward()
    return loss, leaf.grad, prepared


def stand_in(x: Tensors, leaf: torch.Tensor, **settings) -> SimpleNamespace:
    defaults = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0, "loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False, "entropy_coef": 0.0,
        "vllm_importance_sampling_correction": False, "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "current_gradient_accumulation_steps": 1, "max_completion_length": MAX_LENGTH,
    }  # fmt: skip
    settings = defaults | settings
    arguments = SimpleNamespace(
        delta=settings.pop("delta", None),
        use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t, gather_for_metrics=lambda t: t, sync_gradients=True,
        pad_across_processes=lambda t, **_: t,
    )  # fmt: skip
    return SimpleNamespace(
        **settings,
        args=arguments,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_high_entropy_mask=partial(GRPOTrainer.get_high_entropy_mask, SimpleNamespace(accelerator=accelerator)),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, x.entropy, None),
    )


def inputs(x: Tensors, advantage: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.zeros(N, T, dtype=torch.long)
    return {
        "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": ids, "completion_mask": x.mask.long(),
        "advantages": advantage, "old_per_token_logps": x.old, "ref_per_token_logps": x.ref,
        "num_items_in_batch": x.mask.sum(), **({} if x.sampler is None else {"sampling_per_token_logps": x.sampler}), **more,
    }  # fmt: skip


def trl_advantages(x: Tensors, std: bool) -> torch.Tensor:
    """TRL's lines: torch.std of each group, +1e-4."""
    grouped = x.scores.view(-1, GROUP_SIZE)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4) if std else centred).flatten()


GRPO = resolve("grpo")
FREE = replace(GRPO, kl=None)
CASES: dict[str, tuple[PolicyGradient, dict]] = {
    "grpo": (GRPO, {"beta": 0.04}),
    "grpo with unbiased kl": (
        replace(GRPO, kl=KL("loss", "k3", 0.3, importance_weighted=True)),
        {"beta": 0.3, "use_bias_correction_kl": True},
    ),
    "grpo with delta": (replace(FREE, surrogate=dual_clip(0.1, 0.2, 1.3)), {"epsilon_low": 0.1, "delta": 1.3}),
    "trl's default": (replace(FREE, aggregate=token_mean), {"loss_type": "dapo"}),
    "dr_grpo": (replace(resolve("dr_grpo"), aggregate=fixed_length(MAX_LENGTH)), {"loss_type": "dr_grpo"}),
    "dapo": (replace(resolve("dapo"), keep=()), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (resolve("gspo"), {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "gspo wide": (
        replace(resolve("gspo"), surrogate=clip(0.1, 0.1), kl=KL("loss", "k3", 0.1)),
        {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1, "beta": 0.1},
    ),
    "cispo": (resolve("cispo"), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo tight": (replace(resolve("cispo"), surrogate=truncated_weight(1.1)), {"loss_type": "cispo", "epsilon_high": 1.1}),
    "sapo": (resolve("sapo"), {"loss_type": "sapo"}),
    "off-policy sequences masked": (replace(FREE, surrogate=off_policy_mask(clip(), 0.02)), {"off_policy_mask_threshold": 0.02}),
    "top entropy": (
        replace(FREE, aggregate=token_mean, keep=(top_entropy(0.3),), kl=KL("loss", "k3", 0.1)),
        {"loss_type": "dapo", "top_entropy_quantile": 0.3, "beta": 0.1},
    ),
    "entropy bonus": (replace(GRPO, entropy=bonus(0.2)), {"beta": 0.04, "_entropy_bonus_enabled": True, "entropy_coef": 0.2}),
}


def compare(method: PolicyGradient, x: Tensors, trl_loss: torch.Tensor, leaf: torch.Tensor) -> None:
    loss, gradient, _ = ours(method, x)
    trl_loss.backward()
    assert leaf.grad is not None and leaf.grad.abs().max() > 1e-3
    torch.testing.assert_close(loss.value, trl_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(name: str) -> None:
    method, settings = CASES[name]
    x = Tensors()
    leaf = x.logp.clone().requires_grad_()
    trainer = stand_in(x, leaf, **settings)
    advantage = trl_advantages(x, std=name != "dr_grpo")
    torch.testing.assert_close(ours(method, x)[2].advantage.sum(1) / x.mask.sum(1), advantage, rtol=1e-5, atol=1e-6)
    compare(method, x, GRPOTrainer._compute_loss(trainer, None, inputs(x, advantage)), leaf)


def test_without_the_samplers_log_probs_the_off_policy_mask_takes_those_before_the_update() -> None:
    method, settings = CASES["off-policy sequences masked"]
    x, both = Tensors(), []
    for sampler in (x.sampler, None):
        x.sampler = sampler
        leaf = x.logp.clone().requires_grad_()
        given = inputs(x, trl_advantages(x, std=True))
        compare(method, x, GRPOTrainer._compute_loss(stand_in(x, leaf, **settings), None, given), leaf)
        both.append(leaf.grad)
    assert not torch.equal(*both)


@pytest.mark.parametrize("name", ["grpo", "trl's default"])
def test_metrics_equal_those_of_trl(name: str) -> None:
    method, settings = CASES[name]
    x = Tensors()
    trainer = stand_in(x, x.logp.clone(), **settings)
    GRPOTrainer._compute_loss(trainer, None, inputs(x, trl_advantages(x, std=True)))
    terms = ours(method, x)[0].terms
    shared = [key for key in trainer._metrics["train"] if key in terms]
    assert {"entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"} <= set(shared)
    assert ("kl" in shared) == (method.kl is not None)
    for key in shared:
        assert terms[key].item() == pytest.approx(trainer._metrics["train"][key][0], rel=1e-5), key
    assert terms["clip_ratio/low_mean"] > 0 and terms["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("truncate", [True, False])
def test_sampler_correction_equals_that_of_trl(level: str, truncate: bool) -> None:
    x = Tensors()
    gap = torch.where(x.mask, x.old - x.sampler, 0.0)
    ratio = (
        gap if level == "token" else gap.sum(1, keepdim=True)
    ).exp()  # TRL: vllm_importance_sampling_mode <level>_truncate | _mask
    ratio = ratio.clamp(max=1.5) if truncate else ratio.masked_fill(ratio > 1.5, 0.0)
    part = truncated_importance(1.5, level) if truncate else masked_importance(1.5, level)
    leaf = x.logp.clone().requires_grad_()
    trainer = stand_in(x, leaf, beta=0.04, use_vllm=True, vllm_importance_sampling_correction=True)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs(x, trl_advantages(x, std=True), importance_sampling_ratio=ratio))
    compare(replace(GRPO, correction=part), x, loss, leaf)


@pytest.mark.parametrize("apart", [False, True])
def test_vespo_loss_and_gradient_equal_those_of_trl(apart: bool) -> None:
    """TRL multiplies the ratio of trainer and sampler into the sequence's weight. Alone, one row moves beyond every limit."""
    x = Tensors()
    x.old[:4] = x.logp[:4] + 0.1 * (x.old[:4] - x.logp[:4])
    x.old[7] += 0.0 if apart else torch.tensor([30.0, -50.0, 0.0, 0.0, 0.0, 0.0])
    gap = torch.where(x.mask, x.old - x.sampler, 0.0)
    x.sampler = x.sampler if apart else None
    leaf = x.logp.clone().requires_grad_()
    trainer = stand_in(x, leaf, loss_type="vespo")
    given = inputs(x, trl_advantages(x, std=True), **({"importance_sampling_ratio": gap.exp()} if apart else {}))
    compare(resolve("vespo"), x, GRPOTrainer._compute_loss(trainer, None, given), leaf)
    assert trainer._metrics["train"]["vespo/phi_seq_mean"][0] > 0.01


def test_gmpo_loss_and_gradient_equal_those_of_trl() -> None:
    x = Tensors()
    x.old = x.logp + 3 * (x.old - x.logp)  # beyond the wide clip on both sides
    leaf = x.logp.clone().requires_grad_()
    trainer = stand_in(x, leaf, epsilon_low=0.4, epsilon_high=0.4)
    compare(resolve("gmpo"), x, GMPOTrainer._compute_loss(trainer, None, inputs(x, trl_advantages(x, std=True))), leaf)


def test_rloo_loss_and_gradient_equal_those_of_trl() -> None:
    x = Tensors()
    x.old = x.logp + (x.old - x.logp) / 3  # so that some completions are clipped and some are not
    rewards = x.scores - 0.05 * torch.where(x.mask, x.old - x.ref, 0.0).sum(1)
    grouped = rewards.view(-1, GROUP_SIZE)
    advantage = (grouped - (grouped.sum(1, keepdim=True) - grouped) / (GROUP_SIZE - 1)).flatten()
    leaf = x.logp.clone().requires_grad_()
    data = inputs(x, advantage, old_logps=torch.where(x.mask, x.old, 0.0).sum(1))
    trainer = stand_in(x, leaf)
    compare(resolve("rloo"), x, RLOOTrainer._compute_loss(trainer, None, data), leaf)
    assert 0 < trainer._metrics["train"]["clip_ratio/region_mean"][0] < 1


def test_control_the_wrong_aggregate_does_not_agree() -> None:
    x = Tensors()
    leaf = x.logp.clone().requires_grad_()
    theirs = GRPOTrainer._compute_loss(stand_in(x, leaf, beta=0.04), None, inputs(x, trl_advantages(x, std=True)))
    assert abs(ours(replace(GRPO, aggregate=token_mean), x)[0].value - theirs) > 1e-3


@pytest.mark.parametrize("share", [0.2, 0.5, 0.37, 1.0])
def test_top_entropy_keeps_the_tokens_that_trl_keeps(share: float) -> None:
    x = Tensors()
    theirs = stand_in(x, x.logp).get_high_entropy_mask(x.entropy, x.mask, 1 - share)
    batch = Batch(x.mask, terminal(x.scores, x.mask), x.old, x.group, entropy=x.entropy)
    assert torch.equal(top_entropy(share)(batch), theirs)
    assert 0 < int(theirs.sum()) <= int(x.mask.sum()) and (share == 1.0) == torch.equal(theirs, x.mask)


@pytest.mark.parametrize(("kind", "mixture", "beta"), [("exact", 0.5, 1.0), ("exact_forward", 0.5, 0.0), ("exact_js", 0.3, 0.3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_exact_divergences_are_those_of_trls_distillation(kind: str, mixture: float, beta: float, temperature: float) -> None:
    g = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(5, 11, generator=g) for _ in range(2))
    student.requires_grad_()
    theirs = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=beta, temperature=temperature, reduction="sum")
    wanted = TokenStatsRequest(temperature, reference_head=lambda hidden: hidden, divergence=kind, mixture=mixture)
    found = wanted.of(student, torch.zeros(5).long(), teacher)[2].sum()
    assert float(found) == pytest.approx(float(theirs), rel=1e-5) and float(found) > 0.1
    (ours_by,), (theirs_by,) = torch.autograd.grad(found, student), torch.autograd.grad(theirs, student)
    torch.testing.assert_close(ours_by, theirs_by, rtol=1e-4, atol=1e-6)
