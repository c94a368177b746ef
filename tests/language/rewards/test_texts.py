"""Three texts with three names: what the policy said last, all that it wrote, all that was said."""

from __future__ import annotations

import pytest
from inline_scorer import InlineScorer, results

from psigrad.errors import UserError
from psigrad.language.rewards import RewardPool, Samples, resolve
from psigrad.language.rewards.builtin import NAMES, Format, Length, SoftOverlong, Verl, find_reward
from psigrad.language.rewards.reward_worker import ask
from psigrad.language.rollout.scoring import concatenate, text_of, transcript_of, turns_of

CALL = '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 7}}</tool_call>'


def conversation(last: str) -> list[dict[str, str]]:
    """A call, a tool that says what the answer is, and what the policy makes of it."""
    tool = "12 def f(): return 12 <think>a</think> <answer>12</answer>"
    return [
        {"role": "assistant", "content": CALL},
        {"role": "tool", "name": "add", "content": tool},
        {"role": "assistant", "content": last},
    ]


def given(function, completions, **columns):
    """What one function gives, as a worker asks it."""
    samples = {"prompts": ["q"] * len(completions), "completion_ids": [[1]] * len(completions), **columns}
    return ask("it", function, {**samples, "completions": completions})


@pytest.mark.parametrize("name", ["exact", "numeric", "math", "format", "similarity"])
def test_what_a_tool_says_is_no_answer_of_the_policys(name):
    right = {"format": "<think>a</think> <answer>12</answer>"}.get(name, "12")
    found = given(NAMES[name], [conversation("I will not say."), conversation(right)], answer=["12", "12"])
    assert found[0] < 0.1 and found[1] == 1.0
    assert NAMES[name]([conversation(right)], answer=["12"]) == [1.0], "called by a user's own function too"


def test_a_plain_episode_is_judged_by_its_last_turn_too():
    text = "I call it 12 I will not say."
    assert given(NAMES["numeric"], [text], answer=["12"], policy_turns=[["I call it ", "I will not say."]]) == [0.0]
    assert given(NAMES["numeric"], [text], answer=["12"]) == [1.0], "negative control: taken for one turn, the 12 is its own"


def test_a_built_in_of_psigrad_extras_reads_the_last_turn_of_a_plain_episode_too():
    asked = {"instruction_id_list": [["punctuation:no_comma"]], "kwargs": [[{}]]}
    text = "I guess.The tool says 1, 2.Done."
    assert given(find_reward("ifeval"), [text], policy_turns=[["I guess.", "Done."]], **asked) == [1.0]
    assert given(find_reward("ifeval"), [text], **asked) == [0.0], "negative control: taken for one turn, the comma is its own"


def test_a_function_gets_the_texts_that_it_asks_for_and_completions_as_trl_has_them():
    seen = {}

    def reads(completions, last_turns, policy_texts, transcripts, policy_ids, **columns):
        seen.update(locals())
        return [0.0] * len(completions)

    talk = conversation("so 12")
    given(reads, [talk], answer=["12"], completion_ids=[[1, 2, 3, 4]], policy_ids=[[1, 4]])
    assert seen["completions"] == [talk]
    assert seen["last_turns"] == ["so 12"]
    assert seen["policy_texts"] == [f"{CALL}\nso 12"]
    assert seen["transcripts"] == [f"{CALL}\n{talk[1]['content']}\nso 12"]
    assert seen["policy_ids"] == [[1, 4]]
    assert sorted(seen["columns"]) == ["answer", "completion_ids", "prompts"], "who does not ask gets none of them"


def test_without_turns_a_completion_is_one_and_a_column_that_is_missing_is_named():
    def reads(last_turns, policy_texts, transcripts, policy_ids):
        assert last_turns == policy_texts == transcripts == ["7", "8"] and policy_ids == [[1], [1]]
        return [1.0, 0.0]

    assert given(reads, ["7", "8"]) == [1.0, 0.0]
    missing = given(lambda last_turns, truth: [0.0], ["7"], answer=["7"])
    assert "needs the column 'truth'" in missing.reason and "(found: answer)" in missing.reason


