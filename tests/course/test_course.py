"""The course: its notebooks are made from their sources, run, and say what is so.

Every chapter runs here in a short form; `-m long` runs it as readers do, and holds what its text says against the numbers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import scripts
import torch

from psigrad_extras import words as task

ROOT = Path(__file__).parents[2]
course = scripts.load("docs/make/course.py")

CPU_SECONDS = 120
SHORT: dict[str, dict[str, Any]] = {
    "grid_world": {"episodes": 50},
    "bandits": {"groups": 400, "seeds": 10, "steps": 5},
    "cartpole": {"seeds": 1, "steps": 600},
    "sft": {"sft_steps": 4, "rl_steps": 2, "held_out_words": 8},
    "ppo_rloo": {"sft_steps": 3, "rl_steps": 2, "seeds": 1},
    "grpo": {"completions": 400, "sft_steps": 3, "rl_steps": 1},
    "dpo": {"sft_steps": 3, "dpo_steps": 2, "rl_steps": 2, "solve_steps": 20},
    "pictures": {"games": 60, "held_out_games": 12, "sft_steps": 3, "rl_steps": 1},
    "project": {"sft_steps": 3, "rl_steps": 1, "held_out_rows": 120},
    "reward_model": {"comparisons": 300, "sft_steps": 3, "reward_steps": 2, "rl_steps": 2},
}


WORDS, SHORT_WORDS = 'product("abcdefgh", repeat=4)', 'product("abcdefgh", repeat=3)'
"""Of the words of the chapters on language models an eighth is enough to run them: to encode them takes most of their time."""


def run(name: str, folder: Path, words: str = WORDS, **sizes: Any) -> tuple[dict[str, Any], float]:
    """What a chapter's cells leave behind, with these words and sizes in place of its own, and the seconds of CPU they took."""
    matplotlib.use("Agg")
    torch.set_num_threads(1)
    left: dict[str, Any] = {"__name__": "__main__"}
    before, start = Path.cwd(), sum(os.times()[:4])
    os.chdir(folder)
    task.LENGTH = 3 if words == SHORT_WORDS else 4
    try:
        for place, cell in enumerate(course.cells((course.COURSE / f"{name}.py").read_text())):
            if cell.kind == "code":
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")
                    exec(compile(cell.text.replace(WORDS, words), f"{name}, cell {place}", "exec"), left)
                if "parameters" in cell.tags:
                    assert sizes.keys() <= left.keys()
                    left.update(sizes)
    finally:
        task.LENGTH = 4
        os.chdir(before)
        matplotlib.pyplot.close("all")
    return left, sum(os.times()[:4]) - start


def test_every_chapter_is_listed_and_has_a_short_form():
    index = (ROOT / "docs" / "index.md").read_text()
    assert sorted(set(re.findall(r"\(course/(\w+)\.ipynb\)", index))) == course.chapters() == sorted(SHORT)


@pytest.mark.parametrize("name", course.chapters())
def test_the_notebook_is_made_from_the_source(name):
    assert course.stored(name) == course.kept(name), f"run: python docs/make/course.py {name}"
    book = course.stored(name)
    shown = [cell for cell in book["cells"] if cell["cell_type"] == "code" and cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for cell in shown for output in cell["outputs"]) >= 2
    assert len(json.dumps(book)) < 400_000  # they lie in the repository


def test_negative_control_a_changed_line_of_code_is_noticed(tmp_path, monkeypatch):
    source, book = (course.COURSE / "bandits.py").read_text(), (course.COURSE / "bandits.ipynb").read_text()
    (tmp_path / "bandits.ipynb").write_text(book)
    (tmp_path / "bandits.py").write_text(source.replace("steps = 200", "steps = 201"))
    monkeypatch.setattr(course, "COURSE", tmp_path)
    assert course.kept("bandits") is None


@pytest.mark.parametrize("name", course.chapters())
def test_a_chapter_has_what_each_has(name):
    cells = course.cells((course.COURSE / f"{name}.py").read_text())
    text = "\n".join(cell.text for cell in cells if cell.kind == "markdown")
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    assert re.match(r"\d+ · ", headings[0])
    assert "Where it fails" in headings and "Now on a language model" in headings
    exercises = re.findall(r"^\d\. ", text[text.index("## Exercises") :], re.MULTILINE)
    answers = [heading for heading in headings if heading.startswith("Answer ")]
    assert 2 <= len(exercises) == len(answers) == sum("hide-cell" in cell.tags for cell in cells)
    assert sum("parameters" in cell.tags for cell in cells) == 1


