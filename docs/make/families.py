"""Writes docs/families.md: how each family of models is computed, as tiny random models show it: python docs/make/families.py"""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parent))

from filled import fill
from real import interval

from psigrad.errors import reason_of
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.packing import Groups

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
MEASURED = ROOT / "benchmarks" / "results" / "families.jsonl"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 48}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8}
SCALED = {"attention_multiplier": 0.25, "residual_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 128, "mamba_chunk_size": 16}
DENSE = {"layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
DENSE |= {"position_embedding_type": "rope", "mamba_n_heads": 8, "mamba_d_head": "auto"}  # of layers that it has none of
DENSE["router_aux_loss_coef"] = 0.0  # or TRL asks for its routers
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA["layer_types"] = ["linear_attention", "full_attention"] * 2
KIMI = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4, "linear_head_dim": 8}
KIMI["num_key_value_heads"] = 4
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
# the last layer has the keys and values of the one before
SHARED = {"layer_types": ["sliding_attention", *["full_attention"] * 3], "sliding_window": 6, "num_kv_shared_layers": 1}
SHARED |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 280}
NEMOTRON_H = {"layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 16}
NEMOTRON_H |= {"n_groups": 2, "ssm_state_size": 8, "chunk_size": 16, "moe_shared_expert_intermediate_size": 48}
# transformers' name: (what it is known as, settings that bring out what is its own)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama, SmolLM2", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "ministral3": ("Ministral 3", {}),
    "qwen2": ("Qwen 2 and 2.5", {}),
    "qwen3": ("Qwen 3", {}),
    "qwen3_5_text": ("Qwen 3.5", DELTA),
    "qwen3_next": ("Qwen 3 Next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 48}),
    "smollm3": ("SmolLM3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", {"query_pre_attn_scalar": 16, "sliding_window": 6}),
    "gemma3_text": ("Gemma 3", {"query_pre_attn_scalar": 16, "sliding_window": 6}),
    "gemma3n_text": ("Gemma 3n", {**SHARED, "laurel_rank": 8}),
    "gemma4_text": ("Gemma 4", {**SHARED, "global_head_dim": 32}),
    "phi": ("Phi 1 and 2", {}),
    "phi3": ("Phi 3 and 4", {}),
    "phimoe": ("Phi 3.5 with experts", {**EXPERTS, "router_jitter_noise": 0.3}),
    "olmo": ("OLMo", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", {"sliding_window": 6}),
    "olmo_hybrid": ("OLMo Hybrid", DELTA),
    "granite": ("Granite 3", SCALED),
    "cohere": ("Command R", {}),
    "cohere2": ("Command R7B and A", WINDOWED),
    "glm4": ("GLM 4", {}),
    "glm4_moe": ("GLM 4.5 to 4.7", ROUTED),
    "deepseek_v3": ("DeepSeek-V3", {**ROUTED, **LATENT, "num_key_value_heads": 4}),
    "exaone4": ("EXAONE 4", {"sliding_window": 6}),
    "ernie4_5": ("ERNIE 4.5", {}),
    "hunyuan_v1_dense": ("Hunyuan", {}),
    "seed_oss": ("Seed-OSS", {}),
    "apertus": ("Apertus", {}),
    "minimax_m2": ("MiniMax-M2", EXPERTS),
    "lfm2": ("LFM 2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "lfm3": ("LFM 3", {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "sliding_window": 6}),
    "kimi_linear": ("Kimi Linear", {**ROUTED, **LATENT, **KIMI}),
    "falcon_h1": ("Falcon-H1", MAMBA),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "nemotron_h": ("Nemotron-H", {**ROUTED, **NEMOTRON_H}),
    "diffllama": ("DiffLlama", {}),
    "stablelm": ("StableLM", {}),
    "starcoder2": ("StarCoder 2", {}),
    "nemotron": ("Nemotron", {}),
    "gpt2": ("GPT-2", {}),
    "gpt_neox": ("Pythia", {}),
    "granitemoehybrid (hybrid)": (
        "Granite 4",
        {**DENSE, **MAMBA, **SCALED, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "granitemoehybrid": ("Granite 4 (dense)", {**DENSE, **SCALED}),
    "granitemoe": ("Granite 3 with experts", {**EXPERTS, **SCALED}),
    "qwen2_moe": ("Qwen 2 with experts", EXPERTS),
    "qwen3_moe": ("Qwen 3 with experts", EXPERTS),
    "mixtral": ("Mixtral", EXPERTS),
    "gpt_oss": ("gpt-oss", {**EXPERTS, "sliding_window": 6}),
}


def config(name: str, **sizes: Any) -> Any:
    """A small model of the family, with these sizes in place of those above."""
    return AutoConfig.for_model(name.partition(" ")[0], **{**SIZES, **FAMILIES[name][1], **sizes})


def row(name: str, tokenizer: Any) -> str:
    """One line of the table."""
    known = FAMILIES[name][0]
    torch.manual_seed(0)
    hf: Any = AutoModelForCausalLM.from_config(config(name, vocab_size=len(tokenizer)))
    for p in hf.parameters():
        torch.nn.init.normal_(p, mean=0.0, std=0.2) if p.dim() > 1 else torch.nn.init.normal_(p, mean=0.5, std=0.2)
    oracle = copy.deepcopy(hf).eval()
    oracle.set_attn_implementation("eager")
    model = prepare(hf, tokenizer)
    reason = model.why_padded.partition(": ")[2]
    computed = way(model)
    return f"| {known} | `{hf.config.model_type}` | **{computed}** | {shown(gap(model, oracle))} | {ratio(name, computed)} | {reason} |"


def ratio(name: str, computed: str) -> str:
    """TRL's seconds over ours, with the 95 % interval, as `benchmarks/family_ratio.py` wrote them down, and how the model there was
    computed where that is another way.
    """
    lines = map(json.loads, MEASURED.read_text().splitlines() if MEASURED.exists() else ())
    found = next((line for line in lines if line["family"] == name and "pairs" in line), None)
    if found is None:
        return "not measured"
    middle, low, high = interval([theirs / ours for ours, theirs in found["pairs"]])
    other = f" ({found['way']})" if found["way"] != computed else ""
    return f"{middle:.1f}\N{NO-BREAK SPACE}[{low:.1f},\N{NO-BREAK SPACE}{high:.1f}]{other}"


def way(model: LanguageModel) -> str:
    """How psigrad computes a model."""
    return "padded" if model.why_padded else "packed" if model.decoder is None else "fused"


def shown(number: float) -> str:
    """As 1.4e‑06, with a hyphen that no narrow column breaks at."""
    return f"{number:.1e}".replace("-", "\u2011")


@torch.no_grad()
def gap(model: LanguageModel, oracle: Any) -> float:
    """The largest difference of a token's log-prob from that of transformers' eager modules, one row at a time, in float32."""
    draw = torch.Generator().manual_seed(1)

    def text(n: int) -> list[int]:
        return torch.randint(4, 60, (n,), generator=draw).tolist()

    groups = Groups([text(9), text(3)], [[text(14), text(5)], [text(20), text(1)]])
    found, ours = [], model.evaluate(groups).logp
    rows = [(p, ids) for p, group in zip(groups.prompts, groups.completions, strict=True) for ids in group]
    for (prompt, ids), logp in zip(rows, ours, strict=True):
        logits = oracle(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(float((logits[torch.arange(len(ids)), torch.tensor(ids)] - logp[: len(ids)]).abs().max()))
    return max(found)


def page() -> str:
    """Return docs/families.md with its table."""
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    rows = []
    for name in FAMILIES:
        try:
            rows.append(row(name, tokenizer))
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            rows.append(f"| {FAMILIES[name][0]} | `{name}` | not run | | | {reason_of(error)} |")
    head = "| family | `model_type` | computed | gap | beside TRL | why not packed |\n|---|---|---|---|---|---|"
    return fill(PAGE.read_text(), families="\n".join([head, *rows]))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    PAGE.write_text(page())
