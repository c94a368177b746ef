"""Supervised fine-tuning, from settings to a trained model on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from psigrad.config import SFTConfig
from psigrad.errors import UserError, several
from psigrad.language.data.dataset_layouts import Log, to_model_rows
from psigrad.language.data.row_cache import PreparedRows
from psigrad.language.data.sources import read_rows
from psigrad.language.data.templates import encode_batch, examples
from psigrad.language.examples import Example
from psigrad.language.loading.load_model import load_model, load_start
from psigrad.language.loading.model_object import ModelObject
from psigrad.language.recipes.finish import generated_of, train_on_rows
from psigrad.language.recipes.row_encoding import Encoder, encode_rows, prepare
from psigrad.language.recipes.row_limits import log_rewrites, name_limit, token_limit
from psigrad.language.recipes.run_pins import static_pins
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.language.training.offline.sft_task import SFTTask
from psigrad.runs import session
from psigrad.runs.result import Result


def run(config: SFTConfig, given: ModelObject | None = None) -> Result:
    """Start or resume a run that fine-tunes `config.model`, or the object `given`, by cross-entropy.

    The targets are the completions of prompt-completion rows, or the assistant turns of conversations.
    """
    rewards, metric = RewardSetup.of(config), RewardSetup.of_metric(config)
    with session.open_run(config, "sft") as journal, contextlib.ExitStack() as stack:
        if (done := session.load_finished(config, journal, static_pins(config, (rewards, metric)))) is not None:
            return done
        checkpoint = session.newest_checkpoint(journal)
        model = load_model(config.model, config.run, checkpoint, journal.world, given=given)
        limit = token_limit(config, model)
        settings = ["sft", limit, config.train_empty_thinking, config.evaluation.eval_prompts, config.run.seed]
        prepared = prepare(config.data, model.tokenizer, settings, journal, partial(_prepare, config, model.tokenizer, limit))
        start = partial(load_start, config, model, checkpoint, journal.world)
        generated = stack.enter_context(generated_of(config, model, metric or rewards, prepared.held_out, start, journal))
        task = SFTTask(model, prepared.items, label_smoothing=config.label_smoothing_factor)
        held_out = SFTTask(model, prepared.held_out_items) if prepared.held_out_items else None
        return train_on_rows(config, journal, model, prepared, checkpoint, task, held_out, generated, (rewards, metric), given)


def _prepare(config: SFTConfig, tokenizer: PreTrainedTokenizerBase, limit: int, log: Log) -> PreparedRows[list[Example]]:
    """Return the training and held-out rows as tokens with a mask of the target tokens. Texts are cut at `limit` tokens."""
    read = read_rows(config.data, "sft", config.evaluation.eval_prompts, config.run.seed, log)
    rows, held_out = to_model_rows(tokenizer, read, config.data.plain_prompts, log)
    empty = config.train_empty_thinking
    encode = partial(examples, tokenizer, max_length=limit, empty_thinking=empty)
    encoder = Encoder(tokenizer, encode, _with_targets, partial(encode_batch, tokenizer, empty_thinking=empty))
    learned, counts = encode_rows(rows, encoder, config.data, log)
    log_rewrites(tokenizer, rows, log)
    found, texts = counts["rows"], counts["texts"]
    if texts > found:
        are = several(found, "row", "is", "are")
        said = f"{are} trained as {texts} texts, because the chat template changes earlier turns when later ones follow."
        log("turns_apart", said, rows=found, texts=texts)
    if cut := counts["cut"]:
        log("rows_cut", f"{cut} of {texts} texts are cut at {limit} tokens.", at=limit, count=cut)
    if not learned:
        raise UserError(f"No row of {config.data.dataset} has a token to train on within {name_limit(config, limit)}.")
    if none := found - len(learned):
        text = f"{none} of {found} rows have no token to train on within {limit} tokens and are dropped."
        log("rows_left_out", text, nothing_to_learn=none, kept=len(learned))
    return PreparedRows(rows, held_out, learned, encode_rows(held_out, encoder, config.data)[0])


def _with_targets(texts: Sequence[Example]) -> tuple[list[Example] | None, dict[str, int]]:
    """Return (those of a row's `texts` that have target tokens, or None if none has; counts of rows, texts and cut texts)."""
    own = [text for text in texts if any(text.mask)]
    return own or None, {"rows": 1, "texts": len(texts), "cut": sum(text.truncated for text in texts)}
