"""A demo of complete training on a laptop: a small model imitates faulty demonstrations, then surpasses them by GRPO.

The task is reasoning-gym's `spell_backward`. A share of the demonstrations swaps the last two letters. After supervised
fine-tuning, the model makes this mistake as often as the demonstrations. GRPO with the task's own scorer as reward removes it.
Held-out words occur in no training data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from psigrad import seeds
from psigrad.config import Data, EvalConfig, Evaluation, Model, OnlineConfig, Optim, Run, Sampling, SFTConfig
from psigrad.errors import UserError
from psigrad.language.data import tasks
from psigrad.language.models import tiny, towers
from psigrad.language.recipes import evaluate, online, sft
from psigrad.language.recipes.finish import write_report
from psigrad.paths import claim
from psigrad.records.row_lines import read_steps
from psigrad.runs import machine
from psigrad.runs.progress import bar
from psigrad.runs.result import Result
from psigrad_extras.datasets.sample import write_jsonl

TASK = "spell_backward"
MADE = "data/seed"  # of a demo's files, written last
WRONG_SHARE = 0.6
HELD_OUT = 400
WORDS = 16000
SAMPLING = Sampling(max_completion_length=12)
EVALUATION = Evaluation(eval_prompts=HELD_OUT, metric="exact")


def run(
    output_dir: str = "runs/demo", seed: int = 0, *, sft_steps: int = 800, rl_steps: int = 500, progress: bool = True
) -> Result:
    """Build a model, fine-tune it, train it with GRPO and evaluate both. The results are in `output_dir`/grpo with a report.html.

    Each stage resumes from its newest checkpoint, so the same call resumes a stopped demo. Raises `UserError` if a stage has
    no steps.
    """
    start, folder = time.perf_counter(), begin(output_dir, sft_steps, rl_steps)
    files, shown = prepare(folder, seed, progress), _run(seed, progress)
    say = print if progress else lambda text, flush: None
    say("1 of 2  SFT: the model copies the demonstrations, and their mistake", flush=True)
    tuned = sft.run(
        SFTConfig(
            model=Model(path=str(files["base"])),
            data=Data(dataset=str(files["demonstrations"]), eval_dataset=str(files["held_out"]), plain_prompts=True),
            optim=Optim(learning_rate=3e-3, adam_beta2=0.99, weight_decay=0.01, warmup_steps=50),
            run=replace(shown, output_dir=str(folder / "sft"), max_steps=sft_steps, save_steps=200),
            batch_size=64,
            sampling=SAMPLING,
            evaluation=EVALUATION,
        )
    )
    say("2 of 2  GRPO: the model samples answers, and right ones are rewarded", flush=True)
    trained = online.run(reinforcing(tuned.model, files, folder / "grpo", seed, max_steps=rl_steps, progress=progress))
    say(f"Both models answer {HELD_OUT} words that they have not seen", flush=True)
    greedy = [_greedy(model, files["held_out"], seed) for model in (tuned.model, trained.model)]
    return finish(start, tuned, trained, headline(trained, greedy))


def begin(output_dir: str, sft_steps: int, rl_steps: int) -> Path:
    """Return the folder of a demo, ready to use. Raises `UserError` if a stage has no steps."""
    for name, steps in (("sft_steps", sft_steps), ("rl_steps", rl_steps)):
        if steps < 1:
            raise UserError(f"{name} is {steps}; expected at least 1.")
    folder = claim(Path(output_dir).expanduser(), "demo")
    machine.prepare_torch(Run())
    return folder


def finish(start: float, tuned: Result, trained: Result, rows: list[dict[str, Any]]) -> Result:
    """Write the report. Its headline table has these rows, the speed of RL, and the time since `start`."""
    # A resumed demo also counts the time of earlier calls.
    spent = recorded_seconds(tuned.folder) + recorded_seconds(trained.folder)
    speed = {"name": "speed of RL", "value": tokens_per_second(trained.folder), "unit": "completion tokens/s"}
    wall = {"name": "wall time", "value": max(time.perf_counter() - start, spent), "unit": "s"}
    (trained.folder / "summary.json").write_text(json.dumps({"rows": [*rows, speed, wall]}, indent=1) + "\n")
    return replace(trained, report=write_report(trained.folder))


def _run(seed: int, progress: bool) -> Run:
    """Return the `Run` settings of both stages. Without a terminal, a line is printed every ten seconds and at the end."""
    return Run(seed=seed, progress=progress, logging_steps=10**9)


def reinforcing(
    model: Path,
    files: Mapping[str, Path],
    output: Path,
    seed: int,
    *,
    max_steps: int,
    progress: bool,
) -> OnlineConfig:
    """Return the settings of the second stage: GRPO on the fine-tuned `model`, with the task's scorer as reward."""
    return OnlineConfig(
        model=Model(path=str(model)),
        data=Data(dataset=str(files["prompts"]), eval_dataset=str(files["held_out"]), plain_prompts=True),
        optim=Optim(learning_rate=5e-4, adam_beta2=0.99, warmup_steps=5),
        run=replace(_run(seed, progress), output_dir=str(output), max_steps=max_steps, save_steps=50),
        algorithm={"preset": "grpo", "kl": None, "name": "grpo"},  # beta = 0, as in TRL: verifiable rewards need no KL
        reward=("reasoning_gym",),
        prompts_per_step=16,
        num_generations=8,
        sampling=SAMPLING,
        evaluation=replace(EVALUATION, eval_steps=25, eval_kl=True),
    )


