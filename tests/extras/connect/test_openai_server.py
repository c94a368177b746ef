"""A server as sampler, against a stand-in that answers in OpenAI's forms: what is asked, what is read, and what goes wrong."""

from __future__ import annotations

import json
import threading

import pytest
from stand_in_server import chat, plain, standing_in

from psigrad.cli import main
from psigrad.config import Data, EvalConfig, Evaluation, Model, Run, SampleConfig, Sampling
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.recipes import evaluate
from psigrad.language.rollout.types import SamplingParams
from psigrad_extras.connect import openai_server as module
from psigrad_extras.connect.openai_server import UNKNOWN, ServedModel
from psigrad_extras.datasets import sample

CHAT = Row("a chat", prompt=[{"role": "user", "content": "2 + 2?"}])
TEXT = Row("a text", prompt="2 + 2 =")
PARAMS = SamplingParams(max_tokens=7, temperature=0.5)


def asked(url: str, rows=(CHAT,), seeds=((5,),), params=PARAMS, **settings):
    made = ServedModel(url, **{"attempts": 3, "seconds": 5.0, **settings})
    return {(i, k): reply for i, k, reply in made.completions(list(rows), list(seeds), params)}


def test_conversations_and_texts_are_asked_in_their_own_ways(monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "secret")
    said = lambda n, body: chat("4", [-0.25, -0.5], 2) if "messages" in body else plain("5", [-1.0], 9, "length")  # noqa: E731
    with standing_in(said) as (url, seen):
        found = asked(url, (CHAT, TEXT), ((5, 6), (7,)), key_variable="OTHER_KEY", concurrency=1)
    assert sorted(found) == [(0, 0), (0, 1), (1, 0)]
    first, text = found[0, 0], found[1, 0]
    assert first.text == "4" and first.completion.ids == (UNKNOWN,) * 2 and first.completion.finish_reason == "stop"
    assert first.completion.logprobs == first.completion.sampling_logprobs == (-0.25, -0.5) and first.completion.seed == 5
    assert text.text == "5" and len(text.completion.ids) == 9 and text.completion.finish_reason == "length"
    paths = [request["path"] for request in seen]
    assert paths == ["/v1/chat/completions"] * 2 + ["/v1/completions"]
    assert {request["key"] for request in seen} == {"Bearer secret"} and [r["seed"] for r in seen] == [5, 6, 7]
    assert seen[0]["messages"] == CHAT.prompt and seen[2]["prompt"] == "2 + 2 ="
    assert {(r["model"], r["max_tokens"], r["temperature"], r["top_p"]) for r in seen} == {("small", 7, 0.5, 1.0)}
    assert not any({"top_k", "min_p", "stop_token_ids", "tools"} & set(r) for r in seen), "what OpenAI's API has not is left out"


def test_what_is_beyond_openais_api_is_sent_when_it_was_asked_for():
    params = SamplingParams(max_tokens=2, top_k=5, min_p=0.1, stop_token_ids=(3,))
    row = Row("a chat", prompt=CHAT.prompt, columns={"tools": json.dumps([{"type": "function"}])})
    with standing_in(lambda n, body: chat("x")) as (url, seen):
        asked(f"{url}/v1/", (row,), params=params, model="small")
    assert (seen[0]["top_k"], seen[0]["min_p"], seen[0]["stop_token_ids"]) == (5, 0.1, [3])
    assert seen[0]["tools"] == [{"type": "function"}] and seen[0]["path"] == "/v1/chat/completions"


