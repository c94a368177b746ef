"""What stands around the code says the same as the code: versions, workflows, images, the citation."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import psigrad

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TEXTS = {".md", ".py", ".ipynb", ".html", ".yaml", ".yml", ".toml", ".Dockerfile", ".js"}
TORCH = re.search(r"^TORCH \?= (torch==\S+)$", MAKEFILE, re.MULTILINE)[1]


def commands(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def missing(makefile):
    """The paths that a Makefile reads, its `addprefix` written out, and the checkout lacks. `--json` names a file to write."""
    text = re.sub(r"\$\(addprefix (\S+?),([^)]*)\)", lambda m: " ".join(m[1] + name for name in m[2].split()), makefile)
    named = re.findall(r"(?<![\w./-])(?<!--json )(?:tests|tools|benchmarks|examples|docs|supply)/[\w./-]+", text)
    assert len(named) > 30
    return sorted({path for path in named if not (ROOT / path).exists()})


def test_every_path_that_the_makefile_names_exists():
    assert missing(MAKEFILE) == []
    wrong = MAKEFILE.replace("tests/optim/test_optimizer.py", "tests/optim/test_gone.py").replace(",online_rl.py", ",update.py")
    assert missing(wrong) == ["tests/language/training/test_update.py", "tests/optim/test_gone.py"], "negative control"


def test_there_is_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert PROJECT["version"] == psigrad.__version__ == citation["version"] == newest
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_asks_for_no_more_rights_than_it_needs_and_calls_what_is_there(workflow):
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for command in commands(workflow):
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets
        assert all((ROOT / path).exists() for path in re.findall(r"\btests/\w+", command))
        assert set(re.findall(r"torch==[\d.]+", command)) <= {TORCH}
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_only_the_step_that_publishes_can_write_and_it_holds_no_secret():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert [name for name, job in jobs.items() if "write" in str(job.get("permissions"))] == ["publish"]
    assert "secrets." not in text and "password" not in text
    assert any("attest-build-provenance" in step["uses"] for step in jobs["publish"]["steps"])


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_an_image_has_our_torch_known_extras_and_no_root(image):
    text = image.read_text()
    assert TORCH in text and "\nUSER user\n" in text
    chosen = re.findall(r"psigrad-\*\.whl\)\[([\w,]+)\]", text)
    assert chosen, "an image installs its own wheel by path, never by a name that an index could answer"
    for extras in chosen:
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert f"docker/{image.name}" in text


def test_forms_for_issues_have_what_their_format_asks_for():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 2
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"] and form["body"]
        assert all(field["id"] and field["attributes"]["label"] for field in form["body"])


BY_NAME = re.compile(
    r"(pip|tool) install[^`\n]*[ '\"]psigrad(?=[\[\s'\"`<=]|$)|uv add[^`\n]* psigrad\b"
    r"|uvx (?!.*--from)[^`\n]*psigrad\b|(?<![\w/])psigrad\[[a-z]"
)


def test_nothing_installs_psigrad_by_its_name_which_is_registered_on_no_index():
    """A name that nobody holds is also a danger to whoever types it."""
    for wrong in (
        "pip install psigrad",
        "pip install -U 'psigrad[studio]'",
        "uv add psigrad",
        "uvx psigrad demo",
        "psigrad[mcp]",
    ):
        assert BY_NAME.search(wrong), wrong
    for right in ("pip install .", "pip install '.[serve]'", "uvx --from psigrad.whl psigrad"):
        assert not BY_NAME.search(right), right
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).suffix in TEXTS and name != "tests/surface/test_project_files.py" and (ROOT / name).is_file():
            found = BY_NAME.search((ROOT / name).read_text())
            assert not found, f"{name}: {found[0]}"
