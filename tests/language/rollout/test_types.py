"""What a request, a completion and an episode are, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psigrad.language.rollout.types import Branch, Collected, Completion, NextTurn, Sampler, SamplingParams, Trajectory


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "0 \\(greedy\\) or more"),
        ({"top_p": 0.0}, "above 0"),
        ({"min_p": 2.0}, "between 0 and 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, expected):
    with pytest.raises(ValueError, match=expected):
        SamplingParams(**{"max_tokens": 5, **setting})


def test_a_trajectory_is_split_where_its_context_changes():
    completion = Completion((5, 6, 7, 8), (-1.0,) * 4, (-1.0,) * 4, "stop", 0)
    one = Trajectory(0, 0, (1, 2), completion, 0, mask=(True, False, True, True), step_rewards=((0, 0.5), (3, 0.25)))
    assert one.contexts == [(0, (1, 2), (5, 6, 7, 8))] and one.policy_ids == (5, 7, 8) and one.num_chosen == 3
    assert one.step_return == 0.75 and replace(one, mask=()).policy_ids == completion.ids
    branched = replace(one, branches=(Branch(1, (9,)), Branch(3, (4, 4))))
    assert branched.contexts == [(0, (1, 2), (5,)), (1, (9,), (6, 7)), (3, (4, 4), (8,))]
    held = Collected([one, branched], [[branched]], 2, {"issued": 2})
    again = Collected.from_json(held.to_json())
    assert again == held and again.groups[0][0] is again.trajectories[1]


class Reading(Sampler):
    """Answers each request with the length of its prompt, once for each seed."""

    def steps(self, requests, params, cache=None):
        for place, request in enumerate(requests):
            length = len(request.prompt_ids)
            yield [(place, [Completion((length,), (0.0,), (0.0,), "stop", seed) for seed in request.seeds])]


def test_each_turn_of_an_episode_reads_all_that_came_before():
    episodes = Reading().dialogue([(1, 2), (1, 2), (3,)], SamplingParams(4))
    first = dict(episodes.turns({i: NextTurn((), seed=i) for i in range(3)}))
    assert [first[i].ids for i in range(3)] == [(2,), (2,), (1,)] and [first[i].seed for i in range(3)] == [0, 1, 2]
    assert [c.ids for _, c in episodes.turns({0: NextTurn((7, 7), 3), 2: NextTurn((8,), 4, restart=True)})] == [(5,), (1,)]
    assert episodes.contexts == [(1, 2, 2, 7, 7, 5), (1, 2, 2), (8, 1)]
