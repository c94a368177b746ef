"""Where vLLM's engine is, how long a text may be in it, and in which order it wakes: on stand-ins."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from psigrad.config import OnlineConfig
from psigrad.config.sections import Sampling
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Rows
from psigrad.language.recipes.online import longest_of
from psigrad_extras.vllm import vllm_probe
from psigrad_extras.vllm.vllm_backend import VLLMSampler
from psigrad_extras.vllm.vllm_engine import Engine, answer
from psigrad_extras.vllm.vllm_probe import exactly, log_probs, written
from psigrad_extras.vllm.vllm_setup import check_setup, devices_of


@pytest.mark.parametrize(
    ("device", "count", "visible", "expected"),
    [
        ("cpu", 1, None, ""),
        ("cpu", 1, "5", "5"),
        ("cuda", 1, None, "0"),
        ("cuda:3", 1, None, "3"),
        ("cuda:2", 2, None, "2,3"),
        ("cuda:1", 1, "4,6,7", "6"),
        ("cuda:0", 2, "GPU-aa,GPU-bb", "GPU-aa,GPU-bb"),
    ],
)
def test_each_ranks_engine_is_on_the_ranks_device(device, count, visible, expected):
    assert devices_of(torch.device(device), count, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_more_devices_than_there_are_is_a_sentence():
    with pytest.raises(UserError, match="is 2, but CUDA_VISIBLE_DEVICES lists only 1 devices from cuda:1 on"):
        devices_of(torch.device("cuda:1"), 2, {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(("device", "count", "fits"), [("cuda:0", 2, True), ("cuda:1", 2, False), ("cuda:1", 1, True)])
def test_an_engine_has_no_device_beyond_the_last(monkeypatch, device, count, fits):
    """As the second of two ranks that would divide each engine among two GPUs, of which there are two."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if fits:
        check_setup(torch.device(device), count, sleep=False)
        return
    with pytest.raises(UserError, match="tensor_parallel_size is 2, but only 1 GPUs are visible from cuda:1 on"):
        check_setup(torch.device(device), count, sleep=False)


