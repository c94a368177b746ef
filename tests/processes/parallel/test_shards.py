"""Tensors in shards: what two processes wrote any number reads, and a damaged file is named."""

from __future__ import annotations

import pytest
import ranks
from rank_gradients import make_models
from safetensors.torch import load_file

from psigrad.records import checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(case): (folder of the models, checkpoint of two processes in shards, what was in it)."""
    models, out, done = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("saved"), {}
    make_models(models)

    def of(case: str):
        if case not in done:
            name = out / case.replace(" ", "-")
            ranks.run(2, "rank_runs", "checkpoint", models, case, name, lockstep=True)
            done[case] = (models, name / "step-00000003", load_file(f"{name}-tensors.safetensors"))
        return done[case]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sharded"), [(1, False), (4, True), pytest.param(2, False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "case", ["dapo bfloat16", pytest.param("lora", marks=pytest.mark.long), pytest.param("reward", marks=pytest.mark.long)]
)
def test_what_two_processes_saved_in_shards_any_number_reads_bitwise(saved, tmp_path, case, size, sharded):
    models, place, before = saved(case)
    assert checkpoint.verify(place)["step"] == 3
    ranks.run(size, "rank_runs", "checkpoint", models, case, tmp_path / "again", place, lockstep=sharded)
    after = load_file(tmp_path / "again-tensors.safetensors")
    assert before.keys() == after.keys()
    assert all((before[key] == after[key]).all() for key in before)
    assert any(key.startswith("exp_avg.") and bool(x.any()) for key, x in before.items())


def test_a_damaged_shard_is_named(saved, tmp_path):
    place = saved("dapo bfloat16")[1]
    copy = tmp_path / place.name
    copy.mkdir()
    for file in place.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = sorted(copy.glob("shard-*"))[1]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=shard.name):
        checkpoint.verify(copy)
