"""What every recipe does before and after training: run folder, model, rows, rewards, report."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from psigrad.config import (
    ControlConfig,
    EvalConfig,
    Model,
    OnlineConfig,
    PreferenceConfig,
    RewardConfig,
    Run,
    SampleConfig,
    Sampling,
    SFTConfig,
)
from psigrad.data.rows import Form, Row
from psigrad.data.sources import Rows, from_rows, holdout, load
from psigrad.data.templates import prompt_ids, stop_token_id
from psigrad.errors import UserError
from psigrad.models import language_model, scalar_model
from psigrad.models.backbone import Lora
from psigrad.models.language_model import LanguageModel
from psigrad.models.scalar_model import ScalarModel
from psigrad.recipes.load import to_dict
from psigrad.rollout.embedded import EmbeddedSampler
from psigrad.rollout.types import Sampler, SamplingParams
from psigrad.training import checkpoint, state
from psigrad.training.collect import Prompt
from psigrad.training.journal import Journal
from psigrad.training.run_folder import RunFolder
from psigrad.training.state import Learner, State
from psigrad.training.stop import StopSignal
from psigrad.training.trackers import open_trackers
from psigrad.training.update import Optimizer

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes of the blocks that are kept: where memory is short, so few that no hole is as large as a tensor.
_ALL, _PIECE = 1 << 30, 1 << 20
Config = SFTConfig | OnlineConfig | RewardConfig | PreferenceConfig | ControlConfig


@dataclass(frozen=True)
class Result:
    """What a run leaves behind: its folder, the trained model, and its last figures (`before` training and `after`)."""

    folder: Path
    model: Path
    report: Path | None
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def open_run(config: Config, recipe: str) -> Iterator[Journal]:
    """The run folder with its lock, the trackers, and the stop signal, for the length of the block."""
    prepare_torch(config.run, recompute=not isinstance(config, ControlConfig) and config.model.gradient_checkpointing)
    path = Path(config.run.output_dir) if config.run.output_dir else _new_folder(recipe)
    settings = {"recipe": recipe, **to_dict(config)}
    with RunFolder.open(path, settings, config.run.resume) as folder, StopSignal() as stop:
        trackers = open_trackers(config.run.report_to, folder.path, settings)
        try:
            yield Journal(folder, trackers, stop)
        finally:
            for tracker in trackers:
                tracker.close()


def _new_folder(recipe: str) -> Path:
    """A folder that no run has yet, named by recipe and time."""
    name = f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(
        path for path in (Path(f"{name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 10000)))) if not path.exists()
    )


def check_sampling(sampling: Sampling) -> None:
    """Refuse settings that describe no distribution before anything is loaded."""
    SamplingParams(sampling.max_completion_length, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def prepare_torch(run: Run, *, recompute: bool = False) -> None:
    """Threads as asked for, and a loud refusal of a device that is not there."""
    torch.set_num_threads(run.threads or len(os.sched_getaffinity(0)))
    keep_freed_memory(up_to=_PIECE if recompute else _ALL)
    transformers.utils.logging.disable_progress_bar()  # a bar per weight file drowns ours
    if run.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device is {run.device!r} and this torch sees no CUDA device; use device=cpu or install a CUDA build of torch."
        )


def keep_freed_memory(up_to: int = _ALL) -> None:
    """Let glibc keep blocks of `up_to` so many bytes that torch frees, for the next tensor of that size.

    By default it gives every large block back to the kernel at once, and takes a new one, page fault by page fault, a moment
    later: on a CPU a fifth of a training step and more, and half of it where the vocabulary is large. What is kept lies in pieces
    that not every tensor fits into. Other C libraries have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, up_to)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def device(run: Run) -> str:
    """The device of the run: what was asked for, or cuda where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device


def load_model(settings: Model, run: Run, found: Path | None) -> LanguageModel:
    """The model to train: from `settings.path`, with the weights of the checkpoint `found` where there is one."""
    if not settings.path:
        raise UserError("No model was given; name a folder or a hub model with --model (model.path).")
    lora = lora_of(settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)  # a fresh adapter's A matrices
        model = language_model.load(
            str(found) if found is not None and lora is None else settings.path,
            dtype=settings.dtype,
            device=device(run),
            lora=lora,
            adapter=found if lora is not None else None,
            gradient_checkpointing=settings.gradient_checkpointing,
        )
    attend(settings, model)
    return model


def attend(settings: Model, model: LanguageModel | ScalarModel) -> None:
    """Let the model attend as asked for."""
    if settings.attention == "flex":
        model.attend_by_flex()


def load_scalar_model(settings: Model, run: Run, found: Path | None) -> ScalarModel:
    """As `load_model`, with a scalar head, which is fresh where `settings.path` has none."""
    if not settings.path:
        raise UserError("No model was given; name a folder or a hub model with --model (model.path).")
    lora = lora_of(settings)
    whole = found is not None and lora is None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)  # a fresh head and a fresh adapter
        model = scalar_model.load(
            str(found) if whole else settings.path,
            dtype=settings.dtype,
            device=device(run),
            lora=lora,
            adapter=found if lora is not None else None,
            gradient_checkpointing=settings.gradient_checkpointing,
            fresh_head="refuse" if whole else "random",
        )
    attend(settings, model)
    return model


def load_trained_scalar_model(settings: Model, run: Run) -> ScalarModel:
    """A reward model to score with."""
    if not settings.path:
        raise UserError("No reward model was given; name its folder or hub name with --model (model.path).")
    return scalar_model.load(settings.path, dtype=settings.dtype, device=device(run), fresh_head="refuse")


def optimizer_of(
    model: LanguageModel | ScalarModel, config: SFTConfig | OnlineConfig | RewardConfig | PreferenceConfig
) -> Optimizer:
    """The optimiser of what learns in the model."""
    return Optimizer(model.trainable(), config.optim, recompute=config.model.gradient_checkpointing)


def refuse_none(config: RewardConfig | PreferenceConfig, kept: int, left_out: int, journal: Journal) -> None:
    """Note how many rows were too long; refuse a dataset of which nothing is left."""
    if left_out:
        journal.folder.event("rows_left_out", longer_than_max_length=left_out, kept=kept)
    if not kept:
        raise UserError(f"All {left_out} rows have more than max_length {config.max_length} tokens; raise it.")


def lora_of(settings: Model) -> Lora | None:
    """The adapter that the settings ask for."""
    if not settings.lora_rank:
        return None
    return Lora(settings.lora_rank, settings.lora_alpha, settings.lora_dropout, settings.lora_target_modules)


def newest_checkpoint(journal: Journal) -> Path | None:
    """The newest checkpoint that verifies, after the run folder was taken back to its step; without one, to the beginning."""
    found = checkpoint.latest(journal.folder.checkpoints)
    for line in found.ignored:
        journal.folder.event("checkpoint_ignored", reason=line)
    journal.folder.rewind(found.step if found.path is not None else -1)
    return found.path


def identity(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> dict[str, str]:
    """Hashes of what a run stands on besides its settings: a continuation must find them as they were."""
    parts = {
        "dataset": [[getattr(row, f.name) for f in fields(row) if f.name != "source"] for row in rows],
        "tokenizer": tokenizer.get_vocab(),
        "chat template": tokenizer.chat_template,
    }
    return {
        name: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest() for name, value in parts.items()
    }


@dataclass(frozen=True)
class Begun:
    """Where a run begins or goes on: its state, and the function that loops save through."""

    state: State
    save: Callable[[State], None]


def begin(
    config: Config, journal: Journal, learners: Sequence[Learner], known: Mapping[str, str], found: Path | None, fresh: State
) -> Begun:
    """The state to start from: `fresh`, or that of the checkpoint `found`, which fills in the learners' optimisers too.

    `known` are the hashes of `identity`. Raises `UserError` where the data, the tokenizer or its template are not those that
    the checkpoint was trained with.
    """
    if found is not None:
        before = checkpoint.verify(found)
        changed = [name for name, value in known.items() if before.get(name, value) != value]
        if changed:
            other = " and another ".join(changed)
            raise UserError(
                f"{journal.folder.path} was trained with another {other}; put it back to go on with this run, or choose another "
                "output_dir."
            )
    first = fresh if found is None else state.restore(found, learners)
    why_padded = getattr(learners[0].model, "why_padded", "")
    journal.folder.event("started" if found is None else "resumed", step=first.step, why_padded=why_padded)

    def save(now: State) -> None:
        journal.folder.flush()  # the rows are on the disk before the checkpoint that vouches for them
        state.save(journal.folder.checkpoints, now, learners, keep=config.run.save_total_limit, meta=known)
        journal.folder.event("saved", step=now.step)

    return Begun(first, save)


def read_rows(config: Config, form: Form) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows. Without an eval dataset the last `eval_prompts` rows are held out."""
    data, wanted = config.data, config.evaluation.eval_prompts
    rows = read_dataset(config, form, data.dataset, data.split)
    if data.eval_dataset:
        held = read_dataset(config, form, data.eval_dataset, data.eval_split)
        return rows.rows, held.rows[:wanted]
    if not wanted:
        return rows.rows, []
    train, held = holdout(rows, wanted)
    return train.rows, held.rows


