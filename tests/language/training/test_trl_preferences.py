"""The same rows and model through TRL's own trainers: loss and gradient, tokens included."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from psigrad.config.algorithms import resolve_loss
from psigrad.language import examples
from psigrad.language.data import pairs
from psigrad.language.data.dataset_rows import validate
from psigrad.language.data.templates import CHATML
from psigrad.language.models import language_model, scalar_model, tiny
from psigrad.language.training.offline.preference_task import KTOTask, PreferenceTask, mismatch, reference_logps
from psigrad.language.training.offline.reward_task import RewardTask
from psigrad.objective.preferences.reward_model import BradleyTerry

WORDS = ["one", "two", "three four", "five six seven", "eight", "nine ten"]


def rows(conversational: bool = False):
    rng = random.Random(0)
    made = []
    for i in range(6):
        chosen, rejected = rng.sample(WORDS, 2)
        row = {"prompt": f"say {WORDS[i]}:", "chosen": f" {chosen}", "rejected": f" {rejected}"}
        if conversational:
            row = {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        made.append(row)
    return made


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny.tokenizer([*WORDS, "say user assistant"], 280)
    made.chat_template = CHATML
    return made


def fresh(tokenizer):
    return tiny.model("qwen3", len(tokenizer), hidden=32, layers=2, heads=2, max_length=96)


@pytest.fixture
def hf(tokenizer):
    return fresh(tokenizer)


def moved(model, scale=0.3, seed=1):
    """The model after a step in a random direction: policy and reference must differ."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * p.abs().mean() * torch.randn(p.shape, generator=g)
    return model


def arguments(cls, tmp_path, **settings):
    return cls(
        output_dir=str(tmp_path),
        per_device_train_batch_size=6,
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        **settings,
    )


