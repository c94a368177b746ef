"""Translation of settings from other libraries' names into psigrad's, for flags, YAML, Python, and TRL's objects and scripts.

Names with the same meaning are replaced (`table.py`), batch sizes are computed, and parts of TRL's losses become parts of the
method (`trl.py`). Names that change nothing are dropped. Every other known name is rejected, with a sentence that names the
replacement.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psigrad.compat.table import METHOD, NOTHING, TABLE
from psigrad.compat.trl import AGGREGATES, LINKS, LOSSES, PARTS, REWARDS, SURROGATES
from psigrad.config.fields import unread_settings
from psigrad.config.nested import GivenSetting, names_of, value_below
from psigrad.config.shortcuts import SHORTCUTS, expand, rank_source, shortcuts_of
from psigrad.errors import UserError
from psigrad.importing import with_colon

# The settings of TRL whose value "epoch" means a number of steps.
_BY_EPOCH = {"eval_strategy": "evaluation.eval_steps", "save_strategy": "run.save_steps"}
# Names that only set defaults, which other settings of the same run override.
_ONLY_A_DEFAULT = ("use_peft", "sync_ref_model", "bf16")
# Names that are translated together with others, besides batch sizes and parts of the method.
_RULES = (
    "loss_type", "loss_weights", "ddp_timeout", "dataset_config", "custom_reward_function.path", "custom_reward_function.name",
)  # fmt: skip
_VLLM = "vllm_importance_sampling_"
DEFAULT = "TRL's default"
"""The `source` of values that the user did not give. Those without an equivalent are dropped instead of rejected."""


@dataclass
class Translation:
    """The result of translating settings from any library's names."""

    settings: list[GivenSetting] = field(default_factory=list)
    """The settings under psigrad's dotted names."""
    refused: list[tuple[GivenSetting, str]] = field(default_factory=list)
    """The settings without an equivalent, each with a sentence that gives the reason."""
    needless: list[GivenSetting] = field(default_factory=list)
    """The settings that change nothing in psigrad."""

    def or_refuse(self) -> list[GivenSetting]:
        """Return the settings. Raises `UserError` with all refused ones."""
        if self.refused:
            raise UserError("\n".join(dict.fromkeys(sentence for _, sentence in self.refused)))
        return self.settings


def our_name(cls: Any, name: str) -> str:
    """Return psigrad's dotted name of a setting of class `cls`: "lr" -> "optim.learning_rate". Keep an unknown name."""
    known = names_of(cls)
    means = TABLE.get(name, NOTHING).means
    if means and known.get(name, name) == name and means in {*known.values(), *shortcuts_of(cls)}:
        return means
    return known.get(name, name)


def our_value(name: str, value: Any) -> Any:
    """Return the value of `reward_funcs` with psigrad's names of reward functions, and any other setting's value unchanged.

    On TRL's command line, a reward is the name of a function in TRL, or a dotted path, which becomes module:function.
    """
    if name == "reward_funcs" and isinstance(value, list | tuple):
        return [our_value(name, one) for one in value]
    return REWARDS.get(value) or with_colon(value) if name == "reward_funcs" and isinstance(value, str) else value


def is_known(name: str) -> bool:
    """Return True if the name belongs to another library and psigrad has an equivalent or an explanation for it."""
    return name in TABLE or name in SHORTCUTS


def translate(cls: Any, values: Mapping[str, Any], given: Sequence[GivenSetting]) -> Translation:
    """Translate the settings `given` into psigrad's names. `values` are the run's other settings, which `given` overrides.

    Raises `UserError` if the batch sizes do not fit together.
    """
    return _Translator(cls, values).translate(given)


def refuse_two_values(cls: Any, given: Iterable[tuple[str, Any]], where: str = "") -> None:
    """Raise `UserError` if one setting is given under two names with two values."""
    first: dict[str, tuple[str, Any]] = {}
    for name, value in given:
        mine = our_name(cls, name)
        other, before = first.setdefault(mine, (name, value))
        if other != name and repr(before) != repr(value):
            raise UserError(
                f"{where}{other} is {reprlib.repr(before)} and {name} is {reprlib.repr(value)}, and both are the setting {mine}; "
                "give one of them."
            )


