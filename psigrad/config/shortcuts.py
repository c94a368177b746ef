"""Parts of the algorithm by the names that everybody uses: `beta` is algorithm.kl.coefficient, `gae_lambda` psi.psi.lam.

Where a shortcut leads depends on the method's parts. A method that lacks the part is refused with those that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, get_type_hints

from psigrad.config import declared_parts
from psigrad.config.declared_parts import DeclaredPart
from psigrad.config.nested import Given, put
from psigrad.errors import UserError

Found = list[tuple[str, Any]]


class Shortcut(NamedTuple):
    """What a name stands for: what it is, in words and in help, and where it leads in a method with these parts."""

    what: str
    help: str
    places: Callable[[DeclaredPart], Found]
    """Method -> (dotted place, value now) of each setting that it stands for; none where the method has no such part."""
    written: Callable[[DeclaredPart, str, Any], Any] = lambda root, place, value: value
    """Method, place, value given -> value of that setting."""
    switch: bool = False
    """Whether it is yes or no."""
    main: bool = False
    """Whether the short help shows it."""


def shortcuts_of(cls: Any) -> dict[str, Shortcut]:
    """Those of a settings class: only what trains by an algorithm or a loss has any."""
    names = get_type_hints(cls)
    return SHORTCUTS if ("algorithm" in names and "prompts_per_step" in names) or "loss" in names else {}


def leads_to(name: str, spec: Any) -> Found:
    """(dotted place, value now) of what a shortcut stands for in the method that the setting `spec` means."""
    root = declared_parts.method(spec)
    return [] if root is None else SHORTCUTS[name].places(root)


def placed(cls: Any, values: Mapping[str, Any], given: Sequence[Given]) -> list[Given]:
    """`given` with every shortcut in the place that it stands for. `values` rank below them.

    Raises `UserError` where the method has no such part.
    """
    short = shortcuts_of(cls)
    if not any(one.name in short for one in given):
        return list(given)
    setting = "loss" if "loss" in get_type_hints(cls) else "algorithm"
    stated = {setting: deepcopy(values.get(setting, getattr(cls(), setting)))}
    for one in given:
        if one.name.partition(".")[0] == setting:
            put(stated, one.name, one.value, one.source)
    made: list[Given] = []
    order = {name: i for i, name in enumerate(short)}
    for one in sorted(given, key=lambda g: (_rank(g.source), order.get(g.name, -1))):
        if one.name not in short:
            made.append(one)
            continue
        root = declared_parts.method(stated[setting])
        if root is None:
            raise UserError(
                f"{one.name} changes a part of a method that psigrad knows, and {setting} is {stated[setting]!r}; set the part "
                "there."
            )
        places = short[one.name].places(root)
        if not places:
            raise UserError(_lacking(one.name, short[one.name], stated[setting]))
        for place, _ in places:
            made.append(Given(f"{setting}.{place}", short[one.name].written(root, place, one.value), one.source))
            put(stated, *made[-1])
    return made


def _rank(source: str) -> int:
    """Flags beat overrides, overrides beat a file; within each a shortcut comes after the parts, in the order of the table."""
    return 2 if source.startswith("--") else 1 if source.startswith("override ") else 0


def _lacking(name: str, short: Shortcut, spec: Any) -> str:
    from psigrad.config.methods import declared

    method = spec.get("preset", "the algorithm") if isinstance(spec, Mapping) else spec
    have = [other for other in declared() if leads_to(name, other)]
    return f"{method} has no {short.what}, so {name} means nothing to it; these have one: {', '.join(have)}."


def _parameter(field: str, *parts: str, slots: Sequence[str] = ()) -> Callable[[DeclaredPart], Found]:
    """Finds the parameter of every such part, in these slots or in all."""

    def places(root: DeclaredPart) -> Found:
        return [
            (f"{place}.{field}", part.parameters.get(field))
            for place, part in declared_parts.found(root)
            if part.name in parts and (not slots or place.partition(".")[0] in slots)
        ]

    return places


def _either(*finders: Callable[[DeclaredPart], Found]) -> Callable[[DeclaredPart], Found]:
    return lambda root: [place for find in finders for place in find(root)]


def _may_have(slot: str, field: str) -> Callable[[DeclaredPart], Found]:
    """The parameter of a slot that every policy gradient may fill."""

    def places(root: DeclaredPart) -> Found:
        if root.name != "PolicyGradient":
            return []
        part = root.parameters.get(slot)
        return [(f"{slot}.{field}", part.parameters.get(field) if isinstance(part, DeclaredPart) else 0.0)]

    return places


def _preference(*fields: str) -> Callable[[DeclaredPart], Found]:
    """A number of a preference loss, or of online DPO's loss."""

    def places(root: DeclaredPart) -> Found:
        if root.name == "OnlinePreference":
            return [(f"loss.{place}", value) for place, value in places(root.parameters["loss"])]
        known = root.name in ("Preference", "KahnemanTversky")
        return [(name, root.parameters[name]) for name in fields if known and name in root.parameters]

    return places


def _slot(slot: str) -> Callable[[DeclaredPart], Found]:
    def places(root: DeclaredPart) -> Found:
        part = root.parameters.get(slot)
        return [(slot, part.name if isinstance(part, DeclaredPart) else None)] if root.name == "PolicyGradient" else []

    return places


_GROUPED = ("group_mean", "process_group_mean", "group_mean_batch_std")


def _standardised(root: DeclaredPart) -> Found:
    """The psi that compares a group, and by which standard deviation it divides."""
    return [
        (place, "batch" if part.name == "group_mean_batch_std" else "group" if part.parameters.get("std") else "none")
        for place, part in declared_parts.found(root)
        if part.name in _GROUPED
    ]


