"""vLLM's sampler without vLLM: the trainer's side against a stand-in of the engine's process, and the reading back of weights
against modules in vLLM's arrangement. What vLLM itself does is tested by `make test-vllm`.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from engine_stand_in import completion
from torch import nn

from psigrad.config import Sampling
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.rollout.samplers import samplers
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad_extras.vllm import vllm_backend
from psigrad_extras.vllm.vllm_backend import VLLMSampler
from psigrad_extras.vllm.vllm_engine import Readback

REQUESTS = [Request((5, 6, 7), (1, 2)), Request((8, 9), (3,)), Request((10, 11, 12, 13), (4, 5, 6))]
PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """A function that makes a sampler whose engine is the stand-in, with a fault."""
    find = vllm_backend.importlib.util.find_spec
    monkeypatch.setattr(vllm_backend, "log_probs", lambda model, probe: torch.zeros(sum(map(len, probe)) - len(probe)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: True if name == "vllm" else find(name, *more))
    made: list[VLLMSampler] = []

    def make(fault: str = "", **settings) -> VLLMSampler:
        monkeypatch.setenv("PSIGRAD_TEST_ENGINE", fault)
        monkeypatch.setenv("PSIGRAD_TEST_ONCE", str(tmp_path / "once"))
        made.append(VLLMSampler(a_model(), 4, service="engine_stand_in:service", **settings))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


def a_model() -> LanguageModel:
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    return prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2), tokenizer)


def nudge(model: LanguageModel) -> None:
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.mul_(1.1)


def expected(model: LanguageModel) -> list[list[tuple[int, ...]]]:
    """What the stand-in samples with the weights of the model."""
    held = {name: p.detach().numpy() for name, p in model.network.named_parameters()}
    return [[completion(held, r.prompt_ids, seed, PARAMS.max_tokens) for seed in r.seeds] for r in REQUESTS]


def ids(groups) -> list[list[tuple[int, ...]]]:
    return [[c.ids for c in group] for group in groups]


def test_completions_come_group_by_group_from_the_weights_of_now(engine):
    sampler = engine()
    steps = list(sampler.steps(REQUESTS, PARAMS))
    assert [[place for place, _ in step] for step in steps] == [[0], [1], [2]], "each group as soon as it is complete"
    nudge(sampler.model)
    found = sampler.sample(REQUESTS, PARAMS)
    assert sampler.version == 2 and sampler.losses == 0
    assert ids(found) == expected(sampler.model)
    flat = [c for group in found for c in group]
    assert [c.seed for c in flat] == [1, 2, 3, 4, 5, 6] and {c.logprobs for c in flat} == {(-1.0,) * 6}


@pytest.mark.parametrize(("fault", "reason"), [("dies", r"its process ended \(exit status 9\)"), ("hangs", "no sign of life")])
def test_an_engine_that_is_lost_is_started_again_and_nothing_is_sampled_twice(engine, fault, reason, monkeypatch):
    told = []
    sampler = engine(fault, tell=lambda kind, text, **fields: told.append((kind, text)))
    if fault == "hangs":
        monkeypatch.setattr(vllm_backend, "PATIENCE", 5.0)
    places = [place for step in sampler.steps(REQUESTS, PARAMS) for place, _ in step]
    assert sorted(places) == [0, 1, 2] and sampler.losses == 1
    ((kind, text),) = told
    assert kind == "engine_lost" and reason.replace("\\", "") in text
    assert ids(sampler.sample(REQUESTS, PARAMS)) == expected(sampler.model)


def test_one_that_is_lost_while_nobody_asks_is_started_again_with_the_weights_of_then(engine, capfd):
    sampler = engine()
    os.kill(sampler._worker.process.pid, signal.SIGKILL)
    nudge(sampler.model)
    assert ids(sampler.sample(REQUESTS, PARAMS)) == expected(sampler.model)
    assert "vLLM's engine was lost" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("mute", r"lost 3 times in a row, last because its process ended \(exit status 3\)"),
        ("broken", r"vLLM cannot run this model \(no kernel for it\); sample with sampler=embedded"),
        ("fails", r"vLLM cannot run this model \(out of pages\)"),
        ("misses", r"did not take update 2 .* does not compute with the weight \S+weight and \d+ more as it was sent"),
        ("keeps", r"did not take update 2 .* its prefix cache kept 130 tokens of old weights"),
    ],
)
def test_what_cannot_go_on_ends_in_a_sentence_and_leaves_no_process(engine, fault, sentence):
    with pytest.raises(UserError, match=sentence):
        sampler = engine(fault)
        nudge(sampler.model)
        sampler.sample(REQUESTS, PARAMS)
    if fault not in ("mute", "broken"):
        with pytest.raises(UserError, match="was closed"):
            sampler.sample(REQUESTS, PARAMS)


def test_settings_that_cannot_be_are_refused_at_once(engine):
    with pytest.raises(UserError, match="vllm_sleep frees a GPU's memory and the model is on cpu"):
        engine(sleep=True)
    for wrong in ({"tensor_parallel_size": 2}, {"vllm_sleep": True}):
        with pytest.raises(UserError, match="are vLLM's and the sampler is embedded"):
            samplers.make(Sampling(**wrong), a_model())


# modules under the names, and with the attributes, that vLLM gives them


class LinearBase(nn.Module):
    """Packed: the matrix is in a product that nothing can read."""

    def __init__(self, matrix, size, rank, packed=True, **attributes):
        super().__init__()
        self.tp_size, self.tp_rank = size, rank
        for name, value in attributes.items():
            setattr(self, name, value)
        self.weight = nn.Parameter(torch.empty(0) if packed else matrix.clone(), requires_grad=False)
        if packed:
            self.pack(matrix)

    def pack(self, matrix):
        kept = matrix.clone()
        self.cpu_linear = lambda x, weight, bias: x @ kept.T
        self.held = kept


class ColumnParallelLinear(LinearBase):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(LinearBase):
    pass


class VocabParallelEmbedding(nn.Module):
    def __init__(self, matrix, first, last):
        super().__init__()
        self.shard_indices = type("Shard", (), {"org_vocab_start_index": first, "org_vocab_end_index": last})
        padded = torch.cat([matrix[first:last], torch.zeros(3, matrix.shape[1])])
        self.weight = nn.Parameter(padded, requires_grad=False)


class ParallelLMHead(VocabParallelEmbedding):
    def __init__(self, matrix, first, last):
        super().__init__(matrix, first, last)
        self.pack()

    def pack(self):
        kept = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: x @ kept.T


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Of one layer: two heads of 4 for q, two for k and v, 12 wide, 10 inside, 14 tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q_proj": (8, 12), "k_proj": (8, 12), "v_proj": (8, 12), "o_proj": (12, 8)}
    shapes = {f"layer.attn.{n}.weight": s for n, s in shapes.items()}
    shapes |= {
        "layer.mlp.gate_proj.weight": (10, 12),
        "layer.mlp.up_proj.weight": (10, 12),
        "layer.mlp.down_proj.weight": (12, 10),
    }
    shapes |= {"layer.norm.weight": (12,), "embed.weight": (14, 12)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def in_vllm(sent: dict[str, torch.Tensor], size: int, rank: int) -> nn.Module:
    """The share of one of `size` devices, written out by hand."""
    q, k, v, o = (sent[f"layer.attn.{n}_proj.weight"] for n in "qkvo")
    gate, up, down = (sent[f"layer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    n, w = 8 // size, 10 // size
    rows, inner = slice(rank * n, (rank + 1) * n), slice(rank * w, (rank + 1) * w)
    heads = {"num_heads": 2 // size, "num_kv_heads": 2 // size, "num_kv_head_replicas": 1, "head_size": 4}
    model, layer, attn, mlp = nn.Module(), nn.Module(), nn.Module(), nn.Module()
    attn.qkv_proj = QKVParallelLinear(torch.cat([q[rows], k[rows], v[rows]]), size, rank, **heads)
    attn.o_proj = RowParallelLinear(o[:, rows], size, rank)
    mlp.gate_up_proj = MergedColumnParallelLinear(torch.cat([gate[inner], up[inner]]), size, rank)
    mlp.down_proj = RowParallelLinear(down[:, inner], size, rank, packed=False)
    layer.norm = nn.Module()
    layer.norm.weight = nn.Parameter(sent["layer.norm.weight"].clone(), requires_grad=False)
    layer.attn, layer.mlp, model.layer = attn, mlp, layer
    first, last = rank * 14 // size, (rank + 1) * 14 // size
    model.embed = VocabParallelEmbedding(sent["embed.weight"], first, last)
    model.lm_head = ParallelLMHead(sent["embed.weight"], first, last)
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    return model


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_every_weight_that_stayed_as_it_was_is_named_whatever_holds_it(size, rank):
    old, new = weights(0), weights(1)
    for name in new:
        left = {**new, name: old[name]}
        held = Readback(in_vllm(old, size, rank), tied=True)
        held.choose(new, list(new))
        held.model = in_vllm(left, size, rank)
        assert held.wrong(new) == [name] and held.unknown(new) == []
        held.model = in_vllm({**new, name: -new[name]}, size, rank)
        assert held.wrong(new) == [name]
        held.model = in_vllm(new, size, rank)
        assert held.wrong(new) == []


def test_a_head_that_was_not_packed_again_is_named_by_the_embedding():
    old, new = weights(0), weights(1)
    held = Readback(in_vllm(old, 1, 0), tied=True)
    held.choose(new, list(new))
    stale = held.model.lm_head
    held.model = in_vllm(new, 1, 0)
    stale.weight = held.model.lm_head.weight  # shared with the embedding, and new; the packed copy is old
    held.model.lm_head = stale
    assert held.wrong(new) == ["embed.weight"]


def test_one_changed_entry_of_a_packed_matrix_is_read():
    """Half precision and small steps leave most entries as they were; by chance eight columns would miss one of a thousand."""
    for entry in range(0, 1000, 97):
        old = {"o_proj.weight": torch.randn(4, 1000)}
        new = {"o_proj.weight": old["o_proj.weight"].clone()}
        new["o_proj.weight"][2, entry] += 1e-3
        model = nn.Module()
        model.o_proj = RowParallelLinear(old["o_proj.weight"], 1, 0)
        held = Readback(model, tied=False)
        held.choose(new, ["o_proj.weight"])
        assert entry in held.columns["o_proj.weight"] and held.wrong(new) == ["o_proj.weight"]
        model.o_proj.pack(new["o_proj.weight"])
        assert held.wrong(new) == []


def test_what_was_not_sent_and_what_nobody_knows_is_told():
    new = weights(1)
    held = Readback(in_vllm(new, 1, 0), tied=True)
    rest = {name: w for name, w in new.items() if "k_proj" not in name}
    held.choose(rest, list(rest))
    assert "layer.attn.k_proj.weight (not sent)" in held.wrong(rest)
    held.model.layer.mlp.down_proj.weight = nn.Parameter(torch.zeros(3, 4, 5), requires_grad=False)
    assert held.unknown(new) == ["layer.mlp.down_proj.weight"]
    turned = {**new, "layer.mlp.down_proj.weight": new["layer.mlp.down_proj.weight"].T.contiguous()}
    again = Readback(in_vllm(new, 1, 0), tied=True)
    assert again.wrong(turned, ["layer.mlp.down_proj.weight"]) == [] and again.unknown(turned) == ["layer.mlp.down_proj.weight"]
