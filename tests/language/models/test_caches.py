"""Activations that sampling kept, in place of the training forward pass: the same log-probs and gradients, and refused as soon as
they may be stale.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cached import sample
from fused_models import HYBRIDS
from kernel_choices import cut_head
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from psigrad.kernels.kernels import kernels
from psigrad.language.models import logprobs
from psigrad.language.models.fused import caches as kept
from psigrad.language.models.fused import decoder as fused
from psigrad.language.models.fused.caches import SLAB, ActivationCache, Block, RowLayout
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

pytestmark = pytest.mark.needs("compiler")

COMMON = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIGS = {
    "llama": LlamaConfig(**COMMON, hidden_size=64, attention_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**COMMON, hidden_size=48, sliding_window=5),
    "qwen3": Qwen3Config(**COMMON, hidden_size=40, head_dim=8),
    **{name: HYBRIDS[name] for name in ("lfm3", "qwen3.5", "granite 4 hybrid", "nemotron-h", "qwen3-moe and a dense layer")},
    **{name: HYBRIDS[name] for name in ("gemma4", "gemma4 of shared keys")},
}
REQUESTS = [Request((5, 6, 7, 8, 9, 10), (1, 2, 3)), Request((11,), (4, 5, 6)), Request(tuple(range(2, 30)), (7, 8, 9))]


@pytest.fixture(params=CONFIGS)
def model(request, tokenizer):
    config = CONFIGS[request.param]
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), 0, 1
    torch.manual_seed(0)
    made = prepare(AutoModelForCausalLM.from_config(config), tokenizer)
    assert made.decoder is not None, made.why_unfused
    made.kept = None
    with torch.no_grad():  # sharp distributions, ends at unlike lengths
        for p in made.network.parameters():
            p.mul_(2)
    return made


def sampled(model, requests=REQUESTS, limit=1e9, **settings) -> Groups:
    """Completions of the requests, their activations kept."""
    model.kept = ActivationCache(limit)
    params = SamplingParams(max_tokens=20, stop_token_ids=tuple(range(60)))
    groups = sample(EmbeddedSampler(model, **settings), list(requests), params, model.kept)
    drawn = Groups([r.prompt_ids for r in requests], [[c.ids for c in group] for group in groups])
    lengths = {len(ids) for group in drawn.completions for ids in group}
    assert len(lengths) > 2, "the test is about sequences that leave the batch at unlike times"
    return drawn


def evaluate(model, groups, **settings):
    """The model's log-probs of the groups, by what was kept of them."""
    return model.evaluate(groups, cache=model.kept, **settings)


def found(model, groups):
    """What was kept of the groups."""
    return model.kept.find(groups.prompts, groups.completions, model.decoder.parameters)


def results(model, groups):
    """(log-probs, gradient of their weighted sum)."""
    logp = evaluate(model, groups).logp
    weights = torch.linspace(0.5, 2, logp.numel()).view_as(logp)
    grads = torch.autograd.grad((logp * weights).sum(), list(model.trainable().values()))
    return logp.detach(), torch.cat([g.flatten() for g in grads])


def unlike(a, b) -> float:
    return float((a - b).norm() / b.norm())


# At once or in a stream; in large slabs or small ones; of a small head or a large one.
WAYS = list(itertools.product([{}, {"max_batch": 4}], [kept.SLAB, 16], [logprobs.TILE_ELEMENTS, 1000]))


@pytest.mark.parametrize(
    ("settings", "slab", "tile"),
    [pytest.param(*way, marks=() if way in (WAYS[0], WAYS[-1]) else pytest.mark.slow) for way in WAYS],
)
def test_kept_activations_give_the_same_log_probs_and_gradient(model, settings, slab, tile, monkeypatch):
    monkeypatch.setattr(kept, "SLAB", slab)
    cut_head(monkeypatch, tile)
    groups = sampled(model, **settings)
    assert found(model, groups) is not None
    logp, gradient = results(model, groups)
    with torch.no_grad():
        assert unlike(evaluate(model, groups).logp, logp) < 1e-6
    model.kept = None
    expected, oracle = results(model, groups)
    assert float((logp - expected).abs().max()) < 5e-5
    assert unlike(gradient, oracle) < 1e-4


