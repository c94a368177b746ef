"""CartPole-v1 with psigrad and with Stable-Baselines3: steps per second, and seconds until the task is solved.

python benchmarks/control.py [--rounds N] [--only ppo a2c dqn] [--measure speed solve]

First both libraries compute the gradient for the same weights, observations, actions and rewards: psigrad's rollout is put into
SB3's buffer, and SB3's `train` runs. Then the libraries run alternately, each in a separate process with one thread. The medians
and the ratios of neighbouring runs are printed and written to benchmarks/results/control.json. The task is solved at the first
evaluation with a mean return of 475 or more over 100 episodes. Evaluations take place every 2048 steps; their time does not
count. Each library uses the settings that solve the task soonest (SB3: the better of rl-zoo3's and psigrad's).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "control.json"
SECONDS = 4.0
EVERY, ENDLESS = 2048, 10**9
# After this many steps, a run counts as never solved.
GIVEN_UP = 500_000
# rl-zoo3's settings, in SB3's names
ZOO: dict[str, dict[str, Any]] = {
    "ppo": {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0}
    | {"learning_rate": 1e-3, "clip_range": 0.2},
    "a2c": {"n_steps": 5, "learning_rate": 7e-4, "ent_coef": 0.0},
    "dqn": {"learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99}
    | {"target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "net_arch": [256, 256]}
    # 8,000 steps of exploration, as in rl-zoo3's 50,000
    | {"exploration_fraction": 0.08, "exploration_final_eps": 0.04, "total_timesteps": 100_000},
}
# The fastest settings that were found to solve the task. Both libraries are measured with them.
BEST: dict[str, dict[str, Any]] = {
    "ppo": {**ZOO["ppo"], "n_envs": 64, "n_epochs": 4, "batch_size": 512, "learning_rate": 3e-3},
    "a2c": {**ZOO["a2c"], "n_envs": 64, "n_steps": 8, "learning_rate": 3e-3},
}
# Many copies of the environment, with which both libraries take the most steps per second.
MANY: dict[str, dict[str, Any]] = {
    "ppo": {**ZOO["ppo"], "n_envs": 1024, "n_steps": 8, "n_epochs": 4, "batch_size": 2048},
    "a2c": {**ZOO["a2c"], "n_envs": 1024, "n_steps": 8},
}
# The settings that solve the task soonest with psigrad. SB3 has no Double DQN.
SOONEST: dict[str, dict[str, Any]] = {
    **BEST,
    "dqn": ZOO["dqn"]
    | {"double_q": True, "n_envs": 8, "train_freq": 64, "gradient_steps": 32, "buffer_size": 10_000}
    | {"net_arch": [128, 128], "exploration_fraction": 0.02, "learning_starts": 500},
}


def ours(algorithm: str, given: dict[str, Any], seed: int) -> Any:
    """Return psigrad's method with these settings."""
    from psigrad.control import builder

    values = {"n_envs": 1 if algorithm == "dqn" else 8, "total_timesteps": ENDLESS, **given, "tuned": False}
    if values.get("batch_size") == values["n_envs"] * values.get("n_steps", 0):
        values["batch_size"] = 0  # the whole rollout
    if algorithm == "a2c":
        values |= {"optimizer": "rmsprop"}
    if algorithm == "dqn":
        values |= {"activation": "relu", "max_grad_norm": 10.0}
    from psigrad.runs.machine import prepare_torch

    made = builder.settings(algorithm, "CartPole-v1", {**values, "seed": seed, "threads": 1})
    prepare_torch(made.run)  # as `psigrad control` does
    method = builder.build(made)
    method.restart()
    return method


