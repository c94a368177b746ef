"""Supervised fine-tuning from settings to a model on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from psigrad.config import SFTConfig
from psigrad.errors import UserError, several
from psigrad.language.data.posted_forms import for_model
from psigrad.language.data.sources import read_rows
from psigrad.language.data.templates import Example, examples
from psigrad.language.loading.given_model import GivenModel
from psigrad.language.loading.load_model import load_model, load_start
from psigrad.language.recipes.finish import train_on_rows
from psigrad.language.recipes.pinned import lasting_pins
from psigrad.language.recipes.placement import sampler_of
from psigrad.language.recipes.row_limits import encode_rows, name_limit, tell_translations, token_limit
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
        if (done := session.load_finished(config, journal, lasting_pins(config, (rewards, metric)))) is not None:
            return done
        checkpoint = session.newest_checkpoint(journal)
        model = load_model(config.model, config.run, checkpoint, journal.world, given=given)
        read = read_rows(config.data, "sft", config.evaluation.eval_prompts, config.run.seed, journal.tell)
        rows, held_out_rows = for_model(model.tokenizer, read, config.data.plain_prompts, journal.tell)
        limit = token_limit(config, model)
        encode = partial(examples, model.tokenizer, max_length=limit, empty_thinking=config.train_empty_thinking)
        found = encode_rows(rows, encode, config.data, journal)
        tell_translations(model.tokenizer, rows, journal)
        texts = [text for texts in found for text in texts]
        if len(texts) > len(found):
            are = several(len(found), "row", "is", "are")
            said = f"{are} {len(texts)} texts: the chat template rewrites turns once others follow."
            journal.tell("turns_apart", said, rows=len(found), texts=len(texts))
        if cut := sum(e.truncated for e in texts):
            journal.tell("rows_cut", f"{cut} of {len(texts)} rows are cut at {limit} tokens.", at=limit, count=cut)
        learned = _with_targets(found)
        if not learned:
            raise UserError(f"No row of {config.data.dataset} has a token to learn within {name_limit(config, limit)}.")
        if empty := len(found) - len(learned):
            text = f"{empty} of {len(found)} rows have no token to learn within {limit} tokens and are left out."
            journal.tell("rows_left_out", text, nothing_to_learn=empty, kept=len(learned))
        generated = None
        measure = metric or rewards
        if measure.weights and held_out_rows:
            scorer = stack.enter_context(measure.scorer(model.tokenizer, journal))
            kl_to = load_start(config, model, checkpoint, journal.world) if config.evaluation.eval_kl else None
            evaluator = evaluator_for(config, model, measure, scorer, held_out_rows, kl_to, world=journal.world)
            generated = Generated(model, stack.enter_context(sampler_of(config, model)), evaluator)
        task = SFTTask(model, learned, label_smoothing=config.label_smoothing_factor)
        judged = _with_targets(encode_rows(held_out_rows, encode, config.data))
        held_out = SFTTask(model, judged) if judged else None
        return train_on_rows(
            config, journal, model, (rows, held_out_rows), checkpoint, task, held_out, generated, (rewards, metric), given
        )


def _with_targets(rows: Sequence[Sequence[Example]]) -> list[list[Example]]:
    """Of each row the texts with something to learn; rows without one are left out."""
    return [own for texts in rows if (own := [text for text in texts if any(text.mask)])]
