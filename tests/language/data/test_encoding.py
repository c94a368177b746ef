"""Text is encoded from its last special token on: the same ids as from its beginning, by every kind of tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from psigrad.language.data.chat.dialect import specials_of
from psigrad.language.data.templates import encode_after

CORPUS = ["the cat sat on the mat", "what is two plus two", " ▁x <a> hello hello there", "user\n\n\nassistant"] * 10
SPECIALS = ["<s>", "<unk>", "<|a|>", "<|b|>"]


def made(kind: str) -> PreTrainedTokenizerFast:
    own = Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>", byte_fallback=kind == "llama"))
    trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    match kind:
        case "bytes" | "bytes with a space" | "overlapping" | "normalized" | "single word":
            own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes with a space")
            own.decoder = decoders.ByteLevel()
        case "metaspace first" | "metaspace always":
            own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.split()[1])
        case "llama":
            own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        case "unigram":
            own.normalizer = normalizers.NFKC()
            own.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
            trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
        case "stripping":
            own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.train_from_iterator(CORPUS, trainer)
    extra = {
        "overlapping": [AddedToken("x<|a|>", normalized=False)],
        "normalized": [AddedToken("<|c|>", normalized=True)],
        "single word": [AddedToken("two", normalized=False, single_word=True)],
        "stripping": [AddedToken("<|c|>", normalized=False, lstrip=True, rstrip=True)],
    }.get(kind, [])
    own.add_tokens(extra)
    return PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", unk_token="<unk>", eos_token="<|b|>")


KINDS = ["bytes", "bytes with a space", "metaspace first", "metaspace always", "llama", "unigram", "stripping", "overlapping"]
KINDS += ["normalized", "single word"]
TOKENIZERS = {kind: made(kind) for kind in KINDS}
words = st.lists(st.sampled_from(["the cat", " ", "\n\n", "two", "x", "<|a|>", "<|b|>", "<|c|>", "<s>", "é", "<|a"]), max_size=8)


def oracle(tokenizer: PreTrainedTokenizerFast, before: str, text: str) -> list[int]:
    """All of both texts through transformers' call, as `encode_after` did it before it knew where tokenizers cut."""

    def ids(of: str) -> list[int]:
        return list(tokenizer(of, add_special_tokens=False)["input_ids"])

    base, joint = ids(before), ids(before + text)
    return joint[len(base) :] if joint[: len(base)] == base else ids(text)


@pytest.mark.parametrize("kind", KINDS)
@given(before=words.map("".join), text=words.map("".join))
def test_behind_any_text_the_ids_are_those_of_the_whole(kind: str, before: str, text: str) -> None:
    assert encode_after(TOKENIZERS[kind], before, text) == oracle(TOKENIZERS[kind], before, text)


def test_where_a_cut_depends_on_what_stands_before_it_none_is_made() -> None:
    assert {kind: specials_of(TOKENIZERS[kind]).cuts is not None for kind in KINDS} == dict.fromkeys(KINDS, True) | {
        "overlapping": False,  # "x<|a|>" is one token, and "<|a|>" begins inside it
        "single word": False,  # "two" is no word of its own behind a letter
    }


def test_a_tokenizer_that_was_left_truncating_gives_whole_texts(kind: str = "bytes") -> None:
    tokenizer = made(kind)
    tokenizer("the cat sat on the mat", truncation=True, max_length=2)
    assert encode_after(tokenizer, "", "the cat sat on the mat") == oracle(made(kind), "", "the cat sat on the mat")
