"""Grid worlds: hand-worked cells, maps, moving things about, and the unbounded plane."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psigrad.tabular as tabular
from psigrad.tabular import GridWorld, UnboundedGrid

UP, RIGHT, DOWN, LEFT = range(4)


def row_of(grid: GridWorld, cell: tuple[int, int], action: int) -> dict[tuple[int, int], float]:
    mdp = grid.mdp()
    row = mdp.transitions[[action * mdp.n_states + grid.state(cell)]]
    row = row.toarray()[0] if mdp.is_sparse else row[0]
    return {grid.cell(s): pytest.approx(row[s]) for s in np.flatnonzero(row)}


def test_a_move_slips_to_both_sides_and_stops_at_walls_and_borders():
    grid = GridWorld(3, 3, {(0, 2): 1.0}, walls=frozenset({(1, 1)}), slip=0.2)
    assert row_of(grid, (1, 0), UP) == {(0, 0): 0.8, (1, 0): 0.2}  # right is the wall, left the border
    assert row_of(grid, (0, 1), RIGHT) == {(0, 2): 0.8, (0, 1): 0.2}  # up the border, down the wall
    assert row_of(grid, (2, 0), DOWN) == {(2, 0): 0.9, (2, 1): 0.1}
    assert row_of(grid, (0, 2), LEFT) == {}  # the episode is over there
    assert row_of(replace(grid, slip=1.0), (2, 1), UP) == {(2, 0): 0.5, (2, 2): 0.5}


def test_rewards_are_paid_on_entering():
    grid = GridWorld(1, 3, {(0, 2): 5.0}, step_reward=-1.0, gamma=0.5)
    mdp = grid.mdp()
    assert mdp.rewards[1].tolist() == [-1, 4, -1, -1] and mdp.rewards[2].tolist() == [0, 0, 0, 0]
    assert tabular.solve(mdp).value.tolist() == [1, 4, 0]  # −1 + ½·4
    # when it does not end, the prize is paid each time it is entered, and a bump is no entering
    again = replace(grid, ends=False, step_reward=0.0).mdp()
    assert again.rewards[2].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(tabular.solve(again).value, [0.5 * 5 / 0.75, 5 / 0.75, 0.5 * 5 / 0.75], atol=1e-12)


def test_the_default_grid_is_worth_a_power_of_gamma_of_the_way():
    grid = GridWorld()
    value = tabular.solve(grid.mdp()).value.reshape(8, 8)
    for r in range(8):
        for c in range(8):
            if (r, c) not in grid.prizes and (r, c) != (3, 0):
                distance = abs(r - 1) + abs(c - 6)
                assert value[r, c] == pytest.approx(0.9 ** (distance - 1), abs=1e-12)
    assert value[3, 4] == value[1, 6] == 0


def test_frozen_lake_is_a_grid_world():
    for name in ("4x4", "8x8"):
        env = gymnasium.make("FrozenLake-v1", map_name=name)
        text = "\n".join(row.decode() for row in map(b"".join, env.unwrapped.desc))
        text = text.replace("F", ".").replace("H", "o").replace("G", "+") + "\no = 0"
        grid = GridWorld.from_text(text, slip=2 / 3, gamma=0.99)
        ours, theirs = grid.mdp(), tabular.from_gymnasium(env, 0.99)
        np.testing.assert_allclose(tabular.solve(ours).value, tabular.solve(theirs).value, atol=1e-12)
        order = [3, 2, 1, 0]  # Gymnasium counts left, down, right, up
        np.testing.assert_allclose(
            tabular.q_values(ours, tabular.solve(ours).value), tabular.solve(theirs).q[:, order], atol=1e-12
        )


def test_large_grids_are_sparse_and_equal_the_dense_ones():
    grid = GridWorld(23, 23, {(3, 4): 1.0, (20, 20): -2.5}, walls=frozenset({(5, 5), (6, 5)}), slip=0.3, step_reward=-0.01)
    small = GridWorld(22, 23, grid.prizes, grid.walls, 0.3, -0.01)
    assert grid.mdp().is_sparse and not small.mdp().is_sparse
    mdp = grid.mdp()
    table = {(s, a): row_of(grid, grid.cell(s), a) for s in (0, 5 * 23 + 4, 4 * 23 + 5, 2 * 23 + 4) for a in range(4)}
    value = np.random.default_rng(0).normal(size=mdp.n_states)
    q = tabular.q_values(mdp, value)
    for (s, a), row in table.items():
        paid = sum(p.expected * (-0.01 + (grid.prizes.get(c, 0) if c != grid.cell(s) else 0)) for c, p in row.items())
        assert q[s, a] == pytest.approx(paid + 0.9 * sum(p.expected * value[grid.state(c)] for c, p in row.items()))


@st.composite
def grids(draw):
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    cells = [(r, c) for r in range(rows) for c in range(columns)]
    marks = draw(
        st.lists(st.sampled_from(["free", "wall", 1.0, -1.0, 0.0, 0.1, -7.25, 1 / 3]), min_size=len(cells), max_size=len(cells))
    )
    prizes = {c: m for c, m in zip(cells, marks, strict=True) if isinstance(m, float)}
    walls = frozenset(c for c, m in zip(cells, marks, strict=True) if m == "wall")
    free = [c for c, m in zip(cells, marks, strict=True) if m == "free"]
    start = draw(st.sampled_from([None, *free]))
    return GridWorld(rows, columns, prizes, walls, start=start, slip=draw(st.sampled_from([0.0, 0.25])))


@given(grids())
def test_a_map_reads_back_as_it_was_written(grid):
    assert GridWorld.from_text(grid.to_text(), slip=grid.slip) == grid


def test_a_map_shows_a_start_that_holds_a_prize():
    """Only where episodes do not end there: it is paid whenever the start is entered again."""
    grid = GridWorld(1, 3, {(0, 0): 1.0, (0, 2): 0.5}, ends=False, start=(0, 0))
    assert grid.to_text() == "S.a\na = 0.5\nS = 1"
    for again in (grid, replace(grid, prizes={(0, 0): -1234567.5}), replace(grid, prizes={(0, 1): 2e20})):
        assert GridWorld.from_text(again.to_text(), ends=False) == again


@given(grids())
def test_states_and_cells_are_one_to_one_and_rows_are_probabilities(grid):
    assert [grid.state(grid.cell(s)) for s in range(grid.rows * grid.columns)] == list(range(grid.rows * grid.columns))
    mdp = grid.mdp()  # MDP checks the sums
    entered = np.asarray(mdp.transitions.sum(axis=0)).ravel()
    assert all(entered[grid.state(cell)] == 0 for cell in grid.walls)


def test_moving_a_prize_is_cheap_and_leaves_the_old_grid_alone():
    grid = GridWorld(3, 3, {(0, 2): 1.0}, walls=frozenset({(1, 1)}), start=(2, 0))
    assert grid.moved((0, 2), (2, 2)).prizes == {(2, 2): 1.0} and grid.prizes == {(0, 2): 1.0}
    assert grid.moved((1, 1), (1, 0)).walls == {(1, 0)}
    assert grid.moved((2, 0), (1, 0)).start == (1, 0)
    with pytest.raises(ValueError, match="is taken"):
        grid.moved((0, 2), (1, 1))
    with pytest.raises(ValueError, match="is empty"):
        grid.moved((0, 0), (0, 1))
    with pytest.raises(FrozenInstanceError):
        grid.slip = 0.5


def test_the_picture_shows_values_and_arrows():
    grid = GridWorld.from_text("S.+\n.#-")
    solution = tabular.solve(grid.mdp())
    assert grid.render(solution.value, solution.policy).splitlines() == [
        "0.90→ 1.00→  [+1]",
        "0.81↑     #  [-1]",
    ]
    assert grid.render() == "   S    . [+1]\n   .    # [-1]"
    arrows = grid.render(policy=tabular.epsilon_greedy(np.zeros((6, 4)), 0.1))
    assert arrows.startswith("↑→↓← ")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: GridWorld(0, 3), "expected at least one row"),
        (lambda: GridWorld(2, 2), "is outside the 2×2 grid"),
        (lambda: GridWorld(slip=1.1), "slip is 1.1"),
        (lambda: GridWorld(walls=frozenset({(1, 6)})), r"The prize at \(1, 6\) is in a wall"),
        (lambda: GridWorld(start=(1, 6)), "is a prize, where episodes end"),
        (lambda: GridWorld().state((8, 0)), r"no cell \(8, 0\)"),
        (lambda: GridWorld().cell(64), "no state 64"),
        (lambda: GridWorld.from_text("..\n."), r"rows of lengths \[2, 1\]"),
        (lambda: GridWorld.from_text(".x"), "the sign 'x'"),
        (lambda: GridWorld.from_text(".x\nx = y"), "x = 'y'; expected a number"),
        (lambda: GridWorld.from_text("SS"), "2 starts"),
        (lambda: GridWorld().render([1, 2]), "expected 64 numbers"),
        (lambda: UnboundedGrid(trap_rate=0.9, treasure_rate=0.2), "sum to at most 1"),
        (lambda: UnboundedGrid(slip=2), "slip is 2"),
        (lambda: UnboundedGrid(max_steps=0), "max_steps is 0"),
        (lambda: UnboundedGrid().prize((0, 1)), "count from"),
        (lambda: UnboundedGrid().step(0), "call reset first"),
        (lambda: UnboundedGrid(slip=0.5).window(3, 3), "slip is 0.5; expected 0 for a window"),
    ],
)
def test_a_mistake_is_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        make()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_the_unbounded_world_is_fixed_and_has_the_stated_shares():
    one, two = UnboundedGrid(3), UnboundedGrid(3)
    cells = [(i, j) for i in range(1, 201) for j in range(1, 201)]
    found = [one.prize(c) for c in cells]
    assert found == [two.prize(c) for c in reversed(cells)][::-1]
    assert found != [UnboundedGrid(4).prize(c) for c in cells]  # control: another world differs
    n = len(cells)
    for reward, share in ((1.0, 0.02), (-1.0, 0.05)):
        assert abs(found.count(reward) / n - share) < 4 * np.sqrt(share * (1 - share) / n)
    far = one.prize((10**15, 10**15 + 1))
    assert far == two.prize((10**15, 10**15 + 1))
    assert one.prize((1, 1)) is None


def test_the_unbounded_grid_moves_as_the_document_says():
    env = UnboundedGrid(treasure_rate=0, trap_rate=0, step_reward=-0.5, max_steps=6)
    assert env.reset(seed=1) == ((1, 1), {})
    path = [env.step(a) for a in (0, 0, 3, 1, 2, 2)]  # R R D L U U; the last bumps into the edge
    assert [s[0] for s in path] == [(2, 1), (3, 1), (3, 2), (2, 2), (2, 1), (2, 1)]
    assert [s[1] for s in path] == [-0.5] * 6
    assert [s[2] for s in path] == [False] * 6 and [s[3] for s in path] == [False] * 5 + [True]
    with pytest.raises(ValueError, match="call reset first"):
        env.step(0)


def test_a_trap_may_cost_everything_and_terminates():
    env = UnboundedGrid(treasure_rate=0, trap_rate=1, trap_reward=float("-inf"))
    env.reset(seed=0)
    cell, reward, terminated, truncated, _ = env.step(0)
    assert (cell, reward, terminated, truncated) == ((2, 1), float("-inf"), True, False)
    with pytest.raises(ValueError, match="holds a treasure or a trap"):
        env.reset(options={"cell": (2, 2)})


def test_slips_follow_the_seed_and_the_world_does_not():
    def walk(seed):
        env = UnboundedGrid(1, slip=0.5, trap_rate=0, treasure_rate=0)
        env.reset(seed=seed)
        return [env.step(0)[0] for _ in range(50)]

    assert walk(1) == walk(1) and walk(1) != walk(2)


def test_a_window_is_the_same_corner_and_its_optimal_path_pays_in_the_endless_world():
    env = UnboundedGrid(5)
    grid = env.window(12, 12)
    assert all(grid.prizes.get((j - 1, i - 1)) == env.prize((i, j)) for i in range(1, 13) for j in range(1, 13))
    solution = tabular.solve(grid.mdp())
    to_ours = {UP: 2, RIGHT: 0, DOWN: 3, LEFT: 1}
    (i, j), _ = env.reset(seed=0)
    rewards, terminated = [], False
    while not terminated:
        (i, j), reward, terminated, _, _ = env.step(to_ours[int(solution.policy[grid.state((j - 1, i - 1))])])
        rewards.append(reward)
    assert tabular.discounted_return(rewards, 0.9) == pytest.approx(solution.value[0])


def test_a_grid_given_in_place_of_its_mdp_is_told_where_that_is():
    grid = GridWorld()
    for use in (tabular.solve, tabular.uniform_policy, lambda g: list(tabular.value_iteration(g)), lambda g: g.transitions):
        with pytest.raises(AttributeError, match=r"A GridWorld has no .* give grid\.mdp\(\)"):
            use(grid)
    with pytest.raises(ValueError, match=r"give grid\.mdp\(\)"):
        tabular.q_learning(grid, 1)
    with pytest.raises(AttributeError, match=r"A GridWorld has no 'mpd'\.$"):
        grid.mpd()
    assert not hasattr(grid, "reset")


def test_an_empty_map_is_named():
    with pytest.raises(ValueError, match="The map is empty"):
        GridWorld.from_text(" \n\n")
