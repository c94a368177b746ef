"""vLLM's sampler without vLLM: the trainer's side against a stand-in of the engine's process, and the reading back of weights
against modules in vLLM's arrangement. What vLLM itself does is tested by `make test-vllm`.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import signal
import weakref
from types import SimpleNamespace

import pytest
import ranks
import torch
from engine_samplers import PARAMS, REQUESTS, a_model, expected, ids, nudge
from engine_stand_in import completion
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from psigrad.config import Sampling
from psigrad.errors import UserError
from psigrad.language.loading import samplers
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.lora import Lora
from psigrad_extras.vllm import vllm_backend, vllm_weights
from psigrad_extras.vllm.vllm_backend import VLLMSampler
from psigrad_extras.vllm.vllm_readback import Readback, scaling_of, wrong_in_adapter


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


@pytest.mark.parametrize(
    ("fault", "reason"), [("dies", r"its process ended \(exit status 9\)"), ("hangs", "the engine did not answer in time")]
)
def test_an_engine_that_is_lost_is_started_again_and_nothing_is_sampled_twice(engine, fault, reason, monkeypatch):
    told = []
    sampler = engine(fault, log=lambda kind, text, **fields: told.append((kind, text)))
    if fault == "hangs":
        monkeypatch.setattr(vllm_backend, "PATIENCE", 5.0)
    places = [place for step in sampler.steps(REQUESTS, PARAMS) for place, _ in step]
    assert sorted(places) == [0, 1, 2] and sampler.losses == 1
    ((kind, text),) = told
    assert kind == "engine_lost" and reason.replace("\\", "") in text
    assert ids(sampler.sample(REQUESTS, PARAMS)) == expected(sampler.model)


def test_one_that_is_lost_while_nobody_asks_is_started_again_with_the_weights_of_then(engine):
    told = []
    sampler = engine(log=lambda kind, text, **fields: told.append((kind, text)))
    keeper = sampler._worker.process.pid  # SIGKILL to it would leave the engine a moment, in which it can answer
    os.kill(keeper, signal.SIGTERM)
    os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)
    nudge(sampler.model)
    assert ids(sampler.sample(REQUESTS, PARAMS)) == expected(sampler.model)
    ((kind, text),) = told
    assert kind == "engine_lost" and text.startswith("vLLM's engine was lost") and sampler.losses == 1


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("mute", r"lost 3 times in a row, the last time because its process ended \(exit status 3\)"),
        ("broken", r"vLLM cannot run this model \(no kernel for it\); sample with sampler=embedded"),
        ("fails", r"vLLM cannot run this model \(out of pages\)"),
        ("misses", r"did not apply update 2 .* the engine's weight \S+weight and \d+ more differs from"),
        ("keeps", r"did not apply update 2 .* the prefix cache kept 130 tokens from old weights"),
    ],
)
def test_what_cannot_go_on_ends_in_a_sentence_and_leaves_no_process(engine, fault, sentence):
    with pytest.raises(UserError, match=sentence):
        sampler = engine(fault)
        nudge(sampler.model)
        sampler.sample(REQUESTS, PARAMS)
    if fault not in ("mute", "broken"):
        with pytest.raises(UserError, match=sentence):  # as whoever is at work in another thread does
            sampler.sample(REQUESTS, PARAMS)
        sampler.close()
        with pytest.raises(UserError, match=sentence):
            sampler.sample(REQUESTS, PARAMS)


@pytest.mark.parametrize("longest", [0, 7, 200])
def test_a_run_of_short_texts_leaves_room_for_the_probes(engine, longest):
    sampler = engine(longest=longest)
    assert sampler._settings["max_model_len"] == {0: sampler.model.max_length, 7: vllm_backend.CACHED + 1, 200: 200}[longest]
    assert ids(sampler.sample(REQUESTS, PARAMS)) == expected(sampler.model)


def test_an_engine_hears_what_it_needs_of_the_environment_and_no_key(engine, monkeypatch, tmp_path):
    passed = {"NCCL_DEBUG": "INFO", "TRITON_CACHE_DIR": "/t", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in (*passed, "VLLM_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, passed.get(name, "secret"))
    engine()
    found = json.loads((tmp_path / "log.environment").read_text())
    assert {name: found.get(name) for name in passed} == passed and "secret" not in found.values()


def test_settings_that_cannot_be_are_refused_at_once(engine):
    with pytest.raises(UserError, match="vllm_sleep frees a GPU's memory, but the model is on cpu"):
        engine(sleep=True)
    for wrong in ({"tensor_parallel_size": 2}, {"vllm_sleep": True}):
        with pytest.raises(UserError, match="are settings of vLLM, but the sampler is embedded"):
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


def read_back(held: Readback, model: nn.Module, *buckets: dict[str, torch.Tensor], transposed=()) -> tuple[list[str], list[str]]:
    """What is found in `model` after the buckets, by columns that were chosen before."""
    again = Readback(model, held.tied, columns=held.columns)
    for bucket in buckets:
        again.compare(bucket, transposed)
    return again.found()


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_every_weight_that_stayed_as_it_was_is_named_whatever_holds_it(size, rank):
    old, new = weights(0), weights(1)
    for name in new:
        left = {**new, name: old[name]}
        held = Readback(in_vllm(old, size, rank), tied=True)
        held.choose(new, list(new))
        assert read_back(held, in_vllm(left, size, rank), new) == ([name], [])
        assert read_back(held, in_vllm({**new, name: -new[name]}, size, rank), new) == ([name], [])
        assert read_back(held, in_vllm(new, size, rank), new) == ([], [])


def test_a_head_that_was_not_packed_again_is_named_by_the_embedding():
    old, new = weights(0), weights(1)
    held = Readback(in_vllm(old, 1, 0), tied=True)
    held.choose(new, list(new))
    stale = held.model.lm_head
    model = in_vllm(new, 1, 0)
    stale.weight = model.lm_head.weight  # shared with the embedding, and new; the packed copy is old
    model.lm_head = stale
    assert read_back(held, model, new) == (["embed.weight"], [])


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
        assert entry in held.columns["o_proj.weight"] and read_back(held, model, new) == (["o_proj.weight"], [])
        model.o_proj.pack(new["o_proj.weight"])
        assert read_back(held, model, new) == ([], [])


def test_what_was_not_sent_and_what_nobody_knows_is_told():
    new = weights(1)
    held = Readback(in_vllm(new, 1, 0), tied=True)
    rest = {name: w for name, w in new.items() if "k_proj" not in name}
    assert "layer.attn.k_proj.weight (not sent)" in read_back(held, held.model, rest)[0]
    last = {"layer.norm.weight": new["layer.norm.weight"]}
    first = {name: w for name, w in new.items() if name not in last}
    assert read_back(held, held.model, first, last) == ([], [])
    assert read_back(held, held.model, first) == (["layer.norm.weight (not sent)"], [])
    held.model.layer.mlp.down_proj.weight = nn.Parameter(torch.zeros(3, 4, 5), requires_grad=False)
    assert read_back(held, held.model, new)[1] == ["layer.mlp.down_proj.weight"]
    turned = {**new, "layer.mlp.down_proj.weight": new["layer.mlp.down_proj.weight"].T.contiguous()}
    model, down = in_vllm(new, 1, 0), ["layer.mlp.down_proj.weight"]
    assert read_back(held, model, turned, transposed=down) == ([], []) and read_back(held, model, turned) == ([], down)


class RoutedExperts(nn.Module):
    """Three experts, 4 wide and 6 inside."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"

    def __init__(self, sent, size, rank):
        super().__init__()
        self.tp_size, self.tp_rank, n = size, rank, 6 // size
        inner = slice(rank * n, (rank + 1) * n)
        one = [{k: sent[f"mlp.experts.{e}.{k}_proj.weight"] for k in ("gate", "up", "down")} for e in range(3)]
        self.w13_weight = nn.Parameter(torch.stack([torch.cat([x["gate"][inner], x["up"][inner]]) for x in one]))
        self.w2_weight = nn.Parameter(torch.stack([x["down"][:, inner] for x in one]))


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_experts_are_read_back_one_by_one(size, rank):
    shapes = {"gate": (6, 4), "up": (6, 4), "down": (4, 6)}
    sent = {f"mlp.experts.{e}.{k}_proj.weight": torch.randn(s) for e in range(3) for k, s in shapes.items()}
    model = nn.Module()
    model.mlp, model.mlp.experts = nn.Module(), nn.Module()
    for name in sent:
        model.mlp.experts.routed_experts = RoutedExperts(sent | {name: -sent[name]}, size, rank)
        assert read_back(Readback(model, tied=False), model, sent) == ([name], [])
    model.mlp.experts.routed_experts = RoutedExperts(sent, size, rank)
    assert read_back(Readback(model, tied=False), model, sent) == ([], [])
    turn = Readback(model, tied=False, pack=lambda layer, matrices: matrices.flip(2))
    turn.compare(sent)
    assert sorted(turn.found()[0]) == sorted(sent), "they are stored in another order, and are not"
    for parameter in model.mlp.experts.routed_experts.parameters():
        parameter.data = parameter.data.flip(2)
    again = Readback(model, tied=False, pack=turn.pack)
    again.compare(sent)
    assert again.found() == ([], [])


