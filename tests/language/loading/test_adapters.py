"""Adapters as models: trained on as adapters, under a new one, or merged; and what a LoRA run leaves behind."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import peft
import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from vision_models import ids_of, make, picture

from psigrad import api
from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.language.data.templates import CHATML
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.model_source import locate
from psigrad.language.models import language_model, scalar_model, sharded, tiny
from psigrad.language.models.coded_linear import CODED_BASE
from psigrad.language.models.lora import Lora, merging_loss, settings_of
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.finish import write_model

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path) -> Path:
    tokenizer = tiny.tokenizer(["say a: b"], 270)
    tiny.model("llama", len(tokenizer), hidden=32, layers=2, heads=2, seed=3, tied=False).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, folder: Path, **settings: object) -> torch.Tensor:
    """An adapter of peft with random weights, saved in `folder`; the logits of the base with it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **settings}))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model.eval()(PROMPT).logits


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model.network(PROMPT).logits


KINDS = [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}]


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_an_adapter_goes_on_as_it_is(base, tmp_path, settings):
    wanted = adapted(base, tmp_path / "adapter", lora_dropout=0.1, **settings)
    model = load_model(Model(path=str(tmp_path / "adapter")), Run(), None)
    assert model.from_adapter and not model.is_own_reference and not model.train_mode
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-5)
    names = model.trainable()
    assert names and all("lora_" in name or "modules_to_save" in name for name in names)
    assert any("modules_to_save" in name for name in names) == ("modules_to_save" in settings)
    with model.without_adapter():
        assert float((logits_of(model) - wanted).abs().max()) > 1e-2, "negative control: the adapter matters"


def test_peft_and_transformers_warn_of_nothing_that_a_user_cannot_mend(base, tmp_path):
    adapted(base, tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        load_model(Model(path=str(tmp_path / "adapter")), Run(), None)
        load_model(Model(path=str(base), lora_rank=2), Run(), None)
        load_model(Model(path=str(tmp_path / "adapter"), adapter="merge"), Run(), None)


def test_a_log_holds_no_bars_of_what_is_converted(base, tmp_path, capsys):
    adapted(base, tmp_path / "adapter")
    capsys.readouterr()
    assert Path(locate(Model(path=str(tmp_path / "adapter"), adapter="merge")), "model.safetensors").is_file()
    assert capsys.readouterr().err == ""


def test_a_rank_puts_a_new_adapter_on_top_and_merge_trains_all(base, tmp_path):
    wanted = adapted(base, tmp_path / "adapter")
    for settings, own in (
        (Model(path=str(tmp_path / "adapter"), lora_rank=3), True),
        (Model(path=str(tmp_path / "adapter"), adapter="merge"), False),
    ):
        model = load_model(settings, Run(), None)
        torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-5)
        assert model.is_own_reference == own and not model.from_adapter


