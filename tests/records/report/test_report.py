"""The report of whatever is in a run folder: right numbers, nothing executable, nothing fetched."""

from __future__ import annotations

import json
import re

import pytest

from psigrad.errors import UserError
from psigrad.records import report
from psigrad.records.read import load, load_all
from psigrad.records.report.verdict import verdict


def test_the_page_runs_nothing_and_fetches_nothing(run, page):
    path = report.write([run("one")])
    text = path.read_text(encoding="utf-8")
    found = page(text)
    assert found.dangers() == []
    assert "http://" not in text.replace(r"src=http://x.y/z", "") and "https://" not in text
    assert ("http-equiv", "Content-Security-Policy") in found.attributes and "default-src 'none'" in text
    assert any("<script>alert(1)</script></style></td>" in data for data in found.text)
    assert "\x00" not in text and "\u202e" not in text and "\\ud800\\x00\\u202e" in text


def test_negative_control_the_reader_of_pages_sees_dangers(page):
    bad = "<script></script>", "<a href=http://x>", "<p onclick=x>", "<p style='background:url(//x)'>", "<img src=x>"
    assert all(page(text).dangers() for text in bad)
    assert page("<svg><use href='#a' style='clip-path: url(#b)'/></svg>").dangers() == []


def test_long_texts_are_cut_with_a_count_and_the_page_stays_small(run, page):
    folder = run("one")
    with (folder / "rollouts.jsonl").open("ab") as stream:
        for step in (0, 15, 30):
            row = {"step": step, "kind": "eval", "row": 5, "k": 0, "prompt": "p", "completion": "A" * 1_000_000, "reward": 0.5}
            stream.write(json.dumps(row).encode() + b"\n")
    text = report.write([folder]).read_text()
    assert len(text) < 250_000
    assert " ".join(page(text).text).count("A" * 600 + " … 999,400 more characters") == 3


def test_the_headline_is_the_first_and_the_last_evaluation(run, page):
    table = page(report.write([run("one")]).read_text()).tables[0]
    assert table[0] == ["held-out", "step 0", "step 30", "95 % interval"]
    assert ["exact", "0.25", "0.75", "0.65 to 0.85"] in table and ["KL to the starting model, nats", "0", "3", ""] in table


def test_the_verdict_stands_on_top_with_intervals_divergence_and_warnings(run, page):
    text = report.write([run("one")]).read_text()
    said = "held-out exact 0.25 [0.15, 0.35] → 0.75 [0.65, 0.85]; KL to the start 3 nats per completion; 1 earlier warning"
    assert str(verdict(load(run("two")))) == f"Learned: {said}"
    assert text.index(said) < text.index("<table")


