"""The activations of a plan, counted on twins, against what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import network
from kept_bytes import kept_by_autograd
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from psigrad.language.models import tiny
from psigrad_extras.preflight.plan.activations import Terms, terms
from psigrad_extras.preflight.plan.shape import count_shape

ARCHITECTURES = ("qwen3", "llama", "gpt2", "gpt_neox")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_backward_pass_needs_is_what_autograd_keeps(architecture):
    hf = tiny.model(architecture, 32, hidden=96, layers=4)
    kept, tokens, carried = kept_by_autograd(hf, 3, 4, 20, 50)
    assert terms(hf.config, "float32").bytes_for(4, tokens, carried) == pytest.approx(kept, rel=0.05)


def test_a_wide_model_is_counted_on_a_narrow_twin():
    hf = tiny.model("qwen3", 100, hidden=1024, layers=1, heads=8)
    kept, tokens, carried = kept_by_autograd(hf, 1, 4, 8, 20)
    assert terms(hf.config, "float32").bytes_for(1, tokens, carried) == pytest.approx(kept, rel=0.05)


def test_what_a_gpu_keeps_of_a_layer_by_hand():
    """Four times the hidden size: the inputs of norms and of products behind them. Four times the inner size: gate, up, its
    activation and the product. Queries before the norm, behind the rotation, and attention's output; keys likewise, but twice
    copied with a prompt's. Each is a number of 2 bytes; a few per cent more are sums of rows.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 300}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    found = terms(config, "bfloat16", device="cuda")
    assert found.prefix == 2 * (128 + 128), "keys and values of the prompt, for each completion"
    assert 1 < found.token / (2 * (4 * 256 + 4 * 768 + 3 * 256 + 3 * 128)) < 1.1


@pytest.mark.needs("compiler")
def test_negative_control_another_architectures_terms_do_not_fit():
    hf = tiny.model("qwen3", 32, hidden=96, layers=4)
    kept, tokens, carried = kept_by_autograd(hf, 3, 4, 20, 50)
    assert terms(tiny.model("gpt2", 32, hidden=96).config, "float32").bytes_for(4, tokens, carried) > 1.15 * kept


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("width", [64, 1024])
def test_layers_of_two_kinds_count_by_their_numbers(width):
    """Three layers with a state and one with attention. Where widths are divided by 4, so are the heads of states."""
    small, times = network("qwen3_5_text").config, width // 64
    heads = {"linear_num_key_heads": 2 * times, "linear_num_value_heads": 4 * times, "num_attention_heads": 4 * times}
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    changed = {**heads, "hidden_size": width, "intermediate_size": 96 * times, "layer_types": kinds, "vocab_size": 100}
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**small.to_dict(), **changed}))
    kept, tokens, carried = kept_by_autograd(hf, 2, 4, 12, 30)
    found = terms(hf.config, "float32")
    assert found.fused == 4 and found.bytes_for(4, tokens, carried) == pytest.approx(kept, rel=0.05)
    alike = AutoConfig.for_model(**{**hf.config.to_dict(), "layer_types": ["full_attention"] * 4})
    assert terms(alike, "float32").bytes_for(4, tokens, carried) != pytest.approx(kept, rel=0.05), "control"


def test_an_architecture_that_needs_layers_of_both_kinds_is_counted():
    config = network("olmo_hybrid").config
    assert terms(config, "float32") != Terms.estimate(count_shape(config), 4)
