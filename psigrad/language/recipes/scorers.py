"""The rewards of a run: functions and reward models with their weights, and the scorer that applies them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from psigrad import extras
from psigrad.config import Placement, Reward
from psigrad.config.language import EpisodeSettings, Scored
from psigrad.config.sections import parse_columns
from psigrad.errors import UserError, several
from psigrad.language.data.dataset_layouts import Log
from psigrad.language.data.dataset_rows import Row, column_names
from psigrad.language.data.templates import hidden_marks
from psigrad.language.episodes.players import Player
from psigrad.language.loading.load_model import load_trained_scalar_model
from psigrad.language.loading.samplers import sampling_params
from psigrad.language.loading.teacher import Teacher
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes.evaluator import Evaluator
from psigrad.language.recipes.model_scorer import Mixture, ModelScorer
from psigrad.language.recipes.row_limits import check_images, encode_prompts
from psigrad.language.rewards import RewardPool, RewardSpec, Scorer, resolve
from psigrad.language.rewards.code import Code
from psigrad.language.rewards.reward_pool import check_weights, names_apart
from psigrad.language.rewards.reward_worker import needed_columns
from psigrad.language.rewards.row_checks import missing_golds, row_faults
from psigrad.language.rollout.scoring import Samples
from psigrad.processes.parallel.world import ALONE, World
from psigrad.runs.journal import Journal


@dataclass(frozen=True)
class RewardSetup:
    """The reward functions and reward models of a run, each with a distinct name and its weight in the total reward."""

    config: Scored
    alone: tuple[Reward, ...] | None
    """Functions that replace all rewards of the settings; None if the rewards of the settings are used."""
    specs: tuple[RewardSpec, ...]
    """The resolved functions: a user's code is imported once per run."""
    weights: Mapping[str, float]
    """The weight of each reward by name: the functions first, then the models."""

    @classmethod
    def of(cls, config: Scored, functions: Sequence[Reward] | None = None) -> RewardSetup:
        """Return a setup of `functions`, each with weight 1; if None, of the rewards and weights in the settings."""
        given: Sequence[Reward] = config.reward if functions is None else functions
        paths, weights = (config.reward_model, config.reward_weights) if functions is None else ((), ())
        specs = [_resolve(one, config.sampling.max_completion_length) for one in given]
        names = names_apart([spec.name for spec in specs] + [_name_of(path) for path in paths])
        specs = [replace(spec, name=name) for spec, name in zip(specs, names, strict=False)]
        alone = None if functions is None else tuple(functions)
        return cls(config, alone, tuple(specs), dict(zip(names, check_weights(names, weights), strict=True)))

    @classmethod
    def of_metric(cls, config: Scored) -> RewardSetup | None:
        """Return a setup with `evaluation.metric`, the held-out metric, as its only reward; None if this setting is empty."""
        return cls.of(config, (config.evaluation.metric,)) if config.evaluation.metric else None

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The reward functions. Their code must be unchanged when the run resumes."""
        return [spec.function for spec in self.specs]

    @property
    def metric(self) -> str:
        """The name of the mean reward in reports: if one function or model gives all rewards, its name; otherwise "reward"."""
        plays = isinstance(self.config, EpisodeSettings) and bool(self.config.environment or self.config.asks)
        return next(iter(self.weights)) if len(self.weights) == 1 and not plays else "reward"

    @contextlib.contextmanager
    def scorer(self, tokenizer: PreTrainedTokenizerBase | None, journal: Journal | None = None) -> Iterator[Scorer | None]:
        """Yield the scorer, which runs during the block; None if only the environment gives rewards.

        `tokenizer` is the policy's tokenizer; None if only the text of completions is known.
        """
        if journal is not None and any(isinstance(function, Code) and function.is_unsafe for function in self.functions):
            text = "Programs that the model writes run without a sandbox, with your rights: allow_unsafe_code is set."
            journal.log("unsafe_code", text)
        if journal is not None and (text := describe_hidden_tokens(self.config, tokenizer)):
            journal.log("special_tokens_hidden", text)
        models = list(self.weights.items())[len(self.specs) :]
        with contextlib.ExitStack() as stack:
            scorers: list[Scorer] = [stack.enter_context(self._functions_scorer(journal))] if self.specs else []
            for path, (name, _) in zip(self.config.reward_model, models, strict=False):
                scorers.append(_load_model(path, name, self.config, tokenizer))
            if models:
                yield Mixture(scorers, [*([1.0] if self.specs else []), *(weight for _, weight in models)])
            else:
                yield scorers[0] if scorers else None

    @contextlib.contextmanager
    def _functions_scorer(self, journal: Journal | None) -> Iterator[Scorer]:
        placement: Placement | None = getattr(self.config, "placement", None)
        if placement is not None and placement.scorers and journal is not None and journal.world.rank == 0:
            make = partial(_pool_of, self.config, self.alone)
            with extras.load("cluster").open_scorer(placement, make, journal) as scorer:
                yield scorer
            return
        with self.pool() as pool:
            yield pool

    def pool(self) -> RewardPool:
        """Return a pool of processes on this machine that run the reward functions.

        Raises `SandboxError` if a function would run programs that the model wrote and this machine has no sandbox.
        """
        for function in self.functions:
            if isinstance(function, Code):
                function.check_machine()
        return RewardPool(self.specs, weights=list(self.weights.values())[: len(self.specs)], **self._processes())

    def _processes(self) -> dict[str, Any]:
        config = self.config
        return {
            "timeout": config.reward_timeout,
            "workers": config.reward_workers,
            "memory_gb": config.worker_memory_gb,
            "variables": config.worker_env,
        }

    def judgeable(self, rows: Sequence[Row], log: Log | None = None) -> Sequence[Row]:
        """Return the rows that the functions can score, and log the number of rows that are dropped.

        A row whose gold answer a function cannot read raises `UserError` or, with `bad_rows: skip`, is dropped.
        """
        rows = self._with_golds(rows, log)
        if not any(hasattr(function, "check_row") for function in self.functions):
            return rows
        names, starts = column_names(rows), range(0, len(rows), _ROWS_AT_ONCE)
        groups = [samples_of(rows[start : start + _ROWS_AT_ONCE], names) for start in starts]
        # A function that cannot read the whole gold answer might reward a wrong completion.
        faults = row_faults(self.specs, groups, **self._processes())
        bad = [(row, fault) for row, fault in zip(rows, faults, strict=True) if fault]
        if bad and (self.config.data.bad_rows == "stop" or len(bad) == len(rows)):
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            (row, fault), cure = (
                bad[0],
                "fix the row, leave its answer empty if the reward does not apply, or skip it with --bad-rows skip",
            )
            raise UserError(f"{row.source}: {fault.rstrip('.')}; {cure}{more}.")
        if bad and log is not None:
            text = f"{len(bad)} of {len(rows)} rows cannot be scored by the rewards and were skipped, such as {bad[0][0].source}."
            log("rows_left_out", text, unjudged=len(bad), kept=len(rows) - len(bad))
        return [row for row, fault in zip(rows, faults, strict=True) if not fault] if bad else rows

    @property
    def needs(self) -> list[list[str]]:
        """The columns that each reward function needs. [] if there is a reward model, since a model can score every row."""
        return [] if self.config.reward_model else [needed_columns(function) for function in self.functions]

    def _with_golds(self, rows: Sequence[Row], log: Log | None) -> Sequence[Row]:
        if not any(self.needs):
            return rows
        there, renamed = column_names(rows), parse_columns(self.config.data.columns)
        for spec, name in ((spec, name) for spec, own in zip(self.specs, self.needs, strict=True) for name in own):
            if name not in there and (new := renamed.get(name, "")):
                raise UserError(
                    f"{spec.name} needs the column {name!r}, but data.columns renames it to {new!r}. To copy the "
                    f"column and keep its old name, write {new}={{{name}}}."
                )
        missing = missing_golds(self.specs, list(self.weights.values()), (row.columns for row in rows), there)
        lacking: dict[str, list[str]] = {}
        for row, column in zip(rows, missing, strict=True):
            if column:
                lacking.setdefault(column, []).append(row.source)
        for column, places in lacking.items():
            shown = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
            n = several(len(places), "row", "is", "are")
            text = f"{n} dropped for an empty column {column!r}, which the reward needs: {shown}."
            if all(missing):
                raise UserError(f"No row is left. {text.rstrip('.')}; fill this column, or map another one to it with --columns.")
            if log is not None:
                kept = len(rows) - len(places)
                log("rows_left_out", text, column=column, without_gold=len(places), kept=kept)
        return [row for row, column in zip(rows, missing, strict=True) if not column] if lacking else rows


_ROWS_AT_ONCE = 64


def describe_hidden_tokens(config: Scored, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a message if special tokens, such as <think>, are removed before rewards read a completion; otherwise ""."""
    scored = tokenizer is not None and config.skip_special_tokens and (config.reward or config.reward_model)
    marks = hidden_marks(tokenizer) if scored and tokenizer is not None else []
    shown = ", ".join(marks[:6])
    return (
        f"Special tokens such as {shown} are removed before rewards read a completion; --no-skip-special-tokens keeps them."
        if marks
        else ""
    )


