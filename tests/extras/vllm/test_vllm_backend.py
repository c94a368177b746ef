"""The vLLM sampler against the transformers forward, and the checks that must notice when its weights are not the trainer's."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_jobs import make_job, online_config
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm_sabotage import switch

from psigrad.config import Model, Sampling
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.lora import Lora
from psigrad.language.recipes import online
from psigrad.language.rollout.samplers.distribution import filter_logits
from psigrad.language.rollout.types import Completion, Request, SamplingParams
from psigrad_extras.vllm import broadcast, vllm_backend
from psigrad_extras.vllm.broadcast import Meeting
from psigrad_extras.vllm.vllm_backend import VLLMSampler
from psigrad_extras.vllm.vllm_probe import distance, log_probs, written
from psigrad_extras.vllm.vllm_sources import Delivery
from psigrad_extras.vllm.vllm_weights import bit_sums, fingerprint, in_buckets, outgoing

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


def gap(sampler: VLLMSampler, probe: list[list[int]]) -> float:
    """The mean absolute difference between the engine's and the trainer's log-probs."""
    return distance(sampler.engine_log_probs(probe), log_probs(sampler.model, probe))


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
def engine(request) -> Iterator[tuple[VLLMSampler, list[torch.Tensor]]]:
    model = a_model(*request.param)
    with closing(VLLMSampler(model, 16, service="vllm_sabotage:service")) as made:
        yield made, [p.detach().clone() for p in model.network.parameters()]


@pytest.fixture
def sampler(engine) -> VLLMSampler:
    """With the weights of the beginning."""
    made, weights = engine
    with torch.no_grad():
        for parameter, first in zip(made.model.network.parameters(), weights, strict=True):
            parameter.copy_(first)
    return made


@pytest.fixture(scope="module")
def tied() -> Iterator[VLLMSampler]:
    with closing(VLLMSampler(a_model(), 16)) as made:
        yield made


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
    return model.network(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()


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
        logq = filter_logits(logits_of(tied.model, request, completion) / params.temperature, params).log_softmax(-1)
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


def test_requests_that_join_a_flight_are_written_by_their_own_settings_and_prompts(sampler):
    """The second caller's requests begin while the first one's are being written, and both are the model's, to rounding."""
    early, late = some_requests(8), [replace(r, prompt_ids=(7, *r.prompt_ids)) for r in some_requests(4)]
    params = SamplingParams(max_tokens=48), SamplingParams(max_tokens=16, temperature=0.7)
    first = sampler.steps(early, params[0])
    found = [dict(next(first))]
    second = dict(place for step in sampler.steps(late, params[1]) for place in step)
    found += [dict(step) for step in first]
    first_groups = {place: group for step in found for place, group in step.items()}
    for requests, groups, own in ((early, first_groups, params[0]), (late, second, params[1])):
        for place, request in enumerate(requests):
            assert [c.seed for c in groups[place]] == list(request.seeds)
            for completion in groups[place]:
                logp = (logits_of(sampler.model, request, completion) / own.temperature).log_softmax(-1)
                mine = logp.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]
                assert float((mine - torch.tensor(completion.logprobs)).abs().max()) < EQUAL


def test_a_prompt_without_room_is_refused(tied):
    with pytest.raises(UserError, match="exceed the model's 256 positions"):
        tied.sample([Request(tuple(range(5, 245)), (1,))], SamplingParams(max_tokens=17))


def test_a_model_that_vllm_has_no_kernels_for_is_refused_in_a_sentence():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2), tokenizer)
    with pytest.raises(UserError, match=r"vLLM cannot run this model \(.*head_dim=16.*\); sample with sampler=embedded"):
        VLLMSampler(model, 16)


def test_an_update_reaches_every_weight_and_the_next_sample_is_the_new_policys(sampler):
    params = SamplingParams(max_tokens=16)
    before, version = sampler.sample(some_requests(), params), sampler.version
    assert sampler.sample(some_requests(), params) == before and sampler.version == version, "no change, no update"
    for count in (1, 2, 3):
        step(sampler.model)
        assert gap(sampler, written(sampler.model, 1, 96)) > 0.01, "negative control: the step is large enough to see"
        assert worst(sampler, params) < EQUAL and sampler.version == version + count
    assert sampler.sample(some_requests(), params) != before


def test_the_head_alone_is_updated_too(sampler):
    """Untied: a step of the head alone. Tied: of the embedding, which is the head."""
    with torch.no_grad():
        sampler.model.network.get_output_embeddings().weight.mul_(1.5)
    assert worst(sampler, SamplingParams(max_tokens=8)) < EQUAL


def test_every_weight_that_does_not_arrive_is_named_and_no_other(sampler):
    names = [name for name, _ in sampler.model.network.named_parameters()]
    for name in names:
        for fault in ("dropped", "negated"):
            step(sampler.model, 1e-4)
            switch(sampler, **{fault: name})
            _, wrong, unknown, stale = sampler._transfer()
            assert wrong == [name] and not unknown and not stale, (fault, name, wrong)
            switch(sampler)
            assert sampler._transfer()[1:] == ([], [], 0), "and an honest update says nothing"
    sampler._sent = fingerprint(sampler.model)


