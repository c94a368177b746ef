"""Completions from a model behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp or a commercial one).

Requests and replies are text: the server applies its own chat template and tokenizer. So such a model can be evaluated, and its
completions written to a file, but no policy can be trained on its samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from psigrad.errors import UserError, nearest
from psigrad.language.data.chat.dialect import Dialect, rewrite
from psigrad.language.data.chat.rendering import tools_of
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.image_rows import to_data_urls
from psigrad.language.rollout.types import Completion, FinishReason, SamplingParams
from psigrad_extras.connect.endpoint import NoAnswerError, ask, repeat

T = TypeVar("T")
UNKNOWN = -1
"""The id of every token of a completion, since a server returns only their number."""
# The fields that may be omitted if a server rejects them.
_OPTIONAL = ("logprobs", "seed")


@dataclass(frozen=True)
class Reply:
    """A completion as text.

    The field `completion` has `UNKNOWN` as each token's id, and log-probs if the server returned them.
    """

    text: str
    completion: Completion


@dataclass
class ServedModel:
    """A client of the server at `url` for completions by `model` ("": the only one that it serves).

    At most `concurrency` requests run at once. `key_variable` names the environment variable with the API key. A request may take
    `seconds`, and is tried `attempts` times if the server is busy, unreachable or fails.
    """

    url: str
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"
    seconds: float = 600.0
    attempts: int = 5
    concurrency: int = 16
    _refused: set[str] = field(default_factory=set)
    """The fields that this server rejects."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"The server {self.url!r} is not an address; it must begin with http:// or https://.")
        self.url = self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
        if not self.url.endswith("/v1") and self.url.count("/") == 2:  # a URL without a path
            self.url += "/v1"

    def completions(
        self, rows: Sequence[Row], seeds: Sequence[Sequence[int]], params: SamplingParams
    ) -> Iterator[tuple[int, int, Reply]]:
        """Yield (index of the row, index of the seed, reply) for each seed of each row, in order of arrival.

        Raises `UserError` if the server cannot be reached, rejects a request, or gives no answer in all attempts.
        """
        self.model = self.model or self.only_model()
        places = [(i, k) for i, own in enumerate(seeds) for k in range(len(own))]
        waiting, done, stop = iter(places), queue.Queue[tuple[int, int, Reply | BaseException]](), threading.Event()
        lock = threading.Lock()

        def work() -> None:
            while not stop.is_set():
                with lock:
                    place = next(waiting, None)
                if place is None:
                    return
                i, k = place
                try:
                    done.put((i, k, self._complete(rows[i], seeds[i][k], params, stop)))
                except BaseException as error:
                    done.put((i, k, error))

        # Daemon threads, so that stopping does not wait for outstanding answers.
        for _ in range(min(self.concurrency, len(places))):
            threading.Thread(target=work, name="a request to the server", daemon=True).start()
        try:
            for _ in places:
                i, k, found = done.get()
                if isinstance(found, BaseException):
                    raise found
                yield i, k, found
        finally:
            stop.set()

    def _complete(self, row: Row, seed: int, params: SamplingParams, stop: threading.Event) -> Reply:
        chat = not isinstance(row.prompt, str)
        path, body = ("chat/completions" if chat else "completions"), self._body(row, seed, params)
        found = self._ask(path, body, stop)
        try:
            choice = found["choices"][0]
            text = choice["message"]["content"] if chat else choice["text"]
            logprobs = _logprobs(choice.get("logprobs"))
            count = (found.get("usage") or {}).get("completion_tokens", len(logprobs))
            reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
            ids = (UNKNOWN,) * int(count)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            shown = json.dumps(found)[:200]
            why = f"{self.url} does not answer in OpenAI's format ({type(error).__name__}); check the address: {shown}"
            raise UserError(why) from error
        return Reply(str(text or ""), Completion(ids, logprobs, logprobs, reason, seed))

    def _body(self, row: Row, seed: int, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": params.max_tokens, "temperature": params.temperature}
        if isinstance(row.prompt, str):
            body |= {"prompt": row.prompt, "logprobs": 1}
        else:
            messages, tools = rewrite(row.prompt or (), tools_of(row), Dialect(calls="text"))
            body |= {"messages": to_data_urls(messages), "logprobs": True, **({"tools": tools} if tools else {})}
        # A small seed, since some servers keep only 32 bits.
        body |= {"top_p": params.top_p, "seed": seed % 2**31}
        beyond = {"top_k": params.top_k, "min_p": params.min_p, "stop_token_ids": list(params.stop_token_ids)}
        return {**body, **{name: value for name, value in beyond.items() if value}}

    def _ask(self, path: str, body: dict[str, Any], stop: threading.Event) -> Any:
        def request() -> Any:
            while True:
                sent = {name: value for name, value in body.items() if name not in self._refused}
                if "max_tokens" in self._refused:
                    sent["max_completion_tokens"] = body["max_tokens"]
                try:
                    return self.request(path, sent)
                except NoAnswerError as error:
                    names = _named(str(error), sent) if error.status in (400, 422) else set()
                    if not names:
                        raise
                    self._refused |= names

        return self._repeat(request, stop.is_set)

    def request(self, path: str, body: Any = None) -> Any:
        """Return the server's answer to one request. Raises `NoAnswerError`."""
        key, seconds = os.environ.get(self.key_variable, ""), self.seconds if body else min(30.0, self.seconds)
        return ask(f"{self.url}/{path}", body, key=key, seconds=seconds)

    def _repeat(self, request: Callable[[], T], given_up: Callable[[], bool] = lambda: False) -> T:
        try:
            return repeat(request, self.attempts, given_up)
        except NoAnswerError as error:
            raise self._failure(error) from error

    def _failure(self, error: NoAnswerError) -> UserError:
        if error.status in (401, 403):
            has = "is set" if os.environ.get(self.key_variable) else "is not set"
            return UserError(
                f"{self.url} refuses the key ({error}); the environment variable {self.key_variable} {has}. Set it, or name "
                "another variable with --server-key-variable."
            )
        if error.status == 404:
            served = list[str]()
            with contextlib.suppress(NoAnswerError):
                served = self._ask_names()
            if served and self.model not in served:
                hint = nearest(self.model, served)
                return UserError(f"{self.url} has no model {self.model!r}; it has {', '.join(sorted(served)[:10])}{hint or '.'}")
        tried = f" in {error.attempts} attempts" if error.again else ""
        return UserError(f"{self.url} gave no completion{tried} ({error}); see the server's log.")

    def _ask_names(self) -> list[str]:
        """Return the names of the server's models, or [] if it does not list them. Raises `NoAnswerError`."""
        found = self.request("models")
        try:
            return [str(one["id"]) for one in found["data"]]
        except (KeyError, TypeError):
            return []

    def only_model(self) -> str:
        """Return the name of the server's only model. Raises `UserError` if there are several or none."""
        served = self._repeat(self._ask_names)
        if len(served) != 1:
            names = f" ({', '.join(served[:10])})" if served else ""
            raise UserError(f"{self.url} serves {len(served)} models{names}; name one with --model.")
        return served[0]


def _logprobs(found: Any) -> tuple[float, ...]:
    """Return the log-probs of the tokens from a chat or plain completion, or () if there are none."""
    if not found:
        return ()
    values = [one["logprob"] for one in found["content"] or ()] if "content" in found else found.get("token_logprobs") or ()
    return tuple(float(value) for value in values)


def _named(message: str, sent: dict[str, Any]) -> set[str]:
    """Return the optional fields of a request that the server's error message names."""
    if "max_completion_tokens" in message and "max_tokens" in sent:
        return {"max_tokens"}
    return {name for name in _OPTIONAL if name in message and name in sent}
