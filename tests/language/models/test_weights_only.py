"""WeightsOnly weights against transformers' own models: numbers, names, sharing, files, and when they are not used."""

from __future__ import annotations

import copy
import filecmp
import json
import os
import subprocess
import sys

import pytest
import torch
from fused_models import CONFIGS, some_groups, written
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from psigrad.errors import UserError
from psigrad.language.models import language_model, scalar_model, tiny
from psigrad.language.models.fused.weights_only import WeightsOnly
from psigrad.language.models.packing import Groups
from psigrad.optim.gradients import in_place

pytestmark = pytest.mark.needs("compiler")


@pytest.fixture(params=[(name, tied) for name in CONFIGS for tied in (False, True)], ids=lambda p: f"{p[0]}, tied: {p[1]}")
def stored(request, tmp_path, tokenizer):
    """(folder, the model of transformers in it)."""
    name, tied = request.param
    return tmp_path, written(tmp_path, CONFIGS[name], tokenizer, tie_word_embeddings=tied)


def test_log_probs_are_those_of_transformers(stored):
    folder, _ = stored
    model = language_model.load(str(folder))
    assert isinstance(model.network, WeightsOnly)
    ours = model.evaluate(some_groups()).logp
    theirs = model.evaluate(some_groups(), packed=False).logp
    assert model.network is model.as_transformers() and not model.why_padded
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=0)


def test_names_order_and_values_are_those_of_transformers(stored):
    folder, hf = stored
    model = language_model.load(str(folder))
    ours, theirs = model.trainable(), dict(hf.named_parameters())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert list(model.network.state_dict()) == list(hf.state_dict())
    assert model.eos_token_ids == language_model.prepare(hf, model.tokenizer).eos_token_ids


