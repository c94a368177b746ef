"""The timing of training steps: what it reports adds up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timed import inputs, timed_run, timing, workload
from timed.inputs import prepare, rows, tokenizer
from timed.workload import Workload, read
from timed_runs import timed_functions  # noqa: F401 (a fixture)
from transformers import AutoConfig
from warm import warm

from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad_extras.preflight.plan.hardware import Machine
from psigrad_extras.preflight.plan.shape import count_shape

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
SMALL = Workload("small", "", prompts=2, generations=2, prompt_tokens=6, completion_tokens=4, steps=2)


@pytest.fixture(scope="module")
def configuration(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configuration")
    tiny.model("llama", 80, hidden=32, layers=1, max_length=64).config.save_pretrained(folder)
    return folder


def timed(configuration, **changed):
    work = replace(SMALL, **changed)
    with warm():
        return timing.alone(work, "float32", 1, make=lambda work, folder: prepare(work, str(configuration), folder))


def test_a_configuration_alone_is_timed_and_its_phases_add_up(configuration):
    found = timed(configuration)
    assert found["versions"]["torch"] == torch.__version__ and found["cores"] >= 1 and found["when"].endswith("Z")
    assert found["processor"] and found["vectors"] and "gpu" not in found
    ours = found["ours"]
    assert set(ours["phases"]) >= {"sample", "score", "forward-backward", "optimizer", "rest"}
    assert sum(ours["phases"].values()) == pytest.approx(ours["seconds"], rel=0.3, abs=0.02)  # medians of each
    assert set(ours["floor"]) == {"sample", "forward-backward"} and 0 < sum(ours["floor"].values()) < ours["seconds"]
    assert 0 < ours["mfu"] < 1 and 4 <= ours["tokens"] <= 16 and 200 < ours["peak_mb"] < 4000
    assert found["to_first_step"]["ours"] > ours["seconds"]
    table = timing.table([found]).splitlines()
    assert "tokens/s" in table[0] and table[1].split()[0] == "small" and "MFU" in table[2]


@pytest.mark.slow
def test_a_critic_is_timed_and_counted(configuration):
    """As a model alone is by the test above."""
    ours = timed(configuration, kind="ppo", generations=1, steps=1)["ours"]
    assert ours["phases"]["log-probs"] > 0 and ours["floor"]["log-probs"] > 0, "its values are computed before the update"


def test_a_models_own_weights_and_tokenizer_are_used(tmp_path):
    words = tiny.tokenizer(["abc abd"], 270)
    model = tiny.model("qwen3", len(words), hidden=32, layers=1, max_length=64, seed=7)
    model.save_pretrained(tmp_path / "given")
    words.save_pretrained(tmp_path / "given")
    prepare(SMALL, str(tmp_path / "given"), tmp_path / "work")
    given, used = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("given", "work/model"))
    assert given == used
    work, made = read(tmp_path / "work")
    lengths = [len(words(row["prompt"]).input_ids) for row in made]
    assert work == SMALL and SMALL.prompt_tokens - 1 <= min(lengths) <= max(lengths) <= SMALL.prompt_tokens + 1


def test_negative_control_another_models_weights_are_noticed(configuration, tmp_path):
    prepare(SMALL, str(configuration), tmp_path / "a")
    torch.manual_seed(1)
    prepare(SMALL, str(configuration), tmp_path / "b")
    first, second = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in "ab")
    assert first == second, "weights do not depend on what was drawn before"
    tiny.model("llama", 80, hidden=32, layers=1, max_length=64, seed=3).save_pretrained(tmp_path / "c")
    assert first != (tmp_path / "c" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["grpo", "dpo", "reward", "sft"])
def test_rows_have_the_lengths_that_were_asked_for(kind):
    made = tokenizer(64)
    found = rows(replace(SMALL, kind=kind), made)
    assert all(len(made(row["prompt"]).input_ids) == SMALL.prompt_tokens for row in found)
    assert {"grpo": {"prompt"}, "sft": {"prompt", "completion"}}.get(kind, {"prompt", "chosen", "rejected"}) == set(found[0])


def test_a_side_that_dies_says_why(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no room left >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(timing.sys, "executable", str(program))
    with pytest.raises(UserError, match="no room left"):
        timing.WorkerProcess(tmp_path, "float32", 1)


def test_rewards_depend_on_the_text_alone():
    assert workload.reward(["a", "b", "a"])[0] == workload.reward(["a"])[0]
    assert len(set(workload.reward(["a", "b", "c"]))) == 3


def test_lengths_of_prompts_spread_as_those_of_real_rows_do(configuration, tmp_path):
    """Their mean stays; a tenth of them is far above it, and without a spread all are equal."""
    prepare(replace(SMALL, prompt_tokens=24, spread=0.4), str(configuration), tmp_path)
    lengths = sorted(len(row["prompt"]) for row in read(tmp_path)[1])
    assert sum(lengths) / len(lengths) == pytest.approx(24, rel=0.05)
    assert lengths[len(lengths) // 10] < 16 and lengths[-len(lengths) // 10] > 35 and lengths[0] >= 6 and lengths[-1] <= 96


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_coded_base_is_read_in_its_codes(configuration, tmp_path, name):
    """The floor of decoding counts the bytes of the codes; those of adapters and head are as they were."""
    work = replace(SMALL, lora_rank=4)
    prepare(work, str(configuration), tmp_path)
    rate = Machine("cpu", 1 << 30, peak=1e15, bandwidth=1e9)
    plain, coded = (timing.floor(replace(work, quantize_base=base), tmp_path, 16, "bfloat16", rate) for base in ("", name))
    saved = (plain["sample"] - coded["sample"]) * rate.bandwidth / work.completion_tokens
    layers = count_shape(AutoConfig.from_pretrained(tmp_path / "model")).layer_matrices
    assert saved == pytest.approx(layers * (2 - {"nf4": 4.5, "int8": 9}[name] / 8))


@pytest.mark.usefixtures("timed_functions")
def test_episodes_of_several_turns_are_timed(tmp_path):
    """Every turn but the last is answered, and nothing is said of a floor: some of their tokens are read and not sampled."""
    work = replace(SMALL, vocabulary=80, hidden=32, layers=1, turns=3, prompt_tokens=12)
    inputs.build(work, tmp_path)
    run = timed_run.build(tmp_path, "float32", "cpu")
    tokens, phases = run.step()
    assert tokens > 0 and phases["sample"] > 0 and phases["forward-backward"] > 0
    assert timing.floor(work, tmp_path, tokens, "float32", Machine("cpu", 1 << 30, peak=1e9, bandwidth=1e9)) == {}
    environment = timed_run.Answering(2)
    environment.reset({"prompt": "abcdef"})
    assert [environment.step("x") for _ in range(2)] == [("abc", 0.0, False), ("ab", 0.0, True)]


@pytest.mark.needs("compiler")
@pytest.mark.usefixtures("timed_functions")
def test_a_model_whose_activations_are_not_kept_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(timed_run, "share_for_activations", lambda model, times: 1e-9)
    inputs.build(replace(SMALL, vocabulary=80, hidden=32, layers=1), tmp_path)
    assert timed_run.build(tmp_path, "float32", "cpu").step()[0] > 0
