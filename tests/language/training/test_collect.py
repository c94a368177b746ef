"""Every prompt that a run was given is trained on or dropped for a reason: the ledger balances at every checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from in_memory import make, trajectory
from tiny_jobs import online_config
from tiny_rewards import some

from psigrad.language.recipes import online
from psigrad.language.training.online import collect
from psigrad.step import Clock


def states(folder):
    return [json.loads(file.read_text()) for file in sorted(folder.glob("checkpoints/*/state.json"))]


@pytest.mark.parametrize("method", ["dapo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "online_dpo"))])
def test_the_ledger_balances_in_every_checkpoint_and_at_the_end(method, job, tmp_path):
    config = online_config(job, tmp_path / "run", method, save_steps=1, save_total_limit=9)
    config = replace(config, reward=(some,), max_unscored=1.0, num_minibatches=1)
    done = online.run(config)
    found = states(done.folder)
    assert len(found) == 6
    for state in found:
        entries = state["ledger"]
        assert entries[collect.ISSUED] == state["cursor"] == sum(n for name, n in entries.items() if name != collect.ISSUED)
    last = json.loads((done.folder / "events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "finished" and last["ledger"] == found[-1]["ledger"]
    assert last["ledger"][collect.UNSCORED] > 0 and last["ledger"][collect.TRAINED] > 0
    assert (collect.NO_SIGNAL in last["ledger"]) == (method == "dapo")


def test_negative_control_a_lost_or_doubled_prompt_is_noticed():
    entries = {collect.ISSUED: 8, collect.TRAINED: 7, collect.UNSCORED: 1}
    collect.check_balance(entries, 8)
    for wrong in ({collect.TRAINED: 6}, {collect.TRAINED: 8}, {collect.ISSUED: 9}):
        with pytest.raises(RuntimeError, match="ledger of prompts is wrong"):
            collect.check_balance({**entries, **wrong}, 8)
    with pytest.raises(RuntimeError, match="12 were drawn"):
        collect.check_balance(entries, 12)


def test_a_run_from_before_there_was_a_ledger_goes_on():
    begun = collect.add_entries(collect.open_ledger({}, 8), {collect.ISSUED: 4, collect.TRAINED: 4})
    collect.check_balance(begun, 12)
    assert begun[collect.EARLIER] == 8 and collect.open_ledger({}, 0) == {}


def equal(completions, **columns):
    return [0.1] * len(completions)


def test_dynamic_sampling_replaces_groups_without_signal_and_gives_up_in_the_end(tokenizer):
    def only_some(completions, prompts, **columns):
        return [float("a" < p[4] < "d" and len(c) % 2) for c, p in zip(completions, prompts, strict=True)]

    run = make(tokenizer, "dapo", function=only_some, num_generations=8, prompts_per_step=2, max_refills=6)
    collected = collect.collect(run, 0, 0, Clock())
    assert len(collected.groups) == 2 and collected.cursor == collected.entries["issued"] > 2
    assert all(len({t.reward for t in g}) > 1 for g in collected.groups)
    assert len({t.completion.seed for t in collected.trajectories}) == 8 * collected.entries["issued"]
    never = make(tokenizer, "dapo", function=equal, max_refills=2)
    assert collect.collect(never, 0, 0, Clock()).groups == []
    assert collect.collect(never, 0, 0, Clock()).entries["issued"] == 3 * 4


@pytest.mark.parametrize("logged", [None, 1.0])
def test_a_group_that_differs_by_the_penalty_on_length_or_by_a_weight_of_0_alone_is_replaced(tokenizer, logged):
    alike = [trajectory(1.0, exact=1.0, soft_overlong=0.0, logged=0.0)]
    alike += [trajectory(0.6, exact=1.0, soft_overlong=-0.4, logged=logged)]
    unlike = [trajectory(1.0, exact=1.0, soft_overlong=0.0), trajectory(0.0, exact=0.0, soft_overlong=0.0)]
    drawn = iter([alike, unlike])
    run = make(tokenizer, "dapo", function=equal, num_generations=2, prompts_per_step=1, max_refills=1)
    run = replace(run, rollout=lambda *given: next(drawn), reward_weights={"logged": 0.0})
    collected = collect.collect(run, 0, 0, Clock())
    assert collected.groups == [unlike] and collected.cursor == 2


def test_prompts_come_in_shuffled_epochs_without_repetition(tokenizer):
    run = make(tokenizer)
    places = [p.index for p in collect.pick_prompts(run.prompts, 3, 0, 24)]
    assert [sorted(places[i : i + 8]) for i in (0, 8, 16)] == [list(range(8))] * 3
    assert places[:8] != places[8:16]
    assert places[5:13] == [p.index for p in collect.pick_prompts(run.prompts, 3, 5, 8)]
