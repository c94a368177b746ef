"""What a policy gradient makes of a rollout of environments: bootstraps, minibatches, ensembles, and the peers' advantages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from control_worlds import Chain, Counter, Target
from gymnasium import spaces

from psigrad.config import Run
from psigrad.control import builder
from psigrad.control.methods import presets as control_catalog
from psigrad.control.methods.on_policy import as_tensors
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.objective import PolicyOutputs, catalog, policy_gradient
from psigrad.objective.parts.aggregate import sequence_mean, sequence_sum
from psigrad.objective.parts.surrogate import PENALTY_KEY


def method(algorithm, env=Chain, **given):
    made = builder.build(builder.settings(algorithm, env, {"tuned": False, "n_envs": 3, **given}))
    made.restart()
    return made


def prepared_of(made):
    rollout = made._collect()
    seen = as_tensors(rollout, made.algorithm.needs_critic)
    recorded = made.network.record(seen.observation)
    now = made._evaluate(recorded.output, seen.action)
    return rollout, seen, recorded, now, made._prepare(made.algorithm, rollout, seen, recorded.output, now, True)


def test_a_cut_row_is_bootstrapped_with_the_value_behind_it_and_a_finished_one_is_not():
    made = method("a2c", lambda: Counter((2, 3)), n_steps=4, n_envs=1, gamma=0.9)
    rollout, _, _, _, prepared = prepared_of(made)
    batch = prepared.batch
    with torch.no_grad():
        behind = made.network.state_value(made.network(torch.from_numpy(rollout.after)))
    assert rollout.terminated.tolist() == [True, False] and rollout.truncated.tolist() == [False, False]
    torch.testing.assert_close(batch.last_value, behind * torch.tensor([0.0, 1.0]))
    # lambda 1: the return of each row with its bootstrap, less the value
    returns = torch.tensor([[1 + 0.9 * 2, 2.0], [1 + 0.9 * 2 + 0.81 * behind[1], 2 + 0.9 * behind[1]]])
    torch.testing.assert_close(prepared.returns, returns)
    torch.testing.assert_close(prepared.advantage, returns - batch.value)


def test_negative_control_truncation_taken_for_termination_gives_other_returns():
    made = method("a2c", lambda: Counter((3, 2)), n_steps=8, n_envs=1)
    rollout, seen, recorded, _now, prepared = prepared_of(made)
    assert rollout.truncated.any()
    ended = replace(rollout, terminated=rollout.terminated | rollout.truncated)
    seen = as_tensors(ended, True)
    recorded = made.network.record(seen.observation)
    wrong = made._prepare(made.algorithm, ended, seen, recorded.output, made._evaluate(recorded.output, seen.action), True)
    assert not torch.allclose(wrong.returns, prepared.returns)


def test_advantages_are_stable_baselines():
    """The same rewards, values and ends through SB3's rollout buffer."""
    from stable_baselines3.common.buffers import RolloutBuffer

    rng, steps, count = np.random.default_rng(0), 12, 4
    buffer = RolloutBuffer(
        steps, spaces.Box(-1, 1, (2,)), spaces.Discrete(2), device="cpu", gamma=0.97, gae_lambda=0.9, n_envs=count
    )
    reward, value = rng.normal(size=(steps, count)).astype(np.float32), rng.normal(size=(steps, count)).astype(np.float32)
    starts = rng.random((steps + 1, count)) < 0.25
    starts[0] = True
    last = rng.normal(size=count).astype(np.float32)
    for t in range(steps):
        obs, action = np.zeros((count, 2), np.float32), np.zeros((count, 1))
        buffer.add(obs, action, reward[t], starts[t], torch.from_numpy(value[t]), torch.zeros(count))
    buffer.compute_returns_and_advantage(torch.from_numpy(last), starts[steps])
    # ours: each stretch between two starts is a row of its own
    from psigrad.objective import Batch
    from psigrad.objective.parts.advantage import gae

    for e in range(count):
        bounds = [*np.flatnonzero(starts[:steps, e]).tolist(), steps]
        for a, b in itertools.pairwise(bounds):
            over = b < steps or starts[steps, e]
            row = Batch(
                mask=torch.ones(1, b - a, dtype=torch.bool),
                reward=torch.from_numpy(reward[a:b, e])[None],
                logp_old=torch.zeros(1, b - a),
                group=torch.zeros(1),
                value=torch.from_numpy(value[a:b, e])[None],
                last_value=torch.tensor([0.0 if over else float(last[e])]),
            )
            np.testing.assert_allclose(gae(0.97, 0.9)(row)[0].numpy(), buffer.advantages[a:b, e], atol=1e-5)


