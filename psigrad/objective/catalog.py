"""The policy-gradient methods: the name, the summary, the parts and the settings of each.

Where TRL's default differs, the comment above a method says so. Learning rates carry over from TRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import (
    batch_mean,
    gae,
    group_mean,
    leave_one_out,
    length_gae,
    moving_average,
    no_reward,
    ones,
    reward_to_go,
    total_return,
    whitened,
)
from psigrad.objective.parts.aggregate import (
    clip_covariance,
    fixed_length,
    has_signal,
    not_truncated,
    sequence_mean,
    sequence_sum,
    token_mean,
    top_entropy,
    top_k,
)
from psigrad.objective.parts.critic import value_loss
from psigrad.objective.parts.group_advantage import (
    decoupled_group_mean,
    length_weighted_mean,
    over_group_mean,
    pass_at_k,
    process_group_mean,
)
from psigrad.objective.parts.off_policy import gamma_weight, symmetric_mask
from psigrad.objective.parts.ratio import KL
from psigrad.objective.parts.surrogate import (
    clip,
    covariance_penalty,
    divergence_mask,
    geometric_clip,
    kl_penalty,
    score,
    soft_clip,
    truncated_weight,
    with_imitation,
)
from psigrad.objective.policy_gradient import PolicyGradient

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Method(Generic[A]):
    """A training method that users choose by name, such as grpo."""

    name: str
    """The method's name on the command line and in Python."""
    summary: str
    """One line for `psigrad --all`."""
    algorithm: A
    """The method's mathematics."""
    defaults: Mapping[str, Any]
    """Settings whose default differs from `OnlineConfig` or `PreferenceConfig`. The user's settings win."""


class Catalog(dict[str, Method[A]]):
    """Methods by name, in the order of their declarations."""

    def declare(self, name: str, summary: str, algorithm: B, **defaults: Any) -> B:
        """Register a method with a one-line `summary` and `defaults` for settings. Return `algorithm`, with its name set."""
        named: B = replace(algorithm, name=name)  # type: ignore[type-var]
        self[name] = Method(name, summary, cast(A, named), defaults)
        return named


METHODS: Catalog[PolicyGradient] = Catalog()

# This is the paper's GRPO. TRL defaults to beta 0.0 and loss_type "dapo": replace(GRPO, kl=None, aggregate=token_mean).
GRPO = METHODS.declare(
    "grpo",
    "group relative policy optimisation",
    PolicyGradient(group_mean(), ratio.token, clip(0.2, 0.2), sequence_mean, kl=KL("loss", "k3", 0.04)),
)

# TRL divides by max_completion_length. Set aggregate.n to it before you use TRL's learning rate.
DR_GRPO = METHODS.declare(
    "dr_grpo",
    "GRPO without its length and difficulty biases",
    PolicyGradient(group_mean(std=False), ratio.token, clip(0.2, 0.2), fixed_length(1024)),
)

# The paper's soft overlong punishment is a reward function, not a part of the loss.
DAPO = METHODS.declare(
    "dapo",
    "GRPO with clip-higher, dynamic sampling and a token-level loss",
    PolicyGradient(group_mean(), ratio.token, clip(0.2, 0.28), token_mean, keep=(has_signal, not_truncated)),
)

GSPO = METHODS.declare(
    "gspo",
    "one clipped ratio per sequence",
    PolicyGradient(group_mean(), ratio.sequence, clip(3e-4, 4e-4), sequence_mean),
)
CISPO = METHODS.declare(
    "cispo", "truncated weights, without a clip", PolicyGradient(group_mean(), ratio.token, truncated_weight(5.0), token_mean)
)

# As in TRL's RLOO: beta 0.05 with k1 in the reward, and a clip of the whole completion's ratio. On fresh samples the ratio is 1
# and the gradient is the paper's, −A·grad log π(y|x).
RLOO = METHODS.declare(
    "rloo",
    "REINFORCE with a leave-one-out baseline",
    PolicyGradient(leave_one_out, ratio.trajectory, clip(), sequence_mean, kl=KL("reward", "k1", 0.05)),
)

# The whole completion is one action. Its reward is the score minus beta times the summed log-ratio to the reference.
REINFORCE = METHODS.declare(
    "reinforce",
    "REINFORCE with the batch mean as baseline",
    PolicyGradient(batch_mean, ratio.none, score, sequence_sum, kl=KL("reward", "k1", 0.05)),
)
REINFORCE_MOVING_AVERAGE = METHODS.declare(
    "reinforce_moving_average", "REINFORCE with a moving average as baseline", replace(REINFORCE, psi=moving_average(0.9))
)

# Textbook forms for any environment, without a reference policy.
REINFORCE_TOTAL_RETURN = METHODS.declare(
    "reinforce_total_return",
    "REINFORCE with the return of the whole episode",
    PolicyGradient(total_return(), ratio.none, score, sequence_sum),
)
REINFORCE_REWARD_TO_GO = METHODS.declare(
    "reinforce_reward_to_go", "REINFORCE with the return from each step on", replace(REINFORCE_TOTAL_RETURN, psi=reward_to_go())
)

# beta is 0.01 as in OpenRLHF, whose authors wrote the paper.
REINFORCE_PP = METHODS.declare(
    "reinforce_pp",
    "REINFORCE++: advantages whitened over the batch",
    PolicyGradient(whitened(reward_to_go()), ratio.token, clip(), token_mean, kl=KL("reward", "k1", 0.01)),
)

