"""The files of psigrad that one online step passes through, with the functions entered in each.

python tools/trace_step.py            the list
python tools/trace_step.py --count    the two numbers that a test holds: files, and imports of ours in the step's own file

A GRPO run of a tiny model on a CPU, with the fused decoder, is traced in its second step: nothing of the start counts. All
threads of the process are watched; workers in other processes are not.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "psigrad"
STEP = PACKAGE / "language" / "training" / "online" / "online_rl.py"


def trace() -> dict[str, set[str]]:
    """File -> functions that the second step of a run entered."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT))
    from psigrad.language.recipes import online
    from psigrad.language.training.online import online_rl

    entered: dict[str, set[str]] = defaultdict(set)
    # those of the packages beside psigrad too, by their names: a step enters none of them
    inside = (f"{PACKAGE}{os.sep}", f"{PACKAGE}_")

    def see(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(inside):
            entered[file.removeprefix(inside[0]).removeprefix(f"{ROOT}{os.sep}")].add(frame.f_code.co_qualname)

    plain = online_rl.step

    def watched(run: Any, state: Any) -> Any:
        if state.step != 1:
            return plain(run, state)
        threading.setprofile(see)
        sys.setprofile(see)
        try:
            return plain(run, state)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder))
        online_rl.step = watched
        try:
            online.run(config)
        finally:
            online_rl.step = plain
    return dict(entered)


def settings(folder: Path) -> Any:
    """A GRPO run of three steps on a model that is made here."""
    from psigrad.config import Data, Evaluation, Model, OnlineConfig, Run, Sampling
    from psigrad.language.models import tiny

    rows = [{"prompt": f"say {letter}:", "answer": letter} for letter in "abcdefgh"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny.tokenizer([row["prompt"] + row["answer"] for row in rows], 270)
    tokenizer.save_pretrained(folder / "base")
    tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2, max_length=64).save_pretrained(folder / "base")
    output = {"output_dir": str(folder / "run"), "max_steps": 3, "threads": 1, "progress": False, "report": False}
    return OnlineConfig(
        model=Model(path=str(folder / "base")),
        data=Data(dataset=str(folder / "rows.jsonl")),
        sampling=Sampling(max_completion_length=6),
        evaluation=Evaluation(eval_prompts=0),
        run=Run(**output),
        algorithm="grpo",
        reward=(letters,),
        prompts_per_step=4,
        num_generations=4,
    )


def letters(completions: list[str], **columns: Any) -> list[float]:
    """A share of the completion, so that groups have a signal."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]


def own_imports(path: Path = STEP) -> int:
    """How many import statements of a file name modules of ours."""
    tree = ast.parse(path.read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return sum(name.split(".")[0] == "psigrad" for name in names)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description="Files of psigrad that one online step passes through.")
    parser.add_argument("--count", action="store_true", help="the numbers alone")
    arguments = parser.parse_args()
    entered = trace()
    if not arguments.count:
        for file, functions in sorted(entered.items()):
            print(f"{len(functions):>4}  {file}")
    functions = sum("<locals>" not in name for names in entered.values() for name in names)
    print(f"one online step: {len(entered)} files, {functions} functions; its own file imports {own_imports()} modules of ours")


if __name__ == "__main__":
    main()
