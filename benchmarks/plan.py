"""What `psigrad plan` predicts beside what is measured: `python benchmarks/plan.py [W0 W1 …] [--threads N]`.

Peak resident memory of psigrad's side alone, one workload at a time. The table goes to the screen and to results/plan.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from workloads import WORKLOADS

from psigrad.config import Model, OnlineConfig, Run, Sampling
from psigrad_extras.preflight import plan
from psigrad_extras.preflight.bench.inputs import build
from psigrad_extras.preflight.bench.timing import alone
from psigrad_extras.preflight.bench.workload import Workload

RESULTS = Path(__file__).parent / "results" / "plan.json"


def make_plan(work: Workload, dtype: str, threads: int) -> plan.Plan:
    """The plan of an online workload. Random weights sample nearly uniformly, so one token of the vocabulary ends."""
    chance = 1 - 1 / work.vocabulary
    mean = (1 - chance**work.completion_tokens) / (1 - chance)
    lengths = plan.Lengths(work.prompt_tokens, round(mean), work.prompt_tokens, work.completion_tokens)
    with tempfile.TemporaryDirectory() as folder:
        build(work, Path(folder))
        config = OnlineConfig(
            model=Model(path=f"{folder}/model", dtype=dtype, gradient_checkpointing=work.gradient_checkpointing),  # type: ignore[arg-type]
            sampling=Sampling(max_completion_length=work.completion_tokens),
            run=Run(max_steps=1, device="cpu"),
            algorithm={"preset": work.kind, "kl": {"coefficient": work.beta} if work.beta else None},
            prompts_per_step=work.prompts,
            num_generations=work.generations,
            num_iterations=work.iterations,
        )
        return plan.predict(config, lengths, plan.machine("cpu", dtype, threads))


def measure(work: Workload, dtype: str, threads: int) -> dict[str, Any]:
    """One workload: predicted and measured peak in MiB, seconds, tokens per second."""
    made, found = make_plan(work, dtype, threads), alone(work, dtype, threads)["ours"]
    return {
        "workload": work.name,
        "dtype": dtype,
        "threads": threads,
        "predicted_mb": made.memory.peak / 2**20,
        "measured_mb": found["peak_mb"],
        "error": made.memory.peak / 2**20 / found["peak_mb"] - 1,
        "predicted_seconds": made.seconds,
        "measured_seconds": found["seconds"],
        "peak_gflops": made.machine.peak / 1e9,
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["W0", "W1", "W2", "W3", "W3F", "W4", "PPO"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default=str(RESULTS))
    given = parser.parse_args()
    lines = []
    for name in given.workloads:
        lines.append(line := measure(WORKLOADS[name], given.dtype, given.threads))
        memory = f"{line['predicted_mb']:7.0f} MB predicted {line['measured_mb']:7.0f} MB measured {line['error']:+7.1%}"
        print(f"{name:4} {memory}   {line['predicted_seconds']:6.2f} s predicted {line['measured_seconds']:6.2f} s", flush=True)
        Path(given.json).write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
