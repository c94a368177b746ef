"""The same tensors through verl's and OpenRLHF's own functions: value and gradient to 1e-6 (`make test-peers`).

Each case has their function, psigrad's parts, and other parts that must not agree. Where psigrad differs, the second side adds
the difference by hand and the third side is psigrad's part, so a case holds the whole difference. docs/referee.md lists
those that change a normal run.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import replace
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Totals, batch, terminal
from psigrad.objective.parts import advantage, aggregate, critic, group_advantage, ratio, surrogate
from psigrad.objective.parts.advantage import gae, group_mean, leave_one_out, reward_to_go, whitened
from psigrad.objective.parts.aggregate import sequence_mean, sequence_sum, token_mean
from psigrad.objective.parts.ratio import KL, estimate, masked_importance, truncated_importance
from psigrad.objective.parts.surrogate import clip, divergence_mask, dual_clip, score, truncated_weight
from psigrad.objective.preferences import preference_catalog, preference_loss, reward_model

pytestmark = pytest.mark.peers
# OpenRLHF imports these, which need CUDA. Empty modules take their places; no function below calls them.
ABSENT = (
    *("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", "deepspeed.runtime.zero.partition_parameters", "flash_attn"),
    *("flash_attn.utils", "flash_attn.bert_padding", "flash_attn.utils.distributed", "vllm", "vllm.inputs", "vllm.utils"),
)


@functools.cache
def load(name):
    names = ABSENT if name.startswith("openrlhf") else ()
    absent = {each: mock.MagicMock(__spec__=ModuleSpec(each, None), __path__=[]) for each in names}
    sys.modules.update(absent)
    module = importlib.import_module(name)
    for each in absent:
        del sys.modules[each]
    return module


class Data:
    """Rows of uneven lengths in float64, in groups of `sizes`; `holes` are observations between the tokens of a row."""

    def __init__(self, seed=0, sizes=(5, 3), holes=True, rowwise=False, leaf=None):
        g, n, t = torch.Generator().manual_seed(seed), sum(sizes), 9
        normal = functools.partial(torch.randn, n, t, generator=g, dtype=torch.float64)
        self.span = torch.arange(t) < torch.randint(2, t + 1, (n, 1), generator=g)
        self.mask = self.span & ((torch.rand(n, t, generator=g) > 0.2 * holes) | (torch.arange(t) == 0))
        self.group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.scores, self.value, self.returns = normal()[:, 0], normal(), normal()
        self.rewards = terminal(self.scores, self.mask)
        self.old = -normal().abs() - 0.1
        self.ref, self.sampler = self.old + 0.4 * normal(), self.old + 0.6 * normal()
        self.advantage = normal()[:, :1].expand(n, t) if rowwise else normal()
        self.logp = (self.old + 0.4 * normal()).clamp(max=-0.02) if leaf is None else leaf(self, normal())

    def batch(self):
        more = {"logp_ref": self.ref, "logp_sampler": self.sampler, "value": self.value, "parts": self.scores[:, None]}
        return Batch(self.mask, self.rewards, self.old, self.group, **more)

    def mean(self, per_step, weigh=token_mean):
        totals = Totals(int(self.mask.any(1).sum()), int(self.mask.sum()))
        return (torch.where(self.mask, per_step, 0.0) * weigh(self.mask, totals)).sum()


def ours(loss=clip(), weigh=token_mean, rho=ratio.token, psi=None, **more):  # noqa: B008 (a frozen part)
    """Return the loss of a method of psigrad. Without a psi its advantage is the batch's."""

    def side(x, leaf):
        built = PolicyGradient(psi or (lambda batch: x.advantage), rho, loss, weigh, **more)
        prepared = built.prepare(x.batch(), {})
        return built.policy_loss(prepared, PolicyOutputs(leaf), built.totals(prepared), {}).value

    return side


def far(side, x, wanted):
    """Return the largest difference from `wanted` in value or gradient, as a share of the largest number."""
    found = outcome(side, x)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


