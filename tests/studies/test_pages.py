"""The pages of the studies show what was stored, and what was stored is what they would compute now."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import claims_cells
import numpy as np
import pytest
from rich.console import Console

from psigrad.intervals import Interval
from psigrad_extras.experiments import EXPERIMENTS
from studies import bias, clip, problems, psi
from studies.settings import BiasSettings, ClipSettings, PsiSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiments.md").read_text()
IMAGES = ROOT / "docs" / "images" / "experiments"


def printed(parts) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    for part in parts:
        console.print(part)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def block(first: str) -> list[str]:
    """The text block of the page that begins with these words."""
    (found,) = (text for text in re.findall(r"```text\n(.*?)```", PAGE, re.S) if text.startswith(first))
    return found.splitlines()


def stored(name: str) -> dict:
    return json.loads((IMAGES / f"{name}.json").read_text())


def stored_psi() -> psi.PsiResult:
    found = stored("psi")
    rows = [psi.PsiRow(**row | {key: Interval(*row[key]) for key in ("along", "variance")}) for row in found["rows"]]
    return psi.PsiResult(PsiSettings(**found["settings"]), found["gradient_length"], tuple(rows))


def stored_bias() -> bias.BiasResult:
    found = stored("bias")
    rows = [bias.BiasRow(**row | {key: Interval(*row[key]) for key in ("bias2", "variance")}) for row in found["rows"]]
    return bias.BiasResult(
        BiasSettings(**found["settings"]), tuple(rows), tuple(bias.MSECurve(**curve) for curve in found["curves"])
    )


def test_the_page_shows_what_the_commands_printed():
    assert block("The policy gradient by") == printed(psi.tables(stored_psi()))[: len(block("The policy gradient by"))]
    every = printed(bias.tables(stored_bias()))
    shown = block("Targets of a critic")
    assert set(shown) <= set(every) and sum(line.startswith("  ") for line in shown) >= 28
    fresh = printed(clip.tables(clip.run(ClipSettings())))
    assert block("Gradient of the surrogate") == fresh[: len(block("Gradient of the surrogate"))]


def test_negative_control_a_changed_figure_is_noticed():
    shown = [line.replace("585.9", "586.9") for line in block("The policy gradient by")]
    assert shown != printed(psi.tables(stored_psi()))[: len(shown)]


def test_the_exact_figures_of_the_forms_are_those_of_now():
    found = stored_psi()
    given = problems.problem(problems.line_walk())
    assert found.settings == PsiSettings(out=found.settings.out) and found.gradient_length == pytest.approx(
        np.linalg.norm(given.gradient)
    )
    assert [(form.name, form.critic) for form in psi.forms(1.0)] == [(row.name, row.critic) for row in found.rows]
    for form, row in zip(psi.forms(1.0), found.rows, strict=True):
        mean, variance = psi.moments(form, given, 16, 1000)
        assert variance == pytest.approx(row.exact_variance, rel=1e-9)
        assert np.linalg.norm(mean - given.gradient) / found.gradient_length == pytest.approx(row.exact_bias, abs=1e-9)


def test_a_few_sampled_figures_are_those_of_now():
    given = problems.problem(problems.line_walk())
    chosen = [form for form in psi.forms(1.0) if form.name in ("total return R", "TD residual")]
    fresh = psi.rows(given, chosen, seeds=10, episodes=16_000, batch_size=16)
    for row in fresh:
        (kept,) = (r for r in stored_psi().rows if (r.name, r.critic) == (row.name, row.critic))
        assert row.variance == pytest.approx(kept.variance, rel=1e-6) and row.along == pytest.approx(kept.along, abs=1e-9)


def test_the_exact_figures_of_the_targets_are_those_of_now():
    found, world = stored_bias(), bias.walk()
    assert found.settings == BiasSettings(out=found.settings.out)
    step, alive = bias.chain(world), ~world.mdp.is_terminal
    for row in found.rows:
        value = bias.critics(world, 0.5)[row.critic]
        mean, variance = bias.exact(bias.Target(row.n, row.lam), world, step, value)
        assert variance[alive].mean() == pytest.approx(row.exact_variance, rel=1e-6)
        assert ((mean - world.value)[alive] ** 2).mean() == pytest.approx(row.exact_bias2, abs=1e-9)


def test_the_table_of_variants_is_that_of_now():
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| Ψ")]
    assert len(rows) >= 12
    cases = [problems.line_walk(), problems.line_walk(at_the_end=True), problems.line_walk(gamma=0.9)]
    worlds = [(problems.problem(mdp), psi.forms(mdp.gamma)) for mdp in cases]
    for said, *cells in rows:
        name, critic = re.fullmatch(r"\| (.*?)(?:, (exact|rough) critic)?", said).groups(default="")
        for (given, forms), shown in zip(worlds, (cells[0:2], cells[2:4], cells[4:6]), strict=True):
            (form,) = (f for f in forms if (f.name, f.critic) == (name, critic))
            mean, variance = psi.moments(form, given, 16, 1000)
            off = np.linalg.norm(mean - given.gradient) / np.linalg.norm(given.gradient)
            assert [cell.removesuffix(" |") for cell in shown] == ["0" if off < 1e-9 else f"{off:.3g}", f"{variance:.4g}"]


@pytest.mark.parametrize("name", ["psi", "bias", "clip"])
def test_every_experiment_has_its_command_and_its_picture_on_the_page(name):
    assert f"](images/experiments/{name}.png)" in PAGE and f"`psigrad experiment {name}`" in PAGE
    assert (IMAGES / f"{name}.png").stat().st_size > 20_000


CLAIMS = [name for name, one in EXPERIMENTS.items() if one.file.startswith("studies.claims.")]


def shown_claims() -> dict[str, tuple[str, str]]:
    """The rows of the page of claims: the link to the experiment, and the verdicts with their figures, by claim."""
    page = (ROOT / "docs" / "claims.md").read_text()
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \(.+?\) \| (.+?) \| .+ \| .+ \|$", page, re.MULTILINE)
    return {claim: (link, cell) for claim, link, cell in rows}


def sections() -> dict[str, str]:
    """The sections of the page of claims by their anchors."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs" / "claims.md").read_text(), flags=re.MULTILINE)
    slugs = ("#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in parts[1::2])
    return dict(zip(slugs, parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["", *CLAIMS])
def test_the_page_of_claims_shows_the_verdicts_and_figures_of_what_was_stored(name):
    found, rows = claims_cells.findings(name), shown_claims()
    assert list(rows) == list(claims_cells.ROWS), "every claim has its row"
    own = [claim for claim, (experiment, _) in claims_cells.ROWS.items() if experiment == name]
    assert own
    for claim in own:
        link, cell = rows[claim]
        assert cell == claims_cells.cell(claim, found)
        section = sections().get(link, "")
        if name:
            assert re.search(rf"`psigrad experiment {name}[ `]", section) and f"](images/experiments/{name}.png)" in section
        else:
            assert not link.startswith("#")
    if name:
        assert len(printed(EXPERIMENTS[name].module.tables(claims_cells.stored(name)))) > 3, "the command prints the rest"


def test_negative_control_a_changed_verdict_or_figure_of_a_claim_is_noticed():
    claim = "Online methods learn more than DPO from the same number of samples"
    found, key = claims_cells.findings("dpo"), "RLOO learns more than DPO from as many samples"
    for changed in (
        replace(found[key], verdict="undecided"),
        replace(found[key], difference=found[key].difference._replace(mean=0.5)),
    ):
        assert shown_claims()[claim][1] != claims_cells.cell(claim, found | {key: changed})
