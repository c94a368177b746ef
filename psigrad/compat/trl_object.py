"""A configuration object of TRL, as `psigrad.train(args=…)` is given one."""

from __future__ import annotations

import enum
from typing import Any

from psigrad.compat.from_trl import Conversion, convert
from psigrad.compat.trl_fields import DEFAULTS, METHODS, outcome
from psigrad.compat.trl_script import TrlScript
from psigrad.errors import UserError, kind_of

# What TRL computes from other fields, where nobody gave them.
_DERIVED = ("generation_batch_size", "steps_per_generation")
_ANYWHERE = "trainer_output"


def convert_object(args: Any) -> Conversion:
    """The settings that train as TRL would with `args`. Only fields that differ from those of a fresh object were asked for.

    Raises `UserError` where `args` is no configuration of TRL, and where what it asks for has no equal.
    """
    name = type(args).__name__
    if name not in METHODS or not hasattr(args, "per_device_train_batch_size"):
        raise UserError(
            f"args is {kind_of(args)}; expected a configuration of TRL, such as {', '.join(METHODS)}, or settings by name."
        )
    machine = {field: getattr(args, field) for field in ("output_dir", "use_cpu", "bf16", "fp16")}
    usual = type(args)(**machine)  # the same machine: a GPU's defaults are not a CPU's
    values: dict[str, Any] = {"bf16": bool(args.bf16)}
    for field, default in {**DEFAULTS[name], **vars(usual)}.items():
        value = getattr(args, field, default)
        value = value.value if isinstance(value, enum.Enum) else value
        plain = default.value if isinstance(default, enum.Enum) else default
        if outcome(name, field) is not None and value != plain:
            values[field] = value
    if args.output_dir and args.output_dir != _ANYWHERE:
        values["output_dir"] = args.output_dir
    if getattr(args, "steps_per_generation", None) == args.gradient_accumulation_steps:
        values = {field: value for field, value in values.items() if field not in _DERIVED}
    made = convert(TrlScript(name, values))
    if made.no_equal:
        raise UserError(f"args asks for what psigrad has no equal of: {' '.join(made.no_equal)} Leave it out of {name}.")
    return made