@pytest.mark.parametrize("name", course.chapters())
def test_a_chapter_derives_says_it_in_pseudocode_and_names_what_to_read(name):
    text = "\n".join(cell.text for cell in course.cells((course.COURSE / f"{name}.py").read_text()) if cell.kind == "markdown")
    assert "## In pseudocode\n\n```text\n" in text
    assert len(re.findall(r"^- .*\d{4}", text.partition("## Read on")[2].partition("## Exercises")[0], re.MULTILINE)) >= 3
    derived = text.partition("## The derivation")[2].partition("\n## ")[0]
    assert name == "project" or re.search(r"^    \S", derived, re.MULTILINE)
    book = course.stored(name)
    shown = "\n".join("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "markdown")
    assert shown.count("$$") >= 2 and shown.count("$$") % 2 == 0


def test_a_kernel_without_psigrad_installs_it_from_the_checkout_and_one_with_it_does_nothing(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("subprocess.run", lambda command, check: asked.append((command[1:], check)))
    for there in (True, False):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, there=there: name if there else None)
        monkeypatch.chdir(course.COURSE)
        exec(course.INSTALL, {})
    assert asked == [(["-m", "pip", "install", "--quiet", str(course.COURSE.parents[1].resolve())], True)]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="open this notebook in its checkout"):
        exec(course.INSTALL, {})
    for name in course.chapters():
        kinds = [(cell["cell_type"], "".join(cell["source"])) for cell in course.stored(name)["cells"]][:2]
        assert kinds[0][0] == "markdown" and kinds[1] == ("code", course.INSTALL)


def test_later_chapters_have_the_task_of_chapter_4(monkeypatch):
    """The words, their order and the teachers' mistakes, by the code of chapter 4."""
    (cell,) = (c.text for c in course.cells((course.COURSE / "sft.py").read_text()) if c.text.startswith("folder = Path("))
    left: dict[str, Any] = {"held_out_words": task.HELD_OUT}
    exec("import itertools, random, tempfile\nfrom pathlib import Path\nfrom psigrad.language.data import tasks\n" + cell, left)
    assert task.rows() == (left["held_out"], left["prompts"])
    seen: dict[str, Any] = {}
    monkeypatch.setattr(task.tiny, "model", lambda *given, **more: Saved())
    monkeypatch.setattr(task.psigrad, "train", lambda *given, **more: seen.update(more))
    task.imitate(left["prompts"], left["folder"], 5)
    assert seen["dataset"] == left["shown"] and seen["max_steps"] == 5


class Saved:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing: no run reads it."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in ("grpo", "dpo", "reward_model") else ()) for n in course.chapters()]
)
def test_a_chapter_runs_in_its_short_form(name, tmp_path):
    """What those trained with `make test-slow` call, the chapters on SFT, PPO and the project call too."""
    words = WORDS if name == "reward_model" else SHORT_WORDS  # which changes their fourth letter
    run(name, tmp_path, words, **SHORT[name])


def whole(name: str, folder: Path) -> dict[str, Any]:
    left, seconds = run(name, folder)
    assert seconds < CPU_SECONDS
    return left


@pytest.mark.long
def test_grid_world(tmp_path):
    left = whole("grid_world", tmp_path)
    assert abs(left["mean"] - left["value_of_cell"]) < 4 * left["error_of_mean"]
    assert left["gap"] < 1e-8 and len(left["rounds"]) < len(left["sweeps"]) / 4
    # the optimum of the cell beside the treasure, worked by hand: 0.9 of the moves go in, the others slip past it
    best, grid = left["best"], left["grid"]
    beside = best.value[grid.state((1, 5))]
    slipped = best.value[[grid.state((0, 5)), grid.state((2, 5))]]
    assert beside == pytest.approx(0.9 + 0.9 * 0.05 * slipped.sum(), abs=1e-9)
    assert left["distance"][-1] < 0.02 < 0.3 < left["distance"][0]
    assert np.abs(left["estimated"] - left["exact"]).max() < 1e-6


@pytest.mark.long
def test_bandits(tmp_path):
    left = whole("bandits", tmp_path)
    truth = left["truth"]

    def z(found):
        return float(((found.mean(0) - truth) / (found.std(0) / len(found) ** 0.5)).abs().max())

    assert z(left["plain"]) < 4 and z(left["others"]) < 4
    assert z(left["own"]) > 6 and z(left["wrong"]) > 50  # the negative controls
    assert left["plain"].var(0).sum() > 100 * left["others"].var(0).sum()
    assert left["best"]["R − mean of others"] > 0.95 and left["best"]["Ψ = R"] < 0.6
    assert left["spread"]["Ψ = R"] > 10 * left["spread"]["RLOO"]
    assert (left["half"] / truth).numpy() == pytest.approx(0.5, abs=0.05)


@pytest.mark.long
def test_cartpole(tmp_path):
    left = whole("cartpole", tmp_path)
    area = {name: found.mean() for name, (_, found, _) in left["forms"].items()}
    assert area["R(τ)"] < 0.75 * min(area["G"], area["G, whitened"], area["G − V"])
    assert area["G, whitened"] > area["G"] and area["G, whitened"] > area["G − V"]
    ppo, a2c = left["results"]["PPO, 10 passes"][1], left["results"]["A2C, 1 pass"][1]
    assert ppo.mean() > 1.5 * a2c.mean() and left["mean"] > 300
    clipped, free = (left["results_of_hurry"][name][1][:, -10:].mean() for name in ("with the clip", "without"))
    assert clipped > 2 * free
    silent = {key for key, gets in left["passes"].items() if not gets}
    assert silent == {(1.0, 1.3), (-1.0, 0.7)}  # the table of PPO's clip
    assert left["difference"].abs().max() < 1e-4
    assert left["held"][0] == 0 and max(left["free"]) > max(left["held"])


