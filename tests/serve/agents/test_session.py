"""How requests of an agent meet the tokens of earlier ones, with a chat template between them."""

from __future__ import annotations

import pytest

from psigrad.language.data.dataset_rows import Row, validate
from psigrad.language.data.templates import CHATML, prompt_ids
from psigrad.language.models import tiny
from psigrad.language.rollout.types import Completion, SamplingParams
from psigrad_serve.agents.agent_session import Session, SessionOver
from psigrad_serve.agents.token_tree import TokenTree

# As Qwen3's: what was thought is shown of the last turn alone, and the prompt may open an empty thought.
FORGETS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' and not loop.last -%}{{- message['content'].split('</think>')[-1] + eos_token -}}
{%- else -%}{{- message['content'] + eos_token -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ASKED = [{"role": "user", "content": "What is 1 + 1?"}]


def tokenizer_of(template: str = CHATML):
    made = tiny.tokenizer(["What is 1 + 1? add two numbers"], 300)
    made.chat_template = template
    return made


def session_of(tokenizer, **columns) -> Session:
    row = Row("x", prompt=ASKED, columns=columns)
    tree = TokenTree(3, tuple(prompt_ids(tokenizer, row)))
    return Session(0, 0, row, tree, SamplingParams(max_tokens=8), tokenizer, most=4)


def asked(session: Session, messages, tools=()):
    """A request in OpenAI's form, as the gateway reads it."""
    raw = {"prompt": messages, **({"tools": list(tools)} if tools else {})}
    row = validate(raw, "prompt-only", "the request", empty=True)
    row, ids = session.read(row, tuple(prompt_ids(session.tokenizer, row)))
    return row, session.ask(row, ids)


def answered(session: Session, row, request, text: str, reply, *, reason="stop", whole=True) -> tuple[int, ...]:
    """The policy's text as tokens, in pieces of a character where a tokenizer would take longer ones."""
    ids = [session.tokenizer(c, add_special_tokens=False).input_ids for c in text]
    ids = tuple(token for own in ids for token in own) + ((session.tokenizer.eos_token_id,) if reason == "stop" else ())
    logs = (-1.0,) * len(ids)
    session.answer(request, row, Completion(ids, logs, logs, reason, 0), {"role": "assistant", **reply}, whole)
    return ids


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled_not_those_of_its_text():
    session = session_of(tokenizer_of())
    row, first = asked(session, ASKED)
    ids = answered(session, row, first, "What is", {"content": "What is"})
    said = [*ASKED, {"role": "assistant", "content": "What is"}, {"role": "user", "content": "say"}]
    _, second = asked(session, said)
    assert first.parent is None and second.parent == 0
    assert second.prompt_ids[: len(first.prompt_ids) + len(ids)] == first.prompt_ids + ids
    anew = tuple(prompt_ids(session.tokenizer, Row("x", prompt=said)))
    assert second.prompt_ids != anew, "negative control: the same text in other tokens"
    assert session.tokenizer.decode(second.prompt_ids) == session.tokenizer.decode(anew)


def test_a_cut_answer_gets_its_end_which_is_not_trained():
    session = session_of(tokenizer_of())
    row, first = asked(session, ASKED)
    ids = answered(session, row, first, "What", {"content": "What"}, reason="length")
    row, second = asked(session, [*ASKED, {"role": "assistant", "content": "What"}, {"role": "user", "content": "on"}])
    answered(session, row, second, "is", {"content": "is"})
    behind = second.prompt_ids[len(first.prompt_ids) + len(ids) :]
    assert behind[0] == session.tokenizer.eos_token_id
    made = session.trajectory(0)
    assert made.mask == (True,) * len(ids) + (False,) * len(behind) + (True,) * 3 and not made.branches


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
    ],
)
def test_a_call_that_comes_back_in_another_form_keeps_its_tokens(written):
    session = session_of(tokenizer_of())
    row, first = asked(session, ASKED, [TOOL])
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ids = answered(session, row, first, written, {"content": "", "tool_calls": [call]})
    back = {"type": "function", "id": "call-1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [back]}
    _, second = asked(session, [*ASKED, turn, {"role": "tool", "tool_call_id": "call-1", "content": "2"}], [TOOL])
    assert second.parent == 0 and second.prompt_ids[: len(first.prompt_ids) + len(ids)] == first.prompt_ids + ids


BRANCHES = [
    pytest.param(CHATML, "yes", {"content": "yes"}, "no", (), True, id="an edited answer"),
    pytest.param(CHATML, "yes", {"content": "yes"}, "yes", (TOOL,), True, id="other tools"),
    pytest.param(CHATML, "yes:", {"content": "yes"}, "yes", (), False, id="a stop string was cut off"),
    pytest.param(
        FORGETS, "<think>so</think>yes", {"content": "<think>so</think>yes"}, "<think>so</think>yes", (), True, id="rewritten"
    ),
]


@pytest.mark.parametrize(("template", "text", "reply", "back", "tools", "whole"), BRANCHES)
def test_a_history_that_reads_otherwise_begins_a_branch(template, text, reply, back, tools, whole):
    session = session_of(tokenizer_of(template))
    row, first = asked(session, ASKED)
    answered(session, row, first, text, reply, whole=whole)
    messages = [*ASKED, {"role": "assistant", "content": back}, {"role": "user", "content": "on"}]
    row, second = asked(session, messages, tools)
    assert second.parent is None
    answered(session, row, second, "is", {"content": "is"})
    made = session.trajectory(0)
    assert [c.prompt_ids for c in made.contexts] == [first.prompt_ids, second.prompt_ids] and all(made.mask)


def test_negative_control_the_template_that_forgets_goes_on_where_there_is_nothing_to_forget():
    session = session_of(tokenizer_of(FORGETS))
    row, first = asked(session, ASKED)
    answered(session, row, first, "yes", {"content": "yes"})
    assert asked(session, [*ASKED, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "on"}])[1].parent == 0


