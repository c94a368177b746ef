"""What is known of a setting stands on its field, once."""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path

import fields_said
import pytest

import psigrad
from psigrad.config import EvalConfig, Hub, LmEvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, SFTConfig
from psigrad.config.fields import LENGTH, LIVE, RECORDED, Mark, defaults_of, find_marked, settings_of
from psigrad.config.load import load, to_dict
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError

TRAINED = (OnlineConfig, SFTConfig, PreferenceConfig, RewardConfig, ControlConfig)
CLASSES = (*TRAINED, EvalConfig, SampleConfig, LmEvalConfig)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_says_at_most_one_thing_of_resuming(cls):
    fields_said.check(cls)


def test_a_setting_behaves_alike_in_every_class():
    meant = {}
    for cls in TRAINED:
        for name, setting in settings_of(cls).items():
            marks = setting.marks & {*fields_said.ON_RESUME, LIVE}
            assert meant.setdefault(name, marks) == marks, name


def tables(source: str, names: set[str]) -> list[list[str]]:
    """The collections of a source that name two settings or more: facts about settings that stand away from their fields."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            if len(here := [word for word in words if word in names]) > 1:
                found.append(here)
    return found


def test_no_fact_about_settings_stands_away_from_their_fields():
    names = {name for cls in TRAINED for name in settings_of(cls) if "." in name}
    package = Path(psigrad.__file__).parent
    elsewhere = {
        str(path.relative_to(package)): found
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "compat"  # its tables say what others call a setting
        and (found := tables(path.read_text(), names))
    }
    assert not elsewhere


def test_negative_control_a_second_table_is_noticed():
    names = {"run.save_steps", "run.resume", "optim.learning_rate"}
    assert tables('MAY_CHANGE = frozenset((*("run.save_steps", "run.resume"), "x"))', names) == [["run.save_steps", "run.resume"]]
    assert not tables('x = ("run.save_steps", "elsewhere")', names)


def test_marks_are_read_from_sections_and_bases():
    assert {"run.save_steps", "reward_timeout", "placement.cluster"} <= set(find_marked(OnlineConfig, RECORDED))
    assert {"run.max_steps", "run.num_train_epochs", "total_timesteps"} == set(find_marked(ControlConfig, LENGTH))
    assert find_marked(Hub, Mark.MAIN) == []


@pytest.mark.parametrize("cls", CLASSES[:-1], ids=lambda cls: cls.__name__)
def test_no_number_is_nan_or_infinite(cls):
    numbers = [name for name, setting in settings_of(cls).items() if setting.type is float]
    assert len(numbers) >= 2 and load(cls, overrides=[f"{name}=0.25" for name in numbers])
    for name, text in itertools.product(numbers, (".nan", ".inf", "-.inf")):
        with pytest.raises(UserError, match=name):
            load(cls, overrides=[f"{name}={text}"])


@pytest.mark.parametrize("cls", TRAINED, ids=lambda cls: cls.__name__)
def test_defaults_are_as_a_run_records_them(cls):
    assert defaults_of(cls) == json.loads(json.dumps(to_dict(cls())))


def test_sections_keep_the_defaults_that_a_class_gives_them():
    rate = {cls.__name__: settings_of(cls)["optim.learning_rate"].default for cls in (SFTConfig, OnlineConfig)}
    assert rate == {"SFTConfig": 2e-5, "OnlineConfig": 1e-6}
