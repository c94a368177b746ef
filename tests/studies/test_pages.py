"""The pages of the studies show what was stored, and what was stored is what they would compute now."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import scripts
from rich.console import Console

from studies import lag
from studies.settings import LagSettings

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images" / "experiments"


def stored_lag() -> lag.LagResult:
    found = json.loads((IMAGES / "lag.json").read_text())
    return lag.LagResult(LagSettings(**found["settings"]), tuple(lag.LagRow(**row) for row in found["rows"]))


def test_the_simulation_of_eight_devices_is_that_of_now():
    found = stored_lag()
    assert found.settings == LagSettings(out=found.settings.out)
    fresh = lag.run(LagSettings(most_devices=8))
    assert fresh.rows == tuple(row for row in found.rows if row.devices == 8)


def test_the_page_shows_what_the_simulation_printed():
    page = (ROOT / "docs" / "experiments.md").read_text()
    (block,) = (text for text in re.findall(r"```text\n(.*?)```", page, re.S) if text.startswith("Sampling and training"))
    console = Console(file=io.StringIO(), width=80)
    for part in lag.tables(stored_lag()):
        console.print(part)
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert block.splitlines() == printed[: len(block.splitlines())]
    changed = block.replace("5", "6", 1).splitlines()
    assert changed != printed[: len(changed)], "negative control: a changed figure is noticed"


def test_the_page_of_claims_is_that_of_the_stored_figures(tmp_path):
    script = scripts.load("docs/make/claims.py")
    page = script.PAGE.read_text()
    assert page == script.page(), "run: python docs/make/claims.py"
    assert len(re.findall(r"^\| .* \| .*\*\*.* \| ", page, re.MULTILINE)) == len(script.ROWS)
    script.PAGE = tmp_path / "claims.md"
    script.PAGE.write_text(page.replace("| **holds** |", "| **undecided** |", 1).replace("0.57 [0.54", "0.58 [0.54", 1))
    assert script.page() == page, "negative control: a changed verdict and a changed figure are put right"
    assert all((IMAGES / f"{name}.json").exists() for name in script.claims()), "every claim was measured"
    assert "…" not in page
