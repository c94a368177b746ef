"""Tool calls as each family writes them: read back from its own chat template, answered when broken, never fatal, never slow."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import trl
from cases import repeat_for
from lone_runs import Heard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from psigrad.config import OnlineConfig
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import reward_view
from psigrad.language.data.templates import decode, hidden_marks, special_token_remover
from psigrad.language.episodes.tool_calls import FAMILIES, MOST_CALLS, BrokenCall, ToolCall, read_calls
from psigrad.language.episodes.tools import PROBE, CallForm, ToolBox, call_form_of, schemas
from psigrad.language.recipes import conversation
from psigrad.language.rewards.builtin import NAMES
from psigrad.language.rollout.types import Completion, Trajectory
from psigrad.language.training.online.figures import collection_metrics

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
BY_NAME = {family.name: family for family in FAMILIES}
# Read by a person from the templates: what each writes where a tool is called.
WRITES = {
    "Hermes": ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"],
    "Qwen3-Coder": [
        *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
        *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
    ],
    "GLM": ["glm4moe"],
    "Gemma": ["diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"],
    "Harmony": ["gptoss"],
    "LFM2": ["lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"],
    "Llama": ["llama3_1", "llama3_2"],
    "Muse": ["muse_glimmer"],
}
CASES = [(name, family) for family, names in WRITES.items() for name in names]
ENDS = ("<|im_end|>", "<|eot_id|>", "<turn|>", "<|return|>", "<|eot|>", "<｜end▁of▁sentence｜>")
MARK = re.compile(r"<[|｜][^<>\s'\"{}]*[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|</?think>|</?tool_call>|</?answer>")
MEANT = ToolCall("find_price", {"item": '3 "fine" <pens>', "count": 3, "options": {"colours": ["red", None], "gift": True}})
QUESTION = {"role": "user", "content": "?"}
FUNCTION = {"name": "f_offered", "description": "", "parameters": {"type": "object", "properties": {}}}
OFFERED = {"type": "function", "function": FUNCTION}
TYPES = {"find_price": {"item": {"type": "string"}, "count": {"type": "integer"}, "options": {"type": "object"}}}


def tokenizer_for(template: str, *more: str, special: bool = True) -> PreTrainedTokenizerFast:
    """Bytes, and the marks of a template as tokens of their own: special ones, or words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    eos = next((mark for mark in ENDS if mark in template), "<eos>")
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, bos_token="<bos>", pad_token="<pad>")
    made.add_tokens(sorted({*MARK.findall(template), *more} - {eos}), special_tokens=special)
    made.chat_template = template
    return made


def from_trl(name: str, special: bool = True) -> PreTrainedTokenizerFast:
    return tokenizer_for((TEMPLATES / f"{name}.jinja").read_text(), special=special)


