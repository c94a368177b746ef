"""The command `explain`: formulas of methods, and meanings of warnings."""

from __future__ import annotations

import textwrap

from psigrad.cli import flags
from psigrad.config.nested import put, read_value
from psigrad.errors import UserError, nearest
from psigrad.extras import command
from psigrad.records.warnings import texts

CREDIT = "a session is one trajectory; each token that the model sampled in it is trained on once, with the session's advantage"


def describe_warning(name: str) -> str:
    """Return the meaning of the warning `name`, which may have dashes for underscores; "" if there is no such warning."""
    if (entry := texts().get(name.replace("-", "_"))) is None:
        return ""
    example = f"\n\nA command that triggers this warning: psigrad {entry['example']}" if "example" in entry else ""
    example += "\n`base` is the folder of a model, and train.jsonl has its rows." * ("--model base" in example)
    for file, text in entry.get("files", {}).items():
        example += f"\n\n{file}:\n{textwrap.indent(text.rstrip(), '  ')}"
    return f"{entry['says']}\n\nWhy: {entry['why']}\nDo:  {entry['do']}{example}"


def explain(arguments: list[str]) -> int:
    """Print the formula of a method, the difference between two methods, or the meaning of a warning."""
    usage = "psigrad explain NAME [algorithm.part=value ...] [OTHER [algorithm.part=value ...]]"
    if flags.asks_for_help(arguments):
        print(f"{usage}\n\nPrint the formula that NAME optimises, part by part, or how OTHER differs from NAME.")
        print("NAME can also be the name of a warning that a run printed: psigrad explain dead_groups")
        print("`psigrad explain defaults` lists the defaults that differ from those of TRL and Stable-Baselines3.")
        print("To explain a method with other parts, give them after its name: psigrad explain grpo algorithm.kl=null")
        return 0
    if arguments == ["defaults"]:
        return command("psigrad_extras", "defaults")([])
    if len(arguments) == 1 and (meaning := describe_warning(arguments[0])):
        print(meaning)
        return 0
    methods: list[dict[str, object]] = []
    for text in arguments:
        name, sign, value = text.partition("=")
        if sign and methods:
            name = name.removeprefix("algorithm.").removeprefix("loss.")
            put(methods[-1], name, read_value(value, name=name), f"override {text!r}")
        else:
            methods.append({"preset": text})
    if not 1 <= len(methods) <= 2:
        raise UserError(f"explain got {len(methods)} names but takes one or two; the usage is {usage}.")
    from psigrad.config import algorithms
    from psigrad.config.methods import list_declarations
    from psigrad.objective.catalog import METHODS

    for name in (str(method["preset"]) for method in methods):
        if ":" not in name and name not in (known := {*list_declarations(), *texts()}):
            raise UserError(
                f"{name} is neither a method nor a warning; `psigrad --all` lists the methods, and docs/debugging.md lists "
                f"the warnings{nearest(name, known) or '.'}"
            )
    print(algorithms.explain(methods[0], *methods[1:]))
    if methods[0]["preset"] in METHODS:
        print(f"agents (--agent): {CREDIT}\n")
    if len(methods) == 1 and len(methods[0]) > 1:
        print(f"What differs from {methods[0]['preset']}:\n")
        print(algorithms.explain({"preset": methods[0]["preset"]}, methods[0]))
    return 0