def test_the_padding_token_does_not_learn_from_being_looked_up(tmp_path, tokenizer):
    """It is token 1: neither in the decoder nor in transformers' model, nor where gradients are written in place."""
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    model = language_model.load(str(tmp_path))
    groups = Groups([[1, 5, 1, 7]], [[[8, 1, 9]]])

    def gradient(packed):
        (found,) = torch.autograd.grad(model.evaluate(groups, packed=packed).logp.sum(), [table])
        return found

    table = model.network.get_input_embeddings().weight
    found = gradient(True)
    with in_place():
        model.evaluate(groups).logp.sum().backward()
    for ours in (found, table.grad, gradient(False)):
        assert ours[5].any() and not ours[1].any()


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_generation_settings_are_kept_wherever_they_stand(file, tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
    settings = json.loads((tmp_path / file).read_text()) | {
        "temperature": 0.3,
        "top_k": 7,
        "do_sample": True,
        "eos_token_id": [0, 9],
    }
    (tmp_path / file).write_text(json.dumps(settings))
    model, theirs = language_model.load(str(tmp_path)), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(model.network, WeightsOnly)
    assert model.eos_token_ids == (0, 9)
    model.save(tmp_path / "bare")
    assert model.as_transformers().generation_config.to_dict() == theirs.generation_config.to_dict()
    assert model.as_transformers().generation_config.temperature == 0.3
    theirs.save_pretrained(tmp_path / "theirs")
    for name in ("generation_config.json", "config.json"):
        assert (tmp_path / "bare" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_an_adapter_in_the_folder_is_not_overlooked(tmp_path, tokenizer):
    import peft

    hf = written(tmp_path, CONFIGS["qwen3"], tokenizer)
    adapted = peft.get_peft_model(hf, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    model = language_model.load(str(tmp_path))
    assert not isinstance(model.network, WeightsOnly)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(model.as_transformers()(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits, atol=1e-5)


def test_around_the_parameters_the_decoder_the_mode_and_chance_stay_as_they_were(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer, attention_dropout=0.5)
    model = language_model.load(str(tmp_path), gradient_checkpointing=True)
    decoder = model.decoder
    model.network.train()
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert model.as_transformers().training
    assert torch.equal(torch.get_rng_state(), before)
    assert model.decoder is decoder is not None and model.as_transformers().is_gradient_checkpointing
    assert not any(b.is_inference() for b in model.as_transformers().buffers())
    padded = [model.evaluate(some_groups(), packed=False).logp for _ in range(2)]
    assert torch.equal(*padded), "no dropout"


def test_a_model_that_cannot_be_put_around_the_parameters_stays_as_it_was(tmp_path, tokenizer, monkeypatch):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    model = language_model.load(str(tmp_path))

    def fail(self):
        raise RuntimeError("no memory")

    monkeypatch.setattr(WeightsOnly, "as_transformers", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        _ = model.as_transformers()
    assert isinstance(model.network, WeightsOnly) and model.decoder is not None


def test_a_padding_token_beyond_the_embedding_is_no_hindrance(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    longer = copy.deepcopy(tokenizer)
    longer.add_special_tokens({"pad_token": "<beyond>"})
    longer.save_pretrained(tmp_path)
    model = scalar_model.load(str(tmp_path))
    assert model.network.config.pad_token_id == len(longer) - 1 == len(tokenizer)
    ours = model.scores(some_groups()).detach()
    assert torch.allclose(ours, model.scores(some_groups(), packed=False).detach(), atol=2e-5, rtol=0)
    assert model.as_transformers().config.pad_token_id == len(tokenizer)


def test_the_fused_gradient_is_that_of_the_same_decoder_around_transformers_modules(stored):
    folder, hf = stored

    def gradient(model):
        logp = model.evaluate(some_groups()).logp
        weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
        return torch.autograd.grad((logp * weights).sum(), list(model.trainable().values()))

    model = language_model.load(str(folder))
    around = language_model.prepare(hf, model.tokenizer)
    assert around.decoder is not None
    assert all(torch.equal(a, b) for a, b in zip(gradient(model), gradient(around), strict=True))


def test_files_are_those_that_transformers_writes(stored, tmp_path):
    folder, _ = stored
    model = language_model.load(str(folder))
    model.save(tmp_path / "bare")
    assert isinstance(model.network, WeightsOnly)
    assert not isinstance(model.as_transformers(), WeightsOnly)
    model.save(tmp_path / "theirs")
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "bare").iterdir())
    assert filecmp.cmpfiles(tmp_path / "bare", tmp_path / "theirs", names, shallow=False) == (names, [], [])


def test_transformers_model_is_put_around_the_same_parameters(stored):
    folder, _ = stored
    model = language_model.load(str(folder))
    before = {name: id(p) for name, p in model.trainable().items()}
    frozen = model.frozen_copy()
    frozen_hf = frozen.as_transformers()
    assert {name: id(p) for name, p in model.as_transformers().named_parameters()} == before
    assert not any(p.requires_grad for p in frozen_hf.parameters())
    with torch.no_grad():
        for p in model.trainable().values():
            p.add_(0.05)
    fused, padded = (model.evaluate(some_groups(), packed=packed).logp for packed in (True, False))
    assert torch.allclose(fused, padded, atol=2e-5, rtol=0)
    assert not torch.allclose(fused, frozen.evaluate(some_groups()).logp, atol=1e-2)


def test_bfloat16_is_read_as_bfloat16(tmp_path, tokenizer):
    hf = written(tmp_path, CONFIGS["qwen3"], tokenizer)
    model = language_model.load(str(tmp_path), dtype="bfloat16")
    assert isinstance(model.network, WeightsOnly)
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(model.network.parameters(), hf.parameters(), strict=True))
    model.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {x.dtype for x in load_file(tmp_path / "again" / "model.safetensors").values()} == {torch.bfloat16}


def test_recomputing_layers_changes_no_gradient(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)

    def gradient(recompute):
        model = language_model.load(str(tmp_path), gradient_checkpointing=recompute)
        assert isinstance(model.network, WeightsOnly)
        return torch.autograd.grad(model.evaluate(some_groups()).logp.sum(), list(model.trainable().values()))

    assert all(torch.equal(a, b) for a, b in zip(gradient(False), gradient(True), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_scalar_model_scores_as_transformers_does(name, tmp_path, tokenizer):
    written(tmp_path, CONFIGS[name], tokenizer, AutoModelForSequenceClassification, num_labels=1)
    model = scalar_model.load(str(tmp_path), fresh_head="refuse")
    assert isinstance(model.network, WeightsOnly)
    ours = model.scores(some_groups()).detach()
    model.save(tmp_path / "bare")
    assert torch.allclose(ours, model.scores(some_groups(), packed=False).detach(), atol=2e-5, rtol=0)
    assert not isinstance(model.network, WeightsOnly)
    model.save(tmp_path / "theirs")
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "bare").iterdir())
    assert filecmp.cmpfiles(tmp_path / "bare", tmp_path / "theirs", names, shallow=False) == (names, [], [])


def test_a_fresh_score_is_the_one_that_transformers_draws(tmp_path, tokenizer):
    written(tmp_path, CONFIGS["qwen3"], tokenizer)
    torch.manual_seed(7)
    ours = scalar_model.load(str(tmp_path)).network
    torch.manual_seed(7)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert isinstance(ours, WeightsOnly)
    assert torch.equal(ours.score.weight, theirs.score.weight) and ours.score.weight.std() > 0
    assert not scalar_model.load(str(tmp_path), fresh_head="zero").network.score.weight.any()
    with pytest.raises(UserError, match=r"without a trained scalar head \(score.weight is missing\)"):
        scalar_model.load(str(tmp_path), fresh_head="refuse")


def test_weights_in_several_files_are_read(tmp_path, tokenizer):
    hf = written(tmp_path / "whole", CONFIGS["qwen3"], tokenizer)
    hf.save_pretrained(tmp_path / "parts", max_shard_size="50KB")
    tokenizer.save_pretrained(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    model = language_model.load(str(tmp_path / "parts"))
    assert isinstance(model.network, WeightsOnly)
    assert all(torch.equal(p, q) for p, q in zip(model.network.parameters(), hf.parameters(), strict=True))


STEP = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM
LARGE = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "scipy", "accelerate", "sympy")
theirs = set(sys.modules)  # transformers 5.17 imports more for this name than 5.23
from psigrad.config import Optim
from psigrad.language.models import language_model
from psigrad.language.recipes import api, online, preference, reward, sft  # what a command imports counts too
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad.optim import Optimizer

def step(place, recompute=False):
    model = language_model.load(str(place), gradient_checkpointing=recompute)
    [[completion]] = EmbeddedSampler(model).sample([Request((3, 4, 5), (1,))], SamplingParams(max_tokens=4))
    optimizer = Optimizer(model.trainable(), Optim(), recompute=recompute)
    optimizer.step([lambda: model.evaluate(Groups([[3, 4, 5]], [[completion.ids]])).logp.sum()], 1e-3)
    model.save(place / "saved")
    ours = sys.modules.keys() - theirs
    print([name for name in LARGE if name in ours])


weights_only, modules = map(Path, sys.argv[1:])
step(weights_only)
step(weights_only, recompute=True)
step(modules)
"""


@pytest.fixture(scope="module")
def stepped(tmp_path_factory, tokenizer):
    """The folders of a Qwen3 and a GPT-2 with what a step of each has saved, and what it has imported by then: of Qwen3, of the
    same recomputing, and of GPT-2.
    """
    folder = tmp_path_factory.mktemp("stepped")
    for architecture in ("qwen3", "gpt2"):
        tiny.model(architecture, len(tokenizer)).save_pretrained(folder / architecture)
        tokenizer.save_pretrained(folder / architecture)
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STEP, str(folder / "qwen3"), str(folder / "gpt2")]
    return folder, subprocess.run(command, capture_output=True, text=True, check=True, env=here).stdout.splitlines()


def test_sampling_training_and_saving_need_no_modelling_code(stepped, tokenizer):
    folder, (light, _, control) = stepped
    assert light == "[]" != control, "negative control: GPT-2 has no weights-only form"
    for architecture in ("qwen3", "gpt2"):
        assert AutoTokenizer.from_pretrained(folder / architecture / "saved").vocab_size == tokenizer.vocab_size


def test_recomputing_imports_no_compiler(stepped):
    """torch's own checkpoint does: two seconds and forty megabytes, where memory is what is short."""
    _, (_, recomputing, _) = stepped
    assert recomputing == "[]"
