"""A workload's files: the model, the tokenizer and the rows that psigrad and TRL read."""

from __future__ import annotations

import copy
import json
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from timed.workload import Workload
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from psigrad.errors import UserError
from psigrad.language.data.named_datasets import go_offline_without_network
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models.sizes import size
from psigrad.language.models.tokenizer_files import read_tokenizer
from psigrad_extras.preflight.plan.shape import config_of, model_of

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def build(work: Workload, folder: Path) -> None:
    """Write model/ (a Qwen3 with random weights), rows.jsonl and work.json to `folder`, for psigrad and TRL."""
    if (folder / "work.json").exists():
        return
    config = Qwen3Config(
        vocab_size=work.vocabulary,
        hidden_size=work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=work.hidden // 4,
        intermediate_size=3 * work.hidden,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    made = tokenizer(work.vocabulary)
    write_model(config, made, folder)
    write(work, made, folder)


def prepare(work: Workload, model: str, folder: Path) -> None:
    """Write the same files for a given model: a folder, hub name or GGUF file. A folder or file with only a configuration gets
    random weights. A model without a tokenizer gets one of single letters.
    """
    go_offline_without_network()
    model = convert_to_folder(model)
    config = copy.deepcopy(config_of(model))
    limit = size(config, "positions") or 1 << 31
    if work.prompt_tokens + work.completion_tokens > limit:
        raise UserError(
            f"prompts of {work.prompt_tokens} and completions of {work.completion_tokens} tokens exceed the model's {limit} "
            "positions; lower --prompt-tokens or --completion-tokens."
        )
    made = _tokenizer_of(model, config)
    source = Path(model)
    if source.exists() and not (source.is_dir() and any(source.glob("*.safetensors"))):
        write_model(config, made, folder)
    elif source.is_dir():
        shutil.copytree(source, folder / "model")
        made.save_pretrained(folder / "model")
    else:
        AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False).save_pretrained(folder / "model")
        made.save_pretrained(folder / "model")
    write(work, made, folder)


def write_model(config: PreTrainedConfig, made: PreTrainedTokenizerBase, folder: Path, **options: Any) -> None:
    """Write model/ with random weights. `options` are passed to `model_of`."""
    torch.manual_seed(0)
    model_of(config, **options).save_pretrained(folder / "model")
    made.save_pretrained(folder / "model")


def _tokenizer_of(model: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    try:
        found = read_tokenizer(model)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        found = None
    if found is None or len(found) < 2 or found.eos_token_id is None:
        return tokenizer(size(config, "vocabulary"))
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    found.padding_side = "left"
    return found


def write(work: Workload, made: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the rows, their images, and the workload."""
    made_rows = rows(work, made)
    if work.image:
        made_rows = [_with_picture(row, work.image, folder / "pictures" / f"{i}.png") for i, row in enumerate(made_rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made_rows))
    (folder / "work.json").write_text(json.dumps(asdict(work)))  # last: it marks the folder as complete


def _with_picture(row: dict[str, Any], side: int, file: Path) -> dict[str, Any]:
    """Save an image of random colours, and return the row as messages with this image."""
    from PIL import Image

    file.parent.mkdir(exist_ok=True)
    Image.frombytes("RGB", (side, side), random.Random(file.stem).randbytes(3 * side * side)).save(file)
    parts = [{"type": "image"}, {"type": "text", "text": row["prompt"]}]
    answer = {"completion": [{"role": "assistant", "content": row["completion"]}]} if "completion" in row else {}
    return {"prompt": [{"role": "user", "content": parts}], "images": [str(file)], **answer}


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each letter. `vocabulary` may exceed the number of letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {"<eos>": 0, "<pad>": 1} | {letter: 2 + i for i, letter in enumerate(LETTERS)}
    ids |= {f"<{i}>": i for i in range(len(ids), vocabulary)}
    made = Tokenizer(models.WordLevel(ids, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<eos>", "<pad>"])
    fast: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = fast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", padding_side="left")
    return found


def rows(work: Workload, made: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return prompts, pairs or texts of random letters. With a tokenizer that merges letters, lengths may be off by a token."""
    rng = random.Random(0)

    def size(text: str) -> int:
        return len(made(text, add_special_tokens=False).input_ids)

    gap = "" if size(LETTERS) == len(LETTERS) else " "  # spaces keep a tokenizer from merging letters

    def text(n: int) -> str:
        letters = rng.choices(LETTERS, k=n)
        return gap.join(letters[: max(1, round(n * n / size(gap.join(letters))))])

    def spread(mean: int) -> int:
        if not work.spread:
            return mean
        drawn = mean * rng.lognormvariate(-(work.spread**2) / 2, work.spread)
        return round(min(max(drawn, mean / 4), 4 * mean))

    found = []
    for _ in range(work.rows):
        row: dict[str, Any] = {"prompt": text(spread(work.prompt_tokens))}
        if work.kind in ("dpo", "reward"):
            row |= {"chosen": text(rng.randint(16, 64)), "rejected": text(rng.randint(16, 64))}
        elif work.kind == "sft":
            row |= {"completion": text(spread(40) if work.spread else rng.randint(16, 64))}
        found.append(row)
    return found
