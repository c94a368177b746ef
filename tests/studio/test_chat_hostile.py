"""A model in the runs folder that wants the studio to wait for ever, or to grow."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from chat_runs import make_runs
from live_studio import live_studio

from psigrad.errors import UserError
from psigrad.language.data.chat import limits
from psigrad.language.data.templates import prompt_ids
from psigrad_studio import checkpoint_list
from psigrad_studio.chat_question import ChatQuestion, abilities
from psigrad_studio.checkpoint_list import find

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
GROWS = "{% set n = namespace(t='a' * 9999) %}{% for a in range(99999) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"
HELLO = ChatQuestion(({"role": "user", "content": "say a:"},))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("chat") / "runs")


@pytest.fixture
def runs(made, tmp_path):
    for name in ("good", "bad"):
        shutil.copytree(made / "chat" / "talking" / "checkpoints" / "step-00000007", tmp_path / "runs" / name / "model")
    return tmp_path / "runs"


def templated(folder, template):
    for file in folder.glob("*.jinja"):
        file.write_text(template)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


def by_run(runs):
    return {found.run: found for found in find(runs).values()}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "other.safetensors", "note"])
def test_a_model_with_a_pipe_is_not_listed_and_hangs_nobody(name, runs):
    (runs / "bad" / "model" / name).unlink(missing_ok=True)
    os.mkfifo(runs / "bad" / "model" / name)
    assert set(by_run(runs)) == {"good"}


def test_a_config_of_any_size_is_read_up_to_a_bound(runs):
    file = runs / "bad" / "model" / "config.json"
    file.write_text(file.read_text() + " " * (5 << 20))
    assert set(by_run(runs)) == {"good"}


def test_a_folder_of_many_folders_is_cut(runs, monkeypatch):
    monkeypatch.setattr(checkpoint_list, "MOST_FOLDERS", 3)
    assert set(by_run(runs)) == {"bad"}, "the runs folder, bad, bad/model"


def test_a_damaged_config_of_a_run_leaves_its_adapters_in_use(made, tmp_path):
    shutil.copytree(made, tmp_path / "runs")
    run = tmp_path / "runs" / "chat" / "adapter"
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text("{")
    assert "chat/adapter" not in by_run(tmp_path / "runs")
    (run / "checkpoints" / "step-00000002" / "manifest.json").write_text(json.dumps({"settings": settings}))
    found = by_run(tmp_path / "runs")["chat/adapter"]
    assert checkpoint_list._model_of(found.folder).path == settings["model"]["path"]


@pytest.mark.parametrize(("template", "why"), [(LOOPS, "runs for more than"), (GROWS, "writes more than")])
def test_a_template_that_takes_too_much_is_refused_and_the_next_model_answers(template, why, runs, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    templated(runs / "bad" / "model", template)
    bad, good = (by_run(runs)[name].tokenizer() for name in ("bad", "good"))
    for _ in range(4):
        with pytest.raises(UserError, match=why):
            abilities(bad)
    with pytest.raises(UserError, match=why):
        prompt_ids(bad, HELLO.row(good))
    assert abilities(good) == (True, True) and prompt_ids(good, HELLO.row(good)), "negative control"


def test_the_studio_says_so_of_about_and_of_an_answer(runs, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    templated(runs / "bad" / "model", LOOPS)
    with live_studio(runs=runs) as studio:
        known = {model["run"]: model["id"] for model in studio.ask("GET", "/api/chat/models").json["models"]}
        refused = studio.post("/api/chat/about", {"model": known["bad"]})
        assert refused.status == 422 and "runs for more than" in json.dumps(refused.json), refused
        assert studio.post("/api/chat/about", {"model": known["good"]}).json == {"template": True, "system": True}
        asked = {"models": [known["bad"]], "messages": [{"role": "user", "content": "say a:"}]}
        assert b"runs for more than" in studio.post("/api/chat/answer", asked).body
