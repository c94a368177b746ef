"""`psigrad serve` and `psigrad chat`, as they are typed."""

from __future__ import annotations

import io
import json
import shutil

import openai
import pytest

from psigrad import cli
from psigrad.errors import UserError
from psigrad_serve import serving, terminal_chat
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Served


@pytest.fixture(scope="module")
def run_folder(small_model, tmp_path_factory):
    """A run with its model, as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    small_model.save(folder / "model")
    (folder / "config.json").write_text("{}")
    return folder


def test_serve_opens_the_runs_model_and_hands_it_on(run_folder, monkeypatch, capsys):
    seen = []

    def instead(served, listening, token, say):
        with serving.running(served, token) as at:
            client = openai.OpenAI(base_url=f"{at.url}/v1", api_key="mine", max_retries=0)
            seen.append([model.id for model in client.models.list()])
            seen.append(client.completions.create(model="b", prompt="the", max_tokens=3, seed=1).usage.completion_tokens)
        seen.append((served.engine.max_batch, listening.getsockname()[0]))
        listening.close()

    monkeypatch.setattr(serving, "serve", instead)
    words = ["serve", str(run_folder), "--name", "a", "b", "--token", "mine", "--max-batch", "3", "--threads", "1"]
    assert cli.main(words) == 0
    assert seen == [["a", "b"], 3, (3, "127.0.0.1")]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["serve"], "the usage is psigrad serve MODEL_OR_RUN [flags]"), (["serve", "a", "b"], "serve got a b; the usage is"),
     (["serve", "./nowhere"], "There is no folder './nowhere'"), (["serve", "x", "--port", "99999"], "port is 99999"),
     (["serve", "x", "--host", "203.0.113.9"], "203.0.113.9"), (["serve", "x", "--prot", "1"], "did you mean '--port'"),
     (["chat"], "chat got nothing"), (["chat", "./nowhere"], "There is no folder")],
    ids=" ".join,
)  # fmt: skip
def test_mistakes_are_said_in_a_sentence(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_the_token_is_told_once_unless_it_is_yours(small_model, monkeypatch):
    from psigrad_serve.engine.engine import SamplingEngine

    class Server:
        def __init__(self, app, ready, **settings):
            self.run = lambda sockets: ready()

    made, said, gateway = [], [], serving.gateway
    monkeypatch.setattr(serving, "gateway", lambda served, token: made.append(token) or gateway(served, token))
    monkeypatch.setattr(serving, "QuietServer", Server)
    for token, variable in (("", ""), ("", "from the environment"), ("typed", "")):
        monkeypatch.setenv(serving.VARIABLE, variable)
        with serving.listen() as listening:
            serving.serve(Served(SamplingEngine(small_model), ["m"]), listening, token, said.append)
    assert len(made[0]) == 32 and made[1:] == ["from the environment", "typed"]
    text = "\n".join(said)
    assert text.count(made[0]) == 1 and "from the environment" not in text and "typed" not in text
    assert f"of {serving.VARIABLE}" in text and "of --token" in text


def test_chat_answers_line_by_line_until_an_empty_one(run_folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n/new\nhello\n\nnever read\n"))
    how = ["--max-tokens", "6", "--seed", "3", "--temperature", "0", "--system", "Be brief."]
    assert cli.main(["chat", str(run_folder), *how, "--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("> ") == 5 and said.endswith("\n")
    first, _, _, again, _ = [answer.split("\n")[0] for answer in said.split("> ")[1:]]
    assert first == again, "greedy, and a new conversation each"


def test_a_model_without_a_chat_template_shows_what_it_was_trained_on_and_stops_as_in_training(
    run_folder, monkeypatch, capsys, tmp_path
):
    run_folder = shutil.copytree(run_folder, tmp_path / "run")
    (run_folder / "model" / "chat_template.jinja").unlink()
    rows = [["a.jsonl:1", [["prompt", "say a:\nnow"], ["sampled", "…"]]], ["a.jsonl:2", [["prompt", "say b:"]]]]
    (run_folder / "events.jsonl").write_text(json.dumps({"kind": "first_rows", "rows": rows}) + "\n")
    (run_folder / "config.json").write_text('{"sampling": {"max_completion_length": 5}}')
    found = terminal_chat.read_training(str(run_folder / "model"))
    assert found == terminal_chat.Training(("say a:\\nnow", "say b:"), 5) == terminal_chat.read_training(str(run_folder))
    asked, call = [], Served.call
    monkeypatch.setattr(Served, "call", lambda self, *given: asked.append(given[-1]["max_tokens"]) or call(self, *given))
    for words in ([], ["--max-tokens", "7"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n"))
        assert cli.main(["chat", str(run_folder), "--threads", "1", *words]) == 0
        assert "trained on prompts such as:\n  say a:\\nnow\n  say b:\n> " in capsys.readouterr().out
    assert asked == [5, 7]
    (run_folder / "events.jsonl").write_text('{"kind": "first_rows", "rows": [["torn"], 3]}\n')
    assert terminal_chat.read_training(str(run_folder)) == terminal_chat.Training(), "a damaged line"
    (run_folder / "events.jsonl").unlink()
    assert terminal_chat.read_training(str(run_folder)) == terminal_chat.Training() == terminal_chat.read_training("hub/name")


def test_help_is_there(capsys):
    for command in ("serve", "chat"):
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([command, "--help"])
        said = capsys.readouterr().out
        assert f"psigrad {command} MODEL_OR_RUN" in said and "--device DEVICE  " in said, "the model's flags too"


@pytest.mark.parametrize("most", [0, -1])
def test_a_batch_that_nothing_fits_into_is_refused(small_model, most):
    with pytest.raises(UserError, match=f"max_batch is {most}; expected at least 1"):
        SamplingEngine(small_model, most)


@pytest.mark.parametrize(("flag", "value", "said"), [("threads", "-1", "at least 0"), ("dtype", "int4", "'float32' or")])
def test_a_bad_value_is_said_as_by_every_command(run_folder, capsys, flag, value, said):
    assert cli.main(["serve", str(run_folder), f"--{flag}", value]) == 2
    assert f"{flag} is" in (told := capsys.readouterr().err) and said in told