def theirs(algorithm: str, given: dict[str, Any], seed: int) -> Any:
    """Return SB3's model with these settings, without Double DQN, which SB3 does not have."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    values = {name: value for name, value in given.items() if name not in ("double_q", "total_timesteps")}
    count = values.pop("n_envs", 1 if algorithm == "dqn" else 8)
    if algorithm == "dqn":
        values["policy_kwargs"] = {"net_arch": values.pop("net_arch")}
        values["train_freq"] //= count  # SB3 counts a step of all environments as one
    kind = getattr(stable_baselines3, algorithm.upper())
    return kind("MlpPolicy", make_vec_env("CartPole-v1", count), device="cpu", seed=seed, **values)


Watch = Callable[[int, Callable[[Any], Any]], bool]


def train(library: str, algorithm: str, given: dict[str, Any], seed: int, watch: Watch) -> None:
    """Train until all steps are done or `watch(steps, act)` returns False. `watch` is called before the first step and every 2048
    steps. `act` returns the most likely actions.
    """
    total = given.get("total_timesteps", ENDLESS)
    model = (ours if library == "psigrad" else theirs)(algorithm, given, seed)
    if library == "psigrad":
        asked = 0
        watch(0, model.network.act)
        while model.timesteps < total:
            model.iterate(False)
            if model.timesteps >= asked + EVERY:
                asked = model.timesteps
                if not watch(asked, model.network.act):
                    return
        return
    from stable_baselines3.common.callbacks import BaseCallback

    class Asking(BaseCallback):  # one call of `learn`, since its schedules run over all steps
        asked = 0

        def _on_training_start(self) -> None:
            watch(0, model.predict)

        def _on_step(self) -> bool:
            if self.num_timesteps < self.asked + EVERY:
                return True
            self.asked = self.num_timesteps
            return watch(self.asked, lambda observation: model.predict(observation, deterministic=True)[0])

    model.learn(total, callback=Asking())


def speed(library: str, algorithm: str, given: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the steps per second after a warm-up. Updates are included."""
    seen: list[tuple[int, float]] = []

    def watch(steps: int, act: Callable[[Any], Any]) -> bool:
        seen.append((steps, time.perf_counter()))
        return len(seen) < 3 or seen[-1][1] - seen[1][1] < SECONDS

    train(library, algorithm, given, seed, watch)
    (first, start), (last, end) = seen[1], seen[-1]  # the steps before are the warm-up
    return {"steps_per_second": (last - first) / (end - start)}


def solve(library: str, algorithm: str, given: dict[str, Any], seed: int) -> dict[str, float]:
    """Return the seconds and steps up to the first evaluation of 475 or more."""
    from psigrad.control.environments import vector
    from psigrad.control.environments.collector import play

    envs, found = vector.make("CartPole-v1", 100), {"seconds": math.inf, "steps": math.inf}
    trained = since = 0.0

    def watch(steps: int, act: Callable[[Any], Any]) -> bool:
        nonlocal trained, since
        solved = False
        if steps:
            trained += time.perf_counter() - since
            solved = bool(np.mean(play(envs, act, 100, 1)[0]) >= 475)
        if solved:
            found.update(seconds=trained, steps=steps)
        since = time.perf_counter()
        return not solved and steps < GIVEN_UP

    train(library, algorithm, given, seed, watch)
    return found


def agree(algorithm: str) -> float:
    """Return the largest difference between the libraries' gradients on the same rollout, relative to the gradient's norm."""
    given = {**ZOO[algorithm], "n_steps": 64, "ent_coef": 0.01, "max_grad_norm": 1e9}
    sb3 = {**given, "n_epochs": 1, "batch_size": 64 * 8} if algorithm == "ppo" else given
    method, rollout, model, places = _pair(algorithm, {**given, "n_epochs": 1, "batch_size": 0}, {**sb3, "learning_rate": 0.0})
    found: list[torch.Tensor] = []
    method.apply_gradient = lambda gradient, rate: found.append(gradient.clone()) or 0.0
    method._learn(rollout, False)
    model.train()
    method.network.flat.data.copy_(found[0])  # gives the parts of the gradient the weights' names
    gradient = method.network.towers.named()
    pairs = [(model.policy.get_parameter(its).grad, gradient[mine]) for mine, its in places.items()]
    norm = torch.stack([(b**2).sum() for _, b in pairs]).sum().sqrt()
    return float(max((a - b).abs().max() for a, b in pairs) / norm)


