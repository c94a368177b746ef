"""The speed of psigrad relative to TRL for a vision-language model: `python benchmarks/vision_language.py [V1 V2 …]`.

The model is an Idefics 3 with random weights, whose vision tower both sides freeze. Loss and gradient must be equal first; then
the steps alternate. Each pair of steps is a line of --json. A workload with `--pairs` lines is not measured again.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from beside_trl import beside
from real import interval
from resumable import ask
from timed import inputs
from timed.workload import Workload, read_shape
from transformers import AutoModelForImageTextToText, Idefics3Config, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from psigrad.errors import UserError
from psigrad.language.models import tiny

MEASURED = Path(__file__).parent / "results" / "vision_language.jsonl"
SMALL = {
    "side": 64,
    "scale": 2,
    "text": {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    "tower": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "patch_size": 4},
}
_SMOL = read_shape("SmolLM2-135M")
_TEXT = {name: _SMOL[name] for name in _SMOL if name.startswith(("hidden_", "intermediate_", "num_"))} | {"vocab_size": 49280}
_TOWER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16}
LARGE = {"side": 512, "scale": 4, "text": _TEXT, "tower": _TOWER}
"""The shape of SmolVLM-256M, whose text model is SmolLM2-135M: 64 tokens per image."""
_WORK = Workload("", "", prompts=4, prompt_tokens=32, completion_tokens=32, spread=0.4, rows=64)
_SFT = replace(_WORK, kind="sft", prompts=16)
WORKS = {
    "V1": (SMALL, replace(_WORK, says="GRPO, 0.8M parameters, 4 pictures × 8 completions")),
    "V2": (SMALL, replace(_SFT, says="SFT, 0.8M parameters, 16 pictures a step, each read for the first time")),
    "V3": (SMALL, replace(_SFT, says="SFT, 0.8M parameters, 16 pictures a step, in a later pass over them", rows=16)),
    "V4": (LARGE, replace(_WORK, says="GRPO, SmolVLM-256M's shape, 2 pictures × 8 completions", prompts=2)),
    "V5": (LARGE, replace(_SFT, says="SFT, SmolVLM-256M's shape, 8 pictures a step, each read for the first time", prompts=8)),
    "V6": (LARGE, replace(_SFT, says="SFT, SmolVLM-256M's shape, 8 pictures a step, in a later pass", prompts=8, rows=8)),
}
"""Shape and workload. In a later pass, the images were already read in the first step, which is not timed."""


def make(shape: dict[str, Any], work: Workload, folder: Path) -> None:
    """Write the files of a workload: the model with random weights, its tokenizer and processor, the rows and their images."""
    words = tiny.tokenizer([inputs.LETTERS], 256)
    marks = [tiny.EDGE, tiny.WHOLE, tiny.IMAGE, "<end_of_utterance>"]
    words.add_special_tokens({"additional_special_tokens": marks})
    # TRL trains on the template's text after the end of a turn, and psigrad does not; so write no text there
    words.chat_template = tiny.PARTS_CHATML.replace("<|im_end|>\n", "<|im_end|>")
    words.eos_token, words.padding_side = "<|im_end|>", "left"
    ends = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": words.eos_token_id}
    common = {"model_type": "llama", "max_position_embeddings": 2048, "tie_word_embeddings": True, **ends}
    config = Idefics3Config(
        text_config={**common, **shape["text"]},
        vision_config={**shape["tower"], "image_size": shape["side"]},
        image_token_id=words.convert_tokens_to_ids(tiny.IMAGE),
        scale_factor=shape["scale"],
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    network: Any = AutoModelForImageTextToText.from_config(config)
    network.generation_config.eos_token_id = words.eos_token_id
    edge = {"longest_edge": shape["side"]}
    seen = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    each = (shape["side"] // shape["tower"]["patch_size"] // shape["scale"]) ** 2
    both = Idefics3Processor(seen, words, image_seq_len=each, chat_template=words.chat_template)
    for part in (network, words, seen, both):
        part.save_pretrained(folder / "model")
    inputs.write(work, words, folder)


def shown(name: str, pairs: list[dict[str, Any]]) -> str:
    """Return the line to print for a workload."""
    middle, low, high = interval([pair["trl"] / pair["ours"] for pair in pairs])
    share = max(pair["ours_mb"] for pair in pairs) / max(pair["trl_mb"] for pair in pairs)
    return f"{name} ({WORKS[name][1].says}): {middle:.2f} times as fast [{low:.2f}, {high:.2f}], {share:.2f} of TRL's memory"


def main() -> None:
    """Measure the requested workloads that lack pairs, and print the result of each requested workload."""
    given = ask(__doc__, WORKS, MEASURED, dtype="float32", pairs=5)
    for name in given.names:
        shape, work = WORKS[name]
        if (missing := given.pairs - len(given.taken(work=name))) > 0:
            work = replace(work, name=name, image=shape["side"], steps=missing)
            beside(work, given.dtype, given.threads, make=partial(make, shape), keep=partial(given.keep, work=name))
        print(shown(name, given.taken(work=name)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
