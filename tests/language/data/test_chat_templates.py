"""Every chat template that TRL ships is right or refused in every column of docs/chat_templates.md, and a fault is noticed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
import scripts

from psigrad.errors import UserError
from psigrad.language.data import dataset_rows, templates
from psigrad.language.data.chat import dialect, rendering, turns
from psigrad.language.episodes import episode_history
from psigrad.language.training.offline.sft_task import SFTTask

WANTED = 38
# Of the 27 templates that write calls.
WANTED_WITH_CALLS = {"two rounds": 27, "two calls": 24, "thoughts with calls": 25, "words beside a call": 25}


maker = scripts.load("docs/make/chat_templates.py")


@pytest.fixture(scope="module")
def page() -> dict[str, dict[str, str]]:
    """The outcome of each check of each template, as the page has it: every check but those in the second table is right."""
    text = maker.PAGE.read_text(encoding="utf-8").partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    summary, _, others = text.partition("The others:")
    found = {name: dict.fromkeys(maker.COLUMNS, "yes") for name in re.findall(r"`(\w+)`", text)}
    rows = [line.strip("| \n").split(" | ") for line in others.strip().splitlines()[2:]]
    for name, *cells in rows:
        for outcome, columns in zip(maker.OUTCOMES, cells, strict=True):
            found[name.strip("`")] |= dict.fromkeys([] if columns == "–" else columns.split(", "), outcome)
    assert summary.strip().startswith(f"{len(found) - len(rows)} of {len(found)} pass all {len(maker.COLUMNS)} checks")
    return found


def test_nothing_is_silently_wrong_and_nearly_all_is_right(page: dict[str, dict[str, str]]) -> None:
    assert page.keys() == set(maker.names()) and len(page) == 41
    ways = {name: dialect.dialect_of(maker.tokenizer_of(name), {"tools": None}) for name in page}
    calling = [page[name] for name, way in ways.items() if way.tools and way.calls != "hermes"]  # in words of their own
    right, called = (
        {column: sum(cells[column] in ("yes", "dropped") for cells in rows) for column in maker.COLUMNS}
        for rows in (list(page.values()), calling)
    )
    assert "wrong" not in {cell for cells in page.values() for cell in cells.values()} and min(right.values()) >= WANTED, right
    assert len(calling) == 27 and all(called[name] >= least for name, least in WANTED_WITH_CALLS.items()), called


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "deepseek_r1_distill", "glm4moe", "gemma", "lfm2_2_5"])
def test_the_page_says_what_happens(name: str, page: dict[str, dict[str, str]]) -> None:
    found = {column: maker.outcome(name, column) for column in maker.COLUMNS}
    assert found == page[name], "run: python docs/make/chat_templates.py"


@pytest.mark.slow
def test_the_page_says_what_happens_on_every_template() -> None:
    text = maker.PAGE.read_text(encoding="utf-8")
    assert maker.page(text) == text, "run: python docs/make/chat_templates.py"


def _shift(made: Callable[..., Any]) -> Callable[..., Any]:
    """Masks that begin a token late."""

    def examples(*given: Any, **more: Any) -> Any:
        return [replace(one, mask=[False, *one.mask[:-1]]) for one in made(*given, **more)]

    return examples  # fmt: skip


def _rendered_once(talk: Any, **more: Any) -> Any:
    """Every turn as it stands in the whole conversation: the context in which nothing is sampled."""
    text = talk.render(talk.row.messages)
    words = [m["content"] for m in talk.row.messages if m["role"] == "assistant"]
    return [turns.Context(text, [(text.index(word), text.index(word) + len(word)) for word in words])]


def _deaf(field: str, value: Any) -> Callable[..., Any]:
    real = turns.dialect_of
    return lambda *given: replace(real(*given), **{field: value})


def _without(field: str) -> Callable[..., Any]:
    real = turns.rewrite
    strip = lambda m: {k: v for k, v in m.items() if k != field}  # noqa: E731
    return lambda messages, tools, way: real([strip(m) for m in messages], tools, way)


def _kept(tokenizer: Any, row: Any, messages: Any, known: str) -> Any:
    """The past as it was sampled, whatever the template makes of it."""
    heard = list(itertools.takewhile(lambda message: message["role"] != "assistant", reversed(messages)))[::-1]
    ids = templates.observation_ids(tokenizer, row, heard)
    return templates.Reading(known + tokenizer.decode(ids), ids, False)


def _end_twice(talk: Any, said: Any) -> tuple[str, str]:
    end, text = turns.render_between(talk, said)
    return end, end + text


# A fault for each column, and a template in whose row it must show.
FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "one turn": ("qwen2_5", templates, "examples", _shift(templates.examples)),
    "two turns": ("deepseek_r1_distill", templates, "contexts", _rendered_once),
    "thinking": ("llama3", turns, "dialect_of", _deaf("reasoning", "field")),
    "system": ("gemma3", turns, "rewrite", lambda messages, tools, way: (messages[-1:], tools)),
    "developer": ("qwen3", turns, "dialect_of", _deaf("developer", True)),
    "tools": ("llama3", turns, "dialect_of", _deaf("tools", True)),
    "tool answers": ("gemma", turns, "dialect_of", _deaf("calls", "object")),
    "two rounds": ("glm4moe", turns, "dialect_of", _deaf("call_next", "</arg_value>\n</tool_call><|observation|>")),
    "two calls": ("qwen2_5", templates, "examples", _shift(templates.examples)),
    "thoughts with calls": ("gptoss", turns, "_find_last_turn", lambda talk, messages, before, text: text[-9:]),
    "words beside a call": (
        "gemma4_v5",
        turns,
        "_find_last_turn",
        lambda talk, messages, *rest: rest[1][rest[1].index("Usambara") :],
    ),
    "environment turn": ("qwen3", templates, "render_between", _end_twice),
    "episode": ("qwen3", episode_history, "next_reading", _kept),
    "call parsed": ("qwen2_5", maker.tools, "read_calls", lambda *given: []),
    "stop token": ("llama3", templates, "stop_token_ids", lambda tokenizer, row=None: (tokenizer.eos_token_id,)),
    "generation prompt": ("qwen2_5", turns.Conversation, "render", None),
    "date": ("gptoss", rendering, "day_of", lambda tokenizer: date.today()),
}
assert dialect.SENTINEL  # what the faults are planted into


@pytest.mark.parametrize("column", FAULTS)
def test_a_fault_in_a_column_is_noticed(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, place, attribute, fault = FAULTS[column]
    before = maker.outcome(name, column)
    if column == "generation prompt":
        real = turns.Conversation.render
        fault = lambda self, messages, generation_prompt=False: real(self, messages)  # noqa: E731
    monkeypatch.setattr(place, attribute, fault)
    assert (before, maker.outcome(name, column) != "yes") == ("yes", True)


@pytest.mark.parametrize(
    ("name", "thought", "answer", "most"), [("qwen3", 60, 20, 1.3), ("gptoss", 60, 20, 1.3), ("qwen3", 0, 20, 2.0)]
)
def test_what_turns_in_contexts_of_their_own_cost(name: str, thought: int, answer: int, most: float) -> None:
    """The tokens that are computed, against those of one rendering that kept everything. Apart they are far more."""
    tokenizer, talk = maker.tokenizer_of(name), []
    for _ in range(8):
        more = {"reasoning_content": "the cat " * (thought // 2)} if thought else {}
        talk += [maker.user("sat on " * 10), maker.bot("the mat " * 10, **more)]
    texts = templates.examples(tokenizer, dataset_rows.validate({"messages": talk}, "sft", "x"))
    assert len(texts) == 8
    # the last text without the answers before it has every question once, and what is trained every thought and answer
    again = [len(tokenizer(said["content"].strip())["input_ids"]) for said in talk[1:-1:2]]
    once = len(texts[-1].ids) - sum(again) + sum(sum(text.mask) for text in texts[:-1])
    computed, apart = SFTTask(None, [texts]).tokens([0]), sum(len(text.ids) for text in texts)  # type: ignore[arg-type]
    assert once < computed < most * once and apart > (1.5 if thought else 3) * once


@pytest.mark.parametrize(
    ("name", "thought", "least"),
    [
        ("qwen3", 0, 1.0),
        ("qwen3", 20, 1.0),
        ("deepseek_r1_distill", 20, 1.0),
        ("phi3", 0, 1.0),
        ("gptoss", 20, 1.01),
        ("gptoss", 0, 1.34),
    ],
)
def test_nothing_exact_computes_less(name: str, thought: int, least: float) -> None:
    """A token behind two different beginnings is two computations: their number is the fewest tokens there can be."""
    tokenizer, talk = maker.tokenizer_of(name), []
    for turn in range(5):
        more = {"reasoning_content": f"the cat {turn} " * thought} if thought else {}
        talk += [maker.user(f"sat {turn} on " * 9), maker.bot(f"the {turn} mat " * 9, **more)]
    texts = templates.examples(tokenizer, dataset_rows.validate({"messages": talk}, "sft", "x"))
    assert len(texts) == (1 if name == "phi3" else 5)
    beginnings = {tuple(text.ids[: end + 1]) for text in texts for end in range(len(text.ids))}
    assert len(beginnings) <= SFTTask(None, [texts]).tokens([0]) <= least * len(beginnings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v2", "gemma4_v4", "qwen2_5"])
def test_what_is_said_beside_a_call_is_read_where_it_was_trained(name: str) -> None:
    """Gemma 4 writes it behind the call, and behind the tool's answer once there is one; Qwen before the call."""
    case, said = maker.Case(maker.tokenizer_of(name)), maker.bot("Look first.", tool_calls=[maker.CALL])
    answer = {"role": "tool", "tool_call_id": "c1", "name": maker.CITY, "content": maker.RULE}
    talk = [maker.user(maker.SAID), said, answer, maker.bot(maker.LAST)]
    for trained, read, served in maker._recited(case, talk, tools=[maker.TOOL]):
        assert trained == read == served
    assert "Look first." in case.text(read)
    row, form = case.row("prompt-only", prompt=talk[:1], tools=[maker.TOOL]), maker.tools.call_form_of(case.tokenizer)
    shape, asked = turns.turn_form(turns.Conversation(case.tokenizer, row), "user"), {maker.CITY: {"city": {"type": "string"}}}
    ((_, bare),) = case.turns(messages=[maker.user(maker.SAID), {**said, "content": ""}], tools=[maker.TOOL])
    end = maker.SPECIAL.findall(bare)[-1]
    message = form.turn(
        bare.partition(end)[0] + "Bye." if name == "qwen2_5" else bare.removesuffix(end) + f"Bye.{end}", asked, shape
    )
    assert message is not None and message["content"] == ("" if name == "qwen2_5" else "Bye."), "Qwen's has no place for it"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1_distill", "llama3_1", "phi3", "gptoss"])
