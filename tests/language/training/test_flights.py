"""With a lag of n, n + 1 collections are under way at once, and what a run trains on stays what it was."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import overlap
import pytest

from psigrad.language.rewards import RewardPool, Samples, resolve
from psigrad.language.rollout.types import NextTurn, SamplingParams
from psigrad.language.training.online.collect import num_started
from psigrad.objective import catalog


def test_how_many_are_begun():
    assert [num_started(step, 2, 5) for step in range(5)] == [3, 4, 5, 5, 5]
    assert [num_started(step, 0, 3) for step in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("lag", [1, 3])
def test_lag_and_one_collections_are_under_way_at_once(monkeypatch, lag):
    """No engine answers until as many collections have asked as are to be under way; one at a time would wait in vain."""
    together = threading.Barrier(lag + 1)
    real = overlap.Engine.sample

    def sample(engine, version, requests, params):
        together.wait(timeout=10.0)
        return real(engine, version, requests, params)

    monkeypatch.setattr(overlap.Engine, "sample", sample)
    shape = overlap.Shape(prompts=1, generations=1, steps=lag + 1, samplers=lag + 1)
    _, trained = overlap.run(shape, lag)
    assert [found.cursor for found in trained] == list(range(1, lag + 2))


@pytest.mark.parametrize("method", [catalog.GRPO, catalog.DAPO], ids=["cursor known", "refills"])
def test_the_staleness_is_the_lag_and_the_run_the_same_on_any_number_of_samplers(monkeypatch, method):
    monkeypatch.setattr(overlap.catalog, "GRPO", method)
    shape = overlap.Shape(prompts=4, generations=2, steps=6, mean_tokens=3.0, token=0.0002)
    found = {samplers: overlap.run(replace(shape, samplers=samplers), 2)[1] for samplers in (1, 5)}
    assert overlap.digest(found[1]) == overlap.digest(found[5])
    assert [{t.version for t in one.trajectories} for one in found[5]] == [{max(0, step - 2)} for step in range(6)]
    # the token that a stand-in writes is the number of the weights that it had
    assert all(set(t.completion.ids) == {t.version} for one in found[5] for t in one.trajectories)
    drawn = [one.cursor for one in found[5]]
    assert drawn == [4 * (step + 1) for step in range(6)] if method is not catalog.DAPO else drawn[-1] > 24


@pytest.mark.slow
def test_what_a_lag_buys_at_long_tails():
    shape = overlap.Shape(samplers=16, prompts=32, spread=1.2)
    seconds = {lag: overlap.run(shape, lag)[0] for lag in (0, 1, 4)}
    assert seconds[0] > 1.7 * seconds[1] and seconds[0] > 2.5 * seconds[4], seconds


def test_an_episode_stays_with_its_sampler_and_its_task(monkeypatch):
    shape = overlap.Shape(samplers=3, generations=2, token=0.0001)
    asked: list[tuple[int, list[tuple[int, ...]]]] = []
    real = overlap.Engine.sample

    def sample(engine, version, requests, params):
        asked.append((id(engine), [request.prompt_ids for request in requests]))
        time.sleep(0.002)
        return real(engine, version, requests, params)

    monkeypatch.setattr(overlap.Engine, "sample", sample)
    with overlap.sampler_of(shape, lambda: 0, prompts_per_task=1) as sampler:
        prompts = [(p,) for p in (7, 7, 8, 8, 9, 9)]
        talk = sampler.snapshot().dialogue(prompts, SamplingParams(max_tokens=9))
        for turn in range(3):
            done = dict(talk.turns({i: NextTurn((100 + turn,), 10 * turn + i) for i in range(6)}))
            assert sorted(done) == list(range(6))
    homes: dict[int, set[int]] = {}
    for engine, contexts in asked:
        assert len({context[0] for context in contexts}) == 1, "a task holds the episodes that began together"
        homes.setdefault(contexts[0][0], set()).add(engine)
    assert all(len(engines) == 1 for engines in homes.values()) and len(asked) == 9, homes


def test_on_engines_that_let_it_an_episode_goes_on_as_soon_as_it_is_answered(monkeypatch):
    """The first episode's second turn is with its engine while the others are at their first, which wait for it."""
    shape, seen = overlap.Shape(samplers=2, generations=1, depth=4), []
    second = threading.Event()
    real = overlap.Engine.sample

    def sample(engine, version, requests, params):
        (prompt,) = [request.prompt_ids for request in requests]
        seen.append((id(engine), prompt[0], len(prompt) > 1))
        if len(prompt) > 1:
            second.set()
        assert prompt[0] == 7 or second.wait(10.0)
        return real(engine, version, requests, params)

    monkeypatch.setattr(overlap.Engine, "sample", sample)
    with overlap.sampler_of(shape, lambda: 0, prompts_per_task=1, joins=True) as sampler:
        talk, said = sampler.snapshot().dialogue([(7,), (8,), (9,)], SamplingParams(max_tokens=9)), []
        talk.more = lambda: {0: NextTurn((100,), 5)} if said == [0] else {}
        for i, _ in talk.turns({i: NextTurn((), i) for i in range(3)}):
            said.append(i)
    assert sorted(said) == [0, 0, 1, 2] and said[0] == 0
    assert len({engine for engine, first, _ in seen if first == 7}) == 1, "where its first turn was"


@pytest.mark.parametrize("depth", [1, 3])
def test_how_many_tasks_an_engine_has_at_once_changes_nothing(depth):
    shape = overlap.Shape(prompts=6, generations=2, steps=4, samplers=2, mean_tokens=3.0, token=0.0002)
    found = [overlap.run(replace(shape, depth=deep), 1)[1] for deep in (depth, 4)]
    assert overlap.digest(found[0]) == overlap.digest(found[1])


WAITS = """
import os, time
def waits(completions, **_):
    verb, name = completions[0].split()
    end = time.monotonic() + 8.0
    while verb == "wait" and not os.path.exists(name):
        assert time.monotonic() < end
        time.sleep(0.005)
    open(name, "w").close()
    return [float(len(completions))] * len(completions)
"""


def test_threads_score_at_the_same_time(tmp_path):
    """The first thread's group is done only when the second thread's has been scored."""
    group = lambda verb: Samples([""], [f"{verb} {tmp_path / 'there'}"], [[]], {})  # noqa: E731
    (tmp_path / "waiting.py").write_text(WAITS)
    with RewardPool([resolve(f"{tmp_path}/waiting.py:waits")], workers=2, timeout=30.0) as pool:
        first = pool.begin()
        first.add(group("wait"))
        other: list[float] = []

        def score():
            scoring = pool.begin()
            scoring.add(group("touch"))
            other.extend(result.value for result in scoring.results())

        thread = threading.Thread(target=score)
        thread.start()
        assert [result.value for result in first.results()] == [1.0]
        thread.join(10.0)
        assert other == [1.0]
