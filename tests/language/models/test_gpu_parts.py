"""Modules with fewer kernels on a GPU: their numbers and gradients, and the kernels that a layer launches, counted on a CPU.

An operation of PyTorch that writes numbers is a kernel. RMS norms and attention, which are one kernel on a GPU, have stand-ins.
"""

from __future__ import annotations

import pytest
import torch
from launches import GROUPS, launched, made
from torch.nn import functional as F

from psigrad.language.models import probe
from psigrad.language.models.fused.gpu_parts import GpuParts


@pytest.mark.parametrize(("lora", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.5)])
def test_log_probs_and_gradients_are_those_of_the_modules(lora, dropout, as_on_a_gpu):
    found = []
    for fewer in (True, False):
        model = made(2, lora, False, fewer, torch.float64, dropout)
        learns = [p.data.normal_(std=0.2, generator=torch.Generator().manual_seed(len(p))) for p in model.trainable().values()]
        assert lora or len(learns) > 20
        logp = model.evaluate(GROUPS).logp
        found.append([logp.detach(), *torch.autograd.grad((logp * logp.detach()).sum(), list(model.trainable().values()))])
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


def test_negative_control_a_wrong_kernel_is_left_out(as_on_a_gpu, monkeypatch):
    right = made(2, False, False, fewer=False).evaluate(GROUPS).logp
    monkeypatch.setattr(GpuParts, "norm", lambda self, x, weight, eps: F.rms_norm(x, weight.shape, weight, eps + 0.1))
    assert torch.equal(made(2, False, False).evaluate(GROUPS).logp, right)
    monkeypatch.setattr(probe, "difference", lambda hf, own, fast: "")
    assert not torch.equal(made(2, False, False).evaluate(GROUPS).logp, right)


@pytest.mark.parametrize(("lora", "recompute", "most"), [(0, 0, 90), (0, 1, 120), (1, 0, 135), (1, 1, 160)])
def test_a_layer_launches_at_most_so_many_kernels_in_a_micro_batch(lora, recompute, most, as_on_a_gpu, monkeypatch):
    (few, less), (many, more) = (launched(monkeypatch, lora=lora, recompute=recompute, fewer=fewer) for fewer in (True, False))
    print(lora, recompute, few, many, less / more)
    assert few <= most < many - 40 and less < 0.6 * more
