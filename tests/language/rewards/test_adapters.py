"""Rewards of other libraries under our signature, by their own argument names."""

from __future__ import annotations

import pytest
from inline_scorer import results as scored

from psigrad.errors import UserError
from psigrad.language.rewards import RewardPool, Samples, Scored, resolve
from psigrad.language.rewards.builtin import Verifiers, Verl, similarity

SOURCE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.strip() == ground_truth
    if data_source == "detailed":
        return {"score": float(right), "hint": extra_info["index"]}
    return float(right)

async def rubric(completion, answer, info):
    return float(completion == answer) * info["weight"]

def plain(prompt):
    return float(len(prompt))
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "others.py"
    path.write_text(SOURCE)
    return str(path)


def test_verls_compute_score_reads_verls_columns(module):
    reward = Verl(f"{module}:compute_score")
    columns = {
        "data_source": ["x", "detailed"],
        "reward_model": [{"style": "rule", "ground_truth": "a"}, {"ground_truth": "b"}],
        "extra_info": [None, {"index": 3}],
    }
    assert reward(completions=["a ", "c"], **columns) == [1.0, 0.0]
    assert reward(completions=["a"], ground_truth=["a"]) == [1.0]


def test_rubric_functions_get_what_they_name(module):
    columns = {"answer": ["a", "b"], "info": [{"weight": 2}, {"weight": 3}]}
    given = {"prompts": ["p", "pp"], "completions": ["a", "c"]}
    assert Verifiers(f"{module}:rubric")(**given, **columns) == [2.0, 0.0]
    assert Verifiers(f"{module}:plain")(**given) == [1.0, 2.0]


def test_an_adapter_runs_in_a_worker_by_its_settings(module):
    spec = resolve({"reward": "verl", "function": f"{module}:compute_score"})
    with RewardPool([spec]) as pool:
        results = scored(pool, Samples(["p"], ["a"], [[1]], {"ground_truth": ["a"]}))
    assert results == [Scored(1.0, {"verl": 1.0})]


@pytest.mark.parametrize("adapter", [Verl(), Verifiers()])
def test_an_adapter_without_a_function_says_how_to_write_it(adapter):
    with pytest.raises(UserError, match="function: module:name"):
        adapter(prompts=["p"], completions=["a"])


def test_similarity_counts_edits():
    pairs = {("kitten", "sitting"): 1 - 3 / 7, ("abc", "abc"): 1.0, ("", "ab"): 0.0, (" ab ", "ab"): 1.0, ("ab", "ba"): 0.0}
    for (a, b), expected in pairs.items():
        assert similarity([a], [b]) == [pytest.approx(expected)]
    assert similarity(["a"], [None]) == [None]
