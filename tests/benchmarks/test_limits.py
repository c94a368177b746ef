"""Whether a run held to a limit of memory is told to have passed it."""

from __future__ import annotations

import sys
from dataclasses import replace

import limits
import pytest


@pytest.mark.parametrize(("most", "status"), [(93.0, 0), (94.0, 1), (float("nan"), 0)])
def test_a_peak_above_a_tenth_more_than_its_limit_ends_with_1(monkeypatch, capsys, most, status):
    monkeypatch.setattr(limits, "SHARES", (0.85,))
    monkeypatch.setattr(limits, "peak", lambda real, limit: (1e9 * (most if limit else 100), "told"))
    monkeypatch.setattr(sys, "argv", ["limits.py", "R7"])
    assert limits.main() == status
    assert ("did not run" if most != most else f"{most:.2f}, ") in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.needs("linux")
@pytest.mark.parametrize("name", ["R2L", "R7"])
def test_a_workload_is_trained_by_the_command_line(name):
    one = limits.WORKS[name]
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "eos_token_id": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "bos_token_id": 1}
    work = replace(one.work, prompts=2, generations=2, prompt_tokens=8, completion_tokens=4)
    one = replace(one, config=one.config | small, work=work)
    free, said = limits.peak(one, 0)
    assert 1e8 < free < 2e9 and said == ""
    _, said = limits.peak(one, 4e9)
    assert said.startswith("psigrad: For 4.000GB: micro-batches of ") and said.count("psigrad: ") == 1
    refused, said = limits.peak(one, 1e8)
    assert refused != refused and "max_memory" in said
