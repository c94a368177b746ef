"""psigrad beside TRL: ratios need equal results, and are those of the steps that were taken."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import ClassVar

import beside_trl as compare
import pytest
import torch
from timed import timed_run
from timed.inputs import build
from timed.workload import Workload, answer, read
from timed_runs import timed_functions  # noqa: F401 (a fixture)

from psigrad.errors import UserError

SMALL = Workload("small", "", prompts=2, generations=2, prompt_tokens=6, completion_tokens=4, steps=2)


def test_without_trl_nothing_is_measured_beside_it(monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="TRL is not installed"):
        compare.beside(SMALL, "float32", 1)


def test_a_ratio_needs_equal_losses_and_gradients():
    same = {"loss": 0.5, "gradient": 2.0}
    compare.agree(SMALL, "float32", {"ours": same, "trl": {"loss": 0.5 + 1e-6, "gradient": 2.0}})
    for figure in same:
        with pytest.raises(UserError, match=f"the {figure} differs"):
            compare.agree(SMALL, "float32", {"ours": same, "trl": {**same, figure: same[figure] * 1.001}})


def steps(*pairs):
    return [{"seconds": s, "tokens": t, "phases": {"sample": s / 2}, "peak_mb": 100.0 + s} for s, t in pairs]


def test_a_step_without_a_gradient_is_not_compared(monkeypatch):
    monkeypatch.setattr(compare.time, "sleep", lambda seconds: None)

    def taken(who, work=SMALL, **phases):
        return compare.whole_batch(work, who, SimpleNamespace(step=lambda: steps((1.0, 10))[0] | {"phases": phases}))

    with pytest.raises(UserError, match="earned the same"):
        taken("ours", sample=1.0, **{"forward-backward": 0.0})
    assert taken("ours", **{"forward-backward": 0.5})["phases"] == {"forward-backward": 0.5}
    assert taken("trl")["phases"] == taken("ours", replace(SMALL, kind="sft"))["phases"] == {}


def test_ratios_are_per_token_and_passes_are_added():
    found = compare.ratios(SMALL, {"ours": steps((1.0, 10), (2.0, 10)), "trl": steps((4.0, 20), (6.0, 20))})
    assert found["ratio"] == pytest.approx({"median": 0.25 / 0.15, "low": 1.5, "high": 2.0, "steps": 2})
    assert found["memory_ratio"] == 106.0 / 102.0
    per_step = compare.ratios(replace(SMALL, kind="sft"), {"ours": steps((1.0, 10)), "trl": steps((4.0, 20))})
    assert per_step["ratio"]["median"] == 4.0

    class Passing:
        def step(self):
            return steps((1.0, 10))[0]

    twice = compare.whole_batch(replace(SMALL, iterations=2), "trl", Passing())
    assert twice["seconds"] == 2.0 and twice["phases"] == {"sample": 1.0} and twice["tokens"] == 20


@pytest.mark.slow
@pytest.mark.usefixtures("timed_functions")
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_trls_side_computes_our_loss_of_prompts_with_pictures(kind, tmp_path):
    import trl_worker
    import vision_language

    shape = {"side": 16, "scale": 2, "text": {**vision_language.SMALL["text"], "num_hidden_layers": 1}}
    shape["tower"] = {**vision_language.SMALL["tower"], "num_hidden_layers": 1}
    work = replace(SMALL, kind=kind, prompts=3, image=16, rows=8)
    vision_language.make(shape, work, tmp_path)
    ours = compare.check(timed_run.build(tmp_path, "float32", "cpu"))
    trainer, _ = trl_worker._trainer(work, tmp_path, read(tmp_path)[1], False, "cpu")
    compare.agree(work, "float32", {"ours": ours, "trl": trl_worker._check(work, trainer)})
    with torch.no_grad():  # another tower is another loss
        for weight in trainer.model.model.vision_model.parameters():
            weight.mul_(3)
    with pytest.raises(UserError, match="differs"):
        compare.agree(work, "float32", {"ours": ours, "trl": trl_worker._check(work, trainer)})


@pytest.mark.slow
@pytest.mark.usefixtures("timed_functions")
@pytest.mark.parametrize("change", [{"micro_batch": 2}, {"turns": 3, "spread": 0.4}, {"lora_rank": 4}])
def test_trls_side_computes_our_loss_however_it_is_divided(change, tmp_path):
    """Rows in parts, episodes with words of the environment in their midst, adapters."""
    import trl_worker

    work = replace(SMALL, vocabulary=80, hidden=32, layers=1, **change)
    build(work, tmp_path)
    ours = compare.check(timed_run.build(tmp_path, "float32", "cpu"))
    trainer, _ = trl_worker._trainer(work, tmp_path, read(tmp_path)[1], False, "cpu")
    compare.agree(work, "float32", {"ours": ours, "trl": trl_worker._check(work, trainer)})


@pytest.mark.slow
def test_trl_samples_by_vllm_only_where_the_workload_says_so(tmp_path, monkeypatch):
    """By settings that TRL has, for prompts and completions of full length."""
    import trl
    import trl_worker

    known, work = {field.name for field in fields(trl.GRPOConfig)}, replace(SMALL, vocabulary=80, hidden=32, layers=1)
    build(work, tmp_path)
    monkeypatch.setattr(trl, "GRPOConfig", lambda **given: given)
    monkeypatch.setattr(trl, "GRPOTrainer", lambda model, args, **given: args)
    plain, by_vllm = (
        trl_worker._trainer(replace(work, vllm=on), tmp_path, read(tmp_path)[1], False, "cpu")[0] for on in (False, True)
    )
    more = {"use_vllm": True, "vllm_max_model_length": work.prompt_tokens + work.completion_tokens + 1}
    assert by_vllm == plain | more and by_vllm.keys() <= known


def test_what_the_environment_says_has_no_part_in_the_loss():
    given = compare.fixed_batch(replace(SMALL, turns=2))
    sizes = [len(c) for group in given["completions"] for c in group]
    assert [len(chosen) for chosen in given["chosen"]] == sizes and any(0 in chosen for chosen in given["chosen"])
    assert all(0 not in chosen for chosen in compare.fixed_batch(SMALL)["chosen"])


def test_an_episode_is_answered_between_turns_and_ends_with_one_that_was_cut():
    """By a generator that ends every turn but the second of the second episode: TRL's loop over tools, by hand."""
    import trl_worker

    end, written = 9, iter([[[1, 9], [2, 9]], [[3, 9], [4, 4]], [[5, 9]]])

    class Generator:
        eos_token_ids = (end,)
        asked: ClassVar = []

        @staticmethod
        def processing_class(text, add_special_tokens=True):
            return {"input_ids": [7] * len(text) if isinstance(text, str) else [[6] for _ in text]}

        def _generate_single_turn(self, prompts, images, fields, num_generations):
            self.asked.append(prompts)
            return next(written), None

    found = trl_worker._episodes(3, ["abcd", "ab"], Generator())
    assert [len(answer(text, 1)) for text in ("abcd", "ab")] == [2, 1] and len(answer("abcd", 2)) == 1
    assert found["completion_ids"] == [[1, 9, 7, 7, 3, 9, 7, 5, 9], [2, 9, 7, 4, 4]]
    assert found["env_mask"] == [[1, 1, 0, 0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1]]
    assert Generator.asked[-1] == [[6, 1, 9, 7, 7, 3, 9, 7]]


