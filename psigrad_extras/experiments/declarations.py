"""Every experiment of `psigrad experiment`: its settings, and how it is run and shown. Light, so that help needs no torch.

A new experiment is a settings class and an entry here, and a module of its name beside this one. Studies have a line here;
the rest of them is in the folder `studies` of the source checkout (`studies/settings.py`).
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from psigrad.errors import UserError, nearest
from psigrad.paths import absolute, claim
from psigrad_extras.checkout import checkout_folder


@dataclass(frozen=True)
class PsiSettings:
    """The process, its critics, how much is sampled, and where the figures go."""

    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 16_000
    """Episodes of each seed."""
    batch: int = 16
    """Episodes of one gradient estimate."""
    discount: float = 1.0
    """γ, of the process and of every Ψ."""
    at_the_end: bool = False
    """Pay the last step only, as completions are paid."""
    critic_error: float = 1.0
    """Standard deviation of the noise on the rough critic's values."""
    out: str = "runs/experiments"
    """Folder for psi.json and psi.png."""


@dataclass(frozen=True)
class BiasSettings:
    """The process, how wrong V̂ is, how much is sampled, and where the figures go."""

    world: str = "walk"
    """walk or grid."""
    error: float = 0.5
    """How wrong V̂ is: 0 not at all, 1 as wrong as V̂ = 0."""
    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 2_000
    """Episodes of each seed."""
    out: str = "runs/experiments"
    """Folder for bias.json and bias.png."""


@dataclass(frozen=True)
class ClipSettings:
    """Bounds of the surrogates, and where the figures go."""

    low: float = 0.2
    """How far below 1 the ratio may fall."""
    high: float = 0.2
    """How far above 1 the ratio may rise."""
    higher: float = 0.28
    """The same for clip-higher."""
    bound: float = 3.0
    """Greatest ratio of dual clip for a negative advantage."""
    cap: float = 5.0
    """Greatest weight of CISPO."""
    out: str = "runs/experiments"
    """Folder for clip.json and clip.png."""


@dataclass(frozen=True)
class Experiment:
    """One experiment: its name, what it shows, and the module of its code."""

    name: str
    purpose: str
    file: str
    """The module, psigrad_extras.experiments.NAME or one of `studies`."""
    own: type[Any] | None = None
    """Settings with their defaults; None: those of `studies.settings`."""

    @property
    def settings(self) -> type[Any]:
        """Its settings class. Raises `UserError` for a study without a source checkout."""
        found: type[Any] = self.own or self._load("studies.settings").SETTINGS[self.name]
        return found

    @property
    def module(self) -> Any:
        """The module, imported when it is asked for.

        It has `check(settings)`, which refuses settings that make no sense; `run(settings)`, which returns a frozen dataclass;
        `tables(result)`, what is printed; and `picture(found, path)`, drawn from the result as plain values. Raises `UserError`
        for a study without a source checkout.
        """
        return self._load(self.file)

    def _load(self, module: str) -> Any:
        if module.startswith("studies."):
            folder = checkout_folder("studies")
            if folder is None:
                raise UserError(
                    f"{self.name} is a study, and studies come with psigrad's source checkout, not with the installed package; "
                    f"clone the repository and call `psigrad experiment {self.name}` in its folder."
                )
            if str(folder.parent) not in sys.path:
                sys.path.insert(0, str(folder.parent))  # the workers of a run look where this process does
        return importlib.import_module(module)


_OWN = (
    ("psi", "bias and variance of the gradient for each form of Ψ", PsiSettings),
    ("bias", "bias and variance of TD, n-step, λ and Monte Carlo targets", BiasSettings),
    ("clip", "surrogates and their gradients over the ratio", ClipSettings),
)
_STUDIES = (
    ("lag", "what asynchronous sampling buys on many devices (simulated)", "studies.lag"),
    ("methods", "REINFORCE, RLOO, GRPO, PPO, RAFT and DPO at equal samples", "studies.claims.methods"),
    ("lambda", "PPO's λ on a language task and on CartPole", "studies.claims.ppo_lambda"),
    ("noise", "RAFT, RLOO and PPO under noise in the reward and under β", "studies.claims.noise"),
    ("memory", "memory and seconds of RLOO, GRPO and PPO, measured and planned", "studies.claims.memory"),
    ("action_space", "how few tokens hold the probability, and where", "studies.claims.action_space"),
    ("length", "GRPO's length bias, exact and over training, against Dr. GRPO", "studies.claims.length"),
    ("difficulty", "how GRPO and Dr. GRPO weigh easy and hard prompts", "studies.claims.difficulty"),
    ("clip_higher", "entropy and pass@k with a higher upper clip", "studies.claims.clip_higher"),
    ("dynamic_sampling", "updates and samples with groups without signal replaced", "studies.claims.dynamic_sampling"),
    ("loopholes", "rewards that a policy exploits, and what the warnings notice", "studies.claims.loopholes"),
    ("pretrained", "RLVR, SFT, DPO and distillation of a real model", "studies.claims.pretrained"),
    ("false_alarms", "how often the warnings speak of honest runs", "studies.claims.false_alarms"),
    ("dpo", "margins and log-probs of DPO and its kin, against online methods", "studies.claims.dpo"),
)
EXPERIMENTS = {
    one.name: one
    for one in (
        *(Experiment(name, purpose, f"psigrad_extras.experiments.{name}", settings) for name, purpose, settings in _OWN),
        *(Experiment(name, purpose, module) for name, purpose, module in _STUDIES),
    )
}


def groups() -> dict[str, list[Experiment]]:
    """The experiments by what they stand on, and how long they take."""
    drawers = {
        "on problems whose answer is known exactly; seconds": "psigrad_extras.experiments.",
        "simulated; seconds, from a source checkout (studies/)": "studies.lag",
        "claims of the literature over seeds; minutes to an hour, from a source checkout (docs/claims.md)": "studies.claims.",
    }
    return {title: [one for one in EXPERIMENTS.values() if one.file.startswith(drawer)] for title, drawer in drawers.items()}


def find(name: str) -> Experiment:
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

    module, console = find(name).module, console or Console()
    module.check(settings)  # before a folder is made
    folder = claim(absolute(settings.out), "experiment", "--out")
    result = module.run(settings)
    for part in module.tables(result):
        console.print(part)
    found = asdict(result)
    (folder / f"{name}.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")
    module.picture(found, folder / f"{name}.png")
    console.print(f"figures {folder / f'{name}.json'}\npicture {folder / f'{name}.png'}", soft_wrap=True, highlight=False)
    return result
