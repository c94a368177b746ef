"""The plan of many devices against runs that others have published: seconds of a step, without the time that weights travel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from psigrad.config import Model, OnlineConfig, Run, Sampling
from psigrad_extras.preflight import plan
from psigrad_extras.preflight.plan.hardware import named_gpu
from psigrad_extras.preflight.plan.placements import splits

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
        micro_batch_tokens=16384,
        lag=lag,
        sampling=Sampling(
            sampler="vllm", max_completion_length=4096 - PROMPT, max_decode_batch=1024, tensor_parallel_size=tensor
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