def read_dataset(config: Config | EvalConfig | SampleConfig, form: Form, dataset: Any, split: str) -> Rows:
    """The rows of one dataset in TRL's forms; a missing name is refused."""
    if not isinstance(dataset, str):
        return from_rows(dataset, form, bad_rows=config.data.bad_rows)
    if not dataset:
        raise UserError(
            "No dataset was given; name a JSONL or Parquet file, a folder or a hub dataset with --dataset (data.dataset)."
        )
    return load(dataset, form=form, split=split, bad_rows=config.data.bad_rows)


def prompts_of(rows: Sequence[Row], model: LanguageModel, max_prompt_length: int) -> list[Prompt]:
    """The rows with their prompt tokens. A prompt above `max_prompt_length` tokens is refused by its place in the file."""
    prompts = [Prompt(i, tuple(prompt_ids(model.tokenizer, row)), row) for i, row in enumerate(rows)]
    for prompt in prompts:
        if 0 < max_prompt_length < len(prompt.ids):
            raise UserError(
                f"{prompt.row.source}: the prompt has {len(prompt.ids)} tokens, above max_prompt_length {max_prompt_length}; "
                "shorten the prompt, leave the row out or raise the limit."
            )
    return prompts


def sampler_for(sampling: Sampling, model: LanguageModel) -> Sampler:
    """The sampler asked for; models that cannot run packed are sampled by transformers unless vLLM was asked for."""
    if sampling.sampler == "vllm":
        from psigrad.rollout.vllm_backend import VLLMSampler

        return VLLMSampler(model, sampling.max_decode_batch, memory=sampling.vllm_memory)
    if sampling.sampler == "transformers" or model.why_padded:
        from psigrad.rollout.transformers_backend import TransformersSampler

        return TransformersSampler(model, sampling.max_decode_batch)
    if sampling.cuda_graphs and model.device.type != "cuda":
        raise UserError(f"sampling.cuda_graphs is for GPUs and the model is on {model.device}; leave it off.")
    return EmbeddedSampler(model, sampling.max_decode_batch, cuda_graphs=sampling.cuda_graphs)


