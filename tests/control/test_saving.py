"""Control on the cycle of every run: saves by time, going on within an episode, callbacks, full disks, failed steps."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from resuming import digest
from tiny_jobs import forked
from transformers import EarlyStoppingCallback

import psigrad
from psigrad.control import builder, run
from psigrad.control.environments.collector import ActionLog
from psigrad.control.methods.trainer import Trainer
from psigrad.errors import UserError
from psigrad.records import checkpoint, run_folder
from psigrad.runs.survival import Stopped

# Lines of several iterations, most of which end in the middle of episodes.
METHODS = {
    "ppo": {"n_steps": 16, "n_epochs": 2, "n_envs": 2, "total_timesteps": 480, "batch_size": 16},
    "a2c": {"n_steps": 8, "n_envs": 8, "total_timesteps": 960, "normalize_observations": True, "normalize_rewards": True},
    "reinforce": {"total_timesteps": 600, "n_envs": 2},
    "trpo": {"n_steps": 32, "n_envs": 2, "total_timesteps": 640},
    "dqn": {"n_envs": 1, "learning_starts": 32, "train_freq": 16, "gradient_steps": 2, "total_timesteps": 400}
    | {"target_update_interval": 24},
}
ALWAYS = 1e-9


def config_of(name, output, env="CartPole-v1", **given):
    """A checkpoint behind every line, but for what is given."""
    common = {"eval_episodes": 2, "eval_steps": 3, "report": False, "progress": False, "log_interval": 2}
    made = builder.settings(name, env, {**common, "save_minutes": ALWAYS, "save_total_limit": 99, **METHODS[name], **given})
    return replace(made, run=replace(made.run, output_dir=str(output), seed=3))


def saved_at(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def rows(folder: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in rows(folder, "events") if event["kind"] == kind]


def contents(folder: Path) -> dict[str, bytes]:
    """All that a run computes: rows, the model, and every file of its last checkpoint."""
    newest = checkpoint.latest(folder / "checkpoints").path
    files = {path.name: path.read_bytes() for path in sorted(newest.iterdir()) if path.name != "manifest.json"}
    return {**digest(folder), **files}


# The others, two more that play to a rollout's end, with `make test-slow`.
EACH = [pytest.param(name, marks=pytest.mark.slow if name in ("a2c", "trpo") else ()) for name in METHODS]


@pytest.fixture(scope="module", params=EACH)
def whole(request, tmp_path_factory):
    """A run that nobody disturbed, saved behind every line."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    run.run(config_of(name, folder / "run"))
    return name, folder / "run"


def test_a_run_is_saved_by_time_and_no_bit_depends_on_it(whole, tmp_path):
    name, folder = whole
    assert saved_at(folder) == sorted({row["step"] for row in rows(folder)}), "every line"
    run.run(config_of(name, tmp_path / "run", save_minutes=0.0))
    (last,) = saved_at(tmp_path / "run")
    assert last == saved_at(folder)[-1] and contents(tmp_path / "run") == contents(folder)


def killed_after(count: int):
    """The process dies right behind checkpoint number `count`."""
    original, left = run_folder.RunFolder.event, [count]

    def event(self, kind, **fields):
        original(self, kind, **fields)
        left[0] -= kind == "saved"
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    run_folder.RunFolder.event = event


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_goes_on_from_a_save_by_time_as_if_nothing_had_been(count, whole, tmp_path):
    name, folder = whole

    def doomed():
        killed_after(count)
        run.run(config_of(name, tmp_path / "run"))

    assert os.WTERMSIG(forked(doomed)) == signal.SIGKILL
    assert saved_at(tmp_path / "run") == saved_at(folder)[:count]
    assert forked(lambda: run.run(config_of(name, tmp_path / "run"))) == 0
    assert contents(tmp_path / "run") == contents(folder)
    (replayed,) = events(tmp_path / "run", "replayed")
    assert replayed["steps"] > 0 and not events(tmp_path / "run", "episodes_restarted")


@pytest.mark.parametrize("env", ["Pendulum-v1", "two choices", pytest.param("Taxi-v4", marks=pytest.mark.slow)])
def test_real_and_several_actions_are_replayed_too(env, tmp_path):
    class TwoChoices(gym.Wrapper):
        action_space = gym.spaces.MultiDiscrete([2, 300])

        def step(self, action):
            return self.env.step(int(action.sum()) % 2)

    env = (lambda: TwoChoices(gym.make("CartPole-v1"))) if env == "two choices" else env
    given = {"env": env, "save_minutes": 0.0, "total_timesteps": 640, "n_steps": 32}
    run.run(config_of("ppo", tmp_path / "whole", **given))

    def callback(args, state, control):
        os.kill(os.getpid(), signal.SIGTERM) if state.step == 256 else None

    config = config_of("ppo", tmp_path / "parts", **given)
    stopper = type("Stopper", (psigrad.Callback,), {"on_step_end": lambda self, a, s, c, **more: callback(a, s, c)})()
    with pytest.raises(Stopped) as stopped:
        run.run(replace(config, run=replace(config.run, callbacks=(stopper,))))
    assert stopped.value.exit_status == 143 and saved_at(tmp_path / "parts") == [256]
    run.run(config)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert events(tmp_path / "parts", "replayed")[0]["steps"] == 256


