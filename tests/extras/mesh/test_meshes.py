"""A mesh of (replicate, shard, tensor, context): log-probs, gradients and runs are those of one process."""

from __future__ import annotations

import json
import signal
import tempfile

import meshes
import pytest
import ranks
from rank_gradients import distance, make_models
from safetensors.torch import load_file
from tiny_jobs import make_job
from transformers import AutoTokenizer

from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.processes.parallel.world import Division, join_world
from psigrad_extras.mesh import mesh

ALL = "dapo,dapo recomputed,dapo bfloat16,ppo shared,sft,dpo,kto,reward"
MODULES = {"PSIGRAD_NATIVE": "0"}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """found(size, division, cases): the gradients of each case, by name of the parameter."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("gradients")
    make_models(models)

    def of(size: int, division: Division | bool, cases: str) -> dict:
        name = out / "-".join(map(str, (size, *(division or ()))))
        files = {case: out / f"{name.name}-{case.replace(' ', '_')}.safetensors" for case in cases.split(",")}
        if missing := [case for case, file in files.items() if not file.exists()]:
            ranks.run(size, "meshes", "main", models, name, ",".join(missing), lockstep=division, extra=MODULES)
        return {case: load_file(file) for case, file in files.items()}

    return of


@pytest.mark.parametrize(
    ("size", "division", "cases"),
    [
        (2, Division(context=2), "dapo"),
        (2, Division(tensor=2), "dapo"),
        pytest.param(2, Division(context=2), "lora", marks=SLOW),
        pytest.param(4, Division(replicate=2), ALL, marks=SLOW),
        pytest.param(4, Division(tensor=2), ALL, marks=SLOW),
        pytest.param(4, Division(context=2), ALL, marks=SLOW),
        pytest.param(4, Division(tensor=2, context=2), ALL, marks=SLOW),
        pytest.param(4, Division(replicate=2, context=2), ALL, marks=SLOW),
    ],
)
def test_the_gradient_is_that_of_one_process(found, size, division, cases):
    one, several = found(1, False, cases), found(size, division, cases)
    for case in cases.split(","):
        half = "bfloat16" in case
        apart = distance(one[case], several[case])
        print(f"{case} {size} {division} {apart:.2g}")
        assert apart < (2e-2 if half else 3e-6)
        for key in [key for key in one[case] if key.startswith("norm of")]:
            assert float(several[case][key]) == pytest.approx(float(one[case][key]), rel=1e-2 if half else 1e-5)
        assert float((one[case]["after a step"] - several[case]["after a step"]).abs().max()) < (0.3 if half else 2e-3)


PLANNED = "llama,qwen2,qwen3,gemma2,olmo2,phi3,granite,cohere,starcoder2"


@SLOW
@pytest.mark.parametrize("division", [Division(tensor=2), Division(context=2)])
def test_families_compute_together_or_are_refused_by_name(tmp_path, division):
    ranks.run(2, "meshes", "families", tmp_path / "found", PLANNED, lockstep=division)
    found = json.loads((tmp_path / "found.json").read_text())
    print(found)
    assert all(isinstance(gap, float) and gap < 1e-4 for gap in found.values()), found


def test_what_cannot_be_divided_is_refused_by_name(monkeypatch):
    model = meshes.family("llama")
    with pytest.raises(UserError, match="LlamaConfig has 4 attention heads, not a multiple of tp_size × cp_size = 1 × 3"):
        mesh.check(model, meshes.alone(context=3))
    with pytest.raises(UserError, match="2 key-value heads, which is not a multiple of tp_size=4"):
        mesh.check(model, meshes.alone(tensor=4))
    moe = r"the styles moe_tp_experts, packed_colwise of transformers' plan for Qwen3MoeForCausalLM; give"
    for kind, why in (("gpt2", "no tensor-parallel plan for GPT2LMHeadModel"), ("qwen3_moe", moe)):
        with pytest.raises(UserError, match=why):
            mesh.divide_layers(meshes.family(kind), None)
    model.why_padded = "its layers are recurrent"
    with pytest.raises(UserError, match=r"the model runs padded \(its layers are recurrent"):
        mesh.check(model, meshes.alone(context=2))
    model.why_padded, model.network.model.layers[0].has_state = "", True
    with pytest.raises(UserError, match="do not support recurrent layers, which LlamaForCausalLM has"):
        mesh.check(model, meshes.alone(context=2))
    monkeypatch.setenv("WORLD_SIZE", "4")
    for division, lockstep in ((Division(tensor=3), True), (Division(context=2), False)):
        with pytest.raises(UserError, match=r"need strategy=fsdp and a multiple of [23] processes\. This run has 4"):
            join_world(lockstep=lockstep, division=division).__enter__()


@SLOW
@pytest.mark.parametrize("sizes", ["1 2 2", pytest.param("2 1 2", marks=pytest.mark.long)])
def test_a_run_is_that_of_one_process_also_after_a_kill(tmp_path, sizes):
    job = make_job(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(job / "base")  # of more heads than the job's own model
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=1, heads=4, max_length=64).save_pretrained(job / "base")
    strategy = f"fsdp {sizes}"
    ranks.run(1, "rank_runs", "main", job, tmp_path / "one", "grpo", "ddp")
    given = (job, tmp_path / "run", "grpo", strategy, "save 1 2")
    with tempfile.TemporaryDirectory() as meeting:
        group = ranks.start(4, "rank_runs", "main", *given, lockstep=True, folder=meeting)
        for rank in group:
            rank.communicate(timeout=240)
        assert group[1].returncode == -signal.SIGKILL
    for place in ("run", "whole"):
        ranks.run(4, "rank_runs", "main", job, tmp_path / place, "grpo", strategy, lockstep=True)
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    one, run = (map(json.loads, (tmp_path / name / "metrics.jsonl").open()) for name in ("one", "run"))
    for before, after in zip(one, run, strict=True):
        for name in before.keys() & {"loss", "reward", "grad_norm", "entropy"}:
            assert after[name] == pytest.approx(before[name], rel=2e-3, abs=2e-4), (before["step"], name)