@pytest.mark.parametrize("aggregate", [sequence_sum, catalog.token_mean])
def test_steps_as_rows_of_their_own_have_the_gradient_of_whole_rows(aggregate):
    algorithm = replace(control_catalog.PPO, aggregate=aggregate)
    made = method(algorithm, n_steps=16, n_epochs=1)
    _, seen, recorded, now, prepared = prepared_of(made)
    totals = made.algorithm.totals(prepared)
    flat = made._parts(prepared, seen)
    assert flat.seen is None
    first = recorded.backward(
        made.algorithm.loss(
            flat.prepared, PolicyOutputs(now.logp[:, None], None, now.learned[0][:, None]), totals, made.state
        ).value
    ).clone()
    recorded = made.network.record(seen.observation)
    now = made._evaluate(recorded.output, seen.action)
    whole = PolicyOutputs(seen.wide(now.logp), None, seen.wide(now.learned[0]))
    second = recorded.backward(made.algorithm.loss(prepared, whole, totals, made.state).value)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_negative_control_the_mean_over_episodes_is_not_a_mean_over_steps():
    made = method(replace(control_catalog.PPO, aggregate=sequence_mean), n_steps=16)
    _, seen, _, _, prepared = prepared_of(made)
    assert made._parts(prepared, seen).seen is not None  # so it is trained on as whole rows


def test_minibatches_add_up_to_the_rollout():
    """At a learning rate of 0 each pass sees every step once, and the gradients of its minibatches average to the whole one's."""
    made = method("ppo", n_steps=16, batch_size=12, n_epochs=2, learning_rate=0.0, max_grad_norm=0)
    _, seen, _, _, prepared = prepared_of(made)
    whole = made._parts(prepared, seen)
    rng, gradients, sizes = np.random.default_rng(0), [], []
    for part in [*whole.shuffle(rng, 4), whole]:
        recorded = made.network.record(part.observation)
        now, size = made._evaluate(recorded.output, part.action), len(part.action)
        totals = type(made.algorithm.totals(prepared))(size, size, size)
        evaluation = PolicyOutputs(now.logp[:, None], None, now.learned[0][:, None])
        gradients.append(recorded.backward(made.algorithm.loss(part.prepared, evaluation, totals, made.state).value).clone())
        sizes.append(size)
    assert sum(sizes[:-1]) == sizes[-1] == seen.steps
    mean = sum(g * s for g, s in zip(gradients[:-1], sizes[:-1], strict=True)) / seen.steps
    torch.testing.assert_close(mean, gradients[-1], rtol=1e-4, atol=1e-6)


def test_an_ensemble_of_equal_critics_learns_as_one_and_unequal_ones_each_by_themselves():
    made = method("a2c", n_steps=8, n_critics=3, optimizer="adam", max_grad_norm=0)
    _, seen, recorded, now, prepared = prepared_of(made)
    seen_gradient = []
    made.apply_gradient = lambda gradient, rate: seen_gradient.append(gradient.clone()) or 0.0
    part = made._parts(prepared, seen)
    made._update(made.algorithm, part, made.algorithm.totals(prepared), (recorded, now), False, None)
    returns = part.prepared.returns[:, 0]
    out = made.network.plain(seen.observation[: seen.steps])
    logp = made.network.distribution.log_prob(out.policy, out.rest, seen.action)
    policy = -(part.prepared.advantage[:, 0] * logp).mean()
    critics = sum(0.5 * ((v - returns) ** 2).mean() for v in out.values) / 3
    (policy + made.algorithm.critic.coefficient * critics).backward()
    torch.testing.assert_close(seen_gradient[0], made.network.flat.grad, rtol=1e-4, atol=1e-6)