def test_calls_and_tools_are_sent_in_openais_form():
    """Arguments are JSON text there, a message has no weight, and a tool none of the nulls that Parquet adds."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 2}}}
    turns = [{"role": "user", "content": "f?"}, {"role": "assistant", "weight": 0, "tool_calls": [call]}]
    answer = {"role": "tool", "tool_call_id": "1", "content": "4"}
    row = Row("a chat", prompt=[*turns, answer], columns={"tools": [{"type": "function", "strict": None}]})
    with standing_in(lambda n, body: chat("x")) as (url, seen):
        asked(url, (row,))
    sent = {**call, "function": {"name": "f", "arguments": '{"x": 2}'}}
    assert seen[0]["messages"] == [turns[0], {"role": "assistant", "content": None, "tool_calls": [sent]}, answer]
    assert seen[0]["tools"] == [{"type": "function"}]


@pytest.mark.parametrize(
    ("refusal", "left_out", "has"),
    [
        ("This model does not support logprobs", "logprobs", "max_tokens"),
        ("Unknown parameter: 'seed'", "seed", "logprobs"),
        ("'max_tokens' is not supported, use 'max_completion_tokens' instead", "max_tokens", "max_completion_tokens"),
    ],
)
def test_what_a_server_does_not_take_is_left_out(refusal, left_out, has):
    def said(n, body):
        error = json.dumps({"error": {"message": refusal}})
        return (400, error) if left_out in body else chat("x", None, 1)

    with standing_in(said) as (url, seen):
        found = asked(url, seeds=((1, 2, 3),), concurrency=1)
    assert len(found) == 3 and all(reply.completion.logprobs == () for reply in found.values())
    assert len(seen) == 4 and has in seen[-1], "it is refused once, and not asked for again"


def test_a_busy_server_is_asked_again_after_the_time_that_it_names(monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    with standing_in(lambda n, body: (429, "slow down", {"Retry-After": "3"}) if n < 3 else chat("x")) as (url, seen):
        assert asked(url, model="small")[0, 0].text == "x"
    assert waits == [3.0, 3.0] and len(seen) == 3


@pytest.mark.parametrize(
    ("answer", "settings", "sentence", "requests"),
    [
        ((503, "down"), {}, r"gave no completion in 3 attempts \(HTTP 503 Service Unavailable: down\)", 3),
        (
            (401, '{"error": {"message": "bad key"}}'),
            {},
            r"refuses the key \(HTTP 401 .*bad key\); .* OPENAI_API_KEY is not set",
            1,
        ),
        ((404, "no"), {"model": "smal"}, r"has no model 'smal'; it has small; did you mean 'small'", 1),
        ((400, "too long"), {}, r"gave no completion \(HTTP 400 Bad Request: too long\)", 1),
        ({"choices": []}, {}, r"does not answer in OpenAI's format \(IndexError\)", 1),
        ({"choices": [{"message": {"content": "x"}, "logprobs": {"content": [{}]}}]}, {}, "answer in OpenAI's format", 1),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence(answer, settings, sentence, requests, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with standing_in(lambda n, body: answer) as (url, seen), pytest.raises(UserError, match=sentence):
        asked(url, **{"model": "small", **settings})
    assert len(seen) == requests


def test_a_server_that_is_not_there_or_hangs_or_serves_several_models_is_said_too(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(
        UserError, match=r"http://127\.0\.0\.1:9/v1 gave no completion in 3 attempts \(the request failed: Connection.*refused"
    ):
        asked("http://127.0.0.1:9")
    with pytest.raises(UserError, match="must begin with http"):
        asked("localhost:8000")
    with (
        standing_in(lambda n, body: over.wait(60) and chat("x")) as (url, _),
        pytest.raises(UserError, match=r"the request failed in 0\.2 s: .*timed out"),
    ):
        asked(url, model="small", seconds=0.2, attempts=1)
    over.set()
    with (
        standing_in(lambda n, body: chat("x"), models=("a", "b")) as (url, _),
        pytest.raises(UserError, match=r"2 models \(a, b\)"),
    ):
        asked(url)


@pytest.mark.parametrize("told", [[], "ok", None, {"data": None}, {"data": ["small"]}])
def test_a_server_that_tells_of_its_models_in_another_form_is_said_too(told, monkeypatch):
    monkeypatch.setattr(module, "ask", lambda url, body=None, **how: told)
    with pytest.raises(UserError, match="serves 0 models; name one with --model"):
        asked("http://127.0.0.1:9")


def sums(tmp_path, count: int = 4) -> str:
    rows = [{"prompt": [{"role": "user", "content": f"{n} + {n}?"}], "answer": str(2 * n)} for n in range(count)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "sums.jsonl")


def counts(n, body):
    """Right where the seed is even."""
    number = int(body["messages"][0]["content"].split()[0])
    return chat(str(2 * number) if body["seed"] % 2 == 0 else "no idea", [-0.5], 1)


@pytest.mark.parametrize("plain", [False, True])
def test_plain_prompts_go_to_a_server_as_a_user_turn_unless_they_are_asked_for(plain, tmp_path, capsys):
    (tmp_path / "plain.jsonl").write_text(json.dumps({"question": "2 + 2 =", "answer": "4"}))
    data = Data(dataset=str(tmp_path / "plain.jsonl"), columns="question=prompt", plain_prompts=plain)

    def four(n, body):
        return {"choices": [{"text": "4", "finish_reason": "stop"}]} if "prompt" in body else chat("4", [-0.5], 1)

    with standing_in(four) as (url, seen):
        out, own = tmp_path / "out.jsonl", Evaluation(eval_prompts=0, num_generations_eval=1)
        sample.run(SampleConfig(server=url, data=data, run=Run(threads=1), evaluation=own, output=str(out)))
    sent = seen[0].get("prompt") if plain else seen[0].get("messages")
    assert sent == ("2 + 2 =" if plain else [{"role": "user", "content": "2 + 2 ="}])
    row = json.loads(out.read_text())
    assert (row["prompt"], row["completion"], row["answer"]) == ("2 + 2 =", "4", "4"), "rows are written as they came"
    assert ("is sent as a user turn" in capsys.readouterr().err) != plain


def test_evaluation_best_of_n_and_samples_come_from_a_server(tmp_path):
    shared = {"data": Data(dataset=sums(tmp_path)), "run": Run(threads=1), "reward": ("exact",), "sampling": Sampling(8)}
    six = Evaluation(eval_prompts=0, num_generations_eval=6)
    with standing_in(counts) as (url, seen):
        every = evaluate.run(EvalConfig(server=url, evaluation=six, **shared))
        best = evaluate.run(EvalConfig(server=url, best_of=6, evaluation=Evaluation(eval_prompts=0, metric="exact"), **shared))
        out = str(tmp_path / "out.jsonl")
        sample.run(SampleConfig(server=url, evaluation=six, output=out, **shared))
        pairs = sample.run(SampleConfig(server=url, evaluation=six, keep="pairs", output=str(tmp_path / "pairs.jsonl"), **shared))
    right = [t.completion.seed % 2**31 % 2 == 0 for t in every.trajectories]
    assert [t.reward for t in every.trajectories] == [float(one) for one in right] and 0 < sum(right) < 24
    assert every.figures["eval/exact/mean"] == pytest.approx(sum(right) / 24) and "eval/pass@4" in every.figures
    groups = [right[i : i + 6] for i in range(0, 24, 6)]
    assert best.figures["eval/exact/mean"] == sum(map(any, groups)) / 4
    assert len({request["seed"] for request in seen[:24]}) == 24 and len(seen) == 96
    written = sample.read_rows(out)
    assert len(written) == 24 and {row["logprob"] for row in written} == {-0.5}
    assert written[0]["completion"][0]["role"] == "assistant" and pairs.rows + pairs.ties == 4


def test_the_command_line_takes_a_server_and_says_what_it_cannot(tmp_path, capsys):
    with standing_in(counts) as (url, _):
        assert main(["eval", "--server", url, "--dataset", sums(tmp_path), "--reward", "exact", "--eval-temperature", "0"]) == 0
    assert "exact/mean" in capsys.readouterr().out
    for more, said in ((["--environment", "guess"], "need a local model"), (["--eval-kl"], "There is no flag --eval-kl")):
        given = ["eval", "--server", "http://127.0.0.1:9", "--dataset", sums(tmp_path), "--reward", "exact", *more]
        assert main(given) != 0 and said in capsys.readouterr().err
    assert not EvalConfig().server and Model().path == ""
