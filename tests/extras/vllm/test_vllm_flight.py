"""One engine's flight: requests of several callers are written together, each by the weights that it was begun with."""

from __future__ import annotations

import ast
import itertools
import math
import random
import threading
from dataclasses import replace

import pytest
from engine_samplers import PARAMS, REQUESTS, expected, ids, nudge
from engine_stand_in import completion
from hostile_environments import Counting

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import prompt_ids
from psigrad.language.episodes import episodes as played_episodes
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes, play
from psigrad.language.rollout.types import Completion, NextTurn, Request, RestartedDialogue, Sampler, SamplingParams
from psigrad_extras.vllm import vllm_weights
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


def test_a_snapshot_stays_and_does_not_look_at_the_weights_again(engine, monkeypatch):
    sampler, looks = engine(), []
    look = vllm_weights.fingerprint
    monkeypatch.setattr(vllm_weights, "fingerprint", lambda model: looks.append(1) or look(model))
    at, before = sampler.snapshot(), expected(sampler.model)
    nudge(sampler.model)
    talk = at.dialogue([REQUESTS[0].prompt_ids], PARAMS)
    assert ids(at.sample(REQUESTS, PARAMS)) == ids(at.sample(REQUESTS, PARAMS)) == before
    assert next(iter(talk.turns({0: NextTurn((), 1)})))[1].ids == before[0][0] and len(looks) == 1
    assert ids(sampler.snapshot().sample(REQUESTS, PARAMS)) == expected(sampler.model) != before


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


@pytest.mark.parametrize("sleeps", [False, True])
def test_torch_gives_its_memory_back_before_an_engine_that_sleeps_is_woken_and_only_then(engine, monkeypatch, sleeps):
    sampler, given_back = engine(), []
    sampler._sleep = sleeps
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: given_back.append(sampler.version))
    sampler.sample(REQUESTS, PARAMS)
    assert given_back == [1] * sleeps, "once for a flight, however often its engine is asked"
    nudge(sampler.model)
    sampler.sample(REQUESTS, PARAMS)
    assert given_back == [1, 2, 2] * sleeps, "before an update, and before the next flight"


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


def test_a_turn_joins_while_the_turns_of_others_are_being_written(engine, tmp_path):
    sampler = engine()
    talk = sampler.dialogue([(40 + i,) for i in range(6)], PARAMS)
    answered, said = [], []

    def more():
        turns, answered[:] = {i: NextTurn((90 + i,), 100 + i) for i in answered}, []
        return turns

    talk.more = more
    for i, turn in talk.turns({i: NextTurn((), i) for i in range(6)}):
        if i < 2 and (i, 0) not in said:
            answered.append(i)
        said.append((i, [one for one, _ in said].count(i)))
        held = {name: p.detach().numpy() for name, p in sampler.model.network.named_parameters()}
        context = talk.contexts[i][: -len(turn.ids)]
        assert turn.ids == expected_ids(held, context, turn.seed) and len(context) == (8 if said[-1][1] else 1)
    assert sorted(said) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0)]
    assert any({5, 6, 7} <= set(flight) for flight in flights(tmp_path)), "beside the first turn of the last"


def expected_ids(held, context, seed):
    return completion(held, context, seed, PARAMS.max_tokens)


class Three(Counting):
    """Three turns, each answered by as many words as there were."""

    def step(self, text):
        self.count = getattr(self, "count", 0) + 1
        return "more " * self.count, 1.0, self.count == 3


@pytest.mark.parametrize("seed", range(3))
def test_episodes_that_join_are_those_of_rounds(engine, monkeypatch, seed):
    sampler, calls = engine(), []
    turns = RestartedDialogue.turns
    monkeypatch.setattr(RestartedDialogue, "turns", lambda self, wanted: calls.append(len(wanted)) or turns(self, wanted))
    monkeypatch.setattr(played_episodes, "LINGER", (0.0, 0.01))
    stopping = replace(PARAMS, stop_token_ids=tuple(range(256)))  # or each turn would be cut, and be the last

    def go(playing):
        calls.clear()
        rows = [Row("x", prompt=f"hello {n}", columns={"name": "ab"[n]}) for n in range(2)]
        prompts = [(n, tuple(prompt_ids(sampler.model.tokenizer, row)), row) for n, row in enumerate(rows)]
        rules = {"tokenizer": sampler.model.tokenizer, "version": 0, "max_length": sampler.model.max_length}
        seeds = {"num_generations": 4, "seed_of": lambda i, k: 10 * i + k}
        found = play(Episodes(playing), sampler, prompts, stopping, **seeds, **rules)
        return [(t.completion, t.mask, t.messages, t.step_rewards) for t in found], len(calls)

    waits, wait = [], InProcess.wait

    def waiting(self, count, patience=math.inf):
        waits.append(patience)
        return wait(self, count, patience)

    monkeypatch.setattr(InProcess, "wait", waiting)
    joined, times = go(InProcess(Three))
    assert {seconds for seconds in waits if seconds < math.inf} == {0.0}, "whoever may join at any time waits for nobody"
    with monkeypatch.context() as patch:
        patch.setattr(type(sampler), "dialogue", Sampler.dialogue)
        in_rounds, rounds = go(InProcess(Three))
    assert joined == in_rounds and times == 1 < rounds == 3 and 0.01 in waits
    assert go(Late(Three, seed))[0] == in_rounds


class Late(InProcess):
    """Answers when it is asked for answers for the first, second or third time after, as chance has it."""

    def __init__(self, factory, seed):
        super().__init__(factory)
        self.rng, self.due = random.Random(seed), {}

    def submit(self, calls):
        super().submit(calls)
        self.due |= {call.number: self.rng.randint(0, 2) for call in calls}

    def answers(self, seconds):
        there = [number for number, left in self.due.items() if not left]
        self.due = {number: left - 1 for number, left in self.due.items() if left}
        return {number: self._said.pop(number) for number in there}


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
    flight.add(nothing := Ticket(PARAMS), [Request((1,), ())])
    assert nothing.take() == [(0, [])] and nothing.left == 0, "no completion is complete at once"


def flight_completion(seed: int):
    return Completion((), (), (), "stop", seed)
