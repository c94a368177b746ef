"""The process in which psigrad or TRL is timed.

Its arguments are ours|trl FOLDER DTYPE THREADS DEVICE START, where START is the time at which the process was started. It reads
requests line by line: "check" answers with loss and gradient norm on the fixed batch, "step" runs one optimiser step and answers
with its seconds by phase, tokens and peak memory.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path

from psigrad.preflight.bench.phases import Parent
from psigrad.runs.machine import default_threads


def main(who: str, folder: str, dtype: str, threads: str, device: str, start: str) -> None:
    """Build what is timed, then answer requests until the parent closes the pipe."""
    answers = os.dup(1)  # whatever the libraries print goes to stderr
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    if who == "ours":
        from psigrad.preflight.bench.psigrad_worker import build
    else:
        from psigrad.preflight.bench.trl_worker import build

    torch.set_num_threads(int(threads) or default_threads())
    take_steps, check = build(Path(folder), dtype, device)
    parent = Parent(answers, check, device)
    parent.say({"ready": time.time() - float(start)})
    take_steps(parent)


if __name__ == "__main__":
    main(*sys.argv[1:])
