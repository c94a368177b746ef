"""Learning curves of AdamW in little memory beside float32's, on a task whose best loss is known: `benchmarks/frugal.py`.

Texts are drawn from a Markov chain over 24 tokens, whose entropy is the least that any model can have. What is printed is the
mean loss above it over five seeds of weights and texts, on 4,096 held-out tokens. Two thirds of the steps are taken at the full
rate, which falls to 0 in the rest. "bfloat16, to the nearest" is the control: the same without masters, and rounded as usual.
"""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path

import torch

from psigrad.config import Optim
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.packing import Groups
from psigrad.optim import Optimizer, low_memory

STATES, LENGTH, ROWS, STEPS, RATE, SEEDS = 24, 33, 32, 450, 2e-3, 5
WAYS = {
    "float32, adamw": (torch.float32, Optim()),
    "float32, adamw_8bit": (torch.float32, Optim(optimizer="adamw_8bit")),
    "bfloat16, adamw": (torch.bfloat16, Optim()),
    "bfloat16, adamw_8bit": (torch.bfloat16, Optim(optimizer="adamw_8bit")),
    "bfloat16, by chance": (torch.bfloat16, Optim(bf16_stochastic_round=True)),
    "bfloat16, adamw_8bit, by chance": (torch.bfloat16, Optim(optimizer="adamw_8bit", bf16_stochastic_round=True)),
    "bfloat16, to the nearest": (torch.bfloat16, Optim(bf16_stochastic_round=True)),
}
RESULTS = Path(__file__).parent / "results" / "frugal.json"


def chain() -> tuple[torch.Tensor, float]:
    """Chances [from, to], and the entropy of the next token in nats."""
    chances = (3 * torch.randn(STATES, STATES, generator=torch.Generator().manual_seed(0))).softmax(1).double()
    stays = torch.linalg.matrix_power(chances, 200)[0]
    return chances, float(-(stays[:, None] * chances * chances.log()).sum())


def texts(chances: torch.Tensor, rows: int, draw: torch.Generator) -> Groups:
    """Rows behind one token each."""
    ids = torch.randint(STATES, (rows, 1), generator=draw)
    for _ in range(LENGTH - 1):
        ids = torch.cat([ids, torch.multinomial(chances[ids[:, -1]], 1, generator=draw)], 1)
    found = (ids + 4).tolist()  # behind the special tokens
    return Groups([row[:1] for row in found], [[row[1:]] for row in found])


def loss_of(model: LanguageModel, groups: Groups) -> torch.Tensor:
    """Of a token."""
    return -model.evaluate(groups).logp.sum() / (len(groups.prompts) * (LENGTH - 1))


def curve(way: str, seed: int) -> list[float]:
    """The held-out loss above the entropy after each tenth of the run."""
    dtype, optim = WAYS[way]
    tokenizer = tiny.tokenizer(["a b c"], 280)
    hf = tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, tied=False, seed=seed)
    model = prepare(hf.to(dtype), tokenizer)
    optimizer = Optimizer(model.trainable(), optim, seed=seed)
    chances, entropy = chain()
    held_out, draw = texts(chances, 128, torch.Generator().manual_seed(99)), torch.Generator().manual_seed(1000 + seed)
    if way.endswith("nearest"):
        low_memory.round_stochastically, low_memory._has_kernel = (lambda x, seed: x.bfloat16()), (lambda weight: False)
    found = []
    for step in range(STEPS):
        rows = texts(chances, ROWS, draw)
        optimizer.step([lambda rows=rows: loss_of(model, rows)], RATE * min(1.0, 3 * (1 - step / STEPS)))
        if (step + 1) % (STEPS // 10) == 0:
            with torch.no_grad():
                found.append(float(loss_of(model, held_out)) - entropy)
    return found


if __name__ == "__main__":
    made = {way: [curve(way, seed) for seed in range(SEEDS)] for way in WAYS}  # the control comes last: it changes the module
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    RESULTS.write_text(json.dumps({"processor": name, "entropy": chain()[1], "curves": made}, indent=1) + "\n")
    print(f"loss above the entropy of {chain()[1]:.3f} nats after {STEPS // 5} and {STEPS} steps, mean and deviation")
    for way, curves in made.items():
        ends = [[one[1] for one in curves], [one[-1] for one in curves]]
        print(f"{way:34}", *(f"{statistics.fmean(x):8.4f} ± {statistics.stdev(x):.4f}" for x in ends))
