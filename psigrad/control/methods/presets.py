"""The presets of control: policy-gradient methods, declared with the same parts as those for language models.

Control has no frozen reference policy, so its methods have no KL to one. A critic reads the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from psigrad.config.algorithms import change
from psigrad.config.algorithms import resolve as resolve_algorithm
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.objective import catalog
from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import (
    action_advantage,
    action_value,
    batch_mean,
    gae,
    needs_of,
    reward_to_go,
    td_residual,
    total_return,
    whitened,
)
from psigrad.objective.parts.aggregate import token_mean
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.surrogate import clip, kl_penalty, score
from psigrad.objective.policy_gradient import PolicyGradient

# Stable-Baselines3 weighs a critic's squared error by vf_coef = 0.5. value_loss already has a factor of 1/2.
_CRITIC = value_loss(1.0)

# Variants of REINFORCE: the return of the full episode, the return after each step, and the latter minus a learned baseline V(s).
REINFORCE_TOTAL_RETURN = PolicyGradient(total_return(0.99), ratio.none, score, token_mean, name="reinforce_total_return")
REINFORCE_REWARD_TO_GO = replace(REINFORCE_TOTAL_RETURN, psi=reward_to_go(0.99), name="reinforce_reward_to_go")
REINFORCE = replace(REINFORCE_TOTAL_RETURN, psi=whitened(gae(0.99, 1.0)), critic=_CRITIC, name="reinforce")
REINFORCE_BATCH_MEAN = replace(REINFORCE_TOTAL_RETURN, psi=batch_mean, name="reinforce_batch_mean")

# Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783), and variants with other estimates of the advantage.
A2C = PolicyGradient(gae(0.99, 1.0), ratio.none, score, token_mean, critic=_CRITIC, entropy=bonus(0.0), name="a2c")
TD_ACTOR_CRITIC = replace(A2C, psi=td_residual(0.99), name="td_actor_critic")
Q_ACTOR_CRITIC = replace(A2C, psi=action_value, name="q_actor_critic")
ADVANTAGE_ACTOR_CRITIC = replace(A2C, psi=action_advantage, name="advantage_actor_critic")

PPO = replace(catalog.PPO, psi=whitened(gae(0.99, 0.95)), kl=None, critic=_CRITIC, entropy=bonus(0.0), name="ppo")
PPO_PENALTY = replace(PPO, surrogate=kl_penalty(1.0, 0.01), name="ppo_penalty")


def names() -> list[str]:
    """Return the names of control's presets. The presets for language models without a critic work in control too."""
    return [value.name for value in globals().values() if isinstance(value, PolicyGradient)]


def resolve(spec: str | Mapping[str, Any] | PolicyGradient) -> PolicyGradient:
    """Return the method of a specification. If two presets have the same name, that of control is returned.

    In a preset for language models, the KL to a reference policy is removed, since control has no reference.
    """
    presets = {value.name: value for value in globals().values() if isinstance(value, PolicyGradient)}
    if isinstance(spec, PolicyGradient):
        return resolve_algorithm(spec)
    if isinstance(spec, str):
        return presets[spec] if spec in presets else replace(resolve_algorithm(spec), kl=None)
    if isinstance(spec, Mapping) and spec.get("preset") in presets:
        return change(presets[spec["preset"]], {key: value for key, value in spec.items() if key != "preset"})
    return replace(resolve_algorithm(spec), kl=None)


def adjust(algorithm: PolicyGradient, config: ControlConfig) -> PolicyGradient:
    """Return the method with the numbers of the settings, such as gamma and clip_range, in those parts that have them.

    A setting of None leaves a part's number unchanged. Raises `UserError` for a number that no part reads.
    """
    normalize, clip_range = config.normalize_advantage, config.clip_range
    ent_coef, vf_coef = config.ent_coef, config.vf_coef
    inner = algorithm.psi.psi if isinstance(algorithm.psi, whitened) else algorithm.psi
    whitens = isinstance(algorithm.psi, whitened) if normalize is None else bool(normalize)
    if config.gae_lambda is not None and not (hasattr(inner, "lam") or "action_value" in needs_of(inner)):
        raise UserError(f"{algorithm.name} does not read gae_lambda={config.gae_lambda}; remove it, or choose a2c or ppo.")
    inner = _with(inner, gamma=config.gamma, lam=config.gae_lambda)
    psi = whitened(inner) if whitens else inner
    surrogate, critic, entropy = algorithm.surrogate, algorithm.critic, algorithm.entropy
    if clip_range is not None:
        if not isinstance(surrogate, clip):
            raise UserError(f"clip_range is {clip_range}, but {algorithm.name} does not clip; remove clip_range or choose ppo.")
        surrogate = replace(surrogate, low=clip_range, high=clip_range)
    if config.clip_range_schedule != "constant" and not isinstance(surrogate, clip):
        raise UserError(f"clip_range_schedule is linear, but {algorithm.name} does not clip; remove this setting, or choose ppo.")
    if ent_coef is not None:
        entropy = bonus(ent_coef) if ent_coef else None
    elif entropy is not None and not entropy.coefficient:
        entropy = None
    if vf_coef is not None:
        if critic is None:
            raise UserError(f"vf_coef is {vf_coef}, but {algorithm.name} has no critic; remove vf_coef, or choose a2c or ppo.")
        critic = replace(critic, coefficient=2 * vf_coef)
    return replace(algorithm, psi=psi, surrogate=surrogate, critic=critic, entropy=entropy)


def _with(part: Any, **values: float | None) -> Any:
    """Return a part with these values, except None, in those of its fields that have these names."""
    if not is_dataclass(part) or isinstance(part, type):
        return part
    own = {f.name for f in fields(part)}
    return replace(part, **{name: value for name, value in values.items() if name in own and value is not None})
