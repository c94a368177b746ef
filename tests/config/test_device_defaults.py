"""What a run has on a GPU unless it is given: one table, on the fields, shown by a run's first line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

from psigrad.compat import foreign_names
from psigrad.config import EvalConfig, OnlineConfig, SFTConfig
from psigrad.config import load as loading
from psigrad.config.fields import device_defaults
from psigrad.language.training.online.online_run import has_exact_matmul
from psigrad.runs import machine

TABLE = {"model.dtype": "bfloat16", "model.gradient_checkpointing": True, "micro_batch_tokens": 0, "run.async_save": True}


@pytest.fixture(params=[True, False], ids=["a GPU", "no GPU"])
def gpu(request, monkeypatch):
    monkeypatch.setattr(loading, "has_cuda", lambda: request.param)
    return request.param


def values(config) -> tuple:
    return config.model.dtype, config.model.gradient_checkpointing, config.micro_batch_tokens


def test_the_table_is_of_what_trains():
    assert device_defaults(OnlineConfig, "cuda") == device_defaults(SFTConfig, "cuda") == TABLE
    assert device_defaults(OnlineConfig, "cpu") == device_defaults(EvalConfig, "cuda") == {}


def test_defaults_follow_the_device(gpu):
    assert values(loading.load(OnlineConfig)) == (("bfloat16", True, 0) if gpu else ("float32", False, 4096))
    assert loading.load(EvalConfig).model.dtype == "float32"


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_a_device_that_is_named_decides(gpu, device):
    expected = ("float32", False, 4096) if device == "cpu" else ("bfloat16", True, 0)
    assert values(loading.load(SFTConfig, flags={"device": device})) == expected
    assert values(loading.load(SFTConfig, overrides=[f"run.device={device}"])) == expected


def test_what_is_given_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "has_cuda", lambda: True)
    (tmp_path / "run.yaml").write_text("model: {dtype: float32}\nmicro_batch_tokens: 512\n")
    assert values(loading.load(SFTConfig, tmp_path / "run.yaml")) == ("float32", True, 512)
    assert values(loading.load(SFTConfig, flags={"dtype": "float32", "gradient_checkpointing": False})) == ("float32", False, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16: false", ("float32", True, 0)),
        ("bf16: false\ntorch_dtype: bfloat16", ("bfloat16", True, 0)),
        ("bf16: true\ngradient_checkpointing: false", ("bfloat16", False, 0)),
        ("fp16: false", ("bfloat16", True, 0)),
        ("use_cpu: true", ("float32", False, 4096)),
    ],
)
def test_what_is_given_under_trls_names_stays(text, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "has_cuda", lambda: True)
    (tmp_path / "run.yaml").write_text(text + "\n")
    assert values(foreign_names.load(SFTConfig, tmp_path / "run.yaml")) == expected
    flags = {name: yaml.safe_load(value) for name, _, value in (line.partition(": ") for line in text.split("\n"))}
    assert values(foreign_names.load(SFTConfig, flags=flags)) == expected


def test_products_are_in_tf32_on_a_gpu_alone_and_only_while_a_run_lasts():
    run = SFTConfig().run
    seen = {}
    for where in ("cpu", "cuda"):
        torch_has = replace(run, device=where, threads=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "device_count", lambda: 1)
            with machine.prepared_torch(torch_has, tf32=True):
                seen[where] = has_exact_matmul(torch.device("cuda"))
    assert seen == {"cpu": True, "cuda": False}
    assert has_exact_matmul(torch.device("cuda")) and has_exact_matmul(torch.device("cpu"))
