"""Writes docs/families.md: how each family of models is computed, as tiny random models show it: python docs/make/families.py"""

from __future__ import annotations

import copy
import json
import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parent))

from filled import fill
from real import interval

from psigrad.errors import UserError, reason_of
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler, why_not_embedded
from psigrad.language.rollout.types import Request, SamplingParams

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
MEASURED = ROOT / "benchmarks" / "results" / "families.jsonl"
LARGEST = 40_000_000  # parameters
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
NEMOTRON_H = {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16}
NEMOTRON_H |= {"n_groups": 2, "ssm_state_size": 8, "chunk_size": 16, "moe_shared_expert_intermediate_size": 48}
NEMOTRON_3 = {**ROUTED, **NEMOTRON_H, "layers_block_type": ["mamba", "attention", "mlp", "moe"]}
# transformers' name: (what it is known as, settings that bring out what is its own)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("Qwen 3.5", DELTA),
    "qwen3_next": ("Qwen 3 Next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 48}),
    "lfm2": ("LFM 2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "lfm3": ("LFM 3", {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "sliding_window": 6}),
    "granitemoehybrid (hybrid)": (
        "Granite 4 (hybrid)",
        {**DENSE, **MAMBA, **SCALED, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "nemotron_h": ("Nemotron-H", NEMOTRON_H),
    "nemotron_h (experts)": ("Nemotron 3", NEMOTRON_3),
    "gemma3_text": ("Gemma 3", {"query_pre_attn_scalar": 16, "sliding_window": 6}),
    "gemma4_text": ("Gemma 4", {**SHARED, "global_head_dim": 32}),
    "olmo_hybrid": ("OLMo Hybrid", DELTA),
    "falcon_h1": ("Falcon-H1", MAMBA),
    "kimi_linear": ("Kimi Linear", {**ROUTED, **LATENT, **KIMI}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "smollm3": ("SmolLM3", {}),
    "ministral3": ("Ministral 3", {}),
    "llama": ("Llama, SmolLM2", {}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen 2 and 2.5", {}),
    "qwen3": ("Qwen 3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", {"query_pre_attn_scalar": 16, "sliding_window": 6}),
    "gemma3n_text": ("Gemma 3n", {**SHARED, "laurel_rank": 8}),
    "phi": ("Phi 1 and 2", {}),
    "phi3": ("Phi 3 and 4", {}),
    "phimoe": ("Phi 3.5 with experts", {**EXPERTS, "router_jitter_noise": 0.3}),
    "olmo": ("OLMo", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", {"sliding_window": 6}),
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
    "diffllama": ("DiffLlama", {}),
    "stablelm": ("StableLM", {}),
    "starcoder2": ("StarCoder 2", {}),
    "nemotron": ("Nemotron", {}),
    "gpt2": ("GPT-2", {}),
    "gpt_neox": ("Pythia", {}),
    "granitemoehybrid": ("Granite 4 (attention only)", {**DENSE, **SCALED}),
    "granitemoe": ("Granite 3 with experts", {**EXPERTS, **SCALED}),
    "qwen2_moe": ("Qwen 2 with experts", EXPERTS),
    "qwen3_moe": ("Qwen 3 with experts", EXPERTS),
    "mixtral": ("Mixtral", EXPERTS),
    "gpt_oss": ("gpt-oss", {**EXPERTS, "sliding_window": 6}),
}


# Settings without which other types have no model of this size.
_SPECIAL: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_ngroups": 2},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
}


def config(name: str, **sizes: Any) -> Any:
    """A small model of the family, with these sizes in place of those above."""
    return AutoConfig.for_model(name.partition(" ")[0], **{**SIZES, **FAMILIES[name][1], **sizes})


def others() -> list[str]:
    """Every other type of model in the installed transformers that writes text from text."""
    known = {name.partition(" ")[0] for name in FAMILIES}
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in known and f"{name}_text" not in known)


def other_config(name: str, **sizes: Any) -> Any:
    """A small model of a type that stands in no table above. Raises what transformers raises where there is none."""
    plain = AutoConfig.for_model(name)
    if plain.get_text_config() is not plain:
        raise ValueError("it reads more than text")
    known = {*vars(plain), *plain.attribute_map}
    small = {"head_dim": 8, "num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    fixed = {knob for knob in dir(type(plain)) if isinstance(getattr(type(plain), knob, None), property)}
    own = {
        knob: value for knob, value in {**EXPERTS, **ROUTED, **LATENT, **MAMBA, **SIZES, **small}.items() if knob in known - fixed
    }
    return AutoConfig.for_model(name, **{**own, **_SPECIAL.get(name, {}), **sizes})


def pair(made: Any, tokenizer: Any) -> tuple[LanguageModel, Any]:
    """A model with random weights, prepared, and a copy from before that, as transformers' eager modules compute it."""
    torch.manual_seed(0)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(made).parameters())
    if count > LARGEST:
        raise ValueError(f"its smallest has {count / 1e6:.0f} million parameters")
    hf: Any = AutoModelForCausalLM.from_config(made)
    for p in hf.parameters():
        torch.nn.init.normal_(p, mean=0.0, std=0.2) if p.dim() > 1 else torch.nn.init.normal_(p, mean=0.5, std=0.2)
    oracle = copy.deepcopy(hf).eval()
    oracle.set_attn_implementation("eager")
    return prepare(hf, tokenizer), oracle


def row(name: str, tokenizer: Any) -> str:
    """One line of the first table."""
    made = config(name, vocab_size=len(tokenizer))
    model, oracle = pair(made, tokenizer)
    computed = way(model)
    gaps = f"{shown(gap(model, oracle))} | {sampler_gap(model, oracle)}"
    return f"| {FAMILIES[name][0]} | `{made.model_type}` | **{computed}**{why(model)} | {gaps} | {ratio(name, computed)} |"


def other_row(name: str, tokenizer: Any) -> str:
    """The way, the larger gap and the reason of another type, between bars."""
    try:
        model, oracle = pair(other_config(name, vocab_size=len(tokenizer)), tokenizer)
    except UserError as error:
        return "refused|0|" if "reads later tokens" in str(error) else ""
    sampled = sampler_gap(model, oracle).replace("\u2011", "-")
    largest = max(gap(model, oracle), 0.0 if sampled == "-" else float(sampled))
    reason = re.sub("in float32 its outputs differ (by [^,]*),.*", r"differs \1", model.why_padded.partition(": ")[2])
    return f"{way(model)}|{shown(largest)}|{reason}"


def others_text(found: dict[str, str]) -> str:
    """Return the lists of the other types by how they are computed, each type with its gap if that is above 1e-5."""
    lists: dict[str, list[str]] = {}
    for name, line in found.items():
        computed, size, reason = line.split("|", 2) if line else ("none", "0", "")
        kind = f"{computed}, {'differs' if reason.startswith('differs') else 'fails'}" if computed == "padded" else computed
        close = float(size.replace("\u2011", "-")) <= float("1e-5")
        lists.setdefault(kind, []).append(f"`{name}`" if close else f"`{name}` ({size})")
    heads = {
        "fused": "**Fused**",
        "packed": "**Packed**",
        "padded, differs": "**Padded**, because packed outputs differ from the model's own",
        "padded, fails": "**Padded**, because their modules do not support packed sequences",
        "refused": "**An error**, because these types read later tokens",
        "none": "**Not tried**, because no small random model could be built",
    }
    return "\n\n".join(f"{head}: {', '.join(lists[kind])}." for kind, head in heads.items() if kind in lists)


def ratio(name: str, computed: str) -> str:
    """TRL's seconds over ours, with the 95 % interval, as they were measured once, and how the model there was
    computed where that is another way.
    """
    lines = map(json.loads, MEASURED.read_text().splitlines() if MEASURED.exists() else ())
    found = next((line for line in lines if line["family"] == name and "pairs" in line), None)
    if found is None:
        return "-"
    middle, low, high = interval([theirs / ours for ours, theirs in found["pairs"]])
    other = f" ({found['way']})" if found["way"] != computed else ""
    return f"{middle:.1f}\N{NO-BREAK SPACE}[{low:.1f},\N{NO-BREAK SPACE}{high:.1f}]{other}"


def why(model: LanguageModel) -> str:
    """Return why a model is padded, in a few words after a colon."""
    reason = model.why_padded.partition(": ")[2]
    differs = "outputs differ" in reason
    few = "packed outputs are wrong" if differs else reason if len(reason) < 60 else "its modules take no packed row"
    return f": {few}" if reason else ""


def way(model: LanguageModel) -> str:
    """How psigrad computes a model."""
    return "padded" if model.why_padded else "packed" if model.decoder is None else "fused"


def shown(number: float) -> str:
    """As 1.4e‑06, with a hyphen that no narrow column breaks at."""
    return f"{number:.1e}".replace("-", "\u2011")


def differences(oracle: Any, prompt: Sequence[int], ids: Sequence[int], logp: Tensor) -> float:
    """The largest difference of these log-probs [T] from those of transformers' eager modules on this sequence alone."""
    logits = oracle(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float((logits[torch.arange(len(ids)), torch.tensor(ids)] - logp[: len(ids)]).abs().max())


@torch.no_grad()
def sampler_gap(model: LanguageModel, oracle: Any) -> str:
    """The same for what psigrad's sampler draws and reports; a dash where transformers samples."""
    if model.why_padded or why_not_embedded(model):
        return "-"
    requests = [Request((7, 9, 11, 5, 6), (1, 2)), Request((20, 8), (3,))]
    made = EmbeddedSampler(model).sample(requests, SamplingParams(max_tokens=16))
    pairs = [(request.prompt_ids, one) for request, group in zip(requests, made, strict=True) for one in group]
    return shown(max(differences(oracle, prompt, one.ids, torch.tensor(one.logprobs)) for prompt, one in pairs))


@torch.no_grad()
def gap(model: LanguageModel, oracle: Any) -> float:
    """The largest difference of a token's log-prob from that of transformers' eager modules, one row at a time, in float32."""
    draw = torch.Generator().manual_seed(1)

    def text(n: int) -> list[int]:
        return torch.randint(4, 60, (n,), generator=draw).tolist()

    groups = Groups([text(9), text(3)], [[text(14), text(5)], [text(20), text(1)]])
    ours = model.evaluate(groups).logp
    rows = [(p, ids) for p, group in zip(groups.prompts, groups.completions, strict=True) for ids in group]
    return max(differences(oracle, prompt, ids, logp) for (prompt, ids), logp in zip(rows, ours, strict=True))


def tried(make: Callable[[str, Any], str], name: str, tokenizer: Any, failed: str) -> str:
    """A line of a table, or why there is none; no type may take more than two minutes."""

    def late(*_: Any) -> None:
        raise ValueError("it takes more than two minutes")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    try:
        return make(name, tokenizer)
    except Exception as error:
        return failed.format(reason_of(error).split("\n")[0][:120].replace("|", "/"))
    finally:
        signal.alarm(0)


def page() -> str:
    """Return docs/families.md with its tables."""
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    rows = [
        "| family | `model_type` | computed | gap | sampler gap | speed-up over TRL |",
        "|---|---|---|---|---|---|",
    ]
    rows += [tried(row, name, tokenizer, f"| {FAMILIES[name][0]} | `{name}` | not run: {{}} | | | |") for name in FAMILIES]
    found = {name: tried(other_row, name, tokenizer, "") for name in others()}
    return fill(PAGE.read_text(), families="\n".join(rows), others=others_text(found))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    PAGE.write_text(page())