def test_what_a_turn_is_trained_behind_is_what_transformers_renders_to_sample_it(name: str) -> None:
    """With thinking on and off; the oracle shares no code with the column: it is apply_chat_template of the messages."""
    talk = [
        maker.user("sat on"),
        maker.bot("the mat"),
        maker.user("the cat"),
        maker.bot("on"),
        maker.user("mat"),
        maker.bot("cat"),
    ]
    for kwargs in ({}, {"enable_thinking": False}) if name == "qwen3" else ({},):
        tokenizer = maker.tokenizer_of(name)
        rendering.set_render_settings(tokenizer, kwargs, date.today())
        found = maker._recited(maker.Case(tokenizer), talk)
        for place, (trained, read, _) in zip((1, 3, 5), found, strict=True):
            text = tokenizer.apply_chat_template(talk[:place], add_generation_prompt=True, tokenize=False, **kwargs)
            assert tokenizer.decode(read) == text
            thinks = name == "qwen3" and not kwargs  # an empty thought is context
            assert (
                tokenizer.decode(trained) == text + ("<think>\n\n</think>\n\n" if thinks else "") or name == "deepseek_r1_distill"
            )


def test_a_tokenizer_that_gets_another_eos_is_asked_again() -> None:
    """The template writes the EOS by its name: what ends a turn is another token then, though the special tokens are the same."""
    tokenizer = maker.tokenizer_of("qwen3")
    tokenizer.chat_template = templates.CHATML
    tokenizer.eos_token = "<|im_end|>"
    assert dialect.dialect_of(tokenizer, {"tools": None}).turn_end == "<|im_end|>"
    tokenizer.eos_token = "<|endoftext|>" if "<|endoftext|>" in tokenizer.get_vocab() else "<|im_start|>"
    assert dialect.dialect_of(tokenizer, {"tools": None}).turn_end == tokenizer.eos_token


