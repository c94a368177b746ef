"""verifiers' environments as psigrad's, against a stand-in with the methods that its MultiTurnEnv has (0.1.14)."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from psigrad.errors import UserError
from psigrad.language.rollout.episodes.verifiers_environment import adapt


class Message(dict):
    """Read by key, as in older versions, or dumped, as in newer ones."""


class Rubric:
    async def score_rollout(self, state):
        last = state["completion"][-1]["content"]
        state["reward"] = float(last == state["input"]["answer"]) - 0.1 * (len(state["trajectory"]) - 1)


class HigherOrLower:
    """As verifiers has it: states are dictionaries, messages are lists, everything waits."""

    tool_defs = None
    max_turns = 3

    def __init__(self):
        self.rubric, self.cleaned = Rubric(), 0

    async def init_state(self, given, client, model):
        prompt = given["prompt"] if isinstance(given["prompt"], list) else [{"role": "user", "content": given["prompt"]}]
        return {"input": given, "prompt": prompt, "trajectory": [], "trajectory_id": "x", "final_env_response": None}

    async def setup_state(self, state):
        state["asked"] = 0

    async def is_completed(self, state):
        return len(state["trajectory"]) >= self.max_turns or state["final_env_response"] is not None

    async def get_prompt_messages(self, state):
        last = state["trajectory"][-1]
        said = last["completion"][-1]["content"]
        answer = state["input"]["answer"]
        if said == answer:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
        hint = "higher" if said < answer else "lower"
        return [*last["prompt"], *last["completion"], Message(role="user", content=hint)]

    async def cleanup(self, state):
        last = state["trajectory"][-1]
        state["completion"] = [*last["prompt"], *last["completion"]][len(state["prompt"]) :]
        self.cleaned += 1

    def get_dataset(self, n, seed):
        return [{"prompt": [{"role": "user", "content": f"guess {seed}"}], "answer": str(i)} for i in range(n)]


@pytest.fixture(autouse=True)
def verifiers(monkeypatch):
    types = ModuleType("verifiers.types")
    types.ClientConfig = SimpleNamespace
    types.AssistantMessage = lambda content: Message(role="assistant", content=content)
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.types", types)


ROW = {"prompt": [{"role": "user", "content": "guess"}], "answer": "5", "info": None}


def test_turns_are_the_environments_and_the_reward_is_the_rubrics():
    episode = adapt(HigherOrLower)()
    assert episode.reset(ROW) is None
    assert episode.step("3") == ([{"role": "user", "content": "higher"}], 0.0, False)
    assert episode.step("7") == ([{"role": "user", "content": "lower"}], 0.0, False)
    observation, reward, done = episode.step("5")
    assert (observation, done) == ("", True) and reward == pytest.approx(1 - 0.2)


def test_an_answer_that_ends_the_episode_early_is_scored_at_once():
    episode = adapt(HigherOrLower)()
    episode.reset(ROW)
    assert episode.step("5") == ("", 1.0, True)


def test_a_wrong_last_turn_gets_what_the_rubric_says():
    episode = adapt(HigherOrLower)()
    episode.reset(ROW)
    episode.step("3"), episode.step("4")
    assert episode.step("6")[1:] == (pytest.approx(-0.2), True)


def test_rows_are_the_environments():
    rows = adapt(HigherOrLower).rows(3, 7)
    assert [row["answer"] for row in rows] == ["0", "1", "2"] and rows[0]["prompt"][0]["content"] == "guess 7"


def test_one_environment_serves_all_episodes_of_a_process():
    made = []
    kind = adapt(lambda: made.append(HigherOrLower()) or made[-1])
    for _ in range(2):
        episode = kind()
        episode.reset(ROW)
        episode.step("5")
    assert len(made) == 1 and made[0].cleaned == 2


def test_a_prompt_that_is_changed_behind_the_trainers_back_is_a_fault():
    class Changing(HigherOrLower):
        async def setup_state(self, state):
            state["prompt"] = [{"role": "user", "content": "something else"}]

    with pytest.raises(ValueError, match="changes the prompt"):
        adapt(Changing)().reset(ROW)


def test_environments_with_tools_or_of_another_kind_are_refused():
    class WithTools(HigherOrLower):
        tool_defs = ({"name": "add"},)

    with pytest.raises(UserError, match=r"give tools with --tools"):
        adapt(WithTools)().reset(ROW)
    with pytest.raises(UserError, match=r"SimpleNamespace without init_state\(\)"):
        adapt(SimpleNamespace)().reset(ROW)