def is_refused(name: str, value: Any) -> bool:
    """Return True if no method of psigrad has an equivalent for another library's setting, or for this value."""
    row = TABLE.get(name, NOTHING)
    if name in SHORTCUTS or value is None or row.rule or row.needless or _meaning(name, value) is not None or value in row.usual:
        return False
    if _is_share(name, value) or (name in _BY_EPOCH and value == "epoch"):
        return False
    return bool(row.why or (row.values and all(name not in meant for meant in row.values.values())))


def refusal(name: str, value: Any, flag: str = "") -> str:
    """Return the error sentence for a setting of another library: the reason, and the replacement. `flag` is the typed flag."""
    row = TABLE.get(name, NOTHING)
    why = f": {row.why}." if row.why else "."
    taken = [repr(one) for one in row.values if one is not False or "no" not in row.values]
    if taken and not row.usual:
        taken += ["'epoch'"] if name in _BY_EPOCH else []
        only = " or ".join(filter(None, (", ".join(taken[:-1]), taken[-1])))
        return f"{flag or name} is {value!r}; psigrad takes only {only}{why}"
    return f"There is no {f'flag {flag}' if flag else f'setting {name!r}'}{why}"


def one_value(value: Any) -> Any:
    """Return the only item of a list with one item, since a flag's values are a list. Return any other value unchanged."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


class _Translator:
    """The state of one call of `translate`."""

    def __init__(self, cls: Any, values: Mapping[str, Any]) -> None:
        self.cls, self.values = cls, values
        self.known = {*names_of(cls).values(), *shortcuts_of(cls)} - unread_settings(cls).keys()
        self.made = Translation()
        self.taken, self.weak, self.late, self.shares = (list[GivenSetting]() for _ in range(4))
        self.rules: dict[str, GivenSetting] = {}

    def translate(self, given: Sequence[GivenSetting]) -> Translation:
        """Translate first each setting alone, then the settings that depend on others, and last the parts of the method."""
        for one in given:
            for part in _open(one):
                if part.value is not None or not TABLE.get(part.name, NOTHING).means:  # ref_model=None is TRL's default
                    self._sort(GivenSetting(our_name(self.cls, part.name), our_value(part.name, part.value), part.source))
        stated = {one.name for one in self.taken}
        self.taken += [one for one in self.weak if one.name not in stated and not self._is_in_file(one.name)]
        for one in self.late:  # "no" overrides a number of the same source, but a higher source overrides "no"
            if all(rank_source(other.source) <= rank_source(one.source) for other in self.taken if other.name == one.name):
                self.taken.append(one)
        for share in self.shares:
            self._warm_up(share)
        self._loss_type()
        self._join()
        batches = self._batches()
        for name in _BY_EPOCH:
            self._each_epoch(name, batches)
        self._vllm_correction()
        settings, lacking = expand(self.cls, self.values, self.taken, PARTS, _is_needless)
        self.made.refused += lacking
        self.made.settings = [*settings, *batches]
        return self.made

    def _sort(self, one: GivenSetting) -> None:
        """Decide about one setting: keep it, replace it by others, compute it later with others, drop it, or refuse it."""
        row, value = TABLE.get(one.name, NOTHING), one_value(one.value)
        named = self._has(one.name) or one.name in unread_settings(
            self.cls
        )  # unread ones are refused when the settings are built
        names_ours = named and not (one.name == "optim" and isinstance(one.value, str))
        meaning = None if one.name == "optim" and not isinstance(one.value, str) else _meaning(one.name, value)
        if value is None and None not in row.values and is_known(one.name) and not names_ours:
            return  # TRL's files write null for a setting that is not set
        if _is_share(one.name, value) and self._has("optim.warmup_steps"):
            self.shares.append(one)
        elif meaning is not None:
            found = [GivenSetting(name, inner, one.source) for name, inner in meaning.items() if self._has(name)]
            if len(found) < len(meaning) and one.source != DEFAULT:
                self._refuse(
                    one,
                    f"{one.name} is {value!r} and means {' and '.join(meaning)}, which this command does not read; remove it.",
                )
            place = self.weak if one.name in _ONLY_A_DEFAULT else self.late if one.name in _BY_EPOCH else self.taken
            place.extend(found)
        elif names_ours and value in row.refused:
            self._refuse(one, f"{one.name.rpartition('.')[2]} is {value!r}: {row.why}.")
        elif names_ours:
            self.taken.append(GivenSetting(one.name, value if one.name in SHORTCUTS else one.value, one.source))
        elif one.name in PARTS and one.name not in _RULES and shortcuts_of(self.cls):
            self.taken.append(one)
        elif one.name in _RULES or "prompts_per_step" in row.rule or (one.name in _BY_EPOCH and value == "epoch"):
            self.rules[one.name] = one
        elif row.needless or (row.usual and value in row.usual) or (row.rule and one.source == DEFAULT):
            self.made.needless.append(one)
        elif row.why or row.values:
            self._refuse(one)
        else:
            self.taken.append(one)  # an unknown name is refused when the settings are built

    def _refuse(self, one: GivenSetting, sentence: str = "") -> None:
        self.made.refused.append((one, sentence or refusal(one.name, one_value(one.value))))

    def _has(self, name: str) -> bool:
        """Return True if the class has a setting of this name, or if the name is a field of a mapping, such as algorithm.kl."""
        first = name.partition(".")[0]
        inside = first in ("algorithm", "loss") and first != name and not is_known(name)
        return name in self.known or (inside and first in self.known)

    def _number(self, name: str) -> Any:
        """Return the current value of a psigrad setting: the last one given, else that in the file, else the default."""
        return next((one.value for one in reversed(self.taken) if one.name == name), value_below(self.cls, self.values, name))

    def _is_in_file(self, name: str) -> bool:
        first, _, rest = name.partition(".")
        inner = self.values.get(first)
        return first in self.values and (not rest or (isinstance(inner, Mapping) and rest in inner))

    def _warm_up(self, one: GivenSetting) -> None:
        """Convert a warm-up given as a share of the run into steps. Refuse it if the number of steps is not known.

        A warm-up given in steps overrides the share, as in TRL.
        """
        share, steps = one_value(one.value), self._number("run.max_steps")
        if not share or self._number("optim.warmup_steps") or not isinstance(steps, int):
            return
        if steps > 0:
            self.taken.append(GivenSetting("optim.warmup_steps", math.ceil(share * steps), one.source))
        else:
            what = f"{one.name.removeprefix('optim.')} is {share:g}, a share of a run whose length is given in epochs"
            self._refuse(one, f"{what}; give warmup_steps in steps, or max_steps.")

    def _each_epoch(self, name: str, batches: Sequence[GivenSetting]) -> None:
        """Convert the value "epoch" to 0 in a run of one epoch, which acts at its end anyway. Refuse it in longer runs."""
        one, setting = self.rules.get(name), _BY_EPOCH[name]
        if one is None or not self._has(setting):
            return
        if not self._number("run.max_steps") and self._number("run.num_train_epochs") == 1:
            self.taken.append(GivenSetting(setting, 0, one.source))
            return
        size = "prompts_per_step" if self._has("prompts_per_step") else "batch_size"
        rows = next((g.value for g in batches if g.name == size), None) or self._number(size) or 1
        example = f"for 1,000 rows give {setting.partition('.')[2]}={math.ceil(1000 / int(rows))}"
        self._refuse(one, f"{name} is 'epoch', and psigrad counts in steps: an epoch has rows / {size} of them; {example}.")

    def _join(self) -> None:
        """Convert three settings: verl's reward file and function (to FILE:FUNCTION), TRL's time-out in seconds (to minutes), and
        TRL's dataset_config (appended to the dataset's name).
        """
        if one := self.rules.get("custom_reward_function.path"):
            name = self.rules.get("custom_reward_function.name", GivenSetting("", "compute_score", "")).value
            self.taken.append(GivenSetting("reward", (f"{one.value}:{name}",), one.source))
        if one := self.rules.get("ddp_timeout"):
            if isinstance(one.value, int | float) and self._has("placement.timeout_minutes"):
                self.taken.append(GivenSetting("placement.timeout_minutes", one.value / 60, one.source))
            elif one.source != DEFAULT:
                self._refuse(one)
        if one := self.rules.get("dataset_config"):
            name = self._number("data.dataset")
            if isinstance(name, str) and name and ":" not in name:
                self.taken.append(GivenSetting("data.dataset", f"{name}:{one_value(one.value)}", one.source))
            else:
                self._refuse(one)

    def _vllm_correction(self) -> None:
        """Drop the settings that correct vLLM's log-probs if the sampler is not vLLM, as TRL does."""
        if not self._has("sampling.sampler") or self._number("sampling.sampler") != "vllm":
            self.made.needless += [one for one in self.taken if one.name.startswith(_VLLM)]
            self.taken = [one for one in self.taken if not one.name.startswith(_VLLM)]

    def _loss_type(self) -> None:
        """Convert TRL's loss_type into parts of the method. Refuse a loss that belongs to another command."""
        one, weights = self.rules.get("loss_type"), self.rules.get("loss_weights")
        several = [str(name) for name in (one.value if isinstance(one.value, list | tuple) else [one.value])] if one else []
        if weights and "sft" not in several[1:]:
            self._refuse(weights)
        if one is None:
            return
        spec = self._number("algorithm" if self._has("algorithm") else "loss") if shortcuts_of(self.cls) else ""
        method = str(spec.get("preset", "dpo") if isinstance(spec, Mapping) else spec)
        if self._has("prompts_per_step") and method != "online_dpo":
            self._aggregate(one, several)
        elif shortcuts_of(self.cls):
            self._loss(one, several, method)
        elif not (several == ["nll"] and self._has("max_length") and not self._has("process")):
            self._refuse(one, f"loss_type is {one_value(one.value)!r}: {METHOD}.")

    def _aggregate(self, one: GivenSetting, several: Sequence[str]) -> None:
        """Convert the loss_type of an online method into psigrad's aggregation, and for some losses also into its surrogate."""
        name = several[0] if len(several) == 1 else ""
        if name not in AGGREGATES:
            self._refuse(one, f"loss_type is {one_value(one.value)!r}: expected one of {', '.join(AGGREGATES)}.")
            return
        longest = {"part": "fixed_length", "n": self._number("sampling.max_completion_length")}
        self.taken.append(GivenSetting("aggregate", longest if name == "dr_grpo" else AGGREGATES[name], one.source))
        self.taken += [GivenSetting("loss_type", name, one.source)] if name in SURROGATES else []

    def _loss(self, one: GivenSetting, several: Sequence[str], method: str) -> None:
        """Convert the loss_type of a method on preference pairs.

        TRL's DPO trainer has several losses. In psigrad, most of them are separate methods, and some are links of the method
        `dpo`.
        """
        name, others = several[0], [other for other in several[1:] if other != "sft"]
        online = "algorithm.loss" if method == "online_dpo" else "loss"
        if others:
            self._refuse(one, f"loss_type has {name!r} and {others[0]!r}, but psigrad trains one loss; give one of them.")
        if "sft" in several[1:]:
            weights = self.rules.get("loss_weights")
            weight = weights.value[several.index("sft")] if weights else 1.0
            self.taken.append(GivenSetting("sft_weight", weight, one.source))
        if method == "kto":
            known = name == "kto"
        elif method == "simpo":  # TRL's CPO trainer, whose own loss has no margin
            known = name in ("simpo", "sigmoid")
            self.taken += [GivenSetting("margin", 0.0, one.source)] if name == "sigmoid" else []
        else:
            mine = "dpo" if method == "online_dpo" else method
            known = mine == LOSSES.get(name) or (mine == "dpo" and name in LOSSES)
            if name in LINKS and known:
                self.taken.append(GivenSetting(f"{online}.link", name, one.source))
            elif known and LOSSES[name] != mine:
                names = [given.name for given in self.taken]
                after = max((i + 1 for i, given in enumerate(names) if given in ("algorithm", "loss")), default=0)
                self.taken.insert(after, GivenSetting(f"{online}.preset", LOSSES[name], one.source))
        if not known:
            what = f"the method is the command: psigrad {LOSSES[name]}; in Python, the first argument" if name in LOSSES else ""
            self._refuse(one, f"loss_type is {one_value(one.value)!r}: {what or 'expected one of ' + ', '.join(LOSSES)}.")

    def _batches(self) -> list[GivenSetting]:
        """Return psigrad's batch sizes, computed from TRL's (per device, in samples) or verl's (over all devices, in prompts)."""
        theirs = {name: _whole(one) for name, one in self.rules.items() if "prompts_per_step" in TABLE[name].rule}
        if not theirs:
            return []
        online, size = self._has("prompts_per_step"), next(iter(theirs))
        ours = "prompts_per_step" if online else "batch_size"
        if any(one.name == ours for one in self.taken):
            raise UserError(f"{size} and {ours} both set the size of a step; give one of them.")
        source = self.rules[size].source
        verl, mini_batch = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
        if verl in theirs or mini_batch in theirs:
            rows = theirs.get(verl) or int(self._number(ours))
            mini = theirs.get(mini_batch, rows)
            if rows % mini:
                raise UserError(f"ppo_mini_batch_size {mini} does not divide train_batch_size {rows}; give one that does.")
            return [
                GivenSetting(ours, rows, source),
                *([GivenSetting("num_minibatches", rows // mini, source)] if online else []),
            ]
        devices = max(int(self._number("placement.processes")), int(os.environ.get("WORLD_SIZE", 1)))
        rows, accumulated = theirs.get("per_device_train_batch_size", 8), theirs.get("gradient_accumulation_steps", 1)
        if not online:
            return [GivenSetting(ours, rows * accumulated * devices, source)]
        return _generation_batch(theirs, rows * devices, accumulated, int(self._number("num_generations")), source)


def _generation_batch(theirs: Mapping[str, int], at_once: int, accumulated: int, group: int, source: str) -> list[GivenSetting]:
    """Return prompts_per_step and num_minibatches for the batch sizes of TRL's online trainers, which count completions."""
    rounds = theirs.get("steps_per_generation", accumulated)
    completions = theirs.get("generation_batch_size", at_once * rounds)
    update = at_once * accumulated
    sum_of = f"{completions} completions a step"
    if "generation_batch_size" not in theirs:
        sum_of = f"{at_once} completions at once × {rounds} = {completions} a step"
    if completions % group:
        raise UserError(
            f"The batch sizes make {sum_of}, which is not a multiple of num_generations {group}; change one of them, or give "
            "prompts_per_step, the prompts of a step over all devices."
        )
    if completions % update:
        raise UserError(
            f"The batch sizes make {sum_of}, which is not a multiple of the {update} completions of an update; give "
            "steps_per_generation as a multiple of gradient_accumulation_steps, or prompts_per_step and num_minibatches."
        )
    return [
        GivenSetting("prompts_per_step", completions // group, source),
        GivenSetting("num_minibatches", completions // update, source),
    ]


def _whole(given: GivenSetting) -> int:
    if isinstance(given.value, bool) or not isinstance(given.value, int) or given.value < 1:
        raise UserError(f"{given.name} is {given.value!r}; expected a whole number of at least 1.")
    return given.value


def _open(one: GivenSetting) -> list[GivenSetting]:
    """Return the items of `model_init_kwargs` as single settings. Return any other setting as a list of one."""
    if one.name not in ("model_init_kwargs", "teacher_model_init_kwargs") or not isinstance(one.value, Mapping):
        return [one]
    mine = {"dtype": "reference_dtype", "torch_dtype": "reference_dtype"} if one.name.startswith("teacher") else {}
    return [GivenSetting(mine.get(str(name), str(name)), value, one.source) for name, value in one.value.items()]


def _is_needless(one: GivenSetting) -> bool:
    """Return True if the setting may be dropped when the method lacks the part: its value is TRL's default or has no effect."""
    return one.source == DEFAULT or one.value in TABLE.get(one.name, NOTHING).usual


def _is_share(name: str, value: Any) -> bool:
    """Return True for TRL's warm-up as a share of a run: warmup_ratio, or a warmup_steps below 1."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= 1 if name == "warmup_ratio" else name == "optim.warmup_steps" and 0 < value < 1


def _meaning(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the psigrad settings that this value of another library's setting means, or None."""
    plain = value is None or isinstance(value, str | int | float | bool)
    return TABLE.get(name, NOTHING).values.get(value) if plain else None
