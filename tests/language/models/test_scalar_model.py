"""One number per position: packed, padded and transformers' own agree; fresh heads, LoRA, foreign heads."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from psigrad.errors import UserError
from psigrad.language.models import language_model, scalar_model, tiny
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups, Rows

ARCHITECTURES = ("qwen3", "llama", "gpt2", "gpt_neox")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def base(request, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.model(request.param, len(tokenizer), hidden=32, layers=2, heads=2, max_length=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def padded(rows: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "input_ids": torch.tensor([row + [pad] * (width - len(row)) for row in rows]),
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
    }


def test_scores_are_those_of_transformers_packed_or_padded(base, groups, tmp_path):
    model = scalar_model.load(base)
    assert not model.why_padded
    model.save(tmp_path)
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = [[*p, *c] for p, group in zip(groups.prompts, groups.completions, strict=True) for c in group]
    expected = peer(**padded(rows, model.tokenizer.pad_token_id)).logits[:, 0]
    for packed in (True, False):
        assert torch.allclose(model.scores(groups, packed=packed), expected, atol=1e-6)
    assert expected.std() > 1e-3, "negative control: the texts differ in score"


def test_values_are_those_of_the_states_before_each_token(base, groups):
    model = scalar_model.load(base)
    values = model.values(groups)
    n = 0
    for prompt, completions in zip(groups.prompts, groups.completions, strict=True):
        for completion in completions:
            text = [*prompt, *completion]
            hidden = model.network.base_model(input_ids=torch.tensor([text])).last_hidden_state
            expected = model.network.score(hidden)[0, len(prompt) - 1 : len(text) - 1, 0]
            assert torch.allclose(values[n, : len(completion)], expected, atol=1e-6)
            assert not values[n, len(completion) :].any()
            n += 1


def test_the_shared_head_reads_the_same_states_and_starts_at_zero(base, groups):
    model = language_model.load(base)
    model.add_value_head()
    assert not model.evaluate(groups, value=True).value.any()
    torch.nn.init.normal_(model.value_head.weight)
    critic = scalar_model.load(base)
    with torch.no_grad():
        critic.network.score.weight.copy_(model.value_head.weight)
    for packed in (True, False):
        found = model.evaluate(groups, value=True, packed=packed)
        assert torch.allclose(found.value, critic.values(groups), atol=1e-5)
        assert torch.allclose(found.logp, model.evaluate(groups).logp, atol=1e-5)


def test_a_model_without_a_value_head_says_so(base, groups):
    with pytest.raises(ValueError, match="add_value_head"):
        language_model.load(base).evaluate(groups, value=True)


def test_a_fresh_head_is_zero_random_or_refused(base, groups):
    assert not scalar_model.load(base, fresh_head="zero").scores(groups).any()
    assert scalar_model.load(base).scores(groups).abs().max() > 1e-3
    with pytest.raises(UserError, match="without a trained scalar head"):
        scalar_model.load(base, fresh_head="refuse")


def test_lora_trains_the_head_too_and_merges(base, groups, tmp_path):
    torch.manual_seed(0)  # otherwise the draws, and with them the rounding of up to 1e-5, depend on the tests before
    model = scalar_model.load(base, lora=Lora(4))
    names = list(model.trainable())
    assert any("score" in name for name in names) and any("lora_A" in name for name in names)
    with torch.no_grad():
        for p in model.trainable().values():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    model.save_merged(tmp_path)
    assert torch.allclose(scalar_model.load(str(tmp_path), fresh_head="refuse").scores(groups), model.scores(groups), atol=1e-5)


def test_padding_with_eos_would_hide_a_texts_end_so_transformers_is_told_to_refuse_batches(tokenizer, tmp_path):
    hf = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    same = type(tokenizer).from_pretrained(tmp_path / "tokenizer", pad_token=tokenizer.eos_token)
    hf.save_pretrained(tmp_path / "base")
    same.save_pretrained(tmp_path / "base")
    model = scalar_model.load(str(tmp_path / "base"))
    model.save(tmp_path / "rm")
    peer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    text = [5, 6, 7, same.eos_token_id]
    ours = model.scores(Groups([text[:1]], [[text[1:]]]))
    assert torch.allclose(ours, peer(input_ids=torch.tensor([text])).logits[:, 0], atol=1e-6)
    assert not torch.allclose(ours, model.scores(Groups([text[:1]], [[text[1:-1]]])), atol=1e-4)
    with pytest.raises(ValueError, match="padding"):
        peer(input_ids=torch.tensor([text, text]))


def test_a_reward_model_of_another_kind_scores_whole_texts(tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=1, pad_token_id=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = scalar_model.load(str(tmp_path), fresh_head="refuse")
    assert not model.per_token and "no score at every token" in model.why_padded
    peer = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    rows = [[5, 6, 7], [8, 9, 10, 11, 12]]
    expected = peer(**padded(rows, 1)).logits[:, 0]
    assert torch.allclose(model.scores(Groups([r[:1] for r in rows], [[r[1:]] for r in rows])), expected, atol=1e-6)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("labels", [2, 5])
def test_a_classifier_with_several_labels_is_refused(labels, tokenizer, tmp_path):
    config = tiny.model("llama", len(tokenizer), hidden=32, layers=1, heads=2).config
    config.num_labels = labels
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"the head has {labels} outputs.*one label"):
        scalar_model.load(str(tmp_path))


def test_what_is_no_model_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="No model with a scalar head"):
        scalar_model.load(str(tmp_path))


def test_step_values_stand_behind_the_steps(base):
    from psigrad.language.training.offline.reward_task import step_values

    model = scalar_model.load(base)
    text, ends = [5, 6, 7, 8, 9, 10], [2, 5]
    (found,) = step_values(model, [(text, ends)])
    for value, end in zip(found, ends, strict=True):
        alone = model.scores(Groups([text[:1]], [[text[1 : end + 1]]]))
        assert torch.allclose(value, alone[0], atol=1e-6)
    assert model.values(Rows([text], [[False] * 6])).shape == (1, 6)