@pytest.mark.parametrize(
    ("after", "word"), [((0.39, 0.29, 0.49), "No clear change"), ((0.40, 0.30, 0.50), "Learned"), ((0.1, 0.0, 0.2), "Got worse")]
)
def test_it_learned_where_the_rise_is_more_than_chance(tmp_path, after, word):
    """Without completions the evaluations count as independent: from 0.25 ± 0.1, chance explains sqrt(0.1² + 0.1²) = 0.1414."""
    rows = [(0, 0.25, 0.15, 0.35), (9, *after)]
    lines = [{"step": s, "eval/m/mean": m, "eval/m/low": low, "eval/m/high": high} for s, m, low, high in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdict(load(tmp_path)).judgement == word


def test_the_verdict_of_a_run_says_how_it_ended(run):
    folder = run("one")
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": 1.7e9 + 5, "kind": "failed", "reason": "ValueError: no", "traceback": "line 7"}) + "\n")
    assert str(verdict(load(folder))).startswith("Failed: ValueError: no; held-out exact 0.25")
    assert "Why it failed" in report.write(folder).read_text()
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time": 1.7e9 + 6, "kind": "stopped", "step": 12}) + "\n")
    assert str(verdict(load(folder))).endswith("stopped at step 12, before its end")
    assert "Why it failed" not in report.write(folder).read_text()


ACCURACY = [f"eval/accuracy{part}" for part in ("", "/low", "/high")]
ORDERED = [f"eval/rewards/accuracies{part}" for part in ("", "/low", "/high")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "Nothing to judge yet: no warnings"),
        ([{"step": s, "reward": s / 10} for s in range(1, 31)], "Not evaluated: reward of training 0.2 → 2.9; no held-out rows"),
        ([{"step": 0, "eval/a/mean": 0.5}], "Evaluated once: held-out a 0.5; no warnings"),
        ([{"step": s, "eval/loss": 2.0 - s} for s in (0, 1)], "Trained: held-out loss 2 → 1; no warnings"),
        (
            [
                {"step": s, "eval/loss": 2.0 - s} | dict(zip(ACCURACY, (0.5 + s / 4, 0.4 + s / 4, 0.6 + s / 4), strict=True))
                for s in (0, 1)
            ],
            "Learned: held-out accuracy 0.5 [0.4, 0.6] → 0.75 [0.65, 0.85]; no warnings",
        ),
        (
            [{"step": s, "eval/loss": 2.0 - s} | dict(zip(ORDERED, (0.5, 0.4, 0.6 + s / 8), strict=True)) for s in (0, 1)],
            "No clear change: held-out accuracy 0.5 [0.4, 0.6] → 0.5 [0.4, 0.725]",
        ),
        (
            [{"step": s} | dict(zip(ORDERED, pair, strict=True)) for s, pair in enumerate(((0.5,) * 3, (0.62, 0.52, 0.72)))],
            "No clear change: held-out accuracy 0.5 → 0.62 [0.52, 0.72]",
        ),
        ([{"step": s, "eval/a/mean": "NaN"} for s in (0, 1)], "Unknown: held-out a – → –"),
    ],
)
def test_without_two_evaluations_it_says_what_there_is(tmp_path, rows, said):
    (tmp_path / "config.json").write_text('{"recipe": "online"}')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert str(verdict(load(tmp_path))).startswith(said)


