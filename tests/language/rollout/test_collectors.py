"""Collectors: which prompts each of several processes draws."""

from __future__ import annotations

from lone_runs import OneOf

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import reward_view
from psigrad.language.rollout import collectors
from psigrad.language.rollout.types import Prompt


def test_each_process_draws_every_second_prompt_and_of_a_sampler_for_all_the_first_draws_them_all(monkeypatch):
    asked = []
    prompts = [Prompt(i, (i,), Row("x", prompt="p")) for i in range(4)]

    class Asked:
        plays = False

        def __init__(self, central):
            self.sampler, self.central = self, central

        def collect(self, prompts, *rest):
            asked.append([p.index for p in prompts])
            yield [(i, []) for i in range(len(prompts))]

    def of(rank, central):
        world = OneOf(2, rank)
        each = [["of rank 0"], []] if central else [["a", "c"], ["b", "d"]]
        monkeypatch.setattr(collectors, "gather_trajectories", lambda world, own, with_tokens: each)
        return collectors.ScoredRollout(Asked(central), None, reward_view(), world)(prompts, None, 1, max, version=0)

    assert of(0, False) == of(1, False) == ["a", "b", "c", "d"] and asked == [[0, 2], [1, 3]]
    asked.clear()
    assert of(0, True) == of(1, True) == ["of rank 0"] and asked == [[0, 1, 2, 3]]
