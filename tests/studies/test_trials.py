"""Experiments that train: figures of runs by hand, verdicts, and quick forms of the whole."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace

import psutil
import pytest
from timing import until

from psigrad import cli
from psigrad.config import Run, SFTConfig
from psigrad.errors import UserError
from psigrad.intervals import Interval
from psigrad_extras import experiments as experiment
from studies import rewards, trials
from studies.claims import action_space, dynamic_sampling, false_alarms, loopholes, methods
from studies.settings import LoopholeSettings, MethodsSettings, NoiseSettings, SpaceSettings, TrialSettings

SMALL = ["--steps", "3", "--sft-steps", "20", "--words", "300", "--held-out", "20", "--processes", "1"]
ROWS = [
    {"step": 0, "eval/exact/mean": 0.2},
    {"step": 1, "reward": 0.1, "samples": 8, "groups": 4, "prompts": 4},
    {"step": 2, "reward": 0.3, "samples": 24, "groups": 4, "prompts": 12},
    {"step": 2, "eval/exact/mean": 0.6},
    {"step": 4, "reward": 0.5, "samples": 8, "groups": 4, "prompts": 4},
    {"step": 4, "eval/exact/mean": 0.8},
]


def test_figures_of_a_run_by_hand():
    assert trials.curve(ROWS) == {0: 0.2, 2: 0.6, 4: 0.8}
    assert trials.area(ROWS) == pytest.approx(0.7)
    assert trials.last(ROWS) == 0.8 and math.isnan(trials.last(ROWS, "nothing"))
    assert trials.mean_of(ROWS, "reward") == pytest.approx(0.3) and math.isnan(trials.mean_of(ROWS, "nothing"))


def test_samples_until_a_level_lie_on_the_line_between_two_measurements():
    assert methods.samples_to(ROWS, 0.5, 10) == pytest.approx(10 * 1.5)
    assert methods.samples_to(ROWS, 0.9, 10) == 40 and methods.samples_to(ROWS, 0.1, 10) == 0


def test_the_area_over_samples_ends_where_all_groups_would_have_drawn_theirs():
    """Four prompts with two completions each: 8 samples a step, 32 in all; 32 are drawn by step 2, at 0.6."""
    assert dynamic_sampling.by_samples(ROWS) == pytest.approx(0.6)
    cheap = [{**row, "samples": 8, "prompts": 4} if "samples" in row else row for row in ROWS]
    assert dynamic_sampling.by_samples(cheap) == pytest.approx((16 * 0.6 + 8 * 0.8) / 32), "and what is missing counts nothing"


def test_a_run_exploits_where_the_proxy_rises_and_the_truth_falls():
    rising, falling = [0.1] * 10 + [0.9] * 10, [0.9] * 10 + [0.1] * 10
    truth = [(0, 0.3), (5, 0.5), (10, 0.3), (20, 0.2)]
    assert loopholes.fall(rising, truth) == 10
    assert loopholes.fall(falling, truth) is None, "a run that collapses exploits nothing"
    assert loopholes.fall(rising, [(0, 0.3), (5, 0.2), (10, 0.6)]) is None, "it recovered"


def arm(name: str, *values: float) -> trials.Arm:
    rows = {(name, seed): [{"step": seed, "eval/exact/mean": value}] for seed, value in enumerate(values, start=1)}
    return trials.summarize(name, range(1, len(values) + 1), rows, {"end": trials.last})


def test_a_verdict_is_that_of_the_paired_interval():
    low, high, wide = arm("low", 0.1, 0.2, 0.3), arm("high", 0.2, 0.31, 0.39), arm("wide", 0.0, 0.9, 0.1)
    assert trials.compare("c", high, low, "end").verdict == "holds"
    assert trials.compare("c", low, high, "end").verdict == "does not hold"
    assert trials.compare("c", wide, low, "end").verdict == "undecided"
    assert trials.compare("c", low, high, "end", least=-0.2).verdict == "holds", "not worse by more than 0.2"
    assert trials.compare("c", arm("one", 0.9), arm("two", 0.1), "end").verdict == "undecided", "one seed says nothing"
    assert high.steps == (2,) and high.curve[0].mean == pytest.approx(0.3), "evaluations are joined by their order"


def test_flawed_rewards_pay_what_they_say():
    answer, said = ["tac", "tac", "tac"], ["tac", "taccc", "eeee"]
    assert rewards.longer(said, answer) == [4.0, 5.0, 4.0]
    assert rewards.copied(said, answer) == [4.0, 5.0, 0.0]
    assert rewards.liked(said, answer) == [1.0, 0.0, 4.0]
    assert rewards.form(said, answer) == [0.5, 0.5, pytest.approx(1 / 6)]
    assert rewards.shallow(said, answer) == pytest.approx([0.7, 0.5, -0.4])


def test_noise_is_a_function_of_the_answer_and_has_its_deviation():
    prompts, said = ["p"] * 2000, [f"w{i}" for i in range(2000)]
    found = rewards.whole(prompts, said, ["x"] * 2000)
    assert found == rewards.whole(prompts, said, ["x"] * 2000) and len(set(found)) == 2000
    mean = sum(found) / 2000
    deviation = math.sqrt(sum((x - mean) ** 2 for x in found) / 1999)
    assert abs(mean) < 0.08 and abs(deviation - 1) < 0.05
    assert rewards.half(["p"], ["x"], ["x"])[0] - rewards.half(["p"], ["x"], ["y"])[0] == pytest.approx(1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trials")


def quick(name: str, folder, capsys, *more: str) -> str:
    """What a small form of an experiment prints, in 80 columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        assert cli.main(["experiment", name, *SMALL, *more, "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["findings"] and all(f["claim"].split()[0] in printed for f in found["findings"])
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "…" not in printed
    return printed


def test_runs_are_run_once(folder, capsys, monkeypatch):
    """In processes that are forked: those of an experiment import everything anew, as in `test_the_quick_form_of_every_claim`."""
    forks = multiprocessing.get_context("fork")
    monkeypatch.setattr(trials.multiprocessing, "get_context", lambda kind: forks)
    tiny = ("--seeds", "1", "--steps", "2", "--prompts", "4", "--generations", "2", "--sft-steps", "4")
    first = quick("dynamic_sampling", folder, capsys, *tiny)
    monkeypatch.setattr(trials.ProcessPoolExecutor, "submit", None)
    assert quick("dynamic_sampling", folder, capsys, *tiny).split("Dynamic")[1] == first.split("Dynamic")[1]
    assert cli.main(["experiment", "dynamic_sampling", *SMALL, *tiny, "--learning-rate", "0.1", "--out", str(folder)]) == 2
    assert re.search("holds a run with other settings; give another --out", capsys.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("methods", "lambda", "noise", "length", "difficulty", "clip_higher", "dpo"),
        *("action_space", "loopholes", "false_alarms"),
    ],
)
def test_the_quick_form_of_every_claim(name, folder, capsys):
    more = {
        "lambda": ["--timesteps", "2000"],
        "methods": ["--rates", "1e-3"],
        "noise": ["--rates", "1e-3"],
        "dpo": ["--sft-steps", "200"],
        "loopholes": ["--steps", "20", "--sft-steps", "200"],
    }
    printed = quick(name, folder, capsys, "--seeds", "2", *more.get(name, []))
    assert re.search("^(holds|does not hold|undecided): ", printed, re.MULTILINE)


@pytest.mark.long
def test_the_quick_form_of_memory(tmp_path, capsys):
    small = "--hidden 64 --layers 1 --vocabulary 256 --prompts 2 --generations 2 --completion-tokens 8 --steps 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        assert cli.main(["experiment", "memory", *small.split(), "--out", str(tmp_path)]) == 0
    printed, found = capsys.readouterr().out, json.loads((tmp_path / "memory.json").read_text())
    assert "…" not in printed and "RLOO takes less memory" in printed
    assert [row["name"] for row in found["rows"]] == ["RLOO", "GRPO", "PPO, 1 pass", "PPO, 4 passes"]
    assert all(row["peak_mb"] > 50 and row["seconds"] > 0 and row["predicted_mb"] > 50 for row in found["rows"])
    assert found["faster"]["PPO, 4 passes"] > 1 and (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_bound_is_held_by_the_far_end_of_the_interval():
    assert trials.against(Interval(0.02, 0.01, 0.04), 0.05, above=False) == "holds"
    assert trials.against(Interval(0.02, 0.01, 0.06), 0.05, above=False) == "undecided"
    assert trials.against(Interval(0.2, 0.1, 0.3), 0.05, above=False) == "does not hold"
    assert trials.against(Interval(1.0, 0.94, 1.0), 0.9, above=True) == "holds"
    assert trials.against(Interval(0.9, 0.8, 1.0), 0.9, above=True) == "undecided"


def test_alarms_are_counted_by_run():
    """Held-out accuracy falls for many evaluations while the reward rises: told; a run that only learns: not."""
    worse = [
        {"step": t, "reward": 0.3 + t / 100, "eval/exact/mean": 0.9 - t / 50, "eval/exact/low": 0.85 - t / 50} for t in range(30)
    ]
    better = [{**row, "eval/exact/mean": 0.3 + row["step"] / 50} for row in worse]
    found = false_alarms.row("honest RLOO", 1e-3, [better, worse, better, better])
    assert (found.runs, found.alarms, found.by_rule["apart"], found.by_rule["longer"]) == (4, 1, 1, 0)
    assert found.share.mean == 0.25 and found.share.low == pytest.approx(0.0456, abs=1e-4)
    (verdict,) = false_alarms.verdicts([found])
    assert verdict.test == "1 of 4 runs; share" and verdict.verdict == "undecided"
    # looked at twice: 1 of 123 has [0.0014, 0.0446] at 95 %, and [0.0012, 0.0537] at the 97.5 % of each look
    (verdict,) = false_alarms.verdicts([replace(found, runs=123)])
    assert verdict.verdict == "undecided" and verdict.difference.high == pytest.approx(0.0537, abs=1e-4)


def test_an_exploit_at_once_is_told_from_one_that_learns_first():
    """The truth falls from 0.5 with the first step while the reward rises; there it is noticed, and honest runs are not hacks."""
    hacked = [{"step": 0, "eval/exact/mean": 0.5, "eval/exact/low": 0.45}]
    hacked += [{"step": t, "reward": 1.0 + t, "eval/exact/mean": 0.1, "eval/exact/low": 0.07} for t in range(1, 21)]
    later = [{**row, "eval/exact/mean": 0.6, "eval/exact/low": 0.55} if row["step"] == 1 else row for row in hacked]
    falls = [{**row, "reward": -row["reward"]} if row["step"] else row for row in hacked]
    assert [false_alarms.exploits_at_once(rows) for rows in (hacked, later, falls)] == [True, False, False]
    found = false_alarms.row("length", 3e-3, [hacked, later, hacked, falls])
    assert (found.runs, found.exploited, found.noticed, found.alarms) == (4, 2, 2, 3)
    honest = false_alarms.row("honest RLOO", 1e-3, [falls])
    both = false_alarms.verdicts([honest, found])
    assert [verdict.test for verdict in both] == ["0 of 1 runs; share", "2 of 2 runs; share"]


def test_a_finished_run_is_known_by_its_settings_and_newer_ones_have_their_defaults(tmp_path):
    trial = trials.Trial("a", 0, "sft", SFTConfig(run=Run(max_steps=7)))
    identity = trials._identity(trial)
    mark = tmp_path / "trial.json"

    def done(found) -> bool:
        mark.write_text(json.dumps({"trial": found, "cpu_seconds": 1.0}))
        return trials._done(tmp_path, trial)

    assert not trials._done(tmp_path / "none", trial) and done(identity)
    older = {k: v for k, v in identity.items() if k != "batch_size"}
    assert done(older), "the run is older than a setting, which has its default now"
    for other in ({"batch_size": 99}, {"method": "dpo"}, {"gone": 1}):
        with pytest.raises(UserError, match="holds a run with other settings"):
            done({**identity, **other})


@pytest.mark.parametrize("torn", ["", "{", '{"trial": {"meth', "[1]", '{"trial": 3}'])
def test_a_torn_mark_is_of_a_run_that_is_to_be_asked_again(torn, tmp_path):
    (tmp_path / "trial.json").write_text(torn)
    assert not trials._done(tmp_path, trials.Trial("a", 0, "sft", SFTConfig(run=Run(max_steps=7))))
    (tmp_path / "runs" / "noise" / "a-0").mkdir(parents=True)
    (tmp_path / "runs" / "noise" / "a-0" / "trial.json").write_text(torn)
    assert trials.core_minutes(TrialSettings(out=str(tmp_path)), "noise") == 0.0


@pytest.mark.parametrize("ends", [trials._quiet, None], ids=["ends", "negative control"])
def test_the_processes_of_a_killed_experiment_end_with_it(ends, tmp_path):
    """A process that starts another as an experiment does, and is killed."""
    log, number = tmp_path / "log", tmp_path / "number"
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            if ends is not None:
                ends(log)
            number.write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    until(lambda: number.exists() and number.read_text() != "")
    child = psutil.Process(int(number.read_text()))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if ends is None:
        assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        child.kill()
    else:
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_completions_are_read_from_every_part_and_a_damaged_line_costs_no_other(tmp_path):
    folder, row = trials.place(TrialSettings(out=str(tmp_path)), "length", "a", 0), '{{"step": {}, "kind": "{}"}}\n'.format
    folder.mkdir(parents=True)
    (folder / "rollouts-00000002-2.jsonl").write_text(row(1, "train") + row(2, "train"))
    (folder / "rollouts.jsonl").write_text('{\n{"step": 3}\n' + row(3, "eval") + row(4, "train") + '{"step": 5, "ki')
    found = {kind: [row["step"] for row in trials.rollouts(TrialSettings(out=str(tmp_path)), "length", "a", 0, kind)]
             for kind in ("train", "eval")}  # fmt: skip
    assert found == {"train": [1, 2, 4], "eval": [3]}


def test_the_time_of_finished_runs_is_added_up(tmp_path):
    for name, seconds in (("noise/a-0", 30.0), ("noise-tuning/a-1000", 60.0), ("methods/a-0", 600.0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "trial.json").write_text(json.dumps({"trial": {}, "cpu_seconds": seconds}))
    assert trials.core_minutes(TrialSettings(out=str(tmp_path)), "noise") == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("noise", TrialSettings(seeds=0), "seeds is 0"),
        ("noise", TrialSettings(generations=1), "at least 2 completions"),
        ("methods", MethodsSettings(rates=()), "at least one learning rate"),
        ("noise", NoiseSettings(rates=(0.0,)), "at least one learning rate above 0"),
        ("methods", MethodsSettings(level=0.0), "between 0 and 1"),
        ("action_space", SpaceSettings(model=("x",)), "give both or neither"),
        ("action_space", SpaceSettings(model=("a/x/model", "b/x/model"), dataset="d"), "a/x/model, b/x/model have the same name"),
        ("noise", NoiseSettings(noises=(0.7,)), "noises are .0.7,.; expected only 0.5 and 1"),
        ("noise", NoiseSettings(methods=("RAFT", "PPO")), "methods are RAFT, PPO; expected RAFT and RLOO"),
        ("noise", NoiseSettings(betas=(0.0,)), "betas are .0.0,.; give numbers above 0"),
        ("loopholes", LoopholeSettings(processes=0), "processes is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, settings, message):
    with pytest.raises(UserError, match=message):
        experiment.find(name).module.check(settings)


def test_a_model_is_called_by_its_folder_or_run():
    names = ("runs/sums/grpo/model", "gpt2", "models/SmolLM2.Q4_1.gguf")
    assert [action_space.label(name) for name in names] == ["grpo", "gpt2", "SmolLM2.Q4_1"]


def test_places_of_a_completion_are_summed_up():
    rows = list(action_space.summary("m", {1: [((0.5, 0.7, 0.9), 1.0), ((0.7, 0.9, 1.0), 0.0)]}))
    assert rows[0].mass[0].mean == pytest.approx(0.6) and rows[0].effective == pytest.approx(math.exp(0.5))
