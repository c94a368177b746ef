"""Supervised fine-tuning from settings to a model on disk."""

from __future__ import annotations

import contextlib

from psigrad.config import SFTConfig
from psigrad.errors import UserError
from psigrad.language.data.sources import read_rows
from psigrad.language.data.templates import example
from psigrad.language.loading.given_model import GivenModel
from psigrad.language.loading.load_model import load_model, load_start
from psigrad.language.recipes.finish import train_on_rows
from psigrad.language.recipes.placement import sampler_of
from psigrad.language.recipes.row_limits import name_limit, token_limit
from psigrad.language.recipes.scorers import RewardSetup, evaluator_for
from psigrad.language.training.offline.offline import Generated
from psigrad.language.training.offline.sft_task import SFTTask
from psigrad.runs import session
from psigrad.runs.result import Result


def run(config: SFTConfig, given: GivenModel | None = None) -> Result:
    """Fine-tune `config.model` on `config.data`: cross-entropy on completions (prompt-completion rows) or assistant turns
    (messages).

    Goes on from the newest checkpoint of the run folder where there is one. Raises `UserError` on mistakes of the user.
    """
    rewards, metric = RewardSetup.of(config), RewardSetup.of_metric(config)
    with session.open_run(config, "sft") as journal, contextlib.ExitStack() as stack:
        if (done := session.load_finished(config, journal)) is not None:
            return done
        checkpoint = session.newest_checkpoint(journal)
        model = load_model(config.model, config.run, checkpoint, journal.world, given=given)
        rows, held_out_rows = read_rows(config.data, "sft", config.evaluation.eval_prompts, config.run.seed)
        limit = token_limit(config, model)
        examples = [example(model.tokenizer, row, limit) for row in rows]
        if cut := sum(e.truncated for e in examples):
            journal.tell("rows_cut", f"{cut} of {len(examples)} rows are cut at {limit} tokens.", at=limit, count=cut)
        if not any(any(e.mask) for e in examples):
            raise UserError(f"No row of {config.data.dataset} has a token to learn within {name_limit(config, limit)}.")
        generated = None
        measure = metric or rewards
        if measure.weights and held_out_rows:
            scorer = stack.enter_context(measure.scorer(model.tokenizer, journal))
            kl_to = load_start(config, model, checkpoint, journal.world) if config.evaluation.eval_kl else None
            evaluator = evaluator_for(config, model, measure, scorer, held_out_rows, kl_to, world=journal.world)
            generated = Generated(model, stack.enter_context(sampler_of(config, model)), evaluator)
        task = SFTTask(model, examples)
        held_out = SFTTask(model, [example(model.tokenizer, row, limit) for row in held_out_rows]) if held_out_rows else None
        return train_on_rows(
            config, journal, model, (rows, held_out_rows), checkpoint, task, held_out, generated, (rewards, metric)
        )
