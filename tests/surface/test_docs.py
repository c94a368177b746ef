"""The documentation says what the code does."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import scripts
from cases import repeat_for
from packaging.requirements import Requirement

from psigrad import cli
from psigrad.config import EvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, SFTConfig
from psigrad.config.algorithms import resolve, resolve_loss
from psigrad.config.fields import flag_of, settings_of
from psigrad.config.methods import list_declarations
from psigrad.config.nested import flat_names
from psigrad.control.hyperparameters import settings_for
from psigrad.control.settings import ControlConfig
from psigrad.language.rewards import builtin
from psigrad.objective.catalog import GRPO, Catalog
from psigrad.objective.catalog import METHODS as PRESETS
from psigrad.objective.explain import label
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES
from psigrad.records.warnings import BY_NAME
from psigrad_extras.defaults import THEIRS, beside

ROOT = Path(__file__).parents[2]


def script(name):
    return scripts.load(f"docs/make/{name}.py")


@pytest.fixture(scope="module")
def maker():
    return script("methods")


def test_the_defaults_of_others_are_theirs():
    """TRL's classes have them as fields, Stable-Baselines3's as arguments."""
    for where, name, value, _ in THEIRS.values():
        module, _, owner = where.rpartition(".")
        found = inspect.signature(getattr(importlib.import_module(module), owner)).parameters[name].default
        assert found == value, (where, name)


def test_the_terminal_has_the_same_table(capsys):
    assert cli.main(["explain", "defaults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(THEIRS) and "sampling.max_completion_length    256" in lines[1] and "`" not in "".join(lines)
    assert lines[1].endswith("  512 (GRPOConfig)")


def test_a_default_that_is_shown_beside_theirs_is_what_a_run_has():
    """Of control in an environment that has no numbers of its own."""
    shown = {name: ours for name, ours, _, _ in beside()}
    for method in ("ppo", "a2c", "dqn"):
        ours = {name: setting.default for name, setting in settings_of(ControlConfig).items()} | settings_for(method, "Other-v0")
        assert f"{ours['n_envs']} copies for `a2c`, one" in shown["n_envs"] if method == "a2c" else ours["n_envs"] == 1
        for name in ("dqn.buffer_size", "dqn.learning_starts", "adam_epsilon") if method == "dqn" else ("adam_epsilon",):
            assert shown[name] == f"`{ours[name]}`", (method, name)


def test_the_page_of_settings_is_up_to_date_and_has_every_setting_and_flag():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == script("settings").page(), "run: python docs/make/settings.py"
    for cls in (SFTConfig, OnlineConfig, EvalConfig, PreferenceConfig, RewardConfig, SampleConfig, ControlConfig):
        for _, name in flat_names(cls):
            assert f"| `{name}` | " in page
            # the page gives the rule, and its only exception
            assert flag_of(name) == ("--model" if name == "model.path" else "--" + name.rpartition(".")[2].replace("_", "-"))
    # not from the maker: one line read by a person
    assert "| `sampling.top_p` | float > 0, ≤ 1 | `1.0` |" in page


def test_every_warning_has_its_section_and_a_remedy():
    maker = script("alerts")
    page = (ROOT / "docs" / "debugging.md").read_text()
    assert page == maker.page(), "run: python docs/make/alerts.py"
    for rule in maker.RULES:
        remedy = maker.texts()[rule.name]["do"]
        assert f"\n### {rule.title}\n" in page and remedy.endswith(".") and f"**What to do.** {remedy}" in page


def test_the_page_of_faults_shows_what_the_runs_gave():
    page, images = (ROOT / "docs" / "debugging.md").read_text(), ROOT / "docs" / "images" / "debugging"
    runs = json.loads((images / "debugging.json").read_text())
    for name, run in runs.items():
        titles = [BY_NAME[rule].title for rule in run["alerts"]]
        links = [f"[{title}](#{title.lower().replace(',', '').replace(' ', '-')})" for title in titles]
        after = page.partition(f"(images/debugging/{name}.png)")[2]
        assert re.search(r"\*\*Warnings\.\*\* (.*)\.", after)[1] == ", ".join(links or ["none"]), name
    held_out = {name: run["curves"]["eval/exact/mean"][1] for name, run in runs.items()}
    assert len(runs) == 11 and held_out["healthy"][-1] > held_out["healthy"][0] + 0.2
    for name in set(runs) - {"healthy"}:  # none of the spoilt runs learns as the healthy one does
        assert held_out[name][-1] < held_out["healthy"][-1] - 0.1 and (images / f"{name}.png").exists(), name


@repeat_for("name", [*PRESETS, *LOSSES])
def test_the_page_of_a_method_is_up_to_date_and_names_each_of_its_parts(name, maker):
    page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
    assert page == maker.page(name), "run: python docs/make/methods.py"
    assert not page.startswith(f"# {name}\n"), f"docs/methods/{name}.md: give it a heading of words in place of the name"
    if name in LOSSES:
        parts = [label(getattr(resolve_loss(name), "link", resolve_loss(name)))]
    else:
        preset = resolve(name)
        found = (preset.psi, preset.ratio, preset.surrogate, preset.aggregate, preset.kl, *preset.keep)
        parts = [
            "`" + (part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)) for part in found if part
        ]
    assert all(part in page for part in parts)


@repeat_for("name", [*PRESETS, *LOSSES])
def test_a_page_shows_its_measured_curve_or_says_that_there_is_none(name, maker):
    page, picture = (ROOT / "docs" / "methods" / f"{name}.md").read_text(), ROOT / "docs" / "images" / f"{name}.png"
    assert picture.exists() == (f"(../images/{name}.png)" in page) != (maker.UNMEASURED in page)
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")


def test_the_list_of_methods_is_up_to_date(maker):
    text, readme = ((ROOT / file).read_text() for file in ("docs/index.md", "README.md"))
    assert text == maker.index(text) and readme == maker.index(readme), "run: python docs/make/methods.py"
    more = {*PRESETS} - {"grpo", "ppo", "rloo", "dapo"}
    assert f"(GRPO, PPO, RLOO, DAPO and {len(more)} more methods)" in readme
    assert maker.index(readme.replace(f"{len(more)} more", "5 more")) == readme
    assert maker.index(text.replace("- [GRPO](methods/grpo.md)\n", "")) == text
    assert all(f"methods/{name}.md" in text for name in [*PRESETS, *LOSSES])


def test_a_method_of_a_stranger_has_a_page_without_words_or_a_trained_model(maker, monkeypatch):
    mine = Catalog(PRESETS)
    mine.declare("mine", "rewards of GRPO as they come", GRPO)
    monkeypatch.setattr(maker, "METHODS", mine)
    monkeypatch.setattr(maker.algorithms, "resolve", lambda name: GRPO)
    monkeypatch.setattr(maker.algorithms, "explain", lambda name: "maximise J")
    page = maker.page("mine")
    assert page.startswith("# Rewards of GRPO as they come\n") and maker.UNMEASURED in page and ".png" not in page
    assert "- [mine](methods/mine.md)\n" in maker.index((ROOT / "docs" / "index.md").read_text())
    assert "| [mine](mine.md) |" in maker.table()


def test_the_table_of_methods_is_up_to_date(maker):
    text = (ROOT / "docs" / "methods" / "table.md").read_text()
    assert text == maker.table(), "run: python docs/make/methods.py"
    assert all(f"[{name}]({name}.md)" in text for name in [*PRESETS, *LOSSES])
    assert "methods/table.md" in (ROOT / "docs" / "index.md").read_text()


def test_every_link_between_documents_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@repeat_for("page", PAGES)
def test_what_a_page_imports_and_the_files_it_names_are_there(page):
    text = page.read_text()
    for module, names in re.findall(r"^\s*from (psigrad[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        for name in names.split(","):
            name = name.split(" as ")[0].strip()
            assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}"), name
    for file in re.findall(
        r"`((?:psigrad|psigrad_extras|psigrad_studio|psigrad_serve|tests|docs|benchmarks|examples)/[\w/.]+)`", text
    ):
        assert (ROOT / file).exists() or "NAME" in file, f"{page.name}: {file}"


def test_every_built_in_reward_is_documented():
    text = (ROOT / "docs" / "rewards.md").read_text()
    assert all(f"`{name}`" in text for name in builtin.NAMES)


def test_every_method_is_a_command():
    assert {*PRESETS, *LOSSES, "online_dpo", "sft", "reward"} <= set(cli.COMMANDS)


def test_every_command_of_the_readme_exists_with_its_flags(capsys):
    readme = (ROOT / "README.md").read_text()
    text = "\n".join([readme, *((ROOT / "docs" / name).read_text() for name in ("walkthrough.md", "preferences.md"))])
    commands = re.findall(r"^psigrad (\w+)((?:.*\\\n)*.*)", text, re.MULTILINE)
    assert len(commands) > 15
    for name, rest in commands:
        assert name in cli.COMMANDS, name
        asked = set(re.findall(r"(?<!\S)--[a-z0-9-]+", rest.split("#")[0]))
        method = list_declarations().get(name) or list_declarations().get(rest.split()[0])  # psigrad plan grpo …
        known = {flag_of(n) for _, n in flat_names(method.settings)} if method else set()
        if asked - known:
            with contextlib.suppress(SystemExit):  # argparse exits after its help
                cli.main([name, "--help-all" if name in ("check", "compare", "eval", "sample") else "--help"])
            known |= set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
        assert not asked - known, f"psigrad {name} {asked - known}"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE)
    assert len(made) >= 3 and set(made) <= set(targets)


def test_the_readme_is_short_and_its_figures_are_those_of_the_pages_that_it_names():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    table = readme.partition("## Why not")[2].partition("\n## ")[0]
    for row in (row for row in table.splitlines() if row.startswith("| **")):
        measured = row.split("|")[2]
        (page,) = re.findall(r"\]\((docs/[\w]+\.md)", measured)
        shown = re.sub(r"[*×]", "", (ROOT / page).read_text())
        figures = re.findall(r"(?<![\w-])\d[\d,.]*(?:e-\d)?(?<![.,])(?!M)", measured.partition("([")[0])
        assert len(figures) >= 3 and all(re.search(rf"(?<![\d.]){re.escape(f)}(?![\d])", shown) for f in figures), (page, figures)


def test_constraints_pin_everything_that_is_installed_with_psigrad():
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = re.search(r"^TESTED := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split(",")
    waiting = [*project["dependencies"], *(one for extra in tested for one in project["optional-dependencies"][extra])]
    seen: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = requirement.name.lower().replace("_", "-")
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        try:
            waiting += distribution(name).requires or []
        except PackageNotFoundError:
            continue  # a wheel for another platform: nothing to pin here
    assert seen - pinned - {"pip"} == set()


def test_the_architecture_page_names_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {p.name for p in (ROOT / "psigrad").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert all(f"{room}/" in text for room in rooms)


def test_the_site_has_every_page_once_and_in_the_order_of_the_index():
    text = script("../conf").contents((ROOT / "docs" / "index.md").read_text())
    listed = re.findall(r"<([^>]+)>", text)
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    pages = {p.relative_to(ROOT / "docs").with_suffix("").as_posix() for p in files}
    assert len(listed) == len(set(listed))
    assert set(listed) == {p for p in pages if not p.startswith("api/")} - {"index"} | {"api/index"}
    assert listed.index("walkthrough") < listed.index("control") < listed.index("methods/grpo") < listed.index("settings")


def test_a_language_model_that_reads_finds_every_page(tmp_path):
    script("llms").write(tmp_path)
    listed, full = ((tmp_path / name).read_text() for name in ("llms.txt", "llms-full.txt"))
    assert listed.startswith("# psigrad\n\n> ") and "- [Data](data.html): the forms of a dataset" in listed
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        if name != "index.md":
            assert f"({name.removesuffix('.md')}.html)" in listed, name
            assert name.startswith("api/") or page.read_text().strip() in full, name
    assert all(f"(course/{chapter.stem}.html)" in listed for chapter in (ROOT / "docs" / "course").glob("*.ipynb"))


def test_docstrings_become_restructured_text():
    given = ["The `x` of a_t * b; see `f`s.", "", "    A_t = R_t * `b`", "    V", "", "Items:", "- one `y`", "  goes on", "- two"]
    assert script("../conf").docstring(given) == [
        r"The ``x`` of a\_t \* b; see ``f``\ s.",
        "",
        "",
        ".. code-block:: text",
        "",
        "        A_t = R_t * `b`",
        "        V",
        "    ",
        "",
        "Items:",
        "",
        "- one ``y``",
        "  goes on",
        "- two",
    ]


def test_links_that_leave_the_documents_are_words_and_a_path():
    page = "[a](data.md) [b](../psigrad/config/) [`tools/lock.py`](../tools/lock.py) ![p](images/x.png) [w](https://x.org)"
    expected = "[a](data.md) b (`psigrad/config`) `tools/lock.py` ![p](images/x.png) [w](https://x.org)"
    assert script("../conf").inside(page, ROOT / "docs") == expected


def test_the_lint_of_english_finds_what_it_should():
    """`make lint`, with which `make test` begins, runs it on everything."""
    tool = scripts.load("tools/english.py")
    assert len(tool.checked_files()) > 500
    assert len(list(tool.faults("a.md", "An alert is raised anew."))) == 2, "negative control"
    assert len(list(tool.faults("a.py", 'def f():\n    """Who asks."""  # it goes on with this\n    g("It stands in f.")'))) == 4
    assert not list(tool.faults("a.py", 'def f():\n    """Return the file."""  # it resumes this\n    g("It is in f.")'))
    words = re.findall(r"^\| \*\*([^*]+)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(words) > 30 and words == sorted(words, key=str.casefold), "one word a thing, in alphabetical order"


def test_every_public_module_of_the_api_pages_is_there():
    pages = [page.read_text() for page in (ROOT / "docs" / "api").glob("*.md") if page.stem != "index"]
    assert len(pages) == 9
    for page in pages:
        modules = re.findall(r"automodule:: (\S+)", page)
        assert modules and all(map(importlib.util.find_spec, modules))
