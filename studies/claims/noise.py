"""RAFT, RLOO and PPO with noise in the reward, and under the coefficient β of the KL to the starting model.

The claim is that of Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740, section 5.3): RAFT degrades more than RLOO with noise
in the reward and with a larger β. Here RAFT ranks by the reward alone, and its KL is a term of the loss.

Every method makes one pass over each batch. The learning rate of each arm (a method at a noise or a β) is tuned with the
same budget: one run for each rate, on a separate seed, scored by the accuracy without noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from studies import drawing, trials
from studies.settings import NoiseSettings
from studies.trials import Arm, ClaimVerdict, TrialResult

METHODS = ("RAFT", "RLOO", "PPO")
NOISES = {0.0: "exact", 0.5: "studies.rewards:half", 1.0: "studies.rewards:whole"}
"""The rewards by the standard deviation of their noise."""


def check(s: NoiseSettings) -> None:
    """Raise an error for invalid settings."""
    trials.check(s)
    trials.check_rates(s.rates)
    if not {"RAFT", "RLOO"} <= set(s.methods) <= set(METHODS):
        raise UserError(f"methods are {', '.join(s.methods)}; expected RAFT and RLOO, and optionally PPO.")
    if not set(s.noises) <= set(NOISES) - {0.0}:
        raise UserError(f"noises are {s.noises}; expected only 0.5 and 1.")
    if s.betas and min(s.betas) <= 0:
        raise UserError(f"betas are {s.betas}; give numbers above 0.")


def algorithm(method: str, beta: float) -> Any:
    """Return the method with a KL term of this weight."""
    kl = {"where": "loss" if method == "RAFT" else "reward", "estimator": "k3" if method == "RAFT" else "k1", "coefficient": beta}
    return {"preset": method.lower(), "kl": kl if beta else None}


def run(s: NoiseSettings) -> TrialResult:
    """Run every method at every noise, and at every β without noise."""
    where = trials.files(s)
    configs = {}
    for method in s.methods:
        for noise in (0.0, *s.noises):
            config = trials.online(s, where, algorithm(method, 0.0), reward=(NOISES[noise],))
            configs[f"{method}, noise {noise:g}"] = (method.lower(), config)
        for beta in s.betas:
            config = trials.online(s, where, algorithm(method, beta), reward=("exact",))
            configs[f"{method}, β {beta:g}"] = (method.lower(), config)
    figures = {"area": trials.area, "at the end": trials.last}
    made = trials.run_arms(s, "noise", configs, figures, rates=trials.tune(s, "noise", configs, s.rates))
    worsened = [*(f"noise {noise:g}" for noise in s.noises), *(f"β {beta:g}" for beta in s.betas)]
    findings = [worse(made, other, what) for what in worsened for other in s.methods if other != "RAFT"]
    return TrialResult(s, tuple(made.values()), tuple(findings), trials.core_minutes(s, "noise"))


def worse(arms: Mapping[str, Arm], other: str, what: str) -> ClaimVerdict:
    """Return the verdict on the claim that RAFT loses more of its area than the other method."""
    claim = f"RAFT loses more than {other} by {what}"
    lost = {
        m: [a - b for a, b in zip(arms[f"{m}, noise 0"].each["area"], arms[f"{m}, {what}"].each["area"], strict=True)]
        for m in ("RAFT", other)
    }
    return trials.compare_pairs(claim, f"area lost: RAFT > {other}, paired by seed", lost["RAFT"], lost[other])


def tables(result: TrialResult) -> drawing.Printed:
    """Yield one row for each method at each noise and β, then the claims."""
    yield from trials.show(
        result,
        "Noise in the reward, and β",
        "noise: standard deviation of what is added to a reward of 0 or 1",
        "area: mean held-out accuracy over the run, by the reward without noise",
        f"rate: the best of {', '.join(f'{r:g}' for r in result.settings.rates)} on another seed, for each row",
    )


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot the learning curves by noise."""
    cases = dict.fromkeys(arm["name"].split(", ")[1] for arm in found["arms"])
    panels = [(f"Held-out accuracy, {case}", [f"{m}, {case}" for m in METHODS]) for case in cases]
    return trials.learning_curves(found, path, *panels)