class Unseeded(gym.Wrapper):
    """Every reset is another."""

    count = 0

    def reset(self, *, seed=None, options=None):
        type(self).count += 1
        return self.env.reset(seed=type(self).count)


def test_negative_control_an_environment_that_follows_no_seed_begins_new_episodes_and_that_is_said(tmp_path, capsys):
    config = config_of("ppo", tmp_path / "run", lambda: Unseeded(gym.make("CartPole-v1")), eval_episodes=0)
    with pytest.raises(UserError, match="OSError: enough"):
        run.run(with_callbacks(config, Fails(at=3)))
    run.run(config)
    assert events(tmp_path / "run", "episodes_restarted") and not events(tmp_path / "run", "replayed")
    assert "new episodes start" in capsys.readouterr().err


class Picky(gym.Wrapper):
    """Refuses a move, as a game may whose first position is another one than last time."""

    refuses = False

    def step(self, action):
        if Picky.refuses and action == 1:
            raise ValueError("illegal move")
        return self.env.step(action)


def test_an_environment_that_refuses_a_replayed_action_begins_new_episodes(tmp_path, monkeypatch):
    config = config_of("ppo", tmp_path / "run", lambda: Picky(gym.make("CartPole-v1")), eval_episodes=0)
    with pytest.raises(UserError, match="OSError: enough"):
        run.run(with_callbacks(config, Fails(at=3)))
    path = checkpoint.latest(tmp_path / "run" / "checkpoints").path
    trainer = builder.build(config)
    held = trainer.restore(path)
    monkeypatch.setattr(Picky, "refuses", True)
    with pytest.raises(UserError, match="illegal move"):
        trainer.collector.replay(held["seed"], np.ones((1, 2), np.uint8))
    assert trainer.go_on(path, held) is None and trainer.collector.log.seed != held["seed"]


