"""Solvers against published values, pymdptoolbox, linear programs, and each other."""

from __future__ import annotations

from itertools import islice

import gymnasium
import mdptoolbox.example
import mdptoolbox.mdp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import linprog

import psigrad.tabular as tabular
from psigrad.tabular import MDP, GridWorld

TWO = np.array([[[0.5, 0.5], [0.0, 1.0]], [[0.0, 1.0], [0.5, 0.5]]])


def linear_program(mdp: MDP) -> np.ndarray:
    """V* as the least V with V >= R(·, a) + γ·P_a·V for every a."""
    rows = np.tile(np.eye(mdp.n_states), (mdp.n_actions, 1))
    stacked = mdp.transitions.toarray() if mdp.is_sparse else mdp.transitions
    found = linprog(
        np.ones(mdp.n_states),
        A_ub=mdp.gamma * stacked - rows,
        b_ub=-mdp.rewards.T.ravel(),
        bounds=(None, None),
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert found.status == 0
    return found.x


def dropped(mdp: MDP) -> float:
    """By how much the linear program's V may be off because HiGHS takes coefficients below 1e-9 for 0."""
    stacked = mdp.gamma * (mdp.transitions.toarray() if mdp.is_sparse else mdp.transitions)
    return float(np.where(stacked < 1e-9, stacked, 0).sum(1).max() * np.abs(tabular.solve(mdp).value).max() / (1 - mdp.gamma))


MOST_DISCOUNTS = st.floats(0, 0.95)


@st.composite
def mdps(draw, gammas=MOST_DISCOUNTS):
    """Random MDPs, dense or sparse, with and without terminal states and ending steps."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_states, n_actions = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    transitions = rng.dirichlet(np.full(n_states, draw(st.sampled_from([0.05, 1.0]))), size=(n_actions, n_states))
    end = rng.random((n_states, n_actions)) * rng.integers(0, 2, (n_states, n_actions)) if draw(st.booleans()) else None
    if end is not None:
        transitions *= (1 - end.T)[:, :, None]
    terminal = rng.random(n_states) < 0.2 if draw(st.booleans()) else None
    form = [sparse.csr_array(p) for p in transitions] if draw(st.booleans()) else transitions
    return MDP(form, rng.normal(size=(n_states, n_actions)), draw(gammas), terminal=terminal, end=end)


def last(sweeps):
    *_, sweep = sweeps
    return sweep


SWEEPING = {
    "value iteration": lambda mdp, **k: tabular.value_iteration(mdp, **k),
    "in place": lambda mdp, **k: tabular.value_iteration(mdp, in_place=True, **k),
    "backwards": lambda mdp, **k: tabular.value_iteration(mdp, in_place=True, order=range(mdp.n_states)[::-1], **k),
    "modified": lambda mdp, **k: tabular.modified_policy_iteration(mdp, sweeps=5, **k),
    "prioritised": lambda mdp, **k: tabular.prioritised_sweeping(mdp, **k),
}


@pytest.mark.parametrize(("gamma", "expected"), [(0.9, (26.244, 29.484, 33.484)), (0.96, (74.6496, 78.1056, 82.1056))])
def test_the_forest_has_pymdptoolbox_policy_iteration_values(gamma, expected):
    solution = tabular.solve(tabular.forest(gamma=gamma))
    np.testing.assert_allclose(solution.value, expected, rtol=0, atol=1e-9)
    peer = mdptoolbox.mdp.PolicyIteration(*mdptoolbox.example.forest(), gamma)
    peer.run()
    np.testing.assert_allclose(solution.value, peer.V, rtol=0, atol=1e-9)
    assert tuple(solution.policy) == peer.policy
    # its value iteration stops on the span: same policy, values far off (the trap in its documentation)
    other = mdptoolbox.mdp.ValueIteration(*mdptoolbox.example.forest(), gamma)
    other.run()
    assert other.policy == tuple(solution.policy) and abs(other.V[0] - expected[0]) > 20


def test_random_mdps_agree_with_pymdptoolbox_policy_iteration():
    for seed in range(5):
        np.random.seed(seed)
        transitions, rewards = mdptoolbox.example.rand(12, 4)
        peer = mdptoolbox.mdp.PolicyIteration(transitions, rewards, 0.9, eval_type=0)
        peer.run()
        solution = tabular.solve(MDP(transitions, rewards, 0.9))
        np.testing.assert_allclose(solution.value, peer.V, rtol=0, atol=1e-9)
        assert tuple(solution.policy) == peer.policy


def test_quantecons_two_states():
    # its R has −inf for the action that state 1 lacks; any large cost does the same
    mdp = MDP.from_state_first(TWO.swapaxes(0, 1), [[5, 10], [-1, -1e4]], 0.95)
    solution = tabular.solve(mdp)
    np.testing.assert_allclose(solution.value, [-8.57142857142857, -20], rtol=0, atol=1e-9)
    assert solution.policy.tolist() == [0, 0]


def test_sutton_barto_4x4_random_policy_and_optimum():
    mdp = tabular.shortest_path_4x4()
    random = [[0, -14, -20, -22], [-14, -18, -20, -20], [-20, -20, -18, -14], [-22, -20, -14, 0]]
    policy = tabular.uniform_policy(mdp)
    np.testing.assert_allclose(tabular.evaluate(mdp, policy).reshape(4, 4), random, rtol=0, atol=1e-9)
    for in_place in (False, True):
        sweep = last(tabular.policy_evaluation(mdp, policy, in_place=in_place, epsilon=1e-10))
        np.testing.assert_allclose(sweep.value.reshape(4, 4), random, rtol=0, atol=1e-10)
        assert sweep.error_bound <= 1e-10
    # figure 4.1: after one, two and three sweeps the cell beside the corner holds −1, −1.75 (printed −1.7), −2.4375 (−2.4)
    shown = [s.value[1] for s in islice(tabular.policy_evaluation(mdp, policy), 3)]
    assert shown == [-1, -1.75, -2.4375]
    best = [[0, -1, -2, -3], [-1, -2, -3, -2], [-2, -3, -2, -1], [-3, -2, -1, 0]]
    np.testing.assert_array_equal(tabular.solve(mdp).value.reshape(4, 4), best)


def test_sutton_barto_5x5_random_policy_and_optimum():
    mdp = tabular.teleport_5x5()
    random = tabular.evaluate(mdp, tabular.uniform_policy(mdp)).reshape(5, 5)
    np.testing.assert_array_equal(random[0].round(1), [3.3, 8.8, 4.4, 5.3, 1.5])
    np.testing.assert_array_equal(random[4].round(1), [-1.9, -1.3, -1.2, -1.4, -2.0])
    best = [
        [22.0, 24.4, 22.0, 19.4, 17.5],
        [19.8, 22.0, 19.8, 17.8, 16.0],
        [17.8, 19.8, 17.8, 16.0, 14.4],
        [16.0, 17.8, 16.0, 14.4, 13.0],
        [14.4, 16.0, 14.4, 13.0, 11.7],
    ]
    np.testing.assert_array_equal(tabular.solve(mdp).value.reshape(5, 5).round(1), best)
    # V(A) = 10 + γ^5·V(A) + 0, so 10/(1 − 0.9^5)
    np.testing.assert_allclose(tabular.solve(mdp).value[1], 10 / (1 - 0.9**5), atol=1e-9)


def test_cliff_wind_and_walk():
    assert tabular.solve(tabular.cliff_walking()).value[36] == -13
    assert tabular.solve(tabular.windy_gridworld()).value[30] == -15
    for n, left, right in ((5, 0.0, 1.0), (19, -1.0, 1.0)):
        walk = tabular.random_walk(n, left=left, right=right)
        true = left + (right - left) * np.arange(1, n + 1) / (n + 1)
        np.testing.assert_allclose(tabular.evaluate(walk, np.zeros(n + 2, int))[1:-1], true, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("FrozenLake-v1", {0.9: 0.068891, 0.95: 0.180472, 0.99: 0.542026, 0.999: 0.785533, 1.0: 14 / 17}),
        ("FrozenLake8x8-v1", {0.9: 0.006411, 0.95: 0.048250, 0.99: 0.414640, 0.999: 0.892635, 1.0: 1.0}),
    ],
)
def test_frozen_lake_against_known_values_and_a_linear_program(name, values):
    env = gymnasium.make(name)
    for gamma, known in values.items():
        mdp = tabular.from_gymnasium(env, gamma)
        solution = tabular.solve(mdp)
        assert abs(solution.value[0] - known) < 6e-7
        assert solution.error_bound < 1e-9
        if gamma < 1:
            np.testing.assert_allclose(solution.value, linear_program(mdp), rtol=0, atol=1e-9)
            np.testing.assert_allclose(last(tabular.value_iteration(mdp, epsilon=1e-10)).value, solution.value, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "steps", "best"),
    [("FrozenLake-v1", 100, 0.7442), pytest.param("FrozenLake8x8-v1", 200, 0.9132, marks=pytest.mark.slow)],
)
def test_frozen_lake_policies_succeed_as_often_as_the_time_limit_allows(name, steps, best):
    env = gymnasium.make(name)
    mdp = tabular.from_gymnasium(env, 1.0)
    bound = next(islice(tabular.value_iteration(mdp, epsilon=0), steps - 1, None)).value[0]
    assert abs(bound - best) < 5e-5
    # a discount makes haste, as the limit asks: at γ = 1 the best policy of 8×8 succeeds always, and mostly too late
    policy = tabular.solve(tabular.from_gymnasium(env, 0.995)).policy
    exact = next(islice(tabular.policy_evaluation(mdp, policy, epsilon=0), steps - 1, None)).value[0]
    assert exact <= bound + 1e-12
    n = 1500
    rate = np.mean([e.rewards.sum() for e in tabular.rollouts(env, policy, n, seed=1)])
    half = 2.58 * np.sqrt(exact * (1 - exact) / n)
    assert abs(rate - exact) < half
    assert abs(rate - bound) < half + 0.01
    # the best policy of all knows the time: sweep k holds the best move with k steps left
    plan = [s.policy for s in islice(tabular.value_iteration(mdp, epsilon=0), steps - 1)]
    plan = [tabular.solve(mdp).policy * 0, *plan][::-1]
    wins = 0
    simulator = tabular.Simulator(mdp, max_steps=steps, seed=3)
    for _ in range(n):
        state, _ = simulator.reset()
        for k in range(steps):
            state, reward, terminated, truncated, _ = simulator.step(int(plan[k][state]))
            wins += reward
            if terminated or truncated:
                break
    assert abs(wins / n - best) < 2.58 * np.sqrt(best * (1 - best) / n)
    blind = np.mean([e.rewards.sum() for e in tabular.rollouts(env, tabular.uniform_policy(mdp), 500, seed=1)])
    assert blind < best - 0.5  # control: chance is far outside


def test_taxi_ends_by_a_step_into_a_state_that_goes_on():
    mdp = tabular.from_gymnasium(gymnasium.make("Taxi-v4"), 1.0)
    assert mdp.end is not None and not mdp.terminal.any()
    value = tabular.solve(mdp).value
    # Gymnasium's registry puts the optimum at 8.46 with its own start states; the best return from a state lies in 3 … 20
    assert value.max() == 20 and value.min() >= 3
    lengths = [20 - v + 1 for v in value]
    assert all(abs(n - round(n)) < 1e-9 for n in lengths)
    episodes = list(tabular.rollouts(gymnasium.make("Taxi-v4"), tabular.solve(mdp).policy, 50, seed=0))
    for episode in episodes:
        assert episode.terminated and abs(episode.rewards.sum() - value[episode.states[0]]) < 1e-9


@given(mdps())
@settings(max_examples=60, deadline=None)
def test_all_solvers_agree_and_satisfy_the_bellman_equation(mdp):
    exact = tabular.solve(mdp)
    assert tabular.bellman_residual(mdp, exact.value) < 1e-10
    np.testing.assert_allclose(exact.value, linear_program(mdp), rtol=0, atol=1e-7 + dropped(mdp))
    for name, solver in SWEEPING.items():
        np.testing.assert_allclose(last(solver(mdp, epsilon=1e-10)).value, exact.value, rtol=0, atol=1e-9, err_msg=name)
    for method in ("value_iteration", "modified_policy_iteration"):
        solution = tabular.solve(mdp, method=method, epsilon=1e-10)
        np.testing.assert_allclose(solution.value, exact.value, rtol=0, atol=1e-9)
        assert tabular.evaluate(mdp, solution.policy) == pytest.approx(exact.value, abs=1e-9)
    slow = last(tabular.policy_iteration(mdp, exact=False, epsilon=1e-11))
    np.testing.assert_allclose(slow.value, exact.value, rtol=0, atol=1e-9)


@given(mdps(st.floats(0.3, 0.99)))
@settings(max_examples=40, deadline=None)
def test_the_error_bound_holds_after_every_sweep(mdp):
    exact = tabular.solve(mdp).value
    alive = ~mdp.is_terminal
    for name, solver in SWEEPING.items():
        for sweep in islice(solver(mdp), 40):
            if sweep.step == "back up":
                missing = (exact - sweep.value)[alive]
                assert (missing >= sweep.low - 1e-11).all() and (missing <= sweep.high + 1e-11).all(), name
    policy = tabular.uniform_policy(mdp)
    value = tabular.evaluate(mdp, policy)
    for in_place in (False, True):
        for sweep in islice(tabular.policy_evaluation(mdp, policy, in_place=in_place), 40):
            assert np.abs(sweep.value - value).max() <= sweep.error_bound + 1e-11
    for sweep in tabular.policy_iteration(mdp):
        if sweep.step == "improve":
            assert np.abs(sweep.value - exact).max() <= sweep.error_bound + 1e-11


def test_negative_control_the_residual_alone_is_no_bound():
    mdp = tabular.forest(gamma=0.96)
    exact = tabular.solve(mdp).value
    sweep = next(islice(tabular.value_iteration(mdp, in_place=True), 20, None))
    assert np.abs(sweep.value - exact).max() > sweep.residual
    assert np.abs(sweep.value - exact).max() <= sweep.error_bound


@given(mdps())
@settings(max_examples=40, deadline=None)
def test_backups_contract_and_policies_improve_monotonically(mdp):
    rng = np.random.default_rng(0)
    u, v = (np.where(mdp.is_terminal, 0, rng.normal(size=mdp.n_states)) for _ in range(2))
    gap = np.abs(tabular.q_values(mdp, u).max(1) - tabular.q_values(mdp, v).max(1)).max()
    assert gap <= mdp.gamma * np.abs(u - v).max() + 1e-12
    before = None
    for sweep in tabular.policy_iteration(mdp):
        if sweep.step == "evaluate":
            assert before is None or (sweep.value >= before - 1e-11).all()
            before = sweep.value


def test_every_sweep_is_yielded_and_none_changes_afterwards():
    mdp = GridWorld().mdp()
    for solver in SWEEPING.values():
        sweeps = list(solver(mdp))
        copies = [s.value.copy() for s in solver(mdp)]
        assert all((s.value == c).all() for s, c in zip(sweeps, copies, strict=True))
        assert [s.iteration for s in sweeps] == list(range(1, len(sweeps) + 1))


def test_the_bounds_of_evaluation_sweeps_are_those_of_the_last_change():
    """One state that pays 1 for ever, γ = ½: V = 1, 1.5, 1.75 … of 2. After a change of c there is c to gain, exactly."""
    mdp = MDP(np.ones((1, 1, 1)), np.ones((1, 1)), 0.5)
    sweeps = tabular.modified_policy_iteration(mdp, sweeps=1)
    for kind, value in (("back up", 1.0), ("evaluate", 1.5), ("back up", 1.75), ("evaluate", 1.875)):
        sweep = next(sweeps)
        assert (sweep.step, float(sweep.value[0])) == (kind, value)
        assert value + sweep.low == pytest.approx(2.0, abs=1e-9)


def test_an_in_place_sweep_is_the_textbook_loop():
    mdp = GridWorld(slip=0.2).mdp()
    value = np.zeros(64)
    table = mdp.transitions.reshape(4, 64, 64)
    for sweep in islice(tabular.value_iteration(mdp, in_place=True), 3):
        for s in range(64):
            value[s] = max(mdp.rewards[s, a] + 0.9 * table[a, s] @ value for a in range(4))
        np.testing.assert_allclose(sweep.value, value, atol=1e-14)
    synchronous = next(islice(tabular.value_iteration(mdp), 2, None)).value
    assert np.abs(synchronous - value).max() > 0.1  # control: the two differ


def test_a_warm_start_needs_fewer_sweeps_and_finds_the_same():
    grid = GridWorld(slip=0.2, gamma=0.99)
    old = tabular.solve(grid.mdp())
    moved = grid.moved((3, 4), (5, 2)).mdp()
    for solver in SWEEPING.values():
        cold, warm = list(solver(moved)), list(solver(moved, value=old.value))
        assert len(warm) <= len(cold)
        np.testing.assert_allclose(cold[-1].value, warm[-1].value, atol=2e-8)
    exact = tabular.solve(moved, value=old.value)
    np.testing.assert_allclose(exact.value, tabular.solve(moved).value, atol=1e-10)
    assert exact.iterations < tabular.solve(moved).iterations


def test_a_state_of_all_policies_is_solved_by_enumeration():
    rng = np.random.default_rng(7)
    mdp = MDP(rng.dirichlet(np.ones(3), (2, 3)), rng.normal(size=(3, 2)), 0.9)
    every = [tabular.evaluate(mdp, [a, b, c]) for a in range(2) for b in range(2) for c in range(2)]
    np.testing.assert_allclose(tabular.solve(mdp).value, np.max(every, axis=0), atol=1e-12)


# γ = 1: what makes a sum without discount finite


def corridor(step_reward: float, goal: float, gamma: float = 1.0) -> MDP:
    """Cells 0 1 2, cell 2 final; actions left and right."""
    return GridWorld(1, 3, {(0, 2): goal}, step_reward=step_reward, gamma=gamma).mdp()


def test_without_discount_a_policy_that_never_ends_is_worth_nothing_or_refused():
    left = np.full(3, 3)
    np.testing.assert_array_equal(tabular.evaluate(corridor(0.0, 1.0), left), 0)
    with pytest.raises(ValueError, match="gamma is 1 and under this policy state 0 never ends"):
        tabular.evaluate(corridor(-0.1, 1.0), left)
    assert np.isinf(tabular.expected_steps(corridor(0.0, 1.0), left)).tolist() == [True, True, False]
    with pytest.raises(ValueError, match="visits are not finite"):
        tabular.occupancy(corridor(0.0, 1.0), left)


def test_without_discount_the_optimum_may_be_to_stay_away():
    # a costly end and free steps: staying for ever is worth 0, and only a wrong fixpoint of V = TV says −1
    mdp = corridor(0.0, -1.0)
    solution = tabular.solve(mdp)
    np.testing.assert_array_equal(solution.value, 0)
    assert tabular.bellman_residual(mdp, np.array([-1.0, -1.0, 0.0])) == 0  # control: it is a fixpoint too
    np.testing.assert_array_equal(last(tabular.value_iteration(mdp)).value, 0)
    # with a cost per step it is best to go through with it
    np.testing.assert_allclose(tabular.solve(corridor(-0.25, -1.0)).value, [-1.5, -1.25, 0])


def walked(targets: np.ndarray, rewards: np.ndarray, policy: tuple[int, ...], state: int) -> float:
    """The undiscounted return of a deterministic policy by walking: −inf for a costly loop, nan for a loop that may pay."""
    total, seen = 0.0, {}
    while state != 3:
        if state in seen:
            steps = rewards[list(seen)[list(seen).index(state) :], [policy[s] for s in list(seen)[list(seen).index(state) :]]]
            return total if (steps == 0).all() else -np.inf if steps.sum() < 0 else np.nan
        seen[state] = total
        total += rewards[state, policy[state]]
        state = targets[state, policy[state]]
    return total


def test_without_discount_the_solution_is_that_of_walking_every_policy():
    rng = np.random.default_rng(11)
    solved = refused = endless = 0
    for _ in range(400):
        targets, rewards = rng.integers(0, 4, (3, 2)), rng.integers(-2, 2, (3, 2)).astype(float)
        every = np.array([[walked(targets, rewards, p, s) for s in range(3)] for p in np.ndindex(2, 2, 2)])
        transitions = np.zeros((2, 4, 4))
        transitions[np.arange(2)[None], np.arange(3)[:, None], targets] = 1.0
        table = np.vstack([rewards, [0, 0]])
        if np.isnan(every).any():
            endless += 1
            continue
        best = every.max(axis=0)
        if np.isinf(best).any():
            with pytest.raises(ValueError, match="no terminal state can be reached"):
                MDP(transitions, table, 1.0, terminal=np.arange(4) == 3)
            refused += 1
            continue
        solution = tabular.solve(MDP(transitions, table, 1.0, terminal=np.arange(4) == 3))
        np.testing.assert_allclose(solution.value[:3], best, atol=1e-12)
        assert [walked(targets, rewards, tuple(solution.policy[:3]), s) for s in range(3)] == best.tolist()
        solved += 1
    assert solved > 100 and refused > 20 and endless > 20


def test_a_loop_that_pays_for_ever_is_refused_without_discount():
    mdp = GridWorld(1, 3, {(0, 2): 1.0}, step_reward=0.1, gamma=1.0).mdp()
    with pytest.raises(ValueError, match="rewarded for ever"):
        tabular.solve(mdp)


def test_without_discount_solve_takes_policy_iteration_only():
    with pytest.raises(ValueError, match="gamma is 1, where method 'value_iteration'"):
        tabular.solve(corridor(0.0, 1.0), method="value_iteration")


def test_the_limit_of_discounts_is_the_undiscounted_value():
    for name in ("FrozenLake-v1", "CliffWalking-v1"):
        env = gymnasium.make(name)
        near, at_one = (tabular.solve(tabular.from_gymnasium(env, g), epsilon=1e-4).value for g in (1 - 1e-7, 1.0))
        np.testing.assert_allclose(near, at_one, atol=2e-4)


def test_what_float64_cannot_prove_is_said():
    mdp = tabular.forest(gamma=0.999)
    with pytest.raises(ValueError, match="float64 can only prove a bound of"):
        last(tabular.value_iteration(mdp, epsilon=1e-13))
    with pytest.raises(ValueError, match="float64 can only prove a bound of"):
        tabular.solve(mdp, epsilon=1e-16)
    with pytest.raises(ValueError, match="epsilon is -1"):
        next(tabular.value_iteration(mdp, epsilon=-1))
    with pytest.raises(ValueError, match="order needs in_place=True"):
        next(tabular.value_iteration(mdp, order=[0, 1, 2]))
    with pytest.raises(ValueError, match="sweeps is -1"):
        next(tabular.modified_policy_iteration(mdp, sweeps=-1))
    with pytest.raises(ValueError, match="method is 'newton'"):
        tabular.solve(mdp, method="newton")


@pytest.mark.parametrize(("scale", "gamma"), [(100.0, 0.999), (1.0, 0.9999), (1e6, 0.99), (1e-3, 0.9)])
@pytest.mark.parametrize("solver", [None, "value_iteration", "modified_policy_iteration"])
def test_values_of_any_size_are_solved_without_a_word_about_epsilon(scale, gamma, solver):
    rng = np.random.default_rng(0)
    transitions = rng.dirichlet(np.ones(6), size=(2, 6))
    mdp = MDP(transitions, scale * rng.normal(size=(6, 2)), gamma)
    solved = tabular.solve(mdp, method=solver)
    np.testing.assert_allclose(solved.value, linear_program(mdp), rtol=1e-6, atol=1e-6 * scale)
    assert solved.error_bound <= 1e-8 * max(1.0, np.abs(solved.value).max())
