"""One declaration per method, and the same settings by every entrance."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cases import repeat_for

import psigrad
from psigrad import cli
from psigrad.cli import flags
from psigrad.compat.foreign_names import load
from psigrad.config import OnlineConfig, PreferenceConfig, algorithms
from psigrad.config.methods import declaration, list_declarations, of_spec
from psigrad.control.methods import presets
from psigrad.errors import UserError
from psigrad.language.recipes import dispatch, online, online_settings
from psigrad.objective import PolicyGradient, catalog
from psigrad.objective.parts.critic import bonus
from psigrad.objective.preferences import preference_catalog

OBJECTS = {**catalog.METHODS, **preference_catalog.ONLINE_METHODS, **preference_catalog.METHODS}
ONLINE = [name for name, method in list_declarations().items() if method.online]


def test_every_method_that_is_declared_can_be_chosen():
    assert list(list_declarations()) == ["sft", *OBJECTS, "reward"]
    for name, method in OBJECTS.items():
        found = list_declarations()[name]
        setting = "algorithm" if found.online else "loss"
        assert found.summary == method.summary and found.defaults == {setting: name, **method.defaults}
        assert method.name == method.algorithm.name == name
        assert found.settings is (PreferenceConfig if name in preference_catalog.METHODS else OnlineConfig)
    assert OBJECTS["ppo"].defaults == {"num_iterations": 4, "num_generations": 1}


def test_every_method_is_a_command_with_its_summary():
    assert {name: cli.COMMANDS[name].purpose for name in list_declarations()} == {
        n: m.summary for n, m in list_declarations().items()
    }
    assert max(len(line) for line in cli.help_text(every=True).splitlines()) <= 120


def test_help_lists_what_people_use_and_all_lists_the_rest(capsys):
    lines = {}
    for arguments in ([], ["--help"], ["--all"], ["--help", "--all"]):
        assert cli.main(arguments) == 0
        lines[*arguments] = capsys.readouterr().out.splitlines()
    named = {key: [line.split()[0] for line in found if line.startswith("  ")] for key, found in lines.items()}
    assert named[()] == named["--help",] and len(named[()]) == 20 and set(named[()]) < set(cli.COMMANDS)
    assert named["--all",] == named["--help", "--all"] == list(cli.COMMANDS)
    assert lines[()][-1] == f"psigrad --all lists all {len(cli.COMMANDS)} commands and methods."


def as_trained(monkeypatch: pytest.MonkeyPatch, method: Any, **settings: Any) -> OnlineConfig:
    """The settings that `psigrad.train` comes to."""
    seen: list[OnlineConfig] = []
    monkeypatch.setattr(online, "run", lambda config, given: seen.append(config))
    psigrad.train(method, model="m", dataset=[{"prompt": "a"}], reward="exact", **settings)
    return seen[0]


def as_typed(name: str, *arguments: str) -> OnlineConfig:
    method = declaration(name)
    return flags.parse(method.settings, name, ["--model", "m", "--reward", "exact", *arguments], defaults=method.defaults)


@repeat_for("name", ONLINE)
def test_a_method_has_the_same_settings_by_every_entrance(name, monkeypatch):
    typed = as_typed(name)
    trained = as_trained(monkeypatch, name)
    assert dataclasses.replace(trained, data=typed.data) == typed
    algorithm = online_settings.method(typed)
    taught = isinstance(algorithm, PolicyGradient) and not algorithm.needs_reward
    # what a method brings is never refused
    online_settings.check(
        dataclasses.replace(typed, reference="t" if taught else ""), algorithm
    )  # what a method brings is never refused


def test_what_the_user_sets_wins_over_what_the_method_brings(monkeypatch):
    assert (as_trained(monkeypatch, "ppo").num_iterations, as_typed("ppo").num_generations) == (4, 1)
    mine = as_trained(monkeypatch, "ppo", num_iterations=2, num_generations=3)
    assert (mine.num_iterations, mine.num_generations) == (2, 3)
    assert as_typed("ppo", "--num-iterations", "2").num_iterations == 2
    assert as_typed("grpo").num_iterations == OnlineConfig().num_iterations == 1


def test_a_variant_of_a_method_brings_what_the_method_brings(monkeypatch):
    variants = [{"preset": "ppo", "kl": None}, dataclasses.replace(catalog.PPO, kl=None)]
    for variant in variants:
        found = as_trained(monkeypatch, variant)
        assert (found.num_iterations, found.num_generations, found.algorithm) == (4, 1, variant)
    own = as_trained(monkeypatch, dataclasses.replace(catalog.PPO, name="mine"))
    assert (own.num_iterations, own.num_generations) == (1, 8)
    assert of_spec(preference_catalog.DPO).settings is PreferenceConfig
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        of_spec("grop")
    with pytest.raises(UserError, match=r"psigrad\.control\.PPO"):
        of_spec("control")


def test_the_class_of_the_settings_says_which_recipe_runs(monkeypatch):
    from psigrad.language.recipes import preference, reward, sft

    ran = []
    for recipe in (sft, online, preference, reward):
        monkeypatch.setattr(recipe, "run", lambda config, given, name=recipe.__name__: ran.append(name))
    for name in ("sft", "grpo", "dpo", "reward"):
        dispatch.run(load(declaration(name).settings, flags={"model.path": "m"}))
    assert ran == [
        "psigrad.language.recipes.sft",
        "psigrad.language.recipes.online",
        "psigrad.language.recipes.preference",
        "psigrad.language.recipes.reward",
    ]


@pytest.mark.parametrize("written", ["mine.py:ADVANTAGE", "mine:ADVANTAGE"])
def test_a_part_of_the_users_own_is_found_in_the_current_folder(written, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from psigrad.objective.parts.advantage import ones as ADVANTAGE\n")
    monkeypatch.chdir(tmp_path)
    assert algorithms.resolve({"preset": "raft", "psi": written}).psi is catalog.ones


def test_the_numbers_of_a_method_given_as_an_object_are_checked():
    made = preference_catalog.ONLINE_METHODS["online_dpo"].algorithm
    assert algorithms.resolve_online(made) is made, "negative control"
    for field, value in (("margin", float("nan")), ("margin", float("inf"))):
        wrong = dataclasses.replace(made, loss=dataclasses.replace(made.loss, **{field: value}))
        with pytest.raises(UserError, match=f"{field}={value}; expected a finite number"):
            algorithms.resolve_online(wrong)
    for resolve in (algorithms.resolve, presets.resolve):
        with pytest.raises(UserError, match="coefficient=nan; expected a finite number"):
            resolve(dataclasses.replace(catalog.PPO, entropy=bonus(float("nan"))))


def test_explain_shows_a_variant_and_its_difference(capsys):
    assert cli.main(["explain", "grpo", "algorithm.kl=null"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("grpo (changed) minimises") and "KL to the reference: none" in out
    assert "What differs from grpo:" in out and "KL to the reference differs" in out and "surrogate L differs" not in out


def test_explain_changes_belong_to_the_name_before_them(capsys):
    assert cli.main(["explain", "grpo", "algorithm.kl=null", "dr_grpo", "algorithm.surrogate.high=0.3"]) == 0
    out = capsys.readouterr().out
    assert "clip(low=0.2, high=0.3)" in out and "KL to the reference differs" not in out
    assert cli.main(["explain", "dpo", "loss.beta=0.3"]) == 0
    assert "beta differs" in capsys.readouterr().out
    assert cli.main(["explain", "dpo", "ipo"]) == 0
    assert "link differs" in capsys.readouterr().out
    assert cli.main(["explain", "dpo", "grpo"]) == 0
    assert "no parts in common" in capsys.readouterr().out
    assert cli.main(["explain", "grpo", "algorithm.kll=null"]) == 2
    assert "did you mean 'kl'" in capsys.readouterr().err
