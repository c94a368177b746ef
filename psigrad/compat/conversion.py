"""The command that turns settings of TRL into psigrad's."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from psigrad.cli.flags import asks_for_help
from psigrad.errors import UserError

_USAGE = "psigrad from-trl SCRIPT.py|CONFIG.yaml [--trainer grpo] [--output FILE.yaml]"


def from_trl(arguments: list[str]) -> int:
    """Print the settings that train as a script of TRL does, or a file of its command line, and what differs."""
    if asks_for_help(arguments):
        print(
            f"{_USAGE}\n\nThe equal settings of psigrad, as YAML and as a command, and what differs. The script is read, not run."
        )
        return 0
    from psigrad.cli import flags

    paths, given, rest = flags.parse_lists(arguments, "--trainer", "--output")
    if len(paths) != 1 or rest:
        raise UserError(f"from-trl takes one script or file; the usage is {_USAGE}.")
    from psigrad.compat import from_trl, trl_script

    made = from_trl.convert(trl_script.read(paths[0], "".join(given["--trainer"][:1])))
    told = {
        "differs": made.differs,
        "no equal here": made.no_equal,
        "look at": made.look_at,
        "needless here": made.nothing,
    }
    notes = [line for title, lines in told.items() if lines for line in ("#", f"# {title}:", *(f"#   {line}" for line in lines))]
    output = "".join(given["--output"][:1])
    if output:
        Path(output).write_text(made.yaml())
        print(f"# psigrad {made.method} --config {output}")
    else:
        print(made.yaml() + f"\n# as a command:\n# {command(made.method, made.settings)}")
    print("\n".join(notes))
    return 0


def command(method: str, settings: dict[str, Any]) -> str:
    """The command line of these settings."""
    from psigrad.config.fields import flag_of

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
