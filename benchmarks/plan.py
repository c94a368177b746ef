"""The predictions of `psigrad plan` compared with measurements: `python benchmarks/plan.py [W0 W1 …] [--threads N]`.

psigrad runs alone, one workload at a time. Its peak memory and seconds per step are printed and written to results/plan.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from timed.inputs import build
from timed.timing import alone
from timed.workload import Workload
from transformers import AutoConfig, AutoTokenizer
from workloads import WORKLOADS

from psigrad.config import Model, OnlineConfig, Placement, Run, Sampling, SFTConfig
from psigrad_extras.preflight import plan

RESULTS = Path(__file__).parent / "results" / "plan.json"


def planned(
    work: Workload, folder: Path, dtype: str, machine: plan.Machine, placement: Placement | None = None, lag: int = 0
) -> plan.Plan:
    """Return the plan of the workload in `folder`. Random weights sample almost uniformly, so each end token is as likely as any
    other token.
    """
    found, tokenizer = AutoConfig.from_pretrained(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    model: Any = Model(
        path=f"{folder}/model",
        dtype=dtype,  # type: ignore[arg-type]
        gradient_checkpointing=work.gradient_checkpointing,
        lora_rank=work.lora_rank,
        quantize_base=work.quantize_base,  # type: ignore[arg-type]
    )
    run = Run(max_steps=1, device=machine.device)
    common: dict[str, Any] = {"model": model, "run": run, "placement": placement or Placement()}
    prompts = [len(tokenizer(row["prompt"]).input_ids) for row in rows]
    if work.kind == "sft":
        answers = [len(tokenizer(row["completion"]).input_ids) for row in rows]
        lengths = plan.Lengths(*(round(statistics.fmean(x)) for x in (prompts, answers)), max(prompts), max(answers))
        return plan.predict(SFTConfig(batch_size=work.prompts, **common), lengths, machine)
    ends = found.get_text_config().eos_token_id
    going_on = 1 - (len(ends) if isinstance(ends, list) else 1) / found.get_text_config().vocab_size
    mean = (1 - going_on**work.completion_tokens) / (1 - going_on)
    lengths = plan.Lengths(round(statistics.fmean(prompts)), round(mean), max(prompts), work.completion_tokens)
    config = OnlineConfig(
        sampling=Sampling(max_completion_length=work.completion_tokens),
        algorithm={"preset": work.kind, "kl": {"coefficient": work.beta} if work.beta else None},
        prompts_per_step=work.prompts,
        num_generations=work.generations,
        num_iterations=work.iterations,
        micro_batch_tokens=work.micro_tokens,
        lag=lag,
        **common,
    )
    return plan.predict(config, lengths, machine)


def make_plan(work: Workload, dtype: str, threads: int) -> plan.Plan:
    """Return the plan of a workload with a generated model."""
    with tempfile.TemporaryDirectory() as folder:
        build(work, Path(folder))
        return planned(work, Path(folder), dtype, plan.machine("cpu", dtype, threads))


def measure(work: Workload, dtype: str, threads: int) -> dict[str, Any]:
    """Return the predicted and measured peak in MiB and seconds of a workload."""
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
    """Measure the requested workloads."""
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
