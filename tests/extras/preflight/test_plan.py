"""A plan's counts against the things themselves: parameters, what autograd keeps, the optimiser, the cache, the micro-batches."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hub_stand_in import cut_off
from kept_bytes import running
from kernel_choices import without_adamw_kernels
from speed import measured_once  # noqa: F401 (a fixture)
from transformers import AutoConfig, AutoModelForSequenceClassification

from psigrad import cli
from psigrad.config import Data, Model, OnlineConfig, Optim, PreferenceConfig, RewardConfig, Run, Sampling, SFTConfig
from psigrad.errors import UserError
from psigrad.language.models import language_model, logprobs, tiny
from psigrad.language.models.fused.caches import CachedPrompt
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers import embedded
from psigrad.language.rollout.types import Completion, Request, SamplingParams, Trajectory
from psigrad.language.training.online.batching import inputs_of, micro_batches, to_batch
from psigrad.optim import Optimizer
from psigrad_extras.preflight import plan
from psigrad_extras.preflight.plan import memory
from psigrad_extras.preflight.plan import plan as command
from psigrad_extras.preflight.plan.activations import Terms, terms
from psigrad_extras.preflight.plan.arithmetic import work_of
from psigrad_extras.preflight.plan.memory import REFILLED, SLACK, ModelRole, cache_bytes, recomputed_gradients
from psigrad_extras.preflight.plan.shape import count_shape

pytestmark = pytest.mark.usefixtures("measured_once")
ARCHITECTURES = ("qwen3", "llama", "gpt2", "gpt_neox")
MACHINE = plan.Machine("cpu", 24 << 30, 1e11, 1e10)
LENGTHS = plan.Lengths(prompt=12, completion=40, longest_prompt=12, longest_completion=64)


def prepared(hf, lora=None, end=0) -> language_model.LanguageModel:
    """A model with a tokenizer of which only its end of a text is known."""
    return language_model.prepare(hf, SimpleNamespace(bos_token_id=None, eos_token_id=end), lora)


def settings(folder, **given) -> OnlineConfig:
    return OnlineConfig(model=Model(path=str(folder)), run=Run(max_steps=5, device="cpu"), **given)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_counted_without_weights(architecture, tied):
    model = tiny.model(architecture, 100, hidden=64, tied=tied)
    shape = count_shape(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    model.config.num_labels = 1
    scalar = AutoModelForSequenceClassification.from_config(model.config)
    assert shape.scalar_parameters == sum(p.numel() for p in scalar.parameters())
    small = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert shape.matrices + shape.embeddings + (0 if tied else shape.head) + small == shape.parameters


@pytest.mark.parametrize(
    "targets", [("all-linear",), ("q_proj", "down_proj"), ("layers.0.mlp.up_proj",), (r".*\.1\..*[qv]_proj",)]
)
def test_an_adapters_parameters_are_counted(targets):
    hf = tiny.model("qwen3", 100)
    expected = count_shape(hf.config).lora_parameters(4, targets)
    model = prepared(hf, Lora(4, target_modules=targets))
    assert sum(p.numel() for p in model.trainable().values()) == expected


def test_recomputing_layers_keeps_their_inputs_and_one_layer():
    kept = Terms(token=100.0, prefix=0.0, once=0.0, input=10.0)
    assert kept.bytes_for(8, 5, 0) == 8 * 500
    assert kept.bytes_for(8, 5, 0, recompute=True) == 8 * 50 + 500


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("native", [True, False], ids=["stepped by the kernels", "by PyTorch"])
@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), ("bfloat16", 0), ("float32", 4), ("bfloat16", 4)])
def test_weights_gradients_and_optimizer_are_the_bytes_that_they_take(dtype, rank, native, monkeypatch):
    if not native:
        without_adamw_kernels(monkeypatch)
    hf = tiny.model("llama", 100).to(getattr(torch, dtype))
    shape = count_shape(hf.config)
    lora = Lora(rank) if rank else None
    model = prepared(hf, lora)
    optimizer = Optimizer(model.trainable(), Optim())
    optimizer.step([lambda: model.evaluate(Groups([[1, 2]], [[[3, 4]]])).logp.sum()], 1e-3)
    weights = sum(p.numel() * p.element_size() for p in hf.parameters())
    moments = sum(t.numel() * t.element_size() for w in optimizer.weights.values() for n, t in w.state.items() if n != "step")
    masters = sum(m.numel() * 4 for n, m in optimizer.masters.items() if m is not optimizer.parameters[n])
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in optimizer.parameters.values())
    copies = [m.grad for n, m in optimizer.masters.items() if m is not optimizer.parameters[n] and m.grad is not None]
    gradients += sum(copy.numel() * 4 for copy in copies)
    width = hf.dtype.itemsize
    adapter = shape.lora_parameters(rank, ("all-linear",)) if rank else 0
    assert bool(copies) == (dtype == "bfloat16" and not rank and not native)
    part = ModelRole("policy", shape.parameters, 0 if rank else shape.parameters, width, adapter, copied=not native)
    found = [item.bytes for item in part.items()]
    assert found == [weights, gradients, moments + masters]


@pytest.mark.parametrize("prompts", [2, 60], ids=["few tokens", "more than a gradient holds"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_gradients_that_are_recomputed_are_those_that_the_optimiser_does_not_store(architecture, tied, prompts, monkeypatch):
    for module in (logprobs, memory):
        monkeypatch.setattr(module, "TILE_ELEMENTS", 1000)
    hf = tiny.model(architecture, 400, hidden=32, tied=tied)
    model = prepared(hf)
    optimizer = Optimizer(model.trainable(), Optim(), recompute=True)
    groups = running(400, prompts, 2, 4, 8)
    stored = []
    monkeypatch.setattr(
        optimizer, "apply", lambda norm, lr: stored.append(sum(p.grad.numel() for p in hf.parameters() if p.grad is not None))
    )
    optimizer.step([lambda: model.evaluate(groups).logp.sum()], 1e-3)
    shape = count_shape(hf.config)
    config = OnlineConfig(prompts_per_step=prompts, num_generations=2, run=Run(max_steps=1))
    work = work_of(config, plan.Lengths(4, 8, 4, 8))
    assert stored == [shape.parameters - sum(recomputed_gradients(work, shape, model.decoder is not None, head=True))]


@pytest.mark.needs("compiler")
def test_a_plan_that_recomputes_has_no_gradient_of_a_large_head_and_gives_memory_back(folder, monkeypatch):
    monkeypatch.setattr(memory, "TILE_ELEMENTS", 1000)
    monkeypatch.setattr(memory, "HELD", 100.0)
    config = settings(folder)
    again = replace(config, model=replace(config.model, gradient_checkpointing=True))
    plain, recomputed = (plan.predict(c, LENGTHS, MACHINE) for c in (config, again))
    difference = named(plain)["policy: gradients"] - named(recomputed)["policy: gradients"]
    assert difference == 4 * plain.policy.head and recomputed.memory.slack == 0 < plain.memory.slack
    assert "kept from sampling" in named(plain) and "kept from sampling" not in named(recomputed)
    more = recomputed.cost.training - plain.cost.training
    assert more > 4 * 2 * plain.policy.head * config.prompts_per_step * config.num_generations * LENGTHS.completion


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_the_cache_is_as_large_as_the_samplers(architecture, monkeypatch):
    hf = tiny.model(architecture, 100, max_length=512)
    model = prepared(hf, end=99)
    model.network.get_output_embeddings().weight.data[99] = 0.0
    largest = [0]
    remove = embedded._Batch.decode

    def watched(batch):
        remove(batch)
        largest[0] = max(largest[0], held(batch.cache))

    monkeypatch.setattr(embedded._Batch, "decode", watched)
    requests = [Request((1, 2, 3) * 20, tuple(range(4))) for _ in range(2)]
    embedded.EmbeddedSampler(model).sample(requests, SamplingParams(100, top_k=5))
    work = work_of(replace(settings("x"), prompts_per_step=2, num_generations=4), plan.Lengths(60, 100, 60, 100))
    predicted = cache_bytes(work, count_shape(hf.config), terms(hf.config, "float32"), 4)
    assert predicted == pytest.approx(largest[0], rel=0.02)


def held(thing, seen=None) -> int:
    """Bytes of the tensors with a head's width that hang on a cache, each once."""
    seen = set() if seen is None else seen
    if isinstance(thing, torch.Tensor):
        new = thing.is_floating_point() and thing.untyped_storage().data_ptr() not in seen
        seen.add(thing.untyped_storage().data_ptr())
        return thing.untyped_storage().nbytes() if new else 0
    if isinstance(thing, dict):
        return sum(held(part, seen) for part in thing.values())
    if isinstance(thing, list | tuple):
        return sum(held(part, seen) for part in thing)
    cache = isinstance(thing, CachedPrompt) or type(thing).__module__.startswith("psigrad.language.rollout")
    return held(vars(thing), seen) if cache else 0


