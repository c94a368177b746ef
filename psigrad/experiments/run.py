"""`psigrad experiment psi|bias|clip`: claims about policy gradients, shown on problems whose exact answer is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from psigrad.errors import UserError, nearest
from psigrad.experiments.settings import BiasSettings, ClipSettings, PsiSettings


class Experiment(NamedTuple):
    """What it shows, its settings with their defaults, and the function that runs it."""

    purpose: str
    settings: type[Any]
    run: Callable[[Any], Any]


def psi(settings: PsiSettings) -> Any:
    """`experiments.psi.Result`: bias and variance of the gradient for each form of Ψ."""
    from psigrad.experiments import psi

    return psi.run(settings)


def bias(settings: BiasSettings) -> Any:
    """`experiments.bias.Result`: bias and variance of a critic's targets."""
    from psigrad.experiments import bias

    return bias.run(settings)


def clip(settings: ClipSettings) -> Any:
    """`experiments.clip.Result`: surrogates and their gradients over the ratio."""
    from psigrad.experiments import clip

    return clip.run(settings)


EXPERIMENTS = {
    "psi": Experiment("bias and variance of the gradient for each form of Ψ", PsiSettings, psi),
    "bias": Experiment("bias and variance of TD, n-step, λ and Monte Carlo targets", BiasSettings, bias),
    "clip": Experiment("surrogates and their gradients over the ratio", ClipSettings, clip),
}


def named(name: str) -> Experiment:
    """The experiment of that name. Raises `UserError` with the nearest one."""
    if name not in EXPERIMENTS:
        hint = nearest(name, EXPERIMENTS) or "."
        raise UserError(f"There is no experiment {name!r}; expected {', '.join(EXPERIMENTS)}{hint}")
    return EXPERIMENTS[name]


def run(name: str, settings: Any, console: Any = None) -> Any:
    """Run an experiment, print its tables, write NAME.json and NAME.png into the folder `settings.out`; the result.

    Raises `UserError` for an unknown name, for settings that make no sense, and for a folder that cannot be written.
    """
    from rich.console import Console

    from psigrad.experiments import bias, clip, pictures, psi, tables

    experiment, console, folder = named(name), console or Console(), Path(settings.out)
    {"psi": psi, "bias": bias, "clip": clip}[name].check(settings)  # before a folder is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The folder {settings.out!r} cannot be made: {error.strerror}; name another with --out.") from error
    result = experiment.run(settings)
    for part in getattr(tables, name)(result):
        console.print(part)
    found = asdict(result)
    (folder / f"{name}.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")
    getattr(pictures, name)(found, folder / f"{name}.png")
    console.print(f"figures {folder / f'{name}.json'}\npicture {folder / f'{name}.png'}", soft_wrap=True, highlight=False)
    return result
