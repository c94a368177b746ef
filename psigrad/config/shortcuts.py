"""Shortcuts: short, common names for settings of a method's parts, such as `beta` for algorithm.kl.coefficient in GRPO.

Which settings a shortcut sets depends on the method. A slot is a parameter that holds a part: `kl` is the slot of the KL term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from psigrad.config import algorithms
from psigrad.config.fields import types_of
from psigrad.config.nested import GivenSetting, put
from psigrad.errors import UserError, kind_of


@dataclass(frozen=True)
class Part:
    """A method, or a part of one, as plain data: its name and the values of its parameters, which are not checked."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        """The setting that describes this part: {"part": name, parameter: value, …}."""
        inner = {name: value.spec if isinstance(value, Part) else value for name, value in self.parameters.items()}
        return {"part": self.name, **inner}


def describe(value: Any) -> Any:
    """Return a part or a method of `psigrad.objective` as a `Part`, with its inner parts. Return any other value unchanged."""
    if isinstance(value, tuple):
        return tuple(map(describe, value))
    if is_dataclass(value):
        found = {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.name != "name"}
        return Part(type(value).__name__, found)
    return Part(value.__name__) if callable(value) else value


def describe_method(spec: Any) -> Part | None:
    """Return the method that a value of `algorithm` or `loss` describes; None if it is neither a preset's name nor a mapping."""
    if isinstance(spec, str):
        return describe(algorithms.PRESETS[spec]) if spec in algorithms.PRESETS else None
    if not isinstance(spec, Mapping):
        return None
    start = describe_method(str(spec.get("preset", ""))) or Part("PolicyGradient")
    changes = {name: value for name, value in spec.items() if name not in ("preset", "name")}
    return replace(start, parameters={**start.parameters, **{n: _change(start, n, value) for n, value in changes.items()}})


def find_parts(root: Part, prefix: str = "") -> list[tuple[str, Part]]:
    """Return (`prefix` + dotted path, part) for each part inside `root`, at any depth."""
    return [
        place
        for name, value in root.parameters.items()
        if isinstance(value, Part)
        for place in [(prefix + name, value), *find_parts(value, f"{prefix}{name}.")]
    ]


