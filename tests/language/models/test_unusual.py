"""Models with an attention of another kind, or none, are computed rightly; what cannot be trained is refused in a sentence."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch
from kernel_choices import cut_head
from transformers import AutoModelForCausalLM as Causal
from transformers import (
    BertConfig,
    ElectraConfig,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2_5_VLConfig,
    T5Config,
)
from unusual_models import LOOPED, MAMBA, MLA, STABLE, TWICE

from psigrad.errors import UserError
from psigrad.language.loading import samplers
from psigrad.language.models import backbone, language_model, probe, tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers import cache
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler
from psigrad.language.rollout.types import Request, SamplingParams

GROUPS = Groups([[3, 1, 2], [2, 5, 4]], [[[4, 2, 1], [1]], [[3, 3]]])
PARAMS = SamplingParams(max_tokens=8)
REQUESTS = [Request((5, 9, 7), (1, 2)), Request((8, 6, 5, 4, 9, 20, 33), (3, 4, 5)), Request((11,), (6,))]


def model_of(config):
    torch.manual_seed(0)
    hf = Causal.from_config(config)
    with torch.no_grad():
        for p in hf.parameters():
            p.mul_(2)
    return prepare(hf, tiny.tokenizer(["hello world 123"] * 5, 280))


def one_by_one(model, groups: Groups) -> list[torch.Tensor]:
    """log π of each completion by the model's own forward pass on one sequence, without any padding or packing."""
    hf, found = model.network, []
    for prompt, completions in zip(groups.prompts, groups.completions, strict=True):
        for ids in completions:
            with torch.no_grad():
                logits = hf(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0])
    return found


@pytest.mark.parametrize("config", [MLA, MAMBA, TWICE, LOOPED], ids=["mla", "mamba", "two attentions a layer", "layers looped"])
def test_sampler_trainer_and_the_model_itself_agree(config):
    model = model_of(config)
    assert bool(model.why_padded) == (config is MAMBA)
    sampler = samplers.make(samplers.Sampling(), model)
    assert isinstance(sampler, TransformersSampler if config is MAMBA else EmbeddedSampler)
    out = sampler.sample(REQUESTS, PARAMS)
    groups = Groups([r.prompt_ids for r in REQUESTS], [[c.ids for c in g] for g in out])
    trainer = model.evaluate(groups, temperature=1.0).logp.detach()
    for n, (completion, own) in enumerate(zip((c for g in out for c in g), one_by_one(model, groups), strict=True)):
        size = len(completion.ids)
        assert torch.allclose(trainer[n, :size], own, atol=1e-5, rtol=0)
        assert torch.allclose(torch.tensor(completion.logprobs), own, atol=1e-5, rtol=0)


def test_a_model_that_the_own_sampler_would_decode_wrongly_is_sampled_by_transformers(monkeypatch):
    """A layer's second attention takes the place of the first in the cache. The step is compared before anything is drawn."""
    model, said = model_of(TWICE), []
    monkeypatch.setattr(cache.Decode, "next_call", lambda self, kind, layer: (kind, layer, 0))
    sampler = samplers.make(samplers.Sampling(), model, log=lambda kind, text: said.append(text))
    assert isinstance(sampler, TransformersSampler) and not sampler.exact
    assert len(said) == 1 and "in float32 its outputs differ by" in said[0]