@pytest.mark.parametrize(("prompt", "length", "budget"), [(12, 40, 4096), (12, 40, 300), (300, 20, 500), (12, 40, 100)])
def test_micro_batches_are_as_many_as_the_trainer_makes(folder, prompt, length, budget):
    config = settings(folder, prompts_per_step=8, num_generations=4, micro_batch_tokens=budget)
    work = work_of(config, plan.Lengths(prompt, length, prompt, length))
    completion = Completion((1,) * length, (0.0,) * length, (0.0,) * length, "length", 0)
    groups = [[Trajectory(g, k, (1,) * prompt, completion, 0) for k in range(4)] for g in range(8)]
    batch = to_batch(groups)
    micros = micro_batches(batch, torch.ones(32, dtype=torch.bool), budget)
    inputs = [inputs_of(batch, micro) for micro in micros]
    largest = max(sum(map(len, one.prompts)) + sum(len(c) for cs in one.completions for c in cs) for one in inputs)
    assert largest <= work.micro_tokens
    # whole groups and completions leave a pass fuller or emptier than the mean
    assert work.micro_batches <= len(micros) <= 2 * work.micro_batches + 1


def test_the_count_by_weights_of_an_8b_model_is_128_gb_with_a_critic_and_80_without():
    with_critic, without = (plan.by_weights(8e9, critic=critic) for critic in (True, False))
    assert sum(with_critic.values()) == 128e9
    assert sum(without.values()) == 80e9
    assert with_critic == {"policy": 48e9, "reference": 16e9, "critic": 48e9, "reward model": 16e9}


