"""Commands without a settings class: their help says what each flag means."""

from __future__ import annotations

import re

import pytest

from psigrad import cli


@pytest.mark.parametrize("command", ["score", "pairs", "judge-report"])
def test_help_says_what_each_flag_means(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    _, _, options = capsys.readouterr().out.partition("options:\n")
    told = re.split(r"\n  (?=-)", options)
    assert left.value.code == 0 and len(told) > 4
    for one in told:
        words = re.sub(r"\(default[^)]*\)", "", one).split()
        assert len([word for word in words if not word.startswith("-") and not word.isupper()]) > 2, one
