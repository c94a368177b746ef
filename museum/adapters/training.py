"""Code shared by the adapters of TRL and of transformers' Trainer. `make(model, rows, **settings)` makes a trainer."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import set_seed

from museum import exhibit, worlds

Make = Callable[..., Any]
ALIKE: dict[str, Any] = {
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "save_strategy": "no",
}  # fmt: skip


def folder() -> str:
    """Return a new folder, which is deleted at exit."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def labelled(rows: list[tuple[list[int], list[bool]]]) -> list[dict[str, Any]]:
    """Return rows with labels."""
    return [{"input_ids": ids, "labels": [i if w else -100 for i, w in zip(ids, mask, strict=True)]} for ids, mask in rows]


def accumulated_tokens(make: Make, x: SimpleNamespace) -> list[float]:
    """Take one step of SGD with rate 1, whose update is the gradient."""
    once = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 1, "gradient_accumulation_steps": len(x.rows)}
    trainer = make(worlds.unigram(), x.rows, **once)
    before = trainer.model.lm_head.weight.detach().clone()
    loss = trainer.train().training_loss
    gradient = worlds.logit_gradient(before - trainer.model.lm_head.weight.detach())
    return [loss / worlds.LN2, gradient[worlds.B], gradient[worlds.D]]


def evaluation_loss(make: Make, x: SimpleNamespace) -> list[float]:
    """Evaluate on the rows, one in a batch."""
    return [make(worlds.unigram(), x.rows).evaluate()["eval_loss"] / worlds.LN2]


def bfloat16_updates(make: Make, x: SimpleNamespace) -> list[float]:
    """Train a model whose folder contains bfloat16 weights, loaded with the trainer's defaults."""
    saved = folder()
    worlds.random_model("llama").bfloat16().save_pretrained(saved)
    trainer = make(saved, x.rows, learning_rate=x.rate, max_steps=x.steps)
    trainer.train()
    return [float((trainer.model.model.norm.weight - 1).abs().max().detach())]


def resumed_run(make: Make, x: SimpleNamespace, model: Callable[[], Any]) -> list[float]:
    """Train without a stop, then again from a checkpoint."""
    ends, saved = [], folder()
    steps = {"max_steps": x.steps, "save_steps": x.stop, "save_strategy": "steps", "learning_rate": x.rate}
    for resumed in (None, f"{saved}/checkpoint-{x.stop}"):
        set_seed(0)
        trainer = make(model(), x.rows, output_dir=saved, **steps)
        trainer.train(resume_from_checkpoint=resumed)
        ends.append({name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
    return [max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])]


def leak(model: Any, batch: dict[str, Any], x: SimpleNamespace) -> list[float]:
    """Return the largest difference between the second text's log-probs in a packed batch and alone."""
    ids = batch["input_ids"][0].tolist()
    start = next(i for i in range(1, len(ids)) if ids[i : i + len(x.second)] == x.second)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    try:
        with torch.no_grad():
            packed = model.eval()(**inputs).logits[0].log_softmax(-1)
            alone = model(torch.tensor([x.second])).logits[0].log_softmax(-1)
    except ValueError as error:
        raise exhibit.Refusal(str(error)) from error
    gap = packed[start : start + len(x.second)] - alone
    return [float(gap[:-1].gather(1, torch.tensor(x.second[1:])[:, None]).abs().max())]