def named(made: plan.Plan) -> dict[str, float]:
    return {item.name: item.bytes for item in made.memory.items}


def test_a_plan_has_the_models_that_the_method_has(folder):
    grpo = plan.predict(settings(folder, algorithm={"preset": "grpo", "kl": None}), LENGTHS, MACHINE, quick=True)
    ppo = plan.predict(settings(folder, algorithm="ppo", reward_model=(str(folder),)), LENGTHS, MACHINE, quick=True)
    adapted = plan.predict(replace(ppo.config, model=replace(ppo.config.model, lora_rank=4)), LENGTHS, MACHINE, quick=True)
    shared = plan.predict(replace(ppo.config, critic_shared=True), LENGTHS, MACHINE, quick=True)
    assert not {"reference", "critic"} & set(named(grpo))
    assert {"reference", "critic", "critic: optimizer", f"reward model {folder.name}"} <= set(named(ppo))
    assert "reference" not in named(adapted) and "critic" in named(adapted)
    assert "critic" not in named(shared)
    assert ppo.memory.peak > shared.memory.peak > grpo.memory.peak


@pytest.mark.needs("compiler")
def test_what_is_kept_from_sampling_takes_the_place_of_activations(folder):
    def planned(lengths, **given) -> plan.Plan:
        return plan.predict(settings(folder, prompts_per_step=2, num_generations=2, **given), lengths, MACHINE)

    whole, ragged = replace(LENGTHS, longest_completion=40), replace(LENGTHS, longest_completion=400)
    for lengths, one_layer_is_more in ((whole, True), (ragged, False)):
        kept, without = planned(lengths), planned(lengths, keep_activations_gb=0.0)
        held, all_again = named(kept)["kept from sampling"], named(without)["activations"]
        # a pass that computes all again has let go what was kept
        assert named(kept)["activations"] == pytest.approx(all_again / 2 if one_layer_is_more else all_again - held)
        assert (all_again / 2 > all_again - held) == one_layer_is_more
        assert kept.memory_per_token == without.memory_per_token > all_again / kept.work.micro_tokens
        passing = [item.bytes for item in kept.memory.items if item.phase in ("train", "sample") and item.name != "head"]
        assert kept.memory.slack == pytest.approx(kept.memory.beside_head + SLACK["cpu"] * (sum(passing) + held))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("quick", [False, True])
