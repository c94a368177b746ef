"""Small models of every kind that is fused, and packed inputs of unlike lengths."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import torch
from prepared import prepared
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Exaone4Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm3Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    NemotronHConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.models.packing import Groups, Rows

COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
# Heads of 8, 12, 16 and 20 numbers: wider and narrower than a register.
CONFIGS = {
    "llama": LlamaConfig(**COMMON, hidden_size=64, attention_bias=True),
    "mistral": MistralConfig(**COMMON, hidden_size=48, sliding_window=5),
    "qwen2": Qwen2Config(**COMMON, hidden_size=80),
    "qwen3": Qwen3Config(**COMMON, hidden_size=40, head_dim=8),
    "qwen3 of equal heads": Qwen3Config(**{**COMMON, "num_key_value_heads": 4}, hidden_size=40, head_dim=64),
}
# What tells these layers from Llama's is made strong: factors other than 1, windows and positions inside the texts.
_FACTORS = {"attention_multiplier": 0.5, "residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 0.25}
_ROPE = {
    "rope_theta": 1e4,
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}
_HALF = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
_LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_DENSE = {"shared_intermediate_size": 96, "num_local_experts": 0, "num_experts_per_tok": 0}
_MIXED = {"layer_types": ["linear_attention", "full_attention"], "hidden_size": 64}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# Sliding layers have other heads than full ones. Scores have no factor, so a large epsilon bounds them.
_GEMMA_4 = {"hidden_size": 64, "head_dim": 16, "global_head_dim": 24, "rms_norm_eps": 0.3}
_SHARED = {
    "layer_types": ["full_attention", *["sliding_attention"] * 2, *["full_attention"] * 2], "num_kv_shared_layers": 3,
    "sliding_window": 5, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 280,
}  # fmt: skip
# Layers with a state, with experts or with shared keys, and attention whose output has a gate. The norm of a delta net has tiny
# inputs where queries and keys are nearly orthogonal. A large epsilon bounds its gain, by which it multiplies rounding.
HYBRIDS = {
    "lfm2": Lfm2Config(**COMMON, hidden_size=64, layer_types=["conv", "full_attention"], conv_bias=True),
    "lfm3": Lfm3Config(**COMMON, hidden_size=64, layer_types=["conv", "sliding_attention"], sliding_window=5, head_dim=16),
    "qwen3.5": Qwen3_5TextConfig(**COMMON, **_MIXED, **_DELTA, head_dim=16, rms_norm_eps=1e-2),
    "granite 4 hybrid": GraniteMoeHybridConfig(**COMMON, **_MIXED, **_DENSE, **_MAMBA, **_FACTORS),
    "nemotron-h": NemotronHConfig(
        **COMMON, hidden_size=64, head_dim=16, layers_block_type=["mamba", "full_attention", "mlp"], mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=16,
    ),
    "gpt-oss": GptOssConfig(
        **COMMON, **_LOCAL, hidden_size=40, head_dim=12, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=1.0
    ),
    "qwen3-moe": Qwen3MoeConfig(**COMMON, **_EXPERTS, hidden_size=40, head_dim=8),
    "qwen3-moe and a dense layer": Qwen3MoeConfig(**COMMON, **_EXPERTS, hidden_size=40, head_dim=8, mlp_only_layers=[0]),
    "gemma4": Gemma4TextConfig(
        **COMMON, **_GEMMA_4, **_LOCAL, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0
    ),
    "gemma4 of shared keys": Gemma4TextConfig(**{**COMMON, "num_hidden_layers": 5}, **_GEMMA_4, **_SHARED),
    "bamba": BambaConfig(**COMMON, **_MAMBA, hidden_size=64, attn_layer_indices=[1]),
}  # fmt: skip
FORMS = {
    "smollm3": SmolLM3Config(**COMMON, hidden_size=64, no_rope_layers=[1, 0]),
    "ministral3": Ministral3Config(**COMMON, hidden_size=64, head_dim=16, rope_parameters=_ROPE, max_position_embeddings=512),
    "phi3": Phi3Config(**COMMON, hidden_size=64, rope_parameters=_HALF),
    "granite": GraniteConfig(**COMMON, hidden_size=48, **_FACTORS),
    "granite 4": GraniteMoeHybridConfig(
        **COMMON, hidden_size=64, **_DENSE, **_FACTORS,
        layer_types=["attention"] * 2, mamba_n_heads=8, mamba_d_head="auto", position_embedding_type="rope",
    ),
    "olmo3": Olmo3Config(**COMMON, hidden_size=64, **_LOCAL),
    "exaone4": Exaone4Config(**COMMON, hidden_size=80, **_LOCAL),
    "gemma3": Gemma3TextConfig(**COMMON, hidden_size=64, head_dim=16, query_pre_attn_scalar=1024, **_LOCAL),
}  # fmt: skip


def made(config, tokenizer, dtype=torch.float32):
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), 0, 1
    key = ("fused", type(config), config.to_json_string(), tokenizer, dtype)
    return prepared(key, partial(made_anew, config, tokenizer, dtype))


def made_anew(config, tokenizer, dtype=torch.float32):
    """The same, for what a test has changed about how a model is prepared."""
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), 0, 1
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config)
    for name, p in hf.named_parameters():  # biases of 0, norms of 1 and convolutions near 0 would hide mistakes
        if "bias" in name or "norm" in name or p.dim() == 3:
            torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    for name, constant in hf.named_buffers():
        if "layer_scalar" in name:
            constant.fill_(0.7)
    return prepare(hf.to(dtype), tokenizer)


def adapted(config, tokenizer, dtype=torch.float32, **lora):
    """The model under LoRA, its adapter at work."""
    model = prepare(made(config, tokenizer, dtype).network, tokenizer, lora=Lora(3, **lora))
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():  # fresh adapters add nothing: their B is 0
        for p in model.trainable().values():
            p.copy_(0.1 * torch.randn(p.shape, generator=draw))
    return model


def tied_or_not(tied: bool, tokenizer):
    """A Qwen3 whose embedding is its head, or not."""
    config = copy.deepcopy(CONFIGS["qwen3"])
    config.tie_word_embeddings = tied
    return made(config, tokenizer)


def written(folder: Path, config, tokenizer, auto=AutoModelForCausalLM, **settings):
    """A folder with a fresh model, biases and norms stirred, and the model."""
    config = copy.deepcopy(config)
    for name, value in {"vocab_size": len(tokenizer), "eos_token_id": 0, "pad_token_id": 1, **settings}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    hf = auto.from_config(config)
    for p in hf.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, mean=0.5, std=0.2)
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return hf


def is_known(model) -> bool:
    """Return True if the model was loaded without a comparison of ways to compute it: no texts were drawn for one."""
    return model.probe_texts is None and model.decoder is not None


def both(model, run):
    """`run()` fused, then by transformers' modules."""
    decoder, ours = model.decoder, run()
    model.decoder = None
    theirs = run()
    model.decoder = decoder
    return ours, theirs


