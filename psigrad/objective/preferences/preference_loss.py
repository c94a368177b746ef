"""Learning from comparisons without a reward model: a preference loss is a choice of score, link and margin.

    loss = p·(1/N) Σ_n link(h_w − margin, h_l) + λ·NLL(chosen),   h = β·score(log π(y|x), log π_ref(y|x), |y|)

h_w is the h of the chosen completion, h_l of the rejected one; |y| counts tokens; p is `preference`, λ is `sft`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

from psigrad.objective.batch import Loss
from psigrad.objective.lazy_torch import Tensor, torch

Score = Callable[[Tensor, Tensor | None, Tensor], Tensor]
Link = Callable[[Tensor, Tensor, float], Tensor]


def logsigmoid(x: Tensor) -> Tensor:
    """Return log σ(x), without overflow."""
    return torch.nn.functional.logsigmoid(x)


@dataclass(frozen=True, eq=False)
class Pairs:
    """N pairs of completions, given by their log-probs: log π(y|x), summed over the tokens of each completion.

    Errors: ValueError if a field's shape is not [N] or a completion is empty. Lengths on a GPU are not checked.
    """

    logp_chosen: Tensor
    """[N] summed log-probs, with gradient."""
    logp_rejected: Tensor
    """[N] summed log-probs, with gradient."""
    tokens_chosen: Tensor
    """[N] number of tokens of each chosen completion."""
    tokens_rejected: Tensor
    """[N] number of tokens of each rejected completion."""
    ref_chosen: Tensor | None = None
    """[N] summed log-probs under the reference policy."""
    ref_rejected: Tensor | None = None
    """[N] summed log-probs under the reference policy."""
    margin: Tensor | None = None
    """[N] the margin by which the chosen completion should be better, for preferences with a margin per pair."""

    def __post_init__(self) -> None:
        _check_rows(self)
        fewest = torch.minimum(self.tokens_chosen, self.tokens_rejected)
        if fewest.is_cpu and bool((fewest < 1).any()):  # reading it from a GPU would stall the CPU
            raise ValueError("A completion of the pairs has no tokens; expected at least 1 in each; drop empty completions.")


@dataclass(frozen=True, eq=False)
class Labelled:
    """N completions labelled good or bad, and `kl`, the reference point z of KTO."""

    logp: Tensor
    """[N] log π(y|x), with gradient."""
    ref: Tensor
    """[N] log π_ref(y|x)."""
    desirable: Tensor
    """[N] bool: True for good completions."""
    kl: Tensor
    """Scalar: z, the estimate of KL(π‖π_ref) of the whole optimiser step, without gradient; see `kl_of_mismatched`.

    z = 0 gives the unpaired form of APO-zero (TRL's apo_zero_unpaired).
    """

    def __post_init__(self) -> None:
        _check_rows(self, but=("kl",))
        if self.desirable.dtype != torch.bool or self.kl.dim():
            raise ValueError(
                f"Labelled.desirable is {self.desirable.dtype} and Labelled.kl has shape {tuple(self.kl.shape)}; expected "
                "torch.bool and a scalar."
            )


def _check_rows(of: Pairs | Labelled, but: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` unless all given fields have the same shape [N]. Fields named in `but` are not checked."""
    given = {f.name: getattr(of, f.name) for f in fields(of) if f.name not in but and getattr(of, f.name) is not None}
    shape = next(iter(given.values())).shape
    for name, tensor in given.items():
        if tensor.shape != shape or tensor.dim() != 1:
            raise ValueError(
                f"{type(of).__name__}.{name} has shape {tuple(tensor.shape)}; expected [N], one number for "
                f"each row, in all fields; the first field has {tuple(shape)}."
            )


def log_ratio(logp: Tensor, ref: Tensor | None, tokens: Tensor) -> Tensor:
    """The log-ratio of the completion's probabilities under policy and reference.

    Formula: log π(y|x) − log π_ref(y|x)

    Source: Rafailov et al. 2023, DPO, arXiv:2305.18290.
    """
    return logp - _reference(ref)


def mean_log_ratio(logp: Tensor, ref: Tensor | None, tokens: Tensor) -> Tensor:
    """The log-ratio per token, so that a long completion counts no more than a short one.

    Formula: (log π(y|x) − log π_ref(y|x)) / |y|

    Source: Lambert et al. 2024, Tülu 3, arXiv:2411.15124 (length-normalised DPO).
    """
    return (logp - _reference(ref)) / tokens


def mean_logp(logp: Tensor, ref: Tensor | None, tokens: Tensor) -> Tensor:
    """The log-probability per token; needs no reference.

    Formula: log π(y|x) / |y|

    Source: Meng et al. 2024, SimPO, arXiv:2405.14734.
    """
    return logp / tokens


def log_odds(logp: Tensor, ref: Tensor | None, tokens: Tensor) -> Tensor:
    """The log-odds of the completion, with its probability taken per token; needs no reference.

    Formula: log p − log(1 − p), p = exp(log π(y|x) / |y|)

    Source: Hong et al. 2024, ORPO, arXiv:2403.07691.

    >>> show(log_odds(row(-2), None, row(2)))
    [[-0.541]]
    """
    mean = logp / tokens
    # log(1 − e^m) as written loses all digits near m = 0. At m = 0 (a certain completion) it has no gradient at all.
    return mean - torch.log(-torch.expm1(mean.clamp(max=-torch.finfo(mean.dtype).eps)))


def _reference(ref: Tensor | None) -> Tensor:
    if ref is None:
        raise ValueError("The pairs have no log-probs of the reference, which this score reads; give ref_chosen, ref_rejected.")
    return ref


@dataclass(frozen=True)
class logistic:
    """The Bradley–Terry negative log-likelihood. It assumes that a share ε (`label_smoothing`) of the labels is swapped.

    Formula: −(1 − ε)·log σ(h_w − h_l) − ε·log σ(h_l − h_w), ε = `label_smoothing`

    Source: Rafailov et al. 2023, DPO, arXiv:2305.18290; ε > 0: Mitchell 2023, conservative DPO.

    >>> show(logistic()(row(2), row(0), 0.1))
    [[0.127]]
    """

    label_smoothing: float = 0.0
    """ε: probability that a label is wrong."""

    def __post_init__(self) -> None:
        _check_smoothing(self.label_smoothing)

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss [N] of pairs from h_w (`chosen`) and h_l (`rejected`), which already include the factor `beta`."""
        h, e = chosen - rejected, self.label_smoothing
        return -(1 - e) * logsigmoid(h) - (e * logsigmoid(-h) if e else 0)  # 0·∞ is NaN where π(rejected) = 0


@dataclass(frozen=True)
class robust:
    """The logistic loss, made unbiased for labels that are swapped with probability ε (`label_smoothing`).

    Formula: −((1 − ε)·log σ(h_w − h_l) − ε·log σ(h_l − h_w)) / (1 − 2ε), ε = `label_smoothing`

    Source: Chowdhury et al. 2024, robust DPO, arXiv:2403.00409.

    >>> show(robust()(row(2), row(0), 0.1))
    [[-0.123]]
    """

    label_smoothing: float = 0.1
    """ε: probability that a label is wrong."""

    def __post_init__(self) -> None:
        _check_smoothing(self.label_smoothing)

    def __call__(self, chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        """Return the loss [N] of pairs from h_w (`chosen`) and h_l (`rejected`), which already include the factor `beta`."""
        h, e = chosen - rejected, self.label_smoothing
        return -((1 - e) * logsigmoid(h) - e * logsigmoid(-h)) / (1 - 2 * e)


def hinge(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """The hinge loss: 0 once β·score of the chosen completion exceeds β·score of the rejected one by 1.

    Formula: max(0, 1 − (h_w − h_l))

    Source: Zhao et al. 2023, SLiC-HF, arXiv:2305.10425; Liu et al. 2024, RSO, arXiv:2309.06657.

    >>> show(hinge(row(0.5), row(0), 0.1))
    [[0.5]]
    """
    return torch.relu(1 - (chosen - rejected))


def squared(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Pull the difference of the scores to 1/(2β) with a squared error. A difference beyond this target raises the loss again.

    Formula: ((h_w − h_l)/β − 1/(2β))²

    Source: Azar et al. 2023, IPO, arXiv:2310.12036, eq. 17.

    >>> show(squared(row(0.5), row(0), 0.1))
    [[0.0]]
    """
    return ((chosen - rejected - 0.5) / beta) ** 2


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Raise the chosen completion's probability and lower the rejected one's. Use it if chosen completions beat the model's own.

    Formula: 1 − σ(h_w) + σ(h_l)

    Source: D'Oosterlinck et al. 2024, APO, arXiv:2408.06266, eq. 7.

    >>> show(apo_zero(row(2), row(0), 0.1))
    [[0.619]]
    """
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def apo_down(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Lower both completions' probabilities, the rejected one's more. Use it if the model's own completions beat the chosen ones.

    Formula: σ(h_w) + 1 − σ(h_w − h_l)

    Source: D'Oosterlinck et al. 2024, APO, arXiv:2408.06266, eq. 8.

    >>> show(apo_down(row(2), row(0), 0.1))
    [[1.0]]
    """
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def nca_pair(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """A loss that compares each completion with the reference, to keep the probability of the chosen one from falling.

    Formula: −log σ(h_w) − ½·log σ(−h_w) − ½·log σ(−h_l)

    Source: Chen et al. 2024, NCA, arXiv:2402.05369; TRL loss_type "nca_pair".
    """
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """The loss of a classifier that tells chosen from rejected completions, without the paper's shift δ.

    Formula: −log σ(h_w) − log σ(−h_l)

    Source: Jung et al. 2024, BCO, arXiv:2404.04656; TRL loss_type "bco_pair", which has no δ either.
    """
    return -logsigmoid(chosen) - logsigmoid(-rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """The squared distance of each score from its target: 1/(2β) for the chosen completion, −1/(2β) for the rejected one.

    Formula: (h_w/β − 1/(2β))² + (h_l/β + 1/(2β))²

    Source: Wu et al. 2024, SPPO, arXiv:2405.00675, eq. 4.7 with P = 1 and P = 0; TRL loss_type "sppo_hard".

    >>> show(sppo_hard(row(0.5), row(-0.5), 0.1))
    [[0.0]]
    """
    return ((chosen - 0.5) / beta) ** 2 + ((rejected + 0.5) / beta) ** 2


def _check_smoothing(share: float) -> None:
    if not 0 <= share < 0.5:
        raise ValueError(f"label_smoothing is {share}; expected a share of swapped labels, at least 0 and below 0.5.")


@dataclass(frozen=True)
class Preference:
    """A loss on pairs of a chosen and a rejected completion. Make a variant with `dataclasses.replace(DPO, beta=0.3)`."""

    score: Score
    """The score of completions: (log π, log π_ref, number of tokens) -> [N]."""
    link: Link
    """The loss of pairs: (β·score of the chosen − margin, β·score of the rejected, β) -> [N]."""
    beta: float = 0.1
    """β: limits the distance from the reference; a small β allows a large distance."""
    margin: float = 0.0
    """The margin by which h_w must exceed h_l; SimPO's γ. Margins per pair are added to it."""
    sft: float = 0.0
    """λ: the weight of the negative log-likelihood of the chosen completions, per token."""
    preference: float = 1.0
    """p: the weight of the link's loss; ORPO's λ."""
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}; expected a number above 0; 0.1 is DPO's usual value.")
        for slot in ("score", "link"):
            part = getattr(self, slot)
            if isinstance(part, type) or not callable(part):
                raise ValueError(f"{slot} is {part!r}; expected a function, or an object such as logistic().")
        if not (self.sft >= 0 and self.preference >= 0 and self.sft + self.preference > 0):
            raise ValueError(f"sft is {self.sft} and preference {self.preference}; expected weights >= 0, not both 0.")

    @property
    def needs_reference(self) -> bool:
        """True if the score is `log_ratio` or `mean_log_ratio`. Any other score is assumed not to read the reference policy."""
        return self.score in (log_ratio, mean_log_ratio)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the implicit rewards: (β·score of the chosen completions, β·score of the rejected ones), [N] each."""
        chosen = self.beta * self.score(pairs.logp_chosen, pairs.ref_chosen, pairs.tokens_chosen)
        return chosen, self.beta * self.score(pairs.logp_rejected, pairs.ref_rejected, pairs.tokens_rejected)

    def correct(self, pairs: Pairs) -> Tensor:
        """Return [N]: 1 if the chosen completion has the higher implicit reward, ½ if the two are equal, 0 otherwise."""
        return correct(*self.rewards(pairs))

    def loss(self, pairs: Pairs, total_pairs: int, total_chosen_tokens: int) -> Loss:
        """Return the part of an optimiser step's loss that `pairs` contribute. The totals are counted over the whole step."""
        chosen, rejected = self.rewards(pairs)
        total_pairs = max(total_pairs, 1)
        margin = self.margin if pairs.margin is None else self.margin + pairs.margin
        per_pair = self.link(chosen - margin, rejected, self.beta)
        value = self.preference * per_pair.sum() / total_pairs
        nll = -pairs.logp_chosen.sum() / max(total_chosen_tokens, 1)
        if self.sft:
            value = value + self.sft * nll

        def mean(x: Tensor) -> Tensor:
            return x.detach().sum() / total_pairs

        return Loss(
            value,
            {
                "loss": value.detach(),
                "rewards/chosen": mean(chosen),
                "rewards/rejected": mean(rejected),
                "rewards/margins": mean(chosen - rejected),
                "rewards/accuracies": mean(correct(chosen, rejected)),
                "logps/chosen": mean(pairs.logp_chosen),
                "logps/rejected": mean(pairs.logp_rejected),
                "nll_loss": nll.detach(),
            },
        )


def correct(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return [N]: 1 where `chosen` is greater than `rejected`, ½ where they are equal, 0 elsewhere."""
    return (chosen > rejected).to(chosen.dtype) + 0.5 * (chosen == rejected).to(chosen.dtype)


@dataclass(frozen=True)
class OnlinePreference:
    """A preference loss on pairs that are sampled from the policy in each training step and ranked by a reward.

    Source: Guo et al. 2024, online DPO, arXiv:2402.04792, with a reward instead of the judge.
    """

    loss: Preference
    """The loss of each pair."""
    name: str = ""
    min_group_size: int = 2
    """The least number of completions of one prompt from which a pair can be picked."""
    needs_critic: ClassVar[bool] = False

    def initial_state(self) -> dict[str, float]:
        """Return {}: the method has no state that changes from step to step."""
        return {}

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads the log-probs of a reference policy."""
        return self.loss.needs_reference


@dataclass(frozen=True)
class KahnemanTversky:
    """A loss on single completions labelled good or bad.

    Formula: λ_D·(1 − σ(β·(r − z))) for desirable completions, λ_U·(1 − σ(β·(z − r))) for undesirable ones
             r = log π(y|x) − log π_ref(y|x); z = max(0, mean of r over answers y to a prompt other than x)

    Source: Ethayarajh et al. 2024, KTO, arXiv:2402.01306, eq. 8.
    """

    beta: float = 0.1
    """β: limits the distance from the reference."""
    desirable_weight: float = 1.0
    """λ_D; raise it if good completions are few."""
    undesirable_weight: float = 1.0
    """λ_U; raise it if bad completions are few."""
    name: str = "kto"

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}; expected a number above 0; 0.1 is KTO's usual value.")
        if not (self.desirable_weight >= 0 and self.undesirable_weight >= 0):
            raise ValueError(
                f"desirable_weight={self.desirable_weight}, undesirable_weight={self.undesirable_weight}; expected both >= 0."
            )

    @property
    def needs_reference(self) -> bool:
        """True: the loss always reads the reference."""
        return True

    def loss(self, rows: Labelled, total: int, total_desirable: int) -> Loss:
        """Return what `rows` add to an optimiser step's loss. The step has `total` rows, `total_desirable` of them good."""
        total = max(total, 1)
        ratio = rows.logp - rows.ref
        sign = torch.where(rows.desirable, ratio.new_tensor(1.0), -1.0)
        weight = torch.where(rows.desirable, ratio.new_tensor(self.desirable_weight), self.undesirable_weight)
        value = (weight * (1 - torch.sigmoid(self.beta * sign * (ratio - rows.kl)))).sum() / total
        reward = self.beta * ratio.detach()
        good, bad = rows.desirable, ~rows.desirable
        others = max(total - total_desirable, 1)
        terms = {
            "loss": value.detach(),
            "rewards/chosen": reward[good].sum() / max(total_desirable, 1),
            "rewards/rejected": reward[bad].sum() / others,
            "logps/chosen": rows.logp.detach()[good].sum() / max(total_desirable, 1),
            "logps/rejected": rows.logp.detach()[bad].sum() / others,
            "kl": rows.kl.detach() * len(ratio) / total,
        }
        terms["rewards/margins"] = terms["rewards/chosen"] - terms["rewards/rejected"]
        return Loss(value, terms)


def kl_of_mismatched(logp: Tensor, ref: Tensor) -> Tensor:
    """Return KTO's reference point z. `logp` and `ref` [N] are log π(y'|x) and log π_ref(y'|x): y' answers a prompt other than x.

    Formula: z = max(0, mean(log π(y'|x) − log π_ref(y'|x))), without gradient

    Source: Ethayarajh et al. 2024, KTO, arXiv:2402.01306, section 4.1.
    """
    if not logp.numel() or logp.shape != ref.shape:
        raise ValueError(
            f"logp has shape {tuple(logp.shape)}, and ref has shape {tuple(ref.shape)}; expected the same [N] for both, N > 0."
        )
    return (logp - ref).detach().mean().clamp(min=0)
