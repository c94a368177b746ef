"""Token ids and loss masks against expectations written out by hand, on tokenizers and templates small enough to read."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row, RowError, validate
from psigrad.language.data.templates import CHATML, completion_for_reward, decode, example, examples, prompt_ids, stop_token_ids
from psigrad.language.examples import Example

Build = Callable[..., PreTrainedTokenizerFast]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def bot(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def sft(**columns: Any) -> Row:
    return validate(columns, "sft", "my.jsonl:7")


def pieces(tokenizer: PreTrainedTokenizerFast, built: Example) -> list[tuple[bool, str]]:
    """The example as (has loss, text) runs, special tokens shown."""
    assert len(built.ids) == len(built.mask)
    runs = groupby(zip(built.mask, built.ids, strict=True), key=lambda pair: pair[0])
    return [(trained, tokenizer.decode([i for _, i in run])) for trained, run in runs]


TWO_TURNS = [user("hello"), bot("the cat"), user("what is two"), bot(" world")]
TWO_TURNS_EXPECTED = [
    (False, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
    (True, "the cat<|im_end|>"),
    (False, "\n<|im_start|>user\nwhat is two<|im_end|>\n<|im_start|>assistant\n"),
    (True, " world<|im_end|>"),
    (False, "\n"),
]


def trl_template(name: str) -> str:
    """A released model's chat template, as TRL ships it for its own tests and patches."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def test_a_plain_row_is_prompt_then_completion_then_eos_with_loss_from_the_completion_on(bare: PreTrainedTokenizerFast) -> None:
    built = example(bare, sft(prompt="the cat", completion=" sat on"))
    alone = bare(" sat on", add_special_tokens=False)["input_ids"]
    assert built.ids == bare("the cat")["input_ids"] + alone + [bare.eos_token_id]
    assert built.mask == [False] * len(bare("the cat")["input_ids"]) + [True] * (len(alone) + 1)
    assert built.truncated is False


def test_a_plain_prompt_keeps_the_tokenizers_default_special_tokens(build: Build) -> None:
    tokenizer = build(bos=True)
    row = sft(prompt="the cat", completion=" sat")
    assert prompt_ids(tokenizer, row)[0] == tokenizer.bos_token_id
    assert pieces(tokenizer, example(tokenizer, row)) == [(False, "<s>the cat"), (True, " sat<|endoftext|>")]


def test_an_eos_written_in_the_completion_is_not_doubled(bare: PreTrainedTokenizerFast) -> None:
    built = example(bare, sft(prompt="a", completion="b<|endoftext|>"))
    assert built.ids.count(bare.eos_token_id) == 1 and built.mask[-1]


def test_a_closing_tag_that_is_a_special_token_ends_no_text(build: Build) -> None:
    tokenizer = build()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>", "<end_of_turn>"]})
    tag, end = tokenizer.convert_tokens_to_ids(["</answer>", "<end_of_turn>"])
    row = sft(prompt="the cat", completion=" sat</answer>")
    assert example(tokenizer, row).ids[-2:] == [tag, tokenizer.eos_token_id] and example(tokenizer, row).mask[-1]
    assert example(tokenizer, sft(text="the cat</answer>")).ids[-2:] == [tag, tokenizer.eos_token_id]
    assert example(tokenizer, sft(text="the cat<end_of_turn>")).ids[-1] == end, "the end that the text has"


def test_plain_text_has_loss_on_all_but_its_first_token(bare: PreTrainedTokenizerFast) -> None:
    built = example(bare, sft(text="the cat sat"))
    assert built.ids == bare("the cat sat")["input_ids"] + [bare.eos_token_id]
    assert built.mask == [False] + [True] * (len(built.ids) - 1)


def test_the_training_context_is_the_sampling_context_even_where_tokens_would_merge(bare: PreTrainedTokenizerFast) -> None:
    row = sft(prompt="hello ", completion="there")
    joint = bare("hello there")["input_ids"]
    prompt = prompt_ids(bare, row)
    assert joint[: len(prompt)] != prompt, "the case must merge across the boundary, or it shows nothing"
    assert example(bare, row).ids[: len(prompt)] == prompt


