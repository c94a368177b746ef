"""Images in prompts: packed, sampled and trained as transformers' own modules compute each sequence alone."""

from __future__ import annotations

import copy
import itertools
import shutil

import pytest
import torch
from cached import sample
from transformers import AutoModelForImageTextToText
from vision_models import TOWERS, ids_of, make, picture, processor_of

from psigrad.errors import UserError
from psigrad.kernels.kernels import kernels
from psigrad.language import images
from psigrad.language.models import language_model
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.models.towers import check_names
from psigrad.language.models.vision import Blocks, Grid
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler, why_not_embedded
from psigrad.language.rollout.types import Request, SamplingParams

FAMILIES = ["idefics3", "smolvlm", "gemma3", "qwen3_vl", "qwen3_5"]
PLACES = {"gemma3": "{}", "qwen3_vl": "<|vision_start|>{}<|vision_end|>", "qwen3_5": "<|vision_start|>{}<|vision_end|>"}
# (text, its images): none, one, two of different shapes, and one twice.
PROMPTS = [("How many?", []), ("See {0} and say", [1]), ("First {0}, then {1}: how many", [1, 2]), ("{0}again{0}", [3])]
ANSWERS = [["two", " 7"], ["three four", "x"], [" none", "8"], ["yes", "no"]]


