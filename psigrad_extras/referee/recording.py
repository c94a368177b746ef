"""psigrad's half of the referee: steps of an online run through the step's own functions, recorded tensor by tensor.

The rows and tokens of a step may be handed over by another side. A handed completion ends where psigrad would have ended it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psigrad.config import Evaluation, Hub, OnlineConfig, Placement
from psigrad.errors import UserError
from psigrad.language.data.templates import decode
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.online import Job, open_job
from psigrad.language.recipes.online_settings import check, method
from psigrad.language.recipes.running import fit_memory
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.language.rollout.collectors import PendingRewards, ScoredRollout
from psigrad.language.rollout.samplers.distribution import filter_logits
from psigrad.language.rollout.types import Completion, FinishReason, Prompt, Prompts, SamplingParams, Trajectory
from psigrad.language.training.online.batching import minibatches
from psigrad.language.training.online.online_rl import step
from psigrad.language.training.online.online_run import Online
from psigrad.objective import Batch, Loss, PolicyGradient, PolicyOutputs, Prepared, Totals
from psigrad.optim import Optimizer
from psigrad.records.run_folder import NullRunFolder
from psigrad.runs.journal import Journal
from psigrad.runs.machine import prepare_torch
from psigrad_extras.investigate.what_if import WatchedOptimizer

Step = dict[str, Any]
Ragged = list[list[Any]]


def record(config: OnlineConfig, folder: Path, steps: int, handed: Sequence[Step] = (), rows: int = 0) -> tuple[list[Step], int]:
    """Train for `steps` steps and return their records, and the number of rows in the dataset.

    Without `handed` steps of another side, psigrad draws the rows and samples.

    `folder` is for temporary files; `rows` is the length of the dataset that the handed rows come from. Raises `UserError` on
    mistakes of the user.
    """
    algorithm = method(config)
    if not isinstance(algorithm, PolicyGradient):
        raise UserError("The referee compares policy gradients, and the settings name a method that learns from pairs.")
    check(config, algorithm)
    if config.plays or config.asks:
        raise UserError(
            "The referee compares single completions; environments, tools and agents have no fixed tokens to hand over."
        )
    config = fit_memory(_quiet(config, folder))
    if handed:
        where = {"dataset": str(_write_rows(handed, folder)), "columns": "", "split": "train", "max_rows": 0}
        config = replace(config, data=replace(config.data, **where))
        total = config.run.steps(rows, config.prompts_per_step)
    prepare_torch(config.run, recompute=config.model.gradient_checkpointing)
    journal = Journal(NullRunFolder(folder / "run", finished=False))
    with open_job(config, journal, None, (RewardSetup.of(config), None)) as job:
        if handed:
            job = replace(job, run=replace(job.run, total_steps=total))
            expected = sum(len(one["rows"]) for one in handed)
            if len(job.run.prompts) != expected:
                raise UserError(f"psigrad reads {len(job.run.prompts)} of the {expected} rows that the other side trained on.")
        return list(_steps(job, min(steps, len(handed) or steps), handed)), rows or len(job.run.prompts)


def _quiet(config: OnlineConfig, folder: Path) -> OnlineConfig:
    """Return the settings without what writes, evaluates, or stops a run whose log-probs differ."""
    run = replace(
        config.run, output_dir=str(folder / "run"), resume="never", report=False, progress=False, callbacks=(), report_to=()
    )
    where = {"data": replace(config.data, eval_dataset="", eval_split="test"), "hub": Hub(), "placement": Placement()}
    return replace(
        config, run=run, evaluation=Evaluation(eval_prompts=0), lag=0, keep_activations_gb=0.0, max_logp_difference=1e9, **where
    )


def _write_rows(handed: Sequence[Step], folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, default=repr) + "\n" for one in handed for row in one["rows"]))
    return path


def _steps(job: Job, steps: int, handed: Sequence[Step]) -> Iterator[Step]:
    run, state, first = job.run, job.state, 0
    shares = run.config.num_minibatches
    batch = (run.config.prompts_per_step, run.config.num_generations, run.config.num_iterations * shares)
    for number in range(steps):
        notes, config, make = _Notes(run), run.config, None
        notes.step["batch"] = dict(zip(("prompts", "completions of each", "updates"), batch, strict=True))
        if handed:
            given = handed[number]
            groups = len(given["rows"])
            order = _order(given, minibatches(groups, shares, config.run.seed, state.step, 0))
            config = replace(config, prompts_per_step=groups, num_generations=len(given["tokens"]) // groups)
            make, first = partial(notes.take, given, run.prompts[first : first + groups], order), first + groups
        inner = run.rollout
        rollout = _Rollout(inner.collector, inner.scorer, inner.show, handed=make, notes=notes)
        optimizer: Any = _RecordedOptimizer(run.optimizer, notes)
        watched = object.__new__(_Watched)
        vars(watched).update(vars(run.algorithm), notes=notes)
        state = step(replace(run, config=config, rollout=rollout, algorithm=watched, optimizer=optimizer), state).state
        yield notes.step


def _order(given: Step, shares: Sequence[Tensor]) -> list[int]:
    """Return the group at each place of the batch, so that the first pass divides groups into updates as the other did."""
    size = len(given["tokens"]) // len(given["rows"])
    theirs = [row // size for update in given["updates"] for row in update["rows of the update"]]
    theirs = [*dict.fromkeys([*theirs, *range(len(given["rows"]))])]
    places = torch.cat(list(shares)).tolist()
    return [group for _, group in sorted(zip(places, theirs, strict=True))]


class _Notes:
    """The record of one step while it runs. A completion's seed tells its place in the record."""

    def __init__(self, run: Online) -> None:
        self.run = run
        self.step: Step = {"updates": []}
        self.now: dict[str, Any] = {}
        """The update under way."""
        self.place: dict[int, int] = {}

    def take(self, given: Step, prompts: Sequence[Prompt], order: Sequence[int], version: int) -> list[Trajectory]:
        """Return the handed completions as psigrad's own trajectories, the groups in this order."""
        size, made = len(given["tokens"]) // len(given["rows"]), []
        stops = {*self.run.params.stop_token_ids, *self.run.model.eos_token_ids}
        ended = [_end(ids, stops, self.run.params.max_tokens) for ids in given["tokens"]]
        self.step["completion ids"] = [[*ids, end] for ids, end in ended]
        for group in order:
            prompt, rows = prompts[group], range(group * size, (group + 1) * size)
            ids = [tuple(ended[row][0]) for row in rows]
            logps, sampling = self.log_probs(prompt.ids, ids)
            for k, row in enumerate(rows):
                reason: FinishReason = "stop" if ended[row][1] == "stop" else "length"
                completion = Completion(ids[k], tuple(logps[k]), tuple(sampling[k]), reason, row)
                text = decode(self.run.model.tokenizer, ids[k])
                made.append(Trajectory(prompt.index, k, prompt.ids, completion, version, text=text))
        return made

    @torch.no_grad()
    def log_probs(self, prompt: tuple[int, ...], completions: Sequence[tuple[int, ...]]) -> tuple[Ragged, Ragged]:
        """Return the log-probs of each token under the policy, and under the distribution that it would be sampled from."""
        model, params = self.run.model, self.run.params
        every = model.evaluate(Groups([prompt], [list(completions)]), temperature=params.temperature).logp.tolist()
        logps = [row[: len(ids)] for row, ids in zip(every, completions, strict=True)]
        if not params.filtered:
            return logps, logps
        sampling = []
        for ids in completions:  # one at a time: a whole vocabulary for each token
            _, top = model.most_probable(Groups([prompt], [[ids]]), model.vocabulary)
            logits = torch.empty_like(top.logp[0]).scatter_(1, top.ids[0], top.logp[0]) / params.temperature
            found = filter_logits(logits, params).log_softmax(-1)
            sampling.append(found.gather(1, torch.tensor(ids, device=found.device)[:, None])[:, 0].tolist())
        return logps, sampling

    def collected(self, made: Sequence[Trajectory]) -> None:
        """Record the scored trajectories."""
        decoder = self.run.model.tokenizer.decode
        self.place = self.place or ({t.completion.seed: n for n, t in enumerate(made)})
        if "completion ids" in self.step:
            self.place = {t.completion.seed: t.completion.seed for t in made}
        ordered = sorted(made, key=lambda t: self.place[t.completion.seed])
        self.step.setdefault("completion ids", [[*t.completion.ids, t.completion.finish_reason] for t in ordered])
        self.step["tokens"] = [list(t.completion.ids) for t in ordered]
        firsts = [t for t in ordered if t.k == 0]
        rows = [self.run.prompts.rows[t.row] for t in firsts] if isinstance(self.run.prompts, Prompts) else []
        self.step["rows"] = [{"prompt": row.dataset_prompt, **row.columns} for row in rows]
        self.step["prompt ids"] = [list(t.prompt_ids) for t in ordered]
        self.step["rendered prompt"] = [decoder(ids) for ids in self.step["prompt ids"]]
        self.step["sampling log-probs"] = [list(t.completion.sampling_logprobs) for t in ordered]
        names = list(self.run.reward_weights)
        self.step["rewards"] = [[*(_number(t.parts.get(name)) for name in names), _number(t.reward)] for t in ordered]
        logps: dict[int, list[float]] = {}
        for start in (n for n, t in enumerate(ordered) if t.k == 0):
            size = next((n for n, t in enumerate(ordered[start + 1 :], 1) if t.k == 0), len(ordered) - start)
            found, _ = self.log_probs(ordered[start].prompt_ids, [t.completion.ids for t in ordered[start : start + size]])
            logps |= dict(enumerate(found, start))
        self.step["log-probs"] = [logps[n] for n in range(len(ordered))]

    def rows_of(self, batch: Batch) -> list[int]:
        """Return the places of a batch's rows in the record."""
        return [self.place[t.completion.seed] for t in batch.inputs]

    def ragged(self, batch: Batch, column: Tensor) -> Ragged:
        """Return [N, T] as lists of each completion's length, in the record's order. A row that was dropped has zeros."""
        found = dict(zip(self.rows_of(batch), column.detach().float().cpu().tolist(), strict=True))
        return [found.get(n, [0.0] * len(ids))[: len(ids)] for n, ids in enumerate(self.step["tokens"])]