def prepare(
    folder: Path, seed: int, progress: bool, *, words: int = WORDS, longest: int = 8, hidden: int = 160, layers: int = 4
) -> dict[str, Path]:
    """Create data and the untrained model under `folder`, unless they exist.

    Return the paths of base, demonstrations, prompts and held_out. `words` is the number of training words, of 3 to `longest`
    letters. The model has `layers` layers of width `hidden`. Raises `UserError` for files of another seed.
    """
    paths = {name: folder / "data" / f"{name}.jsonl" for name in ("demonstrations", "prompts", "held_out")}
    paths["base"] = folder / "base"
    if are_made(folder, seed):
        return paths
    with bar("words and model", 4, enabled=progress) as advance:
        rows = tasks.generate_distinct(
            TASK, words + HELD_OUT, seed=seeds.derive(seed, "demo") % 2**31, min_word_len=3, max_word_len=longest
        )
        advance()
        held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]
        shown = tasks.demonstrations(train, WRONG_SHARE, tasks.swap_ending, seed)
        write_jsonl(paths["demonstrations"], shown)
        write_jsonl(paths["prompts"], train)
        write_jsonl(paths["held_out"], [{**row, "completion": f" {row['answer']}"} for row in held_out])
        advance()
        tokenizer = tiny.tokenizer((row["prompt"] + row["completion"] for row in shown[:3000]), 300)
        advance()
        model = tiny.model("qwen3", len(tokenizer), hidden=hidden, layers=layers, heads=4, max_length=512, seed=seed)
        towers.write(model, tokenizer, paths["base"])
        advance()
    (folder / MADE).write_text(f"{seed}\n")
    return paths


def are_made(folder: Path, seed: int) -> bool:
    """Return True if the files of a demo are complete. Raises `UserError` if they are of another seed."""
    if not (folder / MADE).exists():
        return False
    if (before := (folder / MADE).read_text().strip()) != str(seed):
        raise UserError(f"{folder} holds a demo with seed {before}, not {seed}; choose another output_dir or seed.")
    return True


def _greedy(model: Path, held_out: Path, seed: int) -> dict[str, Any]:
    """Return the held-out metrics at temperature 0."""
    return evaluate.run(
        EvalConfig(
            model=Model(path=str(model)),
            data=Data(dataset=str(held_out), plain_prompts=True),
            sampling=SAMPLING,
            evaluation=Evaluation(eval_prompts=HELD_OUT, eval_temperature=0.0),
            run=Run(seed=seed),
            reward=("exact",),
        )
    ).figures


def headline(trained: Result, greedy: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of the demo's final table: accuracies with 95 % intervals, KL, length."""
    rows = []
    for when, figures in (("SFT", trained.before), ("RL", trained.after)):
        rows.append(figure(f"accuracy after {when}", figures, "eval/exact"))
    for when, figures in zip(("SFT", "RL"), greedy, strict=True):
        rows.append(figure(f"accuracy after {when}, greedy", figures, "eval/exact"))
    rows.append({"name": "KL to the SFT model", "value": trained.after["eval/kl"], "unit": "nats per completion"})
    for when, figures in (("SFT", trained.before), ("RL", trained.after)):
        rows.append({"name": f"length after {when}", "value": figures["eval/completions/mean_length"], "unit": "tokens"})
    return rows


def figure(name: str, figures: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a row of the final table: a mean with its 95 % interval."""
    return {
        "name": name,
        "value": figures[f"{key}/mean"],
        "low": figures[f"{key}/low"],
        "high": figures[f"{key}/high"],
        "unit": "",
    }


def timings(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's timings.jsonl."""
    return list(read_steps(folder / "timings.jsonl"))


def recorded_seconds(folder: Path) -> float:
    """Return the seconds that a run spent in steps and evaluations, over all its starts."""
    return float(sum(row["step_time"] for row in timings(folder)))


def tokens_per_second(folder: Path) -> float:
    """Return the completion tokens per second of complete training steps: sampling, scoring and update."""
    steps = [row for row in timings(folder) if "time/sample" in row]
    return float(sum(row["tokens"] for row in steps) / sum(row["step_time"] for row in steps))
