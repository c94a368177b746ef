"""Tiny vision-language models from configurations, with tokenizer and image processor, as their checkpoints lay them out."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
import transformers as t
from PIL import Image

from psigrad.language import images
from psigrad.language.models import tiny

TEXTS = ["How many red dots? three", "The answer is 2.", "user: say it\nassistant: 7"]
MARKS = {
    "idefics3": ("<image>", "<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))),
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "qwen": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
TOWERS = {
    **dict.fromkeys(("idefics3", "smolvlm"), ("vision_model", "connector")),
    "gemma3": ("vision_tower", "multi_modal_projector"),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), ("visual",)),
}
"""The modules of each family that compute an image's features."""
# What each family's template writes for an image.
_PLACES = {"idefics3": "<image>", "gemma3": "<start_of_image>", "qwen": "<|vision_start|><|image_pad|><|vision_end|>"}


def template(place: str) -> str:
    """Return a ChatML template whose messages may have parts."""
    parts = (
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'image' -%}{{- '" + place + "' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}"
    )
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}" + parts + "{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def make(family: str, folder: Path, *, hidden: int = 64, layers: int = 2, seed: int = 0, vocabulary: int = 300) -> Path:
    """Save a random model of `family` (idefics3, smolvlm, gemma3, qwen3_vl, qwen3_5) in `folder`, and return it."""
    group = family if family in _PLACES else "idefics3" if family == "smolvlm" else "qwen"
    tokenizer = tiny.tokenizer(TEXTS, vocabulary - len(MARKS[group]))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS[group])})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template(_PLACES[group])
    ids = dict(zip(MARKS[group], tokenizer.convert_tokens_to_ids(list(MARKS[group])), strict=True))
    config, processor = _FAMILIES[family](hidden, layers, len(tokenizer), ids)
    config.text_config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(seed)
    network = t.AutoModelForImageTextToText.from_config(config)
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    for part in (network, tokenizer, processor):
        part.save_pretrained(folder)
    return folder


def _text(hidden: int, layers: int, rows: int, **more: Any) -> dict[str, Any]:
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "vocab_size": rows}
    return {**heads, **sizes, "max_position_embeddings": 512, "pad_token_id": 1, "bos_token_id": None, **more}


_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def _idefics3(hidden: int, layers: int, rows: int, ids: dict[str, int], kind: str = "Idefics3") -> tuple[Any, Any]:
    text = t.LlamaConfig(**_text(hidden, layers, rows))
    tower = {**_TOWER, "image_size": 16, "patch_size": 4}
    config = getattr(t, f"{kind}Config")(
        text_config=text.to_dict(), vision_config=tower, image_token_id=ids["<image>"], scale_factor=2, pad_token_id=1
    )
    sides = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Idefics3
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as SmolVLM

    return config, (Idefics3 if kind == "Idefics3" else SmolVLM)(**sides)


def _gemma3(hidden: int, layers: int, rows: int, ids: dict[str, int]) -> tuple[Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    kinds = ["sliding_attention", "full_attention"] * layers
    text = t.Gemma3TextConfig(**_text(hidden, layers, rows, sliding_window=6, layer_types=kinds[:layers]))
    marks = [ids[name] for name in MARKS["gemma3"]]
    config = t.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**_TOWER, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=marks[0],
        boi_token_index=marks[1],
        eoi_token_index=marks[2],
    )
    return config, Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, image_seq_length=4)


def _qwen(hidden: int, layers: int, rows: int, ids: dict[str, int], kind: str = "Qwen3_5") -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    more: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
    if kind == "Qwen3_5":
        more["rope_parameters"] |= {"partial_rotary_factor": 1.0}
        more |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        more["layer_types"] = (["linear_attention", "full_attention"] * layers)[:layers]
    tower: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": hidden}
    tower |= {"patch_size": 4, "num_position_embeddings": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if kind == "Qwen3VL":
        tower["deepstack_visual_indexes"] = [0]
    text = getattr(t, f"{kind}TextConfig")(**_text(hidden, layers, rows, **more))
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = dict(zip(names, (ids[name] for name in MARKS["qwen"]), strict=True))
    config = getattr(t, f"{kind}Config")(text_config=text.to_dict(), vision_config=tower, **marks)
    sides = {"shortest_edge": 64, "longest_edge": 1024}
    return config, Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=sides)


_FAMILIES: dict[str, Any] = {
    "idefics3": _idefics3,
    "smolvlm": lambda *of: _idefics3(*of, kind="SmolVLM"),
    "gemma3": _gemma3,
    "qwen3_vl": lambda *of: _qwen(*of, kind="Qwen3VL"),
    "qwen3_5": _qwen,
}


def picture(seed: int, width: int = 20, height: int = 12) -> images.Picture:
    """Return a known image of random pixels."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(stream, "PNG")
    return known(stream.getvalue(), width, height)


def known(data: bytes, width: int, height: int) -> images.Picture:
    """Register an encoded image and return it."""
    import hashlib

    made = images.Picture(hashlib.sha256(data).hexdigest(), width, height, data=data)
    images.register(made)
    return made


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text with marks."""
    image_format = images.image_format_of(tokenizer)
    out, pictures = images.expand_marks(text, image_format)
    ids = tokenizer(out, add_special_tokens=False)["input_ids"]
    return images.insert_image_ids(ids, pictures, image_format) if pictures else ids


class _WithoutVideo(t.Qwen3VLProcessor):
    """The processor without one for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, given: Any) -> Any:
        return type(given)


def processor_of(family: str, tokenizer: Any) -> Any:
    """Return transformers' own processor of a family around this tokenizer, with the text that stands for an image."""
    image_format = images.image_format_of(tokenizer)
    own = image_format.processor
    if family == "gemma3":
        begin, end = MARKS["gemma3"][1:]
        for name, token in (("boi_token", begin), ("eoi_token", end), ("image_token", MARKS["gemma3"][0])):
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
        made = t.Gemma3Processor(own, tokenizer, image_seq_length=4)
    elif family in ("idefics3", "smolvlm"):
        made = t.Idefics3Processor(own, copy.deepcopy(tokenizer), image_seq_len=image_format.each)
    else:
        made = _WithoutVideo(own, tokenizer, None)
    made.psigrad_place = lambda mark: image_format.placeholder
    return made