def test_weights_leave_under_a_checkpoints_names_in_buckets_of_whole_layers(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 3, "head_dim": 8}
    experts = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **shape, **experts)
    model = prepare(Qwen3MoeForCausalLM(config), tokenizer)
    model.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(vllm_weights.outgoing(model))
    assert sent.keys() == saved.keys() and all(torch.equal(sent[name], saved[name]) for name in saved)
    assert any(".experts.0.gate_proj." in name for name in sent)
    buckets = list(vllm_weights.in_buckets(sent.items(), size=1))
    assert [name for bucket in buckets for name in bucket] == list(sent) and len(buckets) == 5
    layers = [{name.split(".layers.")[1][0] for name in bucket if ".layers." in name} for bucket in buckets]
    assert layers == [set(), {"0"}, {"1"}, {"2"}, set()]
    assert len(list(vllm_weights.in_buckets(sent.items()))) == 1


def test_what_lies_below_an_adapter_is_written_layer_by_layer(tmp_path, monkeypatch):
    """In shards each weight is gathered for it: of all of them few may be whole at once."""
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=6, heads=2), tokenizer, lora=Lora(4))
    made, most, gather = [], [], vllm_weights.sharded.gather

    def whole(of):
        for name, weight in gather(of):
            made.append((weakref.ref(own := weight.clone()), own.numel()))
            most.append(sum(count for held, count in made if held() is not None))
            yield name, own
            del own

    monkeypatch.setattr(vllm_weights.sharded, "gather", whole)
    monkeypatch.setattr(vllm_weights, "BUCKET", 1)
    vllm_weights.write_base(model, tmp_path)
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    written = {name: w for file in files for name, w in file.items()}
    base = {n.replace(".base_layer.", "."): p for n, p in model.network.named_parameters() if ".lora_" not in n}
    assert written.keys() == base.keys() and all(torch.equal(written[name], base[name]) for name in base)
    assert len(files) == 8 and sum(map(len, files)) == len(base), "the embedding, six layers, and what is behind them"
    assert max(most) < 0.5 * sum(map(torch.numel, base.values()))


