"""A small Llama of transformers as a GGUF file, as llama.cpp's converter writes it, with nothing quantised."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from torch import Tensor

from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny


def make(folder: Path) -> tuple[Path, Path]:
    """A tiny chat model as a folder, and the same as a GGUF file in another folder."""
    tokenizer = tiny.tokenizer(["What is 2 + 3? 2 + 3 = 5"] * 3, 290, digits_alone=False)
    tokenizer.chat_template = CHATML
    network = tiny.model("llama", len(tokenizer), hidden=32, layers=2, heads=4, seed=3)
    network.save_pretrained(folder / "folder")
    tokenizer.save_pretrained(folder / "folder")
    (folder / "file").mkdir()
    return folder / "folder", write(network, tokenizer, folder / "file" / "tiny.gguf")


def write(model, tokenizer, path: Path) -> Path:
    """Weights, sizes, tokens, merges and the chat template."""
    config, vocabulary = model.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = {tokenizer.convert_tokens_to_ids(word) for word in tokenizer.added_tokens_encoder}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__))
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokenizer))]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)  # as those of SmolLM2 have it; transformers 5.17 reads none without
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = next((count for part, count in heads.items() if part in name), 0)
        named = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(named, (interleaved(weight, found) if found else weight).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbours where transformers rotates halves: the rows of each head in that order."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
