"""Models, tokenizers, datasets and adapters given from Python as objects."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import datasets
import pandas
import peft
import pytest
import torch
from resuming import digest, dying_at
from safetensors.torch import load_file
from tiny_jobs import forked
from tiny_rewards import early_letters
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import psigrad
from psigrad.errors import UserError
from psigrad.language.data.templates import CHATML
from psigrad.language.loading.model_object import digest_weights, weights_digest
from psigrad.language.loading.model_source import load_tokenizer
from psigrad.language.rewards import Scored, Unscored

pytestmark = pytest.mark.usefixtures("rewards_here")

SHORT = {
    "max_steps": 4,
    "save_steps": 2,
    "threads": 1,
    "progress": False,
    "report": False,
    "learning_rate": 1e-2,
    "max_completion_length": 4,
    "eval_prompts": 4,
    "micro_batch_tokens": 48,
}
ONLINE = {**SHORT, "prompts_per_step": 2, "num_generations": 4}
PATHS = {"sft": "train.jsonl", "grpo": "train.jsonl", "dpo": "pairs.jsonl", "reward": "pairs.jsonl"}


@pytest.fixture
def objects(job):
    return AutoModelForCausalLM.from_pretrained(job / "base"), AutoTokenizer.from_pretrained(job / "base")


def rows(job: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (job / name).read_text().splitlines()]


def settings(method: str) -> dict:
    online = {**ONLINE, "reward": early_letters} if method == "grpo" else SHORT
    leaves = {name: value for name, value in online.items() if method != "reward" or name != "max_completion_length"}
    return leaves | ({"cache_reference": False} if method == "dpo" else {})


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m in ("grpo", "reward") else pytest.mark.slow) for m in PATHS])
def test_an_object_trains_as_its_folder_does_and_holds_the_trained_weights(method, job, tmp_path):
    """To the last bit, though one is read by us and the other by transformers."""
    kind = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    torch.manual_seed(0)
    more = {"num_labels": 1} if method == "reward" else {}
    model, tokenizer = kind.from_pretrained(job / "base", **more), AutoTokenizer.from_pretrained(job / "base")
    base = tmp_path / "base"
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    before = weights_digest(model)
    named = psigrad.train(method, model=base, dataset=job / PATHS[method], output_dir=tmp_path / "named", **settings(method))
    dataset = datasets.Dataset.from_list(rows(job, PATHS[method]))
    made = psigrad.train(
        method, model=model, tokenizer=tokenizer, dataset=dataset, output_dir=tmp_path / "given", **settings(method)
    )
    assert digest(named.folder) == digest(made.folder)
    trained = kind.from_pretrained(made.model)
    assert weights_digest(model) == weights_digest(trained) != before
    assert weights_digest(kind.from_pretrained(made.folder / "start")) == before


def test_the_module_computes_and_generates_as_before(objects, job, tmp_path):
    model, tokenizer = objects
    model.train()
    implementation, padding = model.config._attn_implementation, model.config.pad_token_id
    made = psigrad.train("sft", model=model, tokenizer=tokenizer, dataset=job / "train.jsonl", output_dir=tmp_path / "r", **SHORT)
    assert model.config._attn_implementation == implementation and model.config.pad_token_id == padding and model.training
    ids = torch.tensor([tokenizer("say a:").input_ids])
    loaded = AutoModelForCausalLM.from_pretrained(made.model)
    assert torch.equal(model.eval()(ids).logits, loaded(ids).logits)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]


def test_the_tokenizer_is_found_where_the_model_came_from(objects, job, tmp_path):
    model, tokenizer = objects
    made = psigrad.train("sft", model=model, dataset=job / "train.jsonl", output_dir=tmp_path / "r", **SHORT)
    assert AutoTokenizer.from_pretrained(made.model).get_vocab() == tokenizer.get_vocab()
    model.config._name_or_path = ""
    with pytest.raises(UserError, match="its tokenizer is unknown; give tokenizer="):
        psigrad.train("sft", model=model, dataset=job / "train.jsonl", output_dir=tmp_path / "s", **SHORT)


def test_a_tokenizer_may_be_an_object_where_the_model_is_a_name(objects, job, tmp_path):
    _, tokenizer = objects
    tokenizer.chat_template = CHATML
    made = psigrad.train(
        "sft", model=job / "base", tokenizer=tokenizer, dataset=job / "train.jsonl", output_dir=tmp_path / "r", **SHORT
    )
    assert AutoTokenizer.from_pretrained(made.model).chat_template == tokenizer.chat_template


def test_peft_config_is_the_lora_settings_and_ends_merged_in_the_module(objects, job, tmp_path):
    model, tokenizer = objects
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    online = {**ONLINE, "dataset": job / "train.jsonl", "reward": early_letters, "lora_save": "both"}
    made = psigrad.train("grpo", model=model, tokenizer=tokenizer, peft_config=config, output_dir=tmp_path / "a", **online)
    named = psigrad.train("grpo", model=job / "base", lora_rank=4, lora_alpha=8, output_dir=tmp_path / "b", **online)
    assert digest(made.folder) == digest(named.folder)
    assert weights_digest(model) == weights_digest(AutoModelForCausalLM.from_pretrained(made.model))
    assert all(p.requires_grad for p in model.parameters()) and (made.model / "adapter" / "adapter_config.json").exists()
    with pytest.raises(UserError, match="peft_config and lora_rank are both given"):
        psigrad.train("grpo", model=model, peft_config=config, lora_rank=2, **online)


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_the_best_adapter_of_an_object_is_left_behind_and_ends_merged_in_the_module(method, job, tmp_path):
    """The loss of step 2 is called the better one, and the run ends at step 4."""
    kind = AutoModelForSequenceClassification if method == "reward" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_pretrained(job / "base", **({"num_labels": 1} if method == "reward" else {}))
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_steps": 2, "greater_is_better": True}
    given = {**settings(method), **best, "lora_rank": 2, "lora_save": "both"}
    tokenizer = AutoTokenizer.from_pretrained(job / "base")
    made = psigrad.train(
        method, model=model, tokenizer=tokenizer, dataset=job / PATHS[method], output_dir=tmp_path / "run", **given
    )
    places = [made.folder / "checkpoints" / f"step-{step:08d}" for step in (2, 4)] + [made.model / "adapter"]
    second, last, left = (load_file(place / "adapter_model.safetensors") for place in places)
    assert second.keys() == left.keys() and all(torch.equal(second[name], left[name]) for name in left)
    assert not all(torch.equal(last[name], left[name]) for name in left) and made.after["step"] == 2
    assert weights_digest(model) == weights_digest(kind.from_pretrained(made.model))


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_run_with_an_object_resumes_bitwise(adapter, job, tmp_path):
    def train(folder: Path):
        model = AutoModelForCausalLM.from_pretrained(job / "base")
        config = peft.LoraConfig(r=4, target_modules="all-linear") if adapter else None
        online = {
            **ONLINE,
            "dataset": job / "train.jsonl",
            "reward": early_letters,
            "peft_config": config,
            "eval_kl": True,
            "lora_save": "both",
        }
        result = psigrad.train("grpo", model=model, output_dir=folder, **online)
        assert weights_digest(model) == weights_digest(AutoModelForCausalLM.from_pretrained(result.model))

    def doomed():
        dying_at(40)
        train(tmp_path / "parts")

    assert forked(lambda: train(tmp_path / "whole")) == 0
    assert os.WTERMSIG(forked(doomed)) == signal.SIGKILL
    assert (tmp_path / "parts" / "start").is_dir() and not (tmp_path / "parts" / "model").exists()
    assert forked(lambda: train(tmp_path / "parts")) == 0
    assert digest(tmp_path / "whole") == digest(tmp_path / "parts")


@pytest.mark.parametrize("adapter", [False, True])
def test_a_finished_run_gives_its_weights_to_the_module(adapter, objects, job, tmp_path):
    config = {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear"), "lora_save": "adapter"} if adapter else {}
    given = {**SHORT, **config, "dataset": job / "train.jsonl", "output_dir": tmp_path / "run"}
    psigrad.train("sft", model=objects[0], **given)
    again = AutoModelForCausalLM.from_pretrained(job / "base")
    psigrad.train("sft", model=again, **given)
    assert weights_digest(again) == weights_digest(objects[0])


def test_the_cell_of_a_notebook_may_run_twice_and_another_model_is_refused(objects, job, tmp_path):
    """The module holds trained weights by then, and the run goes on all the same; a module of other weights is another model."""
    model, tokenizer = objects
    given = {**SHORT, "tokenizer": tokenizer, "dataset": job / "train.jsonl", "output_dir": tmp_path / "run"}
    psigrad.train("sft", model=model, **given)
    shutil.rmtree(tmp_path / "run" / "model")
    psigrad.train("sft", model=model, **given)
    assert weights_digest(model) == weights_digest(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"))
    shutil.rmtree(tmp_path / "run" / "model")
    other = AutoModelForCausalLM.from_pretrained(job / "base")
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    with pytest.raises(UserError, match="started from another model"):
        psigrad.train("sft", model=other, **given)
    psigrad.train("sft", model=other, allow=["model"], **given)


def test_datasets_frames_and_splits(objects, job, tmp_path):
    train, held = rows(job, "train.jsonl"), rows(job, "held_out.jsonl")
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(train), test=datasets.Dataset.from_list(held))
    short = {**SHORT, "model": job / "base", "max_steps": 1}
    named = psigrad.train(
        "sft", dataset=job / "train.jsonl", eval_dataset=job / "held_out.jsonl", output_dir=tmp_path / "0", **short
    )
    for i, (dataset, eval_dataset) in enumerate(
        [(both, both), (pandas.DataFrame(train), pandas.DataFrame(held)), (iter(train), iter(held))], 1
    ):
        made = psigrad.train("sft", dataset=dataset, eval_dataset=eval_dataset, output_dir=tmp_path / str(i), **short)
        assert digest(made.folder) == digest(named.folder)
    for setting in ("split", "eval_split"):
        with pytest.raises(UserError, match=rf"has the splits train, test but not 'validation'; set {setting} to one of them\.$"):
            psigrad.train("sft", dataset=both, eval_dataset=both, **{setting: "validation"}, **short)
        with pytest.raises(UserError, match=rf"^{setting} is 'validation', but the given rows have no splits"):
            frame = pandas.DataFrame(train)
            psigrad.train("sft", dataset=frame, eval_dataset=frame, **{setting: "validation"}, **short)


def test_frames_have_gaps_and_lists_as_json_has_them(tmp_path):
    """pandas has NaN, NaT and NA in place of what is missing, and arrays where a Parquet file has lists."""

    def tests_and_gaps(completions, tests, level, day, count, **columns):
        kinds = [isinstance(found, list) and all(isinstance(one, str) for one in found) for found in tests]
        return [float(kind) + 2 * (a is b is c is None) for kind, a, b, c in zip(kinds, level, day, count, strict=True)]

    ask, say = [{"role": "user", "content": "4?"}], [{"role": "assistant", "content": "4"}]
    whole = {"answer": "4", "tests": ["f(1)", "f(2)"], "level": 1.5, "day": pandas.Timestamp("2024-02-29"), "count": 3}
    gaps = {"answer": None, "tests": ["f(1)"], "level": None, "day": None, "count": None}
    frame = pandas.DataFrame([{"prompt": ask, "completion": say, **whole}, {"prompt": ask, "completion": say, **gaps}])
    frame.astype({"count": "Int64"}).to_parquet(tmp_path / "rows.parquet")
    read = pandas.read_parquet(tmp_path / "rows.parquet")
    assert type(read["prompt"][0]).__name__ == "ndarray" and read["count"][1] is pandas.NA and pandas.isna(read["level"][1])
    found = psigrad.score(dataset=read, reward=[tests_and_gaps])
    assert [one.result.value for one in found] == [1.0, 3.0]
    plain = pandas.DataFrame({"prompt": ["4?"] * 2, "completion": ["4"] * 2, "answer": ["4", float("nan")]})
    exact = psigrad.score(dataset=plain, reward="exact")
    assert [type(one.result) for one in exact] == [Scored, Unscored]


def test_a_digest_takes_numbers_that_stand_alone():
    """1.0 in float32 is 3f800000, the lowest byte first; it has no dimensions."""
    digest = hashlib.sha256()
    digest_weights(digest, [("b", torch.tensor(1.0)), ("a", torch.tensor([2], dtype=torch.uint8))])
    assert digest.hexdigest() == hashlib.sha256(b"atorch.uint8[1]\x02btorch.float32[]\x00\x00\x80\x3f").hexdigest()


def test_the_names_of_trls_trainers_are_taken(objects, job, tmp_path):
    model, tokenizer = objects
    named = {"train_dataset": rows(job, "train.jsonl"), "processing_class": tokenizer, "reward_funcs": [early_letters]}
    given = {**ONLINE, "max_steps": 1, "save_steps": 0, "report_to": "none", "output_dir": tmp_path / "run"}
    assert psigrad.train("grpo", model=model, **named, **given).history[-1]["step"] == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "a"}, "No dataset was given; pass dataset= to psigrad.train"),
        ({"dataset": "a"}, "No model was given; pass model= to psigrad.train"),
        (
            {"dataset": "a", "train_dataset": [], "model": "m"},
            r"dataset is 'a' and train_dataset is \[\], and both are",
        ),
        ({"model": "m", "dataset": "a", "tokenizer": "t", "processing_class": "t"}, "are two names for the same argument"),
        ({"model": "m", "dataset": "a", "reward": 3}, "The reward is 3; expected a name, a function, or a list"),
        (
            {"model": "m", "dataset": "a", "args": object()},
            "args is an? object; expected one of TRL's GRPOConfig",
        ),
    ],
)
def test_what_is_missing_or_given_twice_is_one_sentence(given, said):
    with pytest.raises(UserError, match=said):
        psigrad.train("grpo", **given)


def test_what_cannot_be_trained_in_place_is_refused_in_a_sentence(objects, job, tmp_path):
    model, _ = objects
    data = {"dataset": job / "train.jsonl", **SHORT}
    with pytest.raises(UserError, match="model is a Linear; expected a folder, a hub name, or a model of transformers"):
        psigrad.train("sft", model=torch.nn.Linear(2, 2), **data)
    with pytest.raises(UserError, match="tokenizer is an int; expected a tokenizer"):
        psigrad.train("sft", model=model, tokenizer=3, **data)
    with pytest.raises(UserError, match=r"No tokenizer could be loaded from '/absent'"):
        psigrad.train("sft", model=model, tokenizer="/absent", **data)
    with pytest.raises(UserError, match=r"weights are float32 but dtype is 'bfloat16'"):
        psigrad.train("sft", model=model, dtype="bfloat16", **data)
    with pytest.raises(UserError, match=r"torch.float64; expected float32 or bfloat16"):
        psigrad.train("sft", model=AutoModelForCausalLM.from_pretrained(job / "base").double(), **data)
    with pytest.raises(UserError, match="PeftModelForCausalLM, which has an adapter"):
        psigrad.train("sft", model=peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM")), **data)
    with pytest.raises(UserError, match="a reward model needs a head with one label"):
        short = {name: value for name, value in SHORT.items() if name != "max_completion_length"}
        fresh = AutoModelForCausalLM.from_pretrained(job / "base")
        psigrad.train("reward", model=fresh, dataset=job / "pairs.jsonl", output_dir=tmp_path / "r", **short)
    with pytest.raises(UserError, match=r"placement\.strategy=fsdp"):
        fresh = AutoModelForCausalLM.from_pretrained(job / "base")
        psigrad.train("sft", model=fresh, strategy="fsdp", output_dir=tmp_path / "f", **data)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt2"])
def test_a_folder_without_a_tokenizer_is_refused_though_transformers_makes_one_without_words(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert AutoTokenizer.from_pretrained(tmp_path)("Hello").input_ids in ([], [3])  # nothing, or unknown: the trap
    with pytest.raises(UserError, match=r"the model has no tokenizer; save one in its folder with tokenizer\.save_pretrained"):
        load_tokenizer(str(tmp_path))