def _by_std(root: DeclaredPart, place: str, value: Any) -> Any:
    meant = {True: "group", False: "none", "True": "group", "False": "none"}.get(value, value)
    part = dict(declared_parts.found(root))[place].name
    part = "group_mean" if part == "group_mean_batch_std" else part
    chosen = {"batch": "group_mean_batch_std", "group": {"part": part, "std": True}, "none": {"part": part, "std": False}}
    if meant not in chosen:
        raise UserError(f"scale_rewards is {value!r}; expected group, batch or none.")
    return chosen[meant]


_AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "grpo": "sequence_mean",
}
_RATIOS = {"sequence_token": "sequence"}


def _filter(part: str, field: str = "") -> tuple[Callable[[DeclaredPart], Found], Callable[[DeclaredPart, str, Any], Any]]:
    """A filter that is put beside those that are there, or taken out; with a parameter, which may be null."""

    def names(root: DeclaredPart) -> list[DeclaredPart]:
        return [item for item in root.parameters.get("keep") or () if isinstance(item, DeclaredPart)]

    def places(root: DeclaredPart) -> Found:
        mine = [item for item in names(root) if item.name == part]
        now = bool(mine) if not field else mine[0].parameters.get(field) if mine else None
        return [("keep", now)] if root.name == "PolicyGradient" else []

    def written(root: DeclaredPart, place: str, value: Any) -> Any:
        wanted = value is not None if field else value
        mine = {"part": part, **({field: value} if field else {})}
        kept = [mine if item.name == part else {"part": item.name, **item.parameters} for item in names(root)]
        kept += [] if mine in kept else [mine]
        return kept if wanted else [item for item in kept if item["part"] != part]

    return places, written


_CLIPS = ("clip", "dual_clip", "geometric_clip")
SHORTCUTS = {
    "beta": Shortcut(
        "KL term",
        "weight of the KL term to the reference, 0: none; in a preference loss how far the policy may go from it",
        _either(_may_have("kl", "coefficient"), _preference("beta")),
        main=True,
    ),
    "kl_estimator": Shortcut(
        "KL term", "its estimator: k1, k2, k3, k1+, k3+, exact, exact_forward, exact_js", _parameter("estimator", "KL")
    ),
    "kl_in": Shortcut("KL term", "where the KL term acts: loss or reward", _parameter("where", "KL")),
    "use_bias_correction_kl": Shortcut(
        "KL term", "weigh the KL of each step by its ratio", _parameter("importance_weighted", "KL"), switch=True
    ),
    "epsilon": Shortcut(
        "clip of the ratio",
        "how far the ratio may go from 1 on both sides",
        _either(_parameter("low", *_CLIPS), _parameter("high", *_CLIPS)),
        main=True,
    ),
    "epsilon_high": Shortcut(
        "upper bound of the ratio",
        "how far the ratio may rise above 1; in cispo the greatest weight",
        _either(_parameter("high", *_CLIPS), _parameter("cap", "truncated_weight")),
    ),
    "scale_rewards": Shortcut(
        "advantage within groups", "standard deviation to divide by: group, batch or none", _standardised, _by_std
    ),
    "aggregate": Shortcut(
        "aggregate",
        "how the steps' losses are averaged: token_mean, sequence_mean, sequence_sum, or fixed_length, the longest completion",
        _slot("aggregate"),
        lambda root, place, value: _AGGREGATES.get(value, value) if isinstance(value, str) else value,
    ),
    "importance_sampling_level": Shortcut(
        "ratio",
        "the ratio is of a token, sequence or trajectory",
        _slot("ratio"),
        lambda root, place, value: _RATIOS.get(value, value),
    ),
    "mask_truncated_completions": Shortcut(
        "filter", "leave out completions that the length limit cut", *_filter("not_truncated"), switch=True
    ),
    "dynamic_sampling": Shortcut(
        "filter", "leave out groups whose rewards are all equal, and sample others", *_filter("has_signal"), switch=True
    ),
    "top_entropy_quantile": Shortcut(
        "filter", "train on this share of the tokens, those of most entropy", *_filter("top_entropy", "share")
    ),
    "ent_coef": Shortcut("entropy bonus", "weight of the mean entropy", _may_have("entropy", "coefficient")),
    "vf_coef": Shortcut("critic", "weight of the critic's loss", _parameter("coefficient", "value_loss")),
    "cliprange_value": Shortcut(
        "critic", "how far a value may move with credit; null: no clip", _parameter("clip", "value_loss")
    ),
    "gae_lambda": Shortcut(
        "generalised advantage estimation", "λ: bias (0) against variance (1)", _parameter("lam", "gae", slots=("psi",))
    ),
    "gamma": Shortcut(
        "discount",
        "discount per step",
        _parameter("gamma", "gae", "length_gae", "td_residual", "k_step", "reward_to_go", "total_return"),
    ),
    "target_kl": Shortcut("KL penalty", "wanted KL between old and new policy", _parameter("target", "kl_penalty")),
    "label_smoothing": Shortcut(
        "label smoothing", "share of the labels believed to be swapped", _parameter("label_smoothing", "logistic", "robust")
    ),
    "margin": Shortcut("margin", "by how much the chosen completion must lead", _preference("margin")),
    "sft_weight": Shortcut("likelihood term", "weight of the chosen completions' negative log-likelihood", _preference("sft")),
    "desirable_weight": Shortcut("weights by label", "weight of good completions", _preference("desirable_weight")),
    "undesirable_weight": Shortcut("weights by label", "weight of bad completions", _preference("undesirable_weight")),
}
