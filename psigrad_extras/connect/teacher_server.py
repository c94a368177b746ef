"""A teacher for distillation behind a server with OpenAI's API, such as vLLM or `psigrad serve`.

A request to /v1/completions asks for one more token, with `echo` and `logprobs`. The server then returns the log-prob of every
token of the prompt, and the most probable tokens at each position. `return_tokens_as_token_ids` makes it name tokens by id, since
several may have the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.loading.model_source import load_tokenizer
from psigrad.language.loading.teacher import Teacher, TeacherOutput
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.models.stats import Top
from psigrad_extras.connect.endpoint import NoAnswerError, repeat
from psigrad_extras.connect.openai_server import ServedModel

_NAMED = "token_id:"


@dataclass(frozen=True)
class TeacherServer:
    """A client for the teacher on a server."""

    server: ServedModel

    def __call__(self, groups: Groups, temperature: float, top: int) -> Sequence[TeacherOutput]:
        """Return the teacher's log-probs of each completion, and of the `top` most probable tokens at each position.

        Raises `UserError` if there is no answer, or an unexpected one.
        """
        rows = [(tuple(p), tuple(c)) for p, own in zip(groups.prompts, groups.completions, strict=True) for c in own]
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            return list(pool.map(lambda row: self._say(row[0], row[1], top), rows))

    def _say(self, prompt: tuple[int, ...], ids: tuple[int, ...], top: int) -> TeacherOutput:
        # At least one, since some servers omit the log-probs otherwise.
        body = {"model": self.server.model, "prompt": [*prompt, *ids], "max_tokens": 1, "temperature": 1.0, "echo": True}
        found = self._ask({**body, "logprobs": max(top, 1), "return_tokens_as_token_ids": True})
        place = slice(len(prompt), len(prompt) + len(ids))
        try:
            told = found["choices"][0]["logprobs"]
            if [_id(name) for name in told["tokens"][place]] != list(ids):
                raise ValueError("the returned tokens are not those that were sent")
            logp = torch.tensor([float(value) for value in told["token_logprobs"][place]])
            best = [_best(one, top) for one in told["top_logprobs"][place]] if top else []
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.server.url} does not return the log-probs of a prompt's tokens, which a teacher must return ({error}); "
                "use a server that supports echo, logprobs and return_tokens_as_token_ids in /v1/completions, as vLLM and "
                "psigrad serve do."
            ) from error
        if not top:
            return TeacherOutput(logp)
        return TeacherOutput(logp, Top(torch.tensor([i for i, _ in best]), torch.tensor([p for _, p in best])))

    def _ask(self, body: dict[str, Any]) -> Any:
        try:
            return repeat(lambda: self.server.request("completions", body), self.server.attempts)
        except NoAnswerError as error:
            tried = f" in {error.attempts} attempts" if error.attempts > 1 else ""
            raise UserError(f"The teacher at {self.server.url} gave no log-probs{tried} ({error}); see its log.") from error


def _id(name: str) -> int:
    if not name.startswith(_NAMED):
        raise ValueError(f"a token is returned as {name!r}, not as its id")
    return int(name.removeprefix(_NAMED))


def _best(told: dict[str, float], top: int) -> tuple[list[int], list[float]]:
    """Return (ids, log-probs) of the `top` most probable tokens, without the actual token, which a server may add."""
    best = sorted(told.items(), key=lambda one: -one[1])[:top]
    return [_id(name) for name, _ in best], [value for _, value in best]


def connect(config: OnlineConfig, model: LanguageModel) -> Teacher:
    """Return the teacher that the settings name. Raises `UserError` if the server or its tokenizer is unavailable."""
    served = ServedModel(config.reference, config.reference_model)
    served.model = served.model or served.only_model()
    tokenizer: Any = model.tokenizer
    if config.reference_tokenizer:
        tokenizer = load_tokenizer(config.reference_tokenizer)
    spans = tokenizer.get_vocab() != model.tokenizer.get_vocab()
    top, longest = min(config.reference_top_k, model.vocabulary), 1 << 30  # the server itself reports a text that is too long
    return Teacher(TeacherServer(served), model, tokenizer, spans, max_length=longest, top_k=top, name=served.url)
