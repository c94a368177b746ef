"""The core reads and runs where no package beside it is installed, and says which one what was asked for needs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import repeat_for
from tiny_jobs import online_config, preference_config, run_settings, sft_config

from psigrad import cli, control, extras, language, tabular
from psigrad.errors import UserError
from psigrad.extras import BESIDE
from psigrad.language.recipes import dispatch

PACKAGES = {"psigrad_extras", "psigrad_serve", "psigrad_studio"}


class Missing:
    """A finder that has none of the packages."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@pytest.fixture
def alone(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])


def test_negative_control_the_packages_are_hidden(alone):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("psigrad_extras.commands")


def test_language_models_are_trained_by_every_kind_of_recipe(alone, job, tmp_path):
    makers = {"grpo": online_config, "sft": sft_config, "dpo": preference_config}
    for name, make in makers.items():
        folder = tmp_path / name
        dispatch.run(make(job, folder, **vars(run_settings(folder, max_steps=2, save_steps=0))))
        assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 2, name


def test_the_small_rooms_do_their_work(alone, capsys):
    assert tabular.solve(tabular.shortest_path_4x4()).value.min() == -3  # the corner farthest from both ends
    agent = control.PPO("CartPole-v1", n_steps=16, n_envs=1, batch_size=16, n_epochs=1)
    assert agent.learn(32) is agent


def test_a_command_trains_and_the_help_lists_those_that_need_a_package(alone, job, tmp_path, capsys):
    given = [
        "sft",
        "--model",
        f"{job}/base",
        "--dataset",
        f"{job}/train.jsonl",
        "--max-steps",
        "1",
        "--no-progress",
        "--no-report",
    ]
    assert cli.main([*given, "--output-dir", f"{tmp_path}/run", "--threads", "1"]) == 0
    assert cli.main(["--all"]) == 0
    assert "replay" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plan", "serve", "studio", "replay"])
def test_what_needs_a_package_says_which(alone, name, capsys):
    assert cli.main([name, "x"]) == 2
    said = capsys.readouterr().err
    assert any(package in said for package in PACKAGES) and "pip install ." in said


@repeat_for("name", BESIDE)
def test_every_name_leads_to_a_module(name):
    extras.load(name)


def test_a_package_of_others_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "psigrad_serve.agents.agent_gateway", raising=False)
    monkeypatch.delitem(sys.modules, "psigrad_serve.serving", raising=False)
    monkeypatch.delitem(sys.modules, "psigrad_serve.quiet_server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(
        UserError, match=r"^An agent asks the policy over HTTP and needs uvicorn, .*Run `pip install .*'uvicorn>=.*`\.$"
    ):
        extras.load("agents")


def test_an_extra_lists_its_packages_in_a_checkout_and_where_only_the_wheel_is_installed(monkeypatch):
    assert "'uvicorn>=" in extras.install_command("serve")
    assert [extras.find_extra(name) for name in ("mlflow_skinny", "hypothesis")] == ["mlflow", ""]
    asked = ["uvicorn>=0.40; extra == 'serve'", 'verifiers<0.5,>=0.4; extra == "verifiers"', "torch>=2.11"]
    monkeypatch.setattr(extras, "Path", lambda file: Path("/nowhere/psigrad/extras.py"))
    monkeypatch.setattr(extras.metadata, "requires", lambda name: asked)
    extras.requirements.cache_clear()
    try:
        assert extras.requirements() == {"serve": ["uvicorn>=0.40"], "verifiers": ["verifiers<0.5,>=0.4"], "": ["torch>=2.11"]}
        assert extras.install_command("verifiers") == "pip install 'verifiers<0.5,>=0.4'"
    finally:
        extras.requirements.cache_clear()


@pytest.mark.parametrize(("package", "old", "kept"), [("torch", "2.9.1+cu130", "2.11.0a0"), ("transformers", "5.9.2", "5.100.0")])
def test_a_package_below_its_minimum_is_named_with_the_command_before_anything_of_it_is_imported(package, old, kept, monkeypatch):
    version = extras.metadata.version
    monkeypatch.setattr(extras.metadata, "version", lambda name: kept if name == package else version(name))
    importlib.reload(language)
    monkeypatch.setattr(extras.metadata, "version", lambda name: old if name == package else version(name))
    needed = next(one for one in extras.requirements()[""] if one.startswith(f"{package}>="))
    with pytest.raises(UserError) as caught:
        importlib.reload(language)
    said = f"psigrad needs {needed}, but {package} {old} is installed. Run `pip install --upgrade '{needed}'`."
    assert str(caught.value) == said


def test_a_command_names_the_packages_of_its_own_extra_though_another_has_the_missing_one_too(monkeypatch):
    def serve(arguments):
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    monkeypatch.setattr(extras, "load", lambda name: SimpleNamespace(serve=serve))
    assert extras.find_extra("fastapi") == "studio"
    with pytest.raises(UserError, match=r"This command needs fastapi.*llguidance"):
        extras.command("psigrad_serve", "serve")([])