def agree_on_weights(given: dict[str, Any], **psigrad: Any) -> float:
    """Return the largest difference between the libraries' weights after PPO's passes over the same minibatches, relative to the
    largest change of a weight. `psigrad` are extra settings for psigrad alone.
    """
    method, rollout, model, places = _pair("ppo", {**given, **psigrad}, given)
    before = {name: weight.detach().clone() for name, weight in method.network.towers.named().items()}
    orders = np.random.default_rng(0)
    method.rng = lambda purpose: orders
    method._learn(rollout, False)
    own, orders = np.random.permutation, np.random.default_rng(0)
    np.random.permutation = orders.permutation
    try:
        model.train()
    finally:
        np.random.permutation = own
    after = method.network.towers.named()
    with torch.no_grad():
        furthest = max((after[name] - before[name]).abs().max() for name in places)
        return float(max((model.policy.get_parameter(its) - after[mine]).abs().max() for mine, its in places.items()) / furthest)


def _pair(algorithm: str, given: dict[str, Any], sb3: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, str]]:
    """Return psigrad's method, a rollout of it, SB3's model with the same weights and rollout, and psigrad's name -> SB3's name
    of each weight. Every second episode that ended is marked as truncated.
    """
    from stable_baselines3.common.logger import Logger

    from psigrad.control.environments import vector
    from psigrad.control.environments.collector import Collector

    method = ours(algorithm, given, 0)
    with torch.no_grad():
        method.network.flat.add_(torch.randn(method.network.flat.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    named = method.network.towers.named()
    method.collector = Collector(vector.make("CartPole-v1", 8, "serial"), method.collector.normalizer)
    method.restart()
    rollout = method._collect()
    cut = rollout.terminated & (np.cumsum(rollout.terminated) % 2 == 0)
    assert cut.any() and (rollout.terminated & ~cut).any()
    rollout = replace(rollout, terminated=rollout.terminated & ~cut, truncated=cut)
    model = theirs(algorithm, sb3, 0)
    model.set_logger(Logger(None, []))
    layers = {0: ("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net")}
    layers[1] = ("mlp_extractor.value_net.0", "mlp_extractor.value_net.2", "value_net")
    places = {
        f"{k}.{i}.{part}": f"{name}.{part}" for k in (0, 1) for i, name in enumerate(layers[k]) for part in ("weight", "bias")
    }
    with torch.no_grad():
        for mine, its in places.items():
            model.policy.get_parameter(its).copy_(named[mine])
    _fill(model, rollout)
    return method, rollout, model, places


def _fill(model: Any, rollout: Any) -> None:
    """Fill SB3's buffer with the same steps [64, 8]. As in SB3's `collect_rollouts`, the value after a truncated episode is added
    to the episode's last reward.
    """
    count, steps = 8, 64
    assert len(rollout.row) == count * steps  # rows are ordered by environment, with 64 steps of each
    shape = (count, steps)
    buffer, policy = model.rollout_buffer, model.policy
    with torch.no_grad():
        after = policy.predict_values(torch.from_numpy(rollout.after)).flatten()
    ends = np.cumsum(rollout.lengths) - 1
    reward = rollout.reward.copy()
    reward[ends[rollout.truncated]] += model.gamma * after.numpy()[rollout.truncated]
    obs = rollout.observation.reshape(*shape, -1)
    action, reward = rollout.action.reshape(shape), reward.reshape(shape)
    starts = (rollout.column == 0).reshape(shape)
    buffer.reset()
    for t in range(steps):
        with torch.no_grad():
            value, logp, _ = policy.evaluate_actions(torch.from_numpy(obs[:, t]), torch.from_numpy(action[:, t]))
        buffer.add(obs[:, t], action[:, t, None], reward[:, t], starts[:, t], value.flatten(), logp)
    last_rows = np.cumsum(np.bincount(np.flatnonzero(rollout.column == 0) // steps, minlength=count)) - 1
    buffer.compute_returns_and_advantage(after[last_rows], (rollout.terminated | rollout.truncated)[last_rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["ppo", "a2c", "dqn"])
    parser.add_argument("--measure", nargs="+", choices=["speed", "solve"], default=["speed", "solve"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        task = json.loads(given.one)
        print(json.dumps({"speed": speed, "solve": solve}[task.pop("measure")](**task)))
        return
    for algorithm in given.only:
        if algorithm != "dqn":
            difference = agree(algorithm)
            print(f"{algorithm}: gradients agree to {difference:.1e}")
            assert difference < 1e-5, "the libraries compute different gradients, so ratios would be meaningless"
        for case, settings in (("same settings", ZOO), ("best settings", BEST), ("many copies", MANY)):
            if algorithm in settings and "speed" in given.measure:
                _keep(_speeds(algorithm, case, settings[algorithm], given.rounds))
        if "solve" in given.measure:
            _keep(_solves(algorithm, given.rounds))
    print(f"\nwritten: {RESULTS}")


def _keep(line: dict[str, Any]) -> None:
    """Store a line, in place of the previous line of its case. An interrupted benchmark thus keeps its earlier lines."""
    found = json.loads(RESULTS.read_text())["lines"] if RESULTS.exists() else []
    lines = [old for old in found if (old["algorithm"], old["case"]) != (line["algorithm"], line["case"])]
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
    RESULTS.write_text(json.dumps({"machine": machine, "lines": [*lines, line]}, indent=1) + "\n")


def _speeds(algorithm: str, case: str, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    pairs = [[_run(library, algorithm, settings, i, "speed") for library in ("psigrad", "sb3")] for i in range(rounds)]
    a, b = ([pair[k]["steps_per_second"] for pair in pairs] for k in (0, 1))
    return _line(algorithm, case, "steps/s", a, b, [x / y for x, y in zip(a, b, strict=True)])


def _solves(algorithm: str, rounds: int) -> dict[str, Any]:
    """Return the seconds in which each library solves the task. Of SB3's two settings, those with the lower median count."""
    sides = [("psigrad", SOONEST), ("sb3", ZOO), ("sb3", SOONEST)]
    runs = [[_run(who, algorithm, s[algorithm], i, "solve")["seconds"] for who, s in sides] for i in range(rounds)]
    a, zoo, same = zip(*runs, strict=True)
    for name, seconds in (("rl-zoo3's", zoo), ("psigrad's", same)):
        print(f"SB3 with {name} settings: {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})")
    b, whose = min((statistics.median(found), found, whose) for found, whose in ((zoo, "rl-zoo3's"), (same, "psigrad's")))[1:]
    # seeds are not comparable across libraries, so take the ratio of the medians, with a 95 % bootstrap interval
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(x, (10_000, rounds)), 1) for x in (a, b)]
    low, high = np.percentile(drawn[1] / drawn[0], [2.5, 97.5])
    line = {"algorithm": algorithm, "case": "to 475", "unit": "seconds", "psigrad": statistics.median(a)}
    line |= {"sb3": statistics.median(b), "ratio": statistics.median(b) / statistics.median(a), "low": low, "high": high}
    print(json.dumps(line), flush=True)
    return line | {"rounds": rounds, "sb3_settings": whose, "runs": {"psigrad": a, "rl-zoo3's": zoo, "psigrad's": same}}


def _run(library: str, algorithm: str, given: dict[str, Any], seed: int, measure: str) -> dict[str, float]:
    task = {"library": library, "algorithm": algorithm, "given": given, "seed": seed, "measure": measure}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", json.dumps(task)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _line(algorithm: str, case: str, unit: str, a: list[float], b: list[float], ratios: list[float]) -> dict[str, Any]:
    line = {"algorithm": algorithm, "case": case, "unit": unit, "psigrad": statistics.median(a), "sb3": statistics.median(b)}
    line |= {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "rounds": len(ratios)}
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    main()
