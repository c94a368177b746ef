"""A GPU for a quarter of an hour: what is worth most comes first, goes on where it was cut off, and is written down at once."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import gpu_quarter_hour as script
import pytest
import torch
from gpu_quarter_hour import Options, Stage
from timed.workload import read


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """asked(minutes, faults): the stages that a call has run, each in a minute of a clock of its own."""
    clock = [0.0]
    page = tmp_path / "gpu.md"
    page.write_text("before\n<!-- measured -->\nold\n<!-- end of measured -->\nafter\n")
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(script, "HERE", tmp_path / "benchmarks")
    (tmp_path / "psigrad").mkdir()

    def run(minutes, faults=(), at="abc"):
        ran = []
        (tmp_path / "psigrad" / "code.py").write_text(at)

        def take(stage, options, seconds):
            ran.append(stage.name)
            clock[0] += min(60.0, seconds)
            return {"status": "failed" if stage.name in faults else "done", "seconds": 60.0, "figures": {"last": [stage.name]}}

        monkeypatch.setattr(script, "take", take)
        assert script.main(["--minutes", str(minutes), "--results", str(tmp_path / "found.jsonl"), "--page", str(page)]) == 0
        return ran, page.read_text()

    return run


def test_the_same_command_goes_on_and_what_failed_is_tried_once_more(asked, tmp_path):
    names = [stage.name for stage in script.STAGES]
    ran, page = asked(3.3, faults=names[1:2])
    assert ran == names[:3] and page.startswith("before") and page.endswith("after\n") and "old" not in page
    assert f"| {names[0]} | done" in page and f"| {names[1]} | failed" in page and names[3] not in page
    with (tmp_path / "found.jsonl").open("a") as stream:
        stream.write('{"stage": "fa')  # cut off in a line
    assert asked(4.5, faults=names[1:2])[0] == [names[1], *names[3:6]]
    ran, page = asked(20, faults=names[1:2])
    assert ran == names[6:] and f"| {names[-1]} | done" in page, "what failed twice is left"
    assert asked(20)[0] == []
    assert asked(20, at="def")[0] == names, "other code is measured again"


def test_a_stage_that_takes_too_long_is_ended_with_what_it_has_measured(tmp_path, monkeypatch):
    """A stand-in for the script notes a figure, starts a process of its own and waits."""
    file = tmp_path / "child.py"
    file.write_text(
        "import json, subprocess, sys, time\n"
        "open(sys.argv[sys.argv.index('--child') + 2], 'w').write(json.dumps({'half': 1}))\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(script, "__file__", str(file))
    begin = time.monotonic()
    found = script.take(Stage("facts", script.facts, 1, 1), Options("cpu", True), 3.0)
    assert found["status"] == "cut off" and found["figures"] == {"half": 1} and time.monotonic() - begin < 20
    state = script.Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    while state.exists() and "zombie" not in state.read_text():  # it has a signal already, which takes a moment
        assert time.monotonic() - begin < 20


def test_a_profiled_pass_adds_to_no_gradient_and_loads_no_kernels_for_cpus():
    """Four rows of ones: each weight has the gradient of one pass, 4, after all of them."""
    weight = torch.nn.Linear(3, 2)
    model = SimpleNamespace(network=weight, evaluate=lambda groups: SimpleNamespace(logp=weight(groups)))
    assert script.profiled(model, torch.ones(4, 3), Options("cpu", True))["kernels"] > 0
    assert weight.weight.grad.tolist() == [[4.0] * 3] * 2
    given = [script._environment(Options(device, True)).get("PSIGRAD_NATIVE") for device in ("cuda", "cpu")]
    assert given == ["0", os.environ.get("PSIGRAD_NATIVE")]


def test_the_figures_that_a_page_shows():
    ours, trl = {"seconds": 2.0, "gpu_peak_mb": 1000.0}, {"seconds": 6.0}
    beside = {"planned_mb": 1100.0, "beside": {"ours": ours, "trl": trl, "ratio": {"median": 3.0}}}
    assert script.summary(beside) == ["psigrad 2.00 s", "TRL 6.00 s, ratio 3.00", "peak 1,000 MB, planned 1,100"]
    cut = {"pairs": [{"ours_seconds": 1.0, "trl_seconds": 2.0}]}
    assert script.summary(cut) == ["psigrad 1.00 s, TRL 2.00 s"]
    assert script.summary({"eager": {"kernels": 83.0, "seconds": 0.002}}) == ["eager: 83 kernels, 2.00 ms a layer"]
    row = {"stage": "facts", "seconds": 1.0, "figures": {}}
    assert (
        script.latest([{**row, "code": "a", "status": "done"}, {**row, "code": "b", "status": "failed"}])["facts"]["code"] == "a"
    )


@pytest.mark.parametrize("shape", script.SHAPES)
def test_the_files_of_a_tiny_workload_are_made(shape, tmp_path):
    work = script.work_of(True, shape, 64, 0)
    script.files(Options("cpu", True), shape, work, tmp_path)
    assert {"model", "rows.jsonl", "work.json"} == {path.name for path in tmp_path.iterdir()}
    assert read(tmp_path)[0] == work


@pytest.mark.slow
def test_the_first_stage_takes_a_step_of_a_tiny_model(tmp_path):
    found = {}
    script.facts(Options("cpu", True), found.update)
    assert found["tiny_step"] > 0 and found["first_step"] > 0
