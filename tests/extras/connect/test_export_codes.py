"""An adapter that learnt over a base in codes is merged into the numbers of the codes, by whatever opens its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import slow
from fused_models import COMMON, made, some_groups
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig

import psigrad
from psigrad import cli
from psigrad.config import Model, Run
from psigrad.kernels.codes import NF4
from psigrad.language.loading.load_model import load_model, load_trained_scalar_model
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models import tiny
from psigrad.language.models.coded_linear import CodedLinear
from psigrad_extras.connect.exporting import write_gguf
from psigrad_studio.checkpoint_list import find

pytestmark = pytest.mark.needs("compiler")
CONFIG = LlamaConfig(**COMMON, hidden_size=64)
MATRIX = "model.layers.1.self_attn.q_proj.weight"
QUIET = {"progress": False, "report": False, "eval_prompts": 0, "threads": 1, "max_steps": 3, "batch_size": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def base_in(folder: Path) -> Path:
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    made(CONFIG, tokenizer).network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(method: str, model: Path, folder: Path, rows: list[dict[str, str]], **settings: object) -> Path:
    settings = {"lora_rank": 2, "learning_rate": 3e-2, **settings}
    return psigrad.train(method, model=str(model), dataset=rows, output_dir=str(folder), **QUIET, **settings).folder


def rounded(w: torch.Tensor, kind: str) -> torch.Tensor:
    """Each number as the nearest level of its block: of nf4's sixteen, or of 127 steps on both sides of 0."""
    blocks = w.float().reshape(-1, 64 if kind == "nf4" else 32)
    levels = torch.tensor(NF4) if kind == "nf4" else torch.arange(-127, 128) / 127
    scale = blocks.abs().amax(1, keepdim=True)
    return (levels[(blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)] * scale).view_as(w)


@pytest.mark.parametrize(("kind", "dtype"), [("nf4", "float32"), *slow(("int8", "float32"), ("nf4", "bfloat16"))])
def test_the_merged_matrix_by_hand_and_the_log_probs_of_the_policy(kind, dtype, tmp_path, capsys):
    base = base_in(tmp_path / "base")
    rows = [{"prompt": "hello", "completion": " world"}] * 8
    run = trained("sft", base, tmp_path / "run", rows, quantize_base=kind, dtype=dtype)
    held = json.loads((run / "model" / "quantized_base.json").read_text())
    assert held == {"quantize_base": kind, "dtype": dtype}

    assert cli.main(["export", str(run), "--to", "merged", "--output", str(tmp_path / "merged")]) == 0
    assert f"its base model, whose weights are rounded to {kind} as in training" in capsys.readouterr().out
    assert f"rounded to {kind} as in training." in (tmp_path / "merged" / "README.md").read_text()
    w0 = load_file(base / "model.safetensors")[MATRIX].to(getattr(torch, dtype))
    learnt = load_file(run / "model" / "adapter_model.safetensors")
    b, a = (learnt[f"base_model.model.{MATRIX.replace('weight', f'lora_{x}.weight')}"].float() for x in "BA")
    wanted = rounded(w0, kind) + 16 / 2 * b @ a  # s = alpha / rank, alpha 16
    got = load_file(tmp_path / "merged" / "model.safetensors")[MATRIX]
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), wanted, rtol=2 * eps, atol=4 * eps * float(wanted.abs().max()))
    if kind == "nf4":
        assert float((w0.float() + 8 * b @ a - wanted).abs().max()) > 0.02 * float(wanted.abs().max()), "negative control"

    groups, numbers = some_groups(), {"dtype": dtype, "adapter": "merge"}
    policy = load_model(Model(path=str(run / "model"), quantize_base=kind, dtype=dtype), Run(), None)
    assert any(isinstance(layer, CodedLinear) for layer in policy.network.modules())
    right = policy.evaluate(groups).logp
    near = {"rtol": 0, "atol": 1e-4 if dtype == "float32" else 0.1}
    for place in (str(tmp_path / "merged"), str(run), convert_to_folder(str(run))):  # the last two are what eval and serve open
        torch.testing.assert_close(load_model(Model(path=place, **numbers), Run(), None).evaluate(groups).logp, right, **near)
    shown = next(one for one in find(tmp_path, []).values() if one.folder == run / "model").open()
    torch.testing.assert_close(shown.evaluate(groups).logp, right, **near)

    assert cli.main(["export", str(run), "--to", "adapter", "--output", str(tmp_path / "alone")]) == 0
    assert json.loads((tmp_path / "alone" / "quantized_base.json").read_text()) == held
    assert json.loads((tmp_path / "alone" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def test_one_over_a_gguf_file_is_merged_into_its_numbers_and_written_again(tmp_path):
    folder = base_in(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = tmp_path / "tiny.gguf"
    write_gguf(made(CONFIG, tokenizer).network, tokenizer, file, "q4_0")
    run = trained("sft", file, tmp_path / "run", [{"prompt": "hello", "completion": " world"}] * 8, quantize_base="gguf")
    policy = load_model(Model(path=str(run / "model"), quantize_base="gguf"), Run(), None)
    right = policy.evaluate(some_groups()).logp
    assert cli.main(["export", str(run), "--to", "gguf", "--quantization", "f32", "--output", str(tmp_path / "out")]) == 0
    (made_again,) = (tmp_path / "out").glob("*.gguf")
    again = load_model(Model(path=str(made_again)), Run(), None)
    torch.testing.assert_close(again.evaluate(some_groups()).logp, right, rtol=0, atol=1e-4)


def test_a_reward_model_over_codes_is_left_whole_and_scores(tmp_path):
    rows = [{"prompt": "hello", "chosen": " world", "rejected": " 123"}] * 8
    run = trained("reward", base_in(tmp_path / "base"), tmp_path / "run", rows, quantize_base="nf4")
    assert (run / "model" / "model.safetensors").exists() and not (run / "model" / "quantized_base.json").exists()
    assert load_trained_scalar_model(Model(path=str(run)), Run()).network is not None


def test_an_adapter_that_goes_on_over_other_numbers_is_said(tmp_path, capsys):
    base = base_in(tmp_path / "base")
    rows = [{"prompt": "hello", "completion": " world"}] * 8
    run = trained("sft", base, tmp_path / "run", rows, quantize_base="int8")
    capsys.readouterr()
    for number, (kind, said) in enumerate((("int8", False), ("", True), ("nf4", True))):
        trained("sft", run / "model", tmp_path / f"{number}", rows, lora_rank=0, quantize_base=kind)
        assert ("quantised to int8; to use the same base, set --quantize-base int8" in capsys.readouterr().err) == said