def test_some_of_the_completions_in_another_order_are_found(model):
    groups = sampled(model)
    some = Groups([groups.prompts[2], groups.prompts[0]], [groups.completions[2][1:], groups.completions[0][::-1]])
    assert found(model, some) is not None
    _, gradient = results(model, some)
    model.kept = None
    assert unlike(gradient, results(model, some)[1]) < 1e-4


def test_negative_control_the_kept_activations_are_what_the_gradient_is_made_of(model):
    groups = sampled(model)
    _, gradient = results(model, groups)
    with torch.inference_mode():
        for part in model.kept.slabs[0].layers()[1]:
            part.mul_(1.5 if part.is_floating_point() else 1)
    assert unlike(results(model, groups)[1], gradient) > 1e-2


@pytest.fixture
def passes(monkeypatch):
    """How often the whole of a large head was asked for."""
    cut_head(monkeypatch, 1000)
    seen = []

    def counted(passes):
        def count(*given):
            seen.append(1)
            return passes(*given)

        return count

    for name in ("_tiles", "_sampler_logprobs"):
        monkeypatch.setattr(logprobs, name, counted(getattr(logprobs, name)))
    return seen


def test_a_large_head_runs_forward_once_when_it_is_sampled_from(model, passes):
    groups = sampled(model)
    results(model, groups)
    assert len(passes) == 1, "in the backward pass alone"
    model.kept = None
    results(model, groups)
    assert len(passes) == 3


def test_negative_control_a_large_heads_gradient_is_made_of_what_was_said(model, passes):
    groups = sampled(model)
    _, gradient = results(model, groups)
    with torch.inference_mode():
        for written in model.kept._completions.values():
            written.logps[:] -= 0.2
    assert unlike(results(model, groups)[1], gradient) > 1e-2


def test_what_was_said_at_another_temperature_or_by_another_head_is_not_used(model, passes):
    groups = sampled(model)
    for temperature, runs in ((1.0, 0), (0.7, 1)):
        passes.clear()
        with torch.no_grad():
            logp = evaluate(model, groups, temperature=temperature).logp
        assert len(passes) == runs
        known, model.kept = model.kept, None
        with torch.no_grad():
            assert float((logp - evaluate(model, groups, temperature=temperature).logp).abs().max()) < 5e-5
        model.kept = known
    head = model.network.get_output_embeddings().weight
    if head is model.network.get_input_embeddings().weight:
        return  # then all that was kept is stale
    with torch.no_grad():
        head.mul_(1.1)
        passes.clear()
        logp = evaluate(model, groups).logp
        assert found(model, groups) is not None and len(passes) == 1
        model.kept = None
        assert float((logp - evaluate(model, groups).logp).abs().max()) < 5e-5


def test_log_probs_of_two_temperatures_are_no_ones(model, passes):
    groups = sampled(model)
    sample(EmbeddedSampler(model), [Request((40, 41), (10,))], SamplingParams(max_tokens=5, temperature=0.7), model.kept)
    for temperature in (1.0, 0.7):
        passes.clear()
        with torch.no_grad():
            evaluate(model, groups, temperature=temperature)
        assert len(passes) == 1


def test_a_changed_weight_makes_them_stale(model):
    groups = sampled(model)
    with torch.no_grad():
        next(iter(model.trainable().values())).mul_(1.1)  # in place, as an optimiser does it
    assert found(model, groups) is None
    assert not model.kept.slabs, "what is stale is let go"
    sample(EmbeddedSampler(model), [REQUESTS[0]], SamplingParams(max_tokens=3), model.kept)
    assert not model.kept.slabs, "nor is anything added to it"
    logp, gradient = results(model, groups)
    model.kept = None
    expected, oracle = results(model, groups)
    assert torch.equal(logp, expected) and torch.equal(gradient, oracle)


