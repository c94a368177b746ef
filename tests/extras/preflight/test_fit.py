"""A limit of memory: the largest micro-batches that the plan says stay below it, and what is trained stays the same."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import gpu_memory

from psigrad.config import Model, OnlineConfig, Run, Sampling, SFTConfig
from psigrad.config import load as loading
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad_extras.preflight.plan import fit, plan
from psigrad_extras.preflight.plan.hardware import Machine, machine
from psigrad_extras.preflight.plan.predict import Plan, lengths_of, predict
from psigrad_extras.preflight.settings import PlanConfig


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama", 512, hidden=64, layers=4, heads=4, max_length=512).save_pretrained(folder)
    tiny.tokenizer(["ab"], 512).save_pretrained(folder)
    return SFTConfig(model=Model(path=str(folder)), max_length=256, batch_size=64)


def planned(config: Any) -> Plan:
    return predict(config, lengths_of(config)[0], machine("cpu", config.model.dtype, measure=False))


def limited(config: Any, limit: float) -> Any:
    return replace(config, run=Run(device="cpu", max_memory=f"{limit / 1e9}GB"))


def test_without_a_limit_nothing_changes(config: SFTConfig) -> None:
    assert fit.fit(config) is config


def test_what_fits_stays_as_it_is(config: SFTConfig) -> None:
    given = limited(config, 2 * planned(config).memory.peak)
    assert fit.fit(given) == given


def test_micro_batches_become_smaller_and_then_activations_are_computed_anew(config: SFTConfig, capsys: Any) -> None:
    small = replace(config, micro_batch_tokens=1024)
    anew = replace(config, micro_batch_tokens=256, model=replace(config.model, gradient_checkpointing=True))
    for wanted in (small, anew):
        found = fit.fit(limited(config, (1.001 + fit.FREE) * planned(wanted).memory.peak))
        assert found.model.gradient_checkpointing == wanted.model.gradient_checkpointing
        assert planned(found).memory.peak <= planned(wanted).memory.peak
        assert f"micro-batches of {found.micro_batch_tokens} tokens" in capsys.readouterr().err
    assert fit.fit(limited(config, (1.001 + fit.FREE) * planned(small).memory.peak)).micro_batch_tokens == 1024


@pytest.mark.needs("compiler")
def test_what_sampling_computed_is_kept_whole_or_not_at_all(config: SFTConfig, capsys: Any) -> None:
    online = OnlineConfig(model=config.model, sampling=Sampling(max_completion_length=64), keep_activations_gb=0.01)
    all_kept, none = replace(online, keep_activations_gb=0.2), replace(online, keep_activations_gb=0.0)
    room, tight = ((1.001 + fit.FREE) * planned(one).memory.peak for one in (all_kept, none))
    assert tight < 0.98 * room, "else the limits say nothing"
    kept = fit.fit(limited(online, room))
    assert (kept.keep_activations_gb, kept.micro_batch_tokens) == (0.2, online.micro_batch_tokens)
    assert "up to 0.2 GB of activations kept from sampling" in capsys.readouterr().err
    small = fit.fit(limited(replace(online, micro_batch_tokens=320), tight))
    assert small.keep_activations_gb == 0.0 and "kept from sampling" not in capsys.readouterr().err
    assert fit.fit(limited(none, room)).keep_activations_gb == 0.0, "as it was asked for"


def test_too_little_is_refused_with_what_would_be_enough(config: SFTConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"max_memory is 0.001GB, but the run needs about \d+ MB with the smallest"):
        fit.fit(limited(config, 1e6))


def test_micro_batches_fill_the_memory_that_is_free(monkeypatch, capsys):
    """A token takes 10 bytes by the stand-in's arithmetic, so 90,000 have room for 9,000: 8,192 is the largest power of two."""
    asked = []

    def predict(config, lengths, here, dataset):
        asked.append((config.micro_batch_tokens, here.memory))
        return SimpleNamespace(fits=config.micro_batch_tokens * 10 <= here.memory, config=config)

    planned = importlib.import_module("psigrad_extras.preflight.plan.predict")  # the package has a function of that name
    monkeypatch.setattr(planned, "predict", predict)
    monkeypatch.setattr(planned, "lengths_of", lambda config: (None, None, ""))
    monkeypatch.setattr(fit, "machine", lambda where, dtype, measure: Machine(where, 0))
    gpu_memory(monkeypatch, 90_000, 500_000)
    config = loading.load(SFTConfig, flags={"device": "cuda"})
    assert fit.fit(config).micro_batch_tokens == 8192
    assert asked[0] == (65536, 90_000) and asked[-1] == (8192, 90_000)
    said = capsys.readouterr().err
    assert (
        "on cuda: micro_batch_tokens=8192, model.dtype=bfloat16, model.gradient_checkpointing=True, run.async_save=True." in said
    )
    monkeypatch.setattr(fit.launch, "is_rank", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: pytest.fail("it takes memory of GPU 0 for each rank"))
    assert fit.fit(config).micro_batch_tokens == 32768, "ranks see the whole device, which is the same for all"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: SimpleNamespace(total_memory=1))
    assert fit.fit(config).micro_batch_tokens == 1024, "the run itself says that it does not fit"
    assert fit.fit(replace(config, micro_batch_tokens=7)).micro_batch_tokens == 7


def test_a_plan_is_that_of_the_run_with_the_limit(config: SFTConfig, capsys: Any) -> None:
    """Of 64 rows of 256 tokens at once, and of as many as fit into nine tenths of their peak and a quarter."""
    peak = planned(replace(config, micro_batch_tokens=1 << 14)).memory.peak
    given = limited(replace(config, micro_batch_tokens=1 << 14), 0.9 * peak * (1 + fit.FREE))
    found = json.loads(plan.run(given, PlanConfig(json=True, prompt_length=200, completion_length=56)))
    assert "micro-batches of" in capsys.readouterr().err and found["memory"]["peak"] <= 0.9 * peak
    with pytest.raises(UserError, match="The memory '1XB' is not a size"):
        plan.run(replace(config, run=Run(device="cpu", max_memory="1XB")), PlanConfig())
