"""The lab: equal samples, what is measured, the page, resuming, and what is refused before anything runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from cases import repeat_for
from tiny_jobs import online_config
from warm import warm

from psigrad import cli
from psigrad.cli import flags
from psigrad.compat.foreign_names import load
from psigrad.config import Evaluation, Model, OnlineConfig, Run
from psigrad.config.methods import declaration, list_declarations
from psigrad.errors import UserError
from psigrad.intervals import over_seeds
from psigrad.paths import claim
from psigrad.records.report import terminal
from psigrad_extras.investigate import compare as page
from psigrad_extras.investigate import comparison as compare
from psigrad_extras.investigate.comparison import Comparison, settings_of, table


def config(job, output, **changes):
    made = online_config(job, output, max_steps=2, save_steps=0)
    evaluation = Evaluation(eval_prompts=4, eval_steps=1, eval_kl=True, metric="exact")
    return replace(made, reward=("similarity",), evaluation=evaluation, **changes)


@pytest.fixture(scope="module", params=[("rloo", "dpo"), pytest.param(("ppo", "kto"), marks=pytest.mark.slow)], ids="-".join)
def compared(request, job, tmp_path_factory):
    """An online method and one on pairs, on the tiny job, one seed."""
    folder = tmp_path_factory.mktemp("lab")
    comparison = Comparison(request.param, config(job, folder), (0,), str(job / "pairs.jsonl"))
    with warm():
        return comparison, compare.run(comparison)


def test_every_method_is_measured_on_the_same_held_out_prompts(compared):
    comparison, written = compared
    found = json.loads((written.parent / "compare.json").read_text())
    assert [run["method"] for run in found["runs"]] == list(comparison.methods)
    for run in found["runs"]:
        assert run["samples"] == 2 * 4 * 4, "two steps of 4 prompts with 4 completions, whatever the method"
        assert 0 <= run["truth"] <= 1 and math.isfinite(run["proxy"]) and run["kl"] >= -1e-6
        assert run["seconds"] > 0 and run["peak_mb"] > 100
        assert run["curve"][-1]["samples"] == 32
    assert found["runs"][0]["kl"] > 0, "negative control: the trained model is not the one it started from"
    html = written.read_text()
    assert f"minus {comparison.methods[0]}" in html
    assert "2 methods compared" in html and html.count("<svg") == 3 and "<script" not in html


@pytest.mark.parametrize("torn", ["", '{"method": "rl', '{"method": "rloo", "seed": 0}'])
def test_a_result_that_a_kill_has_torn_is_made_again(torn, compared, monkeypatch):
    class RanError(Exception):
        pass

    def ran(*given, **also):
        raise RanError

    comparison, written = compared
    place = compare._record(written.parent, comparison.methods[0], 0)
    whole = place.read_bytes()
    monkeypatch.setattr(compare.subprocess, "Popen", ran)
    try:
        place.write_text(torn)
        with pytest.raises(RanError):
            compare._finish(comparison, written.parent, comparison.methods[0], 0)
    finally:
        place.write_bytes(whole)
    compare._finish(comparison, written.parent, comparison.methods[0], 0)


def test_a_second_call_runs_nothing_again(compared, monkeypatch, capsys):
    comparison, written = compared
    before = written.read_text()
    monkeypatch.setattr(compare.subprocess, "Popen", lambda *a, **k: pytest.fail("it ran again"))
    shown = replace(comparison.config, run=replace(comparison.config.run, progress=True))
    assert compare.run(replace(comparison, config=shown)) == written and written.read_text() == before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        [f"compare {i}/2", f"{method} seed 0"] for i, method in enumerate(comparison.methods, 1)
    ]


def settled(job, folder, **changes):
    """A comparison all of whose results are there, as its processes leave them."""
    asked = replace(config(job, folder), **changes)
    comparison = Comparison(("rloo", "dpo"), asked, (0,), str(job / "pairs.jsonl"))
    (claim(folder, "compare") / "settings").mkdir()
    for method, seed in compare.list_jobs(comparison):
        found = {"method": method, "seed": seed, "curve": [], "process_seconds": 1.0, **dict.fromkeys(compare.FIGURES, 1.0)}
        (folder / "settings" / f"{method}-{seed}.json").write_text(json.dumps(compare._task(comparison, folder, method, seed)))
        compare._record(folder, method, seed).write_text(json.dumps(found))
    return comparison


def test_results_of_other_settings_are_refused(job, tmp_path, monkeypatch):
    monkeypatch.setattr(compare.subprocess, "Popen", lambda *a, **k: pytest.fail("it ran"))
    comparison = settled(job, tmp_path)
    written = compare.run(comparison)
    asked = comparison.config
    for name, other in {
        r"model\.path was '.*base' and is 'B'": replace(asked, model=Model(path="B")),
        r"run\.max_steps was 2 and is 3": replace(asked, run=replace(asked.run, max_steps=3)),
        r"algorithm\.kl was 'usual' and is None": replace(asked, algorithm={"preset": "rloo", "kl": None}),
        r"evaluation\.metric was 'exact' and is 'numeric'": replace(
            asked, evaluation=replace(asked.evaluation, metric="numeric")
        ),
    }.items():
        with pytest.raises(UserError, match=f"holds results of rloo, seed 0, with other settings .*{name}"):
            compare.run(replace(comparison, config=other))
    with pytest.raises(UserError, match=r"holds results of dpo, seed 0, .*pairs was '.*pairs.jsonl' and is 'other.jsonl'"):
        compare.run(replace(comparison, pairs="other.jsonl"))
    assert json.loads((tmp_path / "compare.json").read_text())["runs"][0]["truth"] == 1.0
    same = replace(asked, algorithm="dpo", micro_batch_tokens=7, run=replace(asked.run, progress=True, save_steps=1))
    assert compare.run(replace(comparison, methods=("dpo", "rloo"), config=same)) == written


def test_results_of_other_code_are_refused(job, tmp_path, monkeypatch):
    """The user's reward is edited between two seeds of one comparison: its settings stay, and its results do not."""
    (tmp_path / "mine").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    (own := tmp_path / "mine" / "edited_reward.py").write_text(
        "def good(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    comparison = settled(job, tmp_path / "lab", reward=("edited_reward:good",))
    config = comparison.config
    for method, seed in compare.list_jobs(comparison):
        place = compare._record(tmp_path / "lab", method, seed)
        code = compare.own_code(settings_of(comparison, tmp_path / "lab", method, seed), config)
        assert set(code) == {"reward"}
        place.write_text(json.dumps(json.loads(place.read_text()) | {"code": code}))
    compare.run(comparison)
    own.write_text(own.read_text().replace("1.0", "0.5"))
    with pytest.raises(UserError, match=r"a result of rloo, seed 0, from other code \(changed: reward\)"):
        compare.run(comparison)


def test_every_method_sees_as_many_completions_per_step(job, tmp_path):
    comparison = Comparison(("grpo", "ppo", "dpo", "kto"), config(job, tmp_path), (0,), "pairs.jsonl")
    made = {m: settings_of(comparison, tmp_path, m, 3) for m in comparison.methods}
    assert made["grpo"].prompts_per_step * made["grpo"].num_generations == 16
    assert made["dpo"].batch_size * 2 == made["kto"].batch_size == 16
    assert made["ppo"].num_iterations == 4 and made["grpo"].num_iterations == 1
    assert {m.run.seed for m in made.values()} == {3} and len({m.run.output_dir for m in made.values()}) == 4


def test_a_seed_that_is_given_twice_counts_once(job, tmp_path):
    comparison = Comparison(("ppo", "grpo", "ppo"), config(job, tmp_path), (1, 0, 1))
    assert compare.list_jobs(comparison) == [("ppo", 1), ("ppo", 0), ("grpo", 1), ("grpo", 0)]


@repeat_for("name", [name for name, method in list_declarations().items() if method.online])
def test_a_method_has_the_settings_of_its_command(name, tmp_path):
    """But for the number of samples per step, which is the same for every method."""
    method = declaration(name)
    typed = flags.parse(method.settings, name, ["--model", "m", "--reward", "exact"], defaults=method.defaults)
    asked = load(OnlineConfig, flags={"model.path": "m", "reward": ["exact"], "num_generations": 2})
    found = compare.settings_of(Comparison((name,), asked), tmp_path, name, 0)
    assert replace(found, run=Run()) == replace(typed, num_generations=2)


def test_intervals_are_students():
    assert over_seeds([2.0]) == (2.0, 2.0, 2.0)
    mean, low, high = over_seeds([1.0, 2.0, 3.0])
    assert (
        mean == 2.0 and high - mean == pytest.approx(4.303 / math.sqrt(3), abs=1e-3) and mean - low == pytest.approx(high - mean)
    )
    found = (("a", 0, 1.0), ("b", 1, 5.0), ("a", 1, 3.0))
    runs = [{"method": m, "seed": s, **dict.fromkeys(compare.FIGURES, v)} for m, s, v in found]
    assert [(row["method"], row["seeds"], row["truth"][0]) for row in table(runs)] == [("a", 2, 2.0), ("b", 1, 5.0)]


def test_methods_are_compared_seed_by_seed():
    """Seeds differ by up to 0.8 and methods by 0.1 on each: 0.11 ± 4.303·0.01/√3, where the means' own intervals span 2."""
    truths = {"rloo": (0.1, 0.5, 0.9), "ppo": (0.2, 0.61, 1.02), "dpo": (0.1,)}
    runs = [
        {"method": name, "seed": seed, **dict.fromkeys(compare.FIGURES, value)}
        for name, values in truths.items()
        for seed, value in reversed([*enumerate(values)])
    ]
    first, second, third = table(runs)
    assert "lead" not in first and third["lead"] == pytest.approx([0.0] * 3)
    assert second["lead"] == pytest.approx([0.11, 0.11 - 0.02484, 0.11 + 0.02484], abs=1e-4)
    assert second["truth"][1] < first["truth"][0] < second["truth"][2], "negative control: apart they tell nothing"
    head, lines = page.rows({"table": [first, second, third]})
    assert head[2] == "vs first" and [line[2] for line in lines] == ["", "0.11 [0.0852, 0.135]", "0"]


@pytest.mark.parametrize(
    ("methods", "changes", "said"),
    [
        ((), {}, "at least one method"),
        (("dpo",), {}, "--pairs"),
        (("grpoo",), {}, "grpo"),
        (("grpo",), {"num_generations": 1}, "at least 2"),
    ],
)
def test_mistakes_are_named_before_the_first_run(methods, changes, said, job, tmp_path):
    with pytest.raises(ValueError, match=said):
        compare.run(Comparison(methods, config(job, tmp_path, **changes), (0,)))
    assert not list(tmp_path.rglob("*.result.json"))


def test_without_steps_there_are_no_equal_samples(job, tmp_path):
    made = config(job, tmp_path)
    with pytest.raises(UserError, match="max-steps"):
        compare.run(Comparison(("grpo",), replace(made, run=replace(made.run, max_steps=0))))


def test_a_run_that_fails_is_named_with_its_reason(job, tmp_path):
    made = config(job, tmp_path)
    broken = replace(made, model=replace(made.model, path=str(tmp_path / "nowhere")))
    with warm(), pytest.raises(UserError, match="grpo, seed 0, failed: There is no folder"):
        compare.run(Comparison(("grpo",), broken, (0,)))


def test_the_command_line_takes_methods_seeds_and_every_online_setting(capsys, job, tmp_path):
    arguments = ["compare", "grpo", "--seeds", "1", "x", "--model", str(job / "base"), "--max-steps", "1"]
    assert cli.main(arguments) == 2
    assert "--seeds is 'x'" in capsys.readouterr().err
    with pytest.raises(UserError, match="psigrad compare"):
        page.write(tmp_path)


def test_compared_methods_are_a_table_with_intervals(tmp_path, capsys):
    row = {"proxy": [1.25, 1.0, 1.5], "kl": [2.0, 2.0, 2.0], "seconds": [1234.5, 1234.5, 1234.5]}
    table = [{"method": "reinforce_moving_average", "truth": [0.9, 0.85, 0.95]} | row]
    (tmp_path / "compare.json").write_text(json.dumps({"table": table}))
    terminal.print_table(*page.rows(page.read(tmp_path)))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert lines == [["reinforce_moving_average", "0.9 [0.85, 0.95]", "1.25 [1, 1.5]", "2", "1,234"]]


def test_compare_refuses_what_it_cannot_compare():
    asked = OnlineConfig(model=Model(path="m"), run=Run(max_steps=1))
    for name, sentence in (("sft", "sft is neither"), ("grop", "did you mean 'grpo'"), ("dpo", "--pairs")):
        with pytest.raises(UserError, match=sentence):
            compare.check(Comparison((name,), asked))
