"""Settings of commands beside the core are declared as the core's are."""

from __future__ import annotations

import itertools

import fields_said
import pytest

from psigrad.config.fields import settings_of
from psigrad.config.load import load
from psigrad.errors import UserError
from psigrad_extras.experiments import EXPERIMENTS
from psigrad_extras.grid import GridSettings
from psigrad_extras.preflight.settings import PlanConfig

CLASSES = (PlanConfig, GridSettings, *(one.settings for one in EXPERIMENTS.values()))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_has_its_flag_and_its_help(cls):
    fields_said.check(cls)


NUMBERS = [(cls, name) for cls in CLASSES for name, setting in settings_of(cls).items() if "float" in str(setting.type)]


def test_no_number_is_nan_or_infinite():
    assert len(NUMBERS) > 20
    for (cls, name), text in itertools.product(NUMBERS, (".nan", ".inf", "-.inf")):
        with pytest.raises(UserError, match=f"{name} is .*expected"):
            load(cls, overrides=[f"{name}={text}"])