def test_a_mixture_of_experts_takes_its_updates():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    shape = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), max_position_embeddings=256, tie_word_embeddings=False, **shape, **heads)
    model = prepare(Qwen3MoeForCausalLM(config), tokenizer)
    with closing(VLLMSampler(model, 16)) as sampler:
        before = sampler.sample(some_requests(), SamplingParams(max_tokens=16))
        for version in (1, 2, 3):  # a token that is sent to other experts by rounding would show
            assert worst(sampler, SamplingParams(max_tokens=16)) < 5e-4 and sampler.version == version
            step(model)
        assert sampler.sample(some_requests(), SamplingParams(max_tokens=16)) != before


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_computes_with_what_a_trainer_elsewhere_broadcasts(size):
    """Into one process, and into two with half of the model each. One weight that is dropped is named."""
    trainer, passes, store = a_model(), ("choose", "load", "compare"), broadcast.listen()
    sampler = VLLMSampler(a_model(), 16, service="vllm_sabotage:service", tensor_parallel_size=size)
    with closing(sampler), ThreadPoolExecutor(1) as other:
        joined = other.submit(vllm_backend.join, sampler, Meeting("gloo", "127.0.0.1", store.port, 1 + size))
        group = broadcast.gather_group(store, "gloo", 1 + size, torch.device("cpu"), joined.done)
        assert joined.result() == ""

        def update(number: int) -> None:
            step(trainer)
            bucketed = in_buckets(outgoing(trainer), 1)
            buckets = [broadcast.pack(bucket, bit_sums(list(bucket.values()))) for bucket in bucketed]
            taken = other.submit(sampler.take, Delivery(number, tuple(contents for contents, _ in buckets), passes, ()))
            for _ in passes:
                for _, buffer in buckets:
                    group.send(buffer)
            taken.result(60.0)

        own, sampler.model = sampler.model, trainer  # whose log-probs are asked for
        for number in range(3):
            update(number)
            assert worst(sampler, SamplingParams(max_tokens=16)) < EQUAL
        sampler.model = own
        assert worst(sampler, SamplingParams(max_tokens=16)) > 1e-2, "negative control: of the weights of the beginning"
        if size == 1:
            switch(sampler, dropped="layers.1.mlp.down_proj")
            with pytest.raises(UserError, match=r"the engine's weight model\.layers\.1\.mlp\.down_proj\.weight differs"):
                update(3)


@pytest.mark.parametrize("transfer", ["gloo", "object_store"])
def test_grpo_trains_with_an_engine_on_a_cluster(tmp_path, transfer):
    """On Ray: each version goes to the engine, and its log-probs are the trainer's."""
    job, out = make_job(tmp_path), tmp_path / "run"
    tokenizer = AutoTokenizer.from_pretrained(job / "base")
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=1, heads=2, max_length=64).save_pretrained(job / "base")
    command = [sys.executable, "-m", "psigrad", "grpo", "--cluster=auto", "--samplers=1", "--sampler=vllm", "--max-steps=4"]
    command += [f"--model={job / 'base'}", f"--dataset={job / 'train.jsonl'}", f"--output-dir={out}", "--prompts-per-step=4"]
    command += ["--num-generations=4", "--max-completion-length=4", "--threads=1", "--no-progress", "--no-report"]
    command += ["--reward=exact", "--eval-prompts=0", f"--weight-transfer={transfer}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (fleet,) = [event["fleet"] for event in events if "fleet" in event]
    assert fleet["lost"] == 0 and fleet.get("broadcasts", 0) == (4 if transfer == "gloo" else 0)
    rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    trained = {(row["step"], row["version"]) for row in rollouts if row["kind"] == "train"}
    assert trained == {(1, 0), (2, 1), (3, 2), (4, 3)}
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    gaps = [row[name] for row in metrics if (name := "sampling/sampling_logp_difference/max") in row]
    assert len(gaps) == 4 and 0 < max(gaps) < EQUAL


def test_a_missed_update_ends_the_run_in_a_sentence():
    model = a_model()
    sampler = VLLMSampler(model, 16, service="vllm_sabotage:service")
    switch(sampler, head=True)
    step(model, 1e-6)
    said = r"did not apply update 2 of the weights: the engine's weight model\.embed_tokens\.weight differs from the weight"
    with pytest.raises(UserError, match=said):
        sampler.sample(some_requests(), SamplingParams(max_tokens=4))
    with pytest.raises(UserError, match=said):
        sampler.synchronise()


def test_a_prefix_cache_that_is_kept_is_noticed(sampler):
    """Prompts above one block of the cache (128 tokens on a CPU), asked for before and after an update."""
    prompts, params = [Request(tuple(range(5, 205)), (1, 2, 3))], SamplingParams(max_tokens=16)
    assert worst(sampler, params, prompts) < EQUAL
    step(sampler.model)
    switch(sampler, cache=True)
    assert sampler._transfer()[3] >= 128
    sampler._sent = fingerprint(sampler.model)
    assert worst(sampler, params, prompts) > 1e-3, "negative control: such a cache gives the old policy's log-probs"
    switch(sampler)
    assert sampler._transfer()[3] == 0
    assert worst(sampler, params, prompts) < EQUAL


def test_an_engine_that_is_killed_is_started_again_and_nothing_is_lost(monkeypatch):
    told = []
    model = a_model()
    with closing(VLLMSampler(model, 2, log=lambda kind, text, **fields: told.append((kind, text, fields)))) as sampler:
        requests, params = some_requests(12), SamplingParams(max_tokens=16)
        whole = sampler.sample(requests, params)
        done = {}
        for complete in sampler.steps(requests, params):
            if not done:
                os.kill(sampler._worker.process.pid, signal.SIGKILL)
            done.update(complete)
        assert [[c.seed for c in done[i]] for i in range(12)] == [list(r.seeds) for r in requests]
        assert sampler.losses == 1 and [kind for kind, _, _ in told] == ["engine_lost"] and "signal 9" in told[0][1]
        assert (
            sum(
                a.ids == b.ids
                for g, h in zip(whole, (done[i] for i in range(12)), strict=True)
                for a, b in zip(g, h, strict=True)
            )
            > 30
        )
        # one that stands still is late, and one that stands still each time ends the run
        monkeypatch.setattr(vllm_backend, "PATIENCE", 2.0)
        monkeypatch.setattr(vllm_backend, "LOSSES", 1)
        keeper = sampler._worker.process.pid  # the engine is below it
        os.kill(int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]), signal.SIGSTOP)
        with pytest.raises(UserError, match=r"lost 1 times in a row, the last time because it did not answer"):
            sampler.sample(requests, params)


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


