"""Small tokenizers built on the spot, and three chat templates: ChatML, ChatML with generation blocks, and a forgetful one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3's trap: an assistant's thinking is dropped once the user speaks again.
FORGETFUL = (
    "{% for m in messages %}{% set text = m['content'] %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the cat sat on the mat", "what is two plus two", "hello world hello there", "user assistant system\n\n\n"] * 10


def build_tokenizer(chat_template: str | None = None, *, bos: bool = False) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    )
    if bos:
        from tokenizers.processors import TemplateProcessing

        bpe.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>", bos_token="<s>")
    made.chat_template = chat_template
    return made


@pytest.fixture(scope="session")
def build() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture(scope="session")
def bare() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def plain_chatml() -> PreTrainedTokenizerFast:
    return build_tokenizer(PLAIN_CHATML)


@pytest.fixture(scope="session")
def marked_chatml() -> PreTrainedTokenizerFast:
    return build_tokenizer(MARKED_CHATML)


@pytest.fixture(scope="session")
def forgetful() -> PreTrainedTokenizerFast:
    return build_tokenizer(FORGETFUL)
