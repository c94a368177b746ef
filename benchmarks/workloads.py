"""What both sides are timed on: the same weights, prompts, batch shape, lengths, rewards and precision."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True)
class Workload:
    """One shape of work. `kind` is online (GRPO) or the offline lesson: dpo, reward, sft."""

    name: str
    says: str
    kind: str = "online"
    hidden: int = 256
    layers: int = 6
    vocabulary: int = 64
    prompts: int = 16
    generations: int = 8
    prompt_tokens: int = 12
    completion_tokens: int = 64
    beta: float = 0.0
    iterations: int = 1
    steps: int = 5


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W0", "5 M parameters, completions of at most 8 tokens: overhead shows", completion_tokens=8, steps=12),
        Workload("W1", "5 M parameters, 16 prompts x 8 completions of at most 64 tokens"),
        Workload(
            "W2",
            "20 M parameters, prompts of 512 tokens, completions of 1 to 256 tokens, very unequal",
            hidden=448,
            layers=8,
            prompts=4,
            prompt_tokens=512,
            completion_tokens=256,
            steps=3,
        ),
        Workload(
            "W3",
            "vocabulary 151,936, hidden 256, 4 layers, completions of 256 tokens: memory of the head",
            layers=4,
            vocabulary=151936,
            prompts=2,
            generations=4,
            completion_tokens=256,
            steps=2,
        ),
        Workload("W4", "W1 with a KL to a reference and two passes over each batch", beta=0.04, iterations=2, steps=4),
        Workload("DPO", "W1's model, 16 pairs per step, answers of 16 to 64 tokens", "dpo", steps=8),
        Workload("RM", "the same pairs, a reward model", "reward", steps=8),
        Workload("SFT", "W1's model, 16 rows per step, 16 to 64 tokens", "sft", steps=8),
    )
}


def build(work: Workload, folder: Path) -> None:
    """model/ and rows.jsonl under `folder`, the same for both sides."""
    if (folder / "rows.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(work.vocabulary).save_pretrained(folder / "model")
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
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(work)))


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token per letter; `vocabulary` may be larger than what there are letters for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {"<eos>": 0, "<pad>": 1} | {letter: 2 + i for i, letter in enumerate(LETTERS)}
    ids |= {f"<{i}>": i for i in range(len(ids), vocabulary)}
    made = Tokenizer(models.WordLevel(ids, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<eos>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", padding_side="left")


def rows(work: Workload) -> list[dict[str, Any]]:
    """Prompts, or pairs, or texts, of random letters."""
    rng = random.Random(0)

    def text(n: int) -> str:
        return "".join(rng.choices(LETTERS, k=n))

    made = []
    for _ in range(512):
        row: dict[str, Any] = {"prompt": text(work.prompt_tokens)}
        if work.kind in ("dpo", "reward"):
            row |= {"chosen": text(rng.randint(16, 64)), "rejected": text(rng.randint(16, 64))}
        elif work.kind == "sft":
            row |= {"completion": text(rng.randint(16, 64))}
        made.append(row)
    return made


def reward(completions: list[str], **columns: Any) -> list[float]:
    """A number in [0, 1) out of the text alone: every group has signal, and scoring costs nothing."""
    return [int(hashlib.md5(text.encode()).hexdigest()[:6], 16) / 16**6 for text in completions]


def fixed_batch(work: Workload) -> dict[str, Any]:
    """Token ids and advantages that both sides compute the loss and its gradient on, before anything is timed."""
    rng = random.Random(1)
    longest = min(24, work.completion_tokens)

    def completion() -> list[int]:
        return [rng.randrange(2, 64) for _ in range(rng.randint(2, longest))]

    groups = 3
    completions = [[completion() for _ in range(4)] for _ in range(groups)]
    prompts = [[rng.randrange(2, 64) for _ in range(min(12, work.prompt_tokens))] for _ in range(groups)]
    return {"prompts": prompts, "completions": completions, "advantages": [rng.gauss(0, 1) for _ in range(4 * groups)]}