def _change(root: Part, slot: str, value: Any) -> Any:
    """Apply `value` (a part's name, a mapping of parameters, or a number) to a slot of `root`. Return the slot's new content."""
    before = root.parameters.get(slot)
    if root.name == "OnlinePreference" and slot == "loss" and isinstance(value, str | Mapping):
        return describe_method(value if isinstance(value, str) else {"preset": "dpo", **value})
    if isinstance(value, str):
        return _default_part(value) if slot not in ("beta", "margin") else value
    if isinstance(value, list | tuple):
        return tuple(_change(root, slot, item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if "part" in value or not isinstance(before, Part):
        filled = algorithms.DEFAULT_PART.get(slot)
        before = _default_part(str(value.get("part", filled.__name__ if filled else "")))
    new = {n: _change(before, n, v) if n in algorithms.INNER else v for n, v in value.items() if n != "part"}
    return replace(before, parameters={**before.parameters, **new})


def _default_part(name: str) -> Part:
    """Return a part with its default parameters."""
    part = next((parts[name] for parts in algorithms.PARTS.values() if name in parts), None)
    if not is_dataclass(part):
        return Part(name)
    usual = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(part)}
    return Part(name, {n: None if value is MISSING else describe(value) for n, value in usual.items() if n != "name"})


Places = list[tuple[str, Any]]


class Shortcut(NamedTuple):
    """A short name for settings of a part of a method. Messages call this part `what`."""

    what: str
    help: str
    find: Callable[[Part], Places]
    """A function (method) -> [(dotted path, current value)] of the settings that the name stands for. Empty if the method lacks
    the part."""
    write: Callable[[Part, str, Any], Any] = lambda root, place, value: value
    """A function (method, dotted path, given value) -> the value of the setting at that path."""
    switch: bool = False
    """True if the value is yes or no."""
    main: bool = False
    """True if the short help lists the shortcut."""
    by_path: Mapping[str, str] = {}
    """The help in methods where the setting is at this path, instead of `help`, which is about all methods."""


def shortcuts_of(cls: Any) -> dict[str, Shortcut]:
    """Return the shortcuts of a settings class. Only classes that train with an algorithm or a loss have any."""
    names = types_of(cls)
    return SHORTCUTS if ("algorithm" in names and "prompts_per_step" in names) or "loss" in names else {}


def find_values(name: str, spec: Any) -> Places:
    """Return (dotted path, current value) of each setting that the shortcut `name` stands for in the method `spec`."""
    root = describe_method(spec)
    return [] if root is None else SHORTCUTS[name].find(root)


def expand(
    cls: Any,
    values: Mapping[str, Any],
    given: Sequence[GivenSetting],
    more: Mapping[str, Shortcut] = MappingProxyType({}),
    needless: Callable[[GivenSetting], bool] = lambda one: False,
) -> tuple[list[GivenSetting], list[tuple[GivenSetting, str]]]:
    """Replace each shortcut in `given` by the settings that it stands for. Return (new list, [(shortcut, error message)]).

    `given` overrides `values`, the nested settings so far. `more` adds shortcuts to psigrad's own. A shortcut
    to a part that the method lacks goes into the second list, unless `needless(shortcut)` is True.
    """
    known = shortcuts_of(cls)
    short = {**known, **more} if known else {}
    if not any(one.name in short for one in given):
        return list(given), []
    setting = "loss" if "loss" in types_of(cls) else "algorithm"
    stated = {setting: deepcopy(values.get(setting, getattr(cls(), setting)))}
    for one in given:
        if one.name.partition(".")[0] == setting:
            put(stated, one.name, one.value, one.source)
    expanded: list[GivenSetting] = []
    lacking: list[tuple[GivenSetting, str]] = []
    order = {name: i for i, name in enumerate(short)}
    # Of the settings from one source, full names come first, then shortcuts in the order of `SHORTCUTS`.
    for one in sorted(given, key=lambda g: (rank_source(g.source), order.get(g.name, -1))):
        if one.name not in short:
            expanded.append(one)
            if one.name.partition(".")[0] == setting:
                put(stated, one.name, one.value, one.source)
            continue
        root = describe_method(stated[setting])
        if root is None:
            found = repr(stated[setting]) if isinstance(stated[setting], str) else kind_of(stated[setting])
            raise UserError(
                f"{one.name} can change only a preset, but {setting} is {found}; "
                "give a preset's name, or set the value in your object."
            )
        places = short[one.name].find(root)
        if not places and not needless(one):
            lacking.append((one, _describe_missing(one.name, short[one.name], stated[setting])))
        for place, now in places:
            if now != one.value:
                expanded.append(GivenSetting(f"{setting}.{place}", short[one.name].write(root, place, one.value), one.source))
                put(stated, *expanded[-1])
    return expanded, lacking


def rank_source(source: str) -> int:
    """Return the precedence of a source of settings: 2 for a flag (`--name`), 1 for an override (`name=value`), 0 for a file."""
    return 2 if source.startswith("--") else 1 if source.startswith("override ") else 0


def _describe_missing(name: str, short: Shortcut, spec: Any) -> str:
    method = spec.get("preset", "the algorithm") if isinstance(spec, Mapping) else spec
    have = [other for other, preset in algorithms.PRESETS.items() if short.find(describe(preset))]
    return f"{method} has no {short.what}, so {name} has no effect; remove it, or choose a method with one: {', '.join(have)}."


def find_parameter(field: str, *parts: str, slots: Sequence[str] = ()) -> Callable[[Part], Places]:
    """Return a `Shortcut.find` function that finds the parameter `field` of `parts`, in all slots or only in `slots`."""

    def places(root: Part) -> Places:
        return [
            (f"{place}.{field}", part.parameters.get(field))
            for place, part in find_parts(root)
            if part.name in parts and (not slots or place.partition(".")[0] in slots)
        ]

    return places


def _either(*finders: Callable[[Part], Places]) -> Callable[[Part], Places]:
    return lambda root: [place for find in finders for place in find(root)]


def _may_have(slot: str, field: str) -> Callable[[Part], Places]:
    """Return a `Shortcut.find` function for the parameter `field` of the part in `slot`. An empty slot counts as the value 0."""

    def places(root: Part) -> Places:
        if root.name != "PolicyGradient":
            return []
        part = root.parameters.get(slot)
        return [(f"{slot}.{field}", part.parameters.get(field) if isinstance(part, Part) else 0.0)]

    return places


def _kl_weight(root: Part) -> Places:
    """Return [(dotted path, KL coefficient)]. In distillation: [("kl", mixture)], where 0 is forward KL and 1 is reverse KL."""
    if not _is_distillation(root):
        return _may_have("kl", "coefficient")(root)
    kl = root.parameters["kl"].parameters
    return [("kl", {"exact_forward": 0.0, "exact": 1.0}.get(kl["estimator"], kl.get("mixture")))]


def _write_kl_weight(root: Part, place: str, value: Any) -> Any:
    if place != "kl":
        return value
    estimator = {0: "exact_forward", 1: "exact"}.get(value, "exact_js")
    return {"estimator": estimator, **({"mixture": value} if estimator == "exact_js" else {})}


def _is_distillation(root: Part) -> bool:
    kl = root.parameters.get("kl")
    return root.parameters.get("psi") == Part("no_reward") and isinstance(kl, Part)


def _preference_weight(root: Part) -> Places:
    """Return [(dotted path, β)] of a preference loss. ORPO's β is always 1: return the weight of its odds term instead."""
    return _preference("preference" if root.parameters.get("score") == Part("log_odds") else "beta")(root)


def _preference(*fields: str) -> Callable[[Part], Places]:
    """Return a `Shortcut.find` function that finds the parameters `fields` of a preference loss, also inside online DPO."""

    def places(root: Part) -> Places:
        if root.name == "OnlinePreference":
            return [(f"loss.{place}", value) for place, value in places(root.parameters["loss"])]
        known = root.name in ("Preference", "KahnemanTversky")
        return [(name, root.parameters[name]) for name in fields if known and name in root.parameters]

    return places


def find_slot(slot: str) -> Callable[[Part], Places]:
    """Return a `Shortcut.find` function that returns [(`slot`, name of its part)]. The name is None if the slot is empty."""

    def places(root: Part) -> Places:
        part = root.parameters.get(slot)
        return [(slot, part.name if isinstance(part, Part) else None)] if root.name == "PolicyGradient" else []

    return places


_GROUPED = ("group_mean", "process_group_mean", "group_mean_batch_std")


def find_grouped(root: Part) -> Places:
    """Return (path, `scale_rewards`: "group", "batch" or "none") for each part that subtracts group means."""
    return [
        (place, "batch" if part.name == "group_mean_batch_std" else "group" if part.parameters.get("std") else "none")
        for place, part in find_parts(root)
        if part.name in _GROUPED
    ]


def _by_std(root: Part, place: str, value: Any) -> Any:
    meant = {True: "group", False: "none", "True": "group", "False": "none"}.get(value, value)
    part = dict(find_parts(root))[place].name
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


def _filter(part: str, field: str = "") -> tuple[Callable[[Part], Places], Callable[[Part, str, Any], Any]]:
    """Return the functions (find, write) of a `Shortcut` that adds the filter named `part` to the slot `keep`, or removes it.

    Without `field`, the shortcut's value is True or False. With it, the value is that of the filter's parameter `field`;
    null removes the filter.
    """

    def names(root: Part) -> list[Part]:
        return [item for item in root.parameters.get("keep") or () if isinstance(item, Part)]

    def places(root: Part) -> Places:
        mine = [item for item in names(root) if item.name == part]
        now = bool(mine) if not field else mine[0].parameters.get(field) if mine else None
        return [("keep", now)] if root.name == "PolicyGradient" else []

    def write(root: Part, place: str, value: Any) -> Any:
        wanted = value is not None if field else value
        mine = {"part": part, **({field: value} if field else {})}
        kept = [mine if item.name == part else {"part": item.name, **item.parameters} for item in names(root)]
        kept += [] if mine in kept else [mine]
        return kept if wanted else [item for item in kept if item["part"] != part]

    return places, write


_CLIPS = ("clip", "dual_clip", "geometric_clip")
SHORTCUTS = {
    "beta": Shortcut(
        "KL term",
        "weight of the KL to the reference (0: none); dpo and other preference losses: β; orpo: weight of the odds-ratio term; "
        "distill: 0 is the forward KL, 1 the reverse KL, between them a mixture",
        _either(_kl_weight, _preference_weight),
        _write_kl_weight,
        main=True,
        by_path={
            "kl.coefficient": "weight of the KL to the reference; 0: no KL term",
            "kl": "mixture of the forward KL (0) and the reverse KL (1) to the teacher",
            "beta": "β, the factor of the scores in the loss; with a reference, a larger β keeps the policy closer to it",
            "loss.beta": "β, the factor of the scores in the loss; with a reference, a larger β keeps the policy closer to it",
            "preference": "weight of the odds-ratio term",
        },
    ),
    "kl_estimator": Shortcut(
        "KL term",
        "estimator of the KL term: k1, k2, k3, k1+, k3+, exact, exact_forward, exact_js, span",
        find_parameter("estimator", "KL"),
    ),
    "kl_in": Shortcut("KL term", "where the KL term acts: loss or reward", find_parameter("where", "KL")),
    "use_bias_correction_kl": Shortcut(
        "KL term", "weight the KL of each token by the ratio π/π_old", find_parameter("importance_weighted", "KL"), switch=True
    ),
    "epsilon": Shortcut(
        "clip of the ratio",
        "how far the ratio π/π_old may move below and above 1; `epsilon_high` changes the upper side alone",
        _either(find_parameter("low", *_CLIPS), find_parameter("high", *_CLIPS)),
        main=True,
    ),
    "epsilon_high": Shortcut(
        "upper bound of the ratio",
        "how far the ratio π/π_old may rise above 1; cispo: the largest weight",
        _either(find_parameter("high", *_CLIPS), find_parameter("cap", "truncated_weight")),
    ),
    "scale_rewards": Shortcut(
        "advantage within groups",
        "standard deviation of the rewards to divide the advantages by: group, batch or none",
        find_grouped,
        _by_std,
    ),
    "aggregate": Shortcut(
        "aggregate",
        "how token losses are averaged: token_mean, sequence_mean, sequence_sum, or fixed_length (by max_completion_length)",
        find_slot("aggregate"),
        lambda root, place, value: _AGGREGATES.get(value, value) if isinstance(value, str) else value,
    ),
    "importance_sampling_level": Shortcut(
        "ratio",
        "unit of the ratio π/π_old: token, sequence or trajectory",
        find_slot("ratio"),
        lambda root, place, value: _RATIOS.get(value, value),
    ),
    "mask_truncated_completions": Shortcut(
        "filter", "drop completions that the length limit cut", *_filter("not_truncated"), switch=True
    ),
    "dynamic_sampling": Shortcut(
        "filter", "drop groups whose rewards are all equal, and sample others", *_filter("has_signal"), switch=True
    ),
    "top_entropy_quantile": Shortcut(
        "filter", "train only on this share of the tokens, those with the highest entropy", *_filter("top_entropy", "share")
    ),
    "ent_coef": Shortcut("entropy bonus", "weight of the mean entropy", _may_have("entropy", "coefficient")),
    "vf_coef": Shortcut("critic", "weight of the critic's loss", find_parameter("coefficient", "value_loss")),
    "cliprange_value": Shortcut(
        "critic",
        "how far a value of the critic may move before its loss is clipped; null: no clip",
        find_parameter("clip", "value_loss"),
    ),
    "gae_lambda": Shortcut(
        "generalised advantage estimation",
        "λ of GAE: 0 has the most bias, 1 the most variance",
        find_parameter("lam", "gae", slots=("psi",)),
    ),
    "gamma": Shortcut(
        "discount",
        "discount per token",
        find_parameter("gamma", "gae", "length_gae", "td_residual", "k_step", "reward_to_go", "total_return"),
    ),
    "target_kl": Shortcut("KL penalty", "target of the KL between old and new policy", find_parameter("target", "kl_penalty")),
    "label_smoothing": Shortcut(
        "label smoothing", "assumed share of swapped labels", find_parameter("label_smoothing", "logistic", "robust")
    ),
    "margin": Shortcut("margin", "score by which a chosen completion must exceed the rejected one", _preference("margin")),
    "sft_weight": Shortcut("likelihood term", "weight of the chosen completions' negative log-likelihood", _preference("sft")),
    "desirable_weight": Shortcut("weights by label", "weight of good completions", _preference("desirable_weight")),
    "undesirable_weight": Shortcut("weights by label", "weight of bad completions", _preference("undesirable_weight")),
}
