"""Export of a model: a GGUF file with a Modelfile for Ollama, the full model with its adapter merged in, or the adapter."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psigrad.config import Model
from psigrad.errors import UserError, nearest, reason_of
from psigrad.language.data.chat.rendering import render
from psigrad.language.loading import model_source
from psigrad.language.models.backbone import LOADING_ERRORS
from psigrad.language.models.lora import is_adapter
from psigrad.language.models.sizes import size
from psigrad.language.models.tokenizer_files import read_tokenizer
from psigrad.language.models.towers import disable_progress_bars, open_towers, write
from psigrad.language.models.vision import needs_vision
from psigrad.paths import check_folder
from psigrad.records import checkpoint
from psigrad.records.read import auto_class

KINDS = ("gguf", "merged", "adapter")
# The types that `gguf` can write. llama.cpp's K-quants need llama-quantize on an f16 file.
QUANTISATIONS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
# The pre-tokenizer, which splits a text before byte pairs are merged: regular expression in tokenizer.json -> llama.cpp's name.
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS = {
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _WORDS % "{1,3}": "llama-bpe",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _WORDS % "": "qwen2",
}


_LOADED = """```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```
"""
_BY_LLAMA_CPP = "use --to merged, and convert its folder with llama.cpp's convert_hf_to_gguf.py"
_SERVED = """```
ollama create NAME -f Modelfile
llama-server -m {file} --jinja
```
"""


class LeftBehind(NamedTuple):
    """The result of an export: its path, and the error of the quantised weights, ‖W − Q(W)‖ / ‖W‖.

    `base` is the quantised format of the base model on which a merged adapter was trained; "" if there is none.
    """

    path: Path
    error: float = 0.0
    base: str = ""


@disable_progress_bars()
def run(source: str, to: str, output: str = "", quantization: str = "f16", *, trust_remote_code: bool = False) -> LeftBehind:
    """Export a model in the format `to`. `source` is a run folder, a model's folder, a hub name or a GGUF file.

    Raises `UserError` if the output exists already, or if the model cannot be written in this format.
    """
    for name, given, known in (("--to", to, KINDS), ("--quantization", quantization, QUANTISATIONS)):
        if given not in known:
            raise UserError(f"{name} is {given!r}; expected one of {', '.join(known)}{nearest(given, known) or '.'}")
    model = model_source.resolve_path(source)
    folder = Path(output or f"{Path(source).name}-{to}").expanduser()
    check_folder(folder, "--output")
    if to == "adapter":
        places = [place for place in (Path(model) / "adapter", Path(model)) if is_adapter(place)]
        if not places:
            raise UserError(f"{source} has no adapter; train one with --lora-rank, and keep it with --lora-save both or adapter.")
        shutil.copytree(places[0], folder, copy_function=shutil.copyfile)  # not the modes: safetensors writes for its owner only
        return LeftBehind(folder)
    base = model_source.quantisation_of(Path(model)).get("quantize_base", "") if is_adapter(model) else ""
    over = f"\nThe adapter is merged into its base model, whose weights are rounded to {base} as in training.\n" if base else ""
    place = Path(model_source.convert_to_folder(model_source.locate(Model(path=model, trust_remote_code=trust_remote_code))))
    if to == "merged" and place.is_dir():
        keep = lambda at, names: [n for n in names if n == "adapter" or n == checkpoint.MANIFEST]  # noqa: E731
        shutil.copytree(place, folder, ignore=keep, copy_function=shutil.copyfile)
        _write_card(model, folder, "transformers", _LOADED.format(folder=folder, auto=auto_class(folder)), over)
        return LeftBehind(folder, base=base)
    from transformers import AutoModelForCausalLM

    if place.is_dir() and needs_vision(str(place)):
        raise UserError(f"{source!r} is a vision-language model, which psigrad cannot write as GGUF; use --to merged.")
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(place, dtype="auto", trust_remote_code=trust_remote_code)
        tokenizer = read_tokenizer(place, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        reason = f"No causal language model could be loaded from {source!r} ({reason_of(error)})"
        raise UserError(f"{reason}; give a run folder, a model folder or a hub name.") from error
    if to == "merged":
        open_towers(network, str(place))
        write(network, tokenizer, folder)
        model_source.write_end_tokens(folder, tokenizer)
        return LeftBehind(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = (
        Path(source).resolve().name if model != source else Path(source).stem if source.endswith(".gguf") else Path(source).name
    )
    file = folder / f"{name}-{quantization.upper()}.gguf"
    lost = write_gguf(network, tokenizer, file, quantization)
    (folder / "Modelfile").write_text(modelfile(tokenizer, file.name), encoding="utf-8")
    said = f"\nThe weights in {file.name} are stored as {quantization}. The rounding error is {lost:.2g} of their norm.\n"
    _write_card(model, folder, "gguf", _SERVED.format(file=file.name), over + said)
    return LeftBehind(file, lost, base)


def _write_card(model: str, folder: Path, library: str, use: str, end: str = "") -> None:
    """Write the model card of `model`, if it has one, adapted to the export: its library, its folder, and how to use it."""
    card = Path(model) / "README.md"
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^library_name: (peft|transformers)$", f"library_name: {library}", text, count=1)
    text = re.sub(r"(?m)^base_model_relation: adapter$", "base_model_relation: finetune", text, count=1)
    text = re.sub(r"(?s)(?<=\n## Use\n\n)```(python)?\n.*?```\n", lambda _: use, text, count=1)
    (folder / card.name).write_text(text + end, encoding="utf-8")


def write_gguf(network: Any, tokenizer: Any, file: Path, quantization: str) -> float:
    """Write the GGUF file of a Llama (SmolLM, Llama 3), Qwen2 or Qwen3 with a byte-pair tokenizer. Return `LeftBehind.error`.

    Matrices have the type `quantization`. Embeddings and head have 8 bits if that type has fewer. Vectors are float32.
    """
    import gguf

    config = network.config
    if config.model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(f"psigrad writes GGUF files only for {known}, and this model is {config.model_type}; {_BY_LLAMA_CPP}.")
    kind = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(file, kind.lower())
    writer.add_file_type(gguf.LlamaFileType[("" if quantization == "f32" else "MOSTLY_") + quantization.upper()].value
                         if quantization != "f32" else gguf.LlamaFileType.ALL_F32.value)  # fmt: skip
    dim = size(config, "head_dim")
    rope = config.rope_parameters
    writer.add_context_length(size(config, "positions"))
    writer.add_embedding_length(size(config, "hidden"))
    writer.add_block_count(size(config, "layers"))
    writer.add_feed_forward_length(size(config, "inner"))
    writer.add_head_count(size(config, "heads"))
    writer.add_head_count_kv(size(config, "key_heads"))
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(size(config, "vocabulary"))
    _add_tokenizer(writer, tokenizer, size(config, "vocabulary"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], size(config, "layers"))
    squares = [0.0, 0.0]
    for name, weight in [*_weights(network, config, kind, names), *_rope_factors(rope, dim)]:
        wide = weight.detach().float().numpy()
        coarse = quantization if quantization[:2] not in ("q4", "q5") or "blk." in name else "q8_0"
        stored = "f32" if wide.ndim == 1 else "f16" if coarse[0] == "q" and wide.shape[-1] % 32 else coarse
        form = gguf.GGMLQuantizationType[stored.upper()]
        data = gguf.quantize(wide, form)
        squares[0] += float(((gguf.dequantize(data, form) - wide) ** 2).sum(dtype="float64"))
        squares[1] += float((wide**2).sum(dtype="float64"))
        writer.add_tensor(name, data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return math.sqrt(squares[0] / squares[1])


def _weights(network: Any, config: Any, kind: str, names: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under llama.cpp's names.

    For a Llama, rotary embeddings of llama.cpp rotate adjacent pairs of dimensions, and those of transformers rotate pairs from
    the two halves. So the rows of each head of q and k are reordered.
    """
    heads = {"q_proj": size(config, "heads"), "k_proj": size(config, "key_heads")} if kind == "LLAMA" else {}
    for name, weight in network.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if named is None:
            raise UserError(f"The weight {name} has no name in a GGUF file of {kind.lower()}; use --to merged.")
        count = next((n for part, n in heads.items() if f".{part}." in name), 0)
        shape = weight.shape
        yield named, weight.reshape(count, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape) if count else weight


