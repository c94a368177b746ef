"""What `psigrad doctor` says of a machine."""

from __future__ import annotations

import json
import mmap
import time
import tomllib
from pathlib import Path

import pytest
import torch

from psigrad import cli, extras
from psigrad.kernels.products import Products
from psigrad_extras.preflight import doctor
from psigrad_extras.preflight.doctor import Check
from psigrad_extras.preflight.plan import hardware


def looked():
    yield Check("GPU", "missing", "no CUDA device", "take another build")
    yield Check("a longer name", "ok", "fine")


def test_lines_are_aligned_and_advice_follows_what_is_not_well():
    text = doctor.report(looked=looked).splitlines()
    assert text[0] == "missing GPU            no CUDA device" and text[1].strip() == "take another build"
    assert text[2] == "ok      a longer name  fine" and len(text) == 3


def test_extras_that_are_missing_take_one_line():
    extras = [Check(f"extra {name}", "missing", "is not installed", "pip") for name in ("serve", "wandb")]
    text = doctor.report(looked=lambda: iter([*extras, Check("extra mcp", "ok", "mcp 2")])).splitlines()
    assert text[0] == "ok      extra mcp  mcp 2"
    assert text[1].split() == ["missing", "extras", "serve,", "wandb"] and "names its packages" in text[2] and len(text) == 3


def test_with_kernels_in_the_package_no_compiler_is_asked_for(monkeypatch):
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    monkeypatch.setattr(doctor, "prebuilt", lambda: None)
    assert doctor._compiler().state == "missing"
    monkeypatch.setattr(doctor, "prebuilt", lambda: Path("x86-64-v3.so"))
    assert doctor._compiler().state == "ok" and "has kernels for this processor" in doctor._compiler().detail


def test_json_holds_the_same():
    found = json.loads(doctor.report(as_json=True, looked=looked))
    assert found["GPU"] == {"state": "missing", "detail": "no CUDA device", "advice": "take another build"}


def test_kernels_that_compute_something_else_are_broken(monkeypatch):
    class Wrong:
        def rms_norm(self, x, weight, eps):
            return x + 1

    for found, state in (("no C++ compiler was found", "missing"), (Wrong(), "broken")):
        monkeypatch.setattr(doctor, "kernels", lambda found=found: found)
        assert doctor._kernels().state == state and doctor._kernels().advice


@pytest.mark.needs("compiler")
def test_the_kernels_say_what_multiplies(monkeypatch):
    native = doctor.kernels()
    assert f"bfloat16 by {native.products.instructions(torch.bfloat16)}; " in doctor._kernels().detail
    monkeypatch.setattr(Products, "instructions", lambda self, dtype: f"{dtype} tiles")
    assert "float32 by torch.float32 tiles, bfloat16 by torch.bfloat16 tiles; RMSNorm agrees" in doctor._kernels().detail


def test_a_package_that_is_absent_is_missing_and_one_that_breaks_is_broken(monkeypatch, tmp_path):
    (tmp_path / "breaks.py").write_text("raise ImportError('libfoo.so is gone')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor._package("no_such_package", "x").state == "missing"
    broken = doctor._package("breaks", "x")
    assert broken.state == "broken" and "libfoo.so is gone" in broken.detail


def test_the_command_looks_at_this_machine(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == {"state": "ok", "detail": f"torch {torch.__version__}", "advice": ""}
    assert found["GPU"]["state"] == ("ok" if torch.cuda.is_available() else "missing") and "disk" in found
    assert cli.main(["doctor"]) == 0 and "torch" in capsys.readouterr().out


def test_every_extra_that_users_install_is_looked_at():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    expected = set(project["optional-dependencies"]) - set(extras.DEVELOPERS)
    looked_at = {check.name.removeprefix("extra ") for check in doctor.checks() if check.name.startswith("extra ")}
    assert looked_at == expected and set(doctor.PACKAGES) < expected


def test_too_little_memory_is_named_with_what_to_do():
    assert doctor.memory(20 * 10**9, 25 * 10**9) == Check("memory", "ok", "20 GB of 25 GB free")
    short = doctor.memory(10**9, 25 * 10**9)
    assert short.state == "broken" and "1 GB of 25 GB" in short.detail and "psigrad plan" in short.advice


def test_free_memory_falls_when_some_is_taken():
    def fell() -> bool:
        before = hardware.available_memory()
        # pages of its own: an allocator may give what it kept of an earlier test, and other processes give memory back
        with mmap.mmap(-1, 300 << 20) as taken:
            for page in range(0, len(taken), mmap.PAGESIZE):
                taken[page] = 1
            return 0 < hardware.available_memory() < before - 100 * 2**20

    def fell_later() -> bool:
        time.sleep(0.3)  # a process that ends gives its memory back for a while
        return fell()

    assert fell() or any(fell_later() for _ in range(10))


def test_a_compiler_that_is_absent_or_does_not_run(monkeypatch):
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    assert doctor._compiler().state == "missing" and "g++" in doctor._compiler().advice
    monkeypatch.setattr(doctor, "compiler", lambda: "/bin/false")
    assert doctor._compiler().state == "broken" and "/bin/false" in doctor._compiler().detail


def test_cores_are_those_of_this_process_and_all_of_them_where_the_system_cannot_say(monkeypatch):
    import os

    from psigrad.runs.machine import cores

    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == os.cpu_count()


def test_the_doctor_prints_the_table():
    own = "on cpu: micro_batch_tokens 4096, dtype float32, gradient_checkpointing False, async_save False"
    assert doctor.defaults("cpu").detail == own
    there = "on cuda: micro_batch_tokens by free memory, dtype bfloat16, gradient_checkpointing True, async_save True; "
    assert doctor.defaults("cuda").detail.startswith(there)
