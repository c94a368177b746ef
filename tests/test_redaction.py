"""Secrets are in no file of a run, whichever way they came in."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from planted_secrets import CHANNELS, PLANTED, found_in
from tiny_jobs import online_config

from psigrad import redaction
from psigrad.cli import main
from psigrad.control import builder, run
from psigrad.errors import UserError
from psigrad.language.recipes import evaluate, online
from psigrad.language.rewards import code
from psigrad.processes.workers import worker_pool
from psigrad.records.run_folder import RunFolder
from psigrad.runs.journal import Journal

REWARD = """import os


def mine(completions, **columns):
    raise ValueError(f"https://me:hunter2pass@judge.example/?api_key=q9w8e7r6t5 said no to {os.environ['JUDGE_SECRET']}")
"""


@pytest.mark.parametrize("share", [1.0, 0.0], ids=["to its end", "failed"])
def test_no_file_of_a_run_holds_a_planted_secret(share, job, tmp_path, monkeypatch, capfd):
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.setenv("JUDGE_SECRET", PLANTED["variable"])
    monkeypatch.setattr(sys, "argv", ["psigrad", "grpo", "--hub-token", PLANTED["flag"], f"--x=https://u:{PLANTED['url']}@h/"])
    made = online_config(job, tmp_path / "run", report=True, max_steps=1)
    url = f"https://me:{PLANTED['url']}@sandbox.example/run?token={PLANTED['query']}"
    made = replace(made, reward=(f"{tmp_path / 'mine.py'}:mine",), worker_env=("JUDGE_SECRET", url))
    made = replace(made, max_unscored=share, evaluation=replace(made.evaluation, eval_prompts=0))
    if share:
        online.run(made)
    else:
        with pytest.raises(UserError):
            online.run(made)
    assert (tmp_path / "run" / "report.html").exists() is bool(share)
    assert found_in(tmp_path / "run") == set()
    assert "JUDGE_SECRET" in (tmp_path / "run" / "config.json").read_text(), "names are no secrets"


def test_a_run_of_control_holds_none_either(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_PASSWORD", PLANTED["variable"])

    def env(api_key="", note=""):
        import gymnasium

        return gymnasium.make("CartPole-v1")

    class Says:
        def on_train_begin(self, *given, **also):
            raise ValueError(f"Authorization: Bearer {PLANTED['bearer']} and {PLANTED['token']} and {PLANTED['variable']}")

    given = {"n_steps": 16, "n_envs": 1, "total_timesteps": 32, "batch_size": 16, "progress": False}
    given |= {"env_kwargs": {"api_key": PLANTED["key"], "note": PLANTED["variable"]}, "eval_episodes": 0}
    for callbacks in ((Says(),), ()):
        output = tmp_path / f"run{len(callbacks)}"
        config = builder.settings("ppo", env, {**given, "output_dir": str(output), "callbacks": callbacks})
        if callbacks:
            with pytest.raises(UserError):
                run.run(config)
        else:
            run.run(config)
        assert found_in(output) == set()


def test_settings_and_exceptions_hold_none_by_whichever_channel(tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_API_KEY", PLANTED["variable"])
    with RunFolder.open(tmp_path / "run", CHANNELS) as folder:
        folder.event("failed", reason=f"ConnectionError: {json.dumps(CHANNELS)}", traceback=f"raise E('{CHANNELS['teacher']}')")
        folder.rollouts([{"step": 1, "reason": f"mcp: {CHANNELS['tools'][0]}: exit 1"}])
        told = json.dumps(folder.settings)  # which trackers are given
    assert found_in(tmp_path / "run") == set() and not [value for value in PLANTED.values() if value in told]
    assert '"serve", "--auth-token", "***", "-password", "***", 3' in told and "X-Amz-Credential=***" in told


def test_what_an_evaluation_writes_holds_none(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_SECRET", PLANTED["variable"])
    evaluate.Report({}, [], [], settings=CHANNELS).save(str(tmp_path / "evaluation.json"))
    assert not [value for value in PLANTED.values() if value in (tmp_path / "evaluation.json").read_text()]


def test_no_line_for_people_holds_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JUDGE_SECRET", PLANTED["variable"])
    with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
        Journal(folder).log("warned", f"The judge said {PLANTED['variable']}.")
    assert main(["report", PLANTED["variable"]]) == 2
    said = capsys.readouterr().err
    assert said.count("***") == 2 and not [value for value in PLANTED.values() if value in said]


def test_what_a_secret_is_called_and_a_variable_that_is_set_later(tmp_path, monkeypatch):
    with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
        for number, name in enumerate(("DB_PASS", "SSH_PASSPHRASE", "MYSQL_PWD", "GITHUB_PAT", "MY_API_KEY")):
            monkeypatch.setenv(name, f"correct-horse-{number}")  # as a reward's module does when it reads a .env file
            folder.event("failed", reason=f"said correct-horse-{number}", settings={"passphrase": "open sesame"})
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert "correct-horse" not in said and "sesame" not in said and said.count("***") == 10
    for name in ("PWD", "OLDPWD", "PASSES", "COMPASS", "PATH", "PATTERN"):
        assert not redaction.SECRET_NAME.search(name)


def test_a_flag_of_a_command_in_words_hides_what_follows_it():
    given = ["serve", "--pass", "abc", "--db-pwd", "x", "--author", "me"]
    assert redaction.hide(given) == ["serve", "--pass", "***", "--db-pwd", "***", "--author", "me"]


def test_no_control_character_of_a_text_reaches_the_terminal(tmp_path, capsys):
    """A reward whose error quotes a completion that would set the terminal's title and clear the screen."""
    (tmp_path / "quotes.py").write_text("def reward(completions, **more):\n    raise ValueError(completions[0])\n")
    row = {"prompt": "p", "completion": "\x1b]0;GOT\x07\x1b[2J\u202etext\nmore", "answer": "a"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    main(["score", "--dataset", str(tmp_path / "rows.jsonl"), "--reward", f"{tmp_path}/quotes.py:reward"])
    said = capsys.readouterr().err
    assert "GOT" in said and "\\x1b[2J" in said
    assert all(character.isprintable() or character in "\n\t" for character in said)


def test_what_a_worker_prints_sets_no_title_and_clears_no_screen(capfd):
    """By hand; a character may come in two parts, and a progress bar goes back to the start of its line."""
    read, write = os.pipe()
    forward = threading.Thread(target=worker_pool._forward, args=(read, "a worker"))
    forward.start()
    for part in (b"\x1b]52;c;GOT\x07 10%\r20% \xc3", b"\xa9\xff\tdone\n"):
        os.write(write, part)
    os.close(write)
    forward.join()
    assert capfd.readouterr().err == "\\x1b]52;c;GOT\\x07 10%\r20% é\\xff\tdone\n"


def test_the_command_line_says_none(tmp_path, capsys):
    assert main(["report", f"https://me:{PLANTED['url']}@host/run"]) == 2
    said = capsys.readouterr().err
    assert PLANTED["url"] not in said and "***@host" in said


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://u:p@ss@host/a", "https://***@host/a"),
        ("https://host/a?x=1&access_token=abc&y=2", "https://host/a?x=1&access_token=***&y=2"),
        ("--service-token abc --steps 3", "--service-token *** --steps 3"),
        ("env_kwargs.api_key=abc other=1", "env_kwargs.api_key=*** other=1"),
        ('{"password": "a b", "n": 1}', '{"password": "***", "n": 1}'),
        (f"with {PLANTED['token']}.", "with ***."),
        ("sk-proj-Ab1Ab1Ab1Ab1Ab1Ab1-x_y eyJhbGci.eyJzdWIiOiIxMjM0NTY3.a-b_c end", "*** *** end"),
        ("--hub-token 'a b$' --steps 3", "--hub-token *** --steps 3"),
        ("api_key='a b' other=1", "api_key=*** other=1"),
        ("env OPENAI_KEY=abc DB_PASS='a b' python shop.py", "env OPENAI_KEY=*** DB_PASS=*** python shop.py"),
        ("Command '['x', '--api-key', 'a b', '-n']' died", "Command '['x', '--api-key', '***', '-n']' died"),
        ("glpat-" + "Ab1" * 7 + " gsk_" + "Ab1" * 8, "*** ***"),
        ("Authorization: Basic YWxhZGRpbjpvcGVu", "Authorization: Basic ***"),
        ("X-Api-Key: abc123def, password: hunter2pass", "X-Api-Key: ***, password: ***"),
        ("mcp:serve --pass abc --db-pwd=x1 -auth 'a b' --path p", "mcp:serve --pass *** --db-pwd=*** -auth *** --path p"),
        ("died of ['serve', '--smtp-pass', 'abc']", "died of ['serve', '--smtp-pass', '***']"),
        (
            "s --key a --signing-key=b --pw c --creds d --jwt e DB_PW=f",
            "s --key *** --signing-key=*** --pw *** --creds *** --jwt *** DB_PW=***",
        ),
        (
            "mcp:s -u me:abc --user=me:abc -H 'X-Auth-Token: a b' -n 3",
            "mcp:s -u me:*** --user=me:*** -H 'X-Auth-Token: ***' -n 3",
        ),
        # what is none
        ("--bypass 1 --pass-through x --author me --auth --steps 3", None),
        ("sort_key=name bypass=1 N_KEYS=3 MONKEY=1", None),
        ("--user me --keys 3 --monkey 1 -u 3 -H 'Content-Type: application/json'", None),
        ("the password: at least 12 characters", None),
        ("pad_token=<pad> max_tokens=5 --record-tokens 4", None),
        ("mail me@host, see https://host/@me", None),
        ("the token that was drawn: 17", None),
        ("--eos-token <|im_end|> --pad-token=<pad> eot_token=<|eot|>", None),
        ("runs/hf_baseline_qwen3_lr1e-5 sk-learn-classifier-v1-abc", None),
        ("the bearer certificate at https://host?mail=a@b", None),
    ],
)
def test_texts_lose_what_looks_like_a_secret_and_nothing_else(text, left):
    assert redaction.hide(text) == (text if left is None else left)