def test_a_forward_pass_is_left_out_only_where_all_that_sampling_computed_is_kept(folder, tmp_path, quick):
    def training(limit: float, model=folder) -> float:
        config = settings(model, algorithm={"preset": "grpo", "kl": None}, keep_activations_gb=limit)
        return plan.predict(config, LENGTHS, MACHINE, quick=quick).cost.training

    made = plan.predict(settings(folder), LENGTHS, MACHINE, quick=quick)
    shape, work = made.policy, made.work
    again = 2 * shape.active * work.tokens + 2 * shape.head * work.rows * work.members * work.lengths.completion
    assert training(1.0) + again < training(0.0) < training(1.0) + 1.2 * again  # attention's scores besides
    assert training(1e-3) == training(0.0), "too little for all of it"
    # nothing is kept where layers run in transformers' modules
    tiny.model("gpt2", 100, hidden=64, max_length=512).config.save_pretrained(tmp_path)
    assert training(1.0, tmp_path) == training(0.0, tmp_path) > 0


@pytest.mark.needs("compiler")
def test_a_critic_that_is_larger_than_the_policy_sets_the_peak(folder, tmp_path):
    tiny.model("qwen3", 269, hidden=256, layers=6, max_length=512).config.save_pretrained(tmp_path)
    like, large = (plan.predict(settings(folder, algorithm="ppo", critic=c), LENGTHS, MACHINE) for c in ("", str(tmp_path)))
    alone = plan.predict(settings(tmp_path, keep_activations_gb=0.0), LENGTHS, MACHINE)
    policy = plan.predict(settings(folder, algorithm="grpo"), LENGTHS, MACHINE)

    def learning(made: plan.Plan) -> float:
        return sum(named(made).get(name, 0.0) for name in ("activations", "backward pass", "critic's activations"))

    assert learning(policy) < learning(like) < learning(large)
    assert learning(large) + REFILLED * named(large)["kept from sampling"] == pytest.approx(learning(alone))


def test_a_named_reference_stays_in_memory_and_recorded_log_probs_need_none(folder):
    config = PreferenceConfig(model=Model(path=str(folder)), run=Run(max_steps=1))
    assert "reference" not in named(plan.predict(config, LENGTHS, MACHINE, quick=True))
    assert "reference" in named(plan.predict(replace(config, reference=str(folder)), LENGTHS, MACHINE, quick=True))


def test_more_tokens_more_memory_and_ways_that_take_less(folder):
    config = settings(folder, micro_batch_tokens=16384, prompts_per_step=256, keep_activations_gb=1.0)
    tight = plan.predict(config, LENGTHS, replace(MACHINE, memory=470 << 20))
    assert not tight.fits
    assert tight.memory.peak > plan.predict(replace(config, micro_batch_tokens=1024), LENGTHS, MACHINE).memory.peak
    assert all(other.memory.peak < tight.memory.peak for _, other in tight.ways)
    names = [name for name, _ in tight.ways]
    assert names[0] == "micro_batch_tokens=4096" and "model.gradient_checkpointing=true" in names
    text = command.table(tight)
    assert "it does not fit" in text and "What takes less:" in text


def test_eight_bit_moments_take_a_quarter(folder):
    made = [
        plan.predict(replace(settings(folder), optim=Optim(optimizer=name)), LENGTHS, MACHINE, quick=True)
        for name in ("adamw", "adamw_8bit")
    ]
    full, small = (named(one)["policy: optimizer"] for one in made)
    embedding = made[0].policy.vocabulary * made[0].policy.hidden  # whose moments stay in float32
    assert small == pytest.approx(full * 2.03125 / 8 + embedding * (8 - 2.03125))


@pytest.mark.parametrize(
    ("optim", "budget", "each"), [(Optim(), 1 << 16, 2 + 10), (Optim(), 64, 4 + 10), (Optim(optimizer="muon"), 64, 4 + 12)]
)
def test_full_training_on_a_gpu_has_16_bytes_a_parameter(optim, budget, each, folder):
    """Beside a weight of 2 bytes: the gradient of one pass or of several, two moments, and all of the master or its rest."""
    model, gpu = Model(path=str(folder), dtype="bfloat16"), plan.Machine("cuda", 80 << 30)
    config = OnlineConfig(model=model, run=Run(device="cuda"), optim=optim, micro_batch_tokens=budget)
    made = plan.predict(config, LENGTHS, gpu, quick=True)
    assert sum(named(made)[f"policy: {name}"] for name in ("gradients", "optimizer")) == each * made.policy.parameters


