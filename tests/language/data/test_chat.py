"""Nothing that a row says vanishes: every field of every message is trained, read, used, or refused by its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from psigrad.config import Model, Sampling
from psigrad.errors import UserError
from psigrad.language.data.chat.rendering import arguments_of, day_of, set_render_settings
from psigrad.language.data.dataset_rows import Row, RowError, validate
from psigrad.language.data.sources import from_rows, load
from psigrad.language.data.templates import describe_rewrites, example, examples, observation_ids, prompt_ids, stop_token_ids
from psigrad.language.loading.load_model import configure_chat
from psigrad.language.loading.samplers import sampling_params
from psigrad.language.recipes.row_limits import log_rewrites

Build = Callable[..., PreTrainedTokenizerFast]
USER, BOT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}
START = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWS_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sft(*messages: Any, **columns: Any) -> Row:
    return validate({"messages": list(messages), **columns}, "messages", "my.jsonl:7")


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}, **more}]}


def texts(tokenizer: PreTrainedTokenizerFast, row: Row) -> list[str]:
    """What is trained, by turns."""
    found = []
    for made in examples(tokenizer, row):
        edges = [i for i in range(1, len(made.ids)) if made.mask[i] != made.mask[i - 1]]
        edges += [len(made.ids)] if len(edges) % 2 else []
        found += [tokenizer.decode(made.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return found


def test_rows_through_parquet_are_those_of_jsonl(tmp_path: Path, build: Build) -> None:
    """Arrow gives every object the keys of all others."""
    schema = [{"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": {n: {"type": t}}}}}
              for n, t in (("city", "string"), ("a", "integer"))]  # fmt: skip
    rows = [{"messages": [USER, call({name: value})], "tools": [tool]}
            for name, value, tool in (("city", "Rome", schema[0]), ("a", 3, schema[1]))]  # fmt: skip
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "my.parquet")
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert pa.parquet.read_table(tmp_path / "my.parquet").to_pylist() != rows, "the file must have nulls: the trap"
    tokenizer = build(SHOWS_CALLS)
    for one, other in zip(
        *(load(str(tmp_path / f"my.{end}"), form="messages").rows for end in ("parquet", "jsonl")), strict=True
    ):
        assert one.messages == other.messages
        assert arguments_of(tokenizer, one) == arguments_of(tokenizer, other)
        assert texts(tokenizer, one) == texts(tokenizer, other)
        assert "null" not in texts(tokenizer, one)[0]


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}', '{ "city" : "Rome" }'])
def test_arguments_as_json_text_are_trained_like_an_object(arguments: Any, build: Build) -> None:
    expected = '[{"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}]<|im_end|>'
    assert texts(build(SHOWS_CALLS), sft(USER, call(arguments))) == [expected]


def test_a_null_in_json_text_is_the_callers_own() -> None:
    messages = sft(USER, call('{"city": null}')).messages
    assert messages is not None and messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}
    flat = sft(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]}).messages
    assert flat is not None and flat[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("name", ["weight", "train", "loss_mask"])
def test_a_turn_of_weight_0_is_context(name: str, plain_chatml: PreTrainedTokenizerFast) -> None:
    rest = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "there", name: 1}]
    row = sft(USER, {**BOT, name: 0}, *rest)
    assert texts(plain_chatml, row) == ["there<|im_end|>"]
    (built,) = examples(plain_chatml, row)
    assert plain_chatml.decode(built.ids).startswith(START + "the cat<|im_end|>\n"), "the weight is in no text"
    with pytest.raises(RowError, match=r"my.jsonl:7: column 'messages' has no trained assistant turn"):
        example(plain_chatml, sft(USER, {**BOT, name: 0}))


def words() -> PreTrainedTokenizerFast:
    """Seven words, and turns that are a role, a word and an end."""
    names = ["user", "assistant", "hi", "yes", "why", "so", "<|im_end|>"]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="so"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    return tokenizer


TALK = [("user", "hi"), ("assistant", "yes"), ("user", "why"), ("assistant", "so")]
TALK_IDS = [0, 2, 6, 1, 3, 6, 0, 4, 6, 1, 5, 6]


@pytest.mark.parametrize(
    ("weights", "trained"),
    [
        ({"loss_mask": [0, 0, 0, 1]}, [10, 11]),
        ({"train": [False, True, False, False]}, [4, 5]),
        ({"weight": [0, 1.0, 0, 1]}, [4, 5, 10, 11]),
        ({"loss_mask": [0, 0, 0, 1], "weight": [0, 1, 0, 1]}, [10, 11]),
        ({"loss_mask": 1, "weight": None, "train": "a train", "attention_mask": [1] * 12}, [4, 5, 10, 11]),
    ],
)
def test_a_column_of_weights_has_one_for_each_message(weights: dict[str, Any], trained: list[int]) -> None:
    openai = {"messages": [{"role": role, "content": word} for role, word in TALK], **weights}
    sharegpt = {"conversations": [{"from": role, "value": word} for role, word in TALK], **weights}
    for form, row in (("messages", openai), ("sft", openai), ("sft", sharegpt)):
        (made,) = examples(words(), from_rows([row], form).rows[0])
        assert (made.ids, [i for i, learns in enumerate(made.mask) if learns]) == (TALK_IDS, trained), "the end is trained too"
    assert "loss_mask" not in openai["messages"][1], "the row that was given is as it was"


def test_a_system_column_moves_no_weight() -> None:
    messages = [{"role": role, "content": word} for role, word in TALK]
    row = {"messages": messages, "system": "hi", "loss_mask": [0, 0, 0, 1]}
    made = from_rows([row], "sft").rows[0].messages
    assert made is not None and [turn["loss_mask"] for turn in made] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"loss_mask": [0, 1, 1]}, "'loss_mask' has 3 weights for 2 messages; give one weight per message, not one per token"),
        ({"loss_mask": [0, None]}, "'loss_mask' has 1 weight for 2 messages"),
        ({"weight": [0, 0.5]}, r"'messages\[1\].weight' is 0.5; expected 1 or true if the turn is trained, else 0 or false"),
        ({"loss_mask": [1, 1]}, r"'messages\[0\].loss_mask' is 1, but only the assistant's turns are trained"),
        ({"loss_mask": [0, 0], "messages": [USER, {**BOT, "loss_mask": 1}]}, "'loss_mask' is both a column and a field of"),
        ({"weight": 0.5}, "'weight' is 0.5; every row has the same weight.*--columns weight=other"),
        ({"train": False}, "'train' is False; every row has the same weight, so remove"),
        ({"loss_mask": "0"}, "'loss_mask' is '0'"),
        ({"assistant_masks": [0, 1]}, "'assistant_masks' looks like a mask of tokens.*--columns assistant_masks=other"),
        ({"messages": None, "text": "a b", "loss_mask": [0, 1]}, "'loss_mask' looks like a mask of tokens"),
        ({"prompt": "a", "completion": "b", "completion_mask": [0, 1]}, "'completion_mask' looks like a mask of tokens"),
        (
            {"prompt": [USER], "completion": [BOT], "loss_mask": [0, 1]},
            "'loss_mask' looks like.*give messages, each with a weight",
        ),
    ],
)
def test_a_mask_that_cannot_be_meant_is_refused_by_name(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"rows:1: column {said}"):
        from_rows([{"messages": [USER, BOT], **columns}], "sft")
    if "messages" not in columns and "prompt" not in columns:
        name = next(iter(columns))
        assert from_rows([{"messages": [USER, BOT], **columns}], "sft", columns={name: "other"}).rows, "it is renamed"


def test_reward_functions_get_masks_as_other_columns() -> None:
    assert from_rows([{"prompt": "a", "weight": 0.5, "loss_mask": [0, 1]}], "prompt-only").rows[0].columns["weight"] == 0.5


def test_thoughts_a_template_has_no_field_for_stand_in_tags(plain_chatml: PreTrainedTokenizerFast) -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        row = sft(USER, {**BOT, name: "two"})
        assert texts(plain_chatml, row) == ["<think>\ntwo\n</think>\n\nthe cat<|im_end|>"]
        assert describe_rewrites(plain_chatml, row) == ["thoughts are written in <think> tags before the answer"]


def test_calls_that_a_template_does_not_show_are_written_in_hermes_form(plain_chatml: PreTrainedTokenizerFast) -> None:
    row = sft(USER, {**call({"city": "Rome"}), "content": "Hm."})
    hermes = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    assert texts(plain_chatml, row) == [hermes]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({**USER, "name": "Al"}, r"messages\[0\].name"),
        ({**BOT, "mood": "gay"}, r"messages\[1\].mood"),
        ({**BOT, "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}, r"messages\[1\].train_detail"),
        ({**BOT, "annotations": [{"a": 1}]}, r"messages\[1\].annotations"),
    ],
)
def test_what_a_template_leaves_out_is_refused_by_place_and_name(
    message: dict[str, Any], named: str, plain_chatml: PreTrainedTokenizerFast, build: Build
) -> None:
    row = sft(*(message if one["role"] == message["role"] else one for one in (USER, BOT)))
    with pytest.raises(RowError, match=rf"my.jsonl:7: column '{named}' is dropped by the chat template"):
        example(plain_chatml, row)
    shown = "{% for m in messages %}{{ '<|im_start|>' }}{{ m | tojson }}<|im_end|>{% endfor %}"
    shown += "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    assert example(build(shown), row).ids, "a template that shows it takes it"
    empty = {name: value if name in ("role", "content") else type(value)() for name, value in message.items()}
    assert example(plain_chatml, sft(*(empty if one["role"] == empty["role"] else one for one in (USER, BOT)))).ids


def test_a_text_that_vanishes_is_refused_and_one_that_is_changed_is_not(build: Build) -> None:
    picky = PLAIN.replace("m['content']", "('' if 'cat' in m['content'] else m['content'] | upper)")
    with pytest.raises(RowError, match=r"column 'messages\[1\].content' is dropped .*the cat"):
        example(build(picky), sft(USER, BOT))
    assert texts(build(picky), sft(USER, {**BOT, "content": "there"})) == ["THERE<|im_end|>"]
    half = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
    thought = sft(USER, {**BOT, "content": "<think>two</think>the cat"})
    assert texts(build(half), thought) == ["<think>\ntwo\n</think>\n\nthe cat<|im_end|>"], "as it was sampled"


def test_a_tools_answer_that_a_template_does_not_show_is_a_turn_of_the_user(build: Build) -> None:
    deaf = build(PLAIN.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}"))
    answers = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    row = validate({"prompt": [USER, call({}), *answers]}, "prompt-only", "my.jsonl:7")
    said = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    end = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert deaf.decode(prompt_ids(deaf, row)).endswith("</tool_call><|im_end|>\n" + end)
    assert deaf.decode(observation_ids(deaf, row, answers)) == "\n" + end


def test_an_answer_behind_a_call_that_the_template_refuses_is_read_behind_a_turn_of_words(build: Build) -> None:
    refuse = "{% if m['tool_calls'] and m['tool_calls'][0]['function']['name'] == 'f' %}{{ raise_exception('not f') }}{% endif %}"
    shy = build(SHOWS_CALLS.replace("%}{{ '<|im_start|>' + m", f"%}}{refuse}{{{{ '<|im_start|>' + m", 1))
    row = validate({"prompt": [USER]}, "prompt-only", "my.jsonl:7")
    answer = [{"role": "tool", "name": "f", "content": "4"}]
    assert shy.decode(observation_ids(shy, row, answer)) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


def test_content_parts_of_text_are_one_text(plain_chatml: PreTrainedTokenizerFast) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert sft(parts, BOT).messages == sft(USER, BOT).messages


def test_a_part_that_names_no_type_is_text(plain_chatml: PreTrainedTokenizerFast) -> None:
    assert texts(plain_chatml, sft(USER, {**BOT, "content": [{"text": "the "}, {"text": "cat", "type": None}]})) == [
        "the cat<|im_end|>"
    ]
    with pytest.raises(RowError, match=r"messages\[0\].content\[0\]' has no text"):
        sft({**USER, "content": [{"image_url": "a.png"}]}, BOT)


def test_a_call_without_words_leaves_no_word_in_a_template_of_parts(build: Build) -> None:
    content = "(m['content'] or '')"
    tokenizer = build(
        SHOWS_CALLS.replace(content, "''").replace("}}{% if m", "}}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% if m")
    )
    (text,) = texts(tokenizer, sft(USER, call({"city": "Rome"})))
    assert text == '[{"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}]<|im_end|>'


@pytest.mark.parametrize(
    ("columns", "message", "said"),
    [
        ({"tools": ["f"]}, BOT, r"'tools\[0\]' is a string; a tool is an object"),
        ({"tools": '[{}, "f"]'}, BOT, r"'tools\[1\]' is a string; a tool is an object"),
        (
            {"chat_template_kwargs": {"tools": [{}]}},
            BOT,
            "'chat_template_kwargs.tools' is not read; give the tools in a column",
        ),
        (
            {},
            {**BOT, "reasoning": {"effort": "low"}},
            r"'messages\[1\].reasoning' is \{'effort': 'low'\}; expected the thoughts as a string",
        ),
        ({}, call([]), r"'messages\[1\].tool_calls\[0\].function.arguments' is \[\]; it must be an object"),
        ({}, call(0), r"'messages\[1\].tool_calls\[0\].function.arguments' is 0; it must be an object"),
    ],
)
def test_what_would_be_lost_or_break_a_template_is_refused_by_place(columns: Any, message: Any, said: str) -> None:
    with pytest.raises(RowError, match=said):
        sft(USER, message, **columns)


def test_a_system_prompt_without_a_place_stands_before_the_users_turn(build: Build) -> None:
    strict = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    tokenizer = build(strict)
    row = validate({"prompt": [{"role": "developer", "content": "be"}, USER]}, "prompt-only", "my.jsonl:7")
    expected = "<|im_start|>user\nbe\n\nhello<|im_end|>\n<|im_start|>assistant\n"
    silent = build(strict.replace("!= 'system'", "not in ('system', 'developer')"))
    assert silent.decode(prompt_ids(silent, row)) == expected
    assert tokenizer.decode(prompt_ids(tokenizer, row)).startswith("<|im_start|>developer\nbe")


def test_rendered_text_gets_no_second_bos_and_no_second_end(build: Build) -> None:
    tokenizer = build(PLAIN, bos=True)
    assert tokenizer("<s>hello")["input_ids"][:2] == [tokenizer.bos_token_id] * 2, "the tokenizer must double it: the trap"
    for text in ("<s>hello<|im_end|>\n", "<s>hello<|im_end|>", "hello<|im_end|>\n"):
        built = example(tokenizer, validate({"text": text}, "sft", "x"))
        assert built.ids.count(tokenizer.bos_token_id) == 1 and tokenizer.eos_token_id not in built.ids
        assert tokenizer.decode(built.ids).endswith(text.removeprefix("<s>"))
        assert tokenizer.decode([t for t, own in zip(built.ids, built.mask, strict=True) if own]) == "hello<|im_end|>"
    assert prompt_ids(tokenizer, Row("x", prompt="<s>hello")) == prompt_ids(tokenizer, Row("x", prompt="hello"))
    plain = example(tokenizer, validate({"text": "hello\n"}, "sft", "x"))
    assert tokenizer.decode(plain.ids) == "<s>hello\n<|endoftext|>" and all(plain.mask[1:])


DATED = "{{ strftime_now('%d.%m.%Y') }}" + PLAIN


def test_the_date_that_a_template_prints_is_the_runs(build: Build) -> None:
    tokenizer, row = build(DATED), Row("x", prompt=[USER])
    today = date.today().strftime("%d.%m.%Y")
    assert tokenizer.decode(prompt_ids(tokenizer, row)).startswith(today), "without a run it is today: the trap"
    set_render_settings(tokenizer, {}, date(2001, 2, 3))
    assert tokenizer.decode(prompt_ids(tokenizer, row)).startswith("03.02.2001") and day_of(tokenizer) == date(2001, 2, 3)
    other = build(DATED)
    set_render_settings(other, {}, date(2004, 5, 6))
    assert other.decode(prompt_ids(other, row)).startswith("06.05.2004")
    assert tokenizer.decode(prompt_ids(tokenizer, row)).startswith("03.02.2001"), "each tokenizer has its own"


def test_a_run_that_goes_on_prints_the_day_of_its_start(build: Build, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"date": "2001-02-03"}))
    configure_chat(tokenizer := build(DATED), Model(), tmp_path)
    assert day_of(tokenizer) == date(2001, 2, 3)
    configure_chat(tokenizer, Model())
    assert day_of(tokenizer) == date.today()


def test_arguments_of_the_run_hold_where_a_row_says_nothing(build: Build) -> None:
    tokenizer = build("{{ mood | default('calm') }}{{ messages[0]['content'] }}<|im_end|>{{ 'x' if add_generation_prompt }}")
    configure_chat(tokenizer, Model(chat_template_kwargs='{"mood": "gay"}'))
    assert tokenizer.decode(prompt_ids(tokenizer, Row("x", prompt=[USER]))) == "gayhello<|im_end|>x"
    own = Row("x", prompt=[USER], columns={"chat_template_kwargs": {"mood": "sad"}})
    assert tokenizer.decode(prompt_ids(tokenizer, own)) == "sadhello<|im_end|>x"


def test_a_template_and_an_eos_are_taken_from_the_settings(build: Build, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(PLAIN)
    (tmp_path / "broken.jinja").write_text("{{ messages }}\n{% for")
    (tmp_path / "latin.jinja").write_bytes(b"{{ messages }} \xe9")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text(DATED)
    tokenizer = build()
    configure_chat(tokenizer, Model(chat_template_path=str(tmp_path / "mine.jinja"), eos_token="<|im_end|>"))
    assert (tokenizer.chat_template, tokenizer.eos_token) == (PLAIN, "<|im_end|>")
    configure_chat(tokenizer, Model(chat_template_path=str(tmp_path / "model")))
    assert tokenizer.chat_template == DATED
    for wrong, why in (
        (Model(chat_template_path="no.jinja"), "no file"),
        (Model(chat_template_path=str(tmp_path / "latin.jinja")), "cannot be read"),
        (Model(eos_token="<|im_ende|>"), "not a token.*im_end"),
        (Model(chat_template_kwargs="{a"), "not JSON"),
        (Model(chat_template_kwargs="[1]"), "an object"),
        (
            Model(chat_template_kwargs='{"mesages": []}'),
            "'mesages'.*does not read.*did you mean 'messages'",
        ),
        (Model(chat_template_path=str(tmp_path / "broken.jinja")), r"not valid Jinja \(line 2"),
    ):
        with pytest.raises(UserError, match=why):
            configure_chat(tokenizer, wrong)


THINKS = "{% if enable_thinking is defined and enable_thinking is false %}{{ 'no' }}{% endif %}" + PLAIN
MOODS = "{{ mood | default('calm') }}{% if loud %}!{% endif %}{{ extra }}" + PLAIN


@pytest.mark.parametrize(
    ("template", "kwargs", "said"),
    [
        (THINKS, {"enable_thinking": "fals"}, "enable_thinking = 'fals'; the chat template expects true or false"),
        (THINKS, {"enable_thinking": 0}, "enable_thinking = 0; the chat template expects true or false"),
        (MOODS, {"mood": True}, "mood = True; the chat template expects a string"),
        (MOODS, {"loud": "false"}, "loud = 'false'; the chat template expects true or false"),
        (MOODS, {"lout": True}, "'lout', which the chat template does not read.*did you mean 'loud'"),
        (MOODS, {"m": "a"}, "'m', which the chat template does not read"),  # a name that the template sets itself
        (THINKS, {"enable_thinking": False}, ""),
        (MOODS, {"mood": "gay", "loud": True, "extra": [1]}, ""),
    ],
)
def test_an_argument_that_the_template_does_not_take_is_refused(template: str, kwargs: Any, said: str, build: Build) -> None:
    """In the settings and, by file and line, in a row."""
    tokenizer = build(template)
    row = Row("my.jsonl:7", prompt=[USER], columns={"chat_template_kwargs": kwargs})
    if not said:
        configure_chat(tokenizer, Model(chat_template_kwargs=json.dumps(kwargs)))
        assert prompt_ids(tokenizer, row)
        return
    with pytest.raises(UserError, match=f"^chat_template_kwargs has {said}"):
        configure_chat(tokenizer, Model(chat_template_kwargs=json.dumps(kwargs)))
    with pytest.raises(RowError, match=f"^my.jsonl:7: chat_template_kwargs has {said}"):
        prompt_ids(tokenizer, row)


def test_a_token_without_an_embedding_is_refused_by_name(plain_chatml: PreTrainedTokenizerFast, build: Build) -> None:
    tokenizer = build(PLAIN)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    set_render_settings(tokenizer, {}, date.today(), rows=len(tokenizer) - 1)
    assert prompt_ids(tokenizer, Row("x", prompt=[USER]))
    with pytest.raises(UserError, match=r"'<\|new\|>' has the id \d+.*resize_token_embeddings"):
        prompt_ids(tokenizer, Row("x", prompt="a<|new|>"))


def test_a_template_that_opens_no_turn_is_refused_by_name(build: Build) -> None:
    deaf = PLAIN.partition("{% if add_generation_prompt")[0]
    with pytest.raises(UserError, match=r"add_generation_prompt changes nothing.*<\|im_start\|>assistant.*--chat-template-path"):
        prompt_ids(build(deaf), Row("x", prompt=[USER]))


def test_a_header_of_words_that_no_generation_prompt_opens_is_refused_too(build: Build) -> None:
    """Sampled from "User: a" the model would have to write "Assistant: " itself."""
    deaf = "{% for m in messages %}{{ m['role'].title() + ': ' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    with pytest.raises(UserError, match=r"add_generation_prompt changes nothing.*turns begin with 'Assistant: '"):
        prompt_ids(build(deaf), Row("x", prompt=[USER]))
    # Mistral's turns begin with nothing, and its prompt is whole
    bare = (
        "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' else ' ' + m['content'] + "
        "'<|im_end|>' }}{% endfor %}"
    )
    assert prompt_ids(build(bare), Row("x", prompt=[USER]))


def test_the_eos_stops_where_the_template_shows_no_end(build: Build) -> None:
    tokenizer = build("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}")
    assert stop_token_ids(tokenizer) == (tokenizer.eos_token_id,)
    row, told = Row("my.jsonl:7", prompt=[USER]), list[str]()
    log_rewrites(tokenizer, [row], lambda kind, text, **_: told.append(text))
    log_rewrites(build(PLAIN), [row], lambda kind, text, **_: told.append(text))
    assert told == [
        "The chat template does not support everything in my.jsonl:7: turns have no end token, so only the EOS "
        "(and --stop-token-ids) ends a completion."
    ], "what the fallback costs, once, and nothing where there is an end"
    with pytest.raises(RowError, match="does not end the assistant's turn"):
        observation_ids(tokenizer, Row("x", prompt=[USER]), "4")


def test_an_answer_begun_in_the_prompt_is_trained_from_there_on(plain_chatml: PreTrainedTokenizerFast) -> None:
    begun = {"role": "assistant", "content": "the "}
    row = Row("my.jsonl:7", prompt=[USER, begun], completion=[{"role": "assistant", "content": "cat"}])
    assert plain_chatml.decode(prompt_ids(plain_chatml, row)) == START + "the "
    (built,) = examples(plain_chatml, row)
    prompt = prompt_ids(plain_chatml, row)
    assert built.ids[: len(prompt)] == prompt and built.mask.index(True) == len(prompt)
    assert texts(plain_chatml, row) == ["cat<|im_end|>"]


@pytest.mark.parametrize("more", [{"reasoning_content": "two"}, {"tool_calls": call({})["tool_calls"]}])
def test_an_answer_begun_with_more_than_words_is_refused(more: Any, plain_chatml: PreTrainedTokenizerFast) -> None:
    """Only words can be continued: a thought or a call beside them would be nowhere in the prompt."""
    begun = {"prompt": [USER, {**BOT, **more}]}
    with pytest.raises(
        RowError, match=rf"my.jsonl:7: column 'prompt\[1\].{next(iter(more))}' is in the last turn, which the model continues"
    ):
        prompt_ids(plain_chatml, validate(begun, "prompt-only", "my.jsonl:7"))
    with pytest.raises(RowError, match=r"prompt\[1\]"):
        example(plain_chatml, validate(begun | {"completion": [BOT]}, "prompt-completion", "my.jsonl:7"))


def test_the_first_row_that_is_said_otherwise_is_told(plain_chatml: PreTrainedTokenizerFast) -> None:
    told: list[Any] = []
    thought = sft(USER, {**BOT, "thinking": "two"})
    log_rewrites(
        plain_chatml,
        [sft(USER, BOT), sft(USER, BOT, chat_template_kwargs={"nothing": 1}), replace(thought, source="my.jsonl:8"), thought],
        lambda kind, text, **more: told.append(text),
    )
    assert len(told) == 1 and "everything in my.jsonl:8: thoughts are written in <think> tags" in told[0]


def test_sampling_stops_at_the_end_of_a_call_where_only_later_rows_offer_tools(build: Build) -> None:
    """A turn that calls a tool ends with <|pad|> here, any other one with <|im_end|>."""
    template = SHOWS_CALLS.replace("{{ '<|im_end|>\n' }}", "{{ '<|pad|>\n' if m['tool_calls'] else '<|im_end|>\n' }}")
    tokenizer = build(template)
    plain, offers = Row("x:1", prompt=[USER]), Row("x:2", prompt=[USER], columns={"tools": [{"name": "add"}]})
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    ends = [tokenizer.convert_tokens_to_ids(word) for word in ("<|im_end|>", "<|pad|>")]
    for rows, stops in (([plain, plain], ends[:1]), ([plain, offers], ends), ([Row("x", prompt="text")], []), ([], [])):
        assert sampling_params(Sampling(), model, rows).stop_token_ids == (*stops,)
