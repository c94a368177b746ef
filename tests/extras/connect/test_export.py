"""Export: the GGUF file is the model again, cuts of the tokenizer, Ollama's template, merged models and adapters."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
import vision_models
from safetensors.torch import load_file
from tiny_jobs import sft_config
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from psigrad import cli
from psigrad.errors import UserError
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models import tiny
from psigrad.language.recipes import sft
from psigrad_extras.connect import exporting as export

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny.tokenizer(["say a: b", "What is 3 + 4? It is 7."], 290)
    made.chat_template = CHATML
    return made


def saved(kind: str, tokenizer, folder: Path) -> Path:
    torch.manual_seed(1)
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 16}  # fmt: skip
    common = {**SIZES, "vocab_size": len(tokenizer) + 3, "eos_token_id": tokenizer.eos_token_id}
    network = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True)),
        "llama3": lambda: LlamaForCausalLM(LlamaConfig(**common, rope_parameters=scaled)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**common)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common, head_dim=128)),  # transformers reads no other from GGUF
    }[kind]()
    for name, weight in network.named_parameters():  # biases and norms that are not 0 and 1
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_file_is_the_model_again(kind, tokenizer, tmp_path):
    source = saved(kind, tokenizer, tmp_path / "model")
    made = export.run(str(source), "gguf", str(tmp_path / "out"), "f32")
    assert made.error == 0.0 and made.path.name == "model-F32.gguf"
    again = convert_to_folder(str(made.path))
    ours, theirs = (AutoModelForCausalLM.from_pretrained(place) for place in (source, again))
    ids = torch.tensor([[3, 9, 27, 81, 4, 5]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, atol=1e-4, rtol=1e-4)
    text = "What is 3 + 4? say b:"
    words = AutoTokenizer.from_pretrained(again)
    assert words(text).input_ids == tokenizer(text).input_ids and words.chat_template == CHATML


def test_what_a_quantisation_loses_is_measured(tokenizer, tmp_path):
    source = saved("qwen3", tokenizer, tmp_path / "model")
    errors = {q: export.run(str(source), "gguf", str(tmp_path / q), q).error for q in ("f16", "q8_0", "q4_0")}
    assert 0 < errors["f16"] < 1e-3 < errors["q8_0"] < 1e-2 < errors["q4_0"] < 0.1
    reader = gguf.GGUFReader(tmp_path / "q4_0" / "model-Q4_0.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == "Q4_0" and kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def test_llama_3s_rotations_by_hand(tokenizer, tmp_path):
    source = saved("llama3", tokenizer, tmp_path / "model")
    made = export.run(str(source), "gguf", str(tmp_path / "out"), "f32")
    (factors,) = [t.data for t in gguf.GGUFReader(made.path).tensors if t.name == "rope_freqs.weight"]
    # waves 2π·500^(i/4), of 16 positions: the first, 6.28, is between 4 and 16: s = (16/6.28 − 1)/3 = 0.515; the others are slow
    assert factors.tolist() == pytest.approx([1 / ((1 - 0.51549) / 4 + 0.51549), 4.0, 4.0, 4.0], rel=1e-4)


def test_ollamas_template_says_what_the_tokenizers_says(tokenizer):
    text = export.modelfile(tokenizer, "m.gguf")
    assert text.startswith("FROM ./m.gguf\n") and f'PARAMETER stop "{tokenizer.eos_token}"' in text
    go = text.partition('"""')[2].partition('"""')[0]
    with_system, _, rest = go.removeprefix("{{ if .System }}").partition("{{ else }}")
    without, _, rest = rest.partition("{{ end }}")
    turns, _, ask = rest.removeprefix("{{ range .Messages }}").partition("{{ end }}{{ end }}")
    user, _, assistant = turns.partition('{{ else if eq .Role "assistant" }}')
    forms = {"user": user.removeprefix('{{ if eq .Role "user" }}'), "assistant": assistant}
    for system in ("", "Be short."):
        talk = [("user", "Hi"), ("assistant", "Ho"), ("user", "And?")]
        shown = with_system.replace("{{ .System }}", system) if system else without
        shown += "".join(forms[role].replace("{{ .Content }}", said) for role, said in talk) + ask
        messages = [{"role": role, "content": said} for role, said in ([("system", system)] if system else []) + talk]
        assert shown == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_others_end_turns_where_the_template_does(tokenizer, tmp_path):
    """Turns end with <|im_end|>, 3, and texts with <|endoftext|>, 0: without a word of the former a model would talk on."""
    stops = [line for line in export.modelfile(tokenizer, "m.gguf").splitlines() if line.startswith("PARAMETER")]
    assert stops == ['PARAMETER stop "<|endoftext|>"', 'PARAMETER stop "<|im_end|>"']
    made = export.run(str(saved("llama", tokenizer, tmp_path / "model")), "gguf", str(tmp_path / "out"), "f16")
    fields = gguf.GGUFReader(made.path).fields
    assert [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot")] == [0, 3]


def test_cuts_of_the_families_and_of_none_that_is_known():
    byte = {"type": "ByteLevel", "use_regex": False}
    split = lambda text: {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": text}}, byte]}  # noqa: E731
    qwen = next(text for text, name in export._CUTS.items() if name == "qwen2")
    assert export._cut(split(qwen)) == "qwen2" and export._cut(split(qwen.replace(r"\p{N}|", r"\p{N}{1,3}|"))) == "llama-bpe"
    assert export._cut({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {**byte, "use_regex": True}]}) == "smollm"
    assert export._cut({**byte, "use_regex": True}) == "gpt-2"
    for other in (split(r"\w+"), byte, None):
        with pytest.raises(UserError, match="does not know GGUF's name"):
            export._cut(other)


@pytest.fixture(scope="module")
def adapted(job, tmp_path_factory):
    config = sft_config(job, tmp_path_factory.mktemp("export") / "run", max_steps=2)
    return sft.run(replace(config, model=replace(config.model, lora_rank=2, lora_save="both"))).folder


def test_a_runs_adapter_its_merged_model_and_its_card(adapted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(adapted), "--to", "adapter"]) == 0
    assert json.loads(Path("run-adapter/adapter_config.json").read_text())["r"] == 2
    assert cli.main(["merge", str(adapted)]) == 0
    merged = load_file("run-merged/model.safetensors")
    assert merged.keys() == load_file(adapted / "model" / "model.safetensors").keys() and not Path("run-merged/adapter").exists()
    # the adapter alone, merged, is the same model
    assert cli.main(["export", "run-adapter", "--to", "merged", "--output", "again"]) == 0
    again = load_file("again/model.safetensors")
    assert all(torch.allclose(again[name], merged[name], atol=1e-6) for name in merged)
    assert cli.main(["export", str(adapted), "--to", "gguf", "--output", "g", "--quantization", "q8_0"]) == 0
    said = capsys.readouterr()
    assert "ollama create" in said.out and "The weights in run-Q8_0.gguf are stored as q8_0" in Path("g/README.md").read_text()
    assert not said.err, "no bars of transformers"


CARD = """---
library_name: peft
base_model_relation: adapter
---

