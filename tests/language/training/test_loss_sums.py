"""The figures of a step are read once, at its end: a GPU would run dry if each micro-batch waited for a number."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from in_memory import make
from tiny_jobs import online_config, preference_config, sft_config
from torch.utils._python_dispatch import TorchDispatchMode

from psigrad.config import Optim
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.recipes import online, preference, sft
from psigrad.language.recipes.changes import change_settings
from psigrad.language.training.loss_sums import LossSums
from psigrad.objective import Loss
from psigrad.optim import optimizer as loop
from psigrad.records import checkpoint


class Reads(TorchDispatchMode):
    """How often a number is read off a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def losses() -> list[Loss]:
    weight = torch.tensor(0.1, requires_grad=True)
    return [Loss(weight * k, {"entropy": (weight * k * k).detach(), "clipped": torch.tensor(0.3)}) for k in (1, 2, 3)]


def expected(name: str, losses: list[Loss]) -> float:
    total = 0.0
    for one in losses:
        total += float(one.value.detach() if name == "loss" else one.terms[name])
    return total


def test_online_terms_are_read_at_once_at_the_end_of_a_step_and_add_up_to_the_same_bits(monkeypatch):
    tally, made, lists, read = LossSums(), losses(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(len(x)) or read(x))
    with Reads() as reads:
        for one in made:
            tally.add(one)
        assert reads.count == 0 and not lists
        tally.end_step(None)
    assert reads.count == 0 and lists == [3]
    assert tally.last == {name: expected(name, made) for name in ("loss", "entropy", "clipped")}
    assert tally.last["entropy"] == pytest.approx(1.4)


def test_a_share_of_weight_0_counts_nowhere():
    sums, made = LossSums(), losses()
    with torch.no_grad():
        for one in made:
            assert float(sums.of(lambda one=one: one).detach()) == float(one.value.detach())
        assert float(sums.of(lambda: made[0], 0.0).detach()) == 0.0
    assert not sums.last
    sums.end_step(None)
    assert sums.last == {name: expected(name, made) for name in ("loss", "entropy", "clipped")}


RECIPES = {"sft": (sft_config, sft), "grpo": (online_config, online), "dpo": (preference_config, preference)}


def plant(monkeypatch, times: int, at: int = 1) -> list[int]:
    """The pass number `at` of a step runs out of memory so many times; the passes that were begun by then.

    Its activations are freed before the next pass, also if Python does not look for cycles of references meanwhile.
    """
    whole, left, begun, kept = loop.add_up, [times], [], []

    def run_out(loss):
        made = loss()
        kept.append(weakref.ref(made))
        gc.disable()
        raise torch.OutOfMemoryError("CUDA out of memory")

    def failing(optimizers, losses):
        def each():
            for number, loss in enumerate(losses):
                begun.append(number)
                gc.enable()
                assert not any(made() is not None for made in kept)
                if number == at and left[0]:
                    left[0] -= 1
                    yield partial(run_out, loss)
                yield loss

        whole(optimizers, each())

    monkeypatch.setattr(loop, "add_up", failing)
    return begun


def settings(make, job, folder, tokens):
    made = replace(make(job, folder, max_steps=3, save_steps=1), micro_batch_tokens=tokens)
    return replace(made, batch_size=8) if hasattr(made, "batch_size") else made


@pytest.mark.parametrize("recipe", ["sft", "grpo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_step_that_ran_out_of_memory_is_that_of_half_the_micro_batches(recipe, job, tmp_path, monkeypatch):
    make, module = RECIPES[recipe]
    module.run(settings(make, job, tmp_path / "half", 16))
    module.run(settings(make, job, tmp_path / "whole", 32))
    begun = plant(monkeypatch, 1)
    module.run(settings(make, job, tmp_path / "run", 32))
    assert begun[:2] == [0, 1]  # the gradient of a pass was there already
    rows = {name: (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "half", "whole")}
    rows = {name: [row for row in own if '"step": 0' not in row] for name, own in rows.items()}
    assert rows["run"] == rows["half"] != rows["whole"]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "half")]
    assert weights[0] == weights[1]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert sum("repeated with micro_batch_tokens=16" in json.dumps(event) for event in events) == 1
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints").path
    assert any('"micro_batch_tokens": 16' in file.read_text() for file in saved.glob("*.json"))


def test_only_a_pass_before_any_change_is_repeated_and_not_without_end(job, tmp_path, monkeypatch):
    plant(monkeypatch, 99, at=0)
    with pytest.raises(UserError, match=r"Step 1 ran out of memory; no step is saved\."):
        sft.run(settings(sft_config, job, tmp_path / "run", 32))


def test_a_resumed_run_keeps_the_smaller_of_both_sizes():
    run = make(tiny.tokenizer(["say a: b"], 270))
    for given, expected in ((80, 40), (20, 20)):
        changed = change_settings(replace(run, config=replace(run.config, micro_batch_tokens=given)), {"micro_batch_tokens": 40})
        assert changed.config.micro_batch_tokens == expected


def test_all_processes_hear_of_the_one_whose_pass_ran_out_of_memory():
    """This one did not fail, and of two the flags add up to 1."""

    class Two:
        size, rank, lockstep = 2, 0, False
        failures = 0

        def all_reduce(self, x):
            x[-1] += self.failures
            return x

    for Two.failures in (0, 1):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = loop.Optimizer({"w": weight}, Optim(), world=Two())
        with pytest.raises(loop.PassOutOfMemoryError) if Two.failures else contextlib.nullcontext():
            loop.add_up([optimizer], [weight.sum])