def test_format_reads_the_thought_that_the_prompt_has_opened():
    """DeepSeek-R1's generation prompt ends with <think>, so that no completion begins with it."""
    said = ["a</think><answer>4</answer>", "<think>a</think><answer>4</answer>", "<answer>4</answer>"]
    assert given(NAMES["format"], said, opened_thoughts=["<think>\n"] * 3) == [1.0, 0.0, 0.0]
    assert given(NAMES["format"], said) == [0.0, 1.0, 0.0]
    own = Format(r".*</think><answer>4</answer>")
    assert given(own, said, opened_thoughts=["<think>\n"] * 3) == [1.0, 1.0, 0.0], "one's own pattern is for the completion"


def test_an_environment_that_speaks_as_the_assistant_is_not_the_policy():
    talk = [{"role": "assistant", "content": "I pass"}, {"role": "assistant", "content": "another agent says 12"}]
    assert given(NAMES["numeric"], [talk], answer=["12"], policy_turns=[["I pass"]]) == [0.0]


def test_lengths_count_the_tokens_of_the_policy():
    """70 of its own, 344 of the environment's, 100 allowed: -70 / 100, and not -414 / 100; (100 - 50 - 70) / 50 for DAPO's."""
    ids = {"completion_ids": [[1] * 414], "policy_ids": [[1] * 70]}
    assert given(Length(100), ["text"], **ids) == [-0.70]
    assert given(SoftOverlong(100, 50), ["text"], **ids) == [-0.40]
    assert Length(100)([[1] * 414]) == [-4.14], "negative control: what it was charged for all"


def test_adapters_say_what_they_read():
    module = f"{__file__}:"
    whole, last = Verl(f"{module}spoken", whole_conversation=True), Verl(f"{module}spoken")
    talk = conversation("no")
    assert given(last, [talk], ground_truth=["no"]) == [2.0]
    assert given(whole, [talk], ground_truth=["no"]) == [float(len(transcript_of(talk)))]
    rubric = NAMES["verifiers"].__class__(f"{module}messages")
    assert given(rubric, [talk], answer=["x"]) == [3.0]


def spoken(source, text, truth, extra):
    return float(len(text))


def messages(completion):
    return float(len(completion))


def test_the_texts_of_messages():
    talk = conversation("so 12")
    assert turns_of(talk) == [CALL, "so 12"] and text_of(talk) == "so 12" and text_of("x") == "x"
    assert text_of([{"role": "tool", "content": "12"}]) == "" and transcript_of("x") == "x"
    assert turns_of([{"role": "assistant", "content": None, "tool_calls": []}]) == [""]


def test_a_pool_gives_what_a_call_gives_and_samples_are_joined_with_their_turns():
    parts = [
        Samples(["q"], [conversation("12")], [[1, 2, 3]], {"answer": ["12"]}, policy_turns=[[CALL, "12"]], policy_ids=[[1]]),
        Samples(["q"], [conversation("no")], [[1, 2, 3]], {"answer": ["12"]}, policy_turns=[[CALL, "no"]], policy_ids=[[1, 2]]),
    ]
    specs = [resolve("numeric"), resolve({"reward": "length", "max_completion_length": 4})]
    with RewardPool(specs, timeout=60.0) as pool:
        found = [result.value for result in results(pool, *parts)]
    assert found == [result.value for result in results(InlineScorer(specs), *parts)] == [0.75, -0.5]
    assert concatenate(parts).policy_ids == [[1], [1, 2]] and concatenate(parts).policy_turns == [[CALL, "12"], [CALL, "no"]]
    with pytest.raises(ValueError, match="same columns and optional fields"):
        concatenate([parts[0], Samples(["q"], ["12"], [[1]], {"answer": ["12"]})])
    with pytest.raises(ValueError, match="the same length"):
        Samples(["q"], ["12"], [[1]], policy_ids=[[1], [2]])


def test_a_parameter_of_that_name_is_the_built_ins():
    spec = resolve({"reward": "verl", "function": f"{__file__}:spoken", "whole_conversation": True})
    assert spec.function.whole_conversation
    with pytest.raises(UserError, match="no parameter 'whole'"):
        resolve({"reward": "verl", "whole": True})
