"""A faster way to compute a model is taken where it is right, and left where it is off by a hundredth, in either precision."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import hybrid_models
import pytest
import torch
import transformers as t

from psigrad.language.models import probe
from psigrad.language.models.attention import PackedLayout
from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.fused import decoder
from psigrad.language.models.fused.families import FAMILIES
from psigrad.language.models.language_model import LanguageModel, Lora, prepare

COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
SMALL = {**COMMON, "vocab_size": 280, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
# A probe's texts go beyond these lengths of rope scaling, and do not reach the windows.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": t.LlamaConfig(**SMALL, rope_parameters={**LLAMA3, "original_max_position_embeddings": 8}),
    "mistral": t.MistralConfig(**SMALL, sliding_window=4096),
    "qwen2": t.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=512, max_window_layers=1),
    "qwen3": t.Qwen3Config(**SMALL, head_dim=8, rope_parameters=YARN),
    "gemma3": t.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=512, layer_types=KINDS),
    "phi3": t.Phi3Config(**SMALL, sliding_window=2047),
    "olmo2": t.Olmo2Config(**SMALL),
    "granite": t.GraniteConfig(**SMALL, logits_scaling=1.0),
    "gpt_neox": t.GPTNeoXConfig(**SMALL),
    "gpt2": t.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=280, bos_token_id=None, eos_token_id=0, pad_token_id=1),
    "mixtral": t.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "smollm3": t.SmolLM3Config(**SMALL),
}
FUSED = ("llama", "mistral", "qwen2", "qwen3")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The layer that is off, and how. Weights in bfloat16 are compared in float32 too, so one of them is enough.
LAYERS = {"float32": range(3), "bfloat16": [1]}


def network(family, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    hf = t.AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():  # as sure of itself as a trained model
        for p in hf.parameters():
            p.mul_(2) if p.dim() > 1 else None
    return hf.to(dtype)


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")


@contextlib.contextmanager
def one_layer_off(hf, seed, share=0.01):
    """The weights of one layer off by 1 % at random."""
    draw = torch.Generator().manual_seed(seed)
    layers = probe._layers(hf)
    weights = [p for name, p in layers[seed % len(layers)].named_parameters() if p.dim() > 1 and "lora_" not in name]
    before = [p.data for p in weights]
    for p in weights:
        p.data = p.data * (1 + share * torch.randn(p.shape, generator=draw)).to(p.dtype)
    try:
        yield
    finally:
        for p, data in zip(weights, before, strict=True):
            p.data = data


def spoil_packed(monkeypatch, seed):
    """The packed way computes another model."""
    numbers = LanguageModel._probe

    def spoilt(self, texts, packed):
        with one_layer_off(self.network, seed) if packed else contextlib.nullcontext():
            return numbers(self, texts, packed)

    monkeypatch.setattr(LanguageModel, "_probe", spoilt)


def spoil_fused(monkeypatch, seed):
    """The fused way computes another model."""
    hidden = Pretrained.target_hidden

    def spoilt(self, inputs):
        with one_layer_off(self.network, seed) if self.decoder is not None else contextlib.nullcontext():
            return hidden(self, inputs)

    monkeypatch.setattr(Pretrained, "target_hidden", spoilt)


# each precision once, whole or with an adapter
HONEST = [
    pytest.param(family, dtype, lora, marks=() if (dtype == "float32") == (lora is None) else pytest.mark.slow)
    for family in CONFIGS
    for dtype in PRECISIONS
    for lora in (None, Lora(2))
]


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(("family", "dtype", "lora"), HONEST)
def test_an_honest_model_keeps_the_fast_path(family, dtype, lora, tokenizer):
    model = prepare(network(family, PRECISIONS[dtype]), tokenizer, lora=lora)
    assert not model.why_padded
    if family in FUSED:
        assert model.decoder is not None, model.why_unfused
    assert {p.dtype for name, p in model.network.named_parameters() if "lora_" not in name} == {PRECISIONS[dtype]}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if family in FUSED or dtype == "float32" else pytest.mark.slow)
        for family in CONFIGS
        for dtype in PRECISIONS
    ],
)
def test_a_packed_way_with_a_layer_off_by_a_hundredth_is_left(family, dtype, tokenizer, monkeypatch):
    for seed in LAYERS[dtype]:
        with monkeypatch.context() as meanwhile:
            spoil_packed(meanwhile, seed)
            model = prepare(network(family, PRECISIONS[dtype], seed), tokenizer)
        assert "in float32 its outputs differ by" in model.why_padded and model.decoder is None


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(("family", "dtype", "lora"), [one for one in HONEST if one.values[0] in FUSED])
def test_a_fused_way_with_a_layer_off_by_a_hundredth_is_left(family, dtype, lora, tokenizer, monkeypatch):
    for seed in LAYERS[dtype]:
        with monkeypatch.context() as meanwhile:
            spoil_fused(meanwhile, seed)
            model = prepare(network(family, PRECISIONS[dtype], seed), tokenizer, lora=lora)
        assert not model.why_padded and model.decoder is None
        assert "the fused forward pass differs from the model's own: in float32 its outputs differ by" in model.why_unfused


@pytest.mark.parametrize("share", [1e-3, 1e-6])
def test_a_head_that_says_next_to_nothing_hides_neither_an_honest_way_nor_one_that_is_off(share, tokenizer, monkeypatch):
    """All log-probs are -ln V but for `share`, a millionth of which float32 does not have beside 5.6."""

    def model():
        hf = network("gpt2")
        head = torch.nn.Linear(32, 280, bias=False)  # not the embeddings
        hf.lm_head.weight = torch.nn.Parameter(head.weight.detach() * share)
        return prepare(hf, tokenizer)

    assert model().why_padded == ""
    spoil_packed(monkeypatch, 0)
    assert "in float32 its outputs differ by" in model().why_padded


@pytest.mark.parametrize(("off", "right"), [(2**-24, True), (2**-14, False)])
def test_a_model_that_bfloat16_holds_exactly_may_differ_in_its_last_bit(off, right):
    """Numbers of 1: the last bit is worth 2^-23, and bfloat16 loses none of it."""
    hf = network("gpt2")
    own = torch.ones(4, 8)
    assert (probe.difference(hf, lambda: own, lambda: own * (1 - off)) == "") is right


def test_layers_with_a_state_are_compared_and_draw_their_texts_in_short_chunks():
    """transformers pads a text of 14 tokens to a chunk of 256, which takes a minute at 350 million parameters."""
    hf = hybrid_models.network("granitemoehybrid (hybrid)")
    layers, seen = [m for m in hf.modules() if hasattr(m, "chunk_size")], []
    for layer in layers:
        layer.chunk_size = 256

    def own():
        seen.append({layer.chunk_size for layer in layers})
        return torch.ones(4, 8)

    assert probe.difference(hf, own, lambda: torch.ones(4, 8)) == ""
    hf.register_forward_pre_hook(lambda *_: seen.append({layer.chunk_size for layer in layers}))
    probe.draw_texts(hf, 3, 280, 2)
    assert seen == [{8}] * 3 and {layer.chunk_size for layer in layers} == {256}


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "phi3"])
def test_a_packed_way_without_the_window_is_left_though_no_text_reaches_it(family, tokenizer, monkeypatch):
    mask = PackedLayout._sequence_mask
    monkeypatch.setattr(PackedLayout, "_sequence_mask", lambda self, window: mask(self, None))
    model = prepare(network(family), tokenizer)
    assert "on texts longer than its attention window" in model.why_padded
    held = {vars(module).get("sliding_window") for module in model.network.modules()}
    assert probe.WINDOW not in held and model.network.config.sliding_window > probe.LENGTH


@pytest.mark.needs("compiler")
def test_a_fused_way_without_the_window_is_left(tokenizer, monkeypatch):
    monkeypatch.setitem(decoder.FAMILIES, "Mistral", replace(FAMILIES["Mistral"], window=lambda config, layer: None))
    model = prepare(network("mistral"), tokenizer)
    assert not model.why_padded and "on texts longer than" in model.why_unfused


def test_in_another_precision_a_model_computes_what_a_copy_in_it_does_and_is_itself_again():
    hf = network("qwen3", torch.bfloat16)
    before = {name: p.detach().clone() for name, p in hf.named_parameters()}
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad(), probe.in_precision(hf, torch.float32):
        found = hf(ids).logits
    with torch.no_grad():
        assert torch.equal(found, copy.deepcopy(hf).float()(ids).logits)
        assert not torch.equal(found, hf(ids).logits.float())
    assert all(torch.equal(p, before[name]) and p.dtype == torch.bfloat16 for name, p in hf.named_parameters())


def test_a_failure_in_another_precision_leaves_the_model_itself():
    hf = network("llama", torch.bfloat16)
    with pytest.raises(TypeError, match="hidden"), probe.in_precision(hf, torch.float32):
        hf.model.layers[0](nothing=1)
    assert {p.dtype for p in hf.parameters()} == {torch.bfloat16}
    assert not any(layer._forward_pre_hooks for layer in hf.model.layers)


def test_texts_are_drawn_by_the_model_itself():
    """A model that can only say 7 behind 3, and 3 behind 7."""
    hf = network("llama")
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        hf.model.norm.weight.fill_(1.0)
        hf.model.embed_tokens.weight.zero_()
        hf.lm_head.weight.zero_()
        for place, (token, after) in enumerate([(3, 7), (7, 3)]):
            hf.model.embed_tokens.weight[token, place] = 1.0
            hf.lm_head.weight[after, place] = 100.0
    assert probe.draw_texts(hf, 3, 280, 6) == [[3, 7, 3, 7, 3, 7]] * 2