class Recorder:
    """Writes down what is called, in order."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append(f"{name} {named['tags'][0]}" if "tags" in named else name)
            return {
                "collective_rpc": [([], [])],
                "get_weight_version": "7",
                "generate": [SimpleNamespace(num_cached_tokens=0)],
            }.get(name)

        return call


@pytest.mark.parametrize("asleep", [True, False])
def test_an_engine_that_slept_wakes_weights_first_and_its_cache_last(asleep, monkeypatch):
    engine = Engine.__new__(Engine)
    engine.llm, engine.asleep, engine.sleep, engine.lora = Recorder(), asleep, True, None
    monkeypatch.setattr(Engine, "_cached", lambda self, probe: self.llm.calls.append("probe") or 0)
    steps = [("begin", [1, 2]), ("start",), ("load", {}), ("finish", 7), ("compare", {}, []), ("settle", [1, 2])]
    answers = [list(answer(engine, (name, tuple(arguments)))) for name, *arguments in steps]
    assert answers == [*[[["done"]]] * 5, [["updated", 7, [], [], 0], ["done"]]] and not engine.asleep
    calls = [call for call in engine.llm.calls if call.partition(" ")[0] in ("wake_up", "update_weights", "probe")]
    woken = ["wake_up weights", "update_weights", "wake_up kv_cache", "probe"]
    assert calls == (woken if asleep else ["probe", "update_weights", "probe"])


def test_the_room_of_a_text_is_the_runs():
    config = OnlineConfig(sampling=Sampling(max_completion_length=100))
    prepared = SimpleNamespace(items=[(0, [1] * 7), (1, [1] * 30)])
    held_out = SimpleNamespace(prompts=[SimpleNamespace(ids=(1,) * 41)])
    assert longest_of(config, prepared, None) == 130 and longest_of(config, prepared, held_out) == 141
    assert longest_of(OnlineConfig(tools=("x",)), prepared, None) == 0


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_an_honest_engine_in_half_precision_passes_and_one_with_a_layer_one_percent_off_does_not(trials):
    """The fused kernels stand in for the engine: they round differently from transformers' modules."""
    layers, hidden = (4, 64) if trials == 1 else (8, 128)
    found: dict[str, list[float]] = {"honest": [], "noise of 1 %": [], "1 % larger": []}
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    for trial in range(trials):
        network = tiny.model("qwen3", len(tokenizer), hidden=hidden, layers=layers, heads=4, max_length=512, seed=trial)
        with torch.no_grad():
            for weight in network.parameters():  # a model with its initial weights attends to everything alike
                weight.mul_(2.5 if weight.ndim == 2 else 1.0)
        model = prepare(network.bfloat16(), tokenizer)
        assert model.decoder is not None, "otherwise nothing stands in for the engine"
        probe = written(model, vllm_probe.TEXTS, vllm_probe.LENGTH)
        exact, allowed = exactly(model, probe)
        rows = Rows(probe, [[False] + [True] * (len(text) - 1) for text in probe])
        layer, generator = model.network.base_model.layers[trial % layers], torch.Generator().manual_seed(trial)
        kept = [p.detach().float() for p in layer.parameters()]
        for kind, shares in found.items():
            with torch.no_grad():
                for p, before in zip(layer.parameters(), kept, strict=True):
                    noise = before.pow(2).mean().sqrt() * torch.randn(before.shape, generator=generator)
                    p.copy_({"honest": before, "noise of 1 %": before + 0.01 * noise, "1 % larger": 1.01 * before}[kind])
            shares.append(vllm_probe.distance(model.stats(rows)[0].logp, exact) / (vllm_probe.SPREAD * allowed))
    print(found)
    assert all(share <= 1 for share in found["honest"])
    assert all(share > 1 for share in found["1 % larger"])
    # noise in a last layer may add less to the distance than the bound leaves
    assert sum(share > 1 for share in found["noise of 1 %"]) >= 0.8 * trials


def test_half_precision_is_allowed_what_it_does_to_the_trainers_own_numbers(monkeypatch):
    """On text that the model writes; more is another model, and in float32 there is no such allowance."""
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    plain, other = (tiny.model("qwen3", len(tokenizer), hidden=32, layers=2, heads=2) for _ in range(2))
    exact, half = prepare(plain, tokenizer), prepare(other.bfloat16(), tokenizer)
    probe = written(half, 3, 24)
    assert list(map(len, probe)) == [24] * 3 and len(log_probs(half, probe)) == 3 * 23 and len({tuple(t) for t in probe}) == 3
    assert exactly(exact, probe)[1] == 0
    right, own = exactly(half, probe)
    assert 1e-4 < own < 0.1 and half.network.dtype == torch.bfloat16
    assert vllm_probe.distance(log_probs(half, probe), right) <= own and half.network.config._attn_implementation
    monkeypatch.setattr(vllm_probe, "TEXTS", 3)
    monkeypatch.setattr(vllm_probe, "LENGTH", 24)
    sampler = VLLMSampler.__new__(VLLMSampler)
    for model, fine, wrong in ((half, 1.05 * own, 1.2 * own), (exact, 5e-5, 2e-4)):
        sampler.model = model
        truth = exactly(model, written(model, 3, 24))[0]
        monkeypatch.setattr(VLLMSampler, "engine_log_probs", lambda self, probe, truth=truth, gap=fine: truth + gap)
        assert sampler.verify() == pytest.approx(fine, rel=0.02)
        monkeypatch.setattr(VLLMSampler, "engine_log_probs", lambda self, probe, truth=truth, gap=wrong: truth + gap)
        with pytest.raises(UserError, match="computes this model differently"):
            sampler.verify()