def samples_of(rows: Sequence[Row], names: Sequence[str]) -> Samples:
    """Return dataset rows as the `Samples` that reward functions receive, with the columns `names`."""
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return Samples([row.prompt for row in rows], [row.completion or "" for row in rows], [[]] * len(rows), columns)


def _pool_of(config: Scored, functions: Sequence[Reward] | None) -> RewardPool:
    """Return a pool for `functions`, or for the rewards of `config` if None. A cluster calls this on the scorers' machine."""
    return RewardSetup.of(config, functions).pool()


def _name_of(path: str) -> str:
    """Return a reward model's name: its folder's name, or the run folder's name if `path` is the folder "model" in a run."""
    return Path(path).name if Path(path).name not in ("model", "") else Path(path).parent.name or "reward_model"


def _load_model(path: str, name: str, config: Scored, tokenizer: PreTrainedTokenizerBase | None) -> ModelScorer:
    """Load a frozen reward model. It reads the policy's tokens if vocabulary and prompt format are the same, otherwise text."""
    model = load_trained_scalar_model(replace(config.model, path=path, revision="", quantize_base=""), config.run)
    model.network.requires_grad_(False)
    own = model.tokenizer
    same = tokenizer is not None and own.get_vocab() == tokenizer.get_vocab() and own.chat_template == tokenizer.chat_template
    same = same and (not own.chat_template or config.data.plain_prompts == model.plain_prompts)
    return ModelScorer(name, model, same, config.micro_batch_tokens)