## Use

```python
model = AutoModelForCausalLM.from_pretrained("runs/crumb/model")
```

## Training
"""


def test_the_card_of_what_an_adapter_became_says_how_that_is_used(adapted, tmp_path):
    """And whoever may read other files may read the weights."""
    source = tmp_path / "adapter"
    export.run(str(adapted), "adapter", str(source))
    (source / "README.md").write_text(CARD)
    for to, library, use in (
        ("merged", "transformers", f'from_pretrained("{tmp_path / "merged"}")'),
        ("gguf", "gguf", "llama-server -m adapter-F16.gguf --jinja"),
    ):
        export.run(str(source), to, str(tmp_path / to))
        card = (tmp_path / to / "README.md").read_text()
        assert f"library_name: {library}\nbase_model_relation: finetune\n" in card and use in card and "## Training" in card
        assert "peft" not in card and "runs/crumb" not in card
    umask = os.umask(0)
    os.umask(umask)
    for file in [*source.iterdir(), *(tmp_path / "merged").iterdir()]:
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask, file


def test_what_cannot_be_exported_is_a_sentence(job, adapted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/x").touch()
    vision_models.make("idefics3", tmp_path / "eyes")
    for words, said in (
        (["export", str(job / "base"), "--to", "adapter"], "has no adapter"),
        (["export", str(job / "base"), "--to", "ggml"], "expected one of gguf, merged"),
        (["export", str(job / "base"), "--to", "gguf", "--quantization", "q4_k"], "expected one of f32, f16"),
        (["export", str(job / "base"), "--to", "gguf", "--output", "full"], "holds files that this command did not write"),
        (["export"], "export got nothing; the usage is psigrad export RUN_OR_MODEL --to FORMAT [flags]."),
        (["export", "eyes", "--to", "gguf"], "is a vision-language model, which psigrad cannot write as GGUF"),
        (["export", "nobody/nothing", "--to", "gguf"], "No causal language model could be loaded from 'nobody/nothing'"),
        (["merge", str(adapted), "--to", "gguf"], "There is no flag --to; `psigrad merge --help-all` lists all flags"),
    ):
        assert cli.main(words) == 2
        assert said in capsys.readouterr().err
