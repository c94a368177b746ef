"""Learning to act: every update replayed by a slow textbook loop, convergence to exact values, and the cliff."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import gymnasium
import numpy as np
import pytest

import psigrad.tabular as tabular
from psigrad.tabular import MDP, GridWorld, Simulator

LEARNERS = {
    "Q-learning": tabular.q_learning,
    "SARSA": tabular.sarsa,
    "expected SARSA": tabular.expected_sarsa,
    "Double Q-learning": tabular.double_q_learning,
    "Monte Carlo": tabular.monte_carlo_control,
}


def last(learned):
    *_, final = learned
    return final


def small_mdp() -> MDP:
    """Three states, two actions, stochastic, an end by chance: quick to learn exactly."""
    rng = np.random.default_rng(3)
    end = np.full((3, 2), 0.2)
    transitions = rng.dirichlet(np.ones(3), (2, 3)) * 0.8
    return MDP(transitions, rng.normal(size=(3, 2)), 0.9, end=end)


def epsilon_greedy_row(row, epsilon):
    return tabular.epsilon_greedy(np.array([row]), epsilon)[0]


def replay(kind: str, episodes, gamma: float, alpha: float, epsilon: float, n: int = 1) -> np.ndarray:
    """The updates of recorded episodes, after the boxes of Sutton and Barto."""
    q = np.zeros((3, 2))
    for e in episodes:
        steps = len(e.rewards)
        for t in range(steps):
            s, a, after = e.states[t], e.actions[t], e.states[t + 1]
            final = t == steps - 1
            if kind == "SARSA":
                k = t - n + 1
                if k >= 0 and not final:
                    target = sum(gamma**i * e.rewards[k + i] for i in range(n)) + gamma**n * q[after, e.actions[t + 1]]
                    q[e.states[k], e.actions[k]] += alpha * (target - q[e.states[k], e.actions[k]])
                for k in range(max(steps - n, 0), steps) if final else ():
                    target = sum(gamma ** (i - k) * e.rewards[i] for i in range(k, steps))
                    if not e.terminated:
                        target += gamma ** (steps - k) * epsilon_greedy_row(q[after], epsilon) @ q[after]
                    q[e.states[k], e.actions[k]] += alpha * (target - q[e.states[k], e.actions[k]])
            else:
                ahead = q[after].max() if kind == "Q-learning" else epsilon_greedy_row(q[after], epsilon) @ q[after]
                target = e.rewards[t] + (0 if final and e.terminated else gamma * ahead)
                q[s, a] += alpha * (target - q[s, a])
    return q


@pytest.mark.parametrize(("kind", "n"), [("Q-learning", 1), ("expected SARSA", 1), ("SARSA", 1), ("SARSA", 2), ("SARSA", 5)])
def test_every_update_is_the_textbooks(kind, n):
    options = {"n": n} if kind == "SARSA" else {}
    learned = list(LEARNERS[kind](small_mdp(), 60, alpha=0.3, epsilon=0.25, seed=4, max_steps=4, **options))
    episodes = [one.episode for one in learned]
    assert {e.terminated for e in episodes} == {True, False}  # both kinds of ending are met
    np.testing.assert_allclose(learned[-1].q, replay(kind, episodes, 0.9, 0.3, 0.25, n), atol=1e-12)
    other = replay("expected SARSA" if kind != "expected SARSA" else "Q-learning", episodes, 0.9, 0.3, 0.25)
    assert np.abs(learned[-1].q - other).max() > 1e-2  # control: another rule gives other numbers


def test_monte_carlo_control_is_the_mean_of_first_returns():
    learned = list(tabular.monte_carlo_control(small_mdp(), 80, epsilon=0.5, seed=1))
    returns = {}
    for one in learned:
        e, first = one.episode, {}
        for t in range(len(e.rewards)):
            first.setdefault((e.states[t], e.actions[t]), tabular.discounted_return(e.rewards[t:], 0.9))
        for pair, total in first.items():
            returns.setdefault(pair, []).append(total)
    for (s, a), totals in returns.items():
        assert learned[-1].q[s, a] == pytest.approx(np.mean(totals))


def test_without_exploration_expected_sarsa_is_q_learning():
    runs = [list(f(small_mdp(), 50, alpha=0.3, epsilon=0.0, seed=2)) for f in (tabular.expected_sarsa, tabular.q_learning)]
    np.testing.assert_array_equal(runs[0][-1].q, runs[1][-1].q)


def test_off_policy_learns_the_best_and_on_policy_its_own_values():
    mdp = small_mdp()
    best = tabular.solve(mdp).q
    slow_down = tabular.inverse_visits(0.85)
    for name in ("Q-learning", "Double Q-learning"):
        final = last(LEARNERS[name](mdp, 12_000, alpha=slow_down, epsilon=0.5, seed=0))
        np.testing.assert_allclose(final.q, best, atol=0.06, err_msg=name)
    for name in ("SARSA", "expected SARSA", "Monte Carlo"):
        options = {} if name == "Monte Carlo" else {"alpha": slow_down}
        final = last(LEARNERS[name](mdp, 12_000, epsilon=0.5, seed=0, **options))
        own = tabular.q_values(mdp, tabular.evaluate(mdp, tabular.epsilon_greedy(final.q, 0.5)))
        np.testing.assert_allclose(final.q, own, atol=0.08, err_msg=name)
        assert np.abs(final.q - best).max() > 0.15, name  # control: these are not the values of the best policy


def path_of(mdp: MDP, policy: np.ndarray, steps: int = 60) -> list[int]:
    simulator = Simulator(mdp, max_steps=steps)
    state, _ = simulator.reset()
    path, done = [state], False
    while not done:
        state, _, terminated, truncated, _ = simulator.step(int(policy[state]))
        path.append(state)
        done = terminated or truncated
    return path


def test_sarsa_walks_the_safe_path_and_q_learning_the_edge_of_the_cliff():
    mdp = tabular.cliff_walking()
    returns = {}
    for name in ("SARSA", "Q-learning"):
        runs = [list(LEARNERS[name](mdp, 500, alpha=0.5, epsilon=0.1, seed=seed)) for seed in range(5)]
        returns[name] = np.mean([one.undiscounted_return for run in runs for one in run[-100:]])
        settled = [last(LEARNERS[name](mdp, 3000, alpha=0.05, epsilon=0.1, seed=seed)) for seed in range(3)]
        paths = [path_of(mdp, final.policy) for final in settled]
        edge = np.mean([sum(s // 12 == 2 for s in p) for p in paths])
        if name == "Q-learning":
            assert all(len(p) == 14 for p in paths) and edge == 12  # thirteen steps, all along the cliff
        else:
            assert all(p[-1] == 47 for p in paths) and edge < 6
    # Sutton and Barto, example 6.6: SARSA earns about −25 while it learns, Q-learning about −50
    assert returns["SARSA"] > -35 and returns["Q-learning"] < -40


def test_double_q_learning_is_not_drawn_to_noise():
    # Sutton and Barto, example 6.7: left from A leads to B, where ten actions pay N(−0.1, 1); right ends with 0
    transitions = np.zeros((10, 3, 3))
    transitions[0, 0, 1] = 1.0
    transitions[1:, 0, 2] = 1.0
    transitions[:, 1, 2] = 1.0

    class Noisy(Simulator):
        noise = np.random.default_rng(0)

        def step(self, action):
            at_b = self._state == 1
            state, reward, *rest = super().step(action)
            return state, float(self.noise.normal(-0.1, 1)) if at_b else reward, *rest

    ends = np.array([False, False, True])
    mdp = MDP(transitions, np.zeros((3, 10)), 1.0, terminal=ends, start=np.array([1.0, 0, 0]))
    share = {}
    for name in ("Q-learning", "Double Q-learning"):
        lefts = [
            one.episode.actions[0] == 0
            for seed in range(60)
            for one in islice(LEARNERS[name](Noisy(mdp), 100, alpha=0.1, epsilon=0.1, seed=seed), 10, 60)
        ]
        share[name] = np.mean(lefts)
    assert share["Q-learning"] > share["Double Q-learning"] + 0.05


@pytest.mark.parametrize("name", ["Q-learning", "SARSA", "expected SARSA", "Double Q-learning"])
def test_gymnasium_environments_are_learned(name):
    env = gymnasium.make("CliffWalking-v1", max_episode_steps=500)
    final = last(LEARNERS[name](env, 400, gamma=1.0, alpha=0.5, epsilon=tabular.linear(0.3, 0.0, 300), seed=0))
    episode = next(tabular.rollouts(env, final.policy, 1, seed=0))
    assert episode.terminated and episode.rewards.sum() >= -17


def test_frozen_lake_is_learned_to_the_interval_of_the_best():
    env = gymnasium.make("FrozenLake-v1")
    best = tabular.solve(tabular.from_gymnasium(env, 0.99))
    learned = tabular.q_learning(
        env, 8000, gamma=0.99, alpha=tabular.inverse_visits(0.6), epsilon=tabular.linear(1.0, 0.1, 6000), seed=1
    )
    policy = last(learned).policy
    value = tabular.evaluate(tabular.from_gymnasium(env, 0.99), policy)[0]
    assert value > 0.95 * best.value[0]
    assert tabular.evaluate(tabular.from_gymnasium(env, 0.99), np.zeros(16, int))[0] < 0.1  # control


def test_truncation_is_not_termination():
    # a clock that pays 1 for ever, cut off after 3 steps: Q = 1/(1 − γ) = 5
    forever = MDP(np.ones((2, 1, 1)), np.ones((1, 2)), 0.8)
    for name, learner in LEARNERS.items():
        options = {} if name == "Monte Carlo" else {"alpha": 0.2}
        final = last(learner(forever, 3000, epsilon=0.5, seed=0, max_steps=3, **(options | ({"alpha": 0.2}))))
        np.testing.assert_allclose(final.q, 5, atol=1e-2, err_msg=name)

    class Ending(Simulator):
        def step(self, action):
            state, reward, terminated, truncated, info = super().step(action)
            return state, reward, terminated or truncated, False, info

    final = last(tabular.q_learning(Ending(forever, max_steps=3), 3000, alpha=0.2, epsilon=0.5, seed=0))
    assert final.q.max() < 4.5  # control: taken for an end, the same clock is worth less


def test_seeds_decide_everything_and_nothing_yielded_changes():
    for learner in LEARNERS.values():
        one, two, other = (list(learner(GridWorld().mdp(), 15, seed=seed, max_steps=200)) for seed in (1, 1, 2))
        assert all((a.q == b.q).all() and (a.episode.states == b.episode.states).all() for a, b in zip(one, two, strict=True))
        assert any(a.episode.states.tolist() != b.episode.states.tolist() for a, b in zip(one, other, strict=True))
        assert [a.index for a in one] == list(range(15))
        assert (one[0].q != one[-1].q).any()


def test_schedules():
    assert [tabular.linear(1.0, 0.2, 4)(k) for k in (0, 1, 4, 9)] == pytest.approx([1.0, 0.8, 0.2, 0.2])
    assert [tabular.exponential(1.0, 0.1, 0.5)(k) for k in (0, 1, 9)] == [1.0, 0.5, 0.1]
    assert [tabular.inverse_visits()(n) for n in (1, 2, 4)] == [1, 0.5, 0.25]
    learned = list(tabular.q_learning(small_mdp(), 5, epsilon=tabular.linear(1.0, 0.0, 4)))
    assert [one.epsilon for one in learned] == [1, 0.75, 0.5, 0.25, 0]


def test_learning_goes_on_from_a_given_q():
    first = last(tabular.q_learning(small_mdp(), 200, alpha=0.1, seed=0))
    warm = next(tabular.q_learning(small_mdp(), 1, alpha=0.0, seed=0, q=first.q))
    np.testing.assert_array_equal(warm.q, first.q)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: last(tabular.q_learning(gymnasium.make("CliffWalking-v1"), 1)), "gamma was not given"),
        (lambda: last(tabular.q_learning(gymnasium.make("CartPole-v1"), 1, gamma=0.9)), "no discrete observation_space"),
        (lambda: last(tabular.sarsa(small_mdp(), 1, n=0)), "n is 0"),
        (lambda: last(tabular.sarsa(small_mdp(), 1, epsilon=1.5)), "epsilon is 1.5 at count 0"),
        (lambda: last(tabular.sarsa(small_mdp(), 1, alpha=-1)), "alpha is -1"),
        (lambda: last(tabular.sarsa(small_mdp(), 1, gamma=2)), "gamma is 2"),
        (lambda: last(tabular.sarsa(small_mdp(), 1, q=[1, 2])), r"expected \(3, 2\)"),
        (lambda: tabular.from_gymnasium(gymnasium.make("CartPole-v1"), 0.9), "has no model"),
        (lambda: tabular.from_gymnasium("FrozenLake-v1", 0.9), r"gymnasium\.make\('FrozenLake-v1'\)"),
        (lambda: tabular.q_learning("FrozenLake-v1", 1, gamma=0.9), r"gymnasium\.make\('FrozenLake-v1'\)"),
        (lambda: tabular.from_outcomes([[[(1, 0)]]], 0.9), r"State 0, action 0 has the outcome \(1, 0\)"),
        (lambda: next(tabular.rollouts(tabular.UnboundedGrid(), [0], 1, seed=0)), "no discrete observation_space"),
        (lambda: next(tabular.rollouts(gymnasium.make("FrozenLake-v1"), [0], 1, seed=0)), "expected 16 action numbers"),
        (lambda: tabular.from_outcomes([[[(1, 0, 0, True)]], []], 0.9), "State 1 has 0 actions"),
    ],
)
def test_a_mistake_is_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        make()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_equal_outcomes_of_a_model_add_up():
    table = [[[(0.25, 1, 4.0, False), (0.25, 1, 0.0, False), (0.5, 0, 0.0, False)]], [[(1.0, 1, 1.0, True)]]]
    mdp = tabular.from_outcomes(table, 0.5)
    np.testing.assert_array_equal(mdp.transitions, [[0.5, 0.5], [0, 0]])
    assert mdp.rewards[0, 0] == 1 and mdp.rewards_next[0, 1] == 2
    assert mdp.end[1, 0] == 1 and mdp.rewards_end[1, 0] == 1
    np.testing.assert_allclose(tabular.solve(mdp).value, [(1 + 0.25) / 0.75, 1])


def test_an_mdp_whose_episodes_never_end_is_refused_unless_they_are_cut_off():
    robot = MDP([[[0.9, 0.1], [0.6, 0.4]], [[1, 0], [1, 0]]], [[2, 1], [3, 0]], 0.9)
    walled_off = GridWorld.from_text("S.#+").mdp()
    for mdp, policy in ((robot, [0, 0]), (walled_off, [1, 1, 1, 1])):
        with pytest.raises(ValueError, match=r"No episode of this MDP can end.*max_steps"):
            tabular.q_learning(mdp, 1)
        with pytest.raises(ValueError, match=r"No episode of this MDP can end.*max_steps"):
            next(tabular.rollouts(mdp, policy, 1, seed=0))
        (lesson,) = tabular.q_learning(mdp, 1, max_steps=5)
        assert len(lesson.episode.rewards) == 5 and not lesson.episode.terminated
    through_end = replace(robot, transitions=robot.transitions * 0.9, end=np.full((2, 2), 0.1))
    assert [lesson.episode.terminated for lesson in tabular.q_learning(through_end, 2)] == [True, True]


@pytest.mark.parametrize(
    ("coins", "value"), [((0.1, 0.9, 0.1, 0.1), 0.5), ((0.1, 0.9, 0.9, 0.9), 0.0), ((0.1, 0.1, 0.1, 0.9), 0.0)]
)
def test_double_q_bootstraps_from_the_other_table(coins, value, monkeypatch):
    """s0 → s1 → end, which pays 1, with α = γ = 1. The first episode's second coin says which table learns q(s1) = 1, the second
    episode's first coin which learns q(s0): it is 1 in that one, and 1/2 in the mean, only where the two coins differ.
    """
    from psigrad.tabular import td_control

    thrown = iter(coins)
    monkeypatch.setattr(td_control, "uniforms", lambda rng: lambda: next(thrown))
    transitions = np.zeros((1, 3, 3))
    transitions[0, [0, 1, 2], [1, 2, 2]] = 1.0
    rewards, terminal, start = np.array([[0.0], [1.0], [0.0]]), np.array([False, False, True]), np.array([1.0, 0.0, 0.0])
    mdp = MDP(transitions, rewards, gamma=1.0, terminal=terminal, start=start)
    *_, learned = tabular.double_q_learning(mdp, 2, alpha=1.0, epsilon=0.0)
    assert learned.q[0, 0] == value


def test_a_step_that_ends_at_the_limit_is_terminated_and_not_cut():
    transitions = np.zeros((1, 2, 2))
    transitions[0, :, 1] = 1.0
    rewards, terminal, start = np.array([[1.0], [0.0]]), np.array([False, True]), np.array([1.0, 0.0])
    simulator = Simulator(MDP(transitions, rewards, gamma=1.0, terminal=terminal, start=start), max_steps=1)
    simulator.reset(seed=0)
    assert simulator.step(0) == (1, 1.0, True, False, {})