def test_under_lora_they_serve_the_adapter_that_trains_and_nothing_else(model):
    lora = prepare(model.network, model.tokenizer, lora=Lora(2, target_modules=("q_proj", "in_proj")))
    with torch.no_grad():
        for p in lora.trainable().values():
            p.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    groups = sampled(lora)
    assert found(lora, groups) is not None
    _, gradient = results(lora, groups)
    with lora.without_adapter(), torch.no_grad():
        base = evaluate(lora, groups).logp
    assert found(lora, groups) is not None, "the reference's pass leaves them alone"
    with lora.without_adapter():
        sample(EmbeddedSampler(lora), [REQUESTS[0]], SamplingParams(max_tokens=3), lora.kept)
    assert found(lora, groups) is not None
    lora.kept = None
    assert unlike(gradient, results(lora, groups)[1]) < 1e-4
    with lora.without_adapter(), torch.no_grad():
        assert torch.equal(base, evaluate(lora, groups).logp)


def test_other_tokens_are_not_found(model):
    groups = sampled(model)
    assert found(model, Groups(groups.prompts, [[*groups.completions[0], (2, 3, 4)], [], []])) is None
    assert found(model, Groups([(5, 6, 7)], [[groups.completions[0][0]]])) is None


def test_beyond_the_limit_nothing_is_kept_and_the_same_is_drawn(model):
    groups = sampled(model)
    size = model.kept.bytes
    assert size > 0
    again = sampled(model, limit=size / 2)
    assert again.completions == groups.completions
    assert not model.kept.slabs and found(model, again) is None
    assert sampled(model, limit=size).completions == groups.completions
    assert found(model, groups) is not None  # exactly enough


def test_two_calls_of_the_sampler_add_up(model):
    groups = sampled(model)
    first, size = model.kept, model.kept.rows
    more = [Request((40, 41, 42), (10, 11))]
    params = SamplingParams(max_tokens=12)
    drawn = sample(EmbeddedSampler(model), more, params, model.kept)
    assert model.kept is first and first.rows > size
    both = Groups([*groups.prompts, more[0].prompt_ids], [*groups.completions, [c.ids for c in drawn[0]]])
    _, gradient = results(model, both)
    model.kept = None
    assert unlike(gradient, results(model, both)[1]) < 1e-4


def test_copies_of_one_layer_at_a_time_lie_beside_what_was_kept(model, monkeypatch):
    groups, gathered = sampled(model), []
    original = kept.CacheHit._gather

    def noted(self, wanted):
        gathered.append([(layer, part) for layer, part, _ in wanted])
        return original(self, wanted)

    monkeypatch.setattr(kept.CacheHit, "_gather", noted)
    passed_on = []
    through = fused._LayerFunction.apply
    monkeypatch.setattr(fused._LayerFunction, "apply", lambda *given: passed_on.append(through(*given)) or passed_on[-1])
    logp = evaluate(model, groups).logp
    last = len(model.decoder.layers) - 1
    assert [bool(y.isnan().all()) for y in passed_on] == [True] * last + [False], "nobody computes with a mere place"
    assert gathered == [[(last, 0)]], "the head needs the last layer's output, and nothing else is needed yet"
    logp.sum().backward()
    # of each layer its parts, and its input, which is the output of the one before
    counts = list(map(len, model.decoder.row_layout.kinds))
    parts = [[(i - 1, 0)] * (i > 0) + [(i, part) for part in range(1, counts[i])] for i in range(last, -1, -1)]
    assert gathered[1:] == parts


def test_what_was_let_go_is_not_begun_again(model):
    groups = sampled(model)
    model.kept.clear()
    before = model.kept.rows
    sample(EmbeddedSampler(model), list(REQUESTS), SamplingParams(max_tokens=5), model.kept)
    assert model.kept.rows == before and not model.kept.slabs and found(model, groups) is None


PARTS = RowLayout(
    (
        ((5, torch.float32), (3, torch.bfloat16), (70, torch.float32)),
        ((5, torch.float32), (2, torch.float32), (7, torch.bfloat16)),
    )
)


def random_layers(rows, parts=PARTS):
    return [tuple(torch.randn(rows, width).to(kind) for width, kind in layer) for layer in parts.kinds]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (5, 70)])
