"""Preparing a model for training leaves what it computes in evaluation mode as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from psigrad.errors import UserError
from psigrad.language.models import probe
from psigrad.language.models.language_model import prepare

SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 96, "max_position_embeddings": 256, "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# The same sizes by the names that older and stateful families have.
OTHER_NAMES = {"head_dim": 16, "n_embd": 64, "d_model": 64, "n_layer": 2, "num_layers": 2, "n_head": 4, "num_heads": 4}
OTHER_NAMES |= {"ffn_dim": 96, "d_ff": 96, "chunk_size": 16, "state_size": 8, "mamba_n_heads": 8, "mamba_d_head": 16}
OTHER_NAMES |= {"mamba_d_state": 8, "mamba_chunk_size": 16, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
OTHER_NAMES |= {"moe_intermediate_size": 48, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1}
CHOSEN = {
    "phimoe": {**EXPERTS, "router_jitter_noise": 0.3, "input_jitter_noise": 0.1},
    "mixtral": {**EXPERTS, "router_jitter_noise": 0.3},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.3},
    "ctrl": {**OTHER_NAMES, "dff": 96, "resid_pdrop": 0.3},
    "gpt2": {"resid_pdrop": 0.3, "attn_pdrop": 0.3},
}


def gap(config, tokenizer) -> float:
    """How far a model's logits are from those of a copy that was made before it was prepared, as a share of the largest."""
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config)
    for p in hf.parameters():
        torch.nn.init.normal_(p, std=0.1)
    before = copy.deepcopy(hf).eval()
    after = prepare(hf, tokenizer).network.eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 20, 33, 4], [3, 90, 91, 7, 12, 50, 51, 52]])
    with torch.no_grad():
        own = before(input_ids=ids, use_cache=False).logits
        return float((after(input_ids=ids, use_cache=False).logits - own).abs().max() / own.abs().max())


@pytest.mark.parametrize("name", CHOSEN)
def test_the_logits_stay(name, tokenizer):
    assert gap(CONFIG_MAPPING[name](**SIZES, **CHOSEN[name]), tokenizer) < 1e-5


def test_negative_control_a_threshold_that_is_taken_for_noise_changes_them(tokenizer, monkeypatch):
    jitters = lambda hf: [(m, name, 0.0) for m in hf.modules() for name in vars(m) if "jitter" in name]  # noqa: E731
    monkeypatch.setattr(probe, "dropouts_of", jitters)
    assert gap(CONFIG_MAPPING["phimoe"](**SIZES, **CHOSEN["phimoe"]), tokenizer) > 1e-3


@pytest.mark.slow
def test_the_logits_of_all_causal_models_of_transformers_stay(tokenizer):
    """Of all that these sizes make a small model of; the others are too many to give each its own."""
    found = {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[name](**SIZES, **OTHER_NAMES, **EXPERTS)
            with torch.device("meta"):
                count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if count < 3e6:
                found[name] = gap(config, tokenizer)
        except UserError as error:  # by psigrad, of a model that transformers cannot run at these sizes
            assert "does not run" in str(error)
        except Exception:  # by transformers, of sizes that the family does not have
            continue
    assert len(found) >= 100
    assert {name: gap for name, gap in found.items() if not gap < 1e-4} == {}
