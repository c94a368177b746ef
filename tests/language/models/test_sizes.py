"""Sizes read off a configuration: under any name, nested, and layer by layer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import transformers as t

from psigrad.language.models.sizes import NAMES, cached_numbers, layer_sizes, size

ROOT = Path(__file__).parents[3]
FOUR = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "vocab_size": 50}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA4 = {**FOUR, "head_dim": 16, "global_head_dim": 64, "layer_types": KINDS, "intermediate_size": 96}
DELTA = {**FOUR, "head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
DEEP = {**FOUR, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def test_sizes_that_differ_by_layer_by_hand():
    """Two layers with keys and values of 16 numbers for each of 2 heads, two with 64: 2·2·(16 + 64 + 16 + 64)."""
    config = t.Gemma4TextConfig(**GEMMA4)
    with pytest.raises(RuntimeError, match="may vary across layers"):
        _ = config.head_dim
    assert layer_sizes(config, "head_dim") == (16, 64, 16, 64) and size(config, "head_dim") == 64
    assert layer_sizes(config, "key_heads") == (2, 2, 2, 2) and cached_numbers(config) == 640


def test_a_list_with_one_size_for_each_layer():
    config = t.Gemma3nTextConfig(**FOUR, head_dim=16, intermediate_size=[32, 64, 32, 96], num_kv_shared_layers=0)
    assert layer_sizes(config, "inner") == (32, 64, 32, 96) and size(config, "inner") == 96


def test_the_text_half_of_a_nested_configuration_is_read():
    text = t.Qwen3_5TextConfig(**DELTA)
    for config in (text, t.Qwen3_5Config(text_config=text.to_dict())):
        assert [size(config, what) for what in ("hidden", "layers", "heads", "vocabulary")] == [32, 4, 4, 50]
        assert cached_numbers(config) == 2 * 2 * 16, "the linear layers keep no keys"


@pytest.mark.parametrize(
    ("config", "head_dim", "cached"),
    [
        (t.GPT2Config(n_embd=24, n_layer=2, n_head=3), 8, 2 * 2 * 24),
        (t.LlamaConfig(**FOUR), 8, 4 * 2 * 2 * 8),
        (t.DeepseekV3Config(**DEEP), 8, 4 * 4 * (16 + 8 + 12)),
    ],
    ids=["gpt2", "llama", "latent attention"],
)
def test_other_names_and_sizes_that_follow_from_others(config, head_dim, cached):
    assert (size(config, "head_dim"), cached_numbers(config)) == (head_dim, cached)
    assert size(config, "experts") == (256 if config.model_type == "deepseek_v3" else 0)


def test_no_other_file_reads_a_size_off_a_configuration():
    """`config.head_dim` raises where layers differ, and `config.hidden_size` where the text half is nested."""
    names = {name for several in NAMES.values() for name in several}
    modules = [path for room in ("psigrad", "psigrad_extras", "psigrad_serve") for path in (ROOT / room).rglob("*.py")]
    # Both build the layers of one family whose layers are alike.
    builders = {"sizes.py"}
    assert {name for path in modules if path.name not in builders for name in sizes_read(path.read_text(), names)} == set()
    assert sizes_read("text = hf.config\nn = hf.config.n_embd + getattr(text, 'head_dim', 0)", names) == {"n_embd", "head_dim"}


def sizes_read(source: str, names: set[str]) -> set[str]:
    """Sizes that a source reads off something that is called a configuration or text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(("config", "get_text_config()", "text")):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and isinstance(node.args[1], ast.Constant):
            found.add(node.args[1].value)
    return found & names
