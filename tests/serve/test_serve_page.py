"""The examples of docs/serve.md, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Served
from psigrad_serve.serving import running

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


@pytest.fixture
def as_on_the_page(small_model, tmp_path, monkeypatch):
    """A server of `sums`, its address in the environment, and the run's folder."""
    small_model.save(tmp_path / "runs" / "sums" / "model")
    engine = SamplingEngine(small_model, 8)
    with running(Served(engine, ["sums"])) as at, chdir(tmp_path):
        for name, url in (("OPENAI", f"{at.url}/v1"), ("ANTHROPIC", at.url)):
            monkeypatch.setenv(f"{name}_BASE_URL", url)
            monkeypatch.setenv(f"{name}_API_KEY", at.token)
        yield
    engine.close()


def test_the_examples_run(as_on_the_page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "modalities unsupported_parameter\n" in said
    whole, count = names["answer"].choices[0].message.content, names["answer"].usage.completion_tokens
    assert said.startswith(f"{whole} {count}\n{whole}"), "the stream says what the whole answer did"


@pytest.mark.needs("curl")
def test_the_page_s_line_for_curl_is_answered(as_on_the_page):
    (line,) = re.findall(r"```\n(curl .*?)```", PAGE.read_text(), re.DOTALL)
    said = subprocess.run(
        ["bash", "-c", line.replace("curl ", "curl --silent --max-time 60 ", 1)], capture_output=True, timeout=90
    )
    answer = json.loads(said.stdout)
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] >= 1