def test_plain_text_goes_on_where_it_holds_all_that_was_written():
    session = session_of(tokenizer_of())
    row, ids = Row("x", prompt="a:"), (5, 6)
    first = session.ask(row, ids)
    made = answered(session, row, first, "b", {"content": "b"}, reason="length")
    assert session.ask(Row("x", prompt="a:b c"), (7,)).prompt_ids[:3] == (*ids, *made)
    assert session.ask(Row("x", prompt="a:c"), (7,)).parent is None


def test_rewards_see_the_last_answer_and_the_conversation_that_led_to_it():
    session = session_of(tokenizer_of())
    row, first = asked(session, ASKED)
    answered(session, row, first, "yes", {"content": "yes"})
    other = [{"role": "user", "content": "Sum up: yes"}]
    row, second = asked(session, other)
    answered(session, row, second, "no", {"content": "no"})
    made = session.trajectory(0)
    assert made.messages == ({"role": "assistant", "content": "no"},) and made.answer == "no"
    assert made.policy_turns == ("yes", "no") and made.turns == 2


def test_a_session_that_is_over_or_has_had_its_answers_is_refused():
    session = session_of(tokenizer_of())
    for _ in range(4):
        asked(session, ASKED)
    with pytest.raises(SessionOver, match="reached its limit of 4 answers"):
        asked(session, ASKED)
    assert "more than 4 requests (agent_calls)" in session.trajectory(0).reason
    session = session_of(tokenizer_of())
    session.over = True
    with pytest.raises(SessionOver, match="is over"):
        asked(session, ASKED)


def test_the_row_s_own_template_arguments_hold_where_a_request_has_none():
    template = CHATML.replace("{%- if add_generation_prompt", "{%- if loud -%}LOUD{%- endif -%}{%- if add_generation_prompt")
    session = session_of(tokenizer_of(template), chat_template_kwargs={"loud": True})
    _, request = asked(session, ASKED)
    assert request.prompt_ids == session.tree.prompt_ids and "LOUD" in session.tokenizer.decode(request.prompt_ids)
    assert request.seed == 3
