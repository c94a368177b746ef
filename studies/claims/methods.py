"""Six methods at equal samples from one fine-tuned model: REINFORCE, RLOO, GRPO, PPO, RAFT and online DPO.

PPO makes four passes over each batch as usual, and one pass in a separate arm. The others make one.

The claims are those of Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740): RLOO is at least as good as REINFORCE, REINFORCE
is at least as good as PPO, and RLOO is more sample-efficient than RAFT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from psigrad.errors import UserError
from studies import drawing, trials
from studies.settings import MethodsSettings
from studies.trials import TrialResult

ARMS = {
    "REINFORCE": ("reinforce", {"preset": "reinforce", "kl": None}),
    "RLOO": ("rloo", {"preset": "rloo", "kl": None}),
    "GRPO": ("grpo", {"preset": "grpo", "kl": None}),
    "PPO": ("ppo", {"preset": "ppo", "kl": None}),
    "PPO, 1 pass": ("ppo", {"preset": "ppo", "kl": None}),
    "RAFT": ("raft", "raft"),
    "online DPO": ("online_dpo", "online_dpo"),
}
SLACK = 0.01
"""The tolerance of "at least as good": not worse by more than this."""


def check(s: MethodsSettings) -> None:
    """Raise an error for invalid settings."""
    trials.check(s)
    trials.check_rates(s.rates)
    if not 0 < s.level <= 1:
        raise UserError(f"level is {s.level}; give an accuracy between 0 and 1.")


def run(s: MethodsSettings) -> TrialResult:
    """Tune each method's learning rate on a separate seed, then run the method on the other seeds."""
    where = trials.files(s)
    configs = {
        name: (method, trials.online(s, where, algorithm, num_iterations=4 if name == "PPO" else 1))
        for name, (method, algorithm) in ARMS.items()
    }
    figures = {
        "area": trials.area,
        "at the end": trials.last,
        "samples": lambda run: samples_to(run, s.level, s.prompts * s.generations),
        "length": lambda run: trials.last(run, "completions/mean_length"),
    }
    arms = trials.run_arms(s, "methods", configs, figures, rates=trials.tune(s, "methods", configs, s.rates))
    findings = (
        trials.compare("RLOO is at least as good as REINFORCE", arms["RLOO"], arms["REINFORCE"], "area", least=-SLACK),
        trials.compare("REINFORCE is at least as good as PPO", arms["REINFORCE"], arms["PPO"], "area", least=-SLACK),
        trials.compare("RLOO is better than PPO", arms["RLOO"], arms["PPO"], "area"),
        trials.compare("RLOO is better than PPO of one pass", arms["RLOO"], arms["PPO, 1 pass"], "area"),
        trials.compare("RLOO needs fewer samples than RAFT", arms["RAFT"], arms["RLOO"], "samples"),
        trials.compare("RLOO learns more than online DPO", arms["RLOO"], arms["online DPO"], "area"),
    )
    return TrialResult(s, tuple(arms.values()), findings)


def samples_to(rows: Sequence[Mapping[str, Any]], level: float, per_step: int) -> float:
    """Return the number of completions until the accuracy is `level`, interpolated linearly between two measurements.

    A run that never reaches it counts as all of its samples.
    """
    points = sorted(trials.curve(rows).items())
    for (s0, a0), (s1, a1) in pairwise(points):
        if a1 >= level > a0:
            return per_step * (s0 + (s1 - s0) * (level - a0) / (a1 - a0))
    return 0.0 if points[0][1] >= level else float(per_step * points[-1][0])


def tables(result: TrialResult) -> drawing.Printed:
    """Yield one row for each method, then the claims."""
    s = result.settings
    yield from trials.show(
        result,
        "Methods at equal samples",
        f"area: mean held-out accuracy over the run; samples: until it is {s.level:g}",
        f"rate: the best of {', '.join(f'{r:g}' for r in s.rates)} on another seed",
    )


picture = trials.curves(("Held-out accuracy", tuple(ARMS)))