def outcome(side, x):
    leaf = x.logp.clone().requires_grad_()
    value = side(x, leaf)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def core():
    return load("verl.trainer.ppo.core_algos")


def actor(low=0.2, high=0.2, global_batch_info=None, **settings):
    """Return verl's configuration of an actor, with these bounds of the ratio."""
    configs = load("verl.workers.config")
    more = {key: settings.pop(key) for key in list(settings) if "cov" in key or key == "ppo_kl_coef"}
    given = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high, "rollout_n": 4, **settings}
    given |= {"policy_loss": configs.PolicyLossConfig(**more), "global_batch_info": global_batch_info or {}}
    return configs.ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, **given)


def verl(name, *bounds, mode="token-mean", psi=None, weights=None, **settings):
    """Return a policy loss of verl, whose advantages and rollout weights may be verl's too."""

    def side(x, leaf):
        loss = core().compute_policy_loss_reinforce if name == "reinforce" else core().POLICY_LOSS_REGISTRY[name]
        given, weight = x.advantage if psi is None else psi(x), None
        if weights:
            helper = load("verl.trainer.ppo.rollout_corr_helper")
            weight = helper.compute_rollout_correction_weights(x.old - x.sampler, x.mask, *weights)[0]
        return loss(x.old, leaf, given, x.mask, mode, actor(*bounds, **settings), weight)[0]

    return side


def verl_advantages(name, x, beta=0.0, **more):
    """Return the advantages of an estimator of verl."""
    rewards = core().compute_rewards(x.rewards, x.old, x.ref, beta)
    more |= {"values": x.value} if name == "gae" else {} if name == "reinforce_plus_plus" else {"index": x.group.numpy()}
    return core().ADV_ESTIMATOR_REGISTRY[name](token_level_rewards=rewards, response_mask=x.mask.long(), **more)[0]


def estimator(name, *beta, **more):
    return verl("vanilla", clip_ratio_c=3.0, psi=lambda x: verl_advantages(name, x, *beta, **more))


def openrlhf(psi=None, **settings):
    """Return the policy loss of OpenRLHF."""

    def side(x, leaf):
        given = x.advantage if psi is None else psi(x)
        return load("openrlhf.models.loss").PolicyLoss(**settings)(leaf, x.old, given, x.mask.double(), x.sampler)[0]

    return side


def openrlhf_advantages(x, name, gamma=1.0, lam=1.0, beta=0.0, size=4):
    """Return the advantages of OpenRLHF's experience maker, with `size` completions of each prompt."""
    maker, algo = load("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker, SimpleNamespace()
    algo.advantage = SimpleNamespace(estimator=name, gamma=gamma, lambd=lam, no_std_norm=False)
    args = SimpleNamespace(algo=algo, rollout=SimpleNamespace(n_samples_per_prompt=size), reward=SimpleNamespace(clip_range=None))
    self = SimpleNamespace(strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=beta), advantage_estimator=name)
    for each in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(self, each, functools.partial(getattr(maker, each), self))
    rows = SimpleNamespace(rewards=x.scores, index=list(range(len(x.scores))), info={}, kl=x.old - x.ref)
    rows.action_mask, rows.values = x.mask, x.value
    return maker.compute_advantages_and_returns(self, [rows])[0].advantages


def experience(*arguments):
    return openrlhf(lambda x: openrlhf_advantages(x, *arguments))


def of_loss(name, *arguments, **settings):
    """Return a loss of OpenRLHF on pairs: rows 1 to 4 are chosen and rows 5 to 8 rejected."""

    def side(x, leaf):
        rows = [*pair(x.mask * leaf), *(pair(x.mask * x.ref) if name == "DPOLoss" else ())]
        found = getattr(load("openrlhf.models.loss"), name)(*arguments)(*rows, **settings)
        return found[0] if isinstance(found, tuple) else found

    return side


def pair(per_step):
    return per_step.sum(1).split(4)