class _Watched(PolicyGradient):
    """The run's algorithm, which notes what it computes."""

    notes: _Notes

    def prepare(self, batch: Batch, state: Mapping[str, float], *, metrics: bool = True) -> Prepared:
        made, notes = super().prepare(batch, state, metrics=metrics), self.notes
        notes.step["mask"] = notes.ragged(batch, (batch.mask & made.keep[:, None]).float())
        notes.step["advantages"] = notes.ragged(batch, made.advantage)
        if self.needs_reference and batch.logp_ref is not None:
            notes.step["reference log-probs"] = notes.ragged(batch, batch.logp_ref)
        return made

    def totals(self, prepared: Prepared, rows: Tensor | None = None) -> Totals:
        every = self.notes.rows_of(prepared.batch)
        chosen = range(len(every)) if rows is None else rows.tolist()
        columns: dict[str, Any] = {name: {} for name in ("log-probs of the pass", "loss weights", "loss slopes")}
        self.notes.now = {"rows of the update": sorted(every[row] for row in chosen), **columns, "loss": 0.0}
        return super().totals(prepared, rows)

    def policy_loss(
        self, prepared: Prepared, evaluation: PolicyOutputs, totals: Totals, state: Mapping[str, float], *, metrics: bool = True
    ) -> Loss:
        made, batch, now = (
            super().policy_loss(prepared, evaluation, totals, state, metrics=metrics),
            prepared.batch,
            self.notes.now,
        )
        mask, rows = batch.mask & prepared.keep[:, None], self.notes.rows_of(batch)

        def note(name: str, column: Tensor) -> None:
            lists = column.detach().float().cpu().tolist()
            now[name] |= {n: each[: len(t.completion.ids)] for n, each, t in zip(rows, lists, batch.inputs, strict=True)}

        note("log-probs of the pass", evaluation.logp)
        note("loss weights", self.aggregate(mask, totals) * mask)
        evaluation.logp.register_hook(partial(note, "loss slopes"))
        now["loss"] += float(made.value.detach())
        return made