def judged(folder, before, after, *, key="eval/m/mean", events=(), **beside):
    """The verdict of a run with these two evaluations: (mean, low, high)."""
    stem = key.removesuffix("/mean")
    rows = [{"step": s, key: m, f"{stem}/low": a, f"{stem}/high": b, **beside} for s, (m, a, b) in enumerate((before, after))]
    (folder / "config.json").write_text('{"recipe": "online"}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return verdict(load(folder))


PAIRED = "eval/rewards/accuracies"


def test_four_pairs_that_were_ties_are_no_verdict(tmp_path):
    """DPO, one step, four held-out pairs: 4 of 4 has Wilson's interval [0.51, 1], and a coin throws it once in sixteen."""
    started = {"time": 1.0, "kind": "started", "step": 0, "eval_rows": 4}
    found = judged(tmp_path, (0.5,) * 3, (1.0, 0.51, 1.0), key=PAIRED, events=[started])
    said = "Too few to judge: held-out accuracy 0.5 → 1 [0.51, 1]; only 4 held-out rows, and a verdict needs 10"
    assert str(found).startswith(said) and found.mood == "plain"
    many = judged(tmp_path, (0.5,) * 3, (1.0, 0.93, 1.0), key=PAIRED, events=[started | {"eval_rows": 50}])
    assert many.judgement == "Learned"  # negative control: 50 of 50 is no coin
    still = judged(tmp_path, (0.5,) * 3, (0.5,) * 3, key=PAIRED, events=[started | {"eval_rows": 50}])
    assert still.judgement == "No verdict"


@pytest.mark.parametrize("stem", ["eval/accuracy", PAIRED])
def test_held_out_pairs_are_compared_one_by_one(stem, tmp_path):
    """20 of 40 are right before; 8 more are right after. d̄ = 0.2, s = 0.405, t(39) = 2.023: 0.2 ± 0.13.

    The two accuracies alone are 0.5 [0.352, 0.648] and 0.7 [0.546, 0.819], 0.2 ± 0.21.
    """

    def of(*marks):
        rows = [
            {"step": s, stem: share, f"{stem}/low": low, f"{stem}/high": high, f"held_out/{stem[5:]}/pairs": text}
            for s, (share, low, high, text) in enumerate(zip((0.5, 0.7), (0.352, 0.546), (0.648, 0.819), marks, strict=True))
        ]
        (tmp_path / "config.json").write_text('{"recipe": "reward"}')
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return verdict(load(tmp_path))

    before = "1" * 20 + "0" * 20
    found = of(before, "1" * 28 + "0" * 12)
    assert str(found).startswith(
        "Learned: held-out accuracy 0.5 [0.352, 0.648] → 0.7 [0.546, 0.819]; change +0.2 [+0.0704, +0.33] "
    )
    assert "change +0.2 [+0.0704, +0.33] over 40 pairs" in found.evidence
    for other in ("1" * 28, "1" * 28 + "x" * 12, None, 7):
        assert of(before, other).judgement == "No clear change", "negative control: marks that do not match count as independent"
    turned = of(before, "0" * 12 + "1" * 28)  # the same accuracies: 20 turned right and 12 wrong, 0.2 ± 0.29
    assert turned.judgement == "No clear change"


@pytest.mark.parametrize(
    ("prompts", "unscored", "word"), [(9, 0, "Too few to judge"), (10, 0, "Learned"), (12, 3, "Too few to judge")]
)
def test_a_verdict_takes_ten_scored_prompts(tmp_path, prompts, unscored, word):
    beside = {"eval/prompts": prompts, "eval/unscored": unscored}
    assert judged(tmp_path, (0.1, 0.0, 0.2), (0.9, 0.8, 1.0), **beside).judgement == word


def test_intervals_without_a_width_judge_nothing(tmp_path):
    assert judged(tmp_path, (0.1,) * 3, (0.9,) * 3).judgement == "No verdict"
    # where one of them has a width, the other is held to be as uncertain: 0.2 is within sqrt(0.15² + 0.15²), 0.3 is not
    assert judged(tmp_path, (0.1,) * 3, (0.3, 0.15, 0.45)).judgement == "No clear change"
    assert judged(tmp_path, (0.1,) * 3, (0.4, 0.25, 0.55)).judgement == "Learned"


def test_the_verdict_has_the_figure_of_each_reward_function(tmp_path):
    found = judged(tmp_path, (0.1, 0.0, 0.2), (0.9, 0.8, 1.0), **{"eval/rewards/a/mean": 0.25, "eval/rewards/b_c/mean": 0.5})
    assert "→ 0.9 [0.8, 1]; a 0.25 → 0.25, b_c 0.5 → 0.5;" in str(found)


def test_the_page_says_when_how_long_by_what_command_and_where(run, page):
    folder = run("one")
    machine = {"processor": "a processor", "cores": 2, "threads": 1, "versions": {"psigrad": "9.9", "torch": "2.0"}}
    lives = [
        {"time": 1.7e9, "kind": "started", "step": 0, "command": "psigrad grpo --x '<b>'", "machine": machine},
        {"time": 1.7e9 + 50, "kind": "saved", "step": 9},
        {"time": 1.8e9, "kind": "resumed", "step": 9, "command": "psigrad grpo --x '<b>'", "machine": machine}
        | {"instructions": "AMX tiles"},
        {"time": 1.8e9 + 20, "kind": "finished"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lives))
    text = " ".join(page(report.write(folder).read_text()).text)
    assert "2023-11-14 22:13:20 UTC, resumed once" in text
    assert "1 min 10 s, of which 1 min 0 s in steps and evaluations" in text
    assert "psigrad grpo --x '<b>'" in text and "psigrad 9.9, torch 2.0" in text
    assert "a processor, 2 cores, 1 thread, AMX tiles" in text


def test_conversations_are_shown_as_messages(run, page):
    folder = run("one")
    parts = [{"type": "text", "text": "Look"}, {"type": "image"}]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    prompt = [
        {"role": "system", "content": "Be <brief>."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    with (folder / "rollouts.jsonl").open("a") as stream:
        for step, reward in ((0, 0.0), (15, 0.0), (30, 1.0)):
            row = {"step": step, "kind": "eval", "row": 77, "k": 0, "prompt": prompt, "completion": "x", "reward": reward}
            stream.write(json.dumps(row) + "\n")
    text = report.write(folder).read_text()
    assert '<span class="role">system</span>Be &lt;brief&gt;.' in text and "{&#39;role&#39;" not in text
    assert '<span class="role">user</span>Look\n[image]' in text and '<span class="role">assistant</span>add(a=1)' in text


# What a page cuts: boxes that must be scrolled sideways, text that leaves its box or the page, labels beyond their picture.
CUT = """() => { const found = [], out = (e, box) => { const r = e.getBoundingClientRect();
    if (r.width && (r.right > box.right + 1 || r.left < box.left - 1)) found.push(e.textContent.trim().slice(0, 60)); };
  document.querySelectorAll('details').forEach(e => e.open = true);
  const page = {left: 0, right: document.documentElement.clientWidth};
  document.querySelectorAll('body, body *:not(svg *)').forEach(e => {
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1) found.push(`${e.tagName}: ${e.textContent.trim().slice(0, 60)}`);
    out(e, page); });
  document.querySelectorAll('svg text').forEach(e => out(e, e.closest('svg').getBoundingClientRect()));
  return found; }"""


def test_on_a_phone_nothing_is_cut(run, visits):
    long = {name: f"{name}_reward_of_a_name_that_nobody_made_shorter" for name in ("format", "accuracy")}
    alone, compared = run("one", reward=[f"module.py:{name}" for name in long.values()]), [run("a"), run("b", lag=3)]
    rows = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()[:-1]]
    for row in rows:
        for i, name in enumerate(long.values()):
            if "reward" in row:
                row |= {f"rewards/{name}/mean": row["step"] / 30 - i, f"rewards/{name}/std": 0.1}
            else:
                row |= {f"eval/{name}/{end}": x for end, x in (("mean", -0.1234), ("low", -0.1234567891), ("high", -0.1234))}
    (alone / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages = report.write(compared, run("c") / "two.html").as_uri(), report.write([alone]).as_uri()
    for scheme in ("light", "dark"):
        page = visits.page("phone", scheme)
        for where in pages:
            page.goto(where)
            assert page.evaluate(CUT) == []
    for name in long.values():
        assert page.locator("figcaption", has_text=name).is_visible()
        assert page.locator("tr", has_text=name).filter(has_text="-0.1235 to -0.1234").is_visible()
    # what finds nothing would find a table that is too wide
    page.evaluate("() => { document.querySelector('table').style.width = '500px'; }")
    assert page.evaluate(CUT)


def test_pictures_of_a_row_begin_at_one_height(run, visits):
    page = visits.page("laptop")
    page.goto(report.write([run("one")]).as_uri())
    tops = page.evaluate("[...document.querySelectorAll('figure svg')].map(e => Math.round(e.getBoundingClientRect().top))")
    assert len(tops) > 3 and len(set(tops[:3])) == 1


def test_a_run_evaluated_once_has_one_column(tmp_path, page):
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "eval/exact/mean": 0.5, "eval/pass@4": 0.75}\n')
    table = page(report.write(tmp_path).read_text()).tables[0]
    assert table == [["held-out", "step 9", "95 % interval"], ["exact", "0.5", ""], ["pass@4", "0.75", ""]]


def test_a_summary_takes_the_place_of_the_headline(run, page):
    folder = run("one")
    figures = [
        {"name": "accuracy", "value": 0.9, "low": 0.8, "high": 1.0, "unit": ""},
        {"name": "tokens", "value": 1234567, "unit": "each"},
    ]
    (folder / "summary.json").write_text(json.dumps({"rows": [*figures, {"name": "odd", "value": "x", "low": None}, 3]}))
    table = page(report.write([folder]).read_text()).tables[0]
    assert table[1:] == [["accuracy", "0.9", "0.8 to 1"], ["tokens, each", "1,234,567", ""], ["odd", "–", ""]]


def test_completions_of_the_same_prompt_stand_side_by_side_with_their_verdicts(run, page):
    found = page(report.write([run("one")]).read_text())
    table = next(table for table in found.tables if table[0][0] == "prompt")
    assert table[0] == ["prompt", "step 0", "", "step 15", "", "step 30", ""]
    assert [(re.findall(r"row (\d) at (\d+)", " ".join(row)), row[2], row[4], row[6]) for row in table[1:]] == [
        ([("0", "0"), ("0", "15"), ("0", "30")], "✗", "✗", "✓"),
        ([("1", "0"), ("1", "15"), ("1", "30")], "✓", "✓", "✗"),
        ([("3", "0"), ("3", "15"), ("3", "30")], "✗", "✓", "✓"),
        ([("2", "0"), ("2", "15"), ("2", "30")], "✓", "✓", "✓"),
    ]
    said = "Of 4 held-out prompts, 2 went from wrong to right and 1 from right to wrong; 1 were right and 0 wrong both times."
    assert said in " ".join(found.text)


def test_completions_without_a_score_are_counted_by_reason(run, page):
    found = page(report.write([run("one")]).read_text())
    table = next(table for table in found.tables if table[0] == ["", "count", "reason"])
    assert len(table) == 2 and table[1][:2] == ["unscored", "2"] and table[1][2].startswith("time-out [bold]<script>")


def test_settings_other_than_the_defaults_are_named(run, page):
    found = page(report.write([run("two", num_generations=16)]).read_text()).tables
    chosen = next(table for table in found if ["optim.learning_rate", "0.125"] in table)
    assert ["num_generations", "16"] in chosen and "algorithm" not in {name for name, *_ in filter(None, chosen)}
    found = page(report.write([run("one")]).read_text()).tables
    assert not any(["num_generations", "8"] in table for table in found)  # 8 is the default


def test_three_runs_are_compared(run, tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    path = report.write([run("a"), run("b", 0.1), run("c", -0.2, num_generations=16)])
    assert path.resolve() == tmp_path / "report.html"
    found = page(path.read_text())
    assert found.dangers() == []
    weights = [0.9 ** (30 - step) for step in range(1, 31)]
    mean = sum(w * step / 30 for w, step in zip(weights, range(1, 31), strict=True)) / sum(weights)
    figures = found.tables[0]
    assert figures[0] == ["run", "", "steps", "held-out exact", "95 % interval", "reward (smoothed)", "KL", "seconds"]
    for row, name, shift in zip(figures[1:], "abc", (0, 0.1, -0.2), strict=True):
        low, high = 0.65 + shift, 0.85 + shift
        final = ["30", f"{0.75 + shift:.4g}", f"{low:.4g} to {high:.4g}", f"{mean + shift:.4g}", "3", "60"]
        assert [row[0], *row[2:]] == [name, *final]
    assert found.tables[1] == [["", "a", "b", "c"], ["num_generations", "8", "8", "16"]]


def test_runs_in_folders_of_the_same_name_are_told_apart(run):
    assert [r.name for r in load_all([run("seed0/grpo"), run("seed1/grpo")])] == ["seed0/grpo", "seed1/grpo"]
    assert [r.name for r in load_all([run("x/left"), run("x/right")])] == ["left", "right"]


def test_runs_of_other_code_are_told_apart(run, page):
    folders = [run(name) for name in ("a", "b", "c")]
    for folder, digest in zip(folders, ("1" * 64, "1" * 64, "2" * 64), strict=True):
        with (folder / "events.jsonl").open("a") as stream:
            stream.write(json.dumps({"time": 1.7e9, "kind": "started", "step": 0, "code": {"reward": digest}}) + "\n")
    found = page(report.write(folders, folders[0] / "two.html").read_text()).tables
    assert ["code of reward", "1" * 12, "1" * 12, "2" * 12] in found[1]
    found = page(report.write(folders[:2], folders[0] / "two.html").read_text()).tables
    assert not any("code of reward" in row for table in found for row in table)


def test_series_leave_out_what_is_not_finite(run):
    data = load(run("one"))
    steps, values = data.series("grad_norm")
    assert steps == [s for s in range(1, 31) if s != 7] and set(values) == {1.0}
    assert data.series("reward")[0][-1] == 30
    assert data.held_out_metric == "eval/exact"
    assert [row["step"] for row in data.evaluations] == [0, 15, 30]


def test_rows_without_a_step_are_left_out(tmp_path):
    steps = (True, -1, 10**30, "1", None, 1.5, 4)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "reward": 1.0}) + "\n" for s in steps))
    assert load(tmp_path).metrics == [{"step": 4, "reward": 1.0}]