@pytest.mark.long
def test_sft(tmp_path):
    left = whole("sft", tmp_path)
    assert left["loss"] == pytest.approx(float(left["usual"]), abs=1e-5)
    assert left["cross_entropy"].item() == pytest.approx(left["entropy"].item(), abs=1e-3)
    _, losses = left["sft"].history.series("loss")
    assert np.mean(losses[-50:]) < 1.7 * left["floor"]
    right = {name: share for name, (share, _) in left["shares"].items()}
    assert right["SFT, greedy"] < right["SFT, sampled"] < right["shown"] + 0.05
    assert right["RL, sampled"] > right["shown"] + 0.2 and right["RL, greedy"] > right["shown"] + 0.2


@pytest.mark.long
def test_ppo_rloo(tmp_path):
    left = whole("ppo_rloo", tmp_path)
    end = {name: found[-1] for name, found in left["accuracy"].items()}
    start = {name: found[0] for name, found in left["accuracy"].items()}
    assert end["RLOO"] > start["RLOO"] + 0.15 and end["PPO, λ = 1"] > end["RLOO"] + 0.05
    assert end["PPO, λ = 1"] > end["PPO, λ = 0.5"] - 0.05
    assert left["seconds"]["PPO, λ = 1"] > 1.5 * left["seconds"]["RLOO"]
    assert left["total"] == (128e9, 80e9) and left["same"]


@pytest.mark.long
def test_grpo(tmp_path):
    left = whole("grpo", tmp_path)
    exact = left["exact"]
    assert np.abs(left["pulls"]["RLOO"] - exact).max() < 1e-6
    assert (left["pulls"]["Dr. GRPO: R − mean"] / exact) == pytest.approx(7 / 8, abs=1e-5)
    assert left["hard"][4] > 1.2 * left["hard"][49]
    pushed = left["pushed"]
    assert pushed["GRPO: 1/|y|"]["right"] > 0.02 and pushed["GRPO: 1/|y|"]["wrong"] < -0.02
    assert all(abs(pushed["Dr. GRPO: 1/L"][name]) < 0.01 for name in ("right", "wrong"))
    accuracy = {name: run.history.series("eval/exact/mean")[1] for name, run in left["runs"].items()}
    assert all(found[-1] > found[0] + 0.1 for found in accuracy.values())
    assert left["samples"]["DAPO"][-1] > 1.15 * left["samples"]["GRPO"][-1]
    assert left["mine"] == left["DR_GRPO"]


@pytest.mark.long
def test_dpo(tmp_path):
    left = whole("dpo", tmp_path)
    assert (left["climbed"] - left["closed"]).abs().max() < 1e-3
    assert (left["by_dpo"] - left["closed"]).abs().max() < 5e-3
    margins = left["runs"]["DPO"].history.series("eval/rewards/margins")[1]
    assert margins[-1] > margins[0] + 0.5
    assert left["accuracy"]["RLOO"] > left["accuracy"]["SFT"] + 0.15


@pytest.mark.long
def test_pictures(tmp_path):
    left = whole("pictures", tmp_path)
    assert left["right"] == pytest.approx(0.5, abs=0.03)
    assert left["accuracy"][0] < left["right"] < left["accuracy"][-1] - 0.05
    assert left["blind"] < 0.35 and left["counts"].max() < 0.3


@pytest.mark.long
def test_project(tmp_path):
    left = whole("project", tmp_path)
    assert len(left["checks"]) == 9 and all(left["checks"].values())
    assert left["scores"]["GRPO"].mean() > 0.8 > 0.5 > left["scores"]["SFT"].mean() and left["low"] > 0.2


@pytest.mark.long
def test_reward_model(tmp_path):
    left = whole("reward_model", tmp_path)
    assert left["error"] < 0.3
    small, large = left["kept"]["small errors"], left["kept"]["some large errors"]
    assert small == sorted(small) and max(large) > large[-1] + 0.2
    truth = {name: run.history.series("eval/similarity/mean")[1] for name, run in left["runs"].items()}
    proxy = {name: run.history.series("reward")[1] for name, run in left["runs"].items()}
    assert np.mean(proxy["β = 0"][-20:]) > np.mean(proxy["β = 0"][:3]) + 0.2
    assert truth["β = 0"][-1] < truth["β = 0"][0] - 0.3  # the proxy rose and the truth fell
    assert truth["β = 0.5"][-1] > truth["β = 0.5"][0] - 0.15
    assert left["at"] == pytest.approx(np.log(9), abs=0.02)
