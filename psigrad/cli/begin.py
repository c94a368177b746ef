"""Commands for a new project. `init` copies a project from `templates/` and removes `.in` from the names of its Python files."""

from __future__ import annotations

from pathlib import Path

from psigrad.cli import flags
from psigrad.errors import UserError, nearest
from psigrad.paths import absolute, check_folder

_TEMPLATES = Path(__file__).parent / "templates"
# Kind of project -> (its description, the command that trains it).
KINDS = {
    "verifiable": ("online RL on answers that a function can check (GRPO)", "psigrad grpo --config grpo.yaml"),
    "preferences": ("learning from comparisons (DPO)", "psigrad dpo --config dpo.yaml"),
    "tools": ("online RL on conversations in which the model calls tools (GRPO)", "psigrad grpo --config grpo.yaml"),
    "control": ("a custom Gymnasium environment (PPO)", "psigrad control ppo --config ppo.yaml"),
}


def init(arguments: list[str]) -> int:
    """Run `psigrad init KIND [FOLDER]`: write a project with settings, tests and a README. Return the exit status, 0."""
    if flags.asks_for_help(arguments):
        listed = "\n".join(f"  {kind:<12} {what}" for kind, (what, _) in KINDS.items())
        print("psigrad init KIND [FOLDER]\n\nWrite a new project to FOLDER (default: ./KIND): data, tests and settings.\n")
        print(listed)
        return 0
    names = [text for text in arguments if not text.startswith("-")]
    if not 1 <= len(names) <= 2 or len(names) < len(arguments):
        raise UserError(f"init takes a kind ({', '.join(KINDS)}) and optionally a folder: `psigrad init tools my_project`.")
    kind, folder = names[0], absolute(names[-1])
    if kind not in KINDS:
        raise UserError(f"There is no project kind {kind!r}; expected {', '.join(KINDS)}{nearest(kind, KINDS) or '.'}")
    files = ", ".join(write(kind, folder))
    tests = "python -m pytest      # the project's own tests; they need pytest (pip install pytest)"
    print(f"{folder}: {files}\n\n  cd {folder}\n  {tests}\n  {KINDS[kind][1]}")
    return 0


def write(kind: str, folder: Path) -> list[str]:
    """Copy the project template `kind` to `folder`. Return the file names. Raises `UserError` if `folder` has visible files."""
    files = {path.name.removesuffix(".in"): path for path in sorted((_TEMPLATES / kind).iterdir())}
    check_folder(folder, "FOLDER", lambda found: all(path.name.startswith(".") for path in found.iterdir()))  # .git may exist
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        (folder / name).write_bytes(path.read_bytes())
    return list(files)
