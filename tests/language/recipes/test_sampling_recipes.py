"""Online preferences, process rewards in RL, best-of-n, and what an evaluation says."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date

import pytest
import torch
from tiny_jobs import online_config, reward_config
from tiny_rewards import early_letters, fails_on_even_lengths, sees_no_answers

from psigrad import cli
from psigrad.config import Data, EvalConfig, Evaluation, Model, Run, Sampling
from psigrad.config.algorithms import resolve_online
from psigrad.errors import UserError
from psigrad.language.models import scalar_model, tiny
from psigrad.language.recipes import evaluate, online, reward
from psigrad.language.recipes.model_scorer import Mixture, ModelScorer, step_ends
from psigrad.language.recipes.online_settings import method
from psigrad.language.rewards import Failed, Samples, Scored, Scoring, Unscored
from psigrad.language.training.offline.reward_task import step_values
from psigrad.objective.catalog import GRPO
from psigrad.objective.preferences.preference_loss import OnlinePreference


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(["say a: b"], 270)


def test_online_dpo_by_name_with_another_loss():
    assert resolve_online("grpo") is GRPO and resolve_online("online_dpo").loss.name == "dpo"
    assert resolve_online({"preset": "online_dpo", "loss": "ipo"}).name == "online_ipo"
    for wrong in ({"preset": "online_dpo", "loss": "kto"}, {"preset": "online_dpo", "psi": "gae"}):
        with pytest.raises(ValueError, match="its only setting is `loss`, one of dpo"):
            resolve_online(wrong)


def test_online_dpo_runs_from_settings(job, tmp_path):
    config = online_config(job, tmp_path / "run", algorithm={"preset": "online_dpo", "loss": "ipo"}, max_steps=2)
    assert isinstance(method(config), OnlinePreference)
    online.run(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("rewards/margins" in row for row in rows)


def process_model(job, tmp_path):
    lines = [json.loads(line) for line in (job / "pairs.jsonl").read_text().splitlines()]
    rows = [{"prompt": r["prompt"], "completions": [r["chosen"], r["rejected"]], "labels": [1, 0]} for r in lines]
    config = reward_config(job, tmp_path / "prm", max_steps=10, save_steps=0)
    return reward.run(replace(config, process=True, data=Data(dataset=rows), step_separator="e")).model


def test_step_ends_are_at_separators_and_at_the_end_of_an_open_step(tokenizer):
    ids = tokenizer("ab\ncd\n").input_ids
    assert [tokenizer.decode(ids[: end + 1]) for end in step_ends(tokenizer, ids, "\n")] == ["ab\n", "ab\ncd\n"]
    open_step = [*tokenizer("ab\ncd").input_ids, tokenizer.eos_token_id]
    assert [tokenizer.decode(open_step[: end + 1]) for end in step_ends(tokenizer, open_step, "\n")] == ["ab\n", "ab\ncd"]
    assert step_ends(tokenizer, [tokenizer.eos_token_id], "\n") == []


def test_a_process_reward_model_rewards_each_step_where_it_ends(job, tmp_path):
    path = process_model(job, tmp_path)
    model = scalar_model.load(str(path), fresh_head="refuse")
    scorer = ModelScorer("steps", model, same_tokens=True)
    assert scorer.separator == "e"
    prompt, completion = model.tokenizer("say a:").input_ids, model.tokenizer("be see").input_ids
    (result,) = scorer.score(Samples(["say a:"], ["be see"], [completion], prompt_ids=[prompt]))
    ends = step_ends(model.tokenizer, completion, "e")
    (logits,) = step_values(model, [([*prompt, *completion], [len(prompt) + e for e in ends])])
    assert result.value == 0 and [place for place, _ in result.steps] == ends and len(ends) == 3
    assert [r for _, r in result.steps] == pytest.approx((torch.sigmoid(logits) / 3).tolist(), abs=1e-6)
    with pytest.raises(UserError, match="differ in tokenizer"):
        ModelScorer("steps", model, same_tokens=False)


def test_many_completions_are_scored_in_few_forward_passes_as_each_by_itself(job, tmp_path, monkeypatch):
    model = scalar_model.load(str(process_model(job, tmp_path)), fresh_head="refuse")
    texts = ["be see", "b", "eee", "see me be e", "", "reel"]
    ids = [model.tokenizer(text).input_ids if text else [model.tokenizer.eos_token_id] for text in texts]
    prompts = [model.tokenizer(f"say {c}:").input_ids for c in "abcdef"]

    def scored(rows: list[int], budget: int):
        scorer = ModelScorer("steps", model, same_tokens=True, micro_batch_tokens=budget)
        shown = [texts[i] for i in rows]
        return scorer.score(Samples(shown, shown, [ids[i] for i in rows], prompt_ids=[prompts[i] for i in rows]))

    alone = [scored([i], 1000)[0] for i in range(6)]
    calls, original = [], type(model).values
    monkeypatch.setattr(type(model), "values", lambda self, inputs, **how: calls.append(1) or original(self, inputs, **how))
    for budget, passes in ((1000, 1), (20, 5)):
        calls.clear()
        for found, expected in zip(scored(list(range(6)), budget), alone, strict=True):
            assert [place for place, _ in found.steps] == [place for place, _ in expected.steps]
            assert [r for _, r in found.steps] == pytest.approx([r for _, r in expected.steps], abs=1e-6)
            assert found.parts == pytest.approx(expected.parts, abs=1e-6)
        assert len(calls) <= passes
    assert [len(one.steps) for one in alone][:3] == [3, 1, 3]


def test_step_rewards_reach_the_advantages_of_rl(job, tmp_path):
    path = process_model(job, tmp_path)
    config = online_config(job, tmp_path / "run", algorithm="reinforce_reward_to_go", max_steps=1)
    online.run(replace(config, reward=(), reward_model=(str(path),), sampling=Sampling(max_completion_length=40)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    for line in train:
        assert line["reward"] == pytest.approx(sum(r for _, r in line["step_rewards"]), abs=1e-6)
        assert line["reward"] == pytest.approx(line["parts"]["prm"], abs=1e-6)
    assert any(len(line["step_rewards"]) > 1 for line in train)


class Fixed:
    def __init__(self, *results):
        self.results = list(results)

    def begin(self):
        return Scoring(lambda groups: self.results)


def test_a_mixture_adds_by_weight_and_keeps_every_fault():
    good = Scored(1.0, {"a": 1.0}, ((0, 0.5),))
    first = Fixed(good, good, good, Failed(-1.0, "bad"))
    second = Fixed(Scored(2.0, {"b": 2.0}, ((3, 1.0),)), Unscored("late"), Failed(-9.0, "wrong", {"b": None}), good)
    results = Mixture([first, second], [1.0, 0.25]).begin().results()
    assert results[0] == Scored(1.5, {"a": 1.0, "b": 2.0}, ((0, 0.5), (3, 0.25)))
    assert results[1] == Unscored("late")
    assert isinstance(results[2], Failed) and results[2].value == 1.0 - 0.25 * 9
    assert results[3] == Failed(-1.0 + 0.25 * 1.0, "bad", {"a": 1.0})


def eval_config(job, **changes) -> EvalConfig:
    base = EvalConfig(
        model=Model(path=str(job / "base")),
        data=Data(dataset=str(job / "held_out.jsonl")),
        sampling=Sampling(max_completion_length=4),
        run=Run(threads=1),
        reward=(early_letters,),
    )
    return replace(base, **changes)


def test_an_evaluation_says_why_completions_stayed_unscored_and_refuses_one_without_any_score(job):
    with pytest.raises(UserError, match=r"(\d+) of \1 completions stayed unscored; .*needs the column 'solution'"):
        evaluate.run(eval_config(job, reward=(sees_no_answers,)))
    some = evaluate.run(eval_config(job, reward=(fails_on_even_lengths,)))
    assert 0 < some.figures["eval/unscored"] < len(some.trajectories)
    assert some.unscored.startswith(
        f"{some.figures['eval/unscored']} of {len(some.trajectories)} completions stayed unscored; most"
    )
    assert evaluate.run(eval_config(job)).unscored == ""


def test_best_of_n_is_the_best_of_the_same_completions(job):
    every = evaluate.run(eval_config(job, evaluation=Evaluation(eval_prompts=0, num_generations_eval=6)))
    best = evaluate.run(eval_config(job, best_of=6))
    groups = [every.trajectories[i : i + 6] for i in range(0, len(every.trajectories), 6)]
    assert [t.reward for t in best.trajectories] == [max(t.reward for t in g) for g in groups]
    assert best.figures["eval/early_letters/mean"] > every.figures["eval/early_letters/mean"]


def test_best_of_n_by_a_proxy_is_measured_by_the_metric(job):
    config = eval_config(job, best_of=4, evaluation=Evaluation(eval_prompts=0, metric="exact"))
    figures = evaluate.run(config).figures
    assert {"eval/early_letters/mean", "eval/exact/mean"} <= figures.keys()
    with pytest.raises(UserError, match="best_of chooses by a reward"):
        evaluate.run(replace(config, reward=()))


def test_rows_scored_by_a_model_keep_their_dates(tmp_path, monkeypatch):
    row = {"prompt": "q", "completion": "a", "day": date(2024, 2, 29), "reward": 0.5}
    monkeypatch.setattr(reward, "score_rows", lambda model, dataset, **how: [row])
    output = tmp_path / "scores.jsonl"
    assert cli.main(["score", "--model", "m", "--dataset", "d.jsonl", "--output", str(output)]) == 0
    assert json.loads(output.read_text()) == {**row, "day": "2024-02-29"}


def test_the_divergence_of_a_run_in_codes_is_that_of_whole_models(job):
    """What the run's settings say of its base, its codes and its revision, is not of the models compared."""
    config = eval_config(job)
    found = evaluate.run(config)
    base = str(job / "base")
    asked = replace(config, model=replace(config.model, path="org/other", revision="v1", lora_rank=2, quantize_base="nf4"))
    assert evaluate.kls_to(base, base, found, asked) == pytest.approx([0.0] * len(found.trajectories), abs=1e-6)
