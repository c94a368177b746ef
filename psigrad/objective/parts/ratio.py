"""Three slots that compare policies: the ratio (π / π_old), the correction (π_old / π_sampler), and the KL (π to π_ref).

π is the policy in training, π_old the policy before the batch's updates, π_sampler the distribution that the sampler drew from,
and π_ref the frozen reference.

A ratio is a function (logp [N,T] with gradient, logp_old [N,T], mask [N,T]) -> log ratio [N,T]. Both log-probs are 0 on
masked steps. A correction is a function Batch -> weights [N,T] of the surrogate's loss.

The KL slot has these estimators. With the action a sampled from π, d = log π(a|s) − log π_ref(a|s), and m = `mixture`:

| estimator | value | E[value] | E[gradient of value] |
|---|---|---|---|
| k1 | d | KL(π‖π_ref) | 0: useless as a loss |
| k2 | d²/2 | biased, but little if d is small | ∇KL(π‖π_ref) |
| k3 | e^(−d) − 1 + d | KL(π‖π_ref) | ∇KL(π_ref‖π): the other direction |
| k1+ | as k1 | KL(π‖π_ref) | ∇KL(π‖π_ref), by the gradient of k2 |
| k3+ | as k3 | KL(π‖π_ref) | ∇KL(π‖π_ref), by the gradient of k2 |
| exact | Σ_a π(a)·d(a) | KL(π‖π_ref) | ∇KL(π‖π_ref), without sampling noise |
| exact_forward | −Σ_a π_ref(a)·d(a) | KL(π_ref‖π) | ∇KL(π_ref‖π), without sampling noise |
| exact_js | JS = m·KL(π_ref‖M) + (1 − m)·KL(π‖M), M = m·π_ref + (1 − m)·π | JS | ∇JS, without sampling noise |
| span | log π(w) − log π_ref(w) of a piece of text w, at w's last step | KL(π‖π_ref) over pieces of text | ∇ of this KL |

Sources: Schulman 2020, Approximating KL divergence; Tang and Munos 2025, arXiv:2506.09477; Agarwal et al. 2024,
GKD, arXiv:2306.13649 (the forward and the Jensen–Shannon divergence).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from psigrad.objective.batch import Batch, zero_outside
from psigrad.objective.lazy_torch import Tensor, torch

MAX_LOG_RATIO = 20.0
"""The greatest log ratio: exp(20) ≈ 5e8. Larger ratios soon overflow float32, and inf times an advantage of 0 is NaN."""


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return ρ = exp(log ratio), at most exp(20). At this cap its gradient is exp(20), not 0, so the ratio can fall again."""
    return bound(log_ratio).exp()


def bound(log_ratio: Tensor) -> Tensor:
    """Return min(x, 20) for each log ratio x. The gradient is 1 for every x, even above 20."""
    return log_ratio - (log_ratio - MAX_LOG_RATIO).clamp(min=0).detach()


