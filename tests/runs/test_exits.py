"""Status 0 means that a model is there: no callback and no environment ends an unfinished run with it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys

import gymnasium as gym
import pytest

from psigrad import cli
from psigrad.control import builder, run
from psigrad.errors import UserError
from psigrad.runs.session import no_way_out


class Leaving(gym.Env):
    """Calls `way` in its third step, or while it is made."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, way, at_once=False):
        self.way, self.steps = way, 0
        if at_once:
            way()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            self.way()
        return self.observation_space.sample(), 0.0, False, self.steps % 8 == 0, {}


def settings(env, output, **given):
    small = {"n_steps": 16, "n_envs": 1, "total_timesteps": 32, "batch_size": 16, "eval_episodes": 0}
    return builder.settings("ppo", env, {**small, "report": False, "progress": False, "output_dir": str(output), **given})


def last_event(folder):
    return json.loads((folder / "events.jsonl").read_text().splitlines()[-1])


def status_of(work):
    """The exit status of a forked process that does the work and then ends as `psigrad` would."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work()
        except UserError:
            os._exit(2)
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


WAYS = {
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(status=0)": lambda: os._exit(status=0),
    "os.execv": lambda: os.execv("/bin/true", ["true"]),
    "os.execvp": lambda: os.execvp("true", ["true"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at_once", [False, True], ids=["step", "made"])
def test_an_environment_that_ends_the_process_does_not_end_it_well(way, at_once, tmp_path):
    assert status_of(lambda: run.run(settings(lambda: Leaving(WAYS[way], at_once), tmp_path / "run"))) == 1
    if not at_once:
        last = last_event(tmp_path / "run")
        assert last["kind"] == "failed" and "before the run was finished" in last["reason"]


@pytest.mark.parametrize("code", [0, None, "as text"])
@pytest.mark.parametrize("at_once", [False, True], ids=["step", "made"])
def test_sys_exit_in_an_environment_is_a_mistake_in_a_sentence(code, at_once, tmp_path):
    with pytest.raises(UserError, match=r"sys\.exit\(.*\) was called before the run was finished"):
        run.run(settings(lambda: Leaving(lambda: sys.exit(code), at_once), tmp_path / "run"))
    if not at_once:
        assert last_event(tmp_path / "run")["kind"] == "failed"


class Ends:
    def __init__(self, event, way):
        setattr(self, event, lambda *given, **also: way())


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_train_end"])
def test_a_callback_that_ends_the_process_does_not_end_it_well(event, tmp_path):
    config = settings(lambda: Leaving(lambda: None), tmp_path / "run", callbacks=(Ends(event, lambda: os._exit(0)),))
    assert status_of(lambda: run.run(config)) == 1
    config = settings(lambda: Leaving(lambda: None), tmp_path / "run", callbacks=(Ends(event, lambda: sys.exit(0)),))
    with pytest.raises(UserError):
        run.run(config)


@pytest.mark.parametrize(
    "words",
    [
        "grpo {model} --reward {leaves}:f",
        "grpo {model} --reward numeric --algorithm {leaves}:f",
        "grpo {model} --reward numeric --metric {leaves}:f",
        "grpo {model} --environment {leaves}:f",
        "grpo {model} --reward numeric --tools {leaves}:f",
        "sft {model} --callbacks {leaves}:f",
        "eval {model} --reward {leaves}:f",
        "score --dataset {rows} --reward {leaves}:f",
        "control ppo --env {leaves}:f",
    ],
)
def test_a_module_that_ends_the_process_where_it_is_imported_does_not_end_it_well(words, job, tmp_path):
    """Whatever a command is given by name: it is imported once here, before a run has a folder."""
    leaves = tmp_path / "leaves.py"
    leaves.write_text("import os\nos._exit(0)\n\ndef f(*given, **also): return 0.0\n")
    model = f"--model {job / 'base'} --dataset {job / 'train.jsonl'}"
    model += "" if words.startswith("eval") else f" --output-dir {tmp_path / 'run'}"
    given = words.format(model=model, leaves=leaves, rows=job / "train.jsonl").split()
    assert status_of(lambda: cli.main(given)) == 1


def at_exit(work):
    """The exit status of a Python that does the work, whose exit handlers are then called, one of which is `os._exit(0)`."""

    def ends():
        atexit._clear()
        atexit.register(lambda: os._exit(0))
        with contextlib.suppress(UserError):
            work()
        atexit._run_exitfuncs()
        os._exit(7)

    return status_of(ends)


def test_an_exit_handler_of_a_simulator_does_not_end_a_failed_run_well(tmp_path):
    failing = settings(lambda: Leaving(lambda: 1 / 0), tmp_path / "run")
    assert at_exit(lambda: run.run(failing)) == 1
    assert at_exit(lambda: run.run(settings(lambda: Leaving(lambda: None), tmp_path / "other"))) == 0


def test_a_reader_of_the_output_who_leaves_ends_no_run(tmp_path, monkeypatch):
    """As `| head` does: progress is printed, and the pipe is broken."""
    shut, pipe = os.pipe()
    os.close(shut)
    with os.fdopen(pipe, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(BrokenPipeError):
            print("nobody hears this", flush=True)
        run.run(settings(lambda: Leaving(lambda: None), tmp_path / "run", progress=True))
        assert sys.stdout is stream
    assert last_event(tmp_path / "run")["kind"] == "finished" and (tmp_path / "run" / "model").is_dir()


def test_a_fork_ends_as_it_likes_and_all_is_as_before_behind_the_block():
    before = os._exit, os.execv, os.execve
    with no_way_out():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert (os._exit, os.execv, os.execve) == before


def test_negative_control_an_environment_that_plays_leaves_a_model(tmp_path):
    assert status_of(lambda: run.run(settings(lambda: Leaving(lambda: None), tmp_path / "run"))) == 0
    assert (tmp_path / "run" / "model").is_dir()
