"""The plan of many devices against runs that others have published: seconds of a step, without the time that weights travel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from psigrad import cli
from psigrad.config import Model, OnlineConfig, Run, Sampling, SFTConfig
from psigrad.config.load import load
from psigrad.language.models.sizes import size
from psigrad_extras.preflight import plan
from psigrad_extras.preflight.plan import arithmetic, shape
from psigrad_extras.preflight.plan.hardware import named_gpu
from psigrad_extras.preflight.plan.placements import PUBLISHED, splits
from psigrad_extras.preflight.plan.predict import filling
from psigrad_extras.preflight.plan.shape import shape_of

# NeMo RL 0.4, docs/about/performance-summary.md (github.com/NVIDIA-NeMo/RL, also docs.nvidia.com/nemo/rl/0.4.0): GRPO on
# OpenMathInstruct-2, DGX H100, bfloat16, 64 prompts of 32 completions a step (examples/configs/recipes/llm/performance), four
# optimiser steps, a KL to a reference, texts of at most 4,096 tokens. The mean is that of completions: tokens a second are those
# of texts 130 tokens longer. One step off: half of the devices sample.
SHAPES = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "qwen3-32b": Qwen3Config(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    ),
}
QWEN = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    tie_word_embeddings=True,
)
PROMPT = 130
# model, devices, devices that sample alone, of an engine, mean completion, seconds of a step
RUNS = [
    ("llama-3.1-8b", 16, 0, 1, 1060, 97.7),
    ("llama-3.1-8b", 16, 8, 1, 1129, 74.6),
    ("qwen3-32b", 32, 0, 4, 3206, 393),
    ("qwen3-32b", 64, 32, 4, 3207, 215),
    ("qwen3-30b-a3b", 32, 0, 4, 3154, 225),
    ("qwen3-30b-a3b", 32, 16, 2, 3158, 244),
]


def folder_of(name: str, tmp_path) -> str:
    SHAPES[name].save_pretrained(tmp_path / name)
    return str(tmp_path / name)


def settings(path: str, tensor: int, lag: int) -> OnlineConfig:
    return OnlineConfig(
        model=Model(path=path, dtype="bfloat16", gradient_checkpointing=True),
        run=Run(device="cuda"),
        algorithm="grpo",
        prompts_per_step=64,
        num_generations=32,
        num_minibatches=4,
        micro_batch_tokens=32768,
        lag=lag,
        sampling=Sampling(
            sampler="vllm",
            vllm_sleep=True,
            tensor_parallel_size=tensor,
            max_decode_batch=1024,
            max_completion_length=4096 - PROMPT,
        ),
    )


def seconds(run, tmp_path) -> tuple[float, float]:
    """What the plan says of the devices divided as they were, and what was published."""
    name, devices, samplers, tensor, mean, published = run
    config = settings(folder_of(name, tmp_path), tensor, int(samplers > 0))
    lengths = plan.Lengths(PROMPT, mean, PROMPT, 4096 - PROMPT)
    found = splits(config, lengths, named_gpu("h100", "bfloat16"), devices, 50e9)
    split = next(s for s in found if s.samplers == samplers and s.strategy == "fsdp")
    return replace(split, publishing=0.0).seconds(int(samplers > 0)), published


@pytest.mark.parametrize("run", RUNS, ids=[f"{r[0]} on {r[1]}{' with a lag' if r[2] else ''}" for r in RUNS])
def test_a_step_takes_what_it_took_within_30_percent(run, tmp_path):
    planned, published = seconds(run, tmp_path)
    assert planned == pytest.approx(published, rel=0.3)


def test_a_step_of_one_gpu_takes_what_was_measured_within_30_percent(tmp_path, monkeypatch):
    """docs/performance.md: the shape of Qwen3-0.6B, 16 prompts of 8 completions, 64 + 128 tokens, 2.2 s, of which 1.0 sample. A
    layer then launched 179 kernels in a micro-batch without recomputing.
    """
    QWEN.save_pretrained(tmp_path)
    model = Model(path=str(tmp_path), dtype="bfloat16", gradient_checkpointing=True)
    sizes = {"prompts_per_step": 16, "num_generations": 8, "micro_batch_tokens": 65536}
    config = OnlineConfig(model=model, run=Run(device="cuda"), sampling=Sampling(max_completion_length=128), **sizes)
    lengths, gpu = plan.Lengths(64, 128, 64, 128), named_gpu("h100", "bfloat16")
    now = plan.predict(config, lengths, gpu)
    monkeypatch.setattr(arithmetic, "KERNELS", (56, 123))
    monkeypatch.setattr(arithmetic, "MOVED", (5, 11))
    made = plan.predict(config, lengths, gpu)
    print(made.phases, now.phases)
    assert all(now.phases[name] < 0.8 * made.phases[name] for name in ("sampling", "training"))
    assert made.seconds == pytest.approx(2.2, rel=0.3) and made.phases["sampling"] == pytest.approx(1.0, rel=0.1)
    products = replace(made.cost, launching=(0.0, 0.0), moved=0.0)  # the control
    assert products.seconds(made.machine) < 0.5


def test_negative_control_all_experts_but_one_for_every_token_take_too_long(monkeypatch, tmp_path):
    ours, published = seconds(RUNS[4], tmp_path)
    monkeypatch.setattr(shape, "size", lambda of, name: size(of, "experts") - 1 if name == "chosen" else size(of, name))
    shape_of.cache_clear()
    assert seconds(RUNS[4], tmp_path)[0] > 2 * published > ours
    shape_of.cache_clear()


def test_experts_count_where_a_token_is_sent_to_them(tmp_path):
    """48 layers of 8 experts of 128, each three matrices of 2,048 times 768, and attention; the name says 3 billion of 30."""
    mixture = plan.shape_of(folder_of("qwen3-30b-a3b", tmp_path))
    idle = 48 * 120 * 3 * 2048 * 768
    assert mixture.matrices - mixture.active == idle and 2.6e9 < mixture.active < 3e9 < 29e9 < mixture.matrices
    dense = plan.shape_of(folder_of("qwen3-32b", tmp_path))
    assert dense.active == dense.matrices


def test_weights_travel_at_the_speed_that_was_measured(tmp_path):
    """8 billion weights of 2 bytes at 0.8 GB/s take 20 s, whatever the network could; 16 to 27 s were measured."""
    config = settings(folder_of("llama-3.1-8b", tmp_path), 1, 1)
    found = splits(config, plan.Lengths(130, 1000, 130, 3966), named_gpu("h100", "bfloat16"), 16, 50e9)
    apart = next(s for s in found if s.samplers == 8)
    assert apart.publishing == pytest.approx(2 * 8.03e9 / PUBLISHED, rel=0.01) and 16 < apart.publishing < 27
    slow = splits(config, plan.Lengths(130, 1000, 130, 3966), named_gpu("h100", "bfloat16"), 16, 0.4e9)
    assert next(s for s in slow if s.samplers == 8).publishing == pytest.approx(2 * apart.publishing, rel=0.01)


@pytest.mark.parametrize(("model", "tensor"), [("llama-3.1-8b", 1), ("qwen3-32b", 2), ("qwen3-30b-a3b", 2)])
def test_vllms_pages_fit_where_rooms_as_long_as_the_longest_would_not(model, tensor, tmp_path):
    """64 devices, of which some train and others sample: something fits, and 2,048 texts of 4,096 tokens would not be held."""
    config = replace(settings(folder_of(model, tmp_path), tensor, 1), micro_batch_tokens=8192)
    lengths, h100 = plan.Lengths(130, 1000, 130, 3966), named_gpu("h100", "bfloat16")
    best = splits(config, lengths, h100, 64, 50e9)[0]
    assert best.fits and best.samplers
    starved = splits(settings(str(tmp_path / model), 1, 1), lengths, replace(h100, memory=20 * 10**9), 64, 50e9)
    assert not any(s.fits for s in starved) and any(s.starved for s in starved)


def test_what_an_engine_lacks_is_said_where_trainers_fit(tmp_path, capsys):
    """70 billion weights of 2 bytes: 64 devices of 80 GB train them, and four together sample with them. No GPU has pages of the
    file that they are read from, whose 141 GB would fit nowhere.
    """
    own = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = LlamaConfig(**own, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
    config.save_pretrained(tmp_path / "large")
    arguments = ["plan", "grpo", "--model", str(tmp_path / "large"), "--prompt-length", "130", "--sampler", "vllm"]
    arguments += ["--device", "cuda", "--gpu", "h100", "--devices", "64"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "No division fits, because vLLM's engine needs more memory than a device has." in out
    assert "To save memory, try sampling.tensor_parallel_size=4." in out
    assert "Sharded, the trainer fits on 64 devices." in out
    assert cli.main([*arguments, "--tensor-parallel-size", "4"]) == 0
    assert "Best: placement.processes=" in capsys.readouterr().out


def test_an_adapter_of_eight_billion_weights_fits_a_gpu_of_24_gb(tmp_path):
    model = Model(folder_of("llama-3.1-8b", tmp_path), dtype="bfloat16", lora_rank=16, gradient_checkpointing=True)
    config = SFTConfig(model=model, run=Run(device="cuda"), micro_batch_tokens=2048)
    found = plan.predict(config, plan.Lengths(130, 300, 130, 300), named_gpu("l4", "bfloat16"), quick=True)
    assert found.fits and found.memory.phase == "train" and 18e9 < found.memory.peak < 21e9


def test_slots_of_the_embedded_sampler_are_counted_and_do_not_fit_where_pages_do(tmp_path):
    """256 slots of 2,560 tokens, each with keys and values of 8 heads of 128 in 32 layers, in two bytes: 86 GB."""
    config = replace(settings(folder_of("llama-3.1-8b", tmp_path), 1, 0), micro_batch_tokens=8192)
    embedded = replace(config, sampling=Sampling(max_decode_batch=256, max_completion_length=2430))
    found = plan.predict(embedded, plan.Lengths(130, 2430, 130, 2430), named_gpu("h100", "bfloat16"), quick=True)
    (cache,) = [item.bytes for item in found.memory.items if item.name == "KV cache"]
    assert cache == pytest.approx(256 * 2560 * 2 * 32 * 8 * 128 * 2, rel=0.02) and 85e9 < cache < 88e9 and not found.fits


def test_the_command_takes_a_gpu_by_name(tmp_path, capsys):
    arguments = ["plan", "grpo", "--model", folder_of("llama-3.1-8b", tmp_path), "--prompt-length", "130", "--sampler", "vllm"]
    assert cli.main([*arguments, "--device", "cuda", "--gpu", "h100", "--devices", "64"]) == 0
    out = capsys.readouterr().out
    assert "64 devices of 80 GB" in out and "Best:" in out
    # 1,024 completions of 100 tokens, of which the embedded sampler decodes 256 until the longest has ended
    assert cli.main([*arguments, "--device", "h100", "--prompts-per-step", "128", "--completion-length", "100"]) == 0
    out = capsys.readouterr().out
    assert "phases     sampling " in out and "samplers   embedded " in out and "; vllm is faster" in out
    assert cli.main([*arguments, "--device=h100", "--vllm-memory", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "vLLM's share of the memory is too small" in out and "sampling.tensor_parallel_size=2" in out
    assert cli.main([*arguments, "--device", "cuda", "--gpu", "h1000"]) == 2
    assert "gpu is 'h1000'; expected one of" in capsys.readouterr().err
    assert cli.main([*arguments, "--device", "cpu", "--gpu", "h100"]) == 2
    assert "add --device cuda" in capsys.readouterr().err


@pytest.mark.parametrize(("memory", "anew"), [(80, False), (30, False), (18, True)])
def test_activations_are_recomputed_only_where_the_plan_needs_it(memory, anew, tmp_path):
    """The shape of Qwen3-0.6B: without recomputing micro-batches are smaller, and faster while they hold thousands."""
    QWEN.save_pretrained(tmp_path)
    config = load(SFTConfig, flags={"device": "cuda", "path": str(tmp_path)})
    gpu = replace(named_gpu("h100", "bfloat16"), memory=memory * 10**9)
    found, lengths = filling(config, gpu), plan.lengths_of(config)[0]
    assert found.model.gradient_checkpointing is anew and plan.predict(found, lengths, gpu).fits
    least = replace(found, micro_batch_tokens=1024, model=replace(found.model, gradient_checkpointing=False))
    small, best = (plan.predict(one, lengths, gpu).phases["training"] for one in (least, found))
    assert best < small or not anew  # it would fit, in passes of so few tokens that their launches take longer
    assert filling(config, replace(gpu, peak=0.0)).model.gradient_checkpointing  # with no speed to compare: the default
    assert not filling(least if anew else found, gpu).model.gradient_checkpointing  # what is given stays


@pytest.mark.parametrize(("memory", "slots"), [(80, 64), (40, 32), (24, 16), (22, 8)])
def test_sequences_are_decoded_at_once_that_leave_half_of_the_memory_to_training(memory, slots, tmp_path):
    """The shape of Qwen3-0.6B: 114,688 bytes a token, and 2,816 tokens and two eighths of a prompt, 0.33 GB, a slot. Weights,
    reference, gradients and moments take 10.7 GB. Half of the rest is 35, 15, 7 or 6 GB, and in the last a pass needs more than
    what 16 slots leave.
    """
    QWEN.save_pretrained(tmp_path)
    flags = {"device": "cuda", "path": str(tmp_path), "max_completion_length": 2816, "prompts_per_step": 32}
    config = load(OnlineConfig, flags=flags)
    gpu = replace(named_gpu("h100", "bfloat16"), memory=memory * 10**9)
    found = filling(config, gpu)
    assert config.sampling.max_decode_batch == 256 and found.sampling.max_decode_batch == slots
    made = plan.predict(found, plan.lengths_of(found)[0], gpu)
    (cache,) = [item for item in made.memory.items if item.name == "KV cache"]
    assert cache.phase == "held" and made.fits
    assert not plan.predict(replace(found, sampling=config.sampling), plan.lengths_of(found)[0], gpu).fits, "the control"
    cpu = replace(gpu, device="cpu")
    assert filling(config, cpu).sampling.max_decode_batch == 256


def test_an_engine_that_sleeps_is_proposed_with_the_share_that_is_free_then(tmp_path):
    """Of 1.7 billion weights training holds 27.5 GB beside 3.4 of a reference; vLLM's 0.4 of 48 GB is 19. A share of 0.15 is 7.2
    GB, for weights of 3.4, and with 32 GB of memory there is none.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    Qwen3Config(**sizes, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True).save_pretrained(
        tmp_path
    )
    config = replace(settings(str(tmp_path), 1, 0), micro_batch_tokens=4096)
    config = replace(config, sampling=replace(config.sampling, vllm_sleep=False))
    lengths, gpu = plan.Lengths(130, 1000, 130, 2000), named_gpu("l40s", "bfloat16")
    made = plan.predict(config, lengths, gpu)
    (way,) = [(name, other) for name, other in made.ways if "vllm_sleep" in name]
    assert not made.fits and way[1].fits and way[0] == "sampling.vllm_sleep=true sampling.vllm_memory=0.15"
    assert not any("vllm_sleep" in name for name, _ in plan.predict(config, lengths, replace(gpu, memory=32 * 10**9)).ways)
    alone = replace(config, sampling=replace(config.sampling, vllm_sleep=True))
    assert not plan.predict(alone, lengths, gpu).fits, "the control: asleep with the same share"