def test_behind_many_actions_all_episodes_begin_anew_so_that_a_log_stays_small(whole, tmp_path, monkeypatch):
    name, folder = whole
    longest = max(len(log_of(path)) for path in (folder / "checkpoints").iterdir())
    monkeypatch.setattr(ActionLog, "MOST", longest // 2)
    run.run(config_of(name, tmp_path / "whole"))
    if name != "reinforce":  # whose rollouts all begin anew
        assert max(len(log_of(path)) for path in (tmp_path / "whole" / "checkpoints").iterdir()) < longest
        assert contents(tmp_path / "whole") != contents(folder)

    def doomed():
        killed_after(3)
        run.run(config_of(name, tmp_path / "parts"))

    assert os.WTERMSIG(forked(doomed)) == signal.SIGKILL
    assert forked(lambda: run.run(config_of(name, tmp_path / "parts"))) == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert not events(tmp_path / "parts", "episodes_restarted")


def log_of(folder: Path) -> np.ndarray:
    return checkpoint.load_tensors(folder / "episodes.safetensors")["actions"].numpy()


def with_callbacks(config, *given):
    return replace(config, run=replace(config.run, callbacks=given))


class Fails(psigrad.Callback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if len(state.history) > self.at:
            raise OSError("enough")


class Director(psigrad.Callback):
    """Evaluates and saves out of turn, changes the rate, and ends the run."""

    def __init__(self, stop_at=5, rate=None):
        self.stop_at, self.rate, self.told = stop_at, rate, []

    def on_step_end(self, args, state, control, **kwargs):
        line = sum("eval/return/mean" not in row for row in state.history)
        self.told.append((line, state.step, control.should_evaluate, control.should_save))
        control.should_evaluate, control.should_save = line == 1, line == 3
        control.should_training_stop = line == self.stop_at
        if self.rate is not None and line == 2:
            control.change(learning_rate=self.rate)

    def on_save(self, args, state, control, checkpoint=None, **kwargs):
        assert (checkpoint / "state.json").exists()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        assert metrics["eval_headline"] == metrics["eval/return/mean"]

    def state_dict(self):
        return {"told": len(self.told)}

    def load_state_dict(self, held):
        self.told = [()] * held["told"]


def test_a_callback_evaluates_saves_changes_and_ends_the_run(whole, tmp_path):
    name, folder = whole
    director = Director(rate=1e-5)
    config = with_callbacks(config_of(name, tmp_path / "run", eval_steps=2, save_minutes=0.0, save_steps=100), director)
    run.run(config)
    steps = [step for _, step, *_ in director.told]
    assert saved_at(tmp_path / "run") == [steps[2], steps[4]], "what it asked for, and the end"
    assert {row["step"] for row in rows(tmp_path / "run") if "eval/return/mean" in row} == {steps[0], steps[4]}
    assert [due for _, _, due, _ in director.told] == [False, True, False, True, False], "what the settings would have had"
    rates = [row["train/learning_rate"] for row in rows(tmp_path / "run") if "train/learning_rate" in row]
    assert rates[1] > rates[2] > 0 and rates[2] <= 1e-5
    (changed,) = events(tmp_path / "run", "changed")
    assert changed["callback"] == "Director" and changed["changes"]["learning_rate"][1] == 1e-5
    assert contents(tmp_path / "run") != contents(folder)
    run.run(config)
    assert len(director.told) == 5, "it is finished"


def test_what_callbacks_changed_and_remember_survives_a_kill(tmp_path):
    def config(folder):
        return with_callbacks(config_of("ppo", folder), Director(stop_at=99, rate=1e-5))

    def doomed():
        killed_after(2)
        run.run(config(tmp_path / "parts"))

    assert forked(lambda: run.run(config(tmp_path / "whole"))) == 0
    assert os.WTERMSIG(forked(doomed)) == signal.SIGKILL
    assert forked(lambda: run.run(config(tmp_path / "parts"))) == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    held = json.loads(contents(tmp_path / "parts")["state.json"])
    assert held["changes"] == {"learning_rate": 1e-5} and held["callbacks"]["Director"]["told"] > 2


def test_transformers_early_stopping_works_on_the_return(tmp_path):
    stopper = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9)
    run.run(with_callbacks(config_of("ppo", tmp_path / "run", eval_steps=1), stopper))
    assert len(saved_at(tmp_path / "run")) == 2, "the second evaluation is no better by a milliard"


def test_a_setting_that_cannot_change_is_refused_by_name(tmp_path):
    class Wrong(psigrad.Callback):
        def on_step_end(self, args, state, control, **kwargs):
            control.change(n_steps=4)

    with pytest.raises(UserError, match="n_steps cannot be changed during a run; a callback can change"):
        run.run(with_callbacks(config_of("ppo", tmp_path / "run"), Wrong()))


class Crashing(gym.Wrapper):
    """Its simulator goes away at one step; None: never."""

    left: int | None = None

    def step(self, action):
        if Crashing.left is not None:
            Crashing.left -= 1
            if not Crashing.left:
                raise ConnectionError("the simulator is gone")
        return self.env.step(action)


@pytest.mark.parametrize("name", EACH)
def test_an_environment_that_fails_loses_nothing_but_the_rollout_at_hand(name, tmp_path):
    given = {"env": lambda: Crashing(gym.make("CartPole-v1")), "save_minutes": 0.0, "eval_episodes": 0}
    Crashing.left = None
    run.run(config_of(name, tmp_path / "whole", **given))
    Crashing.left = 340
    with pytest.raises(UserError, match="the simulator is gone"):
        run.run(config_of(name, tmp_path / "parts", **given))
    Crashing.left = None
    (saved,) = saved_at(tmp_path / "parts")
    lines = [row["step"] for row in rows(tmp_path / "parts")]
    assert saved >= lines[-1] and saved > 150, "in the middle of a line, if the line's first iterations were sound"
    run.run(config_of(name, tmp_path / "parts", **given))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_an_error_after_a_weight_has_moved_saves_nothing(tmp_path, monkeypatch):
    original = Trainer.train_interval

    def train_interval(self):
        original(self)
        self.optimizer.updates += 1
        raise OSError("too late")

    monkeypatch.setattr(Trainer, "train_interval", train_interval)
    with pytest.raises(OSError, match="too late"):
        run.run(config_of("ppo", tmp_path / "run"))
    assert saved_at(tmp_path / "run") == []


def test_a_disk_that_gets_full_stops_the_run_while_a_checkpoint_still_fits(tmp_path, monkeypatch):
    free = iter([1 << 40] * 3 + [1000] * 99)
    monkeypatch.setattr("psigrad.records.run_folder.checkpoint.free_bytes", lambda path: next(free))
    config = config_of("ppo", tmp_path / "run", save_minutes=0.0, save_steps=3)
    with pytest.raises(UserError, match=r"has 1000 bytes free, and a checkpoint takes \d+\. The run is saved at step"):
        run.run(config)
    first = saved_at(tmp_path / "run")
    monkeypatch.undo()
    run.run(config)
    assert first[-1] < saved_at(tmp_path / "run")[-1]


def test_weights_that_are_not_finite_are_never_sealed(tmp_path):
    class Poisons(psigrad.Callback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.flat.data[0] = float("nan")

    with pytest.raises(UserError, match="weights are not finite"):
        run.run(with_callbacks(config_of("ppo", tmp_path / "run"), Poisons()))
    assert saved_at(tmp_path / "run") == []


def test_without_a_terminal_a_line_is_printed_now_and_then(tmp_path, capsys):
    run.run(config_of("ppo", tmp_path / "run", progress=True, logging_steps=3, save_minutes=0.0))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    steps = sorted({row["step"] for row in rows(tmp_path / "run")})
    assert [line.split("/")[0] for line in lines] == [f"steps {step}" for i, step in enumerate(steps, 1)
                                                     if i % 3 == 0 or step == steps[-1]]  # fmt: skip