@pytest.mark.parametrize("is_tied", [True, False])
def test_in_bfloat16_a_missing_weight_is_noticed_and_rounding_is_none(is_tied):
    """A model cast after loading, as trainers have it, in eight layers; steps so small that few entries change."""
    model = a_model("llama", is_tied, dtype=torch.bfloat16, layers=8)
    with closing(VLLMSampler(model, 16, service="vllm_sabotage:service")) as sampler:
        assert sampler.version == 1 and 0 < gap(sampler, written(sampler.model, 1, 96)) < 0.03
        for _ in range(3):
            step(model, 1e-4)
            assert sampler._transfer()[1:] == ([], [], 0)
        kinds = ("layers.0.self_attn.q_proj", "layers.3.mlp.down_proj", "layers.7.self_attn.o_proj", "embed_tokens", "model.norm")
        for name in kinds:
            (whole,) = [n for n, _ in model.network.named_parameters() if name in n]
            before = model.network.get_parameter(whole).detach().clone()
            step(model, 0.05 if "norm" in name else 1e-4)  # a smaller one is nothing beside a 2 in half precision
            assert float((model.network.get_parameter(whole) != before).float().mean()) > 0, "there is something to miss"
            switch(sampler, dropped=name)
            assert sampler._transfer()[1] == [whole]
            switch(sampler)
            assert sampler._transfer()[1:] == ([], [], 0)
        if is_tied:
            step(model, 1e-4)
            switch(sampler, head=True)
            assert sampler._transfer()[1] == ["model.embed_tokens.weight"]


def test_the_fingerprint_sees_one_bit_and_a_write_of_the_same_values():
    model = a_model()
    before = fingerprint(model)
    assert fingerprint(model) == before
    weight = model.network.get_input_embeddings().weight
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


def test_each_of_two_trainers_has_an_engine_of_its_own(tmp_path):
    """vLLM beside torch.distributed: both in one run, each with its process group."""
    job, out = make_job(tmp_path), tmp_path / "run"
    tokenizer = AutoTokenizer.from_pretrained(job / "base")
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=1, heads=2, max_length=64).save_pretrained(job / "base")
    command = [sys.executable, "-m", "psigrad", "grpo", "--processes=2", "--sampler=vllm", "--max-steps=3", "--reward=exact"]
    command += [
        f"--model={job / 'base'}",
        f"--dataset={job / 'train.jsonl'}",
        f"--output-dir={out}",
        "--prompts-per-step=4",
        "--eval-prompts=0",
    ]
    command += ["--num-generations=4", "--max-completion-length=4", "--threads=1", "--no-progress", "--no-report"]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    gaps = [row[name] for row in metrics if (name := "sampling/sampling_logp_difference/max") in row]
    assert len(gaps) == 3 and 0 < max(gaps) < EQUAL
    rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    trained = [row for row in rollouts if row["kind"] == "train"]
    assert {(row["step"], row["version"]) for row in trained} == {(1, 0), (2, 1), (3, 2)}