def _resolve(given: Reward, tokens: int) -> RewardSpec:
    """Resolve a reward. `tokens` is the default max_completion_length of the rewards "length" and "soft_overlong"."""
    asked: Any = {"reward": given} if isinstance(given, str) else given
    name = asked.get("reward") if isinstance(asked, Mapping) else None
    if name not in ("length", "soft_overlong"):
        return resolve(given)
    most = asked.get("max_completion_length", tokens)
    cache = {"soft_punish_cache": max(1, most // 4)} if name == "soft_overlong" else {}
    return resolve({"max_completion_length": most, **cache, **asked})


def reserved_tokens(config: Scored) -> int:
    """Return the number of tokens that a prompt must leave free: those of a completion or, in episodes, those of a turn."""
    whole = config.sampling.max_completion_length
    turn = config.max_turn_length if isinstance(config, EpisodeSettings) and config.plays else 0
    return min(turn or whole, whole)


def evaluator_for(
    config: Scored,
    model: LanguageModel,
    rewards: RewardSetup,
    scorer: Scorer | None,
    rows: Sequence[Row],
    reference: LanguageModel | Teacher | None,
    player: Player | None = None,
    size: int | None = None,
    world: World = ALONE,
) -> Evaluator:
    """Return the held-out evaluation on those of `rows` that `rewards` can score.

    Each row gets `size` completions, or `num_generations_eval` if `size` is None.
    """
    check_images(config, model, rows)
    prompts = encode_prompts(rewards.judgeable(rows), model, config.data, reserved_tokens(config))
    return Evaluator(
        prompts=prompts,
        scorer=scorer,
        metric=rewards.metric,
        params=sampling_params(config.sampling, model, (prompt.row for prompt in prompts), config.evaluation.eval_temperature),
        seed=config.run.seed,
        num_generations=size or config.evaluation.num_generations_eval,
        reference=reference if config.evaluation.eval_kl and not isinstance(reference, Teacher) else None,
        micro_batch_tokens=config.micro_batch_tokens,
        player=player,
        world=world,
        skip_special_tokens=config.skip_special_tokens,
    )
