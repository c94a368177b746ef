"""What is passed around cannot be changed under its other holders."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from pathlib import Path

from cases import repeat_for

from psigrad.objective.preferences.preference_loss import Labelled, Pairs
from psigrad.tabular.mdp import MDP
from psigrad.tabular.simulation import Episode
from psigrad.tabular.sweeps import Sweep

ROOT = Path(__file__).parents[2] / "psigrad"
PACKAGES = ("psigrad", "psigrad_extras", "psigrad_serve")
# models that are trained or attended by flex, and what one owner keeps the books with
CHANGING = {
    *(
        "Pretrained",
        "LanguageModel",
        "ScalarModel",
        "Subject",
        "Memory",
        "_RuleState",
        "_Place",
        "LiveEpisode",
        "SeatedGame",
        "_Worker",
    ),
    *("_TargetLists", "GuessNumber", "Calculator", "TextGrid", "Weight"),
    *(
        "Callbacks",
        "Control",
        "Conversion",
        "Engine",
        "Ticket",
        "EpisodeHistory",
        "ModelObject",
        "Affinity",
        "DropoutMasks",
        "WeightBucket",
        "Nothing",
        "Readback",
        "ServedModel",
        "TokenStream",  # tokens come to it
        *("TinkerModel", "TinkerServer", "Writer"),  # what is under way for who asks
        *("TokenTree", "Flat", "Session"),  # as do requests of an agent
        *("MethodWatch", "_Recorded"),  # a replay fills them as it goes
        "_TowerCache",  # features of images are kept in it
        "Squares",  # a game as it is played
        "Translation",
        "TrlScript",
    ),
}


def test_dataclasses_are_frozen_but_for_those_that_are_there_to_change():
    found = {}
    for path in [path for name in PACKAGES for path in (ROOT.parent / name).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            made = [ast.unparse(d) for d in getattr(node, "decorator_list", []) if "dataclass" in ast.unparse(d)]
            if isinstance(node, ast.ClassDef) and made:
                found[node.name] = "frozen=True" in made[0]
    assert {name for name, frozen in found.items() if not frozen} == CHANGING
    assert len(found) > 200


ROOMS = [ROOT / room for room in ("objective", "optim", "tabular", "control/methods", "language/training")]
PLACES = ["language/models/logprobs.py", *(str(p.relative_to(ROOT)) for room in ROOMS for p in sorted(room.rglob("*.py")))]


@repeat_for("place", PLACES)
def test_the_frozen_ones_are_frozen_where_they_run(place):
    """What the source says and what Python made of it are two things."""
    module = importlib.import_module("psigrad." + place.removesuffix(".py").replace("/", "."))
    made = [x for x in vars(module).values() if isinstance(x, type) and dataclasses.is_dataclass(x)]
    for kind in made:
        assert kind.__name__ in CHANGING or kind.__dataclass_params__.frozen, kind


def test_what_holds_tensors_is_compared_by_identity():
    """Equality of tensors is a tensor."""
    for kind in (Pairs, Labelled, Episode, Sweep, MDP):
        assert kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__