def preferred(method):
    def side(x, leaf):
        pairs = preference_loss.Pairs(*pair(x.mask * leaf), *pair(x.mask.long()), *pair(x.mask * x.ref))
        return method.loss(pairs, 4, 1).value

    return side


def compared(margin=None, smoothing=0.0):
    return lambda x, leaf: reward_model.BradleyTerry(0.0, smoothing).loss(*pair(x.mask * leaf), margin, 4).value


def kl(of, cap=float("inf")):
    """Return psigrad's estimate of the KL, bounded by `cap`, or that of a function of (log π, log π_ref, log π_old)."""
    found = of if callable(of) else lambda logp, ref, old: estimate(of, logp - ref).clamp(-cap, cap)
    return lambda x, leaf: found(leaf, x.ref, x.old)[x.mask]


def kl_of(library, *kind):
    if library == "verl":
        return kl(lambda logp, ref, old: core().kl_penalty(logp, ref, *kind))
    return kl(lambda *logps: load("openrlhf.models.utils").compute_approx_kl(*logps, *kind))


def value_of(limit):
    return lambda x, leaf: x.mean(critic.value_loss(clip=limit)(leaf, x.value, x.returns))


def vanilla(psi=None, **more):
    return ours(dual_clip(), psi=psi, **more)


def alone(psi, share=1.0):
    """Give a row that is alone in its group `share` of its return as the advantage, as verl does."""

    def advantages(b):
        single = (batch.group_size(b.group) == 1)[:, None] & b.mask
        return torch.where(single, share * b.sequence_reward[:, None], psi(b))

    return vanilla(advantages)


def biased(psi):
    """Whiten by the standard deviation over n in place of n − 1, as OpenRLHF does."""
    return ours(psi=lambda b: whitened(psi)(b) * (1 - 1 / int(b.mask.sum())) ** -0.5)


def across(psi):
    """Whiten a psi that counts observations as steps, with a value of 0, as OpenRLHF does."""
    rows = lambda x, b: Batch(x.span, b.reward, b.logp_old, b.group, value=b.value)  # noqa: E731
    return lambda x, leaf: biased(lambda b: psi(rows(x, b)))(x, leaf)


def by_current(x, leaf, kind):
    """Choose the steps of Clip-Cov or KL-Cov by the current log-probs, as verl does."""
    now, moved = Batch(x.mask, x.rewards, leaf, x.group), leaf - x.old
    loss, most = -moved.exp() * x.advantage, -moved.exp().clamp(0.8, 1.2) * x.advantage
    if kind == "kl":
        return x.mean(loss + penalised.marks(now, x.advantage) * moved.abs())
    return x.mean(torch.maximum(loss, most) * (clip_covariance(now, x.advantage) | (most > loss)))