def dataset(tmp_path: Path, form: str = "sft") -> str:
    rows = [{"prompt": f"say {c}:", "completion": f" {c}", "chosen": f" {c}", "rejected": " x"} for c in "abcdefgh"]
    keys = ("prompt", "completion") if form == "sft" else ("prompt", "chosen", "rejected")
    file = tmp_path / f"{form}.jsonl"
    file.write_text("".join(json.dumps({k: row[k] for k in keys}) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(("family", "quantised"), [("idefics3", ""), ("gemma3", ""), ("qwen3_5", ""), ("qwen3_5", "nf4")])
def test_an_adapter_of_a_model_that_reads_images_is_merged_and_trained_on_with_its_tower(family, quantised, tmp_path):
    folder, text = make(family, tmp_path / "eyes", hidden=32), f"how\ufffc{picture(1).digest}\ufffcmany"
    settings = Model(path=str(folder), lora_rank=2, vision=True, quantize_base=quantised)
    model = load_model(settings, Run(), None)
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    logp = lambda one: one.evaluate(Groups([ids_of(one.tokenizer, text)], [[[5, 6]]])).logp.detach()  # noqa: E731
    write_model(model, tmp_path / "adapter", "adapter")
    assert (tmp_path / "adapter" / CODED_BASE).exists() == bool(quantised)
    wanted = logp(model)
    again = load_model(Model(path=str(tmp_path / "adapter"), quantize_base=quantised), Run(), None)
    merged = locate(Model(path=str(tmp_path / "adapter"), adapter="merge"))
    assert type(AutoModelForImageTextToText.from_pretrained(merged)) is type(model.network)
    for other in (again, language_model.load(merged, vision=True)):
        assert torch.allclose(logp(other), wanted, atol=1e-5)
    assert float((logp(language_model.load(str(folder), vision=True)) - wanted).abs().max()) > 1e-2, "negative control"


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    adapted(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.7"): x for name, x in load_file(file).items()}, file)
    for adapter in ("continue", "merge"):
        with pytest.raises(UserError, match=r"it has no weight \S+layers\.1\S+, so it was trained on another model"):
            load_model(Model(path=str(tmp_path / "adapter"), adapter=adapter), Run(), None)


def trained(model: Path, tmp_path: Path, name: str, method: str = "sft", **settings: object):
    given = {"learning_rate": 1e-2, "max_steps": 4, "batch_size": 4, "eval_prompts": 2, "progress": False, "report": False}
    data = dataset(tmp_path, "sft" if method == "sft" else "preference")
    return api.train(method, model=model, dataset=data, output_dir=str(tmp_path / name), **{**given, **settings})


def test_a_run_goes_on_from_an_adapter_and_leaves_one_that_peft_opens(base, tmp_path):
    adapted(base, tmp_path / "adapter")
    result = trained(tmp_path / "adapter", tmp_path, "run", lora_save="both")
    opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), result.model / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(result.model)
    with torch.no_grad():
        torch.testing.assert_close(opened(PROMPT).logits, whole(PROMPT).logits, rtol=1e-4, atol=1e-5)
    before, after = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "adapter", result.model / "adapter"))
    assert before.keys() == after.keys() and any(not torch.equal(before[k], after[k]) for k in before)
    again = load_model(Model(path=str(result.model / "adapter")), Run(), None)
    assert again.from_adapter, "what psigrad wrote goes on as well"


def test_an_adapter_out_of_shards_is_written_as_peft_writes_it(base, tmp_path):
    model = load_model(Model(path=str(base), lora_rank=2), Run(), None)
    state = {name: p.detach().clone() for name, p in model.network.named_parameters()}
    sharded.write_adapter(model, state, tmp_path / "ours")
    model.save(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and theirs and all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize("kept", ["merged", "adapter"])
def test_what_model_holds_is_the_users_choice(base, tmp_path, kept):
    result = trained(base, tmp_path, "run", lora_rank=2, lora_save=kept, use_dora=True, lora_modules_to_save=["lm_head"])
    assert (result.model / "config.json").exists() == (kept == "merged")
    assert (result.model / "adapter_config.json").exists() == (kept == "adapter") and not (result.model / "adapter").exists()
    AutoModelForCausalLM.from_pretrained(result.model)


def test_a_continued_adapter_resumes_bitwise(base, tmp_path):
    adapted(base, tmp_path / "adapter")
    whole = trained(tmp_path / "adapter", tmp_path, "whole", max_steps=4)
    trained(tmp_path / "adapter", tmp_path, "parts", max_steps=2, save_steps=2, lr_scheduler_type="constant")
    straight = trained(tmp_path / "adapter", tmp_path, "straight", max_steps=4, save_steps=2, lr_scheduler_type="constant")
    parts = trained(tmp_path / "adapter", tmp_path, "parts", max_steps=4, save_steps=2, lr_scheduler_type="constant", extend=True)
    held = [load_file(r.model / "adapter_model.safetensors") for r in (straight, parts, whole)]
    assert all(torch.equal(held[0][k], held[1][k]) for k in held[0])
    assert any(not torch.equal(held[0][k], held[2][k]) for k in held[0]), "negative control: another schedule"


def test_dpo_holds_to_the_adapter_that_it_started_from(base, tmp_path):
    """Its first loss is log 2: the reference is the base with the adapter, not the base alone."""
    adapted(base, tmp_path / "adapter")
    result = trained(tmp_path / "adapter", tmp_path, "run", "dpo", learning_rate=0.0, max_steps=1, cache_reference=False)
    loss = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[1])["loss"]
    assert loss == pytest.approx(0.693147, abs=1e-4)


