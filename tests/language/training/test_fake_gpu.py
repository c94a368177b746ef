"""The steps of a GPU where there is none: the tensors say that they are on it, and one of the host beside them is an error.

`make test-gpu` runs them on one. Here kernels, graphs and streams have stand-ins, and so have the numbers of half precision.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from fake_gpu import WAITED, OnDevice, fake_gpu
from in_memory import make
from packed_inputs import oracle
from rank_gradients import CASES, distance, gradient, make_models
from tiny_jobs import online_config

from psigrad import compiled
from psigrad.config import Optim
from psigrad.kernels import kernels as cpu
from psigrad.language.data.row_cache import PreparedRows
from psigrad.language.models import hf_attention, logprobs, tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.lora import Lora
from psigrad.language.recipes import run_pins
from psigrad.language.rollout.samplers import cuda_graph, embedded
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams, State
from psigrad.language.training.online.collect import collect
from psigrad.language.training.online.online_rl import learn
from psigrad.processes.parallel.world import ALONE
from psigrad.step import Clock


def again(run):
    """Replays by running, after a first run of which nothing may be left. Where the host waits, nothing can be recorded."""
    before = WAITED.copy()
    run()
    if before != WAITED:
        raise RuntimeError(f"operation not permitted when stream is capturing: {WAITED - before}")
    return run


@pytest.fixture
def gpu(monkeypatch):
    """gpu(): a block with a GPU, and what was asked of it."""
    asked = []
    monkeypatch.setattr(cuda_graph, "cuda_recorder", lambda: lambda run: asked.append("recording") or again(run))
    monkeypatch.setattr(hf_attention, "varlen_kernel", lambda: lambda *given: asked.append("attention") or oracle(*given))
    own = logprobs._RowLogProbs.apply
    monkeypatch.setattr(logprobs._RowLogProbs, "apply", lambda *given: asked.append("head") or own(*given))

    @contextmanager
    def block():
        with fake_gpu(monkeypatch):
            yield asked

    return block


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


SLOW = pytest.mark.slow
QUICK = ("dapo bfloat16", "lora", "sft", "reward")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else SLOW) for n in CASES])
def test_a_step_has_the_gradient_of_the_cpu(models, gpu, name):
    case = CASES[name]
    expected = gradient(case, models, ALONE)
    with gpu() as asked:
        found = {key: x.cpu() for key, x in gradient(replace(case, device="cuda"), models, ALONE).items()}
    apart = distance(expected, found)
    print(f"{name} {apart:.2g} {sorted(set(asked))}")
    assert {"attention", *([] if case.scalar else ["head"])} <= {*asked}
    assert apart < (2e-2 if case.dtype == "bfloat16" else 3e-6)


OTHERS = ("ppo", "top_entropy", "gdpo", "distill", "online_dpo")


@pytest.mark.parametrize("algorithm", ["grpo", *(pytest.param(name, marks=SLOW) for name in OTHERS)])
def test_a_whole_step_from_sampling_on_is_that_of_the_cpu(gpu, algorithm):
    tokenizer = tiny.tokenizer(["say a: b"], 270)

    def step(device: str):
        run = make(tokenizer, algorithm, steps=1, device=device)
        run.model.attend("auto")
        collected = collect(run, 0, 0, Clock())
        learn(run, collected.groups, State(algorithm=run.algorithm.initial_state()), 1e-3)
        return run, [t.completion.ids for t in collected.trajectories]

    here, written = step("cpu")
    with gpu() as asked:
        there, found = step("cuda")
        weights = [p.cpu() for p in there.model.trainable().values()]
    assert there.model.attention_kernel == "varlen" and found == written
    wanted = (
        {"recording", "attention"} if algorithm == "distill" else {"recording", "attention", "head"}
    )  # a KL has no closed form
    assert wanted <= {*asked}
    for a, b in zip(here.model.trainable().values(), weights, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5)


def test_an_adapter_on_a_gpu_is_in_bfloat16_with_masters_and_casts_nothing(gpu, monkeypatch):
    """On a CPU, and under DoRA, it stays in float32. A cast counts where a layer's forward pass makes another type."""

    def made(device: str, **lora) -> tuple[set[torch.dtype], set[torch.dtype], int]:
        run = make(tiny.tokenizer(["say a: b"], 270), lora=Lora(rank=4, **lora), dtype=torch.bfloat16, device=device)
        masters = {master.dtype for master in run.optimizer.masters.values()}
        layer = next(module for module in run.model.network.modules() if hasattr(module, "lora_A"))
        casts, to = [], torch.Tensor.to
        monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: casts.append(x.dtype != (y := to(x, *a, **k)).dtype) or y)
        layer(torch.ones(3, layer.in_features, dtype=torch.bfloat16).to(device))
        monkeypatch.setattr(torch.Tensor, "to", to)
        return {p.dtype for p in run.model.trainable().values()}, masters, sum(casts)

    half, full = {torch.bfloat16}, {torch.float32}
    assert made("cpu")[:2] == (full, full) and made("cpu")[2] > 0
    with gpu():
        assert made("cuda") == (half, full, 0)
        assert made("cuda", dora=True)[0] == full


COUNTED = [("opo", 1, 1, 0), ("opo", 2, 2, 0), ("grpo", 1, 2, 0), ("ppo", 1, 3, 0), ("online_dpo", 1, 2, 0), ("opo", 1, 1, 1)]


