"""Whether what a run holds stays what it held: `python benchmarks/memory.py FOLDER [grpo sft ppo] [--steps 200]`.

Each method trains 3.8 million parameters in float32 and in bfloat16, on rows and completions of every length, in micro-batches
that are full from the first step on. What is printed is the peak of the process at the last step over that at step 5, and the
exit status is 1 where one is above 1.05. A run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from timed.inputs import LETTERS, tokenizer
from transformers import Qwen3Config

from psigrad.runs.machine import provenance
from psigrad_extras.preflight.plan.shape import model_of

RESULTS = Path(__file__).parent / "results" / "memory.json"
VOCABULARY, EARLY, MOST = 6000, 5, 1.05
KINDS = ("float32", "bfloat16")
ONLINE = ("--reward", "length", "--num-generations", "4", "--prompts-per-step", "4", "--max-completion-length", "32")
METHODS = {"grpo": ONLINE, "sft": ("--batch-size", "16"), "ppo": ONLINE}


def make(folder: Path) -> None:
    """A model whose completions end anywhere, and rows of 4 to 96 letters."""
    if (folder / "rows.jsonl").exists():
        return
    draw = random.Random(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        intermediate_size=576,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[0, *range(96, VOCABULARY, 24)],
        pad_token_id=1,
    )
    model_of(config).save_pretrained(folder / "model")
    tokenizer(VOCABULARY).save_pretrained(folder / "model")

    def text(most: int) -> str:
        return "".join(draw.choices(LETTERS, k=draw.randint(2, most)))

    rows = [{"prompt": text(64), "completion": text(32)} for _ in range(2000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def peaks(folder: Path, method: str, dtype: str, steps: int) -> list[int]:
    """MiB after each step of a run in a process of its own."""
    place = folder / f"{method}-{dtype}"
    command = [sys.executable, "-m", "psigrad", method, "--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]
    command += ["--dtype", dtype, "--output-dir", str(place), "--max-steps", str(steps), "--threads", "1"]
    command += ["--micro-batch-tokens", "256", "--eval-prompts", "0", "--no-progress", "--no-report", *METHODS[method]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (place / "timings.jsonl").read_text().splitlines()]
    return [round(row["peak_memory_bytes"] / 2**20) for row in rows if "peak_memory_bytes" in row]


def main() -> int:
    """Run what was asked for; 1 where one grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; all of them where none is named")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    make(given.folder)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    grew = False
    for method in given.methods or METHODS:
        for dtype in KINDS:
            held = peaks(given.folder, method, dtype, given.steps)
            early, last = held[EARLY - 1], held[-1]
            grew |= last > MOST * early
            print(f"{method} {dtype}: {last} MiB at step {len(held)}, {early} at step {EARLY}: {last / early:.3f}", flush=True)
            found[f"{method} {dtype}"] = {"processor": provenance("cpu")["processor"], "mib": held}
            RESULTS.write_text(json.dumps(found) + "\n")
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