# PPO for language models as in InstructGPT and TRL's former PPOTrainer. The KL to the reference is in the reward of each token.
# Lambda is 1: Ahmadian et al. 2024 find the bias of a smaller one harmful here. Advantages are whitened over the batch, and each
# batch of one completion per prompt gets four passes.
PPO = METHODS.declare(
    "ppo",
    "proximal policy optimisation with a critic",
    PolicyGradient(
        whitened(gae(1.0, 1.0)),
        ratio.token,
        clip(0.2, 0.2),
        token_mean,
        kl=KL("reward", "k1", 0.05),
        critic=value_loss(0.1, 0.2),
    ),
    num_iterations=4,
    num_generations=1,
)
PPO_PENALTY = METHODS.declare(
    "ppo_penalty",
    "PPO with an adaptive KL penalty in place of the clip",
    replace(PPO, surrogate=kl_penalty(1.0, 0.01)),
    num_iterations=4,
    num_generations=1,
)

# PPO for long chains of thought: the critic learns from whole returns, the policy from a smaller λ. The paper pretrains its
# critic on completions of the starting policy, as `critic_warmup_steps` does.
VC_PPO = METHODS.declare(
    "vc_ppo",
    "PPO with one λ for the policy and another for the critic",
    replace(PPO, psi=whitened(gae(1.0, 0.95)), kl=None, critic=value_loss(0.1, 0.2, gae(1.0, 1.0))),
    num_iterations=4,
    num_generations=1,
)
VAPO = METHODS.declare(
    "vapo",
    "VC-PPO with λ growing with length, clip-higher and imitation of right answers",
    replace(VC_PPO, psi=whitened(length_gae(0.05)), surrogate=with_imitation(clip(0.2, 0.28), 0.1)),
    num_iterations=4,
)

# The authors recommend this variant with groups: subtract the group's mean, whiten over the batch, and put KL by k2 in the loss.
REINFORCE_PP_BASELINE = METHODS.declare(
    "reinforce_pp_baseline",
    "REINFORCE++ with the group's mean as baseline",
    PolicyGradient(whitened(group_mean(std=False)), ratio.token, clip(), token_mean, kl=KL("loss", "k2", 0.01)),
)

# Exactly on-policy, as in the paper: no ratio, no KL, no entropy bonus.
OPO = METHODS.declare(
    "opo",
    "exactly on-policy, with the baseline that minimises variance",
    PolicyGradient(length_weighted_mean, ratio.none, score, token_mean),
)
MAXRL = METHODS.declare(
    "maxrl", "maximum likelihood of success", PolicyGradient(over_group_mean, ratio.token, clip(0.2, 0.28), token_mean)
)
PASS_AT_K = METHODS.declare(
    "pass_at_k", "one right answer among k is enough", PolicyGradient(pass_at_k(4), ratio.token, clip(0.2, 0.28), token_mean)
)
SAPO = METHODS.declare(
    "sapo", "a sigmoid in place of the clip", PolicyGradient(group_mean(), ratio.token, soft_clip(), sequence_mean)
)
DPPO = METHODS.declare(
    "dppo",
    "a bound on changes of probability in place of the clip",
    PolicyGradient(group_mean(), ratio.token, divergence_mask(), token_mean),
)
GMPO = METHODS.declare(
    "gmpo", "a geometric mean of clipped ratios", PolicyGradient(group_mean(), ratio.token, geometric_clip(), sequence_mean)
)

# Two methods for samples of older weights. prime-rl calls the first one IPO, which is also the name of a preference loss.
PRIME_IPO = METHODS.declare(
    "prime_ipo",
    "IPO of prime-rl: DPPO's bound, for both signs of the advantage",
    PolicyGradient(group_mean(std=False), ratio.token, symmetric_mask(), token_mean),
)
VESPO = METHODS.declare(
    "vespo", "a smooth weight on whole sequences", PolicyGradient(group_mean(), ratio.token, gamma_weight(), token_mean)
)

GDPO = METHODS.declare(
    "gdpo",
    "GRPO with each reward standardised separately",
    PolicyGradient(decoupled_group_mean(), ratio.token, clip(0.2, 0.2), sequence_mean, kl=KL("loss", "k3", 0.04)),
)
PROCESS_GRPO = METHODS.declare(
    "process_grpo",
    "GRPO on the rewards of steps or turns",
    PolicyGradient(process_group_mean(), ratio.token, clip(0.2, 0.2), sequence_mean, kl=KL("loss", "k3", 0.04)),
)

# Three methods against the collapse of entropy. The 80/20 paper builds on DAPO; Clip-Cov and KL-Cov on GRPO without a KL term.
TOP_ENTROPY = METHODS.declare(
    "top_entropy", "DAPO on the 20 % of the tokens with the highest entropy", replace(DAPO, keep=(*DAPO.keep, top_entropy(0.2)))
)
CLIP_COV = METHODS.declare(
    "clip_cov",
    "GRPO without the tokens that lower the entropy most",
    PolicyGradient(group_mean(), ratio.token, clip(0.2, 0.2), token_mean, keep=(clip_covariance(),)),
)
KL_COV = METHODS.declare(
    "kl_cov",
    "a penalty on the tokens that lower the entropy most",
    PolicyGradient(group_mean(), ratio.token, covariance_penalty(), token_mean),
    num_minibatches=4,
)

# On-policy distillation: the divergence from the teacher at the states that the policy visits, exact over the vocabulary.
DISTILL = METHODS.declare(
    "distill",
    "on-policy distillation from a teacher",
    PolicyGradient(no_reward, ratio.none, score, token_mean, kl=KL("loss", "exact", 1.0)),
    num_generations=1,
)

# Rejection fine-tuning.
RAFT = METHODS.declare(
    "raft",
    "cross-entropy on the best completion of each prompt",
    PolicyGradient(ones, ratio.none, score, token_mean, keep=(top_k(1),)),
)
