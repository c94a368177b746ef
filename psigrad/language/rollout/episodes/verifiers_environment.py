"""Environments of the library verifiers, in its form of version 0.1 (`MultiTurnEnv`, `load_environment`).

Source: https://github.com/PrimeIntellect-ai/verifiers. In its versions from 0.2 on an agent's own process calls a served model;
such environments have no `step` and are not for this adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any

from psigrad.errors import UserError, kind_of
from psigrad.language.rollout.episodes.environments import Message, Observation


def adapt(load: Callable[[], Any]) -> type:
    """The environment that `load` gives, as a class for `--environment module:Name`.

    ```python
    import verifiers
    from psigrad.language.rollout.episodes.verifiers_environment import adapt

    Wordle = adapt(lambda: verifiers.load_environment("wordle"))
    ```

    Without a dataset of the run's own its rows are the environment's. The reward is the rubric's, on the last turn; `max_turns`
    must not be below the environment's. Environments with tools are refused: their calls are not text.
    """

    @cache
    def environment() -> Any:
        made = load()
        if getattr(made, "tool_defs", None):
            raise UserError("The environment has tools of its own, which verifiers reads from no text; give tools with --tools.")
        for method in ("init_state", "setup_state", "get_prompt_messages", "is_completed", "cleanup"):
            if not callable(getattr(made, method, None)):
                raise UserError(
                    f"The environment is {kind_of(made)} without {method}(); give a MultiTurnEnv or SingleTurnEnv of "
                    "verifiers 0.1.14 (pip install 'verifiers>=0.1.14,<0.2')."
                )
        return made

    class VerifiersEpisode:
        """One episode of the environment."""

        def reset(self, row: Mapping[str, Any]) -> None:
            """Begin on one of its rows."""
            given = {"example_id": 0, **{name: value for name, value in row.items() if value is not None}}
            self._state = _run(environment().init_state(given, _no_client(), "policy"))
            self._state = _run(environment().setup_state(self._state)) or self._state
            self._read = list(self._state["prompt"])
            if isinstance(row["prompt"], list) and [_plain(m) for m in self._read] != [_plain(m) for m in row["prompt"]]:
                raise ValueError("the environment changes the prompt of its row in setup_state")

        def step(self, completion: str) -> tuple[Observation, float, bool]:
            """The environment's answer; at the end what its rubric gives."""
            state, own = self._state, environment()
            turn = {"prompt": self._read, "completion": [_said(completion)], "extras": {}, "is_truncated": False}
            unknown = dict.fromkeys(("response", "tokens", "reward", "advantage"))
            state["trajectory"].append({**turn, **unknown, "trajectory_id": state["trajectory_id"]})
            if not _run(own.is_completed(state)):
                before = len(self._read) + 1
                self._read = list(_run(own.get_prompt_messages(state)))
                if not _run(own.is_completed(state)):
                    return [_plain(message) for message in self._read[before:]], 0.0, False
            _run(own.cleanup(state))
            _run(own.rubric.score_rollout(state))
            return "", float(state["reward"]), True

        @staticmethod
        def rows(count: int, seed: int) -> list[Mapping[str, Any]]:
            """The environment's own."""
            return [dict(row) for row in environment().get_dataset(n=count, seed=seed)]

    return VerifiersEpisode


@cache
def _runner() -> asyncio.Runner:
    """One loop for all episodes of a process: environments may keep locks that belong to it."""
    return asyncio.Runner()


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return _runner().run(work)


def _no_client() -> Any:
    """A configuration of a client that nobody calls: the policy's turns come from psigrad."""
    from verifiers.types import ClientConfig

    return ClientConfig(api_key_var="PSIGRAD_CALLS_NOBODY", api_base_url="http://localhost:9")


def _said(completion: str) -> Any:
    from verifiers.types import AssistantMessage

    return AssistantMessage(content=completion)


def _plain(message: Any) -> Message:
    """A message as role and content."""
    found = dict(message) if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    return {"role": found["role"], "content": found.get("content") or ""}