def test_grpo_holds_to_the_adapter_that_it_started_from(base, tmp_path):
    adapted(base, tmp_path / "adapter")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "say a:", "answer": "b"}\n' * 4)
    result = api.train(
        "grpo",
        model=tmp_path / "adapter",
        dataset=str(data),
        reward="exact",
        output_dir=str(tmp_path / "run"),
        progress=False,
        report=False,
        max_completion_length=4,
        prompts_per_step=2,
        num_generations=2,
        max_steps=1,
        eval_prompts=0,
    )
    assert json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[-1])["kl"] == pytest.approx(0.0, abs=1e-6)


def test_other_adapters_and_lost_bases_are_sentences(base, tmp_path, monkeypatch):
    adapted(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match=r"There is no folder .*gone' \(the base of the adapter"):
        load_model(Model(path=str(tmp_path / "adapter")), Run(), None)
    with pytest.raises(UserError, match=r"There is no folder .*gone' \(the base of the adapter"):
        load_model(Model(path=str(tmp_path / "adapter"), adapter="merge"), Run(), None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file.write_text(json.dumps({**held, "base_model_name_or_path": str(tmp_path / "psigrad" / "models" / "gone")}))
    with pytest.raises(UserError, match="run any command on the original GGUF file or adapter"):
        load_model(Model(path=str(tmp_path / "adapter"), adapter="merge"), Run(), None)
    file.write_text(json.dumps({**held, "peft_type": "IA3"}))
    with pytest.raises(UserError, match=r"has the type IA3, but psigrad trains only LORA"):
        load_model(Model(path=str(tmp_path / "adapter")), Run(), None)


@pytest.mark.parametrize("adapter", ["continue", "merge"])
def test_an_adapter_on_the_head_of_a_tied_base_is_refused(adapter, tmp_path):
    tokenizer = tiny.tokenizer(["say a: b"], 270)
    tiny.model("llama", len(tokenizer), hidden=32, layers=1, heads=2).save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's own, which a log buries
        adapted(tmp_path / "tied", tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
        with pytest.raises(UserError, match="one matrix in this model"):
            load_model(Model(path=str(tmp_path / "adapter"), adapter=adapter), Run(), None)


def test_others_end_a_merged_models_turns_where_its_template_does(base, tmp_path):
    """The base ends a text with <|endoftext|>, 0; the adapter was trained on turns that end with <|im_end|>, 3."""
    adapted(base, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHATML.replace("eos_token", "'<|im_end|>'")
    tokenizer.save_pretrained(tmp_path / "adapter")
    merged = locate(Model(path=str(tmp_path / "adapter"), adapter="merge"))
    assert AutoModelForCausalLM.from_pretrained(base).generation_config.eos_token_id == 0
    assert AutoModelForCausalLM.from_pretrained(merged).generation_config.eos_token_id == [0, 3]


def test_a_process_other_than_the_first_writes_weights_too(base, tmp_path):
    adapted(base, tmp_path / "adapter")
    ranks.run(2, "rank_runs", "converted", tmp_path / "adapter", tmp_path / "files.json")
    assert "model.safetensors" in json.loads((tmp_path / "files.json").read_text())


def test_a_peft_config_becomes_settings():
    config = peft.LoraConfig(
        r=8, lora_alpha=32, target_modules=["v_proj", "q_proj"], use_rslora=True, modules_to_save=["lm_head"]
    )
    found = settings_of(config)
    assert found["lora_rank"] == 8 and found["lora_alpha"] == 32.0 and found["use_rslora"] and not found["use_dora"]
    assert found["lora_target_modules"] == ("q_proj", "v_proj") and found["lora_modules_to_save"] == ("lm_head",)
    assert Lora.of(config.to_dict()).rslora
    with pytest.raises(UserError, match="peft_config has layers_to_transform="):
        settings_of(peft.LoraConfig(layers_to_transform=[1], target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"expected a peft.LoraConfig"):
        settings_of({"r": 8})
    assert language_model.Lora is Lora


@pytest.mark.parametrize(
    "named", ["all-linear", r".*layers\.0\..*\.[qv]_proj", r"model\.layers\.1\.mlp\.(up|down)_proj", ["q_proj"], "q_proj"]
)
def test_target_modules_have_pefts_meaning(named, base):
    """A string is a regular expression over whole names; `q_proj` matches none, a list of it the last part of some."""

    def adapted_by(wrapped):
        return sorted(name.removeprefix("base_model.model.") for name, m in wrapped.named_modules() if hasattr(m, "lora_A"))

    config = peft.LoraConfig(r=2, target_modules=named, task_type="CAUSAL_LM")
    settings = settings_of(config)
    lora = Lora(2, target_modules=settings["lora_target_modules"])
    if named == "q_proj":
        with pytest.raises(ValueError, match="not found"):
            peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        with pytest.raises(UserError, match="No LoRA adapter could be put on"):
            language_model.load(str(base), lora=lora)
        return
    theirs = adapted_by(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    assert theirs and adapted_by(language_model.load(str(base), lora=lora).adapter) == theirs


@pytest.mark.parametrize(
    ("targets", "said"), [((r".*\.q_proj", "v_proj"), "give only the expression"), (("(q_proj",), "not a regular expression")]
)
def test_a_regular_expression_of_targets_is_sound_and_alone(targets, said, base):
    with pytest.raises(UserError, match=said):
        language_model.load(str(base), lora=Lora(2, target_modules=targets))


@pytest.mark.parametrize(
    ("dtype", "update", "lost"),
    [("bfloat16", 0.001, 1.0), ("bfloat16", 2**-7, 0.0), ("bfloat16", 0.011, 0.29), ("float32", 0.001, 0.0)],
)
def test_merging_says_what_half_precision_rounds_away(dtype, update, lost, base, tmp_path, capsys):
    """Above 1 bfloat16 counts in steps of 2⁻⁷ = 0.0078: 1.001 becomes 1, and 1.011 becomes 1.0078: 0.0032 / 0.011 is lost."""
    whole = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for layer in whole.model.layers:
            layer.self_attn.q_proj.weight.fill_(1.0)
    whole.to(getattr(torch, dtype)).save_pretrained(base)
    model = language_model.load(str(base), dtype=dtype, lora=Lora(1, alpha=1.0, target_modules=("q_proj",)))
    with torch.no_grad():
        for name, weight in model.adapter.named_parameters():
            if "lora_" in name:
                weight.fill_(update if "lora_B" in name else 1.0)
    assert merging_loss(model.adapter) == pytest.approx(lost, abs=2e-3)
    model.save_merged(tmp_path / "merged")
    said = capsys.readouterr().err
    assert (f"Merging rounds away {lost:.0%} of the adapter's update" in said) == (lost > 0) == ("Merging" in said)
    adapter = tmp_path / "adapter"
    model.save(adapter)
    locate(Model(path=str(adapter), adapter="merge"))
    assert ("Merging rounds away" in capsys.readouterr().err) == (lost > 0)


@pytest.mark.parametrize("load", [language_model.load, scalar_model.load], ids=["language", "scalar"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(value, load, base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, :3] = value
    model.save_pretrained(base)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is NaN or infinite in 3 of \d+ elements"):
        load(str(base))
    with pytest.raises(UserError, match=r"up_proj.*weight is NaN or infinite in 3 of"):
        load(str(base), lora=Lora(2))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, :3] = 0.0
    model.save_pretrained(base)
    adapted(base, tmp_path / "adapter")
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = next(name for name in held if "lora_B" in name)
    held[name][0, 0] = value
    save_file(held, tmp_path / "adapter" / "adapter_model.safetensors")
    if load is language_model.load:
        with pytest.raises(UserError, match=r"lora_B.*weight is NaN or infinite in 1 of \d+ elements"):
            load(str(base), lora=Lora(2, target_modules=("q_proj", "down_proj")), adapter=tmp_path / "adapter")