def test_sentencepiece_tokenizers_get_no_extra_space_between_prompt_and_completion() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"▁a": 0, "a": 1, "▁b": 2, "b": 3, "▁": 4, "</s>": 5, "<unk>": 6}
    inner = Tokenizer(models.BPE(words, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    assert tokenizer("b", add_special_tokens=False)["input_ids"] == [2], "encoded alone, the completion gains a space"
    assert example(tokenizer, sft(prompt="a", completion="b")).ids == [0, 3, 5]


def test_every_assistant_turn_and_its_end_of_turn_token_have_loss(
    plain_chatml: PreTrainedTokenizerFast, marked_chatml: PreTrainedTokenizerFast
) -> None:
    for tokenizer in (plain_chatml, marked_chatml):
        assert pieces(tokenizer, example(tokenizer, sft(messages=TWO_TURNS))) == TWO_TURNS_EXPECTED


def test_only_the_completions_turns_have_loss_in_a_conversational_prompt_completion_row(
    plain_chatml: PreTrainedTokenizerFast, marked_chatml: PreTrainedTokenizerFast
) -> None:
    row = sft(prompt=TWO_TURNS[:3], completion=TWO_TURNS[3:])
    context = "".join(text for _, text in TWO_TURNS_EXPECTED[:3])
    for tokenizer in (plain_chatml, marked_chatml):
        built = example(tokenizer, row)
        assert pieces(tokenizer, built) == [(False, context), *TWO_TURNS_EXPECTED[3:]]
        prompt = prompt_ids(tokenizer, row)
        assert built.ids[: len(prompt)] == prompt and built.mask.index(True) == len(prompt)


def test_a_users_or_tools_words_inside_a_completion_have_no_loss(
    plain_chatml: PreTrainedTokenizerFast, marked_chatml: PreTrainedTokenizerFast
) -> None:
    row = sft(prompt=[user("hello")], completion=[bot("the cat"), {"role": "tool", "content": "what is two"}, bot(" world")])
    expected = [(trained, text.replace("user\nwhat", "tool\nwhat")) for trained, text in TWO_TURNS_EXPECTED]
    for tokenizer in (plain_chatml, marked_chatml):
        assert pieces(tokenizer, example(tokenizer, row)) == expected


def test_tokens_do_not_merge_across_the_start_of_a_turn(plain_chatml: PreTrainedTokenizerFast) -> None:
    row = sft(prompt=[user("hello")], completion=[bot("\n\nthe cat")])
    prompt = prompt_ids(plain_chatml, row)
    rendered = plain_chatml.apply_chat_template([user("hello"), bot("\n\nthe cat")], return_dict=True)["input_ids"]
    assert rendered[: len(prompt)] != prompt, "the case must merge across the boundary, or it shows nothing"
    assert example(plain_chatml, row).ids[: len(prompt)] == prompt


ENDS_OUTSIDE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_turn_without_a_generation_block_is_not_trained(build: Build) -> None:
    chosen = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% set text = m['content'] + '<|im_end|>' %}{% if m['role'] == 'assistant' and m['content'] != 'the' %}"
        "{% generation %}{{ text }}{% endgeneration %}{% else %}{{ text }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = build(chosen)
    made = pieces(tokenizer, example(tokenizer, sft(messages=[user("hello"), bot("the"), user("what"), bot("two")])))
    assert [text for trained, text in made if trained] == ["two<|im_end|>"]


def test_an_end_of_turn_token_left_outside_the_generation_block_is_trained_all_the_same(build: Build) -> None:
    tokenizer = build(ENDS_OUTSIDE)
    masked = tokenizer.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    ends = [i for i, token in enumerate(masked["input_ids"]) if token == stop_token_ids(tokenizer)[0]]
    assert not any(masked["assistant_masks"][i] for i in ends), "transformers' own mask leaves it out: the trap of trl#5988"
    assert pieces(tokenizer, example(tokenizer, sft(messages=TWO_TURNS))) == TWO_TURNS_EXPECTED


def test_the_end_of_turn_behind_a_block_is_trained_where_the_answer_ends_with_a_tag(build: Build) -> None:
    tokenizer = build(ENDS_OUTSIDE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>"]})
    row = sft(messages=[user("hello"), bot("the cat</answer>")])
    assert pieces(tokenizer, example(tokenizer, row))[1:] == [(True, "the cat</answer><|im_end|>"), (False, "\n")]


def test_a_template_that_ends_turns_with_no_special_token_is_refused(build: Build) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(
        UserError, match=r"my.jsonl:7: the chat template doesn't end assistant turn 1 with a special token.*eos_token"
    ):
        example(build(template), sft(messages=TWO_TURNS))
    ended = template.replace("m['content']", "m['content'] + ('<|endoftext|>' if m['role'] == 'assistant' else '')")
    assert [text for trained, text in pieces(build(ended), example(build(ended), sft(messages=TWO_TURNS))) if trained] == [
        "the cat<|endoftext|>",
        " world<|endoftext|>",
    ]


def test_a_template_that_forgets_thinking_gives_a_context_to_each_turn_that_it_rewrites(
    forgetful: PreTrainedTokenizerFast, plain_chatml: PreTrainedTokenizerFast
) -> None:
    thinking = [user("hello"), bot("<think>two</think>the cat"), user("what is two"), bot("<think>x</think>there")]
    first, second = (pieces(forgetful, built) for built in examples(forgetful, sft(messages=thinking)))
    assert first == [
        (False, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>two</think>the cat<|im_end|>"),
        (False, "\n"),
    ]
    past = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n"
    assert second == [
        (False, past + "<|im_start|>user\nwhat is two<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>x</think>there<|im_end|>"),
        (False, "\n"),
    ]
    assert len(examples(plain_chatml, sft(messages=thinking))) == 1
    # Nothing to forget: no thinking in the first turn, or one prompt-completion row per turn.
    assert [pieces(forgetful, built) for built in examples(forgetful, sft(messages=TWO_TURNS))] == [TWO_TURNS_EXPECTED]
    last = example(forgetful, sft(prompt=thinking[:3], completion=thinking[3:]))
    assert [text for trained, text in pieces(forgetful, last) if trained] == ["<think>x</think>there<|im_end|>"]


def test_a_template_that_rewrites_the_prompt_is_refused(build: Build) -> None:
    rewriting = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    with pytest.raises(RowError, match=r"my.jsonl:7: the chat template changes the generation prompt before message 2"):
        example(build(rewriting), sft(prompt=[user("hello")], completion=[bot("there")]))


def test_a_generation_prompt_that_the_conversation_does_not_repeat_is_refused(build: Build) -> None:
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{}{% endif %}"
    with pytest.raises(RowError, match=r"changes the generation prompt before message 2 \(assistant\)"):
        example(build(template.replace("{}", "Hm:")), sft(messages=TWO_TURNS))
    # an opened thought is one that the answer closes
    closed, _ = examples(build(template.replace("{}", "<think>")), sft(messages=TWO_TURNS))
    assert pieces(build(), closed) == [(False, "hello<|im_end|><think>\n</think>\n\n"), (True, "the cat<|im_end|>")]


def test_what_a_template_writes_between_prompt_and_generation_block_is_trained_as_the_policy_must_write_it(build: Build) -> None:
    tokenizer = build(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "Answer: {% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    built = example(tokenizer, sft(prompt=[user("hello")], completion=[bot("the cat")]))
    assert pieces(tokenizer, built)[1:] == [(True, "Answer: the cat<|im_end|>")]


def test_a_template_made_for_content_parts_gets_them_instead_of_training_on_nothing(build: Build) -> None:
    tokenizer = build(trl_template("smolvlm"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_utterance>"]})
    rendered = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert "the cat" not in rendered and "hello" not in rendered, "the template must drop strings in silence: the trap"
    trained = [text for trained, text in pieces(tokenizer, example(tokenizer, sft(messages=TWO_TURNS))) if trained]
    assert trained == [" the cat<end_of_utterance>", "  world<end_of_utterance>"]


def test_a_generation_block_that_starts_with_the_header_does_not_train_on_it(build: Build) -> None:
    tokenizer = build(trl_template("gptoss_training"))
    specials = ["<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    built = [pieces(tokenizer, made) for made in examples(tokenizer, sft(messages=TWO_TURNS))]
    trained = [text for made in built for trained, text in made if trained]
    # gpt-oss stops at <|return|>, and reads its past turns with <|end|>
    assert trained == ["<|channel|>final<|message|>the cat<|return|>", "<|channel|>final<|message|> world<|return|>"]
    assert built[1][0][1].endswith("the cat<|end|><|start|>user<|message|>what is two<|end|><|start|>assistant")


def test_an_added_token_that_is_not_special_ends_no_turn(build: Build) -> None:
    tokenizer = build(
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.add_tokens(["<end>"])
    with pytest.raises(UserError, match="special token"):
        example(tokenizer, sft(messages=TWO_TURNS))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert [text for trained, text in pieces(tokenizer, example(tokenizer, sft(messages=TWO_TURNS))) if trained] == [
        "the cat<end>",
        " world<end>",
    ]


def test_qwen3s_released_template_trains_both_turns_as_they_are_sampled(build: Build) -> None:
    released = build(trl_template("qwen3"))
    first, second = (pieces(released, made) for made in examples(released, sft(messages=TWO_TURNS)))
    empty = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert first == [(False, "<|im_start|>user\nhello<|im_end|>\n" + empty), (True, "the cat<|im_end|>"), (False, "\n")]
    past = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n"
    assert second == [
        (False, past + "<|im_start|>user\nwhat is two<|im_end|>\n" + empty),
        (True, " world<|im_end|>"),
        (False, "\n"),
    ]


def test_an_empty_thought_is_trained_only_where_it_is_asked_for_or_written(build: Build) -> None:
    released = build(trl_template("qwen3"))
    row = sft(messages=TWO_TURNS[:2])

    def trained(row: Row, **asked: Any) -> list[str]:
        return [text for made in examples(released, row, **asked) for own, text in pieces(released, made) if own]

    assert trained(row) == ["the cat<|im_end|>"]
    assert trained(row, empty_thinking=True) == ["<think>\n\n</think>\n\nthe cat<|im_end|>"]
    own = sft(messages=[user("hello"), bot("<think>\n\n</think>\n\nthe cat")])
    assert trained(own) == ["<think>\n\n</think>\n\nthe cat<|im_end|>"]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_training"])
def test_qwen2_5s_templates_give_the_two_turns(name: str, build: Build) -> None:
    tokenizer = build(trl_template(name))
    trained = [text for trained, text in pieces(tokenizer, example(tokenizer, sft(messages=TWO_TURNS))) if trained]
    assert trained == ["the cat<|im_end|>", " world<|im_end|>"]


def test_the_default_template_ends_turns_with_eos(build: Build) -> None:
    tokenizer = build(CHATML)
    expected = [(trained, text.replace("<|im_end|>", "<|endoftext|>")) for trained, text in TWO_TURNS_EXPECTED]
    assert pieces(tokenizer, example(tokenizer, sft(messages=TWO_TURNS))) == expected
    assert stop_token_ids(tokenizer)[0] == tokenizer.eos_token_id


def test_the_stop_token_is_the_templates_end_of_turn(plain_chatml: PreTrainedTokenizerFast) -> None:
    assert stop_token_ids(plain_chatml)[0] == plain_chatml.convert_tokens_to_ids("<|im_end|>") != plain_chatml.eos_token_id


def test_conversational_prompts_equal_transformers_rendering(plain_chatml: PreTrainedTokenizerFast) -> None:
    row = validate({"prompt": [{"role": "system", "content": "the"}, user("hello")]}, "prompt-only", "x")
    expected = plain_chatml.apply_chat_template(row.prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt_ids(plain_chatml, row) == expected


def test_tools_and_template_arguments_of_the_row_reach_the_template(build: Build) -> None:
    tools_shown = "{{ 'no tools' if tools is none else tools | tojson }}"
    tokenizer = build(tools_shown + " {{ mood | default('calm') }} {{ messages[0]['content'] }}")
    tools = [{"type": "function", "function": {"name": "add"}}]

    def shown(**columns: Any) -> str:
        return decode(tokenizer, prompt_ids(tokenizer, validate({"prompt": [user("hi")], **columns}, "prompt-only", "x")))

    assert shown() == shown(tools=[], chat_template_kwargs={"mood": None}) == shown(tools=None) == "no tools calm hi"
    as_text = '[{"type": "function", "function": {"name": "add"}}]'
    assert shown(tools=tools) == shown(tools=as_text) == f"{as_text} calm hi"
    assert shown(chat_template_kwargs={"mood": "gay"}) == "no tools gay hi"


def test_a_conversation_without_a_template_says_what_to_do(bare: PreTrainedTokenizerFast) -> None:
    for row in (sft(messages=TWO_TURNS), sft(prompt=TWO_TURNS[:1], completion=TWO_TURNS[1:2])):
        with pytest.raises(UserError, match=r"my.jsonl:7 .* no chat template; name a Jinja file .*, set tokenizer.chat_template"):
            example(bare, row)


@pytest.mark.parametrize("template", ["{{ raise_exception('alternate!') }}", "{{ messages[9]['content'] + 1 }}", "{% for"])
def test_a_template_that_fails_is_a_user_error_with_the_row(template: str, build: Build) -> None:
    with pytest.raises(UserError, match=r"my\.jsonl:7: the chat template can't render the row"):
        example(build(template), sft(messages=TWO_TURNS))


def test_a_tokenizer_that_ends_prompts_with_eos_is_refused(build: Build) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build()
    ending = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = ending
    with pytest.raises(UserError, match="EOS token, after which nothing can follow"):
        prompt_ids(tokenizer, sft(prompt="a", completion="b"))


def test_truncation_cuts_the_end_and_says_so(plain_chatml: PreTrainedTokenizerFast) -> None:
    row = sft(messages=TWO_TURNS)
    whole = example(plain_chatml, row)
    length = len(whole.ids)
    for limit in range(1, length + 3):
        built = example(plain_chatml, row, limit)
        assert (built.ids, built.mask, built.truncated) == (whole.ids[:limit], whole.mask[:limit], limit < length)
    assert example(plain_chatml, row, 0) == whole
    assert not any(example(plain_chatml, row, 3).mask)


def test_a_row_without_what_is_asked_for_is_a_user_error(bare: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="no completion"):
        example(bare, validate({"prompt": "a"}, "prompt-only", "x"))
    with pytest.raises(UserError, match="no prompt"):
        prompt_ids(bare, sft(text="a"))


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "nul\x00here", "\u202eright to left", "é🙂\u200d", "x" * 1_000_000])
def test_odd_text_survives_encoding(text: str, plain_chatml: PreTrainedTokenizerFast) -> None:
    escaped = text.encode("utf-8", "backslashreplace").decode()
    plain = example(plain_chatml, sft(prompt="say:", completion=text))
    assert decode(plain_chatml, plain.ids) == "say:" + escaped
    chat = example(plain_chatml, sft(messages=[user("say"), bot(text)]))
    assert decode(plain_chatml, [i for i, trained in zip(chat.ids, chat.mask, strict=True) if trained]) == escaped


def test_decoding_hides_special_tokens_and_changes_no_spaces(build: Build) -> None:
    tokenizer = build()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    text = "hello , world .  it 's"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) != text, "this tokenizer must be one that cleans up by default, or the test shows nothing"
    assert decode(tokenizer, [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == text


def test_completions_reach_reward_functions_as_trl_passes_them() -> None:
    assert completion_for_reward(Row("x", prompt="a"), "b") == "b"
    assert completion_for_reward(Row("x", prompt=[user("a")]), "b") == [{"role": "assistant", "content": "b"}]
