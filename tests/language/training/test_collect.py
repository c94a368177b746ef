"""Every prompt that a run was given is trained on or dropped for a reason: the ledger balances at every checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_jobs import online_config
from tiny_rewards import some

from psigrad.language.recipes import online
from psigrad.language.training.online import collect


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
        with pytest.raises(RuntimeError, match="does not balance"):
            collect.check_balance({**entries, **wrong}, 8)
    with pytest.raises(RuntimeError, match="12 were drawn"):
        collect.check_balance(entries, 12)


def test_a_run_from_before_there_was_a_ledger_goes_on():
    begun = collect.add_entries(collect.open_ledger({}, 8), {collect.ISSUED: 4, collect.TRAINED: 4})
    collect.check_balance(begun, 12)
    assert begun[collect.EARLIER] == 8 and collect.open_ledger({}, 0) == {}