@pytest.mark.parametrize("memory", [3 << 30, 24 << 30], ids=["little memory", "memory to pack the layers"])
def test_a_base_in_codes_is_not_mapped_and_packed_only_where_memory_allows(folder, memory):
    config = replace(settings(folder), model=replace(settings(folder).model, dtype="bfloat16", lora_rank=4))
    whole, coded = (
        plan.predict(
            replace(config, model=replace(config.model, quantize_base=kind)), LENGTHS, replace(MACHINE, memory=memory), quick=True
        )
        for kind in ("", "nf4")
    )
    layers = whole.policy.layer_matrices
    assert 0 < layers < whole.policy.parameters
    held = [named(one)["policy"] for one in (whole, coded)]
    assert held[0] - held[1] == pytest.approx(layers * (2 - 4.5 / 8))
    assert "weights file" not in named(coded)
    if memory == MACHINE.memory:
        assert named(coded).get("packed weights") == named(whole).get("packed weights")
    else:
        assert "packed weights" not in named(coded)
        assert ("packed head" in named(coded)) == ("packed weights" in named(whole))
        assert named(coded).get("packed head", 2 * whole.policy.head) == 2 * whole.policy.head
    assert named(coded)["unpacked layer"] == 2 * layers / whole.policy.layers


# 16 sequences by 8, of 10 tokens at most
@pytest.mark.parametrize("memory, limit, rounds", [(3 << 30, "", 2 * 10), (24 << 30, "8GB", 2 * 10), (24 << 30, "", 1)])
def test_codes_are_unpacked_in_each_round_of_decoding_or_once_before_it_and_twice_in_training(folder, memory, limit, rounds):
    machine = replace(MACHINE, memory=memory)
    config = settings(folder, prompts_per_step=4, num_generations=4)
    config = replace(config, sampling=replace(config.sampling, max_decode_batch=8), run=replace(config.run, max_memory=limit))
    config = replace(config, model=replace(config.model, dtype="bfloat16", lora_rank=4))
    lengths = plan.Lengths(8, 8, 8, 10)
    whole, coded = (
        plan.predict(replace(config, model=replace(config.model, quantize_base=kind)), lengths, machine, quick=True)
        for kind in ("", "int8")
    )
    flops = 18 * whole.policy.layer_matrices * (rounds + 2)
    assert coded.cost.seconds(machine) - whole.cost.seconds(machine) == pytest.approx(flops / MACHINE.peak)


def test_flops_are_six_per_weight_and_token_of_a_pass(folder):
    config = SFTConfig(model=Model(path=str(folder)), batch_size=4, run=Run(max_steps=1))
    made = plan.predict(config, plan.Lengths(1, 1, 1, 1), MACHINE, quick=True)
    shape = made.policy
    scores = 4 * shape.layers * shape.query * (0.5 * 4 + 4 * 1.5)
    assert made.cost.training == 3 * (2 * shape.matrices * 8 + scores) + 2 * shape.head * 4 * 4


@pytest.mark.parametrize(
    ("text", "value"), [("24GB", 24e9), ("24 GiB", 24 * 2**30), ("512m", 512e6), ("1.5TB", 1.5e12), ("1000000", 1e6)]
)
def test_sizes_are_read(text, value):
    assert plan.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["lots", "GB", "-3GB", "0", "1.2.3GB", "nan"])
def test_no_sizes_are_refused(text):
    with pytest.raises(UserError, match="write it as 24GB"):
        plan.parse_bytes(text)


def test_a_gpu_that_is_not_here_needs_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--memory 80GB"):
        plan.machine("cuda", "bfloat16")
    made = plan.machine("cuda", "bfloat16", memory="80GB", tflops=400)
    assert (made.memory, made.peak) == (80e9, 4e14)


def test_the_warning_speaks_only_where_a_run_may_not_fit(folder, monkeypatch):
    from psigrad_extras.preflight.plan import hardware

    assert command.warning(settings(folder)) == ""
    monkeypatch.setattr(hardware, "installed_memory", lambda: 420 << 20)
    assert "may need" in command.warning(settings(folder))
    asked: list = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("psigrad.language.loading.model_source.go_offline_without_network", lambda: None)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", lambda *given, **named: asked.append(given))
    assert command.warning(settings("nowhere/at-all")) == "" and not asked, "nothing is asked of the hub"
    assert command.warning(settings("")) == ""
    assert command.warning(settings(folder, algorithm="nonsense")) == ""