def turn_of(tokenizer, *calls: ToolCall) -> str:
    """What the template writes for a turn with these calls, as tools see it."""
    own = [{"name": c.name, "arguments": c.arguments} for c in calls]
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in own]}
    before, after = (
        tokenizer.apply_chat_template(talk, tools=[OFFERED], tokenize=False, add_generation_prompt=len(talk) == 1)
        for talk in ([QUESTION], [QUESTION, turn])
    )
    written = after[next(i for i in range(len(after)) if before[i : i + 1] != after[i]) :]
    return decode(tokenizer, tokenizer(written, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("special", [True, False], ids=["special", "words"])
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_call_that_a_chat_template_wrote_is_read_back(name, family, special):
    tokenizer = from_trl(name, special)
    form = call_form_of(tokenizer)
    assert form.family == family and form.probe(form.seen) == [PROBE]
    assert form.read(turn_of(tokenizer, MEANT), TYPES) == [MEANT]
    others = [other for other in FAMILIES if other.name != family and other.calls(form.seen, TYPES) == [PROBE]]
    assert {other.name for other in others} <= {"Hermes"}, "negative control: no other family reads it, but Hermes bare JSON"


def test_these_are_all_templates_with_tools_but_one_that_writes_no_calls():
    plain = [path for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training")]
    with_tools = set()
    for path in plain:
        tokenizer = tokenizer_for(path.read_text())
        try:
            shown = tokenizer.apply_chat_template([QUESTION], tools=[OFFERED], tokenize=False)
        except Exception:  # three are for content in parts
            continue
        with_tools |= {path.stem} if "f_offered" in shown else set()
    assert len(with_tools) == 28
    assert with_tools - {name for name, _ in CASES} == {"lfm2"}
    assert {name for name, _ in CASES} <= with_tools


def test_under_a_template_that_writes_no_calls_psigrads_are_read_and_those_of_the_vocabulary():
    template = (TEMPLATES / "lfm2.jinja").read_text()
    assert call_form_of(tokenizer_for(template)).family == "Hermes"
    both = call_form_of(tokenizer_for(template, "<|tool_call_start|>", "<|tool_call_end|>"))
    hermes = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert both.read(hermes, TYPES) == both.read("<|tool_call_start|>[add(a=1)]<|tool_call_end|>", TYPES) == ONE
    # it writes calls and offers no tools: its prompt shows Hermes', and its model knows its own
    both = call_form_of(from_trl("deepseekv3"))
    assert both.seen.startswith("<｜tool▁calls▁begin｜>") and both.probe(both.seen) == [PROBE]
    assert both.read(hermes, TYPES) == both.read(BY_NAME["DeepSeek"].example, TYPES) == ONE


def test_a_prompt_that_ends_within_a_mark_of_the_turn_hides_none_of_it():
    """<think> of the prompt and <tool_call> of the turn begin alike."""
    template = (TEMPLATES / "qwen2_5.jinja").read_text() + "{% if add_generation_prompt %}<think>{% endif %}"
    form = call_form_of(tokenizer_for(template))
    assert form.family == "Hermes" and form.seen.startswith("<tool_call>") and form.probe(form.seen) == [PROBE]


@repeat_for("name", [name for name, family in CASES if family not in ("Llama", "Harmony")])
def test_two_calls_of_a_turn_are_two(name):
    tokenizer = from_trl(name)
    second = ToolCall("find_price", {"item": "ink", "count": 1, "options": {}})
    assert call_form_of(tokenizer).read(turn_of(tokenizer, MEANT, second), TYPES) == [MEANT, second]


ONE = [ToolCall("add", {"a": 1})]
# Forms whose templates TRL does not have, as their authors show them.
BY_HAND = [
    ("Mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "9Ae3bDc2F"}]'),
    ("Mistral", '[THINK]one[/THINK][TOOL_CALLS]add[CALL_ID]9Ae3bDc2F[ARGS]{"a": 1}'),
    ("Mistral", '[TOOL_CALLS]add{"a": 1}'),
    (
        "DeepSeek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
    ),
    ("DeepSeek", '<think>x</think><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'),
    ("Kimi", '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'),
    (
        "Harmony",
        "<|channel|>analysis<|message|>to=functions.add is right<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
    ),
    ("GLM", "<think>hm</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
    ("MiniMax", '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>'),
    ("Nemotron", '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>'),
    ("Phi", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>'),
    ("Command", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>'),
    ("Llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
    ("Llama", "<|python_tag|>add.call(a=1)"),
    ("LFM2", '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}]<|tool_call_end|>'),
    ("Hermes", '<think>add it</think>\n{"name": "add", "arguments": {"a": 1}}'),
    ("Hermes", '<tool_call>{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}</tool_call>'),
]


@repeat_for(("family", "text"), BY_HAND)
def test_a_call_as_its_authors_show_it_is_read(family, text):
    types = {"add": {"a": {"type": "integer"}}}
    assert BY_NAME[family].calls(text, types) == ONE
    assert read_calls(text, types) == ONE, "without a family too"


def test_the_page_of_tools_has_every_form():
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    shown = [f.shown if f.name == "Llama" else f.example for f in FAMILIES]
    rows = [f"| {f.name} | {f.models} | `{call}` |" for f, call in zip(FAMILIES, shown, strict=True)]
    assert [line.replace("\\|", "|") for line in page.splitlines() if line.endswith("` |")][: len(FAMILIES)] == rows


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_example_that_an_error_shows_is_a_call(family):
    assert family.calls(family.example, {}) == ONE
    assert family.calls(f"I think {family.example} is a good idea{family.thought}No.", {}) == [], "what is thought is not called"


BROKEN = [
    ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "it is not JSON (Expecting ',' delimiter"),
    ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "expected </tool_call> and found the end"),
    ("Hermes", '<tool_call>{"name": {"a": 1}}</tool_call>', "the name is \"{'a': 1}\" and must be text"),
    ("Hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "the name is missing"),
    ("Hermes", "<tool_call>3</tool_call>", "a call is an object with name and arguments, and this is '3'"),
    ("Hermes", '{"name": "add", "arguments": {"a": 1}', "it is not JSON"),
    ("Hermes", '{"name": {"a": 1}}', "must be text"),
    ("Hermes", '{"function": {"name": {"a": 1}}}', "must be text"),
    ("Hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "not JSON (NaN is no number in JSON)"),
    ("Mistral", '[TOOL_CALLS]add[ARGS]{"a": -Infinity}', "not JSON (-Infinity is no number in JSON)"),
    ("Llama", '{"name": "add", "parameters": {"a": 1e999}}', "not JSON (1e999 is no number in JSON)"),
    (
        "Qwen3-Coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "'a' does not end with </parameter>",
    ),
    ("Qwen3-Coder", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "expected the name of a tool"),
    ("Qwen3-Coder", "<tool_call>\n<function=add>\n</tool_call>", "expected </function>"),
    ("GLM", "<tool_call>add<arg_key>a<arg_value>1</arg_value></tool_call>", "expected </tool_call> and found '<arg_key>a"),
    ("Gemma", "<|tool_call>call:add{a:one}<tool_call|>", "it is not JSON (Expecting value at 'one"),
    ("Gemma", "<|tool_call>add{a:1}<tool_call|>", "expected the name of a tool"),
    ("Gemma", '<|tool_call>call:add{a:<|"|>1}', "it does not end with <tool_call|>"),
    ("Harmony", 'to=functions.add<|message|>{"a": 1', "it is not JSON"),
    ("Harmony", '<|channel|>commentary to=functions.add {"a": 1}', "expected the name of a tool"),
    ("LFM2", "<|tool_call_start|>[add(a='1)]<|tool_call_end|>", "it is not JSON"),
    ("LFM2", "<|tool_call_start|>[add(1)]<|tool_call_end|>", "it is not JSON (Expecting property name"),
    ("Mistral", '[TOOL_CALLS]add[ARGS]{"a": }', "it is not JSON"),
    ("DeepSeek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}', "expected <｜tool▁call▁end｜> and found the end"),
    ("Kimi", "<|tool_call_begin|>functions.add:0{}<|tool_call_end|>", "expected the name of a tool"),
    ("Muse", "<atem:function_calls><atem:invoke name=add></atem:invoke></atem:function_calls>", "expected the name of a tool"),
    ("MiniMax", '<minimax:tool_call><invoke name="add"></minimax:tool_call>', "expected </invoke>"),
    ("Nemotron", '<TOOLCALL>[{"name": "add"}</TOOLCALL>', "it is not JSON"),
    ("Phi", '<|tool_call|>{"name": "add", "arguments": 3}', "the arguments of 'add' are '3' and must be an object"),
    ("Command", "<|START_ACTION|>[]add<|END_ACTION|>", "expected <|END_ACTION|> and found 'add"),
    ("Llama", '{"name": "add", "parameters": {"a": 1}', "it is not JSON"),
    ("Llama", "<|python_tag|>print(1)", "it is not JSON"),
]


@repeat_for(("family", "text", "reason"), BROKEN)
def test_a_broken_call_is_answered_with_what_is_wrong(family, text, reason):
    box = ToolBox([add], CallForm(family))
    step = box.step(text)
    (answer,) = step.observation
    assert not step.done and step.reward == 0.0 and answer["role"] == "tool"
    assert answer["content"].startswith("error: ") and reason in answer["content"]
    shown = BY_NAME[family].shown if text.startswith("{") else BY_NAME[family].example
    assert answer["content"].endswith(f"write a call as {shown}")
    assert len(answer["content"]) < 400


@repeat_for("family", ["Hermes", "Llama"])
@repeat_for("text", ['{"city": {"name": "Paris"}}', '{"answers": [{"name": "Ann"}]}', '[{"a": {"name": "add"}}, 3]',
                     '{"tools": [{"name": "add", "arguments": {"a": 1}}]}', '{"name": "Ann", "age": 3}'])  # fmt: skip
def test_json_that_names_no_tool_at_its_top_is_the_answer(family, text):
    step = ToolBox([add], CallForm(family)).step(text)
    assert step.done and step.observation == ""


def test_a_tool_may_be_async():
    async def weather(city: str, days: int = 1) -> str:
        """The weather.

        Args:
            city: where.
            days: how long.
        """
        await asyncio.sleep(0)
        if city == "Atlantis":
            raise LookupError("it sank")
        return f"{days} of rain in {city}"

    def clock():
        return asyncio.sleep(0, 12)

    box = ToolBox([weather, clock], CallForm("Hermes"))
    asked = [("weather", {"city": "Oslo", "days": 2}), ("weather", {"city": "Atlantis"}), ("weather", {"days": 2}), ("clock", {})]
    turn = "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in asked)
    answers = [answer["content"] for answer in box.step(turn).observation]
    assert answers[:2] == ["2 of rain in Oslo", "error: LookupError: it sank"]
    assert answers[2].startswith("error: weather: city: ") and answers[3] == "12"
    (offered,) = schemas([weather])
    assert offered["function"]["parameters"]["required"] == ["city"]


def add(a: int, b: int = 0) -> int:
    """Add.

    Args:
        a: one
        b: two
    """
    return a + b


def test_calls_and_failures_are_counted_under_trls_names():
    good, bad = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "<tool_call>{</tool_call>"
    box, nothing = ToolBox([add], CallForm("Hermes")), Completion((1,), (0.0,), (0.0,), "stop", 0)
    episodes = [
        Trajectory(0, k, (1,), nothing, 0, mask=(True,), messages=tuple(box.step(turn).observation) if turn else ())
        for k, turn in enumerate((good + bad, good + good, "", ""))
    ]
    figures = collection_metrics(episodes, 4)
    assert figures["tools/call_frequency"] == 4 / 4 and figures["tools/failure_frequency"] == 1 / 4
    assert "tools/call_frequency" not in collection_metrics(episodes[2:], 2)


def test_a_broken_call_between_two_good_ones_takes_neither_along():
    good, bad = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "<tool_call>{</tool_call>"
    said = [answer["content"] for answer in ToolBox([add], CallForm("Hermes")).step(good + bad + good).observation]
    assert said[0] == said[2] == "1" and said[1].startswith("error: it is not JSON")


def test_values_without_quotes_are_what_the_tool_takes():
    def note(text: str, count: int, share: float, ok: bool, maybe: str | None, rows: list[int]) -> str:
        return repr((text, count, share, ok, maybe, rows))

    values = {"text": "007", "count": "3", "share": "0.5", "ok": "True", "maybe": "null", "rows": "[1, 2]"}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    turn = f"<tool_call>\n<function=note>\n{inner}</function>\n</tool_call>"
    (answer,) = ToolBox([note], CallForm("Qwen3-Coder")).step(turn).observation
    assert answer["content"] == "('007', 3, 0.5, True, None, [1, 2])"
    loose = {"note": {"count": True, "share": False}}  # schemas too: of anything, and of nothing
    (call,) = BY_NAME["Qwen3-Coder"].calls(turn, loose)
    assert (call.arguments["count"], call.arguments["share"], call.arguments["rows"]) == (3, 0.5, [1, 2])
    # lines of a program: the first and the last break belong to the tags, the others to the text
    turn = turn.replace("\n007\n", "\n\n  if a:\n    b()\n\n").replace("\nnull\n", "\nnot null\n")
    (answer,) = ToolBox([note], CallForm("Qwen3-Coder")).step(turn).observation
    assert answer["content"] == "('\\n  if a:\\n    b()\\n', 3, 0.5, True, 'not null', [1, 2])"


def hostile(family) -> list[str]:
    """Turns of 100,000 characters and more that a careless reader dies or stalls on."""
    deep, n = "[" * 100_000, 100_000
    opens, closes = family.opens, family.closes
    inner = family.shown.replace("1", deep, 1)
    units = [opens, opens + closes, opens + "{", opens + "\\'", opens + '["', closes, "'\\", '<|"|>', "{[", "[]", "<"]
    repeated = [unit * (n // len(unit) + 1) for unit in units if unit]
    begun = opens + family.shown.split("1")[0]
    texts = [f"{opens}{inner}{closes}", f"{opens}{family.shown.replace('1', '9' * n, 1)}{closes}", *repeated]
    return [*texts, *(opens + text for text in repeated), begun + "'\\'" * n, begun + "\\'" * n, opens + " " * n + "x"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_hostile_turns_are_answered_in_linear_time(family):
    """By processor time: each takes milliseconds where reading is linear, and minutes where it is quadratic."""
    box, started = ToolBox([add], CallForm(family.name)), time.process_time()
    texts = hostile(family)
    for text in texts:
        step = box.step(text)
        assert step.done or 0 < len(step.observation) <= MOST_CALLS + 1
        assert all(len(answer["content"]) < 500 for answer in step.observation)
    nested, digits = box.step(texts[0]).observation, box.step(texts[1]).observation
    assert "nested more than 64 deep" in nested[0]["content"] or "not JSON" in nested[0]["content"] or family.shown.count("<") > 3
    assert digits[0]["content"].startswith("error: ")
    assert time.process_time() - started < 10.0


def test_nesting_is_bounded_at_a_stated_depth():
    def nested(depth: int) -> str:
        return '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"

    assert isinstance(BY_NAME["Hermes"].calls(nested(64), {})[0], ToolCall)
    assert BY_NAME["Hermes"].calls(nested(66), {})[0] == BrokenCall(
        f"the arguments are nested more than 64 deep; write a call as {BY_NAME['Hermes'].example}"
    )


def test_more_calls_than_a_turn_may_have_are_said():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    contents = [answer["content"] for answer in ToolBox([add]).step(call * 1000).observation]
    assert contents == ["1"] * MOST_CALLS + ["error: only the first 64 calls of a turn are run"]
    assert len(ToolBox([add]).step(call * MOST_CALLS).observation) == MOST_CALLS


def test_an_unknown_tool_and_wrong_arguments_are_named_briefly():
    box = ToolBox([add])
    name, key = "x" * 50_000, "y" * 50_000
    for arguments, tool in (({}, name), ({key: 1}, "add")):
        call = json.dumps({"name": tool, "arguments": arguments})
        (answer,) = box.step(f"<tool_call>{call}</tool_call>").observation
        assert len(answer["content"]) < 300 and len(answer["name"]) <= 80


def test_a_tokenizers_own_response_template_comes_first_where_it_reads_its_calls_back():
    tokenizer = from_trl("qwen2_5")
    call = {"type": "function", "function": "{content}"}
    field = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": call}
    start = {"start_anchor": "<|im_start|>assistant\n"}
    tokenizer.response_template = {**start, "fields": {"content": {}, "tool_calls": field}}
    form = call_form_of(tokenizer)
    assert form.response_template and not form.family and form.probe(form.seen) == [PROBE]
    broken = ToolBox([add], form).step("<tool_call>{</tool_call>").observation[0]["content"]
    assert broken.startswith("error: the call cannot be read (json parser could not parse") and form.seen in broken
    tokenizer.response_template = {**start, "fields": {"content": {}}}
    assert call_form_of(tokenizer).family == "Hermes", "one that finds no calls is not used"


@pytest.mark.parametrize(("name", "told"), [("qwen3", 0), ("deepseekv3", 1)])
def test_a_run_says_where_the_form_of_calls_is_not_told(name, told, monkeypatch):
    played, journal = [], Heard()
    monkeypatch.setattr(conversation, "start_environments", lambda config, form: nullcontext(played.append(form)))
    with conversation.episodes_for(OnlineConfig(tools=(add,)), from_trl(name), journal):
        pass
    assert [kind for kind, *_ in journal.said] == ["tool_calls"] * told and [form.family for form in played] == [
        "" if told else "Hermes"
    ]


def test_special_tokens_that_the_policy_chose_are_seen_and_those_that_end_its_turn_are_not():
    turn = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}"
    tokenizer = tokenizer_for(turn, "<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
    said = '<think>2 + 2</think><answer>4</answer><tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>'
    ids = [tokenizer.bos_token_id, *tokenizer(said, add_special_tokens=False)["input_ids"]]
    assert any(i == tokenizer.convert_tokens_to_ids("<think>") for i in ids)
    ended = [*ids, tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id, *[tokenizer.pad_token_id] * 3]
    text = decode(tokenizer, ended)
    assert text == said
    assert NAMES["format"](completions=[text.split("<tool_call>")[0]]) == [1.0], "hidden, it was 0"
    assert ToolBox([add]).step(text).observation[0]["content"] == "4"
    tokenizer.chat_template = turn.replace("<|end|>", "<|user|>")  # another end: what was known of the old one is forgotten
    assert decode(tokenizer, ended) == said + "<|end|>"


THINKS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.mark.parametrize(
    ("skip", "text", "turns"),
    [
        (True, "2 + 24 <b>", ["2 + 24 <b>"]),  # transformers' own decoding of the ids, without special tokens
        (False, "<think>2 + 2</think><answer>4</answer> <b>", ["<think>2 + 2</think><answer>4</answer> <b>"]),
    ],
)
def test_rewards_read_no_special_tokens_unless_they_are_shown(skip, text, turns):
    """By hand, as TRL's `skip_special_tokens=True`. A text, messages of an episode, and what an agent said are read alike."""
    turn = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}"
    tokenizer = tokenizer_for(turn, *THINKS)
    said = "<think>2 + 2</think><answer>4</answer> <b>"
    ids = (*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids("<|end|>"))
    prompt = tuple(tokenizer("<|user|>q<|end|><|user|><think>", add_special_tokens=False)["input_ids"])
    heard = {"role": "tool", "content": "<answer> is a tag"}
    done = Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), "stop", 0)
    alone = Trajectory(0, 0, prompt, done, 0, text=decode(tokenizer, ids))
    assert alone.text == said, "rollouts.jsonl and tools have what the policy wrote"
    episode = replace(alone, messages=({"role": "assistant", "content": said}, heard), policy_turns=(said,))
    agent = replace(episode, messages=(), answer=said)
    row = Row("r", "q")
    seen = reward_view(tokenizer, True, skip)({0: row})([alone, episode, agent])
    assert list(seen.completions) == [text, [{"role": "assistant", "content": text}, heard], text]
    assert list(seen.policy_turns) == [turns] * 3 and [*seen.completion_ids] == [list(ids)] * 3
    assert list(seen.opened_thoughts) == ["" if skip else "<think>"] * 3
    assert special_token_remover(tokenizer)(said, ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert hidden_marks(tokenizer) == sorted(THINKS, key=tokenizer.convert_tokens_to_ids)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('I will add. {"name": "add", "parameters": {"a": 1}}', ONE),
        ('With {braces}: {"name": "add", "parameters": {"a": 1}} and so on.', ONE),
        ('I will add. {"name": "subtract", "parameters": {"a": 1}}', []),
        ('I will add. {"name": "add"}', []),
        ('I would ask {"tool": {"name": "add", "parameters": {"a": 1}}}', []),
        ("I will add {1}.", []),
        ('<call>{"name": "add", "parameters": {"a": 1}}</call>', []),
    ],
)
def test_llamas_call_may_stand_behind_words(text, read):
    """As vLLM's llama3_json and TRL read it; negative control: Hermes' bare JSON is a whole turn."""
    offered = {"add": {"a": {"type": "integer"}}}
    assert BY_NAME["Llama"].calls(text, offered) == read
    assert BY_NAME["Hermes"].calls(text, offered) == []
