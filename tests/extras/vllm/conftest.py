"""vLLM's sampler on a stand-in for its engine."""

from __future__ import annotations

import pytest
import torch
from engine_samplers import a_model

from psigrad.language.models.lora import Lora
from psigrad_extras.vllm import vllm_probe, vllm_setup
from psigrad_extras.vllm.vllm_backend import VLLMSampler


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """A function that makes a sampler whose engine is the stand-in, with a fault."""
    find = vllm_setup.importlib.util.find_spec
    monkeypatch.setattr(vllm_probe, "log_probs", lambda model, probe: torch.zeros(sum(map(len, probe)) - len(probe)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: True if name == "vllm" else find(name, *more))
    made: list[VLLMSampler] = []

    def make(fault: str = "", lora: Lora | None = None, **settings) -> VLLMSampler:
        monkeypatch.setenv("PSIGRAD_TEST_ENGINE", fault)
        monkeypatch.setenv("PSIGRAD_TEST_ONCE", str(tmp_path / "once"))
        monkeypatch.setenv("PSIGRAD_TEST_LOG", str(tmp_path / "log"))
        made.append(VLLMSampler(a_model(lora), 4, service="engine_stand_in:service", **settings))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()
