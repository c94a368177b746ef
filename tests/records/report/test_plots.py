"""Pictures show the numbers of the run, in any light."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from psigrad.records import report
from psigrad.records.read import load
from psigrad.records.report import plots


def drawn(folder) -> dict[str, str]:
    return {plot.title: svg for plot, svg in plots.draw([load(folder)])}


def curves(svg: str) -> list[np.ndarray]:
    """Points of the lines, in pixels; areas and grid lines are left out."""
    paths = [e for e in ET.fromstring(svg).iter("path") if "var(--c" in e.get("style", "") and "fill: none" in e.get("style", "")]
    return [np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", e.get("d")), float) for e in paths]


def sft(folder, steps):
    rows = [{"step": s, "loss": v, "mean_token_accuracy": 0.5, "learning_rate": 1e-3 / s} for s, v in steps]
    (folder / "config.json").write_text('{"recipe": "sft"}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_curve_is_the_series_up_to_the_scale_of_its_axes(tmp_path):
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    (points,) = curves(drawn(sft(tmp_path, enumerate(values, 1)))["Loss"])
    x, y = np.polyfit(range(1, 8), points[:, 0], 1), np.polyfit(values, points[:, 1], 1)
    np.testing.assert_allclose(points[:, 0], np.polyval(x, range(1, 8)), atol=1e-4)
    np.testing.assert_allclose(points[:, 1], np.polyval(y, values), atol=1e-4)
    assert x[0] > 0 > y[0]


def test_a_long_curve_keeps_its_outline_in_few_points(tmp_path):
    noise = np.random.default_rng(0).random(20_000)
    noise[12_345] = 7.0
    steps, values = plots._thin(range(20_000), noise.tolist())
    assert len(steps) <= 2 * plots._POINTS and steps == sorted(steps)
    assert max(values) == 7.0 and min(values) == noise.min() and steps[values.index(7.0)] == 12_345
    assert len(drawn(sft(tmp_path, enumerate(noise.tolist(), 1)))["Loss"]) < 60_000


def test_the_moving_average_is_the_weighted_mean():
    values = [3.0, 1.0, 4.0]
    assert plots.smooth(values, 0.5) == pytest.approx([3.0, (1.5 + 1) / 1.5, (0.75 + 0.5 + 4) / 1.75])
    assert plots.smooth([2.0] * 50) == pytest.approx([2.0] * 50)
    assert plots.smooth(values) == plots.smooth(values, 0.9)


def test_the_histogram_of_rewards_stacks_the_shares_of_each_value(run):
    axes = plots._axes(3.5, 2.0)[1]
    plots._spread(axes, load(run("one")))
    lower, upper = (area.get_paths()[0].vertices for area in axes.collections)
    # one completion a step: reward 0 up to step 10, 1 from there on
    assert [lower[lower[:, 0] == step, 1].max() for step in (5, 10, 11, 20)] == [1.0, 1.0, 0.0, 0.0]
    assert [upper[upper[:, 0] == step, 1].max() for step in (5, 10, 11, 20)] == [1.0, 1.0, 1.0, 1.0]
    assert sorted(text.get_text() for text in axes.texts) == ["0", "1"]


def test_ranges_of_large_rewards_are_named_in_full():
    axes, run = plots._axes(3.5, 2.0)[1], type("Run", (), {"rewards": {1: [-1.5e6 * i for i in range(11)]}})()
    plots._spread(axes, run)
    assert {t.get_text() for t in axes.texts} >= {"-1.5e7 to -1.2e7", "-3e6 to 0"}


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (3e-4, "3e-4"), (2.5e-5, "2.5e-5"), (1e-10, "1e-10"), (0.25, "0.25"),
                                             (1234.5, "1234"), (-3e-4, "-3e-4"), (1.5e7, "1.5e7"), (2e10, "2e10")])  # fmt: skip
def test_ticks_are_short_and_mean_what_they_say(value, text):
    assert plots._tick(value) == text and float(text) == pytest.approx(value, rel=1e-3)


def test_labels_at_the_ends_of_curves_do_not_touch():
    axes = plots._axes(3.5, 2.0)[1]
    axes.plot([0, 1], [0, 1])
    plots._labels(axes, [(0.5, "a", "k"), (0.5, "b", "k"), (0.51, "c", "k"), (1.0, "d", "k")])
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert all(b - a > 0.11 for a, b in itertools.pairwise(heights)) and heights[0] >= 0 and heights[-1] <= 1


def test_an_online_run_and_a_supervised_run_have_pictures_of_their_own(run, tmp_path):
    (tmp_path / "s").mkdir()
    online, offline = drawn(run("one")), drawn(sft(tmp_path / "s", enumerate([2.0, 1.0, 0.5], 1)))
    assert set(online) == {"Reward", "Rewards", "Held-out exact", "KL to the starting model", "Entropy", "Gradient norm", "Time"}
    assert set(offline) == {"Loss", "Token accuracy", "Learning rate"}


def test_pictures_are_whole_xml_whose_references_lead_to_ids_of_the_page(run):
    text = report.write([run("one"), run("two", 0.1)], run("three") / "page.html").read_text()
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    ids = [e.get("id") for svg in pictures for e in ET.fromstring(svg).iter() if e.get("id")]
    assert len(pictures) >= 4 and len(ids) == len(set(ids))
    assert {*re.findall(r"url\(#([^)]*)\)", text), *re.findall(r'href="#([^"]*)"', text)} <= set(ids)


def test_colours_follow_the_page(run):
    text = report.write(run("one")).read_text()
    svg = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.S)).lower()
    assert "currentcolor" in svg and "var(--c0)" in svg
    assert not any(colour.lower() in svg for colour in plots.COLOURS) and plots._INK not in svg
    assert all(text.count(f"--c{i}: {colours[i]}") == 1 for colours in (plots.COLOURS, plots.DARK) for i in range(8))


def test_drawing_leaves_matplotlib_as_it_was(run):
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "mine"}):
        before = dict(matplotlib.rcParams)
        drawn(run("one"))
        assert dict(matplotlib.rcParams) == before
