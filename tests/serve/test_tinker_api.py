"""What the Tinker API does between its client's calls: engines of weights, stop strings, and how its models are loaded."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from psigrad import cli
from psigrad.language.rollout.types import DrawnToken
from psigrad_serve import serving
from psigrad_serve.engine.streams import TokenStream
from psigrad_serve.tinker_api import TinkerServer
from psigrad_serve.tinker_models import TinkerModel


class Message(SimpleNamespace):
    """The client's message of samples, as far as it is written here."""

    def __init__(self):
        super().__init__(sequences=self)
        self.made = []

    def add(self):
        self.made.append(SimpleNamespace())
        return self.made[-1]


WORDS = SimpleNamespace(SampleResponse=Message, STOP_REASON_STOP="stop", STOP_REASON_LENGTH="length")


@pytest.fixture
def base(small_model, tmp_path):
    small_model.save(tmp_path / "base")
    return str(tmp_path / "base")


def test_a_state_saved_again_under_one_name_is_sampled_from_its_own_weights(base, tmp_path, monkeypatch):
    server = TinkerServer(base, "tiny", tmp_path / "states", messages=WORDS)
    trained = server.models["m"] = TinkerModel.fresh(base, 2, seed=0)
    name, weight = next(iter(trained.model.trainable().items()))

    async def numbers():
        found = []
        for n in range(1, 6):
            with torch.no_grad():
                weight.fill_(n)
            body = {"model_id": "m", "path": "latest", "seq_id": n}
            saved = await server.futures[server._save(body, "sampler_weights", optimizer=False)["request_id"]]
            engines = [await server._engine(saved["path"]) for _ in range(2)]
            assert engines[0] is engines[1], "control: what was not saved again is open"
            found.append(engines[0].model.trainable()[name].flatten()[0].item())
        return found

    assert asyncio.run(numbers()) == [1, 2, 3, 4, 5]
    assert len(server.engines) == 4
    server.close()


class Typist:
    """An engine that writes its text a token at a time, for as long as it is wanted."""

    def __init__(self, tokenizer, text):
        self.model = SimpleNamespace(tokenizer=tokenizer, max_length=1024)
        self.ids, self.streams, self.gone, self.tasks = tokenizer(text)["input_ids"], [], [], []
        self.close = list

    def submit(self, prompt, params, seed):
        held = threading.Condition(), asyncio.get_running_loop()
        self.streams.append(TokenStream(tuple(prompt), seed, params, 0, self.gone.append, *held))
        self.tasks.append(asyncio.create_task(self.write(self.streams[-1])))
        return self.streams[-1]

    async def write(self, stream):
        for token in self.ids:
            if stream.ended or stream in self.gone:
                return
            stream.add(DrawnToken(token, -1.0, -1.0), ())
            stream.news.set()
            await asyncio.sleep(0.001)
        stream.end("stop")
        stream.news.set()


TEXT = "the quick brown fox jumps over the lazy dog " * 4
FOX = "the quick brown fox"


def sampled(tokenizer, tmp_path, monkeypatch, **asked):
    """(the message's samples, the streams that they were drawn in)."""
    server, typist = TinkerServer("base", "tiny", tmp_path, messages=WORDS), Typist(tokenizer, TEXT)

    async def made():
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
        return await server._sampled("", {"prompt": prompt, "num_samples": 2, "sampling_params": {"seed": 1, **asked}})

    server.engines["@0"] = typist  # of the base model
    found = asyncio.run(made()).made
    server.close()
    return [(one.stop_reason, np.frombuffer(one.tokens, np.int32).tolist()) for one in found], typist


def test_a_stop_string_ends_the_drawing_and_not_the_text_alone(small_model, tmp_path, monkeypatch):
    tokenizer = small_model.tokenizer
    ids = tokenizer(TEXT)["input_ids"]
    count = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith(FOX))
    assert len(ids) > 3 * count, "control: the text goes on for long"
    found, typist = sampled(tokenizer, tmp_path, monkeypatch, stop=["brown fox"])
    assert found == [("stop", ids[:count])] * 2 and typist.gone == typist.streams
    assert max(len(stream.tokens) for stream in typist.streams) < 2 * count
    # complete with the last token that may be drawn, and one before that
    assert sampled(tokenizer, tmp_path, monkeypatch, stop="brown fox", max_tokens=count)[0] == [("stop", ids[:count])] * 2
    assert (
        sampled(tokenizer, tmp_path, monkeypatch, stop="brown fox", max_tokens=count - 1)[0] == [("length", ids[: count - 1])] * 2
    )
    assert sampled(tokenizer, tmp_path, monkeypatch)[0] == [("stop", ids)] * 2


@pytest.fixture
def tinker(monkeypatch):
    """The package's messages, where it is not installed."""
    package = SimpleNamespace(tinker_public_pb2=WORDS)
    for name, held in (("tinker", SimpleNamespace(proto=package)), ("tinker.proto", package)):
        monkeypatch.setitem(__import__("sys").modules, name, held)


def test_dtype_and_remote_code_are_those_of_every_model_that_is_loaded(base, tmp_path, tinker, monkeypatch):
    servers, seen = [], []
    monkeypatch.setattr(serving, "serve", lambda served, listening, *_: servers.append(served) or listening.close())
    words = ["serve", base, "--tinker", "--dtype", "bfloat16", "--trust-remote-code", "--state", str(tmp_path / "states")]
    assert cli.main([*words, "--device", "cpu", "--threads", "1", "--max-batch", "3"]) == 0
    (server,) = servers
    from psigrad_serve.tinker_api import language_model

    load = language_model.load
    monkeypatch.setattr(language_model, "load", lambda *given, **how: seen.append(how) or load(*given, **how))
    engine, trained = server._open(""), TinkerModel.fresh(server.base, 2, 0, **server.how)
    trained.save(server.folder / "m" / "weights" / "one", optimizer=False)
    adapted = server._open("tinker://m/weights/one")
    assert {made.network.dtype for made in (engine.model, trained.model, adapted.model)} == {torch.bfloat16}
    assert [(how["trust_remote_code"], how["device"]) for how in seen] == [(True, "cpu")] * 3 and adapted.max_batch == 3
    assert all(p.dtype == torch.float32 for p in trained.model.trainable().values()), "the adapter is trained in full"


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--sampler", "transformers"], "--tinker does not take --sampler transformers"),
     (["--chat-template-path", "x.jinja"], "--tinker does not take --chat-template-path x.jinja"),
     (["--name", "a", "b"], "--tinker got the names a, b"), (["--dtype", "int4"], "dtype is"),
     (["--threads", "-1"], "threads is")],
    ids=" ".join,
)  # fmt: skip
def test_what_the_tinker_api_does_not_take_is_refused(base, flags, said, tinker, monkeypatch, capsys):
    monkeypatch.setattr(serving, "serve", lambda served, listening, *_: listening.close())
    assert cli.main(["serve", base, "--tinker", *flags]) == 2
    assert said in capsys.readouterr().err
