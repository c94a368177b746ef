"""The commands that pages show: each is found, exists with its flags, and can be run by a tool; and many cases in one test."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cases import repeat_for

from psigrad import cli
from psigrad.config.fields import flag_of
from psigrad.config.methods import list_declarations
from psigrad.config.nested import flat_names
from psigrad.config.shortcuts import shortcuts_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import page_commands  # noqa: E402

PAGE = """
# A page

```
psigrad sft --model MODEL --dataset rows.jsonl \\
  --output-dir runs/a       # what it does
psigrad experiment psi      bias and variance           12 s
psigrad serve  http://127.0.0.1:8500/v1  sums
what a program says
export NAME=value
```

```python
psigrad grpo
```

   ```
   docker build .
   psigrad replay runs/a --step 137
   ```
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    monkeypatch.setattr(page_commands, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    return list(page_commands.commands(tmp_path / "page.md"))


def test_what_a_shell_would_run_is_found_and_what_it_needs_is_named(commands):
    sft = "psigrad sft --model MODEL --dataset rows.jsonl --output-dir runs/a"
    replay = "psigrad replay runs/a --step 137"
    assert [c.text for c in commands] == [sft, "psigrad experiment psi", "export NAME=value", "docker build .", replay]
    assert [c.needs for c in commands] == ["", "", "", "Docker", ""]
    assert page_commands.shortened(sft).startswith(f"{sft.replace('MODEL', 'model')} --max-steps 2 ")
    assert page_commands.shortened(replay).strip() == "psigrad replay runs/a --step 2"


def unknown(text: str) -> list[str]:
    """The commands and flags in the text of a command that psigrad does not have."""
    found = re.search(r"psigrad (\S+)(.*)", text)
    if not found or found[1] not in cli.COMMANDS:
        return [found[1]] if found and "pip" not in text and "tag psigrad" not in text else []
    method = list_declarations().get(found[1])
    names = [name for _, name in flat_names(method.settings)] + [*shortcuts_of(method.settings)] if method else []
    known = {*map(flag_of, names), "--config"} if method else None
    return [flag for flag in re.findall(r"(?<!\S)--[a-z-]+", found[2]) if known is not None and flag not in known]


def test_every_command_of_every_page_exists_with_its_flags():
    found = [command for page in page_commands.pages() for command in page_commands.commands(page)]
    assert len(found) > 170 and sum(not command.needs for command in found) >= 130  # and the reward `code`, with bubblewrap
    assert {f"{c.page}: {c.text}": wrong for c in found if (wrong := unknown(c.text))} == {}
    assert unknown("psigrad grpoo --model m") == ["grpoo"] and unknown("psigrad sft --no-such 1 --model m") == ["--no-such"]


def test_cases_in_a_loop_all_run_and_those_that_fail_are_named():
    seen = []

    @repeat_for(("x", "y"), [(1, 1), (2, 3), (3, 3), (4, 5)])
    def test(x, y, fixture):
        seen.append((x, fixture))
        assert x == y

    with pytest.raises(ExceptionGroup, match="2 of 4 cases of test") as failed:
        test(fixture="f")
    assert seen == [(1, "f"), (2, "f"), (3, "f"), (4, "f")]
    assert [error.__notes__ for error in failed.value.exceptions] == [["with x, y = (2, 3)"], ["with x, y = (4, 5)"]]
    with pytest.raises(AssertionError, match="no case"):
        repeat_for("x", [])(lambda x: None)()
