"""A policy-gradient method made of nine parts, and the three stages of its use.

    loss = Σ_{i,t} w_{i,t}·(c_{i,t}·L(log π_{i,t}, log ρ_{i,t}, A_{i,t}) + β·KL_{i,t}) − c_H·mean(entropy) + c_V·mean(value error)

`aggregate` gives w, `correction` c_{i,t}, `surrogate` L, `ratio` log ρ, `psi` A, `kl` β·KL, `entropy` c_H, and `critic` c_V.
If `kl.where` is "reward", β·KL is instead subtracted from the reward.

prepare: compute the advantages of the whole collected batch, and choose rows and steps with `keep`.
totals: count the sequences and tokens of one optimiser step.
loss: compute the loss of any micro-batch of this step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from psigrad.objective.batch import (
    Batch,
    Loss,
    PolicyOutputs,
    Prepared,
    Totals,
    all_equal,
    explained_variance,
    group_size,
    inside,
    masked_mean,
    zero_outside,
)
from psigrad.objective.lazy_torch import Tensor, torch
from psigrad.objective.parts import ratio
from psigrad.objective.parts.advantage import Psi, StatefulPsi, needs_of, no_reward, whitened
from psigrad.objective.parts.aggregate import Aggregate, Keep, has_signal, sequence_mean
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.group_advantage import pass_at_k
from psigrad.objective.parts.ratio import KL, Correction
from psigrad.objective.parts.surrogate import (
    PENALTY_KEY,
    SamplerWeighted,
    Surrogate,
    adapt,
    clip_fractions,
    differentiates_ratio,
    divergence_mask,
    innermost,
    kl_penalty,
    measure_kl,
    score,
    silent_without_advantage,
)

Ratio = Callable[[Tensor, Tensor, Tensor], Tensor]
State = Mapping[str, float]
Inside = Callable[[Tensor], Tensor]
LEAST_LOGP = -1e5
"""The lower bound of log-probabilities. An impossible step would have −∞, and −∞ times a ratio of 0 is NaN."""


@dataclass(frozen=True)
class PolicyGradient:
    """A policy-gradient method: nine parts and a name. Make a variant with `dataclasses.replace(GRPO, kl=None)`.

    Errors: ValueError at construction if the parts do not fit together.
    """

    psi: Psi
    """The advantage estimator: Batch -> advantage [N,T]; see advantage.py."""
    ratio: Ratio
    """The ratio: (logp, logp_old, mask) -> log ratio [N,T]; see ratio.py."""
    surrogate: Surrogate
    """The policy's loss: (logp, log_ratio, advantage) -> loss per step [N,T]; see surrogate.py."""
    aggregate: Aggregate
    """The weights of the steps' losses: (mask, totals) -> weights [N,T]; see aggregate.py."""
    kl: KL | None = None
    """Penalty on the distance from the reference policy."""
    keep: tuple[Keep, ...] = ()
    """The filters: Batch -> bool [N] or [N,T]. Rows and steps that do not pass all filters are dropped; see aggregate.py."""
    critic: value_loss | None = None
    """Loss of the value function."""
    entropy: bonus | None = None
    """Entropy bonus."""
    correction: Correction | None = None
    """Batch -> weights [N,T] that correct the gap between sampler and trainer; see ratio.py."""
    name: str = ""
    """The name shown to users."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", tuple(self.keep))
        for wrong, sentence in (
            (
                "value" in needs_of(self.psi) and self.critic is None,
                f"psi {_name(self.psi)} reads a critic's values, but critic is None; set critic=value_loss() or choose a psi "
                "without a critic.",
            ),
            (
                self.critic is not None and isinstance(self.critic.returns, StatefulPsi | whitened),
                "critic.returns is whitened or has a state, so it estimates no return; choose gae, k_step or td_residual.",
            ),
            (
                not needs_of(self.psi) & {"value", "action_value"} and self.critic is not None,
                f"critic is set, but psi {_name(self.psi)} never reads its values; choose gae, k_step or td_residual, or set "
                "critic=None.",
            ),
            (
                self.ratio is ratio.none and differentiates_ratio(self.surrogate),
                f"surrogate {_name(self.surrogate)} takes its gradient from the ratio, but ratio is none; set ratio=token, or "
                "surrogate=score.",
            ),
            (
                self.ratio is not ratio.none and self.surrogate is score,
                f"surrogate score ignores the ratio, but ratio is {_name(self.ratio)}; set ratio=none, or surrogate=unclipped "
                "or clip.",
            ),
            (
                isinstance(innermost(self.surrogate), divergence_mask)
                and self.ratio in (ratio.none, ratio.sequence, ratio.trajectory),
                f"surrogate {_name(innermost(self.surrogate))} compares the probabilities of each step, but ratio is "
                f"{_name(self.ratio)}; set ratio=token.",
            ),
            (
                self.ratio is ratio.trajectory and self.aggregate is not sequence_mean,
                f"ratio trajectory is one number for the whole completion, but aggregate {_name(self.aggregate)} would count "
                "it once per step; set aggregate=sequence_mean.",
            ),
            (
                self.corrects and self.correction is not None,
                f"surrogate {_name(innermost(self.surrogate))} weights steps by the sampler's probabilities, and correction "
                f"{_name(self.correction)} would count them twice; set correction=None.",
            ),
        ):
            if wrong:
                raise ValueError(f"{self.name or 'PolicyGradient'}: {sentence}")

    @property
    def needs_reference(self) -> bool:
        """True if the method has a KL term whose coefficient is not 0. The term compares the policy with a reference policy."""
        return self.kl is not None and self.kl.coefficient != 0

    @property
    def needs_critic(self) -> bool:
        """True if the batch and the model's outputs must contain values."""
        return self.critic is not None

    @property
    def needs_entropy(self) -> bool:
        """True if the model's outputs must contain entropies."""
        return self.entropy is not None

    @property
    def needs_old_entropy(self) -> bool:
        """True if the batch must contain the entropies of the policy that collected it."""
        return any("entropy" in needs_of(part) for part in self.keep)

    @property
    def needs_reward(self) -> bool:
        """True if rewards influence the loss. Otherwise the policy learns only from the KL to the reference, its teacher."""
        return self.psi is not no_reward

    @property
    def needs_exact_kl(self) -> bool:
        """True if the KL estimator needs more than log-probs of sampled actions. The model's outputs must then contain `kl`."""
        return self.kl is not None and self.kl.estimator in ratio.MEASURED and self.kl.coefficient != 0

    @property
    def corrects(self) -> bool:
        """True if the surrogate itself weights steps by π / π_sampler. The method must then have no `correction`."""
        return isinstance(innermost(self.surrogate), SamplerWeighted)

    @property
    def min_group_size(self) -> int:
        """The smallest number of trajectories per prompt that the method can learn from."""
        psi = self.psi.psi if isinstance(self.psi, whitened) else self.psi
        if isinstance(psi, pass_at_k):
            return psi.k + 1  # k completions alone give no signal, whichever of them are right
        return 2 if "group" in needs_of(self.psi) or self.dynamic_sampling else 1

    @property
    def dynamic_sampling(self) -> bool:
        """True if `keep` contains `has_signal`, which drops groups with equal rewards. The trainer then samples more groups."""
        return has_signal in self.keep

    def initial_state(self) -> dict[str, float]:
        """Return the method's state before the first step: plain numbers, stored by the caller."""
        state: dict[str, float] = {}
        if isinstance(self.psi, StatefulPsi):
            state |= self.psi.initial_state()
        if self.kl is not None:
            state |= self.kl.initial_state()
        if isinstance(self.surrogate, kl_penalty):
            state[PENALTY_KEY] = self.surrogate.coefficient
        return state

    def prepare(self, batch: Batch, state: State, *, metrics: bool = True) -> Prepared:
        """Compute the advantages, the filters and the new state for a whole collected batch.

        `metrics=False` skips the metrics, which saves time on small batches.
        Errors: ValueError if a number of the batch is not finite, if no group has `min_group_size` rows, or if the batch lacks a
        field that a part reads.
        """
        self._check_batch(batch)
        shaped = batch
        if self.kl is not None and self.kl.where == "reward" and self.needs_reference and batch.logp_ref is not None:
            penalty_NT = ratio.estimate(self.kl.estimator, batch.logp_old - batch.logp_ref)
            shaped = replace(batch, reward=batch.reward - self.kl.beta(state) * penalty_NT)
        new_state = dict(state)
        if isinstance(self.psi, StatefulPsi):
            advantage, remembered = self.psi(shaped, state)
            new_state |= remembered
        else:
            advantage = self.psi(shaped)
        # Rewards may be float64 until here, although log-probs are float32: float32 would make close rewards equal.
        advantage = advantage.detach().to(batch.logp_old.dtype)
        advantage = advantage if batch.is_full else zero_outside(batch.mask, advantage)
        keep, counts, marks = self._choose(batch, advantage)  # filters read the rewards without a KL penalty
        beta = None if self.kl is None else self.kl.coefficient
        adapts = isinstance(beta, ratio.adaptive)
        figures = self._batch_metrics(batch, shaped, keep, counts, state) if metrics or adapts else {}
        if isinstance(beta, ratio.adaptive):
            new_state[ratio.KL_KEY] = beta.update(state[ratio.KL_KEY], figures["objective/kl"], int(batch.present.sum()))
        felt = advantage != 0 if marks is None else (advantage != 0) | (marks != 0)
        felt = felt if counts is None else felt & counts
        needs_gradient = keep if self._always_has_gradient() else keep & felt.any(1)
        returns = self._returns(shaped, advantage)
        returns = returns if returns is None else returns.to(batch.logp_old.dtype)
        if metrics and returns is not None and batch.value is not None:
            figures["explained_variance"] = explained_variance(batch.value, returns, batch.mask)
            figures["value/mean"] = float(masked_mean(batch.value, batch.mask))
            figures["returns/mean"] = float(masked_mean(returns, batch.mask))
        return Prepared(batch, advantage, keep, needs_gradient, figures, new_state, returns, counts, marks)

    def _choose(self, batch: Batch, advantage: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (keep, counts, marks), three fields of `Prepared`."""
        keep, counts = batch.present, None
        for part in self.keep:
            found = part(batch, advantage) if "advantage" in needs_of(part) else part(batch)
            if found.dim() == 1:
                keep = keep & found
            else:
                counts = found if counts is None else counts & found
        marks = self.surrogate.marks(batch, advantage) if "marks" in needs_of(self.surrogate) else None  # type: ignore[attr-defined]
        return keep, counts, marks

    def totals(self, prepared: Prepared, rows: Tensor | None = None) -> Totals:
        """Return the numbers of sequences and tokens of one optimiser step on the rows `rows`; None means all rows."""
        part = prepared if rows is None else prepared.select(rows)
        if part.is_full:
            return Totals(len(part.keep), part.batch.mask.numel(), part.batch.mask.numel())
        steps_N = part.batch.mask.sum(1)
        return Totals(
            sequences=int(part.keep.sum()),
            tokens=int((steps_N * part.keep).sum()),
            gradient_tokens=int((steps_N * part.needs_gradient).sum()),
        )

    def loss(self, prepared: Prepared, evaluation: PolicyOutputs, totals: Totals, state: State, *, metrics: bool = True) -> Loss:
        """Compute a micro-batch's share of an optimiser step's loss. `totals` are the step's numbers of sequences and tokens.

        `metrics=False` skips the clip fractions, the approximate KL and the entropy, which saves time on small batches.
        Errors: ValueError if the batch or the evaluation lacks a field that a part reads.
        """
        policy = self.policy_loss(prepared, evaluation, totals, state, metrics=metrics)
        if self.critic is None:
            return policy
        critic = self.critic_loss(prepared, _require(evaluation.value, "value", "the critic's loss"), totals)
        return Loss(policy.value + critic.value, policy.terms | critic.terms)

    def policy_loss(
        self, prepared: Prepared, evaluation: PolicyOutputs, totals: Totals, state: State, *, metrics: bool = True
    ) -> Loss:
        """Compute `loss` without the critic's loss. A separate critic model has its own pass, which calls `critic_loss`."""
        batch = prepared.batch
        mask = batch.mask & prepared.keep[:, None]
        within = inside(mask)
        logp = within(evaluation.logp.to(torch.promote_types(evaluation.logp.dtype, torch.float32)).clamp(min=LEAST_LOGP))
        logp_old = within(batch.logp_old)
        advantage = within(prepared.advantage)
        log_ratio = self.ratio(logp, logp_old, mask)
        sampled = batch.logp_old if batch.logp_sampler is None else batch.logp_sampler
        known = {"mask": mask, "marks": prepared.marks, "logp_sampler": sampled}
        given = {name: known[name] for name in sorted(needs_of(self.surrogate) & known.keys())}
        if "logp_sampler" in given:
            given["logp_sampler"] = within(sampled)
        per_step = self._surrogate_now(state)(logp, log_ratio, advantage, **given)
        if prepared.counts is not None:
            per_step = zero_outside(prepared.counts, per_step)
        weights = self.aggregate(mask, totals).to(logp.dtype)
        counted = mask & prepared.needs_gradient[:, None]

        def mean(x: Tensor) -> Tensor:
            return zero_outside(counted, x.detach().to(logp.dtype)).sum() / max(totals.gradient_tokens, 1)

        terms: dict[str, Tensor] = {}
        if metrics:
            terms |= {key: mean(hit) for key, hit in clip_fractions(self.surrogate, log_ratio, advantage).items()}
        if metrics and self.ratio is not ratio.none:
            moved = (logp - logp_old).detach()
            terms["policy/approxkl_avg"] = mean(ratio.exp_ratio(moved) - 1 - moved)
        if self.correction is not None:
            correction = self.correction(batch).detach()
            per_step = per_step * correction
            terms["sampling/importance_sampling_ratio/mean"] = mean(correction)
        value = within(per_step * weights).sum()
        terms["policy_loss"] = value.detach()
        if self.kl is not None and self.kl.where == "loss" and self.needs_reference:
            kl = self._kl_per_step(self.kl, within, batch, logp, logp_old, evaluation)
            value = value + self.kl.beta(state) * within(kl * weights).sum()
            terms["kl"] = mean(kl)
        if metrics and evaluation.entropy is not None:
            terms["entropy"] = mean(evaluation.entropy)
        if self.entropy is not None:
            entropy = within(_require(evaluation.entropy, "entropy", "an entropy bonus"))
            value = value - self.entropy.coefficient * entropy.sum() / max(totals.tokens, 1)
        return Loss(value, terms)

    def critic_loss(self, prepared: Prepared, value: Tensor, totals: Totals) -> Loss:
        """Compute the critic's loss, which is part of `loss`, from the critic's values [N, T].

        Errors: ValueError without a critic, or if the batch lacks values.
        """
        if self.critic is None:
            raise ValueError(
                f"{self.name or _name(self.psi)} has no critic; set critic=value_loss() and a psi that reads values."
            )
        within = inside(prepared.batch.mask & prepared.keep[:, None])
        value_old = within(_require(prepared.batch.value, "value", "the critic's loss"))
        returns = within(_require(prepared.returns, "returns", "the critic's loss"))
        error = self.critic(within(value), value_old, returns).sum() / max(totals.tokens, 1)
        return Loss(self.critic.coefficient * error, {"value_loss": error.detach()})

    @property
    def adapts(self) -> bool:
        """True if the surrogate is `kl_penalty` with a target KL. After each batch, `adapt` must then update its coefficient."""
        return isinstance(self.surrogate, kl_penalty) and self.surrogate.target is not None

    def adapt(self, prepared: Prepared, logp: Tensor) -> dict[str, float]:
        """Return the state with the coefficient of `kl_penalty` adapted to the KL. Call this after all passes over a batch.

        `logp` [N, T] are the log-probs of the new policy.
        """
        kept = prepared.batch.mask & prepared.keep[:, None]
        assert isinstance(self.surrogate, kl_penalty)
        return adapt(self.surrogate, prepared.state, measure_kl(logp, prepared.batch.logp_old, kept))

    def _check_batch(self, batch: Batch) -> None:
        (batch if self.needs_reference or batch.logp_ref is None else replace(batch, logp_ref=None)).check_finite()
        if self.min_group_size > 1 and bool(batch.present.any()):
            largest = int(group_size(batch.group)[batch.present].max())
            if largest < self.min_group_size:
                raise ValueError(
                    f"The largest group has size {largest}, but {self.name or _name(self.psi)} compares trajectories of a "
                    f"group; expected at least {self.min_group_size}; sample more completions per prompt (num_generations)."
                )
        reads_logp_ref = self.needs_reference and (not self.needs_exact_kl or bool(self.kl and self.kl.initial_state()))
        if reads_logp_ref and batch.logp_ref is None:
            raise ValueError(
                "The batch has no `logp_ref`, which the KL term reads; compute it with the reference policy or set kl to null."
            )
        if self.critic is not None and batch.value is None:
            raise ValueError("The batch has no `value`, which the critic's loss reads; give the critic's values.")

    def _always_has_gradient(self) -> bool:
        kl_in_loss = self.needs_reference and self.kl is not None and self.kl.where == "loss"
        return kl_in_loss or self.entropy is not None or self.critic is not None or not silent_without_advantage(self.surrogate)

    def _batch_metrics(self, batch: Batch, shaped: Batch, keep: Tensor, counts: Tensor | None, state: State) -> dict[str, float]:
        def mean_N(x_N: Tensor) -> float:
            return float(masked_mean(x_N.to(batch.reward.dtype), batch.present))

        metrics = {
            "reward": mean_N(batch.sequence_reward),
            "frac_reward_zero_std": mean_N(all_equal(batch.sequence_reward, batch.group)),
            "frac_kept": mean_N(keep),
        }
        if counts is not None:
            metrics["frac_kept_steps"] = float(masked_mean(counts.to(batch.reward.dtype), batch.mask & keep[:, None]))
        if batch.logp_ref is not None and (self.needs_reference or bool(batch.logp_ref.isfinite().all())):
            metrics["objective/kl"] = mean_N((batch.logp_old - batch.logp_ref).sum(1))
        if shaped is not batch:
            metrics["objective/rlhf_reward"] = mean_N(shaped.sequence_reward)
        if self.kl is not None:
            metrics["objective/kl_coefficient"] = self.kl.beta(state)
        if batch.logp_sampler is not None:
            gap = (batch.logp_old - batch.logp_sampler).abs()
            metrics["sampling/sampling_logp_difference/mean"] = float(masked_mean(gap, batch.mask))
            metrics["sampling/sampling_logp_difference/max"] = float(gap.max()) if gap.numel() else 0.0
        return metrics

    def _returns(self, shaped: Batch, advantage: Tensor) -> Tensor | None:
        if self.critic is None or shaped.value is None:
            return None
        if self.critic.returns is not None:
            return self.critic.returns(shaped) + shaped.value
        plain = self.psi.psi(shaped) if isinstance(self.psi, whitened) else advantage
        return plain + shaped.value

    def _surrogate_now(self, state: State) -> Surrogate:
        if isinstance(self.surrogate, kl_penalty):
            return replace(self.surrogate, coefficient=state[PENALTY_KEY])
        return self.surrogate

    @staticmethod
    def _kl_per_step(kl: KL, within: Inside, batch: Batch, logp: Tensor, logp_old: Tensor, evaluation: PolicyOutputs) -> Tensor:
        if kl.estimator in ratio.MEASURED:
            return within(_require(evaluation.kl, "kl", "the exact KL term"))
        logp_ref = within(_require(batch.logp_ref, "logp_ref", "the KL term"))
        return kl.per_step(logp, logp_old, logp_ref)


def _name(part: object) -> str:
    return str(getattr(part, "__name__", type(part).__name__))


def _require(tensor: Tensor | None, field: str, reader: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"`{field}` is missing, but {reader} reads it; give it, or use an algorithm without {reader}.")
    return tensor
