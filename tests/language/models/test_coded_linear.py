"""A base in codes of 4 or 8 bits below a LoRA adapter, against the same numbers as plain matrices."""

from __future__ import annotations

import json

import pytest
import torch
from cached import sample
from cases import slow
from fused_models import made, some_groups
from inductor_counts import Launches, counting
from kernel_choices import multiply_bfloat16, own_products
from safetensors.torch import load_file
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

import psigrad
from psigrad.config import Model
from psigrad.errors import UserError
from psigrad.kernels import codes
from psigrad.kernels.codes import NF4, code
from psigrad.kernels.kernels import kernels
from psigrad.language.loading.model_source import lora_of
from psigrad.language.models import free_memory, language_model
from psigrad.language.models.coded_linear import CodedLinear, code_linears, uncode_linears, unpack
from psigrad.language.models.fused import caches
from psigrad.language.models.fused.layer import compute_dtype
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

KINDS = ("nf4", "int8")
COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
# Rows of whole blocks; the down matrix of the first has none of nf4, and stays as it is.
CONFIGS = {
    "llama": LlamaConfig(**COMMON, hidden_size=64, intermediate_size=96),
    "qwen2": Qwen2Config(**COMMON, hidden_size=64, intermediate_size=192),
    "qwen3": Qwen3Config(**COMMON, hidden_size=128, head_dim=16, intermediate_size=128),
}


def matrix_of(rows: int = 100, width: int = 320, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 1, rows)[:, None]