def test_rows_are_gathered_from_slabs_in_any_order(dtype, shape):
    """Of two tables at once, another number of each."""
    tables = [torch.randn(12, 16, *shape).to(dtype), torch.randn(12, 16, 7)]
    rows = [torch.randint(0, 12 * 16, (n,)) for n in (900, 50)]
    out = [torch.empty(len(places), *table.shape[2:], dtype=table.dtype) for places, table in zip(rows, tables, strict=True)]
    addresses = torch.tensor([[slab.data_ptr() for slab in table] for table in tables])
    kernels().gather(out, addresses, rows, 16)
    assert all(torch.equal(made, table.flatten(0, 1)[at]) for made, table, at in zip(out, tables, rows, strict=True))
    kernels().gather([torch.empty(0, *shape, dtype=dtype)], addresses[:1], [rows[0][:0]], 16)


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_rows_are_written_to_all_parts_of_a_block_and_nowhere_else(rows):
    block, before = Block(PARTS, 100), random_layers(100)
    block.write(0, before, 0, 100)
    given = random_layers(rows + 4)
    block.write(20, given, 3, rows)
    for layer, (old, new) in enumerate(zip(before, given, strict=True)):
        for part, (was, own) in enumerate(zip(old, new, strict=True)):
            wanted = torch.cat([was[:20], own[3 : 3 + rows], was[20 + rows :]])
            assert torch.equal(block.part(layer, part), wanted)
            assert torch.equal(block.part(layer, part, 15, 10), wanted[15:25])
            assert block.addresses(15)[layer, part] == block.part(layer, part, 15).data_ptr()


@pytest.mark.parametrize("wrong", [torch.ones(4, 6), torch.ones(3, 5), torch.ones(4, 5).double(), torch.ones(5, 4).t()])
def test_what_is_no_such_part_is_refused(wrong):
    block, given = Block(PARTS, 10), random_layers(4)
    block.write(0, before := random_layers(10), 0, 10)
    given[1] = (wrong, *given[1][1:])
    with pytest.raises(ValueError, match=r"can't be written"):
        block.write(0, given, 0, 4)
    assert all(torch.equal(a, b) for old, new in zip(before, block.layers(), strict=True) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_are_kept_where_they_were_announced_and_holes_are_filled(in_place):
    """Passes of many sizes lie apart, and small ones in between; those of a slab or less are computed in place."""
    draw = torch.Generator().manual_seed(3)
    table, expected = ActivationCache(float("inf")), {}
    for count in [700, 200, 150, 40, 256, 1, 300, *torch.randint(1, 120, (40,), generator=draw).tolist()]:
        start, layers = table.next_row(count), random_layers(count)
        expected[start] = layers
        room = table.reserve(count, PARTS) if in_place else None
        if room is not None:
            block, place = room
            block.write(place, layers, 0, count)
        table.add(count, PARTS, [], None if room is not None else layers)
    spans = sorted((start, start + len(layers[0][0])) for start, layers in expected.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert table.rows == sum(end - start for start, end in spans) > 0.9 * SLAB * len(table.slabs)
    everything = torch.arange(SLAB * len(table.slabs))
    known = kept.CacheHit(table.slabs, everything, kept.CachedLogProbs(torch.zeros(0), 1.0, (0, 0)))
    found = [known._gather([(i, part, everything) for part in range(3)]) for i in range(2)]
    for start, layers in expected.items():
        for whole, layer in zip(found, layers, strict=True):
            assert all(torch.equal(part[start : start + len(x)], x) for part, x in zip(whole, layer, strict=True))


def test_more_rows_than_a_slab_holds_have_no_room_in_place():
    table = ActivationCache(float("inf"))
    assert table.reserve(SLAB + 1, PARTS) is None and not table.slabs, "nothing is made for them"


def test_no_piece_of_a_slab_is_larger_than_a_layers(model):
    """What fits into no hole that others left makes a step's peak larger."""
    sampled(model)
    parts = model.decoder.row_layout
    for slab in model.kept.slabs:
        pieces = {
            slab.part(i, j).untyped_storage().data_ptr() for i, layer in enumerate(parts.kinds) for j, _ in enumerate(layer)
        }
        assert len(pieces) == len(parts.kinds)