def _rope_factors(rope: Any, size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor of Llama 3's RoPE scaling factors, one per frequency. Raises `UserError` for other scalings."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return
    if kind != "llama3":
        raise UserError(f"The model's positions are scaled by {kind}, which psigrad cannot write as GGUF; use --to merged.")
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = ((old / waves - low) / (high - low)).clamp(0, 1)
    yield "rope_freqs.weight", 1 / ((1 - smooth) / rope["factor"] + smooth)


def _add_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """Write tokens, merges, special tokens and the chat template to the GGUF file."""
    import gguf

    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    if whole["model"]["type"] != "BPE" or whole["model"].get("byte_fallback"):
        raise UserError(f"psigrad writes GGUF files only with byte-pair tokenizers; {_BY_LLAMA_CPP}.")
    added = tokenizer.added_tokens_decoder
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    kinds = [gguf.TokenType.CONTROL if i in added and added[i].special else
             gguf.TokenType.USER_DEFINED if i in added else
             gguf.TokenType.NORMAL if i in words else gguf.TokenType.UNUSED for i in range(rows)]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut(whole["pre_tokenizer"]))
    writer.add_token_list([words.get(i, f"[PAD{i}]") for i in range(rows)])
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in whole["model"]["merges"]])
    writer.add_add_bos_token(_adds_bos(tokenizer))
    for add, index in ((writer.add_bos_token_id, tokenizer.bos_token_id), (writer.add_eos_token_id, tokenizer.eos_token_id),
                       (writer.add_pad_token_id, tokenizer.pad_token_id)):  # fmt: skip
        add(tokenizer.eos_token_id if index is None else index)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
        writer.add_eot_token_id(model_source.end_tokens(tokenizer)[-1])


