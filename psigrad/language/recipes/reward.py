"""Training of a reward model, from settings to a model on disk. Scoring of rows with a trained reward model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from psigrad import redaction
from psigrad.config import Data, Model, RewardConfig, Run
from psigrad.errors import UserError
from psigrad.language.data import pairs
from psigrad.language.data.image_rows import to_json_row
from psigrad.language.data.sources import read_dataset
from psigrad.language.loading.load_model import load_scalar_model, load_trained_scalar_model
from psigrad.language.loading.model_object import ModelObject
from psigrad.language.models.packing import Ids
from psigrad.language.models.scalar_model import PLAIN_PROMPTS, STEP_SEPARATOR, ScalarModel
from psigrad.language.recipes.finish import train_on_rows
from psigrad.language.recipes.model_scorer import answer_ids, describe_overflow, score_all
from psigrad.language.recipes.row_encoding import Encoder
from psigrad.language.recipes.row_limits import prepare_answers, token_limit
from psigrad.language.recipes.run_pins import static_pins
from psigrad.language.training.offline.offline import Task
from psigrad.language.training.offline.reward_task import ProcessRewardTask, RewardTask
from psigrad.objective.preferences.reward_model import BradleyTerry
from psigrad.runs import machine, session
from psigrad.runs.result import Result


def run(config: RewardConfig, given: ModelObject | None = None) -> Result:
    """Start or resume a run that trains `config.model`, or the object `given`, with a scalar head on preference rows.

    With `config.process`, it trains on stepwise rows instead.
    """
    with session.open_run(config, "reward") as journal:
        if (done := session.load_finished(config, journal, static_pins(config))) is not None:
            return done
        checkpoint = session.newest_checkpoint(journal)
        model = load_scalar_model(config.model, config.run, checkpoint, journal.world, given)
        if config.process and not model.per_token:
            raise UserError(
                f"{config.model.path!r} cannot score each token, which --process needs; give a causal language model."
            )
        if config.process:
            setattr(model.network.config, STEP_SEPARATOR, config.step_separator)  # stored in config.json
        if config.data.plain_prompts != model.plain_prompts:
            setattr(model.network.config, PLAIN_PROMPTS, config.data.plain_prompts)
        encode: Any = partial(pairs.encode_pair, model.tokenizer, whole=False)
        if config.process:
            encode = partial(pairs.encode_steps, model.tokenizer, separator=config.step_separator)
        limit = token_limit(config, model)
        prepared = prepare_answers(config, Encoder(model.tokenizer, encode), limit, journal)
        task = _task(config, model, prepared.items)
        held_out = _task(config, model, prepared.held_out_items) if prepared.held_out else None
        return train_on_rows(config, journal, model, prepared, checkpoint, task, held_out, given=given)


def _task(config: RewardConfig, model: ScalarModel, items: Sequence[Any]) -> Task:
    if config.process:
        return ProcessRewardTask(model, items)
    return RewardTask(model, BradleyTerry(config.center_rewards_coefficient, config.label_smoothing), items)


def score_rows(
    model: str,
    rows: str | Iterable[Mapping[str, Any]],
    *,
    split: str = "test",
    device: str = "auto",
    budget: int = 16384,
    columns: str | Mapping[str, str] = "",
    bad_rows: Literal["stop", "skip"] = "stop",
) -> list[dict[str, Any]]:
    """Return the prompt-completion rows in order, with the reward model's score as `reward`; higher is better.

    `rows` is a file, folder or hub dataset with a `split`, or rows from Python; `columns` renames their columns. `budget` is
    the maximum number of tokens of a forward pass. `bad_rows="skip"` drops malformed rows.
    """
    data = Data(dataset=rows, columns=columns, split=split, bad_rows=bad_rows)
    config = RewardConfig(model=Model(path=model), data=data, run=Run(device=device))
    machine.prepare_torch(config.run)
    loaded = load_trained_scalar_model(config.model, config.run)
    given = rows if isinstance(rows, str | os.PathLike) else list(rows)
    read = read_dataset(config.data, "prompt-completion", given, split, redaction.log)
    pairs: list[tuple[Ids, Ids]] = [([], answer_ids(loaded, row)) for row in read.rows]
    for row, pair in zip(read.rows, pairs, strict=True):
        if why := describe_overflow(loaded, pair):
            raise UserError(f"{row.source}: the reward model {model!r} cannot read {why}; shorten the row.")
    scores = score_all(loaded, pairs, budget)
    return [
        to_json_row({**row.columns, "prompt": row.prompt, "completion": row.completion, "reward": own})
        for row, own in zip(read.rows, scores, strict=True)
    ]
