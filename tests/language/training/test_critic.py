"""A critic of its own or on the policy's backbone: gradients, splits, rates, adaptation, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from in_memory import advance, log_of, make
from tiny_jobs import online_config, ppo_config, reward_config
from tiny_rewards import early_prompts

from psigrad.config import Optim
from psigrad.config.algorithms import resolve
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.models import scalar_model, tiny
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.recipes import online, reward
from psigrad.language.recipes.online import critic_rate
from psigrad.language.rollout.types import State
from psigrad.language.training.online import online_rl as training
from psigrad.language.training.online.annotators import values as critic_module
from psigrad.language.training.online.online_run import ValueModel
from psigrad.objective.batch import explained_variance
from psigrad.objective.parts.surrogate import PENALTY_KEY
from psigrad.optim import Optimizer, step_together
from psigrad.processes.parallel.world import ALONE

STILL = Optim(learning_rate=0.0, max_grad_norm=0)


def with_critic(tokenizer, tmp_path, **settings):
    """A PPO run whose critic is a model of its own."""
    run = make(tokenizer, settings.pop("algorithm", "ppo"), **settings)
    run.model.value_head = None
    run = replace(run, optimizer=Optimizer(run.model.trainable(), run.config.optim))
    folder = tmp_path / "critic"
    tiny.model("llama", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64, seed=5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(2)
    model = scalar_model.load(str(folder))
    return replace(run, critic=ValueModel(model, Optimizer(model.trainable(), run.config.optim), 1e-2))


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.trainable().values()])


def stepped(run, steps: int = 1) -> State:
    state = State(algorithm=run.algorithm.initial_state())
    for _ in range(steps):
        state = advance(run, state)
    return state


def test_any_split_gives_the_critic_the_same_gradient(tokenizer, tmp_path):
    def both(budget: int):
        run = with_critic(tokenizer, tmp_path, micro_batch_tokens=budget, optim=STILL)
        run = replace(run, critic=replace(run.critic, learning_rate=0.0))
        stepped(run)
        return gradients(run.model), gradients(run.critic.model)

    whole = both(1 << 20)
    assert all(float(g.abs().max()) > 1e-6 for g in whole)
    for budget in (10, 40):
        for ours, theirs in zip(both(budget), whole, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


def test_a_critic_of_its_own_leaves_the_policys_gradient_alone(tokenizer, tmp_path):
    """The policy's gradient is that of its loss alone: another weight of the value loss changes the critic's only."""

    def run_with(coefficient: float):
        run = with_critic(tokenizer, tmp_path, optim=STILL)
        critic = replace(run.algorithm.critic, coefficient=coefficient)
        run = replace(run, algorithm=replace(run.algorithm, critic=critic), critic=replace(run.critic, learning_rate=0.0))
        stepped(run)
        return gradients(run.model), gradients(run.critic.model)

    light, heavy = run_with(0.1), run_with(0.4)
    assert torch.allclose(light[0], heavy[0], atol=1e-9)
    assert torch.allclose(4 * light[1], heavy[1], rtol=1e-4, atol=1e-8)


def test_the_loss_that_is_shown_is_that_of_both(tokenizer, tmp_path):
    run = with_critic(tokenizer, tmp_path)
    stepped(run)
    shown = log_of(run).rows[0]
    expected = shown["policy_loss"] + run.algorithm.critic.coefficient * shown["value_loss"]
    assert shown["value_loss"] > 0 and shown["loss"] == pytest.approx(expected, abs=1e-6)


def test_while_the_critic_warms_up_the_policy_stays(tokenizer, tmp_path):
    run = with_critic(tokenizer, tmp_path, critic_warmup_steps=1)
    before = [{n: p.detach().clone() for n, p in m.trainable().items()} for m in (run.model, run.critic.model)]
    state = advance(run, State(algorithm=run.algorithm.initial_state()))
    moved = [
        {n for n, p in m.trainable().items() if not torch.equal(p, b[n])}
        for m, b in zip((run.model, run.critic.model), before, strict=True)
    ]
    assert not moved[0] and moved[1]
    shown = log_of(run).rows[0]
    assert shown["learning_rate"] == 0.0 and shown["value_loss"] > 0 and not {"policy_loss", "grad_norm"} & shown.keys()
    advance(run, state)
    assert any(not torch.equal(p, before[0][n]) for n, p in run.model.trainable().items()), "one step later it learns"
    assert log_of(run).rows[1]["grad_norm"] > 0


@pytest.mark.needs("compiler")
def test_no_activations_of_policy_and_critic_lie_side_by_side(tokenizer, tmp_path, monkeypatch):
    events, held, caches = [], {"policy": set(), "critic": set()}, [None]
    run = with_critic(tokenizer, tmp_path, micro_batch_tokens=40)

    def watched(kind, method, name):
        original = getattr(kind, method)

        def call(*args, **kwargs):
            out = original(*args, **kwargs)
            column = getattr(out, "logp", out)
            if column.requires_grad:
                events.append(f"{name} forward")
                caches.append(kwargs.get("cache", caches[-1]))
                held[name].add(bool(caches[-1] and caches[-1].slabs))
                column.register_hook(lambda gradient: events.append(f"{name} backward"))
            return out

        monkeypatch.setattr(kind, method, call)

    watched(LanguageModel, "evaluate", "policy")
    watched(ScalarModel, "values", "critic")
    stepped(run, 2)  # the first computes all again
    assert True in held["policy"] and held["critic"] == {False}
    forward, backward = events[::2], events[1::2]
    assert len(set(forward)) == 2 and len(forward) > 3, "several micro-batches of both"
    assert [name.replace("forward", "backward") for name in forward] == backward


def test_a_shared_head_sends_value_gradients_into_the_policy(tokenizer):
    """The negative control of the test above. A zero head has no gradient to send, so it is moved off zero first."""

    def policy_gradient(coefficient: float) -> torch.Tensor:
        run = make(tokenizer, "ppo", optim=STILL)
        torch.nn.init.normal_(run.model.value_head.weight, generator=torch.Generator().manual_seed(0))
        stepped(replace(run, algorithm=replace(run.algorithm, critic=replace(run.algorithm.critic, coefficient=coefficient))))
        return gradients(run.model)[:-33]  # without the head itself

    assert not torch.allclose(policy_gradient(0.1), policy_gradient(0.4), atol=1e-6)


def test_values_of_the_batch_are_the_critics_before_the_update(tokenizer, tmp_path, monkeypatch):
    run = with_critic(tokenizer, tmp_path)
    seen = []
    original = critic_module.compute_values
    monkeypatch.setattr(critic_module, "compute_values", lambda *args: seen.append(original(*args)) or seen[-1])
    stepped(run)
    assert len(seen) == 1 and seen[0].abs().max() > 0


def test_both_optimisers_step_at_their_own_rate_or_not_at_all(tokenizer, tmp_path):
    run = with_critic(tokenizer, tmp_path)
    policy, critic = run.optimizer, run.critic.optimizer
    before = [{n: p.detach().clone() for n, p in o.parameters.items()} for o in (policy, critic)]

    def loss(scale: float) -> torch.Tensor:
        return scale * sum((p**2).sum() for o in (policy, critic) for p in o.parameters.values())

    assert step_together([(policy, 1e-3), (critic, 1e-2)], [lambda: loss(float("nan"))]) is None
    assert policy.nonfinite == 1
    assert all(torch.equal(b[n], p) for b, o in zip(before, (policy, critic), strict=True) for n, p in o.parameters.items())
    norms = step_together([(policy, 1e-3), (critic, 1e-2)], [lambda: loss(1.0)])
    assert norms is not None and policy.nonfinite == 0
    moves = [
        max(float((b[n] - p.detach()).abs().max()) for n, p in o.parameters.items())
        for b, o in zip(before, (policy, critic), strict=True)
    ]
    assert moves[0] == pytest.approx(1e-3, rel=1e-2) and moves[1] == pytest.approx(1e-2, rel=1e-2)


def test_the_critic_falls_from_a_peak_of_its_own(tokenizer, tmp_path, monkeypatch):
    """Half of a linear schedule: 0.02 → 0.01 for the policy, and 0.01 → 0.005 for the critic."""
    run = with_critic(tokenizer, tmp_path, optim=Optim(learning_rate=0.02))
    rates = []
    monkeypatch.setattr(training, "step_together", lambda pairs, losses, read: rates.append([rate for _, rate in pairs]))
    advance(run, State(step=2, algorithm=run.algorithm.initial_state()))
    assert rates[0] == pytest.approx([0.01, 0.005])


def test_the_penalty_follows_how_far_the_policy_moved(tokenizer):
    def coefficient(rate: float) -> float:
        run = make(tokenizer, "ppo_penalty", optim=Optim(learning_rate=rate), num_iterations=3)
        return stepped(run, 3).algorithm[PENALTY_KEY]

    assert coefficient(1e-7) == pytest.approx(1.0 / 8), "halved on each of three steps that moved it hardly"
    assert coefficient(3e-2) > 1.0


def test_the_penalty_waits_for_the_first_step_that_moves_the_policy(tokenizer, tmp_path, monkeypatch):
    """Two steps of warm-up leave β at 1, a third that hardly moves the policy halves it, one without a finite gradient not."""
    still = Optim(learning_rate=1e-7)
    run = with_critic(tokenizer, tmp_path, algorithm="ppo_penalty", optim=still, num_iterations=2, critic_warmup_steps=2)
    state = stepped(run, 2)
    assert state.algorithm[PENALTY_KEY] == 1.0
    state = advance(run, state)
    assert state.algorithm[PENALTY_KEY] == 0.5
    monkeypatch.setattr(training, "step_together", lambda *given: None)
    assert advance(run, state).algorithm[PENALTY_KEY] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "learns"), [(0.0, True), (1e-6, False)], ids=["default", "the policy's"])
def test_a_critic_learns_at_its_defaults(rate, learns, job, tmp_path):
    """The return is 1 where the prompt's letter is of the first four, so that a critic can explain all of it."""
    config = online_config(job, tmp_path / "run", algorithm="ppo", max_steps=24, save_steps=0)
    sampling = replace(config.sampling, max_completion_length=2)
    config = replace(config, reward=(early_prompts,), sampling=sampling, optim=Optim(), critic_learning_rate=rate)
    online.run(replace(config, prompts_per_step=16, num_generations=1))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    explained = [row["explained_variance"] for row in rows if "explained_variance" in row]
    assert explained[0] == pytest.approx(0.0, abs=0.01)
    assert explained[-1] > 0.5 if learns else max(explained) < 0.01, explained