GAMMA = {"config": SimpleNamespace(gamma=0.9)}
COV, KL_COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}, {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
SHIFTED, LIKELY = {"leaf": lambda x, noise: x.old + 0.1}, {"leaf": lambda x, noise: -0.02 * noise.abs()}
FAR, FAR_KL = {"leaf": lambda x, noise: x.old + 20 + noise}, {"leaf": lambda x, noise: x.ref - 4 * noise.abs()}
ROWS, FOURS, SINGLE, FULL = {"rowwise": True}, {"sizes": (4, 4)}, {"sizes": (7, 1)}, {"sizes": (4, 4), "holes": False}
dual, mask, cut = dual_clip, divergence_mask, truncated_weight
white, to_go, group, loo = whitened, reward_to_go, group_mean, leave_one_out
clip_covariance, penalised = aggregate.clip_covariance(0.999, 0.2, 5.0), surrogate.covariance_penalty(0.1)
centred, trained, icepop, tis = group(std=False), critic.value_loss(), masked_importance, truncated_importance
dpo, weigh = preference_catalog.DPO, KL("loss", "k3+", importance_weighted=True).per_step
MODES = [
    ("token-mean", token_mean), ("seq-mean-token-sum", sequence_sum), ("seq-mean-token-mean", sequence_mean),
    ("seq-mean-token-sum-norm", aggregate.fixed_length(9)),
]  # fmt: skip
VERL = {
    **{f"vanilla, {name}": (verl("vanilla", 0.2, 0.28, mode=name, clip_ratio_c=1.5), ours(dual(0.2, 0.28, 1.5), by),
                            ours(clip(0.2, 0.28), by)) for name, by in MODES},
    "vanilla beyond e^20": (verl("vanilla", clip_ratio_c=1e15), ours(lambda p, d, a: clip()(p, d.clamp(max=20), a)), ours(), FAR),
    "dppo_tv": (verl("dppo_tv", 0.15, 0.15, clip_ratio_c=20.0), ours(mask()), ours(mask(0.3))),
    "dppo_tv, default": (verl("dppo_tv", 1.0, 1.0), ours(mask(1.0, 3.0)), ours(mask(1.0)), LIKELY),
    "gspo": (verl("gspo", mode="seq-mean-token-mean"), ours(clip(), sequence_mean, ratio.sequence), ours(clip(), sequence_mean)),
    "sapo": (verl("sapo"), ours(surrogate.soft_clip(), sequence_mean), ours(surrogate.soft_clip(1.2), sequence_mean)),
    "gpg": (verl("gpg"), ours(score, rho=ratio.none), ours(surrogate.unclipped)),
    "reinforce": (verl("reinforce", mode=MODES[1][0]), ours(score, sequence_sum, ratio.none), ours(score, rho=ratio.none)),
    "clip_cov": (verl("clip_cov", **COV), ours(keep=(clip_covariance,)), ours(), SHIFTED),
    "clip_cov, another policy": (verl("clip_cov", **COV), lambda *x: by_current(*x, "clip"), ours(keep=(clip_covariance,))),
    "kl_cov": (verl("kl_cov", **KL_COV), ours(penalised), ours(surrogate.covariance_penalty(0.3)), SHIFTED),
    "kl_cov, another policy": (verl("kl_cov", **KL_COV), lambda *x: by_current(*x, "kl"), ours(penalised)),
    "geo_mean": (verl("geo_mean", 0.4, 0.4), ours(surrogate.geometric_clip(), sequence_mean), ours(clip(), sequence_mean), ROWS),
    "cispo": (verl("cispo", 1.0, 0.3), ours(cut(1.3)), ours(cut(1.2))),
    "cispo, default": (verl("cispo"), ours(lambda p, d, a: -d.exp().clamp(0.8, 1.2).detach() * a * p), ours(cut(1.2))),
    "value": (lambda x, v: core().compute_value_loss(v, x.returns, x.value, x.mask, 0.5)[0], value_of(0.5), value_of(0.4)),
    **{f"kl {each}": (kl_of("verl", each), kl(each), kl("k1" if each == "k2" else "k2")) for each in ratio.ESTIMATORS[:5]},
    "kl k3 above 10": (kl_of("verl", "k3"), kl("k3", 10), kl("k3"), FAR_KL),
    "grpo": (estimator("grpo"), vanilla(group(eps=1e-6)), vanilla(group(eps=1e-2))),
    "grpo without std": (estimator("grpo", norm_adv_by_std_in_grpo=False), vanilla(centred), vanilla(group())),
    "grpo, one alone": (estimator("grpo"), alone(group(eps=1e-6), 1 / (1 + 1e-6)), vanilla(group(eps=1e-6)), SINGLE),
    "grpo_vectorized": (estimator("grpo_vectorized"), vanilla(group(eps=1e-6)), vanilla(centred)),
    "rloo": (estimator("rloo"), vanilla(loo), vanilla(centred)),
    "rloo, one alone": (estimator("rloo"), alone(loo), vanilla(loo), SINGLE),
    "rloo_vectorized": (estimator("rloo_vectorized"), vanilla(loo), vanilla(centred)),
    "opo": (estimator("opo"), vanilla(group_advantage.length_weighted_mean), vanilla(centred)),
    "gdpo": (estimator("gdpo"), vanilla(white(group(eps=1e-6))), vanilla(group_advantage.decoupled_group_mean(1e-6))),
    "reinforce++ baseline": (estimator("reinforce_plus_plus_baseline"), vanilla(white(centred)), vanilla(centred)),
    "reinforce++": (estimator("reinforce_plus_plus", 0.3, **GAMMA), vanilla(white(to_go(0.9)), kl=KL("reward", "k1", 0.3)),
                    vanilla(white(to_go(0.9)))),
    "gae": (estimator("gae", gamma=0.9, lam=0.8), vanilla(white(gae(0.9, 0.8)), critic=trained),
            vanilla(white(gae()), critic=trained)),
    **{f"{bounds} of the {level}": (verl("vanilla", clip_ratio_c=3.0, weights=(level, bounds)),
                                    vanilla(correction=same(level)), vanilla(correction=icepop(1.5, level)))
       for level in ("token", "sequence")
       for bounds, same in (("1.5", lambda at: tis(1.5, at)), ("0.5_1.5", lambda at: icepop(1.5, at, 0.5)))},
}  # fmt: skip
OPENRLHF = {
    "PolicyLoss": (openrlhf(clip_eps_high=0.28), ours(clip(0.2, 0.28)), ours()),
    "PolicyLoss, dual clip": (openrlhf(dual_clip=1.3, token_level_loss=False), ours(dual(bound=1.3), sequence_mean),
                              ours(weigh=sequence_mean)),
    "PolicyLoss, gspo": (openrlhf(policy_loss_type="gspo"), ours(clip(), sequence_mean, ratio.sequence),
                         ours(weigh=sequence_mean), ROWS),
    "PolicyLoss, TIS": (openrlhf(is_correction_level="token", is_correction_mode="clip"),
                        ours(correction=tis(5.0, "token", 0.5)), ours()),
    "PolicyLoss, IcePop": (openrlhf(is_correction_level="token"), ours(correction=icepop(5.0, "token", 0.5)), ours()),
    "PolicyLoss, seq-mask-tis": (openrlhf(is_correction_level="seq", is_correction_threshold=(0.9, 1.5)),
        ours(correction=lambda b: (icepop(1.5, "geometric", 0.9)(b) > 0) * (b.logp_old - b.logp_sampler).exp()),
        ours(correction=icepop(1.5, "geometric", 0.9))),
    "SFTLoss": (lambda x, p: load("openrlhf.models.loss").SFTLoss()(p, x.mask.double()),
                ours(score, rho=ratio.none, psi=advantage.ones), ours(score, sequence_mean, ratio.none, advantage.ones)),
    "ValueLoss": (lambda x, v: load("openrlhf.models.loss").ValueLoss(0.5)(v, x.value, x.returns, x.mask.double()),
                  value_of(0.5), value_of(0.4)),
    **{f"kl {each}": (kl_of("openrlhf", each), kl(each), kl("k1" if each == "k2" else "k2")) for each in ("k1", "k2", "k3")},
    **{f"kl {each} above 10": (kl_of("openrlhf", each), kl(each, 10), kl(each), FAR_KL) for each in ("k2", "k3")},
    "kl, unbiased": (kl_of("openrlhf", "k3", True),
                     kl(lambda p, ref, old: estimate("k3", p - ref).detach() + weigh(p, old, ref) - weigh(p, old, ref).detach()),
                     kl(lambda p, ref, old: weigh(p, old, ref))),
    "DPOLoss": (of_loss("DPOLoss", 0.1, 0.2), preferred(replace(dpo, link=preference_loss.logistic(0.2))), preferred(dpo), FOURS),
    "DPOLoss, ipo": (of_loss("DPOLoss", 0.1, 0.0, True), preferred(replace(dpo, link=preference_loss.squared)),
                     preferred(preference_catalog.IPO), FOURS),
    "PairWiseLoss": (of_loss("PairWiseLoss", margin=torch.arange(4.0)), compared(torch.arange(4.0)), compared(), FOURS),
    "LogExpLoss": (of_loss("LogExpLoss"), compared(), compared(smoothing=0.1), FOURS),
    "rloo": (experience("rloo"), ours(psi=loo), ours(psi=centred), FOURS),
    "rloo with KL": (experience("rloo", 1.0, 1.0, 0.3),
        ours(psi=lambda b: loo(b) - 0.3 * to_go()(Batch(b.mask, b.logp_old - b.logp_ref, b.logp_old, b.group))),
        ours(psi=loo, kl=KL("reward", "k1", 0.3)), FOURS),
    "dr_grpo": (experience("dr_grpo"), ours(psi=centred), ours(psi=group()), FOURS),
    "group_norm": (experience("group_norm"), ours(psi=group(eps=1e-9)), ours(psi=group(eps=1e-2)), FOURS),
    "flash_reinforce": (experience("flash_reinforce"), ours(psi=advantage.batch_mean), ours(psi=centred), FOURS),
    "reinforce_baseline": (experience("reinforce_baseline"), biased(centred), ours(psi=white(centred)), FOURS),
    "reinforce": (experience("reinforce", 0.9), biased(to_go(0.9)), ours(psi=white(to_go(0.9))), FULL),
    "gae": (experience("gae", 0.9, 0.8), biased(gae(0.9, 0.8)), ours(psi=white(gae(0.9, 0.8)), critic=trained), FULL),
    "gae with observations": (experience("gae", 0.9, 0.8), across(gae(0.9, 0.8)), biased(gae(0.9, 0.8)), FOURS),
    "reinforce with observations": (experience("reinforce", 0.9), across(to_go(0.9)), biased(to_go(0.9)), FOURS),
}  # fmt: skip
CASES = {**{f"verl {name}": case for name, case in VERL.items()}, **{f"OpenRLHF {name}": case for name, case in OPENRLHF.items()}}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_equal_and_with_other_parts_they_are_not(name, seed):
    theirs, same, other, *settings = CASES[name]
    x = Data(seed, **(settings[0] if settings else {}))
    wanted = outcome(theirs, x)
    assert wanted[1].abs().max() > 1e-3, "a gradient of zeros would agree with everything"
    assert far(same, x, wanted) <= 1e-6 < 1e-3 < far(other, x, wanted)


def test_equal_rewards_are_no_advantage_in_psigrad_and_noise_of_float32_in_verl_and_openrlhf():
    x = Data(sizes=(7,))
    x.scores = torch.full((7,), 0.9)
    x.rewards, x.old, x.ref = terminal(x.scores, x.mask), x.old.float(), x.old.float()
    assert not group(eps=1e-9)(x.batch()).any()
    assert (
        verl_advantages("grpo", x)[0, 0] == pytest.approx(-0.056, abs=1e-3)
        and openrlhf_advantages(x, "group_norm", size=7)[0, 0] < -0.9
    )


def test_verls_geo_mean_divides_by_the_micro_batch():
    x, totals = Data(sizes=(4, 4), rowwise=True), {"global_batch_size": 8, "dp_size": 1}

    def summed(name, parts):
        rows = zip(*(each.chunk(parts) for each in (x.old, x.logp, x.advantage, x.mask)), strict=True)
        loss = core().POLICY_LOSS_REGISTRY[name]
        return float(sum(loss(*each, "seq-mean-token-mean", actor(global_batch_info=totals))[0] for each in rows))

    assert summed("vanilla", 4) == pytest.approx(summed("vanilla", 1)) and summed("geo_mean", 4) == pytest.approx(
        4 * summed("geo_mean", 1)
    )


def test_the_page_has_a_row_for_each_registered_function_of_these_versions():
    page = (Path(__file__).parents[2] / "docs" / "referee.md").read_text()
    names = [*core().POLICY_LOSS_REGISTRY, *core().ADV_ESTIMATOR_REGISTRY]
    assert len(names) > 20 and not [name for name in names if f"`{name}`" not in page]
    assert f"verl {metadata.version('verl')} and OpenRLHF {metadata.version('openrlhf')}" in page