def test_an_update_is_begun_sent_finished_compared_and_settled(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_weights, "BUCKET", 1)
    names, log = [name for name, _ in a_model().network.named_parameters()], tmp_path / "log"
    passes = {True: ("choose", "load", "compare"), False: ("load",)}
    for readback, wanted in passes.items():
        log.unlink(missing_ok=True)
        sampler = engine(readback=readback)
        said = [line.partition(" ")[::2] for line in log.read_text().splitlines()]
        order = [kind for kind, group in itertools.groupby(kind for kind, _ in said)]
        steps = ["begin", *(("choose",) if readback else ()), "start", "load", "finish", *(("compare",) if readback else ())]
        assert order == [*steps, "settle", "prompt_logprobs"]
        for kind in wanted:
            in_turn = [ast.literal_eval(of) for one, of in said if one == kind]
            assert len(in_turn) == 3 and sorted(itertools.chain(*in_turn)) == sorted(names)
        assert ids(sampler.sample(REQUESTS, PARAMS)) == expected(sampler.model)


def test_weights_that_stay_on_the_gpu_go_by_handles_and_are_gathered_again_to_compare(engine, monkeypatch, tmp_path):
    """A handle's place is taken by a file, which is there while the trainer keeps the buffer."""
    kept, most = [], 0

    def share(buffer):
        nonlocal most
        file = tmp_path / f"{len(kept)}.buffer"
        buffer.numpy().tofile(file)
        kept.append(weakref.finalize(buffer, file.unlink))
        most = max(most, sum(one.alive for one in kept))
        return None, (str(file), buffer.numel())

    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", share)
    named_gpus(monkeypatch, lambda device: "of-the-trainer", [])
    weights = vllm_backend.ModelWeights
    monkeypatch.setattr(vllm_backend, "ModelWeights", lambda model, at: weights(model, [torch.device("cpu")]))
    monkeypatch.setattr(vllm_weights, "BUCKET", 1)
    sampler = engine()
    nudge(sampler.model)
    assert ids(sampler.sample(REQUESTS, PARAMS)) == expected(sampler.model) and sampler.version == 2
    kinds = [line.partition(" ")[0] for line in (tmp_path / "log").read_text().splitlines()]
    update = ["begin", "start", *["load"] * 3, "finish", *["compare"] * 3, "settle"]
    assert kinds == [*update, "prompt_logprobs", *update, *["sample"] * 3]
    assert len(kept) == 12 and most == 1 and not any(one.alive for one in kept), "no second whole model beside the trainer's"