def test_the_wider_a_model_the_lower_the_rate_of_its_critic(job, tmp_path):
    critic = scalar_model.load(str(job / "base"), fresh_head="zero")
    assert critic.network.config.hidden_size == 32 and critic_rate(critic) == pytest.approx(0.0015625)
    config = ppo_config(job, tmp_path / "run")
    policy = load_model(config.model, config.run, None)

    def used(own, of_policy):
        asked = replace(config, critic_learning_rate=own, optim=Optim(learning_rate=of_policy))
        return online._critic(asked, policy, None, ALONE).learning_rate

    assert [used(0.0, 1e-6), used(0.0, 1e-2), used(1e-5, 1e-2)] == [pytest.approx(0.0015625), 1e-2, 1e-5]


def test_explained_variance():
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 4.0, 100.0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.zeros(1, 4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) < 0
    assert explained_variance(returns, torch.ones(1, 4), mask) == 0.0


def test_a_critic_starts_from_the_reward_model_that_was_trained(job, tmp_path):
    rewarding = reward.run(reward_config(job, tmp_path / "reward"))
    config = replace(ppo_config(job, tmp_path / "run", max_steps=2), critic=str(rewarding.model), critic_learning_rate=1e-3)
    online.run(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "value/mean" in row)
    assert abs(first["value/mean"]) > 1e-3, "the reward model's head, not a fresh one that says 0"
    assert {"explained_variance", "value_loss", "critic/grad_norm", "returns/mean"} <= first.keys()
    assert isinstance(scalar_model.load(str(tmp_path / "run" / "checkpoints" / "step-00000002" / "critic")), ScalarModel)


