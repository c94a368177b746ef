"""Redaction of secrets: tokens, passwords, credentials in URLs, and values of environment variables with secret-looking names.

Use `clear` for anything that is written to files, and `say` for messages on the terminal. `clear` consists of `hide` and
`without`. The run folder's writer calls these two itself, which is faster for many lines.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SHORTEST = 8  # a shorter value may be a word that occurs anywhere
# Tokens of these kinds are tokens of text, not secrets.
_OF_TEXT = ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "eot", "boi", "eoi", "image", "video", "audio")
_TOKEN = "".join(f"(?<!{kind}[_-])" for kind in _OF_TEXT) + "token"
# Names of environment variables that hold secrets. AUTHOR, TOKENIZERS_PARALLELISM and MAX_TOKENS are not among them.
SECRET_NAME = re.compile(
    rf"{_TOKEN}(?!iz|s$)|secret|passw|passphrase|credential|(^|_)((api_?)?key|pass)(_|$)|_(pwd|pat)$|auth(?!ors?(_|$))",
    re.IGNORECASE,
)
_VARIABLE = r"(?-i:[A-Z][A-Z0-9_]*_(?:KEY|PASS|PWD|PW|PAT|AUTH))"  # `env OPENAI_KEY=…` in the command of a tool server
_WORD = rf"{_VARIABLE}|(?:api|access|private)[_-]?key|secret|password|passwd|passphrase|credentials?|authorization|{_TOKEN}"
_NAMED = r"(?:api|access|private)[_-]?key|password|passwd"
_KEY = re.compile(rf"(?:{_WORD})$", re.IGNORECASE)
# A full word of a flag: --db-pass, but not --bypass.
_SHORT = r"--?(?:[\w.]+[_-])*(?:pass|passcode|pwd|pw|pat|auth|key|creds|bearer|jwt|cookie)"
_FLAG = re.compile(rf"--?[\w.-]*(?:{_WORD})|{_SHORT}", re.IGNORECASE)
_QUOTED = r"'[^']+'|\"[^\"]+\""
_SPOKEN = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\w://)[^/?#\s\"'<>]+(?=@)",
        r"([?&][\w.-]*(?:key|token|secret|passw\w*|sig|signature|credential|auth)=)[^&\s\"'#<>]+",
        rf"((?:{_WORD})=)(?:{_QUOTED}|[^\s\"',;)&]+)",
        rf"((?:{_NAMED})[\"']?:\s+[\"']?)(?=[^\s\"']*\d)[^\s\"',;]{{6,}}",
        rf"(--[\w.-]*(?:{_WORD})\s+)(?:{_QUOTED}|[^\s\"']+)",
        rf"((?<![\w-]){_SHORT}(?:\s+|=))(?:{_QUOTED}|[^\s\"'-][^\s\"']*)",
        r"((?<!\S)(?:-u|--user)[\s=]+[\"']?[^\s:\"']+:)[^\s\"']+",
        r"((?<!\S)(?:-H|--header)[\s=]+[\"']?[\w-]*(?:token|key|secret|auth|cookie)[\w-]*:\s*)[^\"']+",
        rf"((?:-[\w.-]*(?:{_WORD})|(?<![\w-]){_SHORT})[\"'],\s*[\"'])[^\"']+",  # in the error of a process that failed
        rf"([\"'](?:[\w-]*(?:{_WORD}))[\"']\s*:\s*[\"'])[^\"']+",
        r"(\b(?:Bearer|Authorization:\s*\w+)\s+)(?:(?=\S*\d)[\w.~+/=-]{8,}|[\w.~+/=-]{16,})",
        r"(\b)(?:hf_|gsk_|glpat-|nvapi-|xai-|npm_|pypi-|gh[opsu]_|github_pat_\w+_|sk-[\w-]*|xox[abp]-[\w-]*|AKIA|AIza[\w-]*|eyJ[\w-]+\.[\w.-]*)[a-z0-9]{16,}(?:\.?[\w-]+)*",
    )
)


def hide(value: Any) -> Any:
    """Return a JSON value without secrets. Secrets are recognised in text by format, and after a key or flag by its name."""
    if isinstance(value, str):
        for pattern in _SPOKEN:
            value = pattern.sub(rf"\1{HIDDEN}", value)
        return value
    if isinstance(value, list | tuple):  # the words of a command, where a secret follows --api-key
        return [HIDDEN if isinstance(one, str) and isinstance(flag, str) and _FLAG.fullmatch(flag) else hide(one)
                for flag, one in zip(("", *value), value, strict=False)]  # fmt: skip
    if isinstance(value, Mapping):
        return {key: HIDDEN if isinstance(held, str) and held and _KEY.search(str(key)) else hide(held)
                for key, held in value.items()}  # fmt: skip
    return value


def clear(value: Any) -> Any:
    """Return a JSON value without the secrets that `hide` recognises and the values of secret environment variables."""
    return json.loads(without(json.dumps(hide(value)).encode(), values()))


def escape(text: str) -> str:
    """Escape control characters, bidirectional overrides and lone surrogates, but not line ends and tabs.

    Without this, a text of a model or dataset could set the terminal's title or clipboard.
    """
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def say(text: str) -> None:
    """Print a message on standard error, without secrets and control characters."""
    print(f"psigrad: {escape(clear(text))}", file=sys.stderr, flush=True)


def log(kind: str, text: str, **fields: Any) -> None:
    """Print a message with `say`. Use it in place of `Journal.log` where there is no run that could record the event."""
    say(text)


def values() -> list[bytes]:
    """Return the values of environment variables whose names look secret, in the form that they have in a line of JSON."""
    held = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= _SHORTEST}
    shown = [value for value in sorted(held, key=len, reverse=True) if not (os.sep in value and os.path.exists(value))]
    # Lines are written with and without ASCII escapes.
    forms = [json.dumps(value, ensure_ascii=plain)[1:-1] for value in shown for plain in (True, False)]
    return [form.encode(errors="surrogateescape") for form in dict.fromkeys(forms)]


def without(lines: bytes, secret: list[bytes]) -> bytes:
    """Return lines of JSON in which each value in `secret` is replaced by a placeholder."""
    for value in secret:
        lines = lines.replace(value, HIDDEN.encode())
    return lines
