"""Dropout's masks by hand, and that they depend on nothing but seed, layer and text."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.models import scalar_model, tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.lora import CountedDropout, DropoutMasks, Lora, hash_tokens
from psigrad.language.models.packing import Groups, Rows, pack, pad

WORD = (1 << 64) - 1
PROMPT, ONE, OTHER = [5, 6, 7, 8, 9], [20, 33, 4, 2, 60], [20, 33, 11]
GROUP = Groups([PROMPT, [7, 3]], [[ONE, OTHER], [[50, 51, 52, 53]]])


def word(seed: int, counter: int) -> int:
    """SplitMix64 in Python's integers."""
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_the_masks_are_those_of_the_formula():
    drop, ids = CountedDropout(0.25, "layer", DropoutMasks(seed=3)), [5, 6]
    drop.masks.tokens = hash_tokens(torch.tensor([ids]), torch.tensor([[0, 1]]))
    sums = [word(5, 0), (word(5, 0) + word(6, 1)) & WORD]
    x = torch.full((1, 2, 6), 3.0)
    wanted = []
    for total in sums:
        key = total ^ seeds.derive(3, "layer")
        sixteen = [(word(key, i // 4) >> 16 * (i % 4)) & 0xFFFF for i in range(6)]
        wanted.append([0.0 if (bits ^ 0x8000) < 0.25 * 65536 else 4.0 for bits in sixteen])  # 3 / (1 − 0.25)
    assert drop(x)[0].tolist() == wanted and {0.0, 4.0} == {v for row in wanted for v in row}
    assert torch.equal(drop.eval()(x), x)


def test_a_share_p_is_dropped_and_the_mean_stays():
    drop = CountedDropout(0.1, "layer", DropoutMasks())
    drop.masks.tokens = hash_tokens(torch.arange(400)[None], torch.arange(400)[None])
    made = drop(torch.ones(1, 400, 1000))
    assert abs(float((made == 0).float().mean()) - 0.1) < 0.002 and abs(float(made.mean()) - 1) < 0.002
    features = (made[0] == 0).float()
    assert float(torch.corrcoef(features[:40]).fill_diagonal_(0).abs().max()) < 0.15, "tokens are dropped independently"
    assert float(torch.corrcoef(features.T[:40]).fill_diagonal_(0).abs().max()) < 0.25, "and so are features"


def test_a_layer_that_reads_a_selection_of_tokens_is_refused():
    drop = CountedDropout(0.1, "experts.0", DropoutMasks(tokens=torch.arange(8).view(2, 4)))
    assert drop(torch.ones(2, 3)).shape == (2, 3), "one token of each text, as a pooler reads"
    with pytest.raises(UserError, match=r"the layer experts\.0, which reads only some of the tokens, as an expert does"):
        drop(torch.ones(5, 3))


def test_a_tokens_number_is_that_of_its_text_wherever_it_lies():
    alone = {tuple(text): hash_tokens(torch.tensor([text]), torch.arange(len(text))[None])[0].tolist() for text in texts(GROUP)}
    packed = pack(GROUP)
    sums = hash_tokens(packed.input_ids, packed.position_ids, packed.layout)[0].tolist()
    padded = pad(GROUP)
    by_row = hash_tokens(padded.input_ids, padded.position_ids)
    (one, other, third) = alone.values()
    assert sums == [*one[:5], *third[:2], *one[5:9], *other[5:7], *third[2:5]]
    assert [row[: len(own)] for row, own in zip(by_row.tolist(), alone.values(), strict=True)] == list(alone.values())
    branch = pack(Groups([PROMPT], [[ONE]], starts=[[3]]))
    whole = [*PROMPT[:3], *ONE]
    begun = hash_tokens(torch.tensor([whole]), torch.arange(len(whole))[None])[0].tolist()
    assert hash_tokens(branch.input_ids, branch.position_ids, branch.layout)[0].tolist() == [*one[:5], *begun[3:7]]
    assert len({*one, *other, *third}) == len(one) + 1 + len(third), "equal texts alone have equal numbers"


def texts(groups: Groups) -> list[list[int]]:
    return [[*p, *c] for p, own in zip(groups.prompts, groups.completions, strict=True) for c in own]


@pytest.fixture(params=["policy", "scalar"])
def dropped(request, tokenizer):
    """A function from inputs to outputs, of a model whose adapter has dropout."""
    hf = tiny.model("qwen3", len(tokenizer), hidden=32, layers=2, heads=2, max_length=64, seed=2)
    if request.param == "scalar":
        hf.config.num_labels = 1
        hf = scalar_model.AutoModelForSequenceClassification.from_config(hf.config)
    lora = Lora(4, dropout=0.4, dora=request.param == "policy")
    model = (prepare if request.param == "policy" else scalar_model.prepare)(hf, tokenizer, lora=lora)
    torch.manual_seed(1)
    for name, p in model.trainable().items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    read = model.values if request.param == "scalar" else lambda *given, **how: model.evaluate(*given, **how).logp
    return model, read


def gradient(model, loss):
    grads = torch.autograd.grad(loss, list(model.trainable().values()), allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None])


def test_no_split_and_no_padding_changes_what_is_dropped(dropped):
    model, read = dropped
    model.dropout_masks.draw(0, 3)
    whole = read(GROUP)
    assert torch.allclose(whole, read(GROUP, packed=False), atol=1e-5)
    parts = [Groups([p], [[c]]) for p, own in zip(GROUP.prompts, GROUP.completions, strict=True) for c in own]
    alone = [read(part)[0] for part in parts]
    for row, own in zip(whole, alone, strict=True):
        assert torch.allclose(row[: len(own)], own, atol=1e-5)
    together = gradient(model, whole.sum())
    assert torch.allclose(together, sum(gradient(model, read(part).sum()) for part in parts), atol=1e-4)
    rows = Rows(texts(GROUP), [[t >= len(p) for t in range(len(p) + len(c))] for p, own in
                               zip(GROUP.prompts, GROUP.completions, strict=True) for c in own])  # fmt: skip
    assert torch.allclose(read(rows)[0, 5:10], whole[0], atol=1e-5), "SFT's rows are those of a group"


def test_negative_controls_another_step_another_text_and_no_gradient_drop_otherwise(dropped):
    model, read = dropped
    model.dropout_masks.draw(0, 3)
    whole = read(GROUP).detach()
    model.dropout_masks.draw(0, 4)
    assert float((read(GROUP).detach() - whole).abs().min(1).values.max()) > 1e-4
    other = read(Groups([[1, *PROMPT[1:]]], [[ONE]]))[0] - read(GROUP)[0]
    assert float(other.detach().abs().max()) > 1e-4
    with torch.no_grad():
        assert float((read(GROUP) - whole).abs().max()) > 1e-4


@pytest.mark.parametrize("how", [{"lora": Lora(2, dropout=0.3)}, {"gradient_checkpointing": True}], ids=["dropout", "recomputed"])
def test_a_model_that_scores_whole_texts_is_prepared_and_no_split_changes_its_scores(how, tokenizer):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    hf = BertForSequenceClassification(BertConfig(vocab_size=280, num_labels=1, **sizes))
    model = scalar_model.prepare(hf, tokenizer, **how)
    for name, p in model.trainable().items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.3)
    whole = model.scores(GROUP)
    alone = [model.scores(Groups([p], [[c]])) for p, own in zip(GROUP.prompts, GROUP.completions, strict=True) for c in own]
    assert torch.allclose(whole, torch.cat(alone), atol=1e-6)
    model.dropout_masks.draw(1)
    moved = float((model.scores(GROUP) - whole).abs().max().detach())
    assert moved > 1e-4 if "lora" in how else moved == 0
