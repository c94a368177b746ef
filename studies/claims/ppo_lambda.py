"""PPO at several λ of generalised advantage estimation, on a language task and on CartPole.

The claim is that of Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740, section 5.1): on language models λ = 1 is best. The
bias of a smaller λ costs more than the variance that it saves. In control, the opposite is known: Schulman et al. 2016
(arXiv:1506.02438) found 0.92 to 0.99 best.
"""

from __future__ import annotations

from psigrad.config import Run
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from studies import trials
from studies.settings import LambdaSettings
from studies.trials import TrialResult

LAMBDAS = (0.0, 0.5, 0.9, 0.95, 1.0)
RETURN = "eval/return/mean"


def check(s: LambdaSettings) -> None:
    """Raise an error for invalid settings."""
    trials.check(s)
    if s.timesteps < 1000:
        raise UserError(f"timesteps is {s.timesteps}; give at least 1000.")


def run(s: LambdaSettings) -> TrialResult:
    """Run every λ on both tasks."""
    where = trials.files(s)
    on_words, on_poles = {}, {}
    for lam in LAMBDAS:
        psi = {"part": "whitened", "psi": {"part": "gae", "lam": lam}}
        config = trials.online(s, where, {"preset": "ppo", "kl": None, "psi": psi}, num_iterations=4)
        on_words[f"words, λ {lam:g}"] = ("ppo", config)
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
        on_poles[f"CartPole, λ {lam:g}"] = ("control", control)
    words = {"area": trials.area, "at the end": trials.last, "explained variance": lambda r: trials.last(r, "explained_variance")}
    poles = {
        "area": lambda r: trials.area(r, RETURN),
        "at the end": lambda r: trials.last(r, RETURN),
        "explained variance": lambda r: trials.last(r, "train/explained_variance"),
    }
    arms = trials.run_arms(s, "lambda", on_words, words) | trials.run_arms(s, "lambda", on_poles, poles, key=RETURN)
    findings = tuple(
        trials.compare(f"λ {best:g} beats λ {lam:g} on {task}", arms[f"{task}, λ {best:g}"], arms[f"{task}, λ {lam:g}"], "area")
        for task, best, others in (("words", 1.0, (0.95, 0.5, 0.0)), ("CartPole", 0.95, (1.0, 0.0)))
        for lam in others
    )
    return TrialResult(s, tuple(arms.values()), findings)


tables = trials.shown(
    "PPO's λ",
    "area: mean held-out accuracy, or mean return, over the run",
    "explained variance: of the returns by the critic, at the end",
)
picture = trials.curves(
    ("Held-out accuracy on words", [f"words, λ {lam:g}" for lam in LAMBDAS]),
    ("Return on CartPole", [f"CartPole, λ {lam:g}" for lam in LAMBDAS]),
    sharey=False,
)
