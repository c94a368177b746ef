"""Comparisons: the forms of rows, what they share, whose tokens count, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from psigrad.config import Data
from psigrad.errors import UserError
from psigrad.language.data import pairs
from psigrad.language.data.dataset_rows import Row, RowError, validate
from psigrad.language.data.templates import CHATML, decode, examples, prompt_ids
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.row_encoding import Encoder, encode_rows
from psigrad.language.training.offline.preference_task import answer_logps


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny.tokenizer(["say one two three user assistant step"], 280)
    made.chat_template = CHATML
    return made


def bot(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


PLAIN = {"prompt": "say:", "chosen": " one two", "rejected": " three"}
CHAT = {
    "prompt": [{"role": "user", "content": "say"}],
    "chosen": [{"role": "assistant", "content": "one two"}],
    "rejected": [{"role": "assistant", "content": "three"}],
}


def test_a_plain_pair_is_its_two_texts_with_their_ends(tokenizer):
    made = pairs.encode_pair(tokenizer, validate(PLAIN, "preference", "x"))
    assert made.prompt == tokenizer("say:").input_ids
    assert made.chosen.ids == [*tokenizer(" one two").input_ids, tokenizer.eos_token_id]
    assert made.rejected.ids == [*tokenizer(" three").input_ids, tokenizer.eos_token_id]
    assert all(made.chosen.mask) and all(made.rejected.mask) and made.margin is None
    assert made.tokens == len(made.prompt) + len(made.chosen.ids) + len(made.rejected.ids)


def test_a_conversations_answer_starts_where_sampling_would_and_counts_what_the_assistant_wrote(tokenizer):
    row = validate(CHAT, "preference", "x")
    made = pairs.encode_pair(tokenizer, row)
    assert made.prompt == prompt_ids(tokenizer, row)
    written = [i for i, own in zip(made.chosen.ids, made.chosen.mask, strict=True) if own]
    assert decode(tokenizer, written) == "one two" and written[-1] == tokenizer.eos_token_id
    assert not made.chosen.mask[-1], "the line break behind the turn is the template's"


@pytest.mark.parametrize("form", [PLAIN, CHAT], ids=["plain", "chat"])
def test_a_prompt_that_is_not_named_is_what_both_begin_with(form, tokenizer):
    joined = {key: form["prompt"] + form[key] for key in ("chosen", "rejected")}
    ours = pairs.encode_pair(tokenizer, validate(joined, "preference", "x"))
    assert ours == pairs.encode_pair(tokenizer, validate(form, "preference", "x"))


def test_margins_come_from_their_column(tokenizer):
    assert pairs.encode_pair(tokenizer, validate({**PLAIN, "margin": 2}, "preference", "x")).margin == 2.0
    with pytest.raises(UserError, match="margin"):
        pairs.encode_pair(tokenizer, validate({**PLAIN, "margin": "much"}, "preference", "x"))


def test_a_comparison_with_an_unreadable_margin_is_left_out_when_asked(tokenizer):
    """A number in a CSV file is text."""
    rows = [validate(PLAIN, "preference", "x:1"), validate({**PLAIN, "margin": "0.5"}, "preference", "x:2")]
    encoder, told = Encoder(tokenizer, partial(pairs.encode_pair, tokenizer)), []
    made, _ = encode_rows(rows, encoder, Data(bad_rows="skip"), lambda kind, text, **more: told.append(text))
    assert len(made) == 1 and len(told) == 1 and "x:2: column 'margin' is '0.5'; expected a number" in told[0]
    with pytest.raises(UserError, match=r"x:2: column 'margin' .* skip such rows with --bad-rows skip"):
        encode_rows(rows, encoder, Data())


def test_a_prompt_without_tokens_is_a_row_that_may_be_left_out(tokenizer):
    with pytest.raises(RowError, match="x:3: column 'prompt' has no tokens; write some text, or give the tokenizer a BOS token"):
        prompt_ids(tokenizer, Row("x:3", prompt=""))


def test_unpaired_rows(tokenizer):
    row = {"prompt": "say:", "completion": " one", "label": True}
    made = pairs.encode_labelled(tokenizer, validate(row, "unpaired-preference", "x"))
    assert made.desirable and made.prompt == tokenizer("say:").input_ids and all(made.answer.mask)


def test_steps_end_where_their_separator_does(tokenizer):
    row = {"prompt": "say:", "completions": ["one", "two three\n"], "labels": [True, 0.25]}
    made = pairs.encode_steps(tokenizer, validate(row, "stepwise", "x"))
    assert tokenizer.decode(made.ids) == "say:one\ntwo three\n"
    assert [tokenizer.decode(made.ids[: end + 1]) for end in made.ends] == ["say:one\n", "say:one\ntwo three\n"]
    assert made.labels == [1.0, 0.25]


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "preference", "same as chosen"),
        ({"chosen": "abc", "rejected": "xyz"}, "preference", "have no common beginning"),
        ({"chosen": "a", "rejected": [1]}, "preference", "both must be strings or lists"),
        ({"prompt": "p", "chosen": "a"}, "preference", "'rejected' is missing"),
        ({"prompt": "p", "better": "a"}, "preference", "'chosen' is missing, and so is rejected (found: prompt, better)"),
        ({"q": "p", "a": "b"}, "unpaired-preference", "'prompt' is missing, and so are completion and label (found: q, a)"),
        ({"prompt": "p", "chosen": "a", "rejected": ""}, "preference", "empty string"),
        ({"prompt": "p", "completion": "a", "label": "good"}, "unpaired-preference", "true (desirable) or false"),
        ({"prompt": "p", "completion": "a"}, "unpaired-preference", "'label' is missing"),
        ({"prompt": "p", "completions": ["a"], "labels": [True, False]}, "stepwise", "2 entries for 1 steps"),
        ({"prompt": "p", "completions": ["a"], "labels": [2]}, "stepwise", "between 0 and 1"),
        ({"prompt": "p", "completions": [], "labels": []}, "stepwise", "one entry per step"),
        ({"prompt": "p", "completions": [3], "labels": [1]}, "stepwise", "must be a string"),
    ],
)
def test_malformed_rows_are_refused_by_row_and_column(row, form, said):
    with pytest.raises(RowError) as refused:
        validate(row, form, "my.jsonl:3")
    assert said in str(refused.value) and "my.jsonl:3" in str(refused.value)


def test_turns_that_the_template_rewrites_are_compared_each_in_its_own_context(forgetful):
    """The log-prob of an answer is the sum over its turns of what each has where it would be sampled."""
    prompt = [{"role": "user", "content": "the cat"}]
    turns = [bot("<think>sat</think>on"), {"role": "user", "content": "the mat"}, bot("two")]
    row = validate({"prompt": prompt, "chosen": turns, "rejected": [bot("four")]}, "preference", "x")
    made = pairs.encode_pair(forgetful, row)
    head = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    rest = "<|im_end|>\n<|im_start|>user\nthe mat<|im_end|>\n<|im_start|>assistant\n"
    spelled = [[forgetful.decode([i for i, own in zip(t.ids, t.mask, strict=True) if own]) for t in made.chosen.texts]]
    assert spelled == [["two<|im_end|>", "<think>sat</think>on<|im_end|>"]] and forgetful.decode(made.prompt) == head
    assert made.tokens == len(made.prompt) + sum(len(text.ids) for text in (*made.chosen.texts, *made.rejected.texts))
    assert made.chosen.targets == sum(len(forgetful(said)["input_ids"]) for said in spelled[0])

    model = prepare(tiny.model("qwen3", len(forgetful), hidden=16, layers=1, heads=2), forgetful)
    logp, count = answer_logps(model, [made.prompt], [[made.chosen, made.rejected]])
    alone = [(head, spelled[0][1]), (head + "on" + rest, spelled[0][0]), (head, "four<|im_end|>")]
    each = [
        float(model.evaluate(Groups([forgetful(before)["input_ids"]], [[forgetful(said)["input_ids"]]])).logp.sum())
        for before, said in alone
    ]
    assert logp.tolist() == pytest.approx([each[0] + each[1], each[2]], abs=1e-5)
    assert count.tolist() == [made.chosen.targets, made.rejected.targets]
    # the control: the last text alone is another number
    assert abs(float(answer_logps(model, [made.prompt], [[replace(made.chosen, apart=())]])[0][0]) - float(logp[0])) > 1
    labelled = {"prompt": prompt, "completion": turns, "label": True}
    judged = pairs.encode_labelled(forgetful, validate(labelled, "unpaired-preference", "x"))
    assert judged.prompt == made.prompt and judged.answer == made.chosen


CALLS = (
    "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m['role'] + ' ' + (m['content'] or '') }}"
    "{% for c in m.get('tool_calls', []) %}{{ c.function.name ~ c.function.arguments }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def test_tools_and_calls_of_a_pair_are_rendered_as_in_fine_tuning(build):
    """A call may be the better answer; a template is given the tools, the calls before it and a null content alike."""
    tokenizer = build(CALLS)
    call = [{"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}]
    talk = [
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    chosen = {"role": "assistant", "content": None, "tool_calls": call}
    rows = {"prompt": talk, "chosen": [chosen], "rejected": [{"role": "assistant", "content": "3"}], "tools": tools}
    pair = pairs.encode_pair(tokenizer, validate(rows, "preference", "x"))
    whole = tokenizer.decode([*pair.prompt, *pair.chosen.ids])
    assert whole == "[add]user two?<|im_end|>assistant add{'x': 2}<|im_end|>tool 2<|im_end|>assistant add{'x': 2}<|im_end|>"
    (alone,) = examples(tokenizer, validate({"messages": [*talk, {**chosen}], "tools": tools}, "sft", "x"))
    assert alone.ids == [*pair.prompt, *pair.chosen.ids]
    assert tokenizer.decode(pair.rejected.ids) == "3<|im_end|>"
