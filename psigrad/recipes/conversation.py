"""Multi-turn runs from settings: the environment or the tools, and the rows that they play on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from psigrad.config import OnlineConfig
from psigrad.config.language import Played
from psigrad.data.rows import Row
from psigrad.data.sources import from_rows
from psigrad.errors import UserError
from psigrad.importing import imported_callable
from psigrad.recipes import setup
from psigrad.rollout import environments
from psigrad.rollout.episodes import Episodes, environment_rows
from psigrad.rollout.tools import ToolBox, schemas

# Rows of a built-in environment when no dataset was given.
OWN_ROWS = 2000


def episodes_for(config: Played) -> Episodes | None:
    """How episodes are played; None where a completion is all there is."""
    if config.environment and config.tools:
        raise UserError("Both environment and tools are given; tools are an environment of their own, so leave one of them out.")
    if config.environment:
        return Episodes(environments.resolve(config.environment), config.max_turns)
    if config.tools:
        return Episodes(partial(ToolBox, _tools(config)), config.max_turns)
    return None


def _tools(config: Played) -> list[Callable[..., Any]]:
    return [imported_callable(tool, "tool") if isinstance(tool, str) else tool for tool in config.tools]


def rows_for(config: OnlineConfig, episodes: Episodes | None) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows: the dataset's, or those that the environment brings along. Tools are offered in every row."""
    own = own_rows(config, episodes)
    if own is None:
        train, held = setup.read_rows(config, "prompt-only")
    else:
        held, train = own[: config.evaluation.eval_prompts], own[config.evaluation.eval_prompts :]
    return offered(config, train), offered(config, held)


def own_rows(config: Played, episodes: Episodes | None) -> list[Row] | None:
    """The rows that the environment brings along, where no dataset was given."""
    if episodes is None or config.data.dataset:
        return None
    made = environment_rows(episodes.factory, OWN_ROWS + config.evaluation.eval_prompts, config.run.seed)
    return None if made is None else from_rows(made, "prompt-only", "environment").rows


def offered(config: Played, rows: Sequence[Row]) -> list[Row]:
    """The rows with the tools' schemas, which the chat template shows to the model."""
    if not config.tools:
        return list(rows)
    shown = schemas(_tools(config))
    for row in rows:
        if isinstance(row.prompt, str):
            raise UserError(f"{row.source}: the prompt is plain text, and tools need a chat template; give messages.")
    return [replace(row, columns={**row.columns, "tools": shown}) for row in rows]
