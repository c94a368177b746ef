"""Settings of commands beside the core are declared as the core's are."""

from __future__ import annotations

import fields_said
import pytest

from psigrad_extras.experiments import EXPERIMENTS
from psigrad_extras.grid import GridSettings
from psigrad_extras.preflight.settings import PlanConfig

CLASSES = (PlanConfig, GridSettings, *(one.settings for one in EXPERIMENTS.values()))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_has_its_flag_and_its_help(cls):
    fields_said.check(cls)