def _adds_bos(tokenizer: Any) -> bool:
    """Return True if the tokenizer starts every text with BOS."""
    return bool(tokenizer("a").input_ids[0] == tokenizer.bos_token_id != tokenizer("a", add_special_tokens=False).input_ids[0])


def _cut(pre_tokenizer: Any) -> str:
    """Return llama.cpp's name for a pre-tokenizer, which splits a text into words. Raises `UserError` for an unknown one."""
    steps = [pre_tokenizer, *(pre_tokenizer or {}).get("pretokenizers", [])]
    kinds = {step["type"]: step for step in steps if step}
    if "Split" in kinds:
        found = _CUTS.get(kinds["Split"]["pattern"].get("Regex", ""), "")
    else:
        found = "smollm" if "Digits" in kinds else "gpt-2" if kinds.get("ByteLevel", {}).get("use_regex") else ""
    if not found or "ByteLevel" not in kinds:
        raise UserError(f"psigrad does not know GGUF's name for the way in which this tokenizer splits words; {_BY_LLAMA_CPP}.")
    return found


def modelfile(tokenizer: Any, file: str) -> str:
    """Return Ollama's Modelfile. Its Go template is derived from the tokenizer's output for a conversation."""
    lines = [f"FROM ./{file}"]
    if tokenizer.chat_template:
        lines += [f'TEMPLATE """{_go_template(tokenizer)}"""']
    stops = [f'PARAMETER stop "{end}"' for end in tokenizer.convert_ids_to_tokens(model_source.end_tokens(tokenizer))]
    return "\n".join([*lines, *stops]) + "\n"


def _go_template(tokenizer: Any) -> str:
    def shown(*turns: tuple[str, str], ask: bool = False) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        text = render(tokenizer, {"tools": None}, messages, generation_prompt=ask)
        return text.removeprefix(tokenizer.bos_token) if _adds_bos(tokenizer) else text

    user, answer, again, system = ("user", "[[U]]"), ("assistant", "[[A]]"), ("user", "[[V]]"), ("system", "[[S]]")
    one, two, three = shown(user), shown(user, answer), shown(user, answer, again)
    after_user = one.partition("[[U]]")[2]
    before_answer = two.partition("[[U]]")[2].partition("[[A]]")[0].removeprefix(after_user)
    after_answer = two.partition("[[A]]")[2]
    before_user = three.partition("[[A]]")[2].partition("[[V]]")[0].removeprefix(after_answer)
    start = one.partition("[[U]]")[0].removesuffix(before_user)
    begin, _, rest = shown(system, user).partition("[[S]]")
    after_system = rest.partition("[[U]]")[0].removesuffix(before_user)
    ask = shown(user, ask=True).removeprefix(one)
    return (
        f"{{{{ if .System }}}}{begin}{{{{ .System }}}}{after_system}{{{{ else }}}}{start}{{{{ end }}}}"
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{before_user}{{{{ .Content }}}}{after_user}'
        f'{{{{ else if eq .Role "assistant" }}}}{before_answer}{{{{ .Content }}}}{after_answer}{{{{ end }}}}{{{{ end }}}}{ask}'
    )
