"""GRPO with the upper clip at 0.2 and at 0.28, with several passes over each batch: entropy, pass@k, accuracy.

The claim is that of Yu et al. 2025, DAPO (arXiv:2503.14476, section 3.1): a higher upper clip preserves the entropy, and with it
the diversity of the samples.
"""

from __future__ import annotations

from dataclasses import replace

from studies import trials
from studies.settings import TrialSettings
from studies.trials import TrialResult

ARMS = {"high 0.2": 0.2, "high 0.28": 0.28, "high 0.5": 0.5}
K = 8

check = trials.check


def run(s: TrialSettings) -> TrialResult:
    """Run both clips, and a much higher one to show the direction."""
    where, configs = trials.files(s), {}
    for name, high in ARMS.items():
        algorithm = {"preset": "grpo", "kl": None, "surrogate": {"part": "clip", "low": 0.2, "high": high}}
        config = trials.online(s, where, algorithm, num_iterations=4)
        configs[name] = ("grpo", replace(config, evaluation=replace(config.evaluation, num_generations_eval=K)))
    figures = {
        "at the end": trials.last,
        f"pass@{K}": lambda run: trials.last(run, f"eval/pass@{K}"),
        "entropy": lambda run: trials.mean_of(run, "entropy"),
        "last fifth": lambda run: trials.mean_of([r for r in run if r["step"] > 0.8 * s.steps], "entropy"),
        "clipped": lambda run: trials.mean_of(run, "clip_ratio/high_mean"),
    }
    arms = trials.run_arms(s, "clip_higher", configs, figures)
    first, second, third = arms.values()
    findings = (
        trials.compare("0.28 keeps more entropy than 0.2", second, first, "entropy"),
        trials.compare("0.5 keeps more entropy than 0.2", third, first, "entropy"),
        trials.compare(f"0.28 has the higher pass@{K}", second, first, f"pass@{K}"),
        trials.compare("0.28 has the higher accuracy", second, first, "at the end"),
    )
    return TrialResult(s, tuple(arms.values()), findings)


tables = trials.shown(
    "Clip-higher",
    "entropy: nats per token over the run; last fifth: over its end",
    "clipped: share of the steps whose ratio is above the clip",
)
picture = trials.curves(
    ("Held-out accuracy", tuple(ARMS)),
    beside=[("Entropy, nats per token", ("entropy", "last fifth")), (f"pass@{K} at the end", (f"pass@{K}",))],
)