@pytest.mark.parametrize("config", [STABLE, MAMBA], ids=["stablelm", "mamba"])
def test_the_logits_of_a_padded_model_are_never_whole(config, monkeypatch):
    """The head sees a chunk of the completions' tokens at a time, and no token of a prompt."""
    model = model_of(config)
    assert model.why_padded and not model.full_logits
    parameters = list(model.network.parameters())

    def run(whole):
        model.full_logits = whole
        logp = model.evaluate(GROUPS, entropy=True)
        return logp, torch.autograd.grad(logp.logp.sum() + logp.entropy.sum(), parameters, allow_unused=True)

    cut_head(monkeypatch, chunk=2 * model.vocabulary)
    (whole, right), seen = run(True), []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x)
    with keep:
        parts, found = run(False)
    assert torch.allclose(parts.logp, whole.logp, atol=1e-6) and torch.allclose(parts.entropy, whole.entropy, atol=1e-5)
    assert all(a is b is None or torch.allclose(a, b, atol=1e-5) for a, b in zip(found, right, strict=True))
    assert max((shape.numel() // model.vocabulary for shape in seen if shape[-1:] == (model.vocabulary,)), default=0) <= 2


def test_mla_writes_the_tokens_of_transformers_generate():
    model = model_of(MLA)
    ours, theirs = (made(model).sample(REQUESTS, PARAMS) for made in (EmbeddedSampler, TransformersSampler))
    assert [[c.ids for c in g] for g in ours] == [[c.ids for c in g] for g in theirs]


REFUSED = {
    "encoder-decoder": (T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=300), {}),
    "vision-language": (Qwen2_5_VLConfig(), {}),
    "quantised": (MLA, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
    "quantised otherwise": (MLA, {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_in_a_sentence(kind, tmp_path):
    config, more = REFUSED[kind]
    config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((tmp_path / "config.json").read_text()), **more}))
    if more:
        Causal.from_config(MLA).save_pretrained(tmp_path / "weights")
        (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    tiny.tokenizer(["hello"] * 5, 280).save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        language_model.load(str(tmp_path))
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1, "eos_token_id": 0}
OPT = OPTConfig(**SMALL, vocab_size=300, ffn_dim=64, max_position_embeddings=128, word_embed_proj_dim=32, dropout=0.3)
PHIMOE = PhimoeConfig(
    **SMALL, vocab_size=300, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, input_jitter_noise=0.3
)


@pytest.mark.parametrize("config", [OPT, PHIMOE], ids=["dropout by a function", "noise on the router"])
def test_nothing_is_random_when_activations_are_recomputed(config, tokenizer, monkeypatch):
    """Gradient checkpointing needs training mode, in which these draw random numbers that are no `nn.Dropout`."""
    config = deepcopy(config)
    torch.manual_seed(0)
    model = prepare(Causal.from_config(config), tokenizer, gradient_checkpointing=True)
    one, other = (model._probe(GROUPS, packed=True) for _ in range(2))
    assert model.train_mode and torch.equal(one, other)
    assert model.network.training
    monkeypatch.setattr(probe, "dropouts_of", lambda hf: [])
    monkeypatch.setattr(backbone, "set_mode", torch.nn.Module.train)
    with pytest.raises(UserError, match="is random in training mode, and psigrad cannot switch that off"):
        prepare(Causal.from_config(config), tokenizer, gradient_checkpointing=True)


def longrope(positions: int):
    return Phi3Config(
        **SMALL, vocab_size=300, bos_token_id=0, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=512,
        original_max_position_embeddings=positions, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": positions,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
    )  # fmt: skip


def dynamic(positions: int):
    return LlamaConfig(
        **SMALL, vocab_size=300, bos_token_id=2, intermediate_size=64, max_position_embeddings=positions,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )  # fmt: skip


@pytest.mark.parametrize("config", [longrope, dynamic])
def test_a_sequence_is_no_longer_than_its_rotary_embedding_is_one_and_the_same(config, tokenizer):
    """longrope and dynamic NTK turn all positions of a pass otherwise as soon as one of its sequences is longer than 64."""
    torch.manual_seed(0)
    hf = Causal.from_config(config(64))
    with torch.no_grad():
        for p in hf.parameters():
            p.mul_(5)  # as they begin, positions hardly matter
    model = prepare(hf, tokenizer)
    assert model.max_length == 64
    short, long = (5, 9, 7), tuple(range(3, 67))
    alone = model.evaluate(Groups([short], [[(4, 2)]])).logp[0, :2]
    beside = model.evaluate(Groups([short, long[:-2]], [[(4, 2)], [long[-2:]]])).logp[0, :2]
    assert torch.allclose(alone, beside, atol=1e-5)
    control = model.evaluate(Groups([short, (*long, 5, 6)], [[(4, 2)], [(7, 8)]])).logp[0, :2]
    assert not torch.allclose(alone, control, atol=1e-5), "beyond, who shares the pass matters"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [BertConfig, ElectraConfig])
def test_a_model_that_reads_later_tokens_is_refused(kind, dtype):
    """It would learn to copy the token that it should predict. As a decoder, BERT does not read it."""
    sizes = {"vocab_size": 280, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    with pytest.raises(UserError, match=r"reads later tokens.*set is_decoder to true in its config\.json if it has"):
        prepare(Causal.from_config(kind(**sizes)).to(dtype), tiny.tokenizer(["hello world 123"] * 5, 280))
    if kind is BertConfig:
        model = prepare(
            Causal.from_config(kind(is_decoder=True, **sizes)).to(dtype), tiny.tokenizer(["hello world 123"] * 5, 280)
        )
        assert model.why_padded


def test_one_token_that_changes_by_rounding_alone_is_no_proof(monkeypatch):
    """A router that is undecided gives one token another expert; a quarter of the tokens may change so."""
    model = model_of(MAMBA)
    forward, calls = model.network.forward, []

    def jumps(*args, **given):
        made = forward(*args, **given)
        made.logits[0, 2:5] += len(calls)
        calls.append(1)
        return made

    monkeypatch.setattr(model.network, "forward", jumps)
    probe.check_causal(model.network, list(range(5, 19)))
    assert len(calls) == 2
