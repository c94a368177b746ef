"""PPO at several λ of generalised advantage estimation, on a language task and on CartPole.

The claim is that of Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740, section 5.1): on language models λ = 1 is best. The
bias of a smaller λ costs more than the variance that it saves. In control, the opposite is known: Schulman et al. 2016
(arXiv:1506.02438) found 0.92 to 0.99 best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from psigrad.config import Run
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from studies import trials
from studies.settings import LambdaSettings
from studies.trials import Trial, TrialResult

LAMBDAS = (0.0, 0.5, 0.9, 0.95, 1.0)


def check(s: LambdaSettings) -> None:
    """Raise an error for invalid settings."""
    trials.check(s)
    if s.timesteps < 1000:
        raise UserError(f"timesteps is {s.timesteps}; give at least 1000.")


def run(s: LambdaSettings) -> TrialResult:
    """Run every λ on both tasks."""
    where = trials.files(s)
    jobs = []
    for lam in LAMBDAS:
        psi = {"part": "whitened", "psi": {"part": "gae", "lam": lam}}
        config = trials.online(s, where, {"preset": "ppo", "kl": None, "psi": psi}, num_iterations=4)
        control = ControlConfig(
            algorithm="ppo",
            env="CartPole-v1",
            gae_lambda=lam,
            tuned=False,  # tuned settings have their own λ; these are otherwise those of Stable-Baselines3's zoo
            n_envs=8,
            n_steps=32,
            batch_size=256,
            n_epochs=20,
            gamma=0.98,
            learning_rate=1e-3,
            total_timesteps=s.timesteps,
            eval_episodes=20,
            eval_steps=max(1, s.timesteps // 256 // 10),
            run=Run(progress=False, report=False, threads=1),
        )
        jobs += [Trial(f"words, λ {lam:g}", seed, "ppo", config) for seed in range(s.seeds)]
        jobs += [Trial(f"CartPole, λ {lam:g}", seed, "control", control) for seed in range(s.seeds)]
    rows = trials.run_all(s, "lambda", jobs)
    words = {"area": trials.area, "at the end": trials.last, "explained variance": lambda r: trials.last(r, "explained_variance")}
    poles = {
        "area": lambda r: trials.area(r, "eval/return/mean"),
        "at the end": lambda r: trials.last(r, "eval/return/mean"),
        "explained variance": lambda r: trials.last(r, "train/explained_variance"),
    }
    arms = {f"words, λ {lam:g}": trials.summarize(f"words, λ {lam:g}", range(s.seeds), rows, words) for lam in LAMBDAS}
    arms |= {
        name: trials.summarize(name, range(s.seeds), rows, poles, "eval/return/mean")
        for name in (f"CartPole, λ {lam:g}" for lam in LAMBDAS)
    }
    findings = (
        trials.compare("λ 1 beats λ 0.95 on words", arms["words, λ 1"], arms["words, λ 0.95"], "area"),
        trials.compare("λ 1 beats λ 0.5 on words", arms["words, λ 1"], arms["words, λ 0.5"], "area"),
        trials.compare("λ 1 beats λ 0 on words", arms["words, λ 1"], arms["words, λ 0"], "area"),
        trials.compare("λ 0.95 beats λ 1 on CartPole", arms["CartPole, λ 0.95"], arms["CartPole, λ 1"], "area"),
        trials.compare("λ 0.95 beats λ 0 on CartPole", arms["CartPole, λ 0.95"], arms["CartPole, λ 0"], "area"),
    )
    return TrialResult(s, tuple(arms.values()), findings)


def tables(result: TrialResult) -> Iterator[Table | Text]:
    """Yield one row for each task and λ, then the claims."""
    yield from trials.show(
        "PPO's λ",
        result,
        "area: mean held-out accuracy, or mean return, over the run",
        "explained variance: of the returns by the critic, at the end",
    )


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot the learning curves on both tasks."""
    panels = [
        (f"{title} on {task}", [f"{task}, λ {lam:g}" for lam in LAMBDAS])
        for title, task in (("Held-out accuracy", "words"), ("Return", "CartPole"))
    ]
    return trials.learning_curves(found, path, *panels, sharey=False)