def test_settings_lose_values_under_secret_names_and_nothing_else():
    plain = {"model": {"pad_token": "<pad>", "path": "a"}, "max_tokens": 5, "worker_env": ["API_KEY"], "api_key_variable": "A"}
    assert redaction.hide(plain) == plain
    assert redaction.hide({"env_kwargs": {"api_key": "x", "token": "y", "hub_token": "", "n": [1]}}) == {
        "env_kwargs": {"api_key": "***", "token": "***", "hub_token": "", "n": [1]}
    }


def test_rows_of_the_data_are_told_as_the_model_reads_them(tmp_path):
    rows = [["row 1", [["prompt", "call(token='cat', api_key=None)"]]]]
    with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
        folder.event("first_rows", rows=rows)
        folder.event("failed", reason="token='cat'")
    shown, failed = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert shown["rows"] == rows and failed["reason"] == "token=***"


def test_short_values_and_paths_of_variables_are_left(monkeypatch, tmp_path):
    for name in [n for n in list(redaction.os.environ) if redaction.SECRET_NAME.search(n)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("A_TOKEN", "false")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path))
    monkeypatch.setenv("B_TOKEN", 'quoted"secret')
    for name in ("GIT_AUTHOR_NAME", "EOS_TOKEN", "MAX_TOKENS"):
        monkeypatch.setenv(name, "innocent")
    assert (
        redaction.without(json.dumps({"a": 'false innocent quoted"secret'}).encode(), redaction.values())
        == b'{"a": "false innocent ***"}'
    )


