"""The preference losses, each as one declaration, and `resolve`, which turns names and mappings into them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from psigrad.objective.preference import (
    KahnemanTversky,
    Preference,
    apo_down,
    apo_zero,
    bco_pair,
    hinge,
    log_odds,
    log_ratio,
    logistic,
    mean_log_ratio,
    mean_logp,
    nca_pair,
    robust,
    sppo_hard,
    squared,
)

T = TypeVar("T")

DPO = Preference(log_ratio, logistic(), beta=0.1, name="dpo")
CDPO = replace(DPO, link=logistic(0.1), name="cdpo")
ROBUST_DPO = replace(DPO, link=robust(0.1), name="robust_dpo")
# TRL's form: per token. The paper's own sums over tokens: replace(IPO, score=log_ratio).
IPO = Preference(mean_log_ratio, squared, beta=0.1, name="ipo")
HINGE = replace(DPO, link=hinge, name="hinge")
LN_DPO = replace(DPO, score=mean_log_ratio, beta=2.0, name="ln_dpo")
SIMPO = Preference(mean_logp, logistic(), beta=2.0, margin=1.0, name="simpo")
# beta scales nothing here: the odds enter as they are, weighed against the likelihood by lambda.
ORPO = Preference(log_odds, logistic(), beta=1.0, sft=1.0, preference=0.1, name="orpo")
APO_ZERO = replace(DPO, link=apo_zero, name="apo_zero")
APO_DOWN = replace(DPO, link=apo_down, name="apo_down")
KTO = KahnemanTversky()


@dataclass(frozen=True)
class OnlinePreference:
    """A preference loss on pairs that the policy samples and a reward ranks, step by step."""

    loss: Preference = DPO
    """The loss of each pair."""
    name: str = "online_dpo"
    min_group_size: int = 2
    """Completions of one prompt that a pair is picked from."""
    needs_critic: ClassVar[bool] = False

    def initial_state(self) -> dict[str, float]:
        """It has no memory."""
        return {}

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of a reference policy are read."""
        return self.loss.needs_reference


def resolve_online(spec: str | Mapping[str, Any] | OnlinePreference) -> OnlinePreference | None:
    """The online method that "online_dpo" or {"preset": "online_dpo", "loss": …} means; None for any other specification."""
    if isinstance(spec, OnlinePreference):
        return spec
    name = spec if isinstance(spec, str) else spec.get("preset") if isinstance(spec, Mapping) else None
    if name != "online_dpo":
        return None
    changes = {} if isinstance(spec, str) else {key: value for key, value in spec.items() if key != "preset"}
    loss = resolve(changes.pop("loss", "dpo"))
    if changes or isinstance(loss, KahnemanTversky):
        known = ", ".join(n for n in names() if n != "kto")
        raise ValueError(f"online_dpo got {', '.join(changes) or 'the loss kto'}; expected a loss on pairs: {known}.")
    return OnlinePreference(loss, "online_dpo" if loss.name == "dpo" else f"online_{loss.name}")


def names() -> list[str]:
    """Names of the presets."""
    return list(_presets())


def resolve(spec: str | Mapping[str, Any] | Preference | KahnemanTversky) -> Preference | KahnemanTversky:
    """The loss that a specification means: a preset's name, {"preset": name, field: value, …}, or the object itself.

    `score` and `link` are names of this module's, or {"part": name, parameter: value}. Errors: ValueError with the nearest name.
    """
    if isinstance(spec, Preference | KahnemanTversky):
        return spec
    if isinstance(spec, str):
        return _known(spec, _presets(), "preference loss")
    if not isinstance(spec, Mapping):
        raise ValueError(f"The preference loss is a {type(spec).__name__}; expected a name, a mapping or a Preference.")
    changes = dict(spec)
    start = _known(changes.pop("preset", "dpo"), _presets(), "preference loss")
    fields_of = {f.name for f in fields(start)}
    for name, value in changes.items():
        if name not in fields_of:
            raise ValueError(f"{start.name} has no {name!r}; expected preset or one of {', '.join(sorted(fields_of))}.")
        if name in _PARTS:
            changes[name] = _part(name, value)
    return replace(start, **{"name": f"{start.name} (changed)" if changes else start.name, **changes})


# Links without a preset of their own: {"preset": "dpo", "link": "nca_pair"}.
_MORE = (bco_pair, nca_pair, sppo_hard)
_PARTS: dict[str, dict[str, Any]] = {
    "score": {part.__name__: part for part in (log_ratio, mean_log_ratio, mean_logp, log_odds)},
    "link": {part.__name__: part for part in (logistic, robust, hinge, squared, apo_zero, apo_down, *_MORE)},
}


def _presets() -> dict[str, Preference | KahnemanTversky]:
    return {value.name: value for value in globals().values() if isinstance(value, Preference | KahnemanTversky)}


def _part(slot: str, value: Any) -> Any:
    if callable(value):
        return value
    parameters = dict(value) if isinstance(value, Mapping) else {"part": value}
    found = _known(parameters.pop("part", ""), _PARTS[slot], slot)
    if not isinstance(found, type):
        return found
    known = [f.name for f in fields(found)]
    for name in parameters:
        if name not in known:
            raise ValueError(f"{found.__name__} has no parameter {name!r}; expected {', '.join(known)}.")
    return found(**parameters)


def _known(name: Any, among: Mapping[str, T], kind: str) -> T:
    if name not in among:
        near = difflib.get_close_matches(str(name), among, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"There is no {kind} {name!r}; expected one of {', '.join(among)}{hint}")
    return among[name]
