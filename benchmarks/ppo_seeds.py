"""PPO beside Stable-Baselines3's at equal settings over many seeds: how often each solves a task in a given number of steps.

python benchmarks/ppo_seeds.py [--seeds 200] [--minutes M]    go on where it stopped, one run after the other, on one thread
python benchmarks/ppo_seeds.py --report                       what there is so far
python benchmarks/ppo_seeds.py --kinds psigrad psigrad_minibatch --tasks CartPole-v1        these alone

The kinds of a seed run in turn, so that what there is after any stop is a fair sample. At equal settings there is one difference:
SB3 whitens advantages over each minibatch, psigrad over the rollout. Without it the weights that an update leaves are the same
(`tests/control/test_sb3_agreement.py`). The other two kinds, whose turn comes when these have all seeds, swap it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "ppo_seeds.jsonl"
KINDS = ("psigrad", "sb3", "psigrad_minibatch", "sb3_rollout")
SETTINGS: dict[str, Any] = {
    "n_envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95,
    "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip
# Environment -> steps of training, and the mean return from which on it counts as solved.
TASKS = {"CartPole-v1": (30_000, 475.0), "Acrobot-v1": (30_000, -100.0)}
EPISODES = 100


def psigrad(env: str, steps: int, seed: int, minibatch: bool = False) -> Callable[[Any], Any]:
    """A policy of psigrad's, trained; it gives likeliest actions. With `minibatch` advantages are whitened as SB3 does."""
    from psigrad.control import builder
    from psigrad.runs.machine import prepare_torch

    given = {**SETTINGS, "adam_epsilon": 1e-5, "total_timesteps": steps, "tuned": False, "seed": seed, "threads": 1}
    given |= {"normalize_advantage": "minibatch"} if minibatch else {}
    made = builder.settings("ppo", env, given)
    prepare_torch(made.run)
    method = builder.build(made)
    method.restart()
    while method.timesteps < steps:
        method.iterate(False)
    return method.network.act


def sb3(env: str, steps: int, seed: int, whole: bool = False) -> Callable[[Any], Any]:
    """A policy of SB3's; with `whole` its advantages are whitened over the rollout."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.env_util import make_vec_env

    class Whitened(RolloutBuffer):
        def compute_returns_and_advantage(self, *given: Any, **named: Any) -> None:
            super().compute_returns_and_advantage(*given, **named)
            self.advantages = (self.advantages - self.advantages.mean()) / (self.advantages.std(ddof=1) + 1e-8)

    values = {name: value for name, value in SETTINGS.items() if name != "n_envs"}
    changed = {"normalize_advantage": False, "rollout_buffer_class": Whitened} if whole else {}
    copies = make_vec_env(env, SETTINGS["n_envs"], seed=seed)
    model = PPO("MlpPolicy", copies, device="cpu", seed=seed, **values, **changed).learn(steps)
    return lambda observation: model.predict(observation, deterministic=True)[0]


def measure(kind: str, env: str, seed: int) -> dict[str, Any]:
    """One run: its mean return over 100 episodes of likeliest actions, on starts that all kinds share."""
    from psigrad.control.environments import vector
    from psigrad.control.environments.collector import play

    steps, limit = TASKS[env]
    start = time.perf_counter()
    train = psigrad if kind.startswith("psigrad") else sb3
    act = train(env, steps, seed, kind == KINDS[2 + (train is sb3)])
    seconds = time.perf_counter() - start
    mean = float(np.mean(play(vector.make(env, EPISODES), act, EPISODES, 1)[0]))
    return {"env": env, "kind": kind, "seed": seed, "return": mean, "solved": mean >= limit, "seconds": round(seconds, 1)}


def rows() -> list[dict[str, Any]]:
    """What was measured so far, under these settings."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    return [row for row in found if row.pop("settings") == SETTINGS]


def report() -> None:
    """Of each task and kind the share solved with its 95 % interval, and what each lies above psigrad."""
    from psigrad.intervals import wilson

    for env in TASKS:
        of = {kind: [row for row in rows() if row["env"] == env and row["kind"] == kind] for kind in KINDS}
        share = {kind: (sum(r["solved"] for r in found) / len(found) if found else math.nan) for kind, found in of.items()}
        bounds = {kind: wilson(sum(r["solved"] for r in found), len(found)) for kind, found in of.items() if found}
        for kind, found in of.items():
            if found:
                low, high = bounds[kind]
                mean = np.mean([row["return"] for row in found])
                apart = ""
                if kind != "psigrad" and "psigrad" in bounds:  # Newcombe's interval of a difference, from Wilson's of both
                    lead, (own_low, own_high) = share[kind] - share["psigrad"], bounds["psigrad"]
                    below = math.hypot(share[kind] - low, own_high - share["psigrad"])
                    above = math.hypot(high - share[kind], share["psigrad"] - own_low)
                    apart = f"   above psigrad {lead:+.1%} ({lead - below:+.1%} to {lead + above:+.1%})"
                print(f"{env:12} {kind:12} {len(found):4} runs  solved {share[kind]:6.1%} ({low:.1%} to {high:.1%})  "
                      f"mean return {mean:7.1f}{apart}")  # fmt: skip


def main() -> int:
    """Measure what is missing, seed by seed, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * asked.minutes
    known = {(row["env"], row["kind"], row["seed"]) for row in rows()}
    turns = (asked.kinds,) if asked.kinds else (KINDS[:2], KINDS[2:])
    wanted = [(env, kind, seed) for kinds in turns for seed in range(asked.seeds) for env in asked.tasks for kind in kinds]
    for env, kind, seed in wanted if not asked.report else ():
        if time.monotonic() > end:
            break
        if (env, kind, seed) not in known:
            row = measure(kind, env, seed)
            with RESULTS.open("a") as stream:
                stream.write(json.dumps({**row, "settings": SETTINGS}) + "\n")
    report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
