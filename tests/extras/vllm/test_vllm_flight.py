"""One engine's flight: requests of several callers are written together, each by the weights that it was begun with."""

from __future__ import annotations

import ast
import itertools
import threading

import pytest
from engine_samplers import PARAMS, REQUESTS, expected, ids, nudge
from engine_stand_in import completion

from psigrad.language.rollout.types import Request, SamplingParams
from psigrad_extras.vllm.flight import Flight, Ticket

MORE = [Request((20, 21), (7, 8)), Request((22,), (9,))]


def written(sampler, requests, params) -> list[list[tuple[int, ...]]]:
    held = {name: p.detach().numpy() for name, p in sampler.model.network.named_parameters()}
    return [[completion(held, r.prompt_ids, seed, params.max_tokens) for seed in r.seeds] for r in requests]


def flights(tmp_path) -> list[list[int]]:
    """The numbers of the completions that the engine was at, whenever it was asked."""
    return [ast.literal_eval(line) for line in (tmp_path / "log.flight").read_text().splitlines()]


def groups(found) -> list[list[tuple[int, ...]]]:
    return ids(group for _, group in sorted(itertools.chain(*found)))


def test_requests_join_those_that_are_being_written(engine, tmp_path):
    sampler, short = engine(), SamplingParams(max_tokens=3)
    first = sampler.steps(REQUESTS, PARAMS)
    begun = [next(first)]
    other = list(sampler.steps(MORE, short))  # of another length, in the same flight
    assert groups(other) == written(sampler, MORE, short)
    assert groups([*begun, *first]) == expected(sampler.model)
    assert any({5, 6} <= set(flight) for flight in flights(tmp_path)), "the last of the first and the first of the second"
    assert sorted(set(itertools.chain(*flights(tmp_path)))) == list(range(9)) and sampler.losses == 0


def test_the_engine_is_asked_to_go_on_before_anybody_looks_at_what_it_wrote(engine, tmp_path):
    sampler = engine()
    steps = sampler.steps(REQUESTS, PARAMS)
    next(steps)
    assert sampler._asked
    list(steps)
    assert not sampler._asked and len(flights(tmp_path)) == 3


def test_weights_wait_for_what_was_begun_with_the_ones_before(engine):
    sampler = engine()
    old = expected(sampler.model)
    first = sampler.steps(REQUESTS, PARAMS)
    begun = [next(first)]
    nudge(sampler.model)
    assert groups(sampler.steps(MORE, PARAMS)) == written(sampler, MORE, PARAMS)
    assert groups([*begun, *first]) == old != expected(sampler.model)


@pytest.mark.parametrize("changed", [False, True])
def test_what_nobody_waits_for_is_dropped(engine, tmp_path, changed):
    sampler = engine()
    given_up = sampler.steps(REQUESTS, PARAMS)
    next(given_up)
    given_up.close()
    if changed:
        nudge(sampler.model)  # the engine must have nothing left when it takes them
    assert groups(sampler.steps(MORE, PARAMS)) == written(sampler, MORE, PARAMS)
    assert {4, 5} & set(itertools.chain(*flights(tmp_path)[2:])) == set() and sampler.losses == 0


def test_a_lost_engine_is_lost_for_all_and_each_gets_what_it_asked_for(engine):
    sampler = engine("dies")
    first = sampler.steps(REQUESTS, PARAMS)
    begun = [next(first)]
    assert groups(sampler.steps(MORE, PARAMS)) == written(sampler, MORE, PARAMS)
    assert groups([*begun, *first]) == expected(sampler.model) and sampler.losses == 1


def test_threads_share_a_flight(engine, tmp_path):
    sampler, found = engine(), {}
    requests = {name: [Request((name, k), (10 * name + k, 10 * name + k + 5)) for k in range(3)] for name in range(30, 36)}
    together = threading.Barrier(len(requests))

    def sample(name):
        together.wait(10.0)
        found[name] = ids(sampler.sample(requests[name], PARAMS))

    threads = [threading.Thread(target=sample, args=(name,)) for name in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert found == {name: written(sampler, asked, PARAMS) for name, asked in requests.items()}
    assert max(map(len, flights(tmp_path))) > 6, "more than one caller's"


def test_a_flight_tells_each_completion_once_and_forgets_who_left():
    flight, one, other = Flight(), Ticket(PARAMS), Ticket(SamplingParams(max_tokens=2))
    flight.add(one, REQUESTS)
    flight.add(other, MORE)
    parts, dropped = flight.news()
    assert [len(flat) for _, flat in parts] == [6, 3] and not dropped and flight.news() == ([], [])
    flight.land(2, "", "", "stop")
    assert one.take() == [(1, [flight_completion(3)])] and one.left == 2 and one.take() == []
    flight.leave(one)
    assert flight.busy and flight.news() == ([], [0, 1, 3, 4, 5])
    flight.land(0, "", "", "stop")  # what was on its way
    flight.begin_again()
    assert [number for _, flat in flight.news()[0] for number, _, _ in flat] == [6, 7, 8]


def flight_completion(seed: int):
    from psigrad.language.rollout.types import Completion

    return Completion((), (), (), "stop", seed)