def marked(family, text, numbers):
    """The text with the marks of its images, each a random picture of another shape."""
    found = [picture(n, *((20, 12), (40, 33), (9, 30))[n - 1]) for n in numbers]
    own = [PLACES.get(family, "{}").format(f"\ufffc{one.digest}\ufffc") for one in found]
    return text.format(*own), [found[0]] * text.count("{0}") if len(found) == 1 else found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, psigrad's model, transformers' own, its processor, prompts and completions) of a family; made once."""
    kept = {}

    def of(family):
        if family not in kept:
            folder = make(family, tmp_path_factory.mktemp(family))
            model = language_model.load(str(folder), vision=True)
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(3)
                for p in model.network.parameters():
                    p.normal_(mean=0.0 if p.dim() > 1 else 0.5, std=0.12)
            own = copy.deepcopy(model.network).eval()
            own.set_attn_implementation("eager")
            prompts = [marked(family, *one) for one in PROMPTS]
            groups = Groups(
                [ids_of(model.tokenizer, text) for text, _ in prompts],
                [[ids_of(model.tokenizer, text) for text in group] for group in ANSWERS],
            )
            kept[family] = folder, model, own, processor_of(family, model.tokenizer), prompts, groups
        return kept[family]

    return of


def alone(own, processor, prompt, ids):
    """log π of completion ids after a prompt, by transformers' processor and modules."""
    text, pictures = prompt
    place = images.MARK.sub(processor.psigrad_place, text)
    given = processor(text=[place], images=[[one.open() for one in pictures]] if pictures else None, return_tensors="pt")
    length = given["input_ids"].shape[1]
    answer = torch.tensor([ids])
    given["input_ids"] = torch.cat([given["input_ids"], answer], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    for kind in ("token_type_ids", "mm_token_type_ids"):
        if kind in given:
            given[kind] = torch.cat([given[kind], torch.zeros_like(answer)], 1)
    logits = own(**given, use_cache=False).logits[0, length - 1 : -1]
    return logits.log_softmax(-1).gather(1, answer[0, :, None])[:, 0]


def one_by_one(family, completions):
    _, _, own, processor, prompts, _ = family
    pairs = [(prompt, ids) for prompt, group in zip(prompts, completions, strict=True) for ids in group]
    return torch.cat([alone(own, processor, prompt, ids) for prompt, ids in pairs])


def flat(logp, completions):
    return torch.cat([row[: len(ids)] for row, ids in zip(logp, itertools.chain(*completions), strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_encoded_as_the_family_s_own_processor_does(family, made):
    _, model, _, processor, prompts, groups = made(family)
    for (text, pictures), ids in zip(prompts, groups.prompts, strict=True):
        place = images.MARK.sub(processor.psigrad_place, text)
        given = processor(text=[place], images=[[one.open() for one in pictures]] if pictures else None)
        assert images.replace_image_ids(ids, model.vision.token_id) == list(given["input_ids"][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_each_sequence_alone(family, made):
    _, model, *_, groups = found = made(family)
    fuses = family in ("idefics3", "smolvlm") and not isinstance(kernels(), str)
    assert (model.decoder is not None) == fuses, "no fused attention looks ahead within an image"
    assert not model.why_padded, model.why_padded
    assert not why_not_embedded(model)
    with torch.no_grad():
        theirs = one_by_one(found, groups.completions)
        for packed in (True, False):
            ours = flat(model.evaluate(groups, packed=packed).logp, groups.completions)
            assert float((ours - theirs).abs().max()) < 1e-5


@pytest.mark.parametrize(("family", "kind"), [("gemma3", Blocks), ("qwen3_vl", Grid), ("qwen3_5", Grid)])
def test_negative_control_causal_images_and_flat_positions_are_noticed(family, kind, made, monkeypatch):
    _, model, *_, groups = found = made(family)
    monkeypatch.setattr(kind, "apply_layout", lambda self, inputs: inputs)
    with torch.no_grad():
        gap = flat(model.evaluate(groups).logp, groups.completions) - one_by_one(found, groups.completions)
    assert float(gap[:4].abs().max()) < 1e-5 < 1e-2 < float(gap.abs().max())  # the first prompt has no image


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_completions_have_the_log_probs_of_each_sequence_alone(family, made):
    """Twelve sequences in eight slots: they leave at different times, and others take their slots."""
    _, model, *_, groups = found = made(family)
    requests = [Request(tuple(p), tuple(range(3 * i, 3 * i + 3))) for i, p in enumerate(groups.prompts)]
    drawn = sample(EmbeddedSampler(model, max_batch=8), requests, SamplingParams(10, stop_token_ids=tuple(range(9, 60))), None)
    assert len({len(c.ids) for group in drawn for c in group}) > 3
    told = torch.cat([torch.tensor(c.logprobs) for group in drawn for c in group])
    with torch.no_grad():
        theirs = one_by_one(found, [[list(c.ids) for c in group] for group in drawn])
    assert float((told - theirs).abs().max()) < 1e-5


def test_completions_never_contain_the_placeholder(made):
    """Its logit is by far the largest, so that every first draw takes it; the second draw is among all other tokens."""
    _, model, *_, groups = made("qwen3_5")
    head, rows = model.network.get_output_embeddings(), len(model.tokenizer)
    before = head.weight.detach().clone()
    with torch.no_grad():
        head.weight.mul_(1e-3)[model.vision.token_id] = 1e3 * model.target_hidden(_first(model, groups))[0].sign()
        drawn = sample(EmbeddedSampler(model), [Request(tuple(groups.prompts[1]), tuple(range(400)))], SamplingParams(1), None)[0]
        head.weight.copy_(before)
    ids = [c.ids[0] for c in drawn]
    assert not set(ids) & set(model.vision.forbidden) and max(ids) < rows
    assert len(set(ids)) > 150  # of some 300 that are equally likely; 400 draws leave a quarter of them out
    assert max(c.logprobs[0] for c in drawn) < -50  # of the policy, under which they are that unlikely


def _first(model, groups):
    from psigrad.language.models.packing import pack

    return pack(Groups([groups.prompts[1]], [[[5]]]))


def test_features_are_computed_once_for_every_pass_and_again_when_the_tower_changes(made, monkeypatch):
    _, model, *_, groups = made("idefics3")
    calls = []
    features = model.network.get_image_features
    monkeypatch.setattr(model.network, "get_image_features", lambda **given: calls.append(1) or features(**given))
    model.vision._held.clear()
    requests = [Request(tuple(p), (1, 2, 3)) for p in groups.prompts]
    sample(EmbeddedSampler(model), requests, SamplingParams(3), None)
    before = model.evaluate(groups).logp.detach()
    assert len(calls) == 3  # images, of which two prompts hold one
    weight = model.network.model.vision_model.encoder.layers[0].mlp.fc1.weight
    with torch.no_grad():
        weight.add_(0.5)
        after = model.evaluate(groups).logp
        weight.sub_(0.5)
    assert len(calls) == 6 and float((after - before)[2:].abs().max()) > 1e-3


@pytest.fixture(scope="module")
def learning(made):
    """(model whose tower and projector learn, transformers' own with the same weights) of a family."""

    def of(family):
        model = language_model.load(str(made(family)[0]), vision=True, towers=TOWERS[family])
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(3)
            for p in model.network.parameters():
                p.normal_(mean=0.0 if p.dim() > 1 else 0.5, std=0.08)
        own = copy.deepcopy(model.network)
        own.set_attn_implementation("eager")
        return model, own

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_tower_projector_and_text_are_those_of_each_sequence_alone(family, made, learning):
    (model, own), (_, _, _, processor, prompts, groups) = learning(family), made(family)
    ours, theirs = model.trainable(), dict(own.named_parameters())
    logp = flat(model.evaluate(groups).logp, groups.completions)
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((logp * weights).sum(), list(ours.values()), allow_unused=True)
    exact = one_by_one((None, None, own, processor, prompts, None), groups.completions)
    right = torch.autograd.grad((exact * weights).sum(), [theirs[name] for name in ours], allow_unused=True)
    learned = {name: g for name, g in zip(ours, found, strict=True) if g is not None}
    assert all(any(f".{tower}." in name for name in learned) for tower in TOWERS[family])
    size = torch.cat([g.flatten() for g in right if g is not None]).norm()
    for name, a, b in zip(ours, found, right, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or float((a - b).norm() / size) < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_tower_and_projector_is_that_of_finite_differences(family, made, learning):
    """transformers' norms round to float32 whatever the weights are, so that a difference has few digits."""
    (model, _), groups = learning(family), made(family)[-1]
    parameters = [p for name, p in model.trainable().items() if any(f".{tower}." in name for tower in TOWERS[family])]
    loss = lambda: model.evaluate(groups).logp.double().sum()  # noqa: E731
    gradient = torch.autograd.grad(loss(), parameters, allow_unused=True)
    way = [torch.zeros_like(p) if g is None else g / g.norm() for p, g in zip(parameters, gradient, strict=True)]
    slope = sum(float((g * v).sum()) for g, v in zip(gradient, way, strict=True) if g is not None)
    ends = []
    for step in (1e-3, -2e-3):
        with torch.no_grad():
            for p, v in zip(parameters, way, strict=True):
                p.add_(v, alpha=step)
            ends.append(float(loss()))
    assert slope > 1e-2
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(slope, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_of_an_image_have_probabilities_that_sum_to_one(family, made):
    """All completions of one token; the gradient of an expected reward is the score function's, Σ π R ∇log π."""
    _, model, own, processor, prompts, groups = made(family)
    rows = model.vocabulary
    every, rewards = [[token] for token in range(rows)], torch.randn(rows, generator=torch.Generator().manual_seed(2))
    logp = model.evaluate(Groups([groups.prompts[1]], [every])).logp[:, 0]
    assert abs(float(logp.exp().sum().detach()) - 1) < 1e-5
    names = list(model.trainable())
    ours = torch.autograd.grad((logp.exp().detach() * rewards * logp).sum(), list(model.trainable().values()), allow_unused=True)
    text, pictures = prompts[1]
    given = processor(
        text=[images.MARK.sub(processor.psigrad_place, text)], images=[[one.open() for one in pictures]], return_tensors="pt"
    )
    chances = own(**given).logits[0, -1].softmax(-1)
    theirs = dict(own.named_parameters())
    exact = torch.autograd.grad((chances * rewards).sum(), [theirs[name] for name in names], allow_unused=True)
    for a, b in zip(ours, exact, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-5))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_saved_whole_with_its_processor(family, made, tmp_path):
    folder, model, *_ = made(family)
    model.save(tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path)
    for (name, p), q in zip(model.network.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    assert (tmp_path / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()
    assert language_model.load(str(tmp_path), vision=True).vision.version == model.vision.version


def test_towers_are_frozen_unless_they_are_named(made):
    folder = str(made("idefics3")[0])
    plain, tower = (set(language_model.load(folder, towers=names).trainable()) for names in ((), ("connector",)))
    assert {name for name in tower - plain if ".connector." not in name} == set() < tower - plain
    assert not any("vision_model" in name or "connector" in name for name in plain)
    adapted = set(language_model.load(folder, lora=Lora(2), towers=["vision_model"]).trainable())
    assert any("vision_model" in name for name in adapted) and not any("connector" in name for name in adapted)
    with pytest.raises(UserError, match=r"trained_towers has 'tower'; expected .*: vision_model, connector\."):
        language_model.load(folder, towers=["tower"])
    with pytest.raises(UserError, match=r"trained_towers has 'tower'; this model has no towers\.$"):
        check_names([], ["tower"])


def test_the_text_half_alone_takes_no_images(made):
    model = language_model.load(str(made("qwen3_5")[0]))
    assert model.vision is None
    with pytest.raises(UserError, match="reads only text"):
        ids_of(model.tokenizer, marked("qwen3_5", "{0}", [1])[0])


def test_a_processor_that_cannot_be_loaded_is_refused_and_one_that_is_missing_leaves_text(made, tmp_path):
    folder = shutil.copytree(made("idefics3")[0], tmp_path / "m")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    with pytest.raises(
        UserError, match=r"its image processor cannot be loaded: .*to use only text, delete the image processor's files"
    ):
        language_model.load(str(folder))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    model = language_model.load(str(folder))
    assert model.vision is None
    with pytest.raises(UserError, match="reads only text; give a vision-language model with its processor"):
        ids_of(model.tokenizer, marked("idefics3", "{0}", [1])[0])


def test_a_processor_of_another_model_is_refused(made):
    _, model, *_, groups = made("idefics3")
    before = model.vision.config.scale_factor
    ids = groups.prompts[1]
    model.vision._held.clear()
    model.vision.config.scale_factor = 4
    try:
        with pytest.raises(UserError, match="20 features for 1 images, but the prompts have 5 image tokens"), torch.no_grad():
            model.evaluate(Groups([ids], [[[5, 6]]]))
    finally:
        model.vision.config.scale_factor = before


def test_a_reference_that_reads_text_alone_is_refused_and_a_recorded_step_reads_no_ids(made, monkeypatch):
    _, model, *_, groups = made("gemma3")
    monkeypatch.setattr(type(model), "vision", None)
    with pytest.raises(UserError, match=r"Gemma3ForConditionalGeneration reads only text.*for the policy and the reference"):
        model.evaluate(groups)
    monkeypatch.undo()
    monkeypatch.setattr(Blocks, "fill", lambda *given: 1 / 0)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert set(model._embedded(torch.tensor([[5], [6]]))[1]) == {"input_ids"}
    with pytest.raises(ZeroDivisionError):
        model._embedded(torch.tensor([[5, 6]]))