def some_groups() -> Groups:
    """Three prompts with completions of unlike lengths, longer than one block of queries, one of a single token, one empty."""
    draw = torch.Generator().manual_seed(3)

    def text(n):
        return torch.randint(2, 40, (n,), generator=draw).tolist()

    return Groups([text(7), text(1), text(31)], [[text(5), text(1), text(70)], [text(26), []], [text(3), text(25)]])


def some_rows() -> Rows:
    groups = some_groups()
    rows = [[*p, *c] for p, cs in zip(groups.prompts, groups.completions, strict=True) for c in cs]
    return Rows(rows, [[i > 2 for i in range(len(row))] for row in rows])


def assert_log_probs_and_gradients_are_transformers(model, inputs):
    """By the fused forward and by transformers' own."""
    parameters = model.trainable()

    def run():
        logp = model.evaluate(inputs).logp
        weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
        return logp.detach(), torch.autograd.grad((logp * weights).sum(), list(parameters.values()))

    (ours, our_gradient), (theirs, their_gradient) = both(model, run)
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=0)
    whole = torch.cat([g.flatten() for g in their_gradient]).norm()
    for name, a, b in zip(parameters, our_gradient, their_gradient, strict=True):
        # a key's bias shifts all scores of a query alike, so its exact gradient is 0 and both sides hold rounding only
        assert float((a - b).norm()) < 1e-5 * float(b.norm()) + 1e-6 * float(whole), name
