"""The floor of a step: its arithmetic, counted by PyTorch on transformers' own modules, over a rate that is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from timed import inputs as material
from timed.timing import floor
from timed.workload import Workload
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from psigrad_extras.preflight.plan import hardware
from psigrad_extras.preflight.plan.hardware import Machine

ONLINE = Workload("w", "", hidden=128, layers=3, prompts=4, generations=4, prompt_tokens=4, completion_tokens=12)
RATE = Machine("cpu", 1 << 30, peak=1e9, bandwidth=1e15)


def counted(folder, length):
    """FLOPs of a forward pass over one token, in sequences of `length`, by PyTorch's count."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, length, dtype=torch.int64))
    return counter.get_total_flops() / length


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_offline_it_is_three_forward_passes_over_the_rows(tmp_path, kind):
    work = replace(ONLINE, kind=kind)
    material.build(work, tmp_path)
    tokens = work.prompts * (work.prompt_tokens + 16 * (1 if kind == "sft" else 2))
    found = floor(work, tmp_path, tokens, "float32", RATE)
    assert set(found) == {"forward-backward"}
    assert found["forward-backward"] * RATE.peak == pytest.approx(3 * tokens * counted(tmp_path, 20), rel=0.05)


def test_on_policy_training_is_its_backward_pass_and_a_second_pass_is_whole(tmp_path):
    material.build(ONLINE, tmp_path)
    completions = 16 * 8
    forward = (completions + 4 * 4) * counted(tmp_path, 12)
    once, twice = (
        floor(replace(ONLINE, iterations=n, beta=b), tmp_path, completions, "float32", RATE) for n, b in ((1, 0.0), (2, 0.1))
    )
    assert once["sample"] * RATE.peak == pytest.approx(forward, rel=0.05)
    assert once["forward-backward"] * RATE.peak == pytest.approx(2 * forward, rel=0.05)
    assert twice["forward-backward"] * RATE.peak == pytest.approx((2 + 3) * forward, rel=0.05)
    assert twice["log-probs"] * RATE.peak == pytest.approx(forward, rel=0.05) and "log-probs" not in once


def test_a_critic_is_a_whole_pass_in_training_and_one_before(tmp_path):
    material.build(ONLINE, tmp_path)
    completions = 16 * 8
    forward = (completions + 4 * 4) * counted(tmp_path, 12)
    with_critic, without = (floor(replace(ONLINE, kind=k), tmp_path, completions, "float32", RATE) for k in ("ppo", "grpo"))
    more = {name: (with_critic[name] - without.get(name, 0.0)) * RATE.peak for name in with_critic}
    # its head is one number wide: a twentieth of a pass here
    assert more["forward-backward"] == pytest.approx(3 * forward, rel=0.1)
    assert more["log-probs"] == pytest.approx(forward, rel=0.1) and more["sample"] == 0


def test_sampling_is_no_faster_than_the_weights_are_read(tmp_path):
    material.build(ONLINE, tmp_path)
    slow = replace(RATE, bandwidth=1e6)
    found = floor(ONLINE, tmp_path, 16 * 8, "float32", slow)
    weights = 4 * sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "model").parameters())
    assert weights * 12 < found["sample"] * slow.bandwidth < 1.2 * weights * 12


def test_memory_is_measured_beyond_the_last_cache(monkeypatch):
    """Half a gigabyte of it, as some servers have, holds what is copied; roughly, the copy is of 32 MiB and takes a moment."""
    allowed = []
    monkeypatch.setattr(hardware, "last_cache", lambda: 100 << 20)
    monkeypatch.setattr(hardware, "_best", lambda work, device, least: (allowed.append(least), 1.0)[1])
    assert hardware.machine("cpu", "float32", 1).bandwidth == 2 * (100 << 20)
    assert hardware.machine("cpu", "float32", 1, roughly=True).bandwidth == 2 * (32 << 20)
    assert allowed == [0.25, 0.25, 0.05, 0.05]
    monkeypatch.setattr(hardware, "available_memory", lambda: 400 << 20)
    assert hardware.machine("cpu", "float32", 1).bandwidth == 2 * (50 << 20), "where memory is short, less"


def test_the_last_cache_is_the_largest_that_the_system_tells_of(tmp_path):
    for index, size in enumerate(("32K", "1024K", "480M", "")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert hardware.last_cache(tmp_path) == 480 << 20 and hardware.last_cache(tmp_path / "none") == 0