def test_codes_by_hand():
    """A block of 4 bits: -2 is the largest, so 1 is 0.5 of it, between 0.4407 and 0.5626; of 8: 127 steps of 2 / 127."""
    row = torch.zeros(1, 64)
    row[0, 3], row[0, 40] = -2.0, 1.0
    four, eight = code(row, "nf4"), code(row, "int8")
    assert (four.bits, four.block, eight.bits, eight.block) == (4, 64, 8, 32)
    x = four.by_torch(torch.float32)[0]
    assert x[3] == -2.0 and float(x[40]) == pytest.approx(2 * 0.44070982933) and x[0] == 0
    x = eight.by_torch(torch.float32)[0]
    assert float(x[3]) == pytest.approx(-2.0) and float(x[40]) == pytest.approx(1.0), "a block of its own"
    assert list(NF4) == sorted(NF4) and len(NF4) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_each_number_gets_the_nearest_level(kind):
    x = matrix_of()
    coded = code(x, kind)
    near = coded.by_torch(torch.float32)
    scale = x.view(100, -1, coded.block).abs().amax(2, keepdim=True)
    levels = torch.tensor(NF4) if kind == "nf4" else torch.arange(-127, 128) / 127
    best = (x.view(100, -1, coded.block)[..., None] - levels * scale[..., None]).abs().amin(-1)
    torch.testing.assert_close((near - x).abs().view_as(best), best, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_gpu_decodes_a_weight_in_four_bytes(monkeypatch):
    """Compiled, one kernel reads codes and scales and writes bfloat16. By PyTorch's operations it is many times as much.

    The numbers that it writes: test_each_number_gets_the_nearest_level.
    """
    coded = code(matrix_of(128, 640), "nf4")
    tensors = (coded.codes, coded.scales, coded.offsets, coded.levels, torch.bfloat16)
    found = Launches()
    with counting(monkeypatch, found):
        torch.compile(codes.decode, dynamic=True)(*tensors)
    assert (found.graphs, found.kernels, found.calls) == (1, 1, 0) and 2.5 * 128 * 640 < found.bytes <= 4 * 128 * 640
    with Bytes() as moved:
        codes.decode(*tensors)
    assert moved.total > 12 * 128 * 640


class Bytes(TorchDispatchMode):
    """The bytes that operations read and write."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
        if len({x.untyped_storage().data_ptr() for x in tensors}) > 1:  # no view
            self.total += sum(x.numel() * x.element_size() for x in tensors)
        return out


def test_a_layer_in_codes_keeps_no_matrix_for_its_gradient():
    layer = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(64, 128)]))
    code_linears(layer, "nf4")
    coded, kept = layer[0][0], []
    assert isinstance(coded, CodedLinear)
    x, slope = torch.randn(2, 3, 64, requires_grad=True), torch.randn(2, 3, 128)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = coded(x)
    plain = torch.nn.functional.linear(x, coded.matrix.by_torch(torch.float32), coded.bias)
    torch.testing.assert_close(out, plain)
    ours, right = (torch.autograd.grad(y, (x, coded.bias), slope) for y in (out, plain))
    torch.testing.assert_close(ours, right)
    assert max(kept, default=0) < 64 * 128


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_have_the_bits_of_the_same_numbers_packed(kind, dtype, rows, monkeypatch):
    native = kernels().products
    monkeypatch.setattr(native, "bfloat16", True)
    coded = [code(matrix_of(n, 640, seed=n), kind) for n in (100, 36)]
    plain = torch.cat([unpack(one, dtype) for one in coded])
    assert torch.equal(plain, torch.cat([one.by_torch(dtype) for one in coded]))
    x = torch.randn(rows, 640, generator=torch.Generator().manual_seed(9)).to(dtype)
    for base in (None, torch.randn(136).to(dtype), torch.randn(rows, 136).to(dtype)):
        ours = native.multiply_codes(x, coded, torch.empty(rows, 136, dtype=dtype), base)
        theirs = native.multiply_packed(x, native.pack(plain), torch.empty(rows, 136, dtype=dtype), base)
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours.float(), x.float() @ plain.float().T + base.float(), rtol=2e-2, atol=2e-2)


def with_codes(name, tokenizer, kind, dtype=torch.float32, plain=None):
    """A LoRA model on codes, or on their numbers as plain matrices of the type `plain`. The adapter is always the same."""
    hf = made(CONFIGS[name], tokenizer, dtype).network
    code_linears(hf, kind)
    matrices = {layer: child.matrix for layer, child in hf.named_modules() if isinstance(child, CodedLinear)}
    if plain is not None:
        uncode_linears(hf, dtype)
    layers = {layer: hf.get_submodule(layer) for layer in matrices}
    torch.manual_seed(0)
    model = prepare(hf, tokenizer, lora=Lora(4))
    for parameter in model.trainable().values():
        torch.nn.init.normal_(parameter, std=0.05)
    if plain is not None:
        for layer, matrix in matrices.items():
            layers[layer].weight.data = unpack(matrix, plain)
    return model


def gradient_of(model) -> torch.Tensor:
    logp = model.evaluate(some_groups()).logp
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1)).to(logp.dtype)
    gradients = torch.autograd.grad((logp * weights).sum(), list(model.trainable().values()))
    return torch.cat([g.flatten().double() for g in gradients])


def put_other_codes(model) -> None:
    for layer in (m for m in model.network.modules() if isinstance(m, CodedLinear)):
        layer.weight.data.copy_(layer.weight.data.flip(0, 1))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "name"), [*(("nf4", name) for name in CONFIGS), ("int8", "qwen3"), *slow(("int8", "llama"), ("int8", "qwen2"))]
)
def test_the_adapters_gradient_is_that_over_the_unpacked_base(name, kind, dtype, tokenizer):
    """Unpacked to the type that layers compute in. Where that is float32, codes keep digits that bfloat16 matrices lose: rounding
    them alone turns the gradient by a cosine of 0.99999 (float64), and this test would measure that.
    """
    ours, theirs = (with_codes(name, tokenizer, kind, dtype, plain) for plain in (None, compute_dtype(dtype)))
    assert ours.decoder is not None, ours.why_unfused
    assert sum(isinstance(m, CodedLinear) for m in ours.network.modules()) == (12 if (name, kind) == ("llama", "nf4") else 14)
    one, other = gradient_of(ours), gradient_of(theirs)
    assert torch.equal(one, other)
    put_other_codes(ours)
    assert float(torch.cosine_similarity(gradient_of(ours), other, dim=0)) < 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_over_codes_is_as_near_to_float64s_as_pytorchs_over_matrices(kind, dtype, tokenizer):
    """The bound is twice PyTorch's own rounding error over plain matrices; on four tiers the error was 0.1 to 1.25 times it."""
    exact = with_codes("qwen3", tokenizer, kind, dtype, torch.float64)
    exact.network.double()
    ours, theirs = with_codes("qwen3", tokenizer, kind, dtype), with_codes("qwen3", tokenizer, kind, dtype, dtype)
    exact.decoder = theirs.decoder = None
    right = gradient_of(exact)
    bound = 2 * float((gradient_of(theirs) - right).norm())
    assert float((gradient_of(ours) - right).norm()) < bound < 0.05 * float(right.norm())
    put_other_codes(ours)
    assert float((gradient_of(ours) - right).norm()) > bound


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("free, packs", [(3 << 30, True), (4 << 30, True), (4 << 30, False)])  # a quarter holds 1 GiB, or not
@pytest.mark.parametrize("members", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_and_trainer_agree_to_the_last_bit(dtype, members, free, packs, tokenizer, monkeypatch):
    """With few sequences too: codes need no packing."""
    monkeypatch.setattr(free_memory, "available_memory", lambda: free)
    packed, pack = [], caches.Projection.pack
    monkeypatch.setattr(caches.Projection, "pack", lambda one, products: packed.append(pack(one, products)) or packed[-1])
    multiply_bfloat16(monkeypatch, fast=True), own_products(monkeypatch)
    model = with_codes("qwen3", tokenizer, "nf4", dtype)
    model.decoder.may_dequantise = packs
    prompts = some_groups().prompts
    requests = [Request(tuple(p), tuple(range(members * i, members * (i + 1)))) for i, p in enumerate(prompts)]
    drawn = sample(EmbeddedSampler(model), requests, SamplingParams(max_tokens=20), None)
    trained = model.evaluate(Groups(prompts, [[c.ids for c in group] for group in drawn])).logp.detach()
    rows = zip(trained, (c for group in drawn for c in group), strict=True)
    gaps = torch.cat([(row[: len(c.ids)] - torch.tensor(c.logprobs)).abs() for row, c in rows])
    assert len(gaps) > 20 * members and int((gaps != 0).sum()) == 0
    assert packed and all((one.matrix is None) == (free < 4 << 30 or not packs) for one in packed)


def test_loaded_from_a_folder_layer_by_layer_it_is_the_same(tokenizer, tmp_path):
    hf = made(CONFIGS["qwen2"], tokenizer).network
    hf.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code_linears(hf, "nf4")
    torch.manual_seed(0)
    ours = prepare(hf, tokenizer, lora=Lora(4))
    torch.manual_seed(0)
    loaded = language_model.load(str(tmp_path), lora=Lora(4), base="nf4")
    assert torch.equal(ours.evaluate(some_groups()).logp, loaded.evaluate(some_groups()).logp)
    plain = language_model.load(str(tmp_path), lora=Lora(4))
    gap = (plain.evaluate(some_groups()).logp - loaded.evaluate(some_groups()).logp).detach().abs().mean()
    assert 1e-4 < float(gap) < 1.0, "4 bits are not nothing"
    loaded.save_merged(tmp_path / "merged")
    merged = language_model.load(str(tmp_path / "merged"))
    torch.testing.assert_close(merged.evaluate(some_groups()).logp, loaded.evaluate(some_groups()).logp, rtol=0, atol=1e-4)


def test_a_run_trains_an_adapter_over_codes_and_leaves_it(tokenizer, tmp_path):
    hf = made(CONFIGS["qwen3"], tokenizer).network
    hf.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello", "completion": " world"}\n' * 8)
    settings = {"model": str(tmp_path / "base"), "dataset": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "run")}
    settings |= {"lora_rank": 4, "learning_rate": 1e-2, "batch_size": 4, "eval_prompts": 0, "progress": False, "report": False}
    whole = psigrad.train("sft", **settings, quantize_base="nf4", max_steps=4)
    rows = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert (whole.model / "adapter_config.json").exists() and not (whole.model / "model.safetensors").exists()
    assert sum(x.numel() for x in load_file(whole.model / "adapter_model.safetensors").values()) > 0
    kept = psigrad.train(
        "sft", **{**settings, "output_dir": str(tmp_path / "both")}, quantize_base="nf4", lora_save="both", max_steps=1
    )
    assert (kept.model / "model.safetensors").exists() and (kept.model / "adapter" / "adapter_model.safetensors").exists()


def test_codes_without_an_adapter_are_refused():
    """Codes do not learn; told as a setting without effect, a model of 4 bits would be trained whole."""
    with pytest.raises(UserError, match=r"quantize_base is nf4, .* every weight is trained; set lora_rank=16, or remove"):
        lora_of(Model(path="no/such", quantize_base="nf4"))
    assert lora_of(Model(path="no/such", quantize_base="nf4", lora_rank=2)).rank == 2
    assert lora_of(Model(path="no/such")) is None


def test_a_model_whose_rows_are_no_whole_blocks_is_refused():
    """Rows of 32 are half a block of nf4, and one of int8."""
    network = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(32, 4)))
    with pytest.raises(UserError, match="no linear layer of the model has a row length that is a multiple of nf4's block size"):
        code_linears(network, "nf4")
    code_linears(network, "int8")
    assert isinstance(network[0][0], CodedLinear)
