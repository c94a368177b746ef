"""Commands to begin with. `init` writes a project of `templates/`, taking `.in` off the names of its Python files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from psigrad.cli import flags
from psigrad.config.fields import flag_of
from psigrad.errors import UserError, nearest

_TEMPLATES = Path(__file__).parent / "templates"
# kind of project -> what it shows, and the command that trains it
KINDS = {
    "verifiable": ("online RL on answers that a function can check (GRPO)", "psigrad grpo --config grpo.yaml"),
    "preferences": ("learning from comparisons (DPO)", "psigrad dpo --config dpo.yaml"),
    "tools": ("online RL on conversations in which the model calls tools (GRPO)", "psigrad grpo --config grpo.yaml"),
    "control": ("a Gymnasium environment of your own (PPO)", "psigrad control ppo --config ppo.yaml"),
}


def init(arguments: list[str]) -> int:
    """Write a project: data, a reward with its test, settings, a README."""
    if flags.asks_for_help(arguments):
        listed = "\n".join(f"  {kind:<12} {what}" for kind, (what, _) in KINDS.items())
        usage = f"psigrad init {'|'.join(KINDS)} [FOLDER]"
        print(f"{usage}\n\nA working project: data, a reward with its test, settings, a README.\n\n{listed}")
        return 0
    names = [text for text in arguments if not text.startswith("-")]
    if not 1 <= len(names) <= 2 or len(names) < len(arguments):
        raise UserError(f"init takes a kind ({', '.join(KINDS)}) and a folder; for example: psigrad init verifiable my-project.")
    kind, folder = names[0], Path(names[-1])
    if kind not in KINDS:
        raise UserError(f"There is no kind of project {kind!r}; expected {', '.join(KINDS)}{nearest(kind, KINDS) or '.'}")
    files = ", ".join(write(kind, folder))
    print(f"{folder}: {files}\n\n  cd {folder}\n  python -m pytest      # the project's own tests\n  {KINDS[kind][1]}")
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


_FROM_TRL = "psigrad from-trl SCRIPT.py|CONFIG.yaml [--trainer grpo] [--output FILE.yaml]"


def from_trl(arguments: list[str]) -> int:
    """Print the settings that train as a script of TRL does, or a file of its command line, and what differs."""
    if flags.asks_for_help(arguments):
        print(
            f"{_FROM_TRL}\n\nThe equal settings of psigrad, as YAML and as a command, and what differs. "
            "The script is read, not run."
        )
        return 0
    paths, given, rest = flags.parse_lists(arguments, "--trainer", "--output")
    if len(paths) != 1 or rest:
        raise UserError(f"from-trl takes one script or file; the usage is {_FROM_TRL}.")
    from psigrad.compat.scripts import convert_file

    made = convert_file(paths[0], "".join(given["--trainer"][:1]))
    kinds = {
        "differs": made.differs,
        "no equal here": made.no_equal,
        "look at": made.look_at,
        "needless here": made.nothing,
    }
    notes = [line for title, lines in kinds.items() if lines for line in ("#", f"# {title}:", *(f"#   {line}" for line in lines))]
    output = "".join(given["--output"][:1])
    if output:
        Path(output).write_text(made.yaml())
        print(f"# psigrad {made.method} --config {output}")
    else:
        print(made.yaml() + f"\n# as a command:\n# {_command(made.method, made.settings)}")
    print("\n".join(notes))
    return 0


def _command(method: str, settings: dict[str, Any]) -> str:
    """The command line of these settings."""
    words = ["psigrad", method]
    for name, value in settings.items():
        if name.partition(".")[0] in ("algorithm", "loss"):
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(shlex.quote(f"{name}={text}"))
        elif isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(name).replace("--", "--no-", 1))
        elif isinstance(value, list | tuple) and not value:
            words.append(shlex.quote(f"{name}=[]"))
        else:
            several = value if isinstance(value, list | tuple) else [value]
            words += [flag_of(name), *(shlex.quote(str(one)) for one in several)]
    return " ".join(words)
