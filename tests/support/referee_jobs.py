"""Small jobs for the referee: a model whose completions end now and then, rows, and a script of TRL that takes its settings."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from psigrad.language.models import tiny

SCRIPT = """
import json, sys
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def variety(completions, **columns):
    return [float(len({*str(text)})) for text in completions]

def letters(completions, answer, **columns):
    return [float(str(text).count(one)) for text, one in zip(completions, answer)]

torch.manual_seed(0)
rows = [json.loads(line) for line in open(sys.argv[1] + ".jsonl")]
trainer = GRPOTrainer(sys.argv[1], reward_funcs=[variety, letters], args=GRPOConfig(**json.loads(sys.argv[2])),
                      train_dataset=Dataset.from_list(rows))
trainer.train()
"""
SETTINGS: dict[str, Any] = {
    "output_dir": "out", "max_steps": 12, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_grad_norm": 0.1,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 12,
    "temperature": 0.9, "beta": 0.05, "num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.03, "reward_weights": [1.0, 0.5],
    "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if shout %}!{% endif %}\n{% endfor %}<assistant>"


def make_jobs(folder: Path) -> Path:
    """plain/ and chat/, dropout/, each with its rows beside it, and train.py."""
    rng = random.Random(0)
    letters = [rng.choice("abcdefgh") for _ in range(32)]
    asked = [f"say {'the letter ' * (i % 3)}{c}:" for i, c in enumerate(letters)]
    tokenizer = tiny.tokenizer(asked, 270)
    for name, architecture in (("plain", "qwen3"), ("chat", "qwen3"), ("dropout", "gpt2")):
        model: Any = tiny.model(architecture, len(tokenizer), hidden=32, layers=2, heads=2, max_length=128)
        _make_ends_likely(model, tokenizer.eos_token_id)
        tokenizer.chat_template = TEMPLATE if name == "chat" else None
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        chats = [[{"role": "user", "content": one + " " * (i % 4 == 3)}] for i, one in enumerate(asked)]
        prompts: list[Any] = chats if name == "chat" else asked
        rows = [{"prompt": prompt, "answer": c} for prompt, c in zip(prompts, letters, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.py").write_text(SCRIPT)
    return folder


@torch.no_grad()
def _make_ends_likely(model: Any, eos: int) -> None:
    """Point the end's output vector at the mean hidden state, so that about one token in fifteen ends a completion."""
    ids = torch.randint(2, model.config.vocab_size, (8, 16), generator=torch.Generator().manual_seed(0))
    mean = model(ids, output_hidden_states=True).hidden_states[-1].mean((0, 1))
    head = model.get_output_embeddings()
    head.weight[eos] += 1.7 * mean / mean.pow(2).sum()


def record_trl(folder: Path, where: Path, job: str, settings: dict[str, Any], trl_folder: Path | None = None) -> None:
    """Record two generations of TRL in a fork of this process, which has imported TRL already. `trl_folder` has another TRL."""
    from psigrad_extras.referee import trl_worker

    where.mkdir()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            torch.manual_seed(0)
            os.chdir(folder)
            if trl_folder is not None:
                sys.path.insert(1, str(trl_folder))  # the first entry is the folder of the script
                sys.dont_write_bytecode = True
                for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
                    del sys.modules[name]
            with open(where / "log.txt", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            trl_worker.main(where, 2, ["train.py", job, json.dumps(settings)])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert not (where / "error.txt").exists(), (where / "error.txt").read_text()
