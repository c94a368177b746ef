"""A limit of memory: the largest micro-batches that the plan says stay below it, and what is trained stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psigrad.config import Model, Run, SFTConfig
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad_extras.preflight.plan import fit
from psigrad_extras.preflight.plan.hardware import machine
from psigrad_extras.preflight.plan.predict import Plan, lengths_of, predict


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama", 512, hidden=64, layers=4, heads=4, max_length=512).save_pretrained(folder)
    tiny.tokenizer(["ab"], 512).save_pretrained(folder)
    return SFTConfig(model=Model(path=str(folder)), max_length=256, batch_size=64)


def planned(config: SFTConfig) -> Plan:
    return predict(config, lengths_of(config)[0], machine("cpu", config.model.dtype, measure=False))


def limited(config: SFTConfig, limit: float) -> SFTConfig:
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


def test_too_little_is_refused_with_what_would_be_enough(config: SFTConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"max_memory is 0.001GB and the run needs about \d+ MB with the smallest"):
        fit.fit(limited(config, 1e6))