def test_a_critic_of_actions_learns_the_return_of_the_action():
    """With lambda 1 on whole episodes, Q's target is the reward-to-go."""
    made = method("q_actor_critic", n_steps=0, gamma=0.9, gae_lambda=1.0)
    rollout, _seen, _, _, prepared = prepared_of(made)
    for n in range(len(rollout.terminated)):
        rewards, total = rollout.reward[rollout.row == n], 0.0
        if not rollout.terminated[n]:
            continue
        for t in reversed(range(len(rewards))):
            total = rewards[t] + 0.9 * total
            assert float(prepared.returns[n, t]) == pytest.approx(total, rel=1e-4)


def test_with_lambda_0_a_critic_of_actions_learns_the_reward_and_its_expectation_behind_it():
    made = method("q_actor_critic", lambda: Counter((2, 3)), n_steps=0, n_envs=1, gamma=0.9, gae_lambda=0.0)
    *_, prepared = prepared_of(made)
    torch.testing.assert_close(prepared.returns[0], torch.stack([1 + 0.9 * prepared.batch.value[0, 1], torch.tensor(2.0)]))


def test_a_critic_of_states_learns_what_its_method_says_and_no_lambda_return():
    """Rewards 1, 2: the residual's target is r + γ V(s'), where a λ-return would be 1 + 0.9·2."""
    made = method("td_actor_critic", lambda: Counter((2, 3)), n_steps=0, n_envs=1, gamma=0.9)
    *_, prepared = prepared_of(made)
    target = torch.stack([1 + 0.9 * prepared.batch.value[0, 1], torch.tensor(2.0)])
    torch.testing.assert_close(prepared.returns[0], target)
    assert abs(float(target[0]) - 2.8) > 0.1


@pytest.mark.parametrize(
    "name",
    [
        *control_catalog.names(),
        "grpo",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("rloo", "dr_grpo", "dapo", "cispo", "reinforce_pp")),
    ],
)
def test_every_preset_learns_the_chain(name):
    """The optimum is to go right always, discounted or not: 1 at the end of three steps, and every step to the left costs."""
    whole = not (control_catalog.resolve(name).needs_critic)
    settings = {"n_steps": 0 if whole else 16, "n_envs": 8, "learning_rate": 0.02, "gamma": 0.9, "n_episodes": 2, "seed": 1}
    ratio = control_catalog.resolve(name).ratio is not catalog.ratio.none
    made = method(name, **settings, n_epochs=4 if ratio else 1, total_timesteps=6_000)
    while made.timesteps < 6_000:
        made.iterate()
    states = np.eye(4, dtype=np.float32)[:3]
    np.testing.assert_array_equal(made.network.act(states), [1, 1, 1])


def test_a_continuous_policy_finds_its_target():
    made = method("ppo", Target, n_envs=8, n_steps=32, n_epochs=10, learning_rate=3e-3, gamma=0.9, total_timesteps=20_000)
    while made.timesteps < 20_000:
        made.iterate()
    wanted = np.linspace(-0.9, 0.9, 7, dtype=np.float32)[:, None]
    np.testing.assert_allclose(made.network.act(wanted), wanted, atol=0.15)


