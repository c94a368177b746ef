"""Setup of multi-turn runs: the environment, tools or agent of the settings, and the dataset rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from psigrad import extras
from psigrad.config import OnlineConfig, Placement
from psigrad.config.language import Played
from psigrad.errors import UserError
from psigrad.language.data.dataset_layouts import Log, to_model_rows
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.sources import HELD_OUT, ONE_OF, check_held_out, from_rows, log_held_out, read_rows
from psigrad.language.episodes import environments
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import InProcess, Playing
from psigrad.language.episodes.episodes import Episodes
from psigrad.language.episodes.players import Player
from psigrad.language.episodes.seats import Games
from psigrad.language.episodes.tools import CallForm, Tool, ToolBoxes, call_form_of, resolve, schemas
from psigrad.runs.journal import Journal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The number of training rows that an environment makes if no dataset is given.
OWN_ROWS = 2000


@contextlib.contextmanager
def episodes_for(config: Played, tokenizer: PreTrainedTokenizerBase, journal: Journal | None = None) -> Iterator[Player | None]:
    """Yield the `Player` for the environment, tools or agent of the settings; None if each completion is a single turn."""
    given = [name for name in ("environment", "tools", "agent", "agent_command") if getattr(config, name)]
    if len(given) > 1:
        raise UserError(f"Both {given[0]} and {given[1]} are given, but a run can use only one; remove one of them.")
    if not given:
        yield None
        return
    if config.asks:
        with contextlib.closing(extras.load("agents").open_agents(config)) as agents:
            yield agents
        return
    placement: Placement | None = getattr(config, "placement", None)
    calls = bool(config.tools or _server(config))
    form = call_form_of(tokenizer) if calls else CallForm()
    if calls and journal is not None and not (form.family or form.response_template):
        text = "The chat template does not show the format in which the model calls tools, so every known format is read."
        journal.log("tool_calls", text, written=form.seen)
    with contextlib.ExitStack() as stack:
        if placement is None or not placement.environment_actors or journal is None:
            yield _episodes(config, stack.enter_context(start_environments(config, form)), form)
            return
        actors = extras.load("cluster").open_environments(placement, partial(start_environments, config, form), journal)
        yield _episodes(config, stack.enter_context(actors), form)


def _episodes(config: Played, playing: Playing, form: CallForm) -> Episodes | Games:
    rules = Episodes(
        playing,
        config.max_turns,
        config.max_turn_length,
        config.max_observation_length,
        together=config.turns_together,
        form=form,
    )
    seats = count_seats(config)
    return rules if seats == 1 else Games(rules, seats)


def count_seats(config: Played) -> int:
    """Return the number of seats in the game, all played by the policy; 1 if the environment is not a game."""
    if not config.environment or environments.library_of(config.environment) not in ("", "textarena"):
        return 1
    return environments.seats_of(environments.resolve(config.environment))


def start_environments(config: Played, form: CallForm) -> Playing:
    """Return the environments: psigrad's own games in this process, others in workers. `form` is the syntax of tool calls."""
    factory: Any
    if server := _server(config):
        factory = extras.load("mcp environment").episodes_of(server, config.worker_env, form)
    else:
        tools = resolve(config.tools, config.worker_env)
        factory = environments.resolve(config.environment) if config.environment else ToolBoxes(tools, form)
    if config.environment and environments.is_ours(config.environment):
        return InProcess(factory)
    return EnvironmentPool(
        factory,
        timeout=config.environment_timeout,
        workers=config.environment_workers,
        memory_gb=config.worker_memory_gb,
        variables=config.worker_env,
        sandboxed=config.environment_files if config.environment_sandbox else None,
    )


def read_episode_rows(config: OnlineConfig, episodes: Player | None, tokenizer: Any, log: Log) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows) as the model reads them, from the dataset or from the environment of `episodes`."""
    own, asked = environment_rows(config, episodes), config.evaluation.eval_prompts
    if own is None:
        read = read_rows(config.data, "prompt-only", asked, config.run.seed, log)
    else:
        count = min(HELD_OUT, len(own) // ONE_OF) if asked is None else asked
        check_held_out(count, len(own))
        log_held_out(count, len(own), "the environment's first", log)
        read = own[count:], own[:count]
    train, held = to_model_rows(tokenizer, read, config.data.plain_prompts, log)
    return offer_tools(config, train), offer_tools(config, held)


def environment_rows(config: Played, episodes: Player | None) -> list[Row] | None:
    """Return the rows that the environment itself makes; None if a dataset was given or the environment makes none."""
    if not isinstance(episodes, Episodes | Games) or config.data.dataset:
        return None
    asked = config.evaluation.eval_prompts
    made = episodes.playing.rows(OWN_ROWS + (HELD_OUT if asked is None else asked), config.run.seed)
    return None if made is None else from_rows(made, "prompt-only", "environment").rows


def _server(config: Played) -> str:
    """Return the setting `environment` if it names an MCP server, otherwise ""."""
    return str(config.environment) if environments.library_of(config.environment) == "mcp" else ""


def list_tools(config: Played) -> list[Tool]:
    """Return the policy's tools, from the settings or the MCP server. Raises `UserError` if one cannot be loaded."""
    if server := _server(config):
        return list(extras.load("mcp environment").episodes_of(server, config.worker_env).tools)
    return resolve(config.tools, config.worker_env)


def offer_tools(config: Played, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the tools' schemas, which the chat template shows to the model."""
    if not (shown := schemas(list_tools(config))):
        return list(rows)
    for row in rows:
        if isinstance(row.prompt, str):
            raise UserError(
                f"{row.source}: the prompt is plain text, but tools need a chat template; give messages, or use a chat model."
            )
    return [replace(row, columns={**row.columns, "tools": shown}) for row in rows]
