"""Rewards by a language model as a judge, and by a program that verifies instructions. `rewards/builtin.py` has their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psigrad_extras.judges.group_ranking import GroupRanking
from psigrad_extras.judges.instructions import IFEval
from psigrad_extras.judges.rubric import Rubric

NAMES: dict[str, Callable[..., Any]] = {"rubric": Rubric(), "ranking": GroupRanking(), "ifeval": IFEval()}
