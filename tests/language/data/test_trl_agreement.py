"""Our supervised examples against the tokenisation of TRL's SFTTrainer on the same rows, and where we differ on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from psigrad.language.data.dataset_rows import validate
from psigrad.language.data.templates import example, prompt_ids

Pair = tuple[list[int], list[bool]]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def bot(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


PLAIN = [{"prompt": "what is", "completion": " two plus two"}, {"prompt": "the cat", "completion": " sat\n on the mat"}]
CHAT = [
    {"prompt": [user("hello")], "completion": [bot("the cat sat")]},
    {"prompt": [user("a"), bot("b"), user("c")], "completion": [bot("what is two")]},
]
MESSAGES = [{"messages": [user("hello"), bot("the cat"), user("what"), bot("is two plus")]}, {"messages": [user("a"), bot("b")]}]
TEXT = [{"text": "hello world"}, {"text": "the cat sat on the mat"}]
MERGING = [{"prompt": "hello ", "completion": "there"}, {"prompt": "the ", "completion": "cat"}]


@pytest.fixture
def trl(tmp_path: Path) -> Callable[..., list[Pair]]:
    def tokenised(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **settings: Any) -> list[Pair]:
        """Ids and loss mask of each row, out of a real SFTTrainer."""
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=64))
        args = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, **settings)
        trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in trainer.train_dataset]

    return tokenised


def ours(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, max_length: int = 0) -> list[Pair]:
    built = [example(tokenizer, validate(row, "sft", "x"), max_length) for row in rows]
    return [(one.ids, one.mask) for one in built]


def test_plain_prompt_completion_rows_are_trls(trl: Callable[..., list[Pair]], bare: PreTrainedTokenizerFast) -> None:
    assert ours(PLAIN, bare) == trl(PLAIN, bare)
    assert ours(PLAIN, bare, 6) == trl(PLAIN, bare, max_length=6)


def test_plain_text_rows_are_trls_but_for_the_first_token_which_nothing_predicts(
    trl: Callable[..., list[Pair]], bare: PreTrainedTokenizerFast
) -> None:
    theirs = trl(TEXT, bare)
    assert all(mask[0] for _, mask in theirs)
    assert ours(TEXT, bare) == [(ids, [False, *mask[1:]]) for ids, mask in theirs]


def test_conversations_with_generation_blocks_are_trls_assistant_only_loss(
    trl: Callable[..., list[Pair]], marked_chatml: PreTrainedTokenizerFast
) -> None:
    assert ours(MESSAGES, marked_chatml) == trl(MESSAGES, marked_chatml, assistant_only_loss=True)


def test_conversational_prompt_completion_is_trls_but_for_the_line_break_behind_the_turn(
    trl: Callable[..., list[Pair]], plain_chatml: PreTrainedTokenizerFast
) -> None:
    """On purpose: a model stops at <|im_end|> and never writes the template's line break, so it isn't trained to."""
    theirs = trl(CHAT, plain_chatml)
    assert all(mask[-1] and plain_chatml.decode([ids[-1]]) == "\n" for ids, mask in theirs)
    assert ours(CHAT, plain_chatml) == [(ids, [*mask[:-1], False]) for ids, mask in theirs]


def test_where_tokens_merge_across_the_boundary_ours_keep_the_sampling_context_and_trls_do_not(
    trl: Callable[..., list[Pair]], bare: PreTrainedTokenizerFast
) -> None:
    """On purpose: contract 1. TRL warns and trains on a context that generation never produces."""
    for row, (mine, mask), (theirs, _) in zip(MERGING, ours(MERGING, bare), trl(MERGING, bare), strict=True):
        prompt = prompt_ids(bare, validate(row, "sft", "x"))
        assert mine[: len(prompt)] == prompt and mask.index(True) == len(prompt)
        assert theirs[: len(prompt)] != prompt
        assert bare.decode(mine) == bare.decode(theirs)
