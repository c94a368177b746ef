"""The vLLM sampler against the transformers forward, and the checks that must notice when its weights are not the trainer's."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny_jobs import make_job, online_config
from transformers import AutoTokenizer

from psigrad.config import Model, Sampling
from psigrad.errors import UserError
from psigrad.models import tiny
from psigrad.models.language_model import LanguageModel, prepare
from psigrad.models.lora import Lora
from psigrad.recipes import online
from psigrad.rollout import vllm_backend
from psigrad.rollout.distribution import filtered
from psigrad.rollout.types import Completion, Request, SamplingParams
from psigrad.rollout.vllm_backend import VLLMSampler, fingerprint

pytestmark = pytest.mark.vllm
torch.set_num_threads(1)
# float32 on both sides: the same sums in another order. Seen here: 2e-6. What a stale matrix costs is 1e-2 and more.
EQUAL = 2e-5
SETTINGS = [
    SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=16, temperature=0.7),
    SamplingParams(max_tokens=16, temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=16, min_p=0.05),
    SamplingParams(max_tokens=16, temperature=0),
    SamplingParams(max_tokens=16, stop_token_ids=tuple(range(40))),
]


def a_model(
    architecture: str = "qwen3", tied: bool = True, lora: Lora | None = None, dtype: torch.dtype = torch.float32, layers: int = 2
) -> LanguageModel:
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    hf = tiny.model(architecture, len(tokenizer), hidden=64, layers=layers, heads=2, tied=tied).to(dtype)
    with torch.no_grad():  # distributions that differ between prompts and tokens
        for parameter in hf.parameters():
            parameter.mul_(2)
    return prepare(hf, tokenizer, lora=lora)


@pytest.fixture(scope="module", params=[("qwen3", True), ("llama", False)], ids=["qwen3, tied", "llama, untied"])
def sampler(request) -> VLLMSampler:
    return VLLMSampler(a_model(*request.param), 16)


@pytest.fixture(scope="module")
def tied() -> VLLMSampler:
    return VLLMSampler(a_model(), 16)


def some_requests(count: int = 5, longest: int = 20) -> list[Request]:
    rng = random.Random(0)
    return [
        Request(
            tuple(rng.randrange(5, 260) for _ in range(rng.randint(1, longest))), tuple(rng.getrandbits(63) for _ in range(3))
        )
        for _ in range(count)
    ]


@torch.no_grad()
def logits_of(model: LanguageModel, request: Request, completion: Completion) -> torch.Tensor:
    """[T, V] by transformers itself, unpadded and unpacked."""
    ids = torch.tensor([[*request.prompt_ids, *completion.ids]])
    return model.as_transformers()(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()


def pairs(requests: list[Request], out: list[list[Completion]]) -> list[tuple[Request, Completion]]:
    return [(request, c) for request, group in zip(requests, out, strict=True) for c in group]


def worst(sampler: VLLMSampler, params: SamplingParams, requests: list[Request] | None = None) -> float:
    """The largest difference between the sampler's log-probs and transformers'."""
    requests, found = requests or some_requests(), 0.0
    for request, completion in pairs(requests, sampler.sample(requests, params)):
        logp = (logits_of(sampler.model, request, completion) / (params.temperature or 1.0)).log_softmax(-1)
        mine = logp.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
        found = max(found, float((mine - torch.tensor(completion.logprobs)).abs().max()))
    return found


def step(model: LanguageModel, rate: float = 0.05) -> None:
    """A step of an optimiser: every weight moves."""
    optimizer = torch.optim.Adam(model.trainable().values(), lr=rate)
    torch.manual_seed(0)
    for parameter in model.trainable().values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_log_probs_are_those_of_the_transformers_forward(sampler, params):
    assert worst(sampler, params) < EQUAL


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_sampling_log_probs_are_those_of_the_filtered_distribution(tied, params):
    requests = some_requests()
    for request, completion in pairs(requests, tied.sample(requests, params)):
        if params.temperature == 0:
            assert completion.sampling_logprobs == (0.0,) * len(completion.ids)
            assert completion.ids == tuple(logits_of(tied.model, request, completion).argmax(-1).tolist())
            continue
        logq = filtered(logits_of(tied.model, request, completion) / params.temperature, params).log_softmax(-1)
        mine = logq.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.allclose(mine, torch.tensor(completion.sampling_logprobs), atol=EQUAL, rtol=0)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_contract_of_a_sampler(tied, params):
    requests = some_requests()
    out = tied.sample(requests, params)
    stops = {0, *params.stop_token_ids}
    assert [[c.seed for c in group] for group in out] == [list(r.seeds) for r in requests]
    for _, completion in pairs(requests, out):
        assert 1 <= len(completion.ids) <= params.max_tokens
        assert len(completion.logprobs) == len(completion.sampling_logprobs) == len(completion.ids)
        assert not stops & set(completion.ids[:-1])
        assert completion.finish_reason == ("stop" if completion.ids[-1] in stops else "length")
        if completion.finish_reason == "length":
            assert len(completion.ids) == params.max_tokens


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(tied):
    requests, params = some_requests(), SamplingParams(max_tokens=16)
    first = tied.sample(requests, params)
    assert tied.sample(requests, params) == first
    others = [replace(request, seeds=tuple(seed + 1 for seed in request.seeds)) for request in requests]
    assert [c.ids for g in tied.sample(others, params) for c in g] != [c.ids for g in first for c in g]
    # a seed is one request's own: in a group of one prompt the completions differ
    assert all(len({c.ids for c in group}) > 1 for group in first)


def test_a_prompt_without_room_is_refused(tied):
    with pytest.raises(UserError, match="exceed the model's 256 positions"):
        tied.sample([Request(tuple(range(5, 245)), (1,))], SamplingParams(max_tokens=17))


def test_a_model_that_vllm_has_no_kernels_for_is_refused_in_a_sentence():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2), tokenizer)
    with pytest.raises(UserError, match=r"vLLM cannot run this model \(.*head_dim=16.*\); sample with sampler=embedded"):
        VLLMSampler(model, 16)


def test_a_second_sampler_closes_the_first():
    first, second = VLLMSampler(a_model(), 16), VLLMSampler(a_model(), 16)
    assert second.gap() < EQUAL
    with pytest.raises(UserError, match="a newer sampler has taken its place"):
        first.sample(some_requests(), SamplingParams(max_tokens=4))
    first.close()
    assert second.gap() < EQUAL


@pytest.mark.parametrize(("architecture", "is_tied"), [("qwen3", True), ("llama", False)])
def test_an_update_reaches_every_weight_and_the_next_sample_is_the_new_policys(architecture, is_tied):
    model = a_model(architecture, is_tied)
    sampler, params = VLLMSampler(model, 16), SamplingParams(max_tokens=16)
    before, version = sampler.sample(some_requests(), params), sampler.version
    assert sampler.sample(some_requests(), params) == before and sampler.version == version, "no change, no update"
    for count in (1, 2, 3):
        step(model)
        assert sampler.gap() > 0.01, "negative control: the step is large enough to see"
        assert worst(sampler, params) < EQUAL and sampler.version == version + count
    assert sampler.sample(some_requests(), params) != before


def test_the_head_alone_is_updated_too():
    """Untied: a step of the head alone. Tied: of the embedding, which is the head."""
    for is_tied in (True, False):
        model = a_model(tied=is_tied)
        sampler = VLLMSampler(model, 16)
        with torch.no_grad():
            model.as_transformers().get_output_embeddings().weight.mul_(1.5)
        assert worst(sampler, SamplingParams(max_tokens=8)) < EQUAL


def test_negative_control_a_tied_head_that_is_not_packed_again_is_noticed_at_the_start(monkeypatch):
    monkeypatch.setattr(vllm_backend, "repack_head", lambda model: None)
    model = a_model()
    weights = {name: p.clone() for name, p in model.as_transformers().named_parameters()}
    with pytest.raises(UserError, match=r"differ from the trainer's by .* does not compute with the weights it was given"):
        VLLMSampler(model, 16)
    assert all(torch.equal(weights[name], p) for name, p in model.as_transformers().named_parameters()), (
        "the trainer's weights are as they were"
    )


def test_negative_control_and_after_a_later_update_as_well(monkeypatch):
    model = a_model()
    sampler = VLLMSampler(model, 16)
    monkeypatch.setattr(vllm_backend, "repack_head", lambda model: None)
    step(model)
    with pytest.raises(UserError, match="differ from the trainer's"):
        sampler.sample(some_requests(), SamplingParams(max_tokens=4))


def test_negative_control_a_weight_that_is_not_sent_is_noticed(monkeypatch):
    named = torch.nn.Module.named_parameters

    def without(self, *arguments, **named_arguments):
        return (pair for pair in named(self, *arguments, **named_arguments) if "layers.1.mlp.down_proj" not in pair[0])

    model = a_model()
    sampler = VLLMSampler(model, 16)
    step(model)
    monkeypatch.setattr(type(model.as_transformers()), "named_parameters", without)
    with pytest.raises(UserError, match="differ from the trainer's"):
        sampler.sample(some_requests(), SamplingParams(max_tokens=4))


def test_negative_control_a_prefix_cache_that_is_kept_gives_the_old_policys_log_probs(monkeypatch):
    """Prompts above one block of the cache (128 tokens on a CPU), asked for before and after an update."""
    prompts = [Request(tuple(range(5, 205)), (1, 2, 3))]
    for forgotten in (True, False):
        model = a_model()
        sampler, params = VLLMSampler(model, 16), SamplingParams(max_tokens=16)
        assert worst(sampler, params, prompts) < EQUAL
        if not forgotten:
            monkeypatch.setattr(sampler._engine, "reset_prefix_cache", lambda: True)
        step(model)
        assert (worst(sampler, params, prompts) < EQUAL) == forgotten


def test_a_lora_model_is_sampled_with_its_adapter_merged():
    model = a_model(lora=Lora(rank=4, alpha=8.0))
    sampler, params = VLLMSampler(model, 16), SamplingParams(max_tokens=16)
    step(model, 0.2)
    # W x + B (A x) here, (W + B A) x there: a product more to round
    assert worst(sampler, params) < 1e-4
    with model.without_adapter():
        assert worst_as_it_is(sampler, params) > 1e-2, "negative control: the adapter matters"


def worst_as_it_is(sampler: VLLMSampler, params: SamplingParams) -> float:
    """As `worst`, with the engine left as it is."""
    sampler.synchronise()
    kept, sampler.synchronise = sampler.synchronise, lambda: None
    try:
        return worst(sampler, params)
    finally:
        sampler.synchronise = kept


def test_bfloat16_agrees_to_its_rounding():
    sampler = VLLMSampler(a_model(dtype=torch.bfloat16), 16)
    assert sampler.version == 2 and 0 < sampler.gap() < 0.03


def without(sampler: VLLMSampler, left_out: str, monkeypatch) -> None:
    """From now on updates leave out the weights with this in their name."""
    named = torch.nn.Module.named_parameters

    def some(self, *arguments, **named_arguments):
        return (pair for pair in named(self, *arguments, **named_arguments) if left_out not in pair[0])

    update = sampler._update

    def partial_update() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, "named_parameters", some)
            update()

    monkeypatch.setattr(sampler, "_update", partial_update)


@pytest.mark.parametrize("is_tied", [True, False])
def test_in_bfloat16_a_missing_weight_is_noticed_and_rounding_is_none(is_tied, monkeypatch):
    """Eight layers, whose negation magnifies rounding."""
    model = a_model("llama", is_tied, dtype=torch.bfloat16, layers=8)
    sampler = VLLMSampler(model, 16)
    for _ in range(3):  # honest updates raise no alarm
        step(model)
        sampler._check_route()
    for name in ("layers.0.self_attn.q_proj", "layers.3.mlp.down_proj", "layers.7.self_attn.o_proj", "embed_tokens"):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="does not compute with the weights"):
            without(sampler, name, patch)
            sampler._check_route()
        sampler._update()
    with monkeypatch.context() as patch:
        patch.setattr(vllm_backend, "repack_head", lambda model: None)
        if is_tied:
            with pytest.raises(UserError, match="does not compute with the weights"):
                sampler._check_route()


def test_the_fingerprint_sees_one_bit_and_a_write_of_the_same_values():
    model = a_model()
    before = fingerprint(model)
    assert fingerprint(model) == before
    weight = model.as_transformers().get_input_embeddings().weight
    weight.data.view(torch.int32)[3, 5] ^= 1  # behind autograd's back
    assert fingerprint(model) != before
    again = fingerprint(model)
    with torch.no_grad():
        weight.add_(0.0)
    assert fingerprint(model) != again


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "LoRA"])
def test_grpo_trains_with_it_on_policy(tmp_path, rank):
    job = make_job(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(job / "base")  # heads of 32: vLLM has no kernel for the job's own 16
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=1, heads=2, max_length=64).save_pretrained(job / "base")
    config = online_config(job, tmp_path / "run", max_steps=3)
    config = replace(
        config,
        sampling=Sampling(max_completion_length=4, max_decode_batch=8, sampler="vllm"),
        model=Model(path=str(job / "base"), lora_rank=rank),
        num_iterations=2,
    )
    done = online.run(config)
    metrics = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["sampling/sampling_logp_difference/max"] for row in metrics if "sampling/sampling_logp_difference/max" in row]
    assert len(gaps) == 3 and 0 < max(gaps) < (1e-4 if rank else EQUAL)
    rollouts = [json.loads(line) for line in (done.folder / "rollouts.jsonl").read_text().splitlines()]
    assert {(row["step"], row["version"]) for row in rollouts if row["kind"] == "train"} == {(1, 0), (2, 1), (3, 2)}
    rewards = [row["reward"] for row in metrics if "reward" in row]
    assert len(rewards) == 3 and any(a != b for a, b in pairwise(rewards))
    assert done.model.is_dir()
