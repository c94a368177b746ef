"""The gradient of a step does not depend on how many processes find it, whole models or shards: every parameter's, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
import torch
from rank_gradients import CASES, CONTROLS, DOUBLE, MODULES, distance, make_models
from safetensors.torch import load_file

TABLES = {"native": CASES, "modules": MODULES, "double": DOUBLE}
# of the norm of the whole gradient; bfloat16 rounds what each process adds up
BOUND = {"native": 1e-6, "modules": 3e-6, "double": 1e-12}
WORLDS = [(2, False), (4, False), (1, True), (2, True), (4, True)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def _run(models: Path, out: Path, names: str, size: int, sharded: bool, control: str = "") -> None:
    extra = {} if names.startswith("native") else {"PSIGRAD_NATIVE": "0"}
    ranks.run(size, "rank_gradients", "main", models, out, names, control, lockstep=sharded, extra=extra)


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    """found(kind, name, size, sharded): the gradients, by name of the parameter; each world runs once for all cases."""
    folder, done = tmp_path_factory.mktemp("gradients"), {}

    def of(kind: str, name: str, size: int, sharded: bool) -> dict[str, torch.Tensor]:
        out, group = folder / f"{size}-{sharded}", "native" if kind == "native" else "transformers"
        if (group, size, sharded) not in done:
            _run(models, out, f"{group}:", size, sharded)
            done[group, size, sharded] = True
        return load_file(f"{out}-{kind}-{name.replace(' ', '_')}.safetensors")

    return of


# every world starts processes of its own: those that show least beside the others are left to `make test-long`
LEFT = {(kind, size, sharded) for kind in ("modules", "double") for size, sharded in ((1, True), (4, False), (4, True))}
ALWAYS = ("native", 2, True)
SLOW, LONG = pytest.mark.slow, pytest.mark.long


def marks(*world):
    return [LONG] if world in LEFT else [SLOW] if world != ALWAYS else []


TRIES = [
    pytest.param(kind, name, *world, marks=marks(kind, *world))
    for kind, table in TABLES.items()
    for name in table
    for world in WORLDS
]


@pytest.mark.parametrize(("kind", "name", "size", "sharded"), TRIES)
def test_the_gradient_is_that_of_one_process(found, kind, name, size, sharded):
    one, several = found(kind, name, 1, False), found(kind, name, size, sharded)
    half = TABLES[kind][name].dtype == "bfloat16"
    apart = distance(one, several)
    print(f"{kind} {name} {size} {sharded} {apart:.2g}")
    assert apart < (2e-2 if half else BOUND[kind])
    for key in [key for key in one if key.startswith("norm of")]:
        assert float(several[key]) == pytest.approx(float(one[key]), rel=1e-2 if half else 1e-5)
    assert float((one["after a step"] - several["after a step"]).abs().max()) < (0.3 if half else 2e-3)
    assert (one["after a step"] != 0).any()


@pytest.mark.parametrize("control", ["mean", *(pytest.param(c, marks=SLOW) for c in CONTROLS if c != "mean")])
def test_wrong_ways_to_share_a_step_are_seen(models, found, tmp_path, control):
    sharded = control in ("root only", "layers unseen")
    try:
        _run(models, tmp_path / "wrong", "native:dapo", 2, sharded, control)
        apart = distance(found("native", "dapo", 1, False), load_file(tmp_path / "wrong-native-dapo.safetensors"))
    except AssertionError as error:
        assert (control == "layers unseen" and "rank 0 ended" in str(error)) or "without gradient" in str(error)
        return
    assert apart > 1e-3


def numbers(figures: dict) -> dict:
    return {key: value for key, value in figures.items() if not isinstance(value, str)}


@pytest.fixture(scope="module")
def held_out(models, tmp_path_factory):
    """held_out(size, sharded, control): what the ranks found on held-out rows."""
    folder, done = tmp_path_factory.mktemp("held-out"), {}

    def of(size: int, sharded: bool, control: str = "") -> dict:
        key = (size, sharded, control)
        if key not in done:
            out = folder / f"{size}-{sharded}-{control.replace(' ', '_')}"
            ranks.run(size, "rank_gradients", "held_out", models, out, control, lockstep=sharded)
            done[key] = json.loads(Path(f"{out}-held-out.json").read_text())
        return done[key]

    return of


@pytest.mark.parametrize(
    ("size", "sharded"),
    [pytest.param(2, False, marks=pytest.mark.slow), pytest.param(4, False, marks=pytest.mark.long), (2, True)],
)
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward"])
def test_held_out_rows_are_shared_and_the_figures_those_of_one_process(held_out, name, size, sharded):
    one, several = held_out(1, False)[name], held_out(size, sharded)[name]
    assert all(figures == several["figures"][0] for figures in several["figures"])
    found, wanted = several["figures"][0], one["figures"][0]
    marks = {key for key, value in wanted.items() if isinstance(value, str)}
    assert len(marks) == (name in ("dpo", "reward")) and all(found[key] == wanted[key] for key in marks)
    assert numbers(found) == pytest.approx(numbers(wanted), rel=2e-5, abs=1e-6)
    # a prompt that two rows share may be read on both ranks; in lockstep a rank with a part less reads one again
    most = (1.3 if sharded else 1.1) * one["tokens"][0]
    assert sum(several["tokens"]) < most and max(several["tokens"]) < most / size * 1.25


def test_a_share_taken_for_the_whole_is_seen(held_out):
    one, wrong = held_out(1, False), held_out(2, False, "own share")
    assert wrong["sft"]["figures"][0] != pytest.approx(one["sft"]["figures"][0], rel=2e-5, abs=1e-6)
    assert numbers(wrong["dpo"]["figures"][0]) == pytest.approx(numbers(one["dpo"]["figures"][0]), rel=2e-5, abs=1e-6)
