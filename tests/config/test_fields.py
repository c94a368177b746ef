"""What is known of a setting stands on its field, once."""

from __future__ import annotations

import ast
import itertools
import json
from dataclasses import replace
from pathlib import Path

import fields_said
import pytest
import torch
import yaml

import psigrad
from psigrad.compat import foreign_names
from psigrad.config import EvalConfig, Hub, LmEvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, SFTConfig
from psigrad.config import load as loading
from psigrad.config.fields import LENGTH, LIVE, RECORDED, Mark, defaults_of, device_defaults, find_marked, settings_of
from psigrad.config.load import load, to_dict
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.language.training.online.online_run import has_exact_matmul
from psigrad.runs import machine

TRAINED = (OnlineConfig, SFTConfig, PreferenceConfig, RewardConfig, ControlConfig)
CLASSES = (*TRAINED, EvalConfig, SampleConfig, LmEvalConfig)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_says_at_most_one_thing_of_resuming(cls):
    fields_said.check(cls)


def test_a_setting_behaves_alike_in_every_class():
    meant = {}
    for cls in TRAINED:
        for name, setting in settings_of(cls).items():
            marks = setting.marks & {*fields_said.ON_RESUME, LIVE}
            assert meant.setdefault(name, marks) == marks, name


def tables(source: str, names: set[str]) -> list[list[str]]:
    """The collections of a source that name two settings or more: facts about settings that stand away from their fields."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            if len(here := [word for word in words if word in names]) > 1:
                found.append(here)
    return found


def test_no_fact_about_settings_stands_away_from_their_fields():
    names = {name for cls in TRAINED for name in settings_of(cls) if "." in name}
    package = Path(psigrad.__file__).parent
    elsewhere = {
        str(path.relative_to(package)): found
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "compat"  # its tables say what others call a setting
        and (found := tables(path.read_text(), names))
    }
    assert not elsewhere


def test_negative_control_a_second_table_is_noticed():
    names = {"run.save_steps", "run.resume", "optim.learning_rate"}
    assert tables('MAY_CHANGE = frozenset((*("run.save_steps", "run.resume"), "x"))', names) == [["run.save_steps", "run.resume"]]
    assert not tables('x = ("run.save_steps", "elsewhere")', names)


def test_marks_are_read_from_sections_and_bases():
    assert {"run.save_steps", "reward_timeout", "placement.cluster"} <= set(find_marked(OnlineConfig, RECORDED))
    assert {"run.max_steps", "run.num_train_epochs"} == set(find_marked(OnlineConfig, LENGTH))
    assert find_marked(ControlConfig, LENGTH) == ["total_timesteps"]
    assert find_marked(Hub, Mark.MAIN) == []


@pytest.mark.parametrize("cls", CLASSES[:-1], ids=lambda cls: cls.__name__)
def test_no_number_is_nan_or_infinite(cls):
    numbers = [name for name, setting in settings_of(cls).items() if setting.type is float]
    assert len(numbers) >= 2 and load(cls, overrides=[f"{name}=0.25" for name in numbers])
    for name, text in itertools.product(numbers, (".nan", ".inf", "-.inf")):
        with pytest.raises(UserError, match=name):
            load(cls, overrides=[f"{name}={text}"])


@pytest.mark.parametrize("cls", TRAINED, ids=lambda cls: cls.__name__)
def test_defaults_are_as_a_run_records_them(cls):
    assert defaults_of(cls) == json.loads(json.dumps(to_dict(cls())))


def test_sections_keep_the_defaults_that_a_class_gives_them():
    rate = {cls.__name__: settings_of(cls)["optim.learning_rate"].default for cls in (SFTConfig, OnlineConfig)}
    assert rate == {"SFTConfig": 2e-5, "OnlineConfig": 1e-6}


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