class _RecordedOptimizer(WatchedOptimizer):
    """The run's optimiser, which notes each gradient and update."""

    def __init__(self, inner: Optimizer, notes: _Notes) -> None:
        super().__init__(inner, applies=True)
        self.notes = notes

    def norm(self) -> float:
        self.gradient = {}
        norm = super().norm()
        self.notes.now["gradient"] = self.gradient
        return norm

    def apply(self, norm: float, lr: float) -> None:
        before = self._weights()
        super().apply(norm, lr)
        now = self.notes.now
        now["update"] = {name: after - before[name] for name, after in self._weights().items()}
        self.notes.step["updates"].append({**now, "learning rate": lr})

    def _weights(self) -> dict[str, Tensor]:
        return {name: w.parameter.detach().float().cpu().clone() for name, w in self.inner.weights.items()}


@dataclass(frozen=True)
class _Rollout(ScoredRollout):
    """A rollout that notes its trajectories. With `handed`, these are scored by the run's rewards, and nothing is sampled."""

    handed: Callable[[int], list[Trajectory]] | None = None
    notes: Any = None

    def __call__(self, prompts: Sequence[Prompt], *given: Any, **named: Any) -> list[Trajectory]:
        if self.notes.place:
            return []  # a refill: the other side drew no more
        if self.handed is None:
            made = super().__call__(prompts, *given, **named)
        else:
            drawn = self.handed(given[3])
            by_index = {prompt.index: prompt for prompt in self.notes.run.prompts}
            scoring = PendingRewards(self.scorer, self.show({t.row: by_index[t.row].row for t in drawn}))
            scoring.add_all(drawn)
            made = scoring.give_to(drawn)
        self.notes.collected(made)
        return made


def _end(ids: Sequence[int], stops: set[int], longest: int) -> tuple[list[int], str]:
    """Return the tokens up to the place where psigrad ends a completion, and how it ends: stop, length, or goes on."""
    for n, token in enumerate(ids, 1):
        if token in stops or n == longest:
            return list(ids[:n]), "stop" if token in stops else "length"
    return list(ids), "goes on"


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