def test_reading_again_by_place_finds_the_rows_of_three_evaluations(run):
    data = load(run("one"))
    assert list(data.samples) == [0, 15, 30] and list(data.samples[15]) == ["0", "1", "2", "3"]
    assert data.samples[15]["2"].completion.endswith("row 2 at 15") and data.samples[30]["1"].reward == 0.0
    assert data.rewards == {s: [float(s > 10)] for s in range(1, 31)}


EVAL = {"step": 1, "eval/a/mean": 0.5, "eval/a/low": 0.0, "eval/a/high": 1.0}
ODD_ROLLOUT = {"step": 1, "kind": "eval", "row": [1], "prompt": [7, {"role": "user"}], "status": "failed", "reason": ["x"]}
ODD_NAMES = {"eval/\ud800{x}$a$/mean": 0.5, "rewards/\ud800/mean": 1.0, "rewards/$/mean": 1}
BAD = {
    "bounds that are no numbers": {"metrics": [EVAL, {**EVAL, "step": 2, "eval/a/low": "NaN", "eval/a/high": None}]},
    "numbers too large": {"metrics": [b'{"step": 1, "reward": 1%s}' % (b"0" * n) for n in (400, 5000)] + [EVAL]},
    "overflow of axes": {"metrics": [{"step": 1, "reward": 1e308}, {"step": 2, "reward": -1e308}]},
    "deep nesting": {"metrics": [b"[" * 200_000, EVAL]},
    "phases": {"timings": [{"step": s, **{f"time/{i}": v for i in range(12)}} for s, v in enumerate((None, "x", 1.0, 2.0))]},
    "odd names": {"metrics": [{"step": s, **ODD_NAMES} for s in (1, 2)]},
    "odd rollouts": {"rollouts": [{**ODD_ROLLOUT, "completion": None, "reward": "NaN"}, {"step": 2}]},
    "an odd configuration": {"config": '{"recipe": 7, "model": "qwen", "algorithm": [], "reward": "x"}', "metrics": [EVAL]},
    "a configuration that is none": {"config": "[]", "metrics": [EVAL]},
    "an odd summary": {"summary": '{"rows": 5}'},
    "bytes": {"metrics": [b"\xff\x00\xfe", EVAL]},
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_run_gets_a_page_alone_and_in_comparison(name, tmp_path, run, page):
    content = dict(BAD[name])
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text(content.pop("config", '{"recipe": "online"}'))
    (folder / "summary.json").write_text(content.pop("summary", "{}"))
    for file, lines in content.items():
        joined = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        (folder / f"{file}.jsonl").write_bytes(joined + b"\n")
    for folders in ([folder], [folder, run("good")]):
        text = report.write(folders, tmp_path / "page.html").read_text(encoding="utf-8")
        assert page(text).dangers() == [] and ">nan<" not in text


@pytest.mark.parametrize("content", [None, "", "{", '{"step": "x"}\n[]\n'])
def test_a_run_that_has_hardly_begun_still_gets_a_page(tmp_path, content):
    (tmp_path / "config.json").write_text('{"recipe": "sft"}')
    if content is not None:
        for name in ("metrics", "timings", "rollouts", "events"):
            (tmp_path / f"{name}.jsonl").write_text(content)
    assert "Curves need at least two steps" in report.write([tmp_path]).read_text()


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        report.write([tmp_path])
    with pytest.raises(UserError, match="There is no folder"):
        report.write([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="No run was named"):
        report.write([])


def test_an_output_that_cannot_be_written_is_one_sentence_and_leaves_nothing(run, tmp_path):
    folder = run("one")
    with pytest.raises(UserError, match="The report cannot be written to"):
        report.write([folder], tmp_path / "missing" / "report.html")
    (folder / "taken").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=r"cannot be written to .*taken: Is a directory"):
        report.write([folder], folder / "taken")
    assert sorted(folder.iterdir()) == before


def test_a_report_only_reads_and_says_the_same_twice(run):
    folder = run("one")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    first = report.write(folder).read_bytes()
    assert report.write(folder).read_bytes() == first
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "report.html"} == before


def test_what_a_large_run_keeps_is_said_and_how_to_have_less(tmp_path):
    from psigrad.records.report.terminal import describe_disk_use

    for name, size in (("model/w", 90_000_000), ("model/adapter/w", 30_000_000), ("checkpoints/step-1/w", 1_500_000_000)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)  # a hole: nothing is written
    said = describe_disk_use(tmp_path)
    assert "120 MB in model/ (the adapter alone is 30 MB: --lora-save adapter), 1.5 GB in checkpoints/" in said
    (tmp_path / "checkpoints/step-1/w").unlink()
    (tmp_path / "model/w").unlink()
    assert describe_disk_use(tmp_path) == ""
