"""A small model behind the gateway, for the whole folder: `served` is asked as its clients ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Completion, Request, Sampler, SamplingParams
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Call, Recorder, Served
from psigrad_serve.serving import Running, running


class Told(NamedTuple):
    """What a recorder is given."""

    session: str
    call: Call
    completion: Completion
    reason: str
    choice: int


@dataclass
class Heard(Recorder):
    """Keeps what it is told."""

    completions: list[Told] = field(default_factory=list)
    prepared: Callable[[str, Call], Call] = lambda session, call: call

    def prepare(self, session_id: str, call: Call) -> Call:
        """As a test has it."""
        return self.prepared(session_id, call)

    def on_completion(self, *told: Any) -> None:
        """Keep it."""
        self.completions.append(Told(*told))


@dataclass
class Behind:
    """A gateway, and what is behind it."""

    model: LanguageModel
    engine: SamplingEngine
    heard: Heard
    at: Running

    def sampled(self, prompt: Any, seed: int, **params: Any) -> Completion:
        """What the in-process sampler gives."""
        return EmbeddedSampler(self.model).sample([Request(tuple(prompt), (seed,))], SamplingParams(**params))[0][0]


@pytest.fixture(scope="session")
def small_model() -> LanguageModel:
    tokenizer = tiny.tokenizer(["the quick brown fox jumps over the lazy dog 0123456789"] * 5, 320)
    tokenizer.chat_template = CHATML
    model = prepare(tiny.model("qwen3", len(tokenizer), max_length=1024), tokenizer)
    with torch.no_grad():
        for p in model.network.parameters():
            p.mul_(2)
    return model


class Scripted(Sampler):
    """Writes `text`, whatever it is asked, and ends."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""

    def steps(self, requests: list[Request], params: SamplingParams, cache: Any = None) -> Iterator[Any]:
        """See `Sampler`."""
        ids = (*self.tokenizer(self.text)["input_ids"], self.tokenizer.eos_token_id)[: params.max_tokens]
        end = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        zeros = (0.0,) * len(ids)
        yield [(i, [Completion(ids, zeros, zeros, end, seed) for seed in r.seeds]) for i, r in enumerate(requests)]


@dataclass
class Actor:
    """A gateway whose model says what `says` is told."""

    scripted: Scripted
    heard: Heard
    at: Running

    def says(self, text: str) -> None:
        """From now on."""
        self.scripted.text = text


@pytest.fixture(scope="session")
def actor(small_model):
    heard, scripted = Heard(), Scripted(small_model.tokenizer)
    engine = SamplingEngine(small_model, sampler=scripted)
    with running(Served(engine, ("tiny",), heard)) as at:
        yield Actor(scripted, heard, at)
    engine.close()


@pytest.fixture(scope="session")
def served(small_model):
    engine, heard = SamplingEngine(small_model, max_batch=8), Heard()
    with running(Served(engine, ("tiny", "small"), heard)) as at:
        yield Behind(small_model, engine, heard, at)
    engine.close()


def _openai_client(at: Running) -> Any:
    import openai  # its tests are left out where it is missing

    return openai.OpenAI(base_url=f"{at.url}/v1", api_key=at.token, max_retries=0)


@pytest.fixture(scope="session")
def client(served):
    """The openai package's client of `served`."""
    with _openai_client(served.at) as made:
        yield made


@pytest.fixture(scope="session")
def acting(actor):
    """The openai package's client of `actor`."""
    with _openai_client(actor.at) as made:
        yield made