# What the clock says at each step is their number. Apart: those of a block of ours, of which two do not count, then TRL's.
@pytest.mark.parametrize(
    ("apart", "block", "expected", "firsts"),
    [(False, 4, [[3, 4], [5, 6]], (2, 3)), (True, 4, [[3, 7], [4, 8]], (2, 6)), (True, 1, [[3, 6], [9, 12]], (2, 5))],
)
def test_sides_that_do_not_fit_together_take_their_steps_apart(apart, block, expected, firsts, monkeypatch):
    monkeypatch.setattr(compare.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(compare, "BLOCK", block)
    alive, taken = set(), []

    class Side:
        ready = 1.0

        def step(self):
            taken.append(len(alive))
            return {"seconds": len(taken), "tokens": 10, "phases": {"forward-backward": 0.5}, "peak_mb": 1.0}

    @contextlib.contextmanager
    def start(programs):
        alive.update(programs)
        yield {who: Side() for who in programs}
        alive.difference_update(programs)

    rounds = list(compare._rounds(SMALL, start, apart))
    assert set(taken) == {1 if apart else 2} and not alive
    assert [[step["seconds"] for step in pair.values()] for pair, _ in rounds] == expected
    assert rounds[0][1] == dict(zip(("ours", "trl"), firsts, strict=True))  # ready after 1 s, and the first step of each


@pytest.mark.long
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_both_sides_run(kind):
    found = compare.beside(replace(SMALL, kind=kind, steps=1), "float32", 1)
    assert found["check"]["ours"]["loss"] == pytest.approx(found["check"]["trl"]["loss"], rel=1e-4)
    assert found["ratio"]["median"] > 0 and found["trl"]["seconds"] > 0 and "TRL s" in compare.table([found])
