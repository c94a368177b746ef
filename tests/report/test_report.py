"""The report of whatever is in a run folder: right numbers, nothing executable, nothing fetched."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from psigrad import report
from psigrad.errors import UserError
from psigrad.report import plots, terminal
from psigrad.report.read import load

HOSTILE = "[bold]<script>alert(1)</script></style>\"'&\ud800\x00\u202e"


class Page(html.parser.HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.links, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action") and v]
        self.tags += [k for k, v in attrs if k.startswith("on")]

    def handle_data(self, data):
        self.text.append(data)


def rows(path, *items):
    path.write_bytes(b"".join(json.dumps(i).encode() + b"\n" for i in items))


@pytest.fixture
def run(tmp_path):
    """An online run of 30 steps, evaluated at 0, 15 and 30, with hostile completions, a torn last line and a NaN."""

    def make(name: str, shift: float = 0.0):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(
                {"recipe": "online", "algorithm": "grpo", "model": {"path": HOSTILE}, "prompts_per_step": 4, "num_generations": 8}
            )
        )
        metrics = []
        for step in range(31):
            if step:
                metrics.append(
                    {"step": step, "reward": step / 30 + shift, "grad_norm": "NaN" if step == 7 else 1.0, "entropy": 0.5}
                )
            if step % 15 == 0:
                value = 0.25 + step / 60 + shift
                metrics.append(
                    {
                        "step": step,
                        "eval/exact/mean": value,
                        "eval/exact/low": value - 0.1,
                        "eval/exact/high": value + 0.1,
                        "eval/kl": step / 10,
                    }
                )
        rows(folder / "metrics.jsonl", *metrics)
        with (folder / "metrics.jsonl").open("ab") as stream:
            stream.write(b'{"step": 31, "rew')
        rows(
            folder / "timings.jsonl",
            *({"step": s, "step_time": 2.0, "time/sample": 1.5, "time/update": 0.5} for s in range(1, 31)),
        )
        completion = {"kind": "eval", "k": 0, "prompt": HOSTILE, "status": "scored", "reason": ""}
        rows(
            folder / "rollouts.jsonl",
            *({"step": s, "row": 0, "completion": f"{HOSTILE} at {s}", "reward": s / 30, **completion} for s in (0, 15, 30)),
            {
                "step": 3,
                "row": 1,
                "kind": "train",
                "k": 0,
                "completion": "A" * 1_000_000,
                "status": "unscored",
                "reason": "time-out after 1 s",
            },
            {
                "step": 3,
                "row": 2,
                "kind": "train",
                "k": 0,
                "completion": "x",
                "status": "unscored",
                "reason": "time-out after 1 s",
            },
        )
        rows(folder / "events.jsonl", {"time": 1.7e9, "kind": "saved", "step": 5}, {"time": "NaN", "kind": HOSTILE})
        return folder

    return make


def test_the_page_runs_nothing_and_fetches_nothing(run):
    path = report.write([run("one")])
    text = path.read_text()
    page = Page(text)
    assert "script" not in page.tags and not any(t.startswith("on") for t in page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text
    assert any("<script>alert(1)</script></style>" in data for data in page.text)
    assert len(text) < 600_000


def test_the_headline_is_the_first_and_the_last_evaluation(run):
    page = " ".join(Page(report.write([run("one")]).read_text()).text)
    table = page[page.index("held-out") : page.index("Curves")]
    assert re.search(r"exact\s+0\.25\s+0\.75\s+0\.65 to 0\.85", " ".join(table.split()))
    assert re.search(r"kl\s+0\s+3\b", " ".join(table.split()))


def test_a_summary_takes_the_place_of_the_headline(run):
    folder = run("one")
    (folder / "summary.json").write_text(
        json.dumps({"rows": [{"name": "accuracy", "value": 0.9, "low": 0.8, "high": 1.0, "unit": ""}]})
    )
    page = " ".join(" ".join(Page(report.write([folder]).read_text()).text).split())
    assert "accuracy 0.9 0.8 to 1" in page


def test_completions_of_the_same_prompt_stand_side_by_side_and_troubles_are_counted(run):
    page = " ".join(Page(report.write([run("one")]).read_text()).text)
    assert [page.index(f"at {s}") for s in (0, 15, 30)] == sorted(page.index(f"at {s}") for s in (0, 15, 30))
    assert re.search(r"unscored\s+2\s+time-out after 1 s", page)


def test_series_leave_out_what_is_not_finite(run):
    data = load(run("one"))
    steps, values = data.series("grad_norm")
    assert 7 not in steps and len(steps) == 29 and set(values) == {1.0}
    assert data.series("reward")[0][-1] == 30
    assert data.held_out_metric == "eval/exact"
    assert [row["step"] for row in data.evaluations] == [0, 15, 30]


def test_three_runs_are_compared(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = report.write([run("a"), run("b", 0.1), run("c", -0.2)])
    assert path.resolve() == tmp_path / "report.html"
    page = " ".join(" ".join(Page(path.read_text()).text).split())
    for name, value in (("a", "0.75"), ("b", "0.85"), ("c", "0.55")):
        assert re.search(rf"\b{name} .{{0,400}}? 30 {value}", page)
    assert "60" in page  # 30 steps of 2 seconds


def test_the_moving_average_is_the_weighted_mean():
    values = [3.0, 1.0, 4.0]
    assert plots.smoothed(values, 0.5) == pytest.approx([3.0, (1.5 + 1) / 1.5, (0.75 + 0.5 + 4) / 1.75])
    assert plots.smoothed([2.0] * 50) == pytest.approx([2.0] * 50)


@pytest.mark.parametrize("content", [None, "", "{", '{"step": "x"}\n[]\n'])
def test_a_run_that_has_hardly_begun_still_gets_a_page(tmp_path, content):
    (tmp_path / "config.json").write_text('{"recipe": "sft"}')
    if content is not None:
        for name in ("metrics", "timings", "rollouts", "events"):
            (tmp_path / f"{name}.jsonl").write_text(content)
    assert "No step has been taken yet" in report.write([tmp_path]).read_text()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no run folder"):
        report.write([tmp_path])
    with pytest.raises(UserError, match="There is no folder"):
        report.write([tmp_path / "nowhere"])


def test_an_output_that_cannot_be_written_is_one_sentence(run, tmp_path):
    with pytest.raises(UserError, match="The report cannot be written to"):
        report.write([run("one")], tmp_path / "missing" / "report.html")


def test_the_terminal_shows_any_text_as_it_is(run, capsys):
    folder = run("one")
    terminal.before_and_after(folder)
    terminal.samples([HOSTILE], [HOSTILE * 50], [None])
    shown = capsys.readouterr().out
    assert "[bold]" in shown and "\x00" not in shown and "\ud800" not in shown and "\u202e" not in shown


def test_the_readme_figure_is_a_picture(run, tmp_path):
    path = plots.readme_figure([run("a"), run("b", 0.1)], tmp_path / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG")