def sampling_params(
    sampling: Sampling, model: LanguageModel, rows: Sequence[Row], temperature: float | None = None
) -> SamplingParams:
    """The distribution that is sampled from; evaluation may have its own temperature.

    Chat models end a turn with a token that is not always the EOS; where the prompts are conversations it stops a completion too.
    """
    chat = (stop_token_id(model.tokenizer),) if rows and not isinstance(rows[0].prompt, str) else ()
    return SamplingParams(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=(*sampling.stop_token_ids, *chat),
    )


def finish(config: Config, journal: Journal, model: LanguageModel | ScalarModel) -> Result:
    """The final model, the report, and what they hold."""
    journal.folder.save_model(model.save_merged)
    journal.folder.flush()
    journal.folder.event("finished")
    written = write_report(journal.folder.path) if config.run.report else None
    before, after = evaluations(journal.folder.path)
    return Result(journal.folder.path, journal.folder.path / "model", written, before, after)


def write_report(folder: Path) -> Path:
    """report.html of one run; matplotlib is loaded only here."""
    from psigrad import report

    return report.write([folder])


def evaluations(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last evaluation of a run, with their steps."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if any(name.startswith("eval/") for name in row):
            rows.setdefault(row["step"], {}).update(row)
    ordered = [rows[step] for step in sorted(rows)]
    return (ordered[0], ordered[-1]) if ordered else ({}, {})


def summary(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The headline table of the report, for people."""
    (folder / "summary.json").write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
