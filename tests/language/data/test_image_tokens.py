"""Texts with images as token ids: expanded once, in order, never a word of the user, and read back for people."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from painters import draw, encoded
from pictures import EDGE, IMAGE, PARTS_CHATML, WHOLE, tokenizer

from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data import row_cache
from psigrad.language.data.chat.turns import Conversation
from psigrad.language.data.dataset_rows import RowError
from psigrad.language.data.pairs import encode_pair
from psigrad.language.data.row_rendering import render
from psigrad.language.data.sources import from_rows
from psigrad.language.data.templates import examples, next_reading, observation_ids, prompt_ids
from psigrad.language.examples import Example
from psigrad.language.images import FIRST

RED, WIDE = encoded(draw("red")), encoded(draw("blue", (24, 8)))  # 2 and 3 features
R, W = (hashlib.sha256(data).hexdigest() for data in (RED, WIDE))
PART = {"type": "image"}
ONLY_PARTS = PARTS_CHATML.replace("message['content'] is string", "false")


def say(*parts, role="user"):
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def read(form="prompt-only", **row):
    return from_rows([row], form).rows[0]


def places(digest, count):
    """By hand: 46 bits of the SHA-256 above 16 bits of the place, above bit 62."""
    return [2**62 + (int(digest, 16) >> 256 - 46) * 2**16 + i for i in range(count)]


def by_hand(words, *pieces):
    """The ids of texts, and of images given as (SHA-256, features)."""
    made = []
    for piece in pieces:
        if isinstance(piece, str):
            made += words(piece, add_special_tokens=False)["input_ids"]
        else:
            made += [*by_hand(words, EDGE + WHOLE), *places(*piece), *by_hand(words, EDGE)]
    return made


@pytest.fixture(scope="module", params=[PARTS_CHATML, ONLY_PARTS])
def words(request):
    return tokenizer(request.param)


def test_a_prompt_has_each_image_s_own_ids_in_order(words):
    row = read(prompt=[say("be", role="system"), say("a", PART, "b", PART)], images=[RED, WIDE])
    start, end = "<|im_start|>", "<|im_end|>\n"
    wanted = by_hand(words, f"{start}system\nbe{end}{start}user\na", (R, 2), "b", (W, 3), f"{end}{start}assistant\n")
    assert prompt_ids(words, row) == wanted
    assert [images.split_id(token)[1] for token in wanted if token >= FIRST] == [0, 1, 0, 1, 2]
    swapped = read(prompt=[say("be", role="system"), say("a", PART, "b", PART)], images=[WIDE, RED])
    assert prompt_ids(words, swapped) != wanted


def test_without_a_template_the_images_come_first():
    words = tokenizer("")
    words.chat_template = None
    assert prompt_ids(words, read(prompt="how?", images=[RED])) == by_hand(words, (R, 2), "how?")
    made = examples(words, read("prompt-completion", prompt="how?", completion=" 3", images=[RED]))[0]
    assert made.ids == [*by_hand(words, (R, 2), "how?"), *by_hand(words, " 3"), words.eos_token_id]
    trained = len(by_hand(words, " 3")) + 1
    assert made.mask == [False] * (len(made.ids) - trained) + [True] * trained


def test_later_turns_keep_the_images_of_earlier_ones(words):
    talk = [say(PART, "a"), say("x", role="assistant"), say(PART, "b"), say("y", role="assistant")]
    made = examples(words, read("messages", messages=talk, images=[RED, WIDE]))
    assert len(made) == 1
    assert [token for token in made[0].ids if token >= FIRST] == [*places(R, 2), *places(W, 3)]
    trained = [token for token, own in zip(made[0].ids, made[0].mask, strict=True) if own]
    assert trained == by_hand(words, "x<|im_end|>", "y<|im_end|>")
    row = read(prompt=talk[:1], images=[RED])
    known = Conversation(words, row).prompt(row.prompt) + "x<|im_end|>"
    later = read(prompt=talk[:3], images=[RED, WIDE]).prompt
    on = next_reading(words, row, later, known)
    assert not on.restart
    assert [token for token in on.ids if token >= FIRST] == places(W, 3)
    assert observation_ids(words, row, later[2:])[-len(on.ids) :] == on.ids


def test_generation_blocks_are_found_behind_an_image():
    own = "{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}"
    end = "{% if message['role'] != 'assistant' %}{{- '<|im_end|>' -}}{% endif %}{{- '\\n' -}}"
    blocks = PARTS_CHATML.replace("{{- message['content'] -}}", own).replace("{{- '<|im_end|>\\n' -}}", end)
    talk = [say(PART, "a"), {"role": "assistant", "content": "red"}]
    row = read("messages", messages=talk, images=[RED])
    marked, plain = (examples(tokenizer(form), row)[0] for form in (blocks, PARTS_CHATML))
    assert (marked.ids, marked.mask) == (plain.ids, plain.mask)


def test_a_pair_shares_the_image_of_its_prompt(words):
    row = read("preference", prompt=[say(PART, "a")], chosen=[say("x", role="assistant")],
               rejected=[say("y", role="assistant")], images=[RED])  # fmt: skip
    pair = encode_pair(words, row)
    assert [token for token in pair.prompt if token >= FIRST] == places(R, 2)
    assert all(token < FIRST for token in (*pair.chosen.ids, *pair.rejected.ids))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{{- '<image>' -}}", "", "drops an image"),
        ("{{- '<image>' -}}", "{{- '<image><image>' -}}", "writes '<image>' 2 times"),
        ("for part in message['content']", "for part in message['content'] | reverse", "moves it to another place in the text"),
        ("message['content'] is string", "true", "chat template"),
    ],
)
def test_a_template_that_drops_doubles_or_moves_an_image_is_refused(old, new, said):
    with pytest.raises(RowError, match=said):
        prompt_ids(tokenizer(PARTS_CHATML.replace(old, new)), read(prompt=[say("aa", PART, "bb")], images=[RED]))


@pytest.mark.parametrize("parts", [("<image>",), ("<image>", PART)])
def test_a_user_s_placeholder_is_refused_by_name(words, parts):
    with pytest.raises(RowError, match="has the text '<image>', which marks the place of an image"):
        prompt_ids(words, read(prompt=[say(*parts)], images=[RED] * (len(parts) - 1)))
    bare = tokenizer("")
    for row in (read(prompt="<image>"), read("sft", text="<image>")):
        with pytest.raises(RowError, match="has the text '<image>'"):
            (prompt_ids if row.prompt else examples)(bare, row)


def test_a_text_model_refuses_images_and_takes_literal_placeholders():
    bare = tokenizer(image_format=False)
    with pytest.raises(UserError, match="vision-language model"):
        prompt_ids(bare, read(prompt=[say(PART, "a")], images=[RED]))
    assert bare.convert_tokens_to_ids(IMAGE) in prompt_ids(bare, read(prompt=[say("a<image>")]))


def test_prompts_are_shown_with_labels(words):
    row = read(prompt=[say(PART, "a", PART)], images=[RED, WIDE])
    text = render(words, row)[0].pieces[0].text
    assert f"user\n{EDGE}{WHOLE}[image 16×8 {R[:6]}]{EDGE}a{EDGE}{WHOLE}[image 24×8 {W[:6]}]{EDGE}<|im_end|>" in text


def test_ids_of_images_survive_arrow_and_rows_with_images_are_not_cached():
    wide, narrow = Example([1, *places(R, 2)], [False] * 3, False), Example([1, 2**31 - 1], [False, True], False)
    for items, kind in (([wide, narrow], np.int64), ([narrow], np.int32)):
        batch = row_cache.batch_of(list(map(row_cache.pack, items)))
        assert batch.column(1).values.to_numpy().dtype == kind
        again = row_cache.ArrowSequence([row_cache.deserialise(*row_cache.serialise(batch))], row_cache.unpack)
        assert list(again) == items
    with pytest.raises(row_cache.UncacheableError):
        row_cache.pack_row(read(prompt=[say({"type": "image", "image": RED})]))