def named_gpus(monkeypatch, name, waited: list[int | None]) -> None:
    """Each device is a GPU with the name that `name` gives it; `waited` gets those that are waited for."""
    stream = lambda device: SimpleNamespace(synchronize=lambda: waited.append(device.index))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{name(device)}"))
    monkeypatch.setattr(torch.cuda, "current_stream", stream)


def test_each_gpu_of_an_engine_gets_a_handle(monkeypatch):
    """Of the whole bucket; vLLM's process on a GPU looks for that of its own. The devices are names of the host's memory."""
    waited = []
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda buffer: (None, id(buffer)))
    named_gpus(monkeypatch, lambda device: device.index, waited)
    told, kept = vllm_weights.as_handle({"a": torch.ones(2, 3)}, [torch.device("cpu", 1), torch.device("cpu", 2)])
    assert told["ipc_handles"] == {"GPU-1": id(kept[0]), "GPU-2": id(kept[1])} and {1, 2} <= {*waited}


@pytest.mark.parametrize(("device", "tensor", "expected"), [("", 1, [1]), ("", 3, [1, 2, 3]), ("cuda:2", 2, [2, 3])])
def test_weights_stay_in_gpu_memory_wherever_the_engine_is_on_this_machine(device, tensor, expected, engine, monkeypatch):
    """Of four GPUs the second trains. Only an engine that does not use it samples beside the training."""
    found = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(LanguageModel, "device", torch.device("cuda", 1))
    monkeypatch.setattr(vllm_backend, "ModelWeights", lambda model, at: found.append(at))
    monkeypatch.setattr(VLLMSampler, "_until", lambda self, work: found.append((self.overlaps, self._devices)))
    sampler = engine(device=device, tensor_parallel_size=tensor)
    assert found[0] == [torch.device("cuda", index) for index in expected]
    assert found[1] == (bool(device), ",".join(map(str, expected))) and sampler.overlaps == bool(device)
    with pytest.raises(UserError, match=r"the engine is on cuda:3; remove vllm_sleep"):
        engine(device="cuda:3", sleep=True)


LORA = Lora(rank=4, alpha=8.0)


@pytest.mark.parametrize(("lora", "level"), [(None, 2), (LORA, 1)])
def test_an_engine_that_is_sent_all_weights_drops_them_while_it_sleeps(lora, level, engine, monkeypatch, tmp_path):
    """They come again before the next use, changed or not. Below an adapter the host keeps them."""
    sampler = engine(lora=lora)
    sampler._sleep = True
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    wanted = adapted(sampler.model) if lora else expected(sampler.model)
    for time in (1, 2):
        assert ids(sampler.sample(REQUESTS, PARAMS)) == wanted
        assert sampler.version == (time if level == 2 else 1)
    rested = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("rest")]
    assert rested == [f"rest ({level},)"] * 2


def adapted(model: LanguageModel) -> list[list[tuple[int, ...]]]:
    """What the stand-in samples with what lies below the adapter, and with the adapter in peft's names."""
    held = {name.replace(".base_layer.", "."): p.detach().numpy() for name, p in model.network.named_parameters()}
    below = {name: p for name, p in held.items() if ".lora_" not in name}
    above = {f"base_model.model.{name.replace('.default', '')}": p for name, p in held.items() if ".lora_" in name}
    both = below | above
    return [[completion(both, r.prompt_ids, seed, PARAMS.max_tokens) for seed in r.seeds] for r in REQUESTS]


def test_an_adapter_goes_alone(engine, tmp_path):
    sampler = engine(lora=LORA)
    for count in (1, 2):
        assert ids(sampler.sample(REQUESTS, PARAMS)) == adapted(sampler.model) and sampler.version == count
        with torch.no_grad():
            for matrix in sampler.model.trainable().values():  # what lies below stays as it was loaded
                matrix.add_(0.1)
    kinds = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    samples = ["sample"] * 3
    assert kinds == ["begin", "adapt", "settle", "prompt_logprobs", *samples, "begin", "adapt", "settle", *samples]