def peer_loss(trainer, model):
    """Loss and gradients of TRL on its first batch."""
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def our_loss(task, model, budget):
    """The same from our shares; a small budget splits the step into many forward passes."""
    model.zero_grad()
    total = 0.0
    for share in task.shares(range(len(task)), budget):
        loss = share()
        loss.value.backward()
        total += float(loss.value.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(ours, peer, tolerance=1e-5):
    # relative where the loss is far above 1 (sppo_hard's is 49, and float32 tells no numbers there apart that are 4e-6 apart)
    assert ours[0] == pytest.approx(peer[0], abs=tolerance * max(1.0, abs(peer[0])))
    assert ours[1].keys() == peer[1].keys() and ours[1]
    for name, gradient in peer[1].items():
        assert (ours[1][name] - gradient).abs().max() < tolerance * max(1.0, float(gradient.abs().max())), name


LOSSES = {
    "dpo": {"loss_type": ["sigmoid"]},
    "robust_dpo": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "hinge": {"loss_type": ["hinge"]},
    "ipo": {"loss_type": ["ipo"]},
    "apo_zero": {"loss_type": ["apo_zero"]},
    "apo_down": {"loss_type": ["apo_down"]},
    "ln_dpo": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "nca_pair": {"loss_type": ["nca_pair"]},
    "bco_pair": {"loss_type": ["bco_pair"]},
    "sppo_hard": {"loss_type": ["sppo_hard"]},
}
LINKS = ("nca_pair", "bco_pair", "sppo_hard")


@pytest.mark.parametrize("conversational", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("name", LOSSES)
def test_preference_losses_and_gradients_are_trls(name, conversational, tokenizer, hf, tmp_path):
    settings = dict(LOSSES[name])
    smoothing = settings.pop("label_smoothing", 0.0)
    trainer = DPOTrainer(
        model=hf,
        ref_model=copy.deepcopy(hf),
        args=arguments(DPOConfig, tmp_path, label_smoothing=smoothing, **settings),
        train_dataset=Dataset.from_list(rows(conversational)),
        processing_class=tokenizer,
    )
    peer = peer_loss(trainer, moved(hf))
    made = [pairs.encode_pair(tokenizer, validate(row, "preference", f"row {i}")) for i, row in enumerate(rows(conversational))]
    reference = language_model.prepare(
        tiny.model("qwen3", len(tokenizer), hidden=32, layers=2, heads=2, max_length=96), tokenizer
    )
    known = reference_logps(reference, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 100)
    model = language_model.prepare(hf, tokenizer)
    if conversational:
        # TRL counts the line break that the template writes behind the turn; the policy never chose it
        made = [
            examples.Pair(p.prompt, *(examples.Answer(a.ids, [True] * len(a.ids)) for a in (p.chosen, p.rejected))) for p in made
        ]
        known = reference_logps(reference, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 100)
    loss = resolve_loss({"preset": "dpo", "link": name} if name in LINKS else name)
    close(our_loss(PreferenceTask(model, loss, made, known), hf, budget=60), peer)


def test_negative_control_another_beta_is_noticed(tokenizer, hf, tmp_path):
    trainer = DPOTrainer(
        model=hf,
        ref_model=copy.deepcopy(hf),
        args=arguments(DPOConfig, tmp_path, beta=0.2),
        train_dataset=Dataset.from_list(rows()),
        processing_class=tokenizer,
    )
    reference = language_model.prepare(copy.deepcopy(hf), tokenizer)
    peer = peer_loss(trainer, moved(hf))
    made = [pairs.encode_pair(tokenizer, validate(row, "preference", "row")) for row in rows()]
    known = reference_logps(reference, [p.prompt for p in made], [[p.chosen, p.rejected] for p in made], 100)
    ours = our_loss(PreferenceTask(language_model.prepare(hf, tokenizer), resolve_loss("dpo"), made, known), hf, budget=60)
    with pytest.raises(AssertionError):
        close(ours, peer)


@pytest.mark.parametrize(
    "settings", [{}, {"center_rewards_coefficient": 0.1}, {"margins": True}], ids=["plain", "centred", "margin"]
)
def test_the_reward_loss_and_its_gradient_are_trls(settings, tokenizer, hf, tmp_path):
    given = [{**row, **({"margin": 0.1 * i} if "margins" in settings else {})} for i, row in enumerate(rows())]
    coefficient = settings.get("center_rewards_coefficient")
    hf.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = scalar_model.load(str(tmp_path / "base"))
    trainer = RewardTrainer(
        model=copy.deepcopy(model.network),
        args=arguments(RewardConfig, tmp_path, center_rewards_coefficient=coefficient, disable_dropout=True),
        train_dataset=Dataset.from_list(given),
        processing_class=tokenizer,
    )
    trainer.model.set_attn_implementation("sdpa")
    peer = peer_loss(trainer, trainer.model)
    made = [pairs.encode_pair(tokenizer, validate(row, "preference", "row")) for row in given]
    close(our_loss(RewardTask(model, BradleyTerry(coefficient or 0.0), made), model.network, budget=60), peer)


def test_the_kto_loss_and_its_gradient_are_trls(tokenizer, hf, tmp_path):
    given = [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
        for i, row in enumerate(rows())
    ]
    # before the trainer is there: accelerate puts a forward on hf, and that of a copy would compute hf
    reference = language_model.prepare(copy.deepcopy(hf), tokenizer)
    trainer = KTOTrainer(
        model=hf,
        ref_model=copy.deepcopy(hf),
        args=arguments(KTOConfig, tmp_path, desirable_weight=1.5, train_sampling_strategy="sequential"),
        train_dataset=Dataset.from_list(given),
        processing_class=tokenizer,
    )
    peer = peer_loss(trainer, moved(hf))
    made = [pairs.encode_labelled(tokenizer, validate(row, "unpaired-preference", "row")) for row in given]
    answers = [[row.answer, other] for row, other in zip(made, mismatch(made), strict=True)]
    known = reference_logps(reference, [row.prompt for row in made], answers, 100)
    loss = resolve_loss({"preset": "kto", "desirable_weight": 1.5})
    close(our_loss(KTOTask(language_model.prepare(hf, tokenizer), loss, made, known), hf, budget=60), peer)
