"""Plans of several processes: what one of them does and holds, and how devices are divided."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest

from psigrad import cli
from psigrad.config import Model, OnlineConfig, Placement, Run, Sampling
from psigrad.errors import UserError
from psigrad_extras.preflight import plan
from psigrad_extras.preflight.plan import plan as command
from psigrad_extras.preflight.plan.memory import AMONG_OTHERS
from psigrad_extras.preflight.plan.placements import PUBLISHED, smallest, splits
from psigrad_extras.preflight.plan.predict import _steps

MACHINE = plan.Machine("cpu", 24 << 30, 1e11, 1e10)
LENGTHS = plan.Lengths(prompt=12, completion=40, longest_prompt=12, longest_completion=64)


def settings(folder, **given) -> OnlineConfig:
    usual = {"run": Run(max_steps=5, device="cpu"), "sampling": Sampling(max_completion_length=64)}
    return OnlineConfig(model=Model(path=str(folder)), **{**usual, **given})


def placed(folder, processes: int, strategy: str, cluster: str = "", **given) -> plan.Plan:
    config = settings(folder, algorithm="ppo", prompts_per_step=8, **given)
    return plan.predict(
        replace(config, placement=Placement(processes=processes, strategy=strategy, cluster=cluster)),
        LENGTHS,
        MACHINE,
        quick=True,
    )


def named(found: plan.Plan) -> dict[str, float]:
    return {item.name: item.bytes for item in found.memory.items}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_shards_each_process_holds_its_share_and_replicated_the_whole(folder, ranks):
    one, copied, shards = (named(placed(folder, *of)) for of in ((1, "ddp"), (ranks, "ddp"), (ranks, "fsdp")))
    held = [name for name in one if name.startswith(("policy", "critic", "reference")) and "activations" not in name]
    assert len(held) == 7
    for name in held:
        assert copied[name] == one[name] and shards[name] * ranks == pytest.approx(one[name])
    assert shards["sampling copy"] == one["policy"] and "sampling copy" not in copied
    assert "sampling copy" not in named(placed(folder, ranks, "fsdp", "auto")), "others sample"
    for top_k, copied_too in ((0, False), (5, True)):  # vLLM's weights come out of shards, a filtered draw's log-probs do not
        drawn = Sampling(max_completion_length=64, sampler="vllm", top_k=top_k)
        assert ("sampling copy" in named(placed(folder, ranks, "fsdp", sampling=drawn))) == copied_too
    assert (copied["other processes"], shards["other processes"]) == (AMONG_OTHERS["ddp"], AMONG_OTHERS["fsdp"])


def test_groups_that_hold_the_model_each_have_larger_shards(folder):
    config = settings(folder)
    divided = Placement(processes=8, strategy="fsdp", dp_replicate_size=4)
    groups = plan.predict(replace(config, placement=divided), LENGTHS, MACHINE, quick=True)
    two = plan.predict(replace(config, placement=Placement(processes=2, strategy="fsdp")), LENGTHS, MACHINE, quick=True)
    for name in ("policy", "policy: gradients", "policy: optimizer"):
        assert named(groups)[name] == named(two)[name], name
    assert 4 * groups.share.rows == two.share.rows


def test_copies_that_sample_and_do_not_fit_beside_the_shards_are_refused(folder):
    config = replace(settings(folder), placement=Placement(processes=2, strategy="fsdp"))
    items = plan.predict(config, LENGTHS, MACHINE, quick=True).memory.items
    least = sum(item.bytes for item in items if item.phase == "weights")
    for room, said in ((least, ""), (least - 1, r"a copy of the model \(.* Use sampling\.sampler=vllm")):
        made = plan.predict(config, LENGTHS, replace(MACHINE, memory=room), quick=True)
        with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
            command.refuse_copies(made)
    assert "sampling.sampler=vllm" in [name for name, _ in _steps(made)]


def test_gradients_that_are_reduced_once_are_whole_on_each_process_and_travel_less(folder):
    each, once = (
        splits(replace(settings(folder), placement=Placement(reduce_once=once, strategy="fsdp"), micro_batch_tokens=64),
               LENGTHS, MACHINE, 2, 1e6)
        for once in (False, True)
    )  # fmt: skip
    each, once = (next(s for s in found if s.strategy == "fsdp" and not s.samplers) for found in (each, once))
    assert named(once.plan)["gradients of a step"] == 4 * once.plan.policy.parameters
    assert "gradients of a step" not in named(each.plan) and once.training < each.training


def test_what_shards_refuse_is_no_advice(folder):
    """Moments of 8 bits and a base in codes are for whole models (`optim/optimizer.py`, `loading/load_model.py`)."""

    def ways(strategy: str) -> str:
        config = replace(settings(folder), placement=Placement(processes=2, strategy=strategy))
        return " ".join(name for name, _ in _steps(plan.predict(config, LENGTHS, MACHINE, quick=True)))

    assert "adamw_8bit" in ways("ddp") and "nf4" in ways("ddp")
    assert "adamw_8bit" not in ways("fsdp") and "nf4" not in ways("fsdp") and "lora_rank" in ways("fsdp")


def test_processes_share_the_work_of_a_step(folder):
    one, four = placed(folder, 1, "ddp"), placed(folder, 4, "ddp")
    assert four.work == one.work and (four.share.rows, one.share.rows) == (2, 8)
    assert four.cost.training < one.cost.training / 3 and four.share.keeps == 0 < one.share.keeps
    away = placed(folder, 4, "ddp", "auto")
    assert away.cost.sampling == 0 < four.cost.sampling and "KV cache" not in named(away)
    assert placed(folder, 16, "ddp").share.rows == 1, "a batch smaller than the world"


def test_devices_are_divided_in_every_eighth_and_what_fits_comes_first(folder):
    config = settings(folder, prompts_per_step=64)
    found = splits(config, LENGTHS, MACHINE, 16, 1e9)
    assert {(s.trainers, s.samplers) for s in found} == {(16, 0), *((n, 16 - n) for n in range(2, 16, 2))}
    assert all(s.fits for s in found)
    seconds = [s.seconds(0) for s in found]
    assert seconds == sorted(seconds)
    small = splits(config, LENGTHS, replace(MACHINE, memory=1 << 20), 16, 1e9)
    assert not any(s.fits for s in small) and smallest(config, LENGTHS, replace(MACHINE, memory=1 << 20)) == 0
    assert smallest(config, LENGTHS, MACHINE) == 1


def test_one_device_is_the_plan_itself(folder):
    config = settings(folder)
    (only,) = splits(config, LENGTHS, MACHINE, 1, 1e9)
    same = plan.predict(config, LENGTHS, MACHINE, quick=True)
    assert only.plan.memory == same.memory and only.seconds(0) == pytest.approx(same.seconds)


def test_a_lag_hides_the_shorter_of_sampling_and_training_where_others_sample(folder):
    for split in splits(settings(folder, prompts_per_step=64), LENGTHS, MACHINE, 8, 1e9):
        if split.samplers:
            assert split.seconds(1) == max(split.training, split.sampling + split.publishing) < split.seconds(0)
            assert split.publishing == pytest.approx(4 * split.plan.policy.parameters / PUBLISHED)
        else:
            assert split.seconds(1) == split.seconds(0)


def test_messages_take_time_by_the_speed_of_the_network(folder):
    config = settings(folder, prompts_per_step=64)

    def training(network: float, strategy: str) -> float:
        return next(s.training for s in splits(config, LENGTHS, MACHINE, 4, network) if not s.samplers and s.strategy == strategy)

    parameters = plan.shape_of(str(folder), local=True).parameters
    fast = training(1e30, "ddp")
    assert training(1e9, "ddp") - fast == pytest.approx(2 * 3 / 4 * 4 * parameters / 1e9)
    micro = plan.predict(replace(config, placement=Placement(processes=4)), LENGTHS, MACHINE, quick=True).share.micro_batches
    each = 3 / 4 * (2 * 4 + 4) * parameters / 1e9 / 2
    assert training(1e9, "fsdp") - training(1e30, "fsdp") == pytest.approx(micro * each)


def test_the_command_shows_divisions_and_says_what_it_assumes(folder, capsys):
    arguments = ["plan", "grpo", "--model", str(folder), "--device", "cpu", "--devices", "8", "--prompt-length", "12"]
    assert cli.main([*arguments, "--tflops", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "8 devices of" in out and "Best: placement.processes=" in out and "assumed" in out and "the same" in out
    assert cli.main([*arguments, "--tflops", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 15 and found[0]["fits"] and found[0]["step_seconds"] > 0
    assert cli.main([*arguments, "--memory", "1MB"]) == 0
    out = capsys.readouterr().out
    assert "No division fits" in out and "The trainer does not fit even on 1,024 devices." in out
    assert cli.main(["plan", "sft", "--model", str(folder), "--device", "cpu", "--devices", "4", "--prompt-length", "12"]) == 0
    assert "sampler" in capsys.readouterr().out
