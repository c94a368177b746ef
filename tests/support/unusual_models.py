"""Configurations of models that are not fused."""

from __future__ import annotations

from transformers import DeepseekV3Config, DiffLlamaConfig, HrmTextConfig, MambaConfig, StableLmConfig

COMMON = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
# keys are 24 wide, values 16: multi-head latent attention
MLA = DeepseekV3Config(
    **COMMON, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=4,
    num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, max_position_embeddings=64,
)  # fmt: skip
# attend more than once in a layer
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
TWICE = DiffLlamaConfig(**COMMON, **HEADS)
LOOPED = HrmTextConfig(**COMMON, **HEADS)
MAMBA = MambaConfig(**COMMON, state_size=4, time_step_rank=4)
STABLE = StableLmConfig(**COMMON, **HEADS)