def test_the_warning_names_what_to_change_also_where_all_is_needed():
    def said(*fits: bool) -> str:
        ways = [(name, SimpleNamespace(fits=fit)) for name, fit in zip(("a=1", "b=2", "all of these"), fits, strict=True)]
        return command._sentence(
            SimpleNamespace(ways=ways, memory=SimpleNamespace(peak=3e9), machine=replace(MACHINE, memory=2e9))
        )

    assert said(False, True, True).endswith("but only 2 GB exist; try b=2.")
    assert said(False, False, True).endswith("; try all of a=1, b=2.")
    assert said(False, False, False).endswith("; `psigrad plan` lists what needs memory.")


def test_a_model_whose_own_code_fails_is_no_reason_to_stop_a_run_and_a_bug_of_the_planner_shows(folder, monkeypatch):
    from psigrad_extras.preflight.plan import shape

    def fails(*given, **named):
        raise TypeError("unsupported operand")

    shape.shape_of.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(shape, "model_of", fails)
        assert command.warning(settings(folder)) == ""
    monkeypatch.setattr(command, "predict", fails)
    with pytest.raises(TypeError):
        command.warning(settings(folder))


def test_without_a_network_a_hub_name_is_refused_at_once(tmp_path, monkeypatch, capsys):
    cut_off(monkeypatch)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("the hub was asked again"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one"}\n')
    assert cli.main(["plan", "grpo", "--model", "nobody/no-such-model", "--dataset", str(tmp_path / "rows.jsonl")]) == 2
    assert "The tokenizer of 'nobody/no-such-model' cannot be read" in capsys.readouterr().err


def test_the_command_prints_a_table_or_json_and_measures_the_dataset(folder, tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "one"}\n{"prompt": "one two three one two three"}\n')
    arguments = ["plan", "ppo", "--model", str(folder), "--dataset", str(data), "--eval-prompts", "0", "--device", "cpu"]
    assert cli.main([*arguments, "--tflops", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"]["updates_per_step"] == 4 and found["batch"]["steps"] == 1
    names = [item["name"] for item in found["memory"]["items"]]
    assert "critic: gradients" in names
    held = sum(item["bytes"] for item in found["memory"]["items"] if item["phase"] in ("weights", "held"))
    assert found["memory"]["peak"] > held + found["memory"]["process"]
    assert found["batch"]["prompt_tokens"] == 4
    assert cli.main([*arguments, "--memory", "600MB"]) == 0
    out = capsys.readouterr().out
    assert "the first 2 rows" in out and "peak" in out and "600 MB" in out


@pytest.mark.parametrize("method", ["sft", "reward", "dpo", "kto", "online_dpo", "dapo"])
def test_every_kind_of_method_has_a_plan(method, folder, capsys):
    assert cli.main(["plan", method, "--model", str(folder), "--prompt-length", "20", "--tflops", "0.1", "--device", "cpu"]) == 0
    assert "peak" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "plan got no method"),
        (["grop"], "did you mean 'grpo'"),
        (["grpo"], "No model was given"),
        (["grpo", "--model", "{folder}", "--memory", "lots"], "'lots' is not a size"),
        (["grpo", "--model", "{folder}", "--promt-length", "3"], "There is no flag --promt-length"),
        (["sft", "--model", "{folder}", "--prompt-length", "-1"], "prompt_length is -1"),
        (["sft", "--model", "{nowhere}"], "No model configuration could be read"),
    ],
)
def test_mistakes_get_a_sentence(arguments, sentence, folder, tmp_path, capsys):
    given = [text.format(folder=folder, nowhere=tmp_path) for text in arguments]
    assert cli.main(["plan", *given]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


def test_rows_of_every_form_are_measured(folder, tmp_path):
    pair = tmp_path / "pairs.jsonl"
    pair.write_text('{"prompt": "one", "chosen": " two", "rejected": " three three"}\n' * 4)
    config = RewardConfig(model=Model(path=str(folder)), data=Data(dataset=str(pair)))
    config = replace(config, evaluation=replace(config.evaluation, eval_prompts=0))
    lengths, rows, source = plan.lengths_of(config)
    assert rows == 4 and source == "the first 4 rows"
    assert lengths.longest_completion > lengths.completion > 0


def test_the_settings_longest_completion_bounds_the_mean():
    config = OnlineConfig(sampling=Sampling(max_completion_length=50))
    lengths, _, source = plan.lengths_of(config, completion=80)
    assert (lengths.completion, lengths.longest_completion) == (50, 50) and "guess" in source


def test_the_tiny_configurations_are_read_back(folder):
    assert plan.shape_of(str(folder)) == count_shape(AutoConfig.from_pretrained(folder))
