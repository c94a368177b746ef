"""The demo of `psigrad demo --vision`: a small vision-language model imitates faulty play, then surpasses it by GRPO.

The game is `squares`. The policy counts the squares of a colour in a picture. The environment answers with a second picture, in
which the policy finds the only square of that colour. Half of the answers in the demonstrations are wrong. Nothing is pretrained
or downloaded.
"""

from __future__ import annotations

import time
from pathlib import Path

from psigrad.config import Data, Evaluation, Model, OnlineConfig, Optim, Run, Sampling, SFTConfig
from psigrad.language.models import tiny
from psigrad.language.models.towers import disable_progress_bars
from psigrad.language.recipes import online, sft
from psigrad.runs.progress import bar
from psigrad.runs.result import Result
from psigrad_extras import squares
from psigrad_extras.datasets.sample import write_jsonl
from psigrad_extras.demo import MADE, are_made, begin, figure, finish

WRONG_SHARE = 0.5
HELD_OUT, GAMES = 200, 6000
TOWERS = ("vision_model", "connector")
SAMPLING = Sampling(max_completion_length=4)


def run(
    output_dir: str = "runs/demo-vision", seed: int = 0, *, sft_steps: int = 1000, rl_steps: int = 250, progress: bool = True
) -> Result:
    """Draw pictures, build a model, fine-tune it and train it with GRPO. The results are in `output_dir`/grpo.

    Each stage resumes from its newest checkpoint, so the same call resumes a stopped demo. Raises `UserError` if a stage has
    no steps.
    """
    start, folder = time.perf_counter(), begin(output_dir, sft_steps, rl_steps)
    files = prepare(folder, seed, progress)
    say = print if progress else lambda text, flush: None
    say("1 of 2  SFT: the model copies the games, and their mistakes", flush=True)
    tuned = sft.run(
        SFTConfig(
            model=Model(path=str(files["base"]), trained_towers=TOWERS),
            data=Data(dataset=str(files["demonstrations"]), eval_dataset=str(files["right"])),
            optim=Optim(learning_rate=2e-3, adam_beta2=0.99, weight_decay=0.01, warmup_steps=50),
            run=_run(folder / "sft", seed, sft_steps, progress),
            batch_size=64,
        )
    )
    say("2 of 2  GRPO: the model plays, and right answers are rewarded", flush=True)
    trained = online.run(
        OnlineConfig(
            model=Model(path=str(tuned.model), trained_towers=TOWERS),
            data=Data(dataset=str(files["games"]), eval_dataset=str(files["held_out"])),
            optim=Optim(learning_rate=3e-4, adam_beta2=0.99, warmup_steps=5),
            run=_run(folder / "grpo", seed, rl_steps, progress),
            algorithm={"preset": "grpo", "kl": None, "name": "grpo"},
            environment=squares.Squares,
            max_turns=2,
            prompts_per_step=16,
            num_generations=8,
            sampling=SAMPLING,
            evaluation=Evaluation(eval_prompts=HELD_OUT, eval_steps=25),
        )
    )
    stages = (("SFT", trained.before), ("RL", trained.after))
    rows = [figure(f"right answers after {when}", figures, "eval/reward") for when, figures in stages]
    return finish(start, tuned, trained, rows)


def _run(folder: Path, seed: int, steps: int, progress: bool) -> Run:
    return Run(output_dir=str(folder), seed=seed, max_steps=steps, save_steps=50, progress=progress, logging_steps=10**9)


def prepare(folder: Path, seed: int, progress: bool, *, hidden: int = 96, layers: int = 2, games: int = GAMES) -> dict[str, Path]:
    """Draw the pictures and make the untrained model under `folder`, unless they exist.

    Return the paths of base, demonstrations, right (held-out demonstrations without mistakes), games and held_out. No held-out
    picture is in the games. Raises `UserError` for files of another seed.
    """
    names = ("demonstrations", "right", "games", "held_out")
    paths = {name: folder / "data" / f"{name}.jsonl" for name in names} | {"base": folder / "base"}
    if are_made(folder, seed):
        return paths
    pictures = (folder / "data" / "pictures").absolute()
    with bar("pictures and model", 3, enabled=progress) as advance:
        held_out, shown = (
            squares.rows(pictures, count, first + 1_000_000 * seed) for count, first in ((HELD_OUT, 0), (games, HELD_OUT))
        )
        known = [squares.boards(row["seed"])[1] for row in held_out]
        shown = [row for row in shown if squares.boards(row["seed"])[1] not in known]
        advance()
        right, careless = (
            squares.demonstrations(*of, seed) for of in ((held_out, pictures, 0.0), (shown, pictures, WRONG_SHARE))
        )
        for name, rows in zip(names, (careless, right, shown, held_out), strict=True):
            write_jsonl(paths[name], rows)
        advance()
        words = [f"How many {colour}? Where? {place} {n}" for colour in squares.COLOURS for n, place in enumerate(squares.PLACES)]
        side = squares.CELLS * squares.PIXELS
        with disable_progress_bars():
            sizes = {"pixels": side, "patch": squares.PIXELS, "hidden": hidden, "layers": layers}
            tiny.save_vision_model(words, paths["base"], **sizes, seed=seed)
        advance()
    (folder / MADE).write_text(f"{seed}\n")
    return paths