@pytest.mark.parametrize(("algorithm", "iterations", "wanted", "planted"), COUNTED)
def test_the_host_waits_once_per_optimiser_step_and_column(gpu, algorithm, iterations, wanted, planted, monkeypatch):
    """A column is what other passes than those of training compute: the reference's log-probs (grpo, ppo), values (ppo).

    Several micro-batches wait as often as one, so that the host runs ahead of the device.
    """

    def waits(budget: int) -> tuple[Counter, int]:
        settings = {"num_iterations": iterations, "optim": Optim(learning_rate=1e-2, max_grad_norm=0.0)}
        run = make(tokenizer, algorithm, steps=1, device="cuda", micro_batch_tokens=budget, **settings)
        passes, collected, backward = [], collect(run, 0, 0, Clock()), torch.Tensor.backward

        def counted(loss, *given):
            passes.append(float(loss) if planted else 0.0)
            return backward(loss, *given)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "backward", counted)
            WAITED.clear()
            learn(run, collected.groups, State(algorithm=run.algorithm.initial_state()), 1e-3)
        # Attention waits for an index of each layout; the stand-in of its kernel is in this folder.
        return Counter({place: n for place, n in WAITED.items() if not place.startswith("packed_inputs")}), len(passes)

    tokenizer = tiny.tokenizer(["say a: b"], 270)
    with gpu():
        (few, one), (many, several) = waits(1 << 20), waits(16)
    print(few, many)
    assert one < several and (few.total() == many.total() == wanted) is not bool(planted)


@pytest.mark.parametrize("model_type", ["qwen3", pytest.param("gpt2", marks=SLOW)])
@pytest.mark.parametrize("shortest", [1, 1 << 20])
def test_recorded_decoding_never_waits_and_prompts_are_prefilled_in_parts(gpu, model_type, shortest, monkeypatch):
    """With a prompt once for its group, or in each slot. Of prompts of 3, 6, 9, 12 and 15 tokens, at most 20 are read at once."""
    monkeypatch.setattr(embedded, "SHORTEST", shortest)
    monkeypatch.setattr(cuda_graph, "PREFILLED", 20)
    tokenizer, found, prefilled = tiny.tokenizer(["say a: b"], 270), [], []
    own = embedded.prefill
    monkeypatch.setattr(embedded, "prefill", lambda *given: prefilled.append(sum(map(len, given[2]))) or own(*given))
    requests = [Request(tuple(range(5, 8 + 3 * n)), (n, n + 9)) for n in range(5)]
    params = SamplingParams(max_tokens=12, top_k=30, temperature=0.7)
    for device in ("cpu", "cuda"):
        with gpu() if device == "cuda" else nullcontext([]) as asked:
            torch.manual_seed(0)
            model = prepare(tiny.model(model_type, len(tokenizer)).to(device), tokenizer)
            model.decoder = None
            found.append([[c.ids for c in group] for group in EmbeddedSampler(model).sample(requests, params)])
    assert found[0] == found[1] and "recording" in asked and prefilled == [45, 18, 12, 15]


def test_a_gpu_loads_no_kernels_for_cpus_which_a_checkout_would_compile(gpu, job, tmp_path, monkeypatch):
    """A run loads its model, notes what it depends on, samples and learns."""
    loaded, loads = [], (compiled.kernels, cpu.kernels)
    for module in [module for name, module in sys.modules.items() if name.startswith("psigrad.")]:
        if getattr(module, "kernels", None) in loads:
            monkeypatch.setattr(module, "kernels", lambda name=module.__name__: loaded.append(name) or "none")
    tokenizer = tiny.tokenizer(["say a: b"], 270)
    for device in ("cuda", "cpu"):
        with gpu() if device == "cuda" else nullcontext():
            run = make(tokenizer, "grpo", steps=1, device=device)
            learn(run, collect(run, 0, 0, Clock()).groups, State(algorithm=run.algorithm.initial_state()), 1e-3)
            settings = online_config(job, tmp_path, device=device)
            assert run_pins.collect_pins(settings, tokenizer, PreparedRows([], [], [], []))["kernels"] != "on" or device == "cpu"
            slow = "run without Triton kernels" in run.model.slow_reason
            assert slow == (device == "cuda"), "this host has no GPU, so Triton compiles nothing"
            monkeypatch.setattr(run_pins, "triton_kernels", object)
            assert run_pins.collect_pins(settings, tokenizer, PreparedRows([], [], [], []))["kernels"] == "on" or device == "cpu"
        assert bool(loaded) == (device == "cpu"), loaded


WAITING = {
    "read": lambda: float(torch.ones(1, device="cuda")),
    "branch": lambda: bool(torch.ones(1, device="cuda") > 0),
    "copy": lambda: torch.tensor([1], device="cuda"),
}


@pytest.mark.parametrize("kind", WAITING)
def test_negative_control_a_recorded_step_that_waits_is_noticed(kind, gpu):
    with gpu(), torch.inference_mode(), pytest.raises(RuntimeError, match="stream is capturing"):
        again(WAITING[kind])


def test_negative_control_a_tensor_of_the_host_is_noticed(gpu):
    with gpu():
        layer = torch.nn.Linear(3, 2).to("cuda")
        there = layer(torch.ones(4, 3, device="cuda"))
        assert isinstance(there, OnDevice) and there.device.type == "cuda" and there.cpu().device.type == "cpu"
        there.sum().backward()
        assert isinstance(layer.weight.grad, OnDevice)
        with pytest.raises(RuntimeError, match=r"a tensor of the host, .*, beside one of the GPU"):
            layer(torch.ones(4, 3))
        with pytest.raises(TypeError, match="device type tensor to numpy"):
            there.detach().numpy()
