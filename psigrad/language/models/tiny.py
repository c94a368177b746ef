"""Small, randomly initialised models and their tokenizers, for the demo, for tests, and for experiments on a laptop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

EDGE, WHOLE, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
PARTS_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A ChatML template for messages whose content may be a list of text and image parts, with Idefics 3's image token."""
Architecture = Literal["qwen3", "llama", "gpt2", "gpt_neox"]


def tokenizer(corpus: Iterable[str], vocabulary: int = 256, *, digits_alone: bool = True) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `corpus`, with distinct EOS and PAD tokens and the special tokens of ChatML.

    It has at most max(`vocabulary`, 260) tokens. `digits_alone` makes every digit a separate token.
    """
    bpe = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits_alone else []
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>")


def model(
    architecture: Architecture,
    vocabulary: int,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    max_length: int = 256,
    tied: bool = True,
    seed: int = 0,
    eos_token_id: int = 0,
    pad_token_id: int = 1,
) -> PreTrainedModel:
    """Return a randomly initialised causal language model. Qwen 3 and Llama use GQA. `tied` ties LM head and embedding."""
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    llama: dict[str, Any] = {"intermediate_size": 3 * hidden, "num_key_value_heads": max(heads // 2, 1)}
    match architecture:
        case "qwen3":
            config: PreTrainedConfig = Qwen3Config(**common, **llama, head_dim=hidden // heads)
        case "llama":
            config = LlamaConfig(**common, **llama)
        case "gpt2":
            config = GPT2Config(**common)
        case "gpt_neox":
            config = GPTNeoXConfig(**common, intermediate_size=4 * hidden)
        case _:
            raise ValueError(f"Unknown architecture {architecture!r}; it must be qwen3, llama, gpt2 or gpt_neox.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def save_vision_model(
    corpus: Iterable[str], folder: Path, *, pixels: int, patch: int, hidden: int = 64, layers: int = 2, seed: int = 0
) -> None:
    """Save a randomly initialised Idefics 3 in `folder`, with an image processor and a tokenizer trained on `corpus`.

    An image of `pixels` × `pixels` has one token for each patch of `patch` × `patch`.
    """
    from transformers.models.idefics3.configuration_idefics3 import Idefics3Config
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = tokenizer(corpus, 290)
    words.add_special_tokens({"additional_special_tokens": [EDGE, WHOLE, IMAGE]})
    words.eos_token, words.chat_template = "<|im_end|>", PARTS_CHATML
    # The usual standard deviation of 0.02 is for wide models. With it, a narrow model's outputs hardly differ between two images.
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4}
    sizes["initializer_range"] = hidden**-0.5
    ends = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": words.eos_token_id}
    text = LlamaConfig(
        **sizes,
        **ends,
        intermediate_size=3 * hidden,
        vocab_size=len(words),
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    tower = {**sizes, "intermediate_size": 2 * hidden, "image_size": pixels, "patch_size": patch}
    image: Any = words.convert_tokens_to_ids(IMAGE)
    config = Idefics3Config(
        text_config=text.to_dict(),
        vision_config=tower,
        image_token_id=image,
        scale_factor=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = AutoModelForImageTextToText.from_config(config)
    network.generation_config.eos_token_id = words.eos_token_id
    edge = {"longest_edge": pixels}
    for part in (network, words, Idefics3ImageProcessorPil(size=edge, max_image_size=edge)):
        part.save_pretrained(folder)
