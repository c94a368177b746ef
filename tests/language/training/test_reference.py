"""The reference: what it reads, how it follows the policy, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_memory import make
from tiny_jobs import online_config

from psigrad.config import Model
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import Divergence, prepare
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.recipes import online
from psigrad.language.training.online.annotators.reference import exact_kl, move_towards, reference_log_probs
from psigrad.language.training.online.batching import inputs_of, micro_batches, reference_inputs_of, rows_of, to_batch
from psigrad.language.training.online.collect import collect
from psigrad.objective.parts.ratio import truncated_importance
from psigrad.step import Clock

pytestmark = pytest.mark.usefixtures("rewards_here")


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Completions of prompts for which the reference reads longer ones."""
    run = make(tokenizer)
    told = [replace(p, teacher_ids=(*p.ids, 5, 6, 7) if p.index % 2 else ()) for p in run.prompts]
    run = replace(run, prompts=told)
    collected = collect(run, 0, 0, Clock())
    return run, to_batch(collected.groups)


def alone(model, prompt, completion) -> torch.Tensor:
    """[t, V] log-probs of a completion behind a prompt, by transformers alone."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model.network(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)


def test_the_reference_reads_its_own_prompts(batch, tokenizer):
    run, rows = batch
    found = reference_log_probs(run.model, rows, 40, 1.0)
    longer = 0
    for row, trajectory in zip(found, rows.inputs, strict=True):
        ids = trajectory.completion.ids
        prompt = trajectory.teacher_prompt_ids or trajectory.prompt_ids
        longer += bool(trajectory.teacher_prompt_ids)
        expected = alone(run.model, prompt, ids).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(row[: len(ids)].double(), expected, atol=2e-5, rtol=0)
    assert 0 < longer < len(rows.inputs)


@pytest.mark.parametrize("kind", ["exact", "exact_forward", "exact_js"])
@pytest.mark.parametrize("lora", [None, Lora(2)], ids=["whole", "lora"])
def test_exact_divergences_are_from_what_the_reference_says_behind_its_own_prompts(kind, lora, batch, tokenizer):
    run, rows = batch
    hf = tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64, seed=3)
    torch.manual_seed(0)
    model = prepare(hf, tokenizer, lora=lora)
    if lora:
        for name, p in model.trainable().items():
            if "lora_B" in name:
                torch.nn.init.normal_(p)
    other = model if lora else run.model
    method = replace(run.algorithm, kl=replace(run.algorithm.kl, estimator=kind, mixture=0.3))
    for micro in micro_batches(rows, rows.present, 1000):
        asked = exact_kl(method, other, reference_inputs_of(rows, micro))
        assert isinstance(asked, Divergence) and asked.inputs == reference_inputs_of(rows, micro)
        kl = model.evaluate(inputs_of(rows, micro), kl_to=asked).kl.detach()
        for row, place in zip(kl, rows_of(micro).tolist(), strict=True):
            t = rows.inputs[place]
            pi = alone(model, t.prompt_ids, t.completion.ids)
            with model.without_adapter() if lora else torch.no_grad():
                ref = alone(other, t.teacher_prompt_ids or t.prompt_ids, t.completion.ids)
            mixed = (0.3 * ref.exp() + 0.7 * pi.exp()).log()
            expected = {
                "exact": pi.exp() * (pi - ref),
                "exact_forward": ref.exp() * (ref - pi),
                "exact_js": 0.3 * ref.exp() * (ref - mixed) + 0.7 * pi.exp() * (pi - mixed),
            }[kind].sum(1)
            assert float(expected.max()) > 1e-3
            torch.testing.assert_close(row[: len(expected)].double(), expected, atol=2e-5, rtol=1e-4)
    assert exact_kl(replace(method, kl=None), other) is None


def test_an_unlikely_token_leaves_the_divergences_and_their_gradients_finite():
    from psigrad.language.models.stats import TokenStatsRequest

    student = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    teacher = torch.tensor([[0.5, -torch.inf, -torch.inf]])
    for kind in ("exact_forward", "exact_js"):
        wanted = TokenStatsRequest(reference_head=lambda hidden: hidden, divergence=kind)
        found = wanted.of(student, torch.zeros(1).long(), teacher)[2]
        assert bool(torch.isfinite(found).all()) and float(found) > 0
        assert bool(torch.isfinite(torch.autograd.grad(found.sum(), student)[0]).all())


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_reference_follows_by_a_share(share, tokenizer):
    run = make(tokenizer)
    before = {name: p.clone() for name, p in run.reference.network.named_parameters()}
    with torch.no_grad():
        for p in run.model.trainable().values():
            p += 0.1
    mine = {name: p.detach().clone() for name, p in run.model.trainable().items()}
    move_towards(run.reference, run.model, share)
    groups = Groups([[3, 4, 5]], [[[6, 7]]])
    for name, p in run.reference.network.named_parameters():
        torch.testing.assert_close(p, share * mine[name] + (1 - share) * before[name])
        assert torch.equal(mine[name], run.model.trainable()[name]), "the policy stays as it is"
    with torch.no_grad():
        same = torch.allclose(run.reference.evaluate(groups).logp, run.model.evaluate(groups).logp, atol=1e-6)
    assert same == (share == 1.0), "what was computed from the old weights is not used again"


def metrics(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_it_follows_after_every_so_many_steps(job, tmp_path):
    """The KL of fresh samples to a reference that was just copied is 0; in the step after it is not."""
    config = replace(online_config(job, tmp_path / "run", "rloo"), num_minibatches=1)
    still = metrics(online.run(config).folder, "objective/kl")
    config = replace(online_config(job, tmp_path / "follows", "rloo"), num_minibatches=1)
    found = metrics(online.run(replace(config, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0)).folder, "objective/kl")
    assert still[:2] == found[:2] and all(abs(kl) > 1e-4 for kl in still[1:])
    assert [abs(kl) < 1e-4 for kl in found] == [True, False] * 3


def test_a_model_learns_from_what_it_says_when_it_is_told_more(job, tmp_path):
    """Self-distillation: the teacher is the model itself behind another prompt."""
    for name in ("train", "held_out"):
        rows = [json.loads(line) for line in (job / f"{name}.jsonl").read_text().splitlines()]
        told = [{**row, "told": row["prompt"] + " (say zzz)"} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    config = replace(online_config(job, tmp_path / "run", "distill", max_steps=30), reward=(), teacher_prompt="told")
    data = replace(config.data, dataset=str(tmp_path / "train.jsonl"), eval_dataset=str(tmp_path / "held_out.jsonl"))
    kl = metrics(online.run(replace(config, data=data)).folder, "kl")
    assert sum(kl[-6:]) / 6 < 0.7 * kl[0]
    missing = replace(config, run=replace(config.run, output_dir=str(tmp_path / "missing")))
    with pytest.raises(UserError, match=r"train.jsonl.+teacher_prompt is 'told', but the row has only the columns"):
        online.run(missing)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("distill", {}, r"distill learns from a teacher, but none was given; name a model with --reference"),
        ("dapo", {"teacher_prompt": "told"}, r"teacher_prompt is given, but dapo has no KL term"),
        ("rloo", {"ref_model_sync_steps": 1, "model": Model(path="x", lora_rank=2)}, r"train without LoRA"),
        ("rloo", {"ref_model_sync_steps": 1, "reference": "x"}, r"name another model as reference; remove ref_model"),
        ("rloo", {"reference_dtype": "bfloat16", "model": Model(path="x", lora_rank=2)}, "With LoRA the reference"),
        ("rloo", {"teacher_prompt": "told", "environment": "guess"}, r"needs single-turn completions"),
        ("rloo", {"reward": ()}, "No reward was given"),
    ],
)
def test_settings_that_do_not_fit_are_refused(algorithm, changes, message, job, tmp_path):
    with pytest.raises(UserError, match=message):
        online.run(replace(online_config(job, tmp_path / "run", algorithm), **changes))


def test_the_reference_may_have_another_precision(job, tmp_path):
    config = online_config(job, tmp_path / "run", "rloo", max_steps=2)
    half = online.run(replace(config, reference_dtype="bfloat16"))
    assert 0 < abs(metrics(half.folder, "objective/kl")[0]) < 0.05, "its rounding alone"


def test_an_inexact_sampler_is_corrected_unless_the_settings_say_otherwise(job, tmp_path):
    def run(name: str, algorithm, dtype: str = "bfloat16"):
        config = online_config(job, tmp_path / name, algorithm, max_steps=1)
        folder = online.run(replace(config, model=replace(config.model, dtype=dtype))).folder
        said = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        return [e["correction"] for e in said if e["kind"] == "correction"], metrics(
            folder, "sampling/importance_sampling_ratio/mean"
        )

    said, weights = run("half", "dr_grpo")
    assert said == ["truncated_importance(cap=3.0, level='token', floor=0.0)"] and weights[0] == pytest.approx(1.0, abs=0.1)
    assert run("null", {"preset": "dr_grpo", "correction": None}) == ([], [])
    assert run("exact", "dr_grpo", "float32") == ([], [])
    assert run("stated", {"preset": "dr_grpo", "correction": "masked_importance"})[0] == []
    assert truncated_importance().cap == 3.0
