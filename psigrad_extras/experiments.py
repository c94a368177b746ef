"""`psigrad experiment NAME`: the list of studies in the source checkout, and a function that runs one and prints its results.

This module imports no torch, so that help is fast. A new study needs a line here, a settings class in `studies/settings.py`, and
a module in `studies/` with the functions that `Experiment.module` describes.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psigrad.errors import UserError, nearest
from psigrad.paths import absolute, claim


def find_checkout() -> Path | None:
    """Return the source checkout that contains the package, or the current folder if that is one; otherwise None."""
    for root in (Path(__file__).parents[1], Path.cwd()):
        if (root / "studies").is_dir() and (root / "psigrad" / "importing.py").is_file():
            return root
    return None


@dataclass(frozen=True)
class Experiment:
    """An experiment: its name, its purpose, and the name of the module in `studies/` with its code."""

    name: str
    purpose: str
    file: str

    @property
    def settings(self) -> type[Any]:
        """The class of the experiment's settings. Raises `UserError` without a source checkout."""
        found: type[Any] = self._load("studies.settings").SETTINGS[self.name]
        return found

    @property
    def module(self) -> Any:
        """The experiment's module, imported on first use. Raises `UserError` without a source checkout.

        It has the functions `check(settings)`, which raises for invalid settings, `run(settings)`, which returns a frozen
        dataclass, `tables(result)`, which returns the tables to print, and `picture(found, path)`, which draws the result from
        its JSON.
        """
        return self._load(self.file)

    def _load(self, module: str) -> Any:
        root = find_checkout()
        if root is None:
            raise UserError(
                f"{self.name} is a study, and the installed package does not include the studies; "
                f"clone psigrad's repository and call `psigrad experiment {self.name}` in its folder."
            )
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))  # the workers of a run inherit this path
        return importlib.import_module(module)


_STUDIES = (
    ("psi", "bias and variance of the gradient for each form of Ψ", "studies.psi"),
    ("bias", "bias and variance of TD, n-step, λ and Monte Carlo targets", "studies.bias"),
    ("clip", "surrogates and their gradients as functions of the ratio", "studies.clip"),
    ("methods", "REINFORCE, RLOO, GRPO, PPO, RAFT and online DPO at equal samples", "studies.claims.methods"),
    ("lambda", "PPO's λ on a language task and on CartPole", "studies.claims.ppo_lambda"),
    ("noise", "RAFT, RLOO and PPO with noise in the reward, and with a KL penalty", "studies.claims.noise"),
    ("memory", "memory and time of RLOO, GRPO and PPO, measured and predicted", "studies.claims.memory"),
    ("action_space", "how few tokens have most of the probability, by position", "studies.claims.action_space"),
    ("length", "GRPO's length bias, computed and in training, against Dr. GRPO", "studies.claims.length"),
    ("difficulty", "how GRPO and Dr. GRPO weigh easy and hard prompts", "studies.claims.difficulty"),
    ("clip_higher", "entropy and pass@k with a higher upper clip", "studies.claims.clip_higher"),
    ("dynamic_sampling", "DAPO with and without the replacement of groups without signal", "studies.claims.dynamic_sampling"),
    ("loopholes", "rewards that a policy exploits, and the warnings that notice it", "studies.claims.loopholes"),
    ("pretrained", "RLVR, SFT, DPO and distillation of a real model", "studies.claims.pretrained"),
    ("false_alarms", "how often honest runs raise a warning", "studies.claims.false_alarms"),
    ("dpo", "margins and log-probs of DPO, IPO and SimPO, against online methods", "studies.claims.dpo"),
)
EXPERIMENTS = {name: Experiment(name, purpose, module) for name, purpose, module in _STUDIES}
_GROUPS = {
    "problems with a known exact answer (seconds)": ("studies.psi", "studies.bias", "studies.clip"),
    "claims of the literature, over several seeds (minutes to an hour; docs/claims.md)": ("studies.claims.",),
}


def groups() -> dict[str, list[Experiment]]:
    """Return heading -> experiments, grouped by kind of problem and duration."""
    return {title: [one for one in EXPERIMENTS.values() if one.file.startswith(kind)] for title, kind in _GROUPS.items()}


def find(name: str) -> Experiment:
    """Return the experiment of that name. Raises `UserError` with the nearest one."""
    if name not in EXPERIMENTS:
        hint = nearest(name, EXPERIMENTS) or "."
        raise UserError(f"There is no experiment {name!r}; expected one of {', '.join(EXPERIMENTS)}{hint}")
    return EXPERIMENTS[name]


def run(name: str, settings: Any, console: Any = None) -> Any:
    """Run an experiment, print its tables, write NAME.json and NAME.png into the folder `settings.out`, and return the result.

    Raises `UserError` for an unknown name, for settings that make no sense, and for a folder that cannot be written.
    """
    from rich.console import Console

    module, console, folder = find(name).module, console or Console(), absolute(settings.out)
    module.check(settings)  # before a folder is made
    claim(folder, "experiment", "--out")
    result = module.run(settings)
    for part in module.tables(result):
        console.print(part)
    found = asdict(result)
    (folder / f"{name}.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")
    module.picture(found, folder / f"{name}.png")
    console.print(f"figures {folder / f'{name}.json'}\npicture {folder / f'{name}.png'}", soft_wrap=True, highlight=False)
    return result
