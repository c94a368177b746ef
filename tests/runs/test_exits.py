"""Status 0 means that a model is there: no callback and no environment ends an unfinished run with it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time

import gymnasium as gym
import psutil
import pytest
from cases import slow
from warm import warm

from psigrad.__main__ import start
from psigrad.control import builder, run
from psigrad.errors import UserError


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


# Code of the user in a command -> the exit status of the process.
WAYS = {
    "os._exit(0)": 1,
    "from os import _exit; _exit(0)": 1,
    "posix._exit(0)": 1,
    "posix.execv('/bin/true', ['true'])": 1,
    "os.execvp('true', ['true'])": 1,
    "raise SystemExit(0)": 1,
    "raise type('Other', (SystemExit,), {})(0)": 1,
    "signal.signal(signal.SIGALRM, lambda *_: sys.exit(0)); signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(30)": 1,
    "signal.signal(signal.SIGALRM, lambda *_: posix._exit(0)); signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(30)": 1,
    "threading.Timer(0.1, posix._exit, (0,)).start(); time.sleep(30)": 1,
    "atexit.register(posix._exit, 0); raise ValueError": 1,
    "atexit.register(posix._exit, 0); return 2": 2,
    "weakref.finalize(work, posix._exit, 0); raise ValueError": 1,
    "threading._register_atexit(posix._exit, 0); raise ValueError": 1,
    "os.fork() or posix._exit(0); posix.execv('/bin/true', ['true'])": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "signal.raise_signal(signal.SIGSEGV)": -signal.SIGSEGV,
    "return 3": 3,
    "os.fork() or posix._exit(0); return 0": 0,
    "atexit.register(posix._exit, 0); return 0": 0,
}
SUPERVISED = """
import atexit, os, posix, signal, sys, threading, time, weakref
from psigrad.runs.survival import StopSignal, supervise

def stops():
    with StopSignal() as stop:
        print("at work", os.getpid(), flush=True)
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(0.5)
        return 128 + stop.number

def work():
    {way}

sys.exit(supervise(work))
"""


@pytest.mark.parametrize("way", WAYS)
def test_status_0_means_that_the_command_returned_it(way):
    done = subprocess.run([sys.executable, "-c", SUPERVISED.format(way=way)], capture_output=True, timeout=60, check=False)
    assert done.returncode == WAYS[way]
    assert (b"The command did not finish" in done.stderr) == (done.returncode == 1)


@pytest.fixture
def stops():
    """A supervised command with a terminal of its own, which stops when it is asked: (process, its child, the terminal)."""
    terminal, inner = os.openpty()

    def lead():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-c", SUPERVISED.format(way="return stops()")]
    with subprocess.Popen(command, stdin=inner, stdout=subprocess.PIPE, preexec_fn=lead) as process:
        os.close(inner)
        yield process, int(process.stdout.readline().split()[-1]), terminal
        process.kill()
    os.close(terminal)


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (lambda process, child, terminal: process.send_signal(signal.SIGTERM), signal.SIGTERM),
        (lambda process, child, terminal: process.send_signal(signal.SIGINT), signal.SIGINT),
        (lambda process, child, terminal: os.kill(child, signal.SIGTERM), signal.SIGTERM),
        (lambda process, child, terminal: os.killpg(process.pid, signal.SIGTERM), signal.SIGTERM),
        (lambda process, child, terminal: os.write(terminal, b"\x03"), signal.SIGINT),
    ],
    ids=["SIGTERM", "SIGINT", "SIGTERM to the child", "SIGTERM to the group", "Ctrl-C"],
)
def test_a_signal_reaches_the_run_once_however_it_is_sent(send, number, stops):
    send(*stops)
    assert stops[0].wait(60) == 128 + number


def test_a_second_ctrl_c_interrupts_at_once(stops):
    process, _, terminal = stops
    os.write(terminal, b"\x03")
    time.sleep(0.4)
    os.write(terminal, b"\x03")
    assert process.wait(60) == -signal.SIGINT, "Python ends so by a KeyboardInterrupt"


def test_a_run_ends_with_its_parent(stops):
    process, child, _ = stops
    process.kill()
    process.wait()
    end = time.monotonic() + 5.0
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


POSIX = ("posix._exit(0)", "posix.execv('/bin/true', ['true'])", "atexit.register(posix._exit, 0); 1 / 0")


@pytest.mark.parametrize("way", [*POSIX, ""])
def test_a_callback_that_leaves_the_command_line_does_not_end_it_well(way, tmp_path):
    callback = "import atexit, posix\n\nclass Leaves:\n    def on_step_end(self, *given, **more):\n        {way}\n"
    (tmp_path / "leaves.py").write_text(callback.format(way=way or "pass"))
    small = "--n-steps 16 --n-envs 1 --total-timesteps 32 --batch-size 16 --eval-episodes 0 --no-report --env CartPole-v1"
    words = ["control", "ppo", *small.split(), "--callbacks", "leaves.py:Leaves", "--output-dir", "run"]
    with warm():
        done = subprocess.run([sys.executable, "-m", "psigrad", *words], cwd=tmp_path, capture_output=True, timeout=300)
    assert (done.returncode == 0) == (way == "") == (tmp_path / "run" / "model").is_dir(), done.stderr


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
def test_sys_exit_in_a_callback_is_a_mistake_in_a_sentence(event, tmp_path):
    config = settings(lambda: Leaving(lambda: None), tmp_path / "run", callbacks=(Ends(event, lambda: sys.exit(0)),))
    with pytest.raises(UserError):
        run.run(config)


@pytest.mark.parametrize(
    "words",
    [
        *("grpo {model} --reward {leaves}:f", "sft {model} --callbacks {leaves}:f", "control ppo --env {leaves}:f"),
        *slow(
            "grpo {model} --reward numeric --algorithm {leaves}:f",
            "grpo {model} --reward numeric --metric {leaves}:f",
            "grpo {model} --environment {leaves}:f",
            "grpo {model} --reward numeric --tools {leaves}:f",
            "eval {model} --reward {leaves}:f",
            "score --dataset {rows} --reward {leaves}:f",
        ),
    ],
)
def test_a_module_that_ends_the_process_where_it_is_imported_does_not_end_it_well(words, job, tmp_path, monkeypatch):
    """Whatever a command is given by name: it is imported once here, before a run has a folder."""
    leaves = tmp_path / "leaves.py"
    leaves.write_text("import os\nos._exit(0)\n\ndef f(*given, **also): return 0.0\n")
    model = f"--model {job / 'base'} --dataset {job / 'train.jsonl'}"
    model += "" if words.startswith("eval") else f" --output-dir {tmp_path / 'run'}"
    given = words.format(model=model, leaves=leaves, rows=job / "train.jsonl").split()
    monkeypatch.setattr(sys, "argv", ["psigrad", *given])
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever tests before have started
    assert status_of(lambda: os._exit(start())) == 1


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


def test_negative_control_an_environment_that_plays_leaves_a_model(tmp_path):
    assert status_of(lambda: run.run(settings(lambda: Leaving(lambda: None), tmp_path / "run"))) == 0
    assert (tmp_path / "run" / "model").is_dir()