@pytest.mark.parametrize("fault", ["refuses", "without"])
def test_where_vllm_takes_no_adapter_it_gets_whole_weights(engine, fault):
    told = []
    sampler = engine(fault, lora=LORA, log=lambda kind, text, **fields: told.append(kind))
    assert told == ["adapter_merged"] and sampler.losses == 0
    nudge(sampler.model)
    whole = {name: w.numpy() for name, w in vllm_weights.outgoing(sampler.model)}
    assert not any("lora" in name for name in whole)
    found = [[completion(whole, r.prompt_ids, seed, PARAMS.max_tokens) for seed in r.seeds] for r in REQUESTS]
    assert ids(sampler.sample(REQUESTS, PARAMS)) == found


def test_adapters_that_only_whole_weights_can_carry_are_told():
    assert vllm_weights.why_merged(a_model(LORA)) == ""
    told = vllm_weights.adapter_settings(a_model(Lora(rank=9, target_modules=("q_proj", "o_proj"))))
    assert told == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "lora_target_modules": ["o_proj", "q_proj"]}
    assert "DoRA" in vllm_weights.why_merged(a_model(Lora(rank=4, dora=True)))
    assert "fully trained" in vllm_weights.why_merged(a_model(Lora(rank=4, modules_to_save=("lm_head",))))
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    apart = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, tied=False)
    assert "the adapter is on lm_head" in vllm_weights.why_merged(
        prepare(apart, tokenizer, lora=Lora(4, target_modules=("lm_head",)))
    )
    assert vllm_weights.why_merged(a_model()) == "the model has no adapter"


def test_every_matrix_of_an_adapter_is_read_in_the_slot_where_it_is():
    """Rank 2 in slots of rank 4; q and v have adapters, k has none. B is doubled, by alpha 4 over rank 2."""
    sent = {f"base_model.model.l.{n}_proj.lora_{x}.weight": torch.randn(2, 5) for n in "qvo" for x in "A"}
    sent |= {f"base_model.model.l.{n}_proj.lora_B.weight": torch.randn(6, 2) for n in "qvo"}
    scaling = scaling_of({"lora_alpha": 4, "r": 2})
    assert scaling == 2.0 and scaling_of({"lora_alpha": 4, "r": 4, "use_rslora": True}) == 2.0

    def held(names: str) -> SimpleNamespace:
        a, b = (tuple(torch.zeros(3, 1, *shape) for _ in names) for shape in ((4, 5), (6, 4)))
        for place, name in enumerate(names):
            if name != "k":
                a[place][1, 0, :2] = sent[f"base_model.model.l.{name}_proj.lora_A.weight"]
                b[place][1, 0, :, :2] = 2 * sent[f"base_model.model.l.{name}_proj.lora_B.weight"]
        return SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b)

    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def layers() -> dict[str, SimpleNamespace]:
        return {"l.qkv_proj": held("qkv"), "l.o_proj": held("o"), "lm_head": SimpleNamespace(lora_a_stacked=torch.zeros(1))}

    assert wrong_in_adapter(layers(), 1, sent, scaling, fused) == []
    whole = ["l.q_proj.lora_A.weight", "l.q_proj.lora_B.weight", "l.v_proj.lora_A.weight", "l.v_proj.lora_B.weight"]
    o = ["l.o_proj.lora_A.weight", "l.o_proj.lora_B.weight"]
    assert wrong_in_adapter(layers(), 0, sent, scaling, fused) == [*whole, *o], "another slot"
    assert wrong_in_adapter(layers(), 1, sent, 1.0, fused) == [n for n in (*whole, *o) if "_B" in n], "B without its factor"
    one = layers()
    one["l.qkv_proj"].lora_a_stacked[2][1, 0, 1, 3] += 1e-3
    one["l.qkv_proj"].lora_b_stacked[1][1, 0, 5, 3] = 1e-3
    assert wrong_in_adapter(one, 1, sent, scaling, fused) == ["l.k_proj.lora_B.weight", "l.v_proj.lora_A.weight"]
    missing = {name: layer for name, layer in layers().items() if name != "l.o_proj"}
    assert wrong_in_adapter(missing, 1, sent, scaling, fused) == [f"{name} (not loaded)" for name in o]


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["whole", "adapter"])
def test_weights_go_to_each_engine_out_of_shards_and_only_rank_0_loads_a_copy_to_compare(tmp_path, rank):
    a_model().save(tmp_path / "model")
    ranks.run(2, "vllm_shards", "samples", tmp_path / "model", rank, tmp_path / "said.json", lockstep=True)
    assert json.loads((tmp_path / "said.json").read_text()) == [[[True, True], [0]], [[True, True], []]]