def none(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """No ratio, as if the batch were on-policy.

    Formula: ρ_t = 1

    Source: Williams 1992, REINFORCE.

    >>> show(none(row(-1, -2), row(-1.5, -3), row(1, 1) > 0))
    [[0.0, 0.0]]
    """
    return torch.zeros_like(logp)


def token(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """One ratio for each step.

    Formula: ρ_t = π(a_t|s_t) / π_old(a_t|s_t)

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, section 3.

    >>> show(token(row(-1, -2), row(-1.5, -3), row(1, 1) > 0))
    [[0.5, 1.0]]
    """
    return logp - logp_old


def sequence(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """One length-normalised ratio for each sequence.

    Formula: ρ_t = sg[ (Π_u π(a_u|s_u)/π_old(a_u|s_u))^(1/|y|) ] · π(a_t|s_t) / sg[π(a_t|s_t)]
             sg stops the gradient; the last factor is 1 and only carries the gradient

    Source: Zheng et al. 2025, GSPO, arXiv:2507.18071 (the form GSPO-token).

    >>> show(sequence(row(-1, -2), row(-1.5, -3), row(1, 1) > 0))
    [[0.75, 0.75]]
    """
    length_N = mask.sum(1, keepdim=True).clamp(min=1)
    mean_N = ((logp - logp_old).sum(1, keepdim=True) / length_N).detach()
    return mean_N + logp - logp.detach()


def trajectory(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """One ratio for each completion, which counts as one action. Use it with the sequence_mean aggregate.

    Formula: ρ_t = Π_u π(a_u|s_u) / π_old(a_u|s_u)

    Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740 (bandit form); TRL RLOOTrainer.

    >>> show(trajectory(row(-1, -2), row(-1.5, -3), row(1, 1) > 0))
    [[1.5, 1.5]]
    """
    return (logp - logp_old).sum(1, keepdim=True).expand(logp.shape)


Correction = Callable[[Batch], Tensor]
Level = Literal["token", "sequence", "geometric"]
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


def _sampler_ratio(batch: Batch, level: Level) -> Tensor:
    """Return the ratios w_t [N, T] in the formula of `truncated_importance`."""
    gap = _gap(batch)
    if level != "token":
        gap = gap.sum(1, keepdim=True).expand(gap.shape)
    if level == "geometric":
        gap = gap / batch.mask.sum(1, keepdim=True).clamp(min=1)
    return zero_outside(batch.mask, exp_ratio(gap))


def _gap(batch: Batch) -> Tensor:
    """Return log π_old − log π_sampler [N, T]."""
    if batch.logp_sampler is None:
        raise ValueError(
            "The batch has no `logp_sampler`, which an importance correction reads; let the sampler report its "
            "log-probabilities or set correction to null."
        )
    return batch.logp_old - batch.logp_sampler


def _check(name: str, floor: float, cap: float, level: str) -> None:
    if not 0 <= floor < cap or level not in LEVELS:
        raise ValueError(
            f"{name} has floor={floor}, cap={cap} and level={level!r}; expected 0 <= floor < cap and level 'token', "
            "'sequence' or 'geometric'."
        )


@dataclass(frozen=True)
class truncated_importance:
    """Importance weights between trainer and sampler, truncated at a cap and a floor.

    Formula: c_t = sg[clip(w_t, floor, cap)], w_t = π_old(a_t|s_t) / π_sampler(a_t|s_t); sg stops the gradient
             at level "sequence", w_t is the product of these ratios over the sequence; at "geometric", their geometric mean

    Source: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training (TIS); TRL "token_truncate",
    "sequence_truncate".

    >>> show(truncated_importance()(outcomes(1, steps=2, logp_old=[[-1.0, -1.0]], logp_sampler=[[-3.0, -1.0]])))
    [[3.0, 1.0]]
    """

    cap: float = 3.0
    """Greatest weight; TRL's vllm_importance_sampling_clip_max."""
    level: Level = "token"
    """token: a weight per step. sequence: one per sequence, the product of its steps' ratios. geometric: their geometric mean."""
    floor: float = 0.0
    """Least weight."""

    def __post_init__(self) -> None:
        _check("truncated_importance", self.floor, self.cap, self.level)

    def __call__(self, batch: Batch) -> Tensor:
        """Return weights [N, T], truncated at `cap` and `floor`."""
        return _sampler_ratio(batch, self.level).clamp(self.floor, self.cap)


@dataclass(frozen=True)
class masked_importance:
    """Importance weights between trainer and sampler, set to 0 for steps or sequences outside the bounds.

    Formula: c_t = sg[w_t] if floor ≤ w_t ≤ cap else 0, w_t = π_old(a_t|s_t) / π_sampler(a_t|s_t); sg stops the gradient
             at level "sequence", w_t is the product of these ratios over the sequence; at "geometric", their geometric mean

    Source: Liu et al. 2025, When speed kills stability (MIS); TRL "token_mask", "sequence_mask". Ling team 2025, Every step
    evolves, arXiv:2510.18855 (IcePop: level "token", floor 0.5, cap 5).

    >>> show(masked_importance(level="token")(outcomes(1, logp_old=[[-1.0]], logp_sampler=[[-3.0]])))
    [[0.0]]
    """

    cap: float = 3.0
    """Weights above this become 0; TRL's vllm_importance_sampling_clip_max."""
    level: Level = "sequence"
    """token: a weight per step. sequence: one per sequence, the product of its steps' ratios. geometric: their geometric mean."""
    floor: float = 0.0
    """Weights below this become 0."""

    def __post_init__(self) -> None:
        _check("masked_importance", self.floor, self.cap, self.level)

    def __call__(self, batch: Batch) -> Tensor:
        """Return weights [N, T]: 0 where the ratio is above `cap` or below `floor`."""
        ratio = _sampler_ratio(batch, self.level)
        return torch.where((ratio >= self.floor) & (ratio <= self.cap), ratio, torch.zeros_like(ratio))


@dataclass(frozen=True)
class divergence_rejection:
    """A weight of 0 for sequences on which sampler and trainer are too far apart, and 1 for all others.

    Formula: c_t = 1 if (1/|y|)·Σ_u (w_u − 1 − log w_u) ≤ limit else 0, with w_u = π_old(a_u|s_u) / π_sampler(a_u|s_u)

    The mean is the k3 estimate of KL(π_sampler‖π_old) per step.

    Source: verl, rollout correction (rejection by k3 over a sequence); Schulman 2020, Approximating KL divergence.

    >>> show(divergence_rejection()(outcomes(1, logp_old=[[-1.0]], logp_sampler=[[-3.0]])))
    [[0.0]]
    """

    limit: float = 0.01
    """Greatest mean divergence of a sequence, in nats per step."""

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ValueError(f"divergence_rejection has limit={self.limit}; expected more than 0 nats per step.")

    def __call__(self, batch: Batch) -> Tensor:
        """Return weights [N, T]: 1 on unmasked steps of sequences with a mean divergence of at most `limit`, otherwise 0."""
        gap = _gap(batch)
        k3 = zero_outside(batch.mask, exp_ratio(gap) - 1 - gap)
        mean_N = k3.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1)
        return (batch.mask & (mean_N <= self.limit)).to(gap.dtype)


KL_KEY = "kl_coefficient"
Estimator = Literal["k1", "k2", "k3", "k1+", "k3+", "exact", "exact_forward", "exact_js", "span"]
EXACT: tuple[Estimator, ...] = ("exact", "exact_forward", "exact_js")
MEASURED: tuple[Estimator, ...] = (*EXACT, "span")
"""Estimators that need more than the sampled step's log-probs. Their estimates are passed in `PolicyOutputs.kl`."""
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3", "k1+", "k3+", *MEASURED)


def estimate(estimator: Estimator, d: Tensor) -> Tensor:
    """Return the estimate of KL(π‖π_ref) at each step, from d = log π − log π_ref of the sampled action."""
    k2 = d**2 / 2
    straight_through = k2 - k2.detach()
    match estimator:
        case "k1":
            return d
        case "k2":
            return k2
        case "k3":
            return torch.expm1(bound(-d)) + d
        case "k1+":
            return d.detach() + straight_through
        case "k3+":
            return (torch.expm1(bound(-d)) + d).detach() + straight_through
    raise ValueError(
        f"estimate got {estimator!r}, which is not a function of the sampled action; expected k1, k2, k3, k1+ or k3+."
    )


def span_kl(logp: Tensor, ends: Tensor, theirs: Tensor, baseline: Tensor | None = None) -> Tensor:
    """Return the estimate "span" [N, T] of the KL to a reference with another tokenizer.

    Formula: value d_w = log π(w) − log π_ref(w) at the last token of each piece w, 0 elsewhere; gradient Σ_w (d_w − b)·∇log π(w)

    A piece of text ends where both tokenizers end a token. There, `ends` [N, T] is True and `theirs` [N, T] is log π_ref of the
    piece. `logp` [N, T] is log π of each token. `baseline` [N] is b, the mean of d_w over the pieces of all other completions.
    Without `baseline`, b is 0.
    """
    place = ends.cumsum(1) - ends.long()
    d = logp.new_zeros(logp.shape[0], logp.shape[1] + 1)
    d = d.scatter_add(1, place, logp.detach()).scatter_add(1, place, -torch.where(ends, theirs.to(logp), 0.0)).gather(1, place)
    inside = place < ends.sum(1, keepdim=True)
    weight = torch.where(inside, d if baseline is None else d - baseline[:, None], 0.0)
    return weight * (logp - logp.detach()) + torch.where(ends, d, 0.0)


@dataclass(frozen=True)
class adaptive:
    """A KL coefficient β that keeps the mean KL per sequence near `target`.

    Formula: β ← β · (1 + clip(KL/target − 1, −0.2, 0.2) · n/horizon) after each batch of n sequences

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    >>> round(adaptive(target=6).update(0.05, sequence_kl=12, sequences=1000), 4)
    0.051
    """

    initial: float = 0.05
    """The first β."""
    target: float = 6.0
    """The target of KL(π‖π_ref) per sequence, in nats."""
    horizon: int = 10_000
    """The number of sequences over which an error of 20 % changes β by 20 %."""

    def __post_init__(self) -> None:
        if self.initial <= 0 or self.target <= 0 or self.horizon < 1:
            raise ValueError(
                f"adaptive has initial={self.initial}, target={self.target}, horizon={self.horizon}; expected all above 0; "
                "a β of 0 could never grow."
            )

    def update(self, coefficient: float, sequence_kl: float, sequences: int) -> float:
        """Return the new β from the old one, `coefficient`, after a batch of `sequences` sequences with mean KL `sequence_kl`."""
        error = min(max(sequence_kl / self.target - 1, -0.2), 0.2)
        return coefficient * max(1 + error * sequences / self.horizon, 0.0)


@dataclass(frozen=True)
class KL:
    """A penalty on KL(π‖π_ref).

    Formula: in the reward: r_t ← r_t − β·k(d_t), with d_t = log π_old(a_t|s_t) − log π_ref(a_t|s_t)
             in the loss: KL_t = k(d_t), with d_t = log π(a_t|s_t) − log π_ref(a_t|s_t)

    β is `coefficient`. `estimator` chooses k; the table at the top of ratio.py gives the value and the gradient of each. If
    `importance_weighted` is true, a step's penalty in the loss is ρ_t·k(d_t).

    Source: Ziegler et al. 2019, arXiv:1909.08593 (reward); Shao et al. 2024, GRPO, arXiv:2402.03300 (loss, k3); Schulman 2020,
    Approximating KL divergence; DeepSeek-V3.2, arXiv:2512.02556 (importance-weighted k3).

    >>> show(KL(estimator="k3").per_step(row(-1), row(-1), row(-1.5)))
    [[0.107]]
    """

    where: Literal["reward", "loss"] = "loss"
    """Subtract the penalty from the reward of each step, or add it to the loss."""
    estimator: Estimator = "k3"
    """k1, k2, k3, k1+, k3+, exact, exact_forward, exact_js or span."""
    coefficient: float | adaptive = 0.04
    """β, fixed or adaptive."""
    importance_weighted: bool = False
    """True: weight each step's penalty in the loss by the ratio π/π_old (TRL's use_bias_correction_kl)."""
    mixture: float = 0.5
    """m of exact_js, the reference's share of the mixture M: near 0 the divergence is like KL(π_ref‖π), near 1 like KL(π‖π_ref).
    TRL's GKD beta.
    """

    @property
    def unread(self) -> tuple[str, ...]:
        """The parameters that have no effect with this `estimator` and `where`."""
        return ("mixture",) * (self.estimator != "exact_js") + ("importance_weighted",) * (self.where == "reward")

    def __post_init__(self) -> None:
        if self.where not in ("reward", "loss"):
            raise ValueError(f"KL has where={self.where!r}; expected 'reward' or 'loss'.")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"KL has estimator={self.estimator!r}; expected one of {', '.join(ESTIMATORS)}.")
        if not isinstance(self.coefficient, adaptive) and self.coefficient < 0:
            raise ValueError(
                f"KL has coefficient={self.coefficient}; expected 0 or more; a negative one would reward distance from π_ref."
            )
        if not 0 < self.mixture < 1:
            raise ValueError(f"KL has mixture={self.mixture}; expected 0 < mixture < 1; for 0 use exact_forward, for 1 exact.")
        if self.where == "reward" and (self.estimator in (*MEASURED, "k1+", "k3+") or self.importance_weighted):
            raise ValueError(
                f"KL in the reward has estimator={self.estimator!r} and importance_weighted={self.importance_weighted}; expected "
                "k1, k2 or k3, not importance-weighted; for any other KL set where='loss'."
            )
        if self.where == "loss" and self.estimator == "k1" and not self.importance_weighted:
            raise ValueError(
                "KL in the loss has estimator='k1', whose gradient is 0 in expectation, so it would only add noise; use "
                "'k1+' (same value, right gradient), 'k3', or importance_weighted=True."
            )
        if self.estimator in MEASURED and self.importance_weighted:
            raise ValueError(
                f"KL has estimator={self.estimator!r} and importance_weighted=True; importance weights need an "
                "estimator that reads only the sampled action; give k1, k2, k3, k1+ or k3+, or importance_weighted=False."
            )

    @property
    def formula(self) -> str:
        """The formula of the penalty for this `where` and `estimator`."""
        estimate_of = {
            "k1": "d_t", "k2": "d_t²/2", "k3": "(e^(−d_t) − 1 + d_t)", "exact": "Σ_a π(a|s_t)·log(π(a|s_t)/π_ref(a|s_t))",
            "exact_forward": "Σ_a π_ref(a|s_t)·log(π_ref(a|s_t)/π(a|s_t))",
            "exact_js": f"({self.mixture:g}·KL(π_ref‖M) + {1 - self.mixture:g}·KL(π‖M))",
            "span": "Σ_w (log π(w) − log π_ref(w))", "k1+": "(d_t, with the gradient of d_t²/2)",
            "k3+": "(e^(−d_t) − 1 + d_t, with the gradient of d_t²/2)",
        }[self.estimator]  # fmt: skip
        beta = "β" if isinstance(self.coefficient, adaptive) else f"{self.coefficient:g}"
        if self.where == "reward":
            return f"r_t ← r_t − {beta}·{estimate_of},  d_t = log π_old(a_t|s_t) − log π_ref(a_t|s_t)"
        weight = "" if not self.importance_weighted else "ρ_t·" if self.estimator in ("k1", "k3") else "sg[ρ_t]·"
        meaning = ",  d_t = log π(a_t|s_t) − log π_ref(a_t|s_t)"
        if self.estimator == "exact_js":
            meaning = f",  M = {self.mixture:g}·π_ref + {1 - self.mixture:g}·π, summed over the vocabulary"
        elif self.estimator in MEASURED:
            meaning = "" if self.estimator != "span" else ",  w the pieces of text that end at a token's end in both tokenizers"
        return f"β·KL_t = {beta}·{weight}{estimate_of}{meaning}"

    def initial_state(self) -> dict[str, float]:
        """Return the state before the first batch: a dict with the initial β if β is adaptive, otherwise an empty dict."""
        return {KL_KEY: self.coefficient.initial} if isinstance(self.coefficient, adaptive) else {}

    def beta(self, state: Mapping[str, float]) -> float:
        """Return the current β: the one in `state` if it is adaptive, otherwise the fixed coefficient."""
        return state[KL_KEY] if isinstance(self.coefficient, adaptive) else self.coefficient

    def per_step(self, logp: Tensor, logp_old: Tensor, logp_ref: Tensor) -> Tensor:
        """Return the KL [N, T] with gradient. Raise ValueError for exact estimators and span, which need more inputs."""
        kl = estimate(self.estimator, logp - logp_ref)
        if not self.importance_weighted:
            return kl
        ratio = exp_ratio(logp - logp_old)
        return kl * (ratio if self.estimator in ("k1", "k3") else ratio.detach())


PARTS: dict[str, tuple[Callable[..., Any] | type[KL], ...]] = {
    "ratio": (none, sequence, token, trajectory),
    "correction": (divergence_rejection, masked_importance, truncated_importance),
    "kl": (KL, adaptive),
}