def _call(arguments: dict[str, Any], content: str = "", **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return maker.bot(content, tool_calls=[{"id": "c1", "type": "function", "function": function}], **more)


_ROME = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
_GPT_CALL = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'


@pytest.mark.parametrize(
    ("name", "called", "trained"),
    [
        ("glm4moe", _call({"city": "Rome"}), f"{_ROME}<|observation|>"),
        ("glm4moe", _call({}), "<tool_call>weather\n</tool_call><|observation|>"),
        ("glm4moe", _call({"city": "Rome"}, "I look."), f"I look.\n{_ROME}<|observation|>"),
        ("gptoss", _call({"city": "Rome"}), _GPT_CALL.removeprefix("<|start|>assistant")),
        (
            "gptoss",
            _call({"city": "Rome"}, reasoning_content="I look."),
            f"<|channel|>analysis<|message|>I look.<|end|>{_GPT_CALL}",
        ),
    ],
)
def test_a_call_is_trained_as_the_template_writes_it(name: str, called: dict[str, Any], trained: str) -> None:
    """By hand. GLM ends no turn by itself; gpt-oss hides the thought beside a call once an answer follows, which was sampled
    where the thought is shown.
    """
    case, tool = maker.Case(maker.tokenizer_of(name)), {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "sun"}
    talk = [maker.user("go"), called, tool, maker.bot("Sunny.")]
    first, last = case.turns(messages=talk)
    assert first[1] == trained
    maker.same_context(last[0], case.prompt(talk[:3]))
    assert trained in last[0]
    assert last[1] == {"glm4moe": "Sunny.<|user|>", "gptoss": "<|channel|>final<|message|>Sunny.<|return|>"}[name]


@pytest.mark.parametrize(
    ("name", "cities", "content", "missing"),
    [
        ("gptoss", ["Rome", "Paris"], "", r"tool_calls\[1\]"),
        ("gptoss", ["Rome", "Rome"], "", r"tool_calls\[1\]"),
        ("llama3_1", ["Rome"], "Rome and Paris", "content"),
        ("muse_glimmer", ["Rome"], "Paris", "content"),
        ("qwen3", ["Rome", "Rome"], "Paris", ""),
    ],
)
def test_a_part_that_the_template_drops_is_missed_though_the_question_has_it(
    name: str, cities: list[str], content: str, missing: str
) -> None:
    """The question has every word of the turn. Qwen3 shows them all, and is the negative control."""
    calls = [call for city in cities for call in _call({"city": city})["tool_calls"]]
    talk = [maker.user("Rome and Paris? Ask weather."), maker.bot(content, tool_calls=calls)]
    case = maker.Case(maker.tokenizer_of(name))
    if not missing:
        assert case.turns(messages=talk)
        return
    with pytest.raises(UserError, match=rf"'messages\[1\].{missing}' is dropped by the chat template"):
        case.turns(messages=talk)


_TURN = "{{% for m in messages %}}{{{{ '<|im_start|>' + m['role'] + '\n' }}}}{0}{{% endfor %}}"
_TURN += "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
_ANSWERS = "m['role'] == 'assistant'"
_END = "{{ m['content'] + '<|im_end|>\n' }}"


@pytest.mark.parametrize(
    ("turn", "end"),
    [
        (f"{{{{ m['content'] }}}}{{% if not (loop.last and {_ANSWERS}) %}}{{{{ '<|im_end|>\n' }}}}{{% endif %}}", "<|im_end|>"),
        (f"{{{{ m['content'] + (eos_token if loop.last and {_ANSWERS} else '<|im_end|>\n') }}}}", "<|endoftext|>"),
        (
            f"{{% if loop.last and {_ANSWERS} %}}{{% generation %}}{_END}{{% endgeneration %}}{{% else %}}{_END}{{% endif %}}",
            "<|im_end|>",
        ),
        (f"{{% if loop.last %}}{_END}{{% else %}}{{{{ m['content'] | trim + '<|im_end|>\n' }}}}{{% endif %}}", "<|im_end|>"),
    ],
    ids=["no end", "EOS", "block", "spaces"],
)
def test_turns_of_templates_that_write_the_last_message_otherwise(turn: str, end: str) -> None:
    """By hand: each answer with its spaces, up to the end that it has as the last, or that the next turn writes for it."""
    case = maker.Case(maker.tokenizer_of("qwen2_5"))
    case.tokenizer.chat_template = _TURN.format(turn)
    talk = [maker.user("sat"), maker.bot("the cat "), maker.user("on"), maker.bot(" mat\n")]
    found = case.turns(messages=talk)
    assert [trained for _, trained in found] == [f"the cat {end}", f" mat\n{end}"]
    prompts = (case.tokenizer.apply_chat_template(talk[:n], tokenize=False, add_generation_prompt=True) for n in (1, 3))
    assert [context for context, _ in found] == list(prompts)


@pytest.mark.parametrize("name", ["gptoss", "phi3", "qwen2_5", "glm4moe", "deepseek_r1_distill", "cohere2"])
def test_generation_blocks_train_what_the_template_without_them_trains(name: str) -> None:
    """TRL's training templates. gpt-oss's drops a long text beside a call once an answer follows; Phi-3's trains the EOS."""
    plain, blocks = (maker.Case(maker.tokenizer_of(one)) for one in (name, f"{name}_training"))
    tool = {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "sun"}
    talk = [maker.user("go"), _call({"city": "Rome"}, "First I look at the list of towns."), tool, maker.bot("Sunny.")]
    for messages in (talk[:2], talk, [maker.user("a"), maker.bot("b"), maker.user("c"), maker.bot("d")]):
        found = blocks.turns(messages=messages)
        assert found == plain.turns(messages=messages)
        assert len(found) == sum(turn["role"] == "assistant" for turn in messages)


@pytest.mark.parametrize(
    ("name", "ends", "opened"),
    [
        ("deepseek_r1_distill", "<｜end▁of▁sentence｜>", "<think>\n"),
        ("deepseekv3", "<｜end▁of▁sentence｜>", "<think>\n"),
        ("qwen3_8", "<|im_end|>", "<think>\n"),
        ("qwen3", "<|im_end|>", ""),
    ],
)
@pytest.mark.parametrize("field", [True, False])
def test_a_thought_in_the_content_is_a_thought(field: bool, name: str, ends: str, opened: str) -> None:
    """By hand: one empty line behind the thought, in the context that is sampled, however the row says it."""
    case = maker.Case(maker.tokenizer_of(name))
    said = maker.bot("It is 5.", reasoning_content="sum") if field else maker.bot("<think>\nsum\n</think>\n\nIt is 5.")
    ((context, trained),) = case.turns(messages=[maker.user("2+3?"), said])
    assert trained == f"{'' if opened else '<think>' + chr(10)}sum\n</think>\n\nIt is 5.{ends}"
    assert context == case.prompt([maker.user("2+3?")]) and context.endswith(opened)
