"""The commands that pages show are found, and exist with their flags; and many cases in one test."""

from __future__ import annotations

import re

import page_commands
import pytest
from cases import repeat_for

from psigrad import cli
from psigrad.config.fields import flag_of
from psigrad.config.methods import list_declarations
from psigrad.config.nested import flat_names
from psigrad.config.shortcuts import shortcuts_of

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

| `deepspeed` | `psigrad grpo --nproc 4` |
"""


@pytest.fixture
def commands(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    return list(page_commands.commands(tmp_path / "page.md"))


def test_what_a_shell_would_run_is_found(commands, tmp_path):
    sft = "psigrad sft --model MODEL --dataset rows.jsonl --output-dir runs/a"
    replay = "psigrad replay runs/a --step 137"
    assert page_commands.inline(tmp_path / "page.md") == ["psigrad grpo --nproc 4"]
    assert commands == [sft, "psigrad experiment psi", "export NAME=value", "docker build .", replay]


def unknown(text: str) -> list[str]:
    """The commands and flags in the text of a command that psigrad does not have."""
    found = re.search(r"psigrad (\S+)(.*)", text)
    if not found or found[1] not in cli.COMMANDS:
        return [found[1]] if found and "pip" not in text and "tag psigrad" not in text else []
    method = list_declarations().get(found[1])
    names = [name for _, name in flat_names(method.settings)] + [*shortcuts_of(method.settings)] if method else []
    known = {*map(flag_of, names), "--config"} if method else None
    given = set(re.findall(r"(?<!\S)--[a-z][\w.-]*", found[2])) - {"--help", "--help-all"}
    return sorted(given - known) if known is not None else []


def test_every_command_of_every_page_exists_with_its_flags():
    pages = [page for page in page_commands.pages() if page.name != "errors.md"]  # whose commands are mistakes
    found = [(page.name, command) for page in pages for command in page_commands.commands(page)]
    inline = [(page.name, command) for page in pages for command in page_commands.inline(page)]
    assert len(found) > 170 and len(set(inline)) > 100  # a table may repeat a command in many rows
    found += [place for place in inline if place[1] != "psigrad --all"]
    assert {place: wrong for place in found if (wrong := unknown(place[1]))} == {}
    assert unknown("psigrad grpoo --model m") == ["grpoo"] and unknown("psigrad sft --no-such 1 --model m") == ["--no-such"]
    assert unknown("psigrad grpo --nproc 4 --help") == ["--nproc"]


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
