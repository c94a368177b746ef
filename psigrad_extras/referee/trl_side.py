"""TRL's side of the referee, which runs in a separate Python environment, and the conversion of its configuration."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from psigrad.compat.foreign_names import load
from psigrad.compat.translate import is_known
from psigrad.config import OnlineConfig
from psigrad.config.methods import declaration
from psigrad.config.nested import names_of
from psigrad.errors import UserError
from psigrad_extras.connect.trl_trainers import TrlScript, convert

_WORKER = Path(__file__).with_name("trl_worker.py")


def run(command: str, python: str, steps: int, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a TRL script, with its arguments, for `steps` generations. Return (facts about its setup, the record of its steps).

    Raises `UserError` if the interpreter has no TRL, if the script fails, or if it does not train with GRPOTrainer.
    """
    try:
        script, *arguments = shlex.split(command) or [""]
    except ValueError as error:
        raise UserError(f"--trl is {command!r}, which cannot be split into words ({error}); close its quotation marks.") from None
    if not Path(script).is_file():
        raise UserError(f"There is no script {script!r}; give a Python script that trains with TRL's GRPOTrainer.")
    try:
        done = subprocess.run(
            [python, str(_WORKER), str(folder), str(steps), script, *arguments], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(
            f"--python is {python!r}, which cannot be started ({error.strerror}); give a Python interpreter."
        ) from error
    if (folder / "error.txt").is_file():
        raise UserError((folder / "error.txt").read_text())
    if not (folder / "record.pt").is_file():
        last = (done.stderr.strip().splitlines() or ["the process printed nothing"])[-1]
        raise UserError(f"TRL's process ended with status {done.returncode} before its first step was complete: {last}.")
    about: dict[str, Any] = json.loads((folder / "about.json").read_text())
    return about, torch.load(folder / "record.pt", weights_only=True)


def settings(about: dict[str, Any], folder: Path) -> tuple[OnlineConfig, list[str]]:
    """Return (psigrad's settings for the script's configuration and policy, notes on known differences).

    Raises `UserError` if psigrad has no equivalent of a field that the script sets.
    """
    values = {"bf16": bool(about["settings"]["bf16"]), "use_cpu": about["settings"]["use_cpu"]}
    values |= {n: v for n, v in about["changed"].items() if is_known(n) or n in names_of(OnlineConfig)}
    if about["settings"]["steps_per_generation"] == about["settings"]["gradient_accumulation_steps"]:
        values = {name: v for name, v in values.items() if name not in ("generation_batch_size", "steps_per_generation")}
    trainer = {"model": str(folder / "model"), "reward_funcs": _place_rewards(about["rewards"], folder)}
    made = convert(TrlScript("GRPOConfig", values, trainer=trainer))
    if made.no_equal:
        raise UserError(
            f"The script has options without an equivalent in psigrad: {' '.join(made.no_equal)} To compare anyway, name a "
            "file of psigrad's settings after the script."
        )
    adapter = {"model.lora_dropout": about["lora_dropout"]} if about["lora_dropout"] else {}  # model/ is the adapter itself
    flags = {**made.settings, **adapter, "data.dataset": str(folder / "rows.jsonl")}
    return load(OnlineConfig, flags=flags, defaults=declaration(made.method).defaults), made.differs


def read_settings(path: str) -> OnlineConfig:
    """Return the settings for an online method in a file. The method is its setting `algorithm`, by default grpo."""
    first = load(OnlineConfig, path)
    name = first.algorithm.get("preset", "grpo") if isinstance(first.algorithm, dict) else first.algorithm
    return load(OnlineConfig, path, defaults=declaration(name).defaults if isinstance(name, str) and ":" not in name else {})


def _place_rewards(rewards: Sequence[str], folder: Path) -> list[str]:
    """Return the rewards as settings. Functions of the script are copied, with all that they need, to separate files.

    Importing the script itself would start training if it has no guard for `__main__`.
    """
    placed = []
    for number, reward in enumerate(rewards):
        path, _, name = reward.rpartition(":")
        if path.endswith(".py"):
            made = folder / f"rewards_{number}.py"
            made.write_text(
                f"import sys\nsys.path.append({str(Path(path).parent)!r})\n{_needed_by(name, Path(path).read_text())}\n"
            )
            reward = f"{made}:{name}"
        placed.append(reward)
    return placed


def _needed_by(name: str, source: str) -> str:
    """Return the source of a function and of all statements of its module that it needs, in order."""
    body = ast.parse(source).body
    binds: dict[str, list[ast.stmt]] = {}
    for statement in body:
        for bound in _bound(statement):
            binds.setdefault(bound, []).append(statement)
    wanted, names = set[ast.stmt](), [name.partition(".")[0]]
    while names:
        for statement in binds.get(names.pop(), ()):
            if statement not in wanted:
                wanted.add(statement)
                names += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return "\n".join(ast.unparse(statement) for statement in body if statement in wanted)


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement binds in its module."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    for node in ast.iter_child_nodes(statement):  # the blocks of an if or a try
        inner = node.body if isinstance(node, ast.ExceptHandler) else [node]
        names += [name for one in inner if isinstance(one, ast.stmt) for name in _bound(one)]
    return names