def test_a_reward_model_and_a_reward_function_are_mixed_by_weight(job, tmp_path):
    rewarding = reward.run(reward_config(job, tmp_path / "reward"))
    config = online_config(job, tmp_path / "run", max_steps=1)
    config = replace(config, reward_model=(str(rewarding.model),), reward_weights=(2.0, 0.5))
    online.run(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert train
    for line in train:
        assert line["reward"] == pytest.approx(2 * line["parts"]["early_letters"] + 0.5 * line["parts"]["reward"], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"algorithm": "grpo", "critic_shared": True}, "has none"),
        ({"critic_shared": True, "critic": "x"}, "remove them"),
        ({"critic_shared": True, "critic_warmup_steps": 2}, "the two are one model"),
        ({"algorithm": "grpo", "critic_warmup_steps": 2}, "has none"),
        ({"algorithm": "ppo_penalty", "num_iterations": 1, "num_minibatches": 1}, "above 1"),
        ({"reward_weights": (1.0, 2.0)}, "2 reward_weights for 1"),
        ({"reward": (), "reward_model": ()}, "No reward"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, said, job, tmp_path):
    with pytest.raises(UserError, match=said):
        online.run(replace(ppo_config(job, tmp_path / "run"), **change))


def test_a_critic_with_another_tokenizer_is_refused(job, tmp_path):
    other = tiny.tokenizer(["something else entirely"], 265)
    tiny.model("qwen3", len(other), hidden=32, layers=1, heads=2).save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="different tokenizers"):
        online.run(replace(ppo_config(job, tmp_path / "run"), critic=str(tmp_path / "other")))


def test_the_preset_is_what_its_page_says():
    ppo = resolve("ppo")
    assert ppo.needs_critic and ppo.kl.where == "reward" and ppo.psi.psi.lam == 1.0 and ppo.critic.clip == 0.2