def test_values_are_found_as_either_writer_of_json_writes_them_and_a_word_that_a_file_is_called_is_no_path(monkeypatch, tmp_path):
    for name in [n for n in list(redaction.os.environ) if redaction.SECRET_NAME.search(n)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hunter2pass").touch()
    monkeypatch.setenv("MY_PASSWORD", "hunter2pass")
    monkeypatch.setenv("MY_SECRET", "pässwörd-71")
    for plain in (True, False):
        line = json.dumps({"a": "pässwörd-71 hunter2pass"}, ensure_ascii=plain).encode()
        assert redaction.without(line, redaction.values()) == b'{"a": "*** ***"}'


def test_a_sandbox_services_token_is_read_from_the_variable_that_is_named(monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "let me in")
    asked = []
    monkeypatch.setattr(code, "executor_for", lambda url, **given: asked.append((url, given)) or None)
    reward = code.Code(service="https://sandbox.example", service_token_variable="SANDBOX_TOKEN")
    with pytest.raises(AttributeError):  # there is no executor
        reward(["x"], tests=[["assert f() == 1"]])
    assert asked == [("https://sandbox.example", {"token": "let me in", "allow_unsafe_code": False})]


def test_a_line_for_people_holds_no_secret_and_no_other_place_writes_such_lines(capsys, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    redaction.say("the server refused correct-horse-battery and --api-key 12ab34cd56ef")
    redaction.log("data", "refused hf_abcdefghijklmnopqrst", rows=3)
    assert capsys.readouterr().err.splitlines() == [
        "psigrad: the server refused *** and --api-key ***",
        "psigrad: refused ***",
    ]
    packages = [Path(__file__).parents[1] / "psigrad", Path(__file__).parents[1] / "psigrad_extras"]
    prints = re.compile(r'print\((?:f?"psigrad: |text|line)[^\n]*\{[^\n]*file=sys\.stderr')
    found = {
        str(f.relative_to(p.parent))
        for p in packages
        for f in p.rglob("*.py")
        if f.name != "redaction.py" and prints.search(f.read_text())
    }
    # numbers and names that psigrad makes itself
    assert found == {"psigrad/cli/__init__.py", "psigrad/processes/parallel/launch.py"}
