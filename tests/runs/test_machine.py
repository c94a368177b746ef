"""What psigrad sets for the whole process is put back when it is done."""

from __future__ import annotations

import pytest
import torch
from tiny_jobs import online_config
from transformers.utils import logging

from psigrad import control
from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models.towers import write
from psigrad.language.recipes import online
from psigrad.runs import machine


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def asked(monkeypatch):
    """How much memory malloc was told to keep, in order."""
    asked = []
    monkeypatch.setattr(machine, "keep_freed_memory", lambda up_to=machine._ALL: asked.append(up_to))
    return asked


def test_threads_and_freed_memory_are_put_back_after_an_error_too(two_threads, asked):
    with pytest.raises(ZeroDivisionError), machine.prepared_torch(Run(threads=1)):
        assert torch.get_num_threads() == 1 and asked == [machine._ALL]
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2 and asked == [machine._ALL, machine._USUAL]


def test_an_agent_has_one_thread_while_it_learns_and_no_longer(two_threads):
    agent, seen = control.PPO("CartPole-v1", n_steps=8, n_envs=2), []
    assert torch.get_num_threads() == 2
    agent.learn(32, callback=lambda agent, figures: seen.append(torch.get_num_threads()))
    assert set(seen) == {1} and torch.get_num_threads() == 2


def test_a_run_leaves_the_threads_as_they_were(two_threads, job, tmp_path, asked):
    online.run(online_config(job, tmp_path / "run", max_steps=1, save_steps=0))
    assert torch.get_num_threads() == 2 and asked[-1] == machine._USUAL


def test_a_model_is_saved_and_loaded_without_bars_that_are_shown_again_behind_it(job, tmp_path, capsys):
    was = logging.is_progress_bar_enabled()
    try:
        for shown in (True, False):
            (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
            model = load_model(Model(path=str(job / "base")), Run(), None)
            write(model.network, model.tokenizer, tmp_path / str(shown))
            assert logging.is_progress_bar_enabled() is shown and capsys.readouterr().err == ""
    finally:
        (logging.enable_progress_bar if was else logging.disable_progress_bar)()


def test_a_device_that_is_none_is_refused_in_one_sentence(monkeypatch):
    with pytest.raises(UserError, match=r"device is 'nope'; expected auto, cpu, cuda, or one device such as cuda:1\."):
        machine.prepare_torch(Run(device="nope"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    machine.prepare_torch(Run(device="cuda:1"))
    with pytest.raises(UserError, match="'cuda:2', but there are 2 CUDA devices, numbered from cuda:0"):
        machine.prepare_torch(Run(device="cuda:2"))


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "4,2"}, 8),
        ({"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "2"}, 4),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, 4),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
    ],
)
def test_threads_are_the_environments_or_a_share_of_the_cores(monkeypatch, environment, threads):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert machine.default_threads() == threads