@pytest.mark.parametrize(
    ("algorithm", "given", "said"),
    [
        ("reinforce_reward_to_go", {"n_steps": 8}, "n_steps=0"),
        ("a2c", {"n_steps": 8, "n_epochs": 2}, "n_epochs=1"),
        ("a2c", {"n_steps": 8, "batch_size": 12}, "batch_size=0"),
        ("ppo_penalty", {"n_steps": 8}, "n_epochs"),
        ("gspo", {"n_steps": 0, "batch_size": 4}, "batch_size=0"),
        ("grpo", {"n_steps": 0, "n_envs": 1}, "n_envs"),
        ("trpo", {"n_steps": 8, "critic": "shared"}, "separate"),
        ("ppoo", {}, "ppo"),
        ("dqn", {"batch_size": 0}, "batch_size"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(algorithm, given, said):
    with pytest.raises(UserError, match=said):
        method(algorithm, **given)
    with pytest.raises(ValueError, match="does not clip"):
        method("a2c", clip_range=0.1)


def test_the_policy_gradient_is_the_object_that_trains_language_models():
    made = method(catalog.DR_GRPO, n_steps=0)
    assert type(made.algorithm) is type(catalog.DR_GRPO) and made.algorithm.psi == catalog.DR_GRPO.psi
    assert ControlConfig().run == Run(threads=1)


def weights_after(passes: int, **given) -> list[float]:
    made = method("ppo", n_steps=16, batch_size=0, learning_rate=0.01, n_epochs=passes, **given)
    made.iterate()
    return made.network.flat.detach().tolist()


def test_target_kl_stops_before_the_step_that_would_go_on_from_too_far():
    limited = weights_after(3, target_kl=1e-9)  # the first step starts at the old policy, the second is already away from it
    assert limited == weights_after(1)
    assert limited != weights_after(2) and weights_after(3, target_kl=1e9) == weights_after(3)


def test_target_kl_may_be_passed_by_half():
    """At the second pass KL(old‖new) is 0.00159: below 1.5 · 0.00132 = 0.00198 and above 1.5 · 0.00099 = 0.00149."""
    assert weights_after(2, target_kl=0.00132) == weights_after(2)
    assert weights_after(2, target_kl=0.00099) == weights_after(1) != weights_after(2)


def test_half_of_the_run_is_half_of_the_clip_and_of_the_learning_rate():
    falling = {"clip_range": 0.2, "clip_range_schedule": "linear", "lr_scheduler_type": "linear", "learning_rate": 0.01}
    made = method("ppo", n_steps=8, total_timesteps=48, **falling)
    made.iterate()
    assert made.timesteps == 24
    clip = made._schedule().surrogate
    assert (clip.low, clip.high, made.learning_rate) == pytest.approx((0.1, 0.1, 0.005))
    constant = method("ppo", n_steps=8, total_timesteps=48, clip_range=0.2)
    constant.iterate()
    assert constant._schedule().surrogate.low == 0.2


def updates_of(made, monkeypatch) -> list[tuple[int, int]]:
    """A list that gets the steps of each update, and the number by which its loss is normalised."""
    counted, update = [], made._update
    monkeypatch.setattr(made, "_update", lambda algorithm, part, totals, *more: counted.append((len(part.action), totals.tokens))
                        or update(algorithm, part, totals, *more))  # fmt: skip
    return counted


def test_a_minibatch_is_normalised_by_its_own_steps(monkeypatch):
    """Of 48 steps in two minibatches each loss is the mean of its 24; divided by the rollout's it and its gradient are half."""
    made = method("ppo", n_steps=16, batch_size=24, max_grad_norm=0.0)
    counted = updates_of(made, monkeypatch)
    made.iterate()
    assert counted == [(24, 24)] * 2


def test_the_penalty_of_ppo_follows_the_kl_after_the_last_pass(monkeypatch):
    told, collected = [], []
    monkeypatch.setattr(policy_gradient, "adapt", lambda penalty, state, kl: told.append(kl) or dict(state))
    made = method("ppo_penalty", n_steps=16, batch_size=0, learning_rate=0.01, n_epochs=2)
    collect = made.collector.steps

    def log_probs(rollout) -> torch.Tensor:
        seen = as_tensors(rollout, True)
        return made._evaluate(made.network.record(seen.observation).output, seen.action).logp.detach()

    def collects(act, count):
        rollout = collect(act, count)
        collected.append((rollout, log_probs(rollout)))
        return rollout

    monkeypatch.setattr(made.collector, "steps", collects)
    made.iterate()
    ((rollout, before),) = collected
    moved = log_probs(rollout) - before
    assert told == [pytest.approx(float((moved.exp() - 1 - moved).mean()), rel=1e-3)] and told[0] > 1e-7


def test_steps_of_unlike_rows_are_learned_from_in_closed_form_where_each_counts_by_itself(monkeypatch):
    """Episodes of 2 and 3 steps: one pass over steps takes the closed form, one over whole rows of unlike lengths cannot."""
    by_steps = method("a2c", lambda: Counter((2, 3)), n_steps=5, n_envs=2)
    by_rows = method(replace(control_catalog.A2C, aggregate=sequence_mean), lambda: Counter((2, 3)), n_steps=5, n_envs=2)
    for made, unused in ((by_steps, "record"), (by_rows, "record_closed")):
        with monkeypatch.context() as patch:
            patch.setattr(type(made.network), unused, None)
            assert made.iterate()["grad_norm"] > 0


def test_entropies_are_there_unless_they_are_not_wanted():
    made = method("a2c", n_steps=4, ent_coef=0.01)
    _, seen, recorded, _, _ = prepared_of(made)
    assert made._evaluate(recorded.output, seen.action).entropy.shape == seen.action.shape
    assert made._evaluate(recorded.output, seen.action, entropies=False).entropy is None


@pytest.mark.parametrize("batch_size", [24, 16])
def test_each_minibatch_has_slopes_of_its_own(batch_size):
    """Two or three minibatches in closed form, and by autograd: the same weights."""
    found = []
    for closed in (True, False):
        made = method("ppo", n_steps=16, batch_size=batch_size, n_epochs=2, learning_rate=0.01)
        assert made._differentiable and made.most_steps == 16 * 3
        made._differentiable = closed
        made.iterate(False)
        found.append(made.network.flat.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert method("reinforce", n_steps=0).most_steps == np.inf


@pytest.mark.parametrize("batch_size", [0, 8])
def test_rows_without_an_end_are_cut_into_minibatches_of_steps(batch_size, monkeypatch):
    """Two rows of 16 steps that all go on: two passes of four minibatches of 8 steps, or of one of all."""
    made = method("ppo", lambda: Counter((100,)), n_steps=16, n_envs=2, batch_size=batch_size, n_epochs=2)
    counted = updates_of(made, monkeypatch)
    made.iterate()
    assert [steps for steps, _ in counted] == ([8] * 8 if batch_size else [32] * 2)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("top_entropy", "filters steps by the entropies"),
        ("gdpo", "reads several reward functions"),
        ("distill", "learns only from a teacher"),
        (catalog.GRPO, r"has a KL to a reference policy \(set kl to null\)"),
        ({"preset": "grpo", "correction": "truncated_importance"}, "corrects for a sampler"),
        ({"preset": "grpo", "psi": {"part": "whitened", "psi": "decoupled_group_mean"}}, "several reward functions"),
    ],
)
def test_a_method_that_needs_what_control_has_not_is_refused_before_it_plays(algorithm, said):
    with pytest.raises(UserError, match=f"{said}.*, which control does not support; choose another method"):
        method(algorithm, n_steps=0)


@pytest.mark.parametrize("algorithm", [name for name in catalog.METHODS if name not in ("top_entropy", "gdpo", "distill")])
def test_every_other_preset_of_a_language_model_trains(algorithm):
    made = method(algorithm, Counter, n_steps=0, n_envs=6, n_epochs=1 + (algorithm == "ppo_penalty"))
    made.iterate()
    assert made.timesteps > 0


def test_a_surrogate_of_whole_sequences_gets_them():
    part = {"part": "off_policy_mask", "surrogate": "clip"}
    with pytest.raises(UserError, match="whose surrogate reads single steps"):
        method({"preset": "ppo", "surrogate": part}, n_steps=16, batch_size=8)
    made = method({"preset": "ppo", "surrogate": part}, n_steps=16, n_epochs=2)
    _, seen, _, _, prepared = prepared_of(made)
    assert made._parts(prepared, seen).prepared.batch.mask.shape == seen.shape and seen.shape[1] > 1


def test_an_update_that_was_left_out_says_nothing_of_the_penalty(monkeypatch):
    made = method("ppo_penalty", n_steps=8, n_epochs=2, learning_rate=1e-7)
    monkeypatch.setattr(made, "apply_gradient", lambda gradient, rate: float("nan"))
    made.iterate()
    assert made.state[PENALTY_KEY] == 1.0
    monkeypatch.undo()
    made.iterate()
    assert made.state[PENALTY_KEY] == 0.5, "a policy that hardly moved"
