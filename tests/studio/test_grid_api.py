"""The numbers of the grid page are those of psigrad.tabular, for every algorithm, cold and warm, and so are the backups."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from live_studio import live_studio

from psigrad import tabular
from psigrad.tabular import GridWorld
from psigrad_studio.backups import replay
from psigrad_studio.playback import ALGORITHMS, EPISODE_STEPS, PlaybackCache, PlaybackOptions, PlaybackSpec

WORLDS = {
    "default": GridWorld(),
    "slippery": GridWorld(slip=0.2, step_reward=-0.02, gamma=0.95),
    "walls": GridWorld.from_text("S..a\n.#.-\n....\na = 2.5", slip=0.1, gamma=0.8),
    "undiscounted": GridWorld(5, 6, {(0, 5): 1.0, (2, 2): -1.0}, gamma=1.0, step_reward=-0.1, slip=0.1),
}
OPTIONS = {"sweeps": 3, "exploration": 0.3, "step_size": 0.25, "episodes": 4, "seed": 7, "evaluated": "random"}
FRAMES = 30


@pytest.fixture(scope="module")
def studio():
    with live_studio(work_seconds=20.0) as running:
        yield running


def form(world: GridWorld) -> dict:
    return {
        "rows": world.rows,
        "columns": world.columns,
        "prizes": [[*cell, worth] for cell, worth in world.prizes.items()],
        "walls": [list(cell) for cell in world.walls],
        "start": None if world.start is None else list(world.start),
        "slip": world.slip,
        "step_reward": world.step_reward,
        "gamma": world.gamma,
    }


def playback_of(world: GridWorld, algorithm: str, **more) -> dict:
    return {"world": form(world), "algorithm": algorithm, "options": OPTIONS, **more}


def library(world: GridWorld, algorithm: str, value=None, q=None) -> list[np.ndarray]:
    """[S] after each step, straight from psigrad.tabular: written apart from psigrad_studio.playback."""
    mdp, o = world.mdp(), OPTIONS
    sweeping = {
        "policy_iteration": tabular.policy_iteration,
        "policy_iteration_by_sweeps": partial(tabular.policy_iteration, exact=False, epsilon=1e-6),
        "value_iteration": tabular.value_iteration,
        "value_iteration_in_place": partial(tabular.value_iteration, in_place=True),
        "modified_policy_iteration": partial(tabular.modified_policy_iteration, sweeps=o["sweeps"]),
        "prioritised_sweeping": tabular.prioritised_sweeping,
    }
    if algorithm in sweeping:
        return [s.value for s in itertools.islice(sweeping[algorithm](mdp, value=value), FRAMES)]
    count = FRAMES * o["episodes"]
    each = slice(o["episodes"] - 1, None, o["episodes"])
    if algorithm in ("td", "monte_carlo_evaluation"):
        random = np.full((mdp.n_states, 4), 0.25)
        episodes = tabular.rollouts(mdp, random, count, seed=o["seed"], max_steps=EPISODE_STEPS)
        if algorithm == "td":
            return list(tabular.td(episodes, mdp.n_states, mdp.gamma, alpha=o["step_size"], value=value))[each]
        return list(tabular.monte_carlo(episodes, mdp.n_states, mdp.gamma, value=value))[each]
    learner = {
        "monte_carlo": tabular.monte_carlo_control,
        "sarsa": partial(tabular.sarsa, alpha=o["step_size"]),
        "expected_sarsa": partial(tabular.expected_sarsa, alpha=o["step_size"]),
        "q_learning": partial(tabular.q_learning, alpha=o["step_size"]),
    }[algorithm]
    learned = learner(mdp, count, epsilon=o["exploration"], seed=o["seed"], q=q, max_steps=EPISODE_STEPS)
    return [one.q.max(axis=1) for one in learned][each]


def test_the_page_offers_exactly_the_algorithms_that_are_compared_here(studio):
    offered = studio.ask("GET", "/api/grid/algorithms").json
    assert {one["name"] for one in offered} == set(ALGORITHMS)
    assert {one["family"] for one in offered} == {"planning", "prediction", "control"}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_equal_the_librarys(studio, world, algorithm):
    reply = studio.post("/api/grid/frames", playback_of(WORLDS[world], algorithm, count=FRAMES + 1))
    assert reply.status == 200, reply.body
    frames, expected = reply.json["frames"], library(WORLDS[world], algorithm)
    assert [frame["index"] for frame in frames] == list(range(len(frames)))
    assert len(frames) == min(FRAMES, len(expected)) + 1
    for frame, value in zip(frames[1:], expected, strict=False):
        assert np.abs(np.array(frame["value"]) - value).max() <= 1e-9
    changes = [np.abs(np.subtract(b["value"], a["value"])).max() for a, b in itertools.pairwise(frames)]
    if ALGORITHMS[algorithm].family != "planning":
        assert np.allclose([frame["residual"] for frame in frames[1:]], changes, atol=1e-12)


def test_negative_control_another_seed_gives_other_values(studio):
    other = {**playback_of(WORLDS["default"], "q_learning", count=FRAMES + 1), "options": {**OPTIONS, "seed": 8}}
    frames = studio.post("/api/grid/frames", other).json["frames"]
    assert np.abs(np.array(frames[-1]["value"]) - library(WORLDS["default"], "q_learning")[-1]).max() > 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_warm_start_goes_on_from_the_values_given(studio, algorithm):
    world = WORLDS["slippery"].moved((3, 4), (2, 6))
    value = np.linspace(-0.5, 0.9, 64)
    q = np.linspace(-0.5, 0.9, 256).reshape(64, 4)
    mdp = world.mdp()
    warm = {"value": value.tolist()} | ({"q": q.tolist()} if ALGORITHMS[algorithm].family == "control" else {})
    reply = studio.post("/api/grid/frames", playback_of(world, algorithm, count=FRAMES + 1, **warm))
    assert reply.status == 200, reply.body
    start = np.where(mdp.is_terminal, 0.0, value)
    expected = library(world, algorithm, value=start, q=np.where(mdp.is_terminal[:, None], 0.0, q))
    for frame, exact in zip(reply.json["frames"][1:], expected, strict=False):
        assert np.abs(np.array(frame["value"]) - exact).max() <= 1e-9
    cold = studio.post("/api/grid/frames", playback_of(world, algorithm, count=2)).json["frames"]
    assert cold[1]["value"] != reply.json["frames"][1]["value"] or algorithm == "policy_iteration"


def test_a_warm_start_after_a_small_change_needs_fewer_sweeps(studio):
    world = GridWorld(slip=0.1)
    solved = tabular.solve(world.mdp()).value
    moved = replace(world, gamma=0.901)
    cold = studio.post("/api/grid/frames", playback_of(moved, "value_iteration", count=300)).json
    warm = studio.post("/api/grid/frames", playback_of(moved, "value_iteration", count=300, value=solved.tolist())).json
    assert cold["ended"] and warm["ended"] and warm["known"] < cold["known"]
    assert np.allclose(cold["frames"][-1]["value"], warm["frames"][-1]["value"], atol=2e-8)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", [name for name, a in ALGORITHMS.items() if a.family == "planning"])
def test_films_of_planners_end_at_the_exact_values_with_a_true_bound(studio, world, algorithm):
    exact = tabular.solve(WORLDS[world].mdp()).value
    frames, answer = [], {"ended": False}
    while not (answer["ended"] and len(frames) == answer["known"]):
        answer = studio.post("/api/grid/frames", playback_of(WORLDS[world], algorithm, first=len(frames), count=400)).json
        frames += answer["frames"]
    assert answer["length"] == len(frames) and answer["note"] == ""
    assert np.abs(np.array(frames[-1]["value"]) - exact).max() < 1e-6
    assert np.abs(np.array(answer["target"]) - exact).max() <= 1e-9
    for frame in frames:
        assert frame["error"] == pytest.approx(np.abs(np.array(frame["value"]) - exact).max(), abs=1e-9)
        if frame["bound"] is not None and frame["step"] != "evaluate":
            assert frame["error"] <= frame["bound"] + 1e-12


def test_arrows_are_the_policy(studio):
    world = WORLDS["walls"]
    solution = tabular.solve(world.mdp())
    last = studio.post("/api/grid/frames", playback_of(world, "policy_iteration", count=50)).json["frames"][-1]
    assert [a.bit_length() - 1 for a in last["actions"]] == solution.policy.tolist()
    last = studio.post("/api/grid/frames", playback_of(world, "value_iteration", count=300)).json["frames"][-1]
    best = solution.q >= solution.q.max(axis=1, keepdims=True) - 1e-7
    close = (best @ [1, 2, 4, 8]).tolist()
    alive = ~world.mdp().is_terminal
    assert all(a & b for a, b, lives in zip(last["actions"], close, alive, strict=True) if lives)


def test_prediction_is_measured_against_the_policys_own_value(studio):
    world = WORLDS["slippery"]
    mdp = world.mdp()
    for evaluated, policy in (("random", tabular.uniform_policy(mdp)), ("best", tabular.solve(mdp).policy)):
        options = {**OPTIONS, "evaluated": evaluated, "episodes": 20}
        answer = studio.post(
            "/api/grid/frames", {**playback_of(world, "monte_carlo_evaluation", count=100), "options": options}
        ).json
        assert np.abs(np.array(answer["target"]) - tabular.evaluate(mdp, policy)).max() <= 1e-9
        assert answer["frames"][-1]["error"] < 0.2 * answer["frames"][0]["error"]


@pytest.mark.parametrize("first", [0, 7, 29])
def test_frames_are_the_same_in_whatever_order_they_are_asked_for(studio, first):
    spec = playback_of(WORLDS["walls"], "sarsa")
    whole = studio.post("/api/grid/frames", {**spec, "count": 40}).json["frames"]
    piece = studio.post("/api/grid/frames", {**spec, "first": first, "count": 5}).json["frames"]
    assert piece == whole[first : first + 5]


def test_films_that_were_dropped_are_computed_again_to_the_same_frames():
    small, roomy = PlaybackCache(1), PlaybackCache(64 * 2**20)
    specs = [PlaybackSpec(world, "q_learning", PlaybackOptions(episodes=3)) for world in WORLDS.values()]
    for playbacks in (small, roomy):
        for spec in specs:
            playbacks.playback(spec, 10, 60)
    assert len(small._playbacks) == 1 and len(roomy._playbacks) == len(specs)
    again, kept = (playbacks.playback(specs[0], 10, 60).frames for playbacks in (small, roomy))
    assert all((a.value == b.value).all() for a, b in zip(again, kept, strict=True))


def test_the_digest_tells_apart_whatever_changes_a_film():
    base = PlaybackSpec(WORLDS["default"], "td")
    others = [
        PlaybackSpec(WORLDS["slippery"], "td"),
        PlaybackSpec(WORLDS["default"].moved((3, 4), (3, 5)), "td"),
        PlaybackSpec(WORLDS["default"], "sarsa"),
        PlaybackSpec(WORLDS["default"], "td", PlaybackOptions(seed=1)),
        PlaybackSpec(WORLDS["default"], "td", value=np.ones(64)),
        PlaybackSpec(WORLDS["default"], "td", value=np.zeros(64)),
        PlaybackSpec(WORLDS["default"], "td", q=np.zeros((64, 4))),
    ]
    assert len({spec.digest for spec in [base, *others]}) == len(others) + 1
    assert PlaybackSpec(GridWorld(), "td").digest == base.digest


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ["value_iteration", "policy_iteration", "modified_policy_iteration"])
def test_the_backup_of_a_cell_is_q_and_its_terms_add_up_to_it(studio, world, algorithm):
    grid = WORLDS[world]
    mdp = grid.mdp()
    for index in (0, 3):
        spec = playback_of(grid, algorithm)
        value = np.array(studio.post("/api/grid/frames", {**spec, "count": 4}).json["frames"][index]["value"])
        q = tabular.q_values(mdp, value)
        for state in range(0, mdp.n_states, 5):
            answer = studio.post("/api/grid/backup", {**spec, "frame": index, "cell": list(grid.cell(state))}).json
            assert answer["terminal"] == bool(mdp.is_terminal[state])
            for action in answer["actions"]:
                terms = sum(
                    o["probability"] * (o["reward"] + grid.gamma * (0 if o["ends"] else o["value"])) for o in action["outcomes"]
                )
                assert action["q"] == pytest.approx(q[state, action["action"]], abs=1e-12)
                assert terms == pytest.approx(action["q"], abs=1e-12)
                assert sum(o["probability"] for o in action["outcomes"]) == pytest.approx(1)


@pytest.mark.parametrize("evaluated", ["random", "best"])
def test_the_backup_of_prediction_is_the_mean_over_its_policy(studio, evaluated):
    world = WORLDS["slippery"]
    mdp = world.mdp()
    policy = tabular.uniform_policy(mdp) if evaluated == "random" else np.eye(4)[tabular.solve(mdp).policy]
    spec = {**playback_of(world, "td"), "options": {**OPTIONS, "evaluated": evaluated}}
    value = np.array(studio.post("/api/grid/frames", {**spec, "count": 6}).json["frames"][5]["value"])
    exact = (policy * tabular.q_values(mdp, value)).sum(axis=1)
    for state in range(0, 64, 7):
        answer = studio.post("/api/grid/backup", {**spec, "frame": 5, "cell": divmod(state, 8)}).json
        assert answer["expected"] == pytest.approx(exact[state], abs=1e-12)


def test_the_next_sweep_of_value_iteration_is_the_backup_that_is_shown(studio):
    spec = playback_of(WORLDS["slippery"], "value_iteration")
    frames = studio.post("/api/grid/frames", {**spec, "count": 9}).json["frames"]
    for state in range(0, 64, 7):
        answer = studio.post("/api/grid/backup", {**spec, "frame": 7, "cell": divmod(state, 8)}).json
        shown = max((a["q"] for a in answer["actions"]), default=0.0)
        assert shown == pytest.approx(frames[8]["value"][state], abs=1e-12)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", [name for name, a in ALGORITHMS.items() if a.family != "planning"])
def test_the_updates_shown_lead_from_the_table_before_the_episode_to_the_one_after(world, algorithm):
    playback = PlaybackCache(2**26).playback(PlaybackSpec(WORLDS[world], algorithm, PlaybackOptions(**OPTIONS)), 12, 60)
    for frame in playback.frames[1:]:
        table, seen = frame.before.copy(), 0
        after = frame.value if frame.q is None else frame.q
        for state, update in replay(playback, frame):
            where = state if table.ndim == 1 else (state, update.action)
            assert update.before == pytest.approx(table[where], abs=1e-12)
            table[where], seen = update.after, seen + 1
        assert np.abs(table - after).max() <= 1e-9
        assert 0 < seen <= len(frame.episode.actions)


@pytest.mark.parametrize("algorithm", ["monte_carlo", "monte_carlo_evaluation"])
def test_monte_carlo_moves_towards_the_return_that_is_shown(algorithm):
    playback = PlaybackCache(2**26).playback(PlaybackSpec(WORLDS["slippery"], algorithm, PlaybackOptions(**OPTIONS)), 12, 60)
    for frame in playback.frames[1:]:
        for _, update in replay(playback, frame):
            if abs(update.target - update.before) > 1e-12:
                step = (update.after - update.before) / (update.target - update.before)
                assert 0 < step <= 1 and 1 / step == pytest.approx(round(1 / step), rel=1e-6)  # 1/n: the mean of n returns


MISTAKES = {
    "unknown algorithm": ({"algorithm": "valu"}, "no algorithm"),
    "prize outside": ({"world": {"prizes": [[9, 0, 1.0]]}}, "outside the 8×8 grid"),
    "prize in a wall": ({"world": {"prizes": [[1, 1, 1.0]], "walls": [[1, 1]]}}, "in a wall"),
    "no end at all": ({"world": {"prizes": [], "gamma": 1.0, "step_reward": -0.1}}, "gamma"),
    "slip": ({"world": {"slip": 1.5}}, "slip"),
    "size": ({"world": {"rows": 21}}, "rows"),
    "text for a number": ({"world": {"gamma": "0.9"}}, "gamma"),
    "an extra field": ({"worlds": 1}, "worlds"),
    "values of another size": ({"value": [0.0] * 63}, "63"),
    "q of another shape": ({"q": [[0.0] * 3] * 64}, "64 rows of 4"),
    "too many frames": ({"count": 10_000}, "count"),
    "before the first": ({"first": -1}, "first"),
    "options": ({"options": {**OPTIONS, "episodes": 0}}, "episodes"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_sentences(studio, name):
    given, said = MISTAKES[name]
    content = playback_of(WORLDS["default"], "value_iteration")
    world = {**content["world"], **given.get("world", {})}
    reply = studio.post("/api/grid/frames", {**content, **given, "world": world})
    assert reply.status == 422 and said in reply.json["error"]["message"], reply.body


@pytest.mark.parametrize("world", WORLDS)
def test_the_map_is_one_that_the_library_reads(studio, world):
    text = studio.post("/api/grid/frames", playback_of(WORLDS[world], "value_iteration", count=1)).json["map"]
    read = GridWorld.from_text(text)
    assert (read.prizes, read.walls, read.start) == (WORLDS[world].prizes, WORLDS[world].walls, WORLDS[world].start)


def test_a_frame_that_is_not_there_is_said_so(studio):
    content = {**playback_of(WORLDS["default"], "value_iteration"), "frame": 5000, "cell": [0, 0]}
    reply = studio.post("/api/grid/backup", content)
    assert reply.status == 422 and "no frame 5000" in reply.json["error"]["message"]


def test_every_cell_a_wall_or_an_end_is_no_crash(studio):
    walls = GridWorld(2, 2, {(0, 0): 1.0}, frozenset({(0, 1), (1, 0), (1, 1)}))
    for algorithm in ALGORITHMS:
        reply = studio.post("/api/grid/frames", playback_of(walls, algorithm, count=5))
        assert reply.status in (200, 422), (algorithm, reply.body)


def test_the_cache_keeps_to_its_bytes_also_when_films_grow_later():
    playbacks = PlaybackCache(12 * 2**20)
    specs = [PlaybackSpec(GridWorld(20, 20, slip=0.01 * n), "q_learning", PlaybackOptions(episodes=1)) for n in range(4)]
    for count in (1, 200, 400):
        for spec in specs:
            playbacks.playback(spec, count, 60)
            assert len(playbacks._playbacks) == 1 or playbacks.size <= 12 * 2**20
