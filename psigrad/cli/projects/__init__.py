"""`psigrad init`: projects to start from, each a folder of `templates/`. `.in` is taken off the names of its Python files."""

from __future__ import annotations

from pathlib import Path

from psigrad.cli.common import asks_for_help
from psigrad.errors import UserError, nearest

_TEMPLATES = Path(__file__).parent / "templates"
KINDS = {
    "verifiable": "online RL on answers that a function can check (GRPO)",
    "preferences": "learning from comparisons (DPO)",
    "tools": "online RL on conversations in which the model calls tools (GRPO)",
    "control": "a Gymnasium environment of your own (PPO)",
}
_BEGIN = {
    "verifiable": "psigrad grpo --config grpo.yaml",
    "preferences": "psigrad dpo --config dpo.yaml",
    "tools": "psigrad grpo --config grpo.yaml",
    "control": "psigrad control ppo --config ppo.yaml",
}


def init(arguments: list[str]) -> int:
    """Write a project: data, a reward with its test, settings, a README."""
    listed = "\n".join(f"  {kind:<12} {what}" for kind, what in KINDS.items())
    if asks_for_help(arguments):
        usage = f"psigrad init {'|'.join(KINDS)} [FOLDER]"
        print(f"{usage}\n\nA working project: data, a reward with its test, settings, a README.\n\n{listed}")
        return 0
    names = [text for text in arguments if not text.startswith("-")]
    if not 1 <= len(names) <= 2 or len(names) < len(arguments):
        raise UserError(f"init takes a kind ({', '.join(KINDS)}) and a folder; for example: psigrad init verifiable my-project.")
    kind, folder = names[0], Path(names[1] if len(names) == 2 else names[0])
    if kind not in KINDS:
        raise UserError(f"There is no kind of project {kind!r}; expected {', '.join(KINDS)}{nearest(kind, KINDS) or '.'}")
    written = write(kind, folder)
    print(f"{folder}: {', '.join(written)}\n\n  cd {folder}\n  python -m pytest      # the project's own tests\n  {_BEGIN[kind]}")
    return 0


def write(kind: str, folder: Path) -> list[str]:
    """Write a project into a folder; the names of its files. Raises `UserError` rather than replace a file."""
    files = {path.name.removesuffix(".in"): path for path in sorted((_TEMPLATES / kind).iterdir())}
    there = [name for name in files if (folder / name).exists()]
    if there or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} has {', '.join(there) or 'no room: it is a file'} already; name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        (folder / name).write_bytes(path.read_bytes())
    return list(files)
