"""RAFT, RLOO and PPO when the reward errs, and under the coefficient β of the KL to the starting model.

The claim is that of Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740, section 5.3): RAFT degrades more than RLOO with noise
in the reward and with a larger β. RAFT ranks by the reward alone here, and its KL is a term of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from psigrad.experiments import trials
from psigrad.experiments.declarations import TrialSettings
from psigrad.experiments.trials import Arm, ClaimVerdict, Trial, TrialResult

METHODS = ("RAFT", "RLOO", "PPO")
NOISES = {"0": "exact", "0.5": "psigrad.experiments.noisy:half", "1": "psigrad.experiments.noisy:whole"}
BETAS = (0.1, 0.5)

check = trials.check


def algorithm(method: str, beta: float) -> Any:
    """The method with a KL term of this weight."""
    kl = {"where": "loss" if method == "RAFT" else "reward", "estimator": "k3" if method == "RAFT" else "k1", "coefficient": beta}
    return {"preset": method.lower(), "kl": kl if beta else None}


def run(s: TrialSettings) -> TrialResult:
    """Every method at every noise, and at every β without noise."""
    where = trials.files(s)
    arms = {f"{m}, noise {n}": (m, 0.0, reward) for m in METHODS for n, reward in NOISES.items()}
    arms |= {f"{m}, β {beta:g}": (m, beta, "exact") for m in METHODS for beta in BETAS}
    jobs = []
    for name, (method, beta, reward) in arms.items():
        passes = 4 if method == "PPO" else 1
        config = trials.online(s, where, algorithm(method, beta), reward=(reward,), num_iterations=passes)
        jobs += [Trial(name, seed, method.lower(), config) for seed in range(s.seeds)]
    rows = trials.finished(s, "noise", jobs)
    figures = {"area": trials.area, "at the end": trials.last}
    made = {name: trials.summed(name, range(s.seeds), rows, figures) for name in arms}
    findings = [
        worse(f"RAFT loses more than {other} by noise {noise}", made, other, f"noise {noise}")
        for noise in ("0.5", "1")
        for other in ("RLOO", "PPO")
    ]
    findings += [worse(f"RAFT loses more than RLOO by β {beta:g}", made, "RLOO", f"β {beta:g}") for beta in BETAS]
    return TrialResult(s, tuple(made.values()), tuple(findings))


def worse(claim: str, arms: Mapping[str, Arm], other: str, what: str) -> ClaimVerdict:
    """Whether RAFT loses more of its area than the other method."""
    lost = {
        m: [a - b for a, b in zip(arms[f"{m}, noise 0"].each["area"], arms[f"{m}, {what}"].each["area"], strict=True)]
        for m in ("RAFT", other)
    }
    return trials.paired(claim, f"area lost: RAFT > {other}, paired by seed", lost["RAFT"], lost[other])


def tables(result: TrialResult) -> Iterator[Table | Text]:
    """One row for each method at each noise and β, then the claims."""
    yield from trials.shown(
        "Noise in the reward, and β",
        result,
        "noise: standard deviation of what is added to a reward of 0 or 1",
        "area: mean held-out accuracy over the run, by the reward without noise",
    )


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """The learning curves by noise."""
    panels = [(f"Noise {noise}", [f"{m}, noise {noise}" for m in METHODS]) for noise in NOISES]
    return trials.learning_curves(found, path, *panels)
