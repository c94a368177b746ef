"""psigrad's side of the referee: it takes steps of an online run by the run's own functions, and records their tensors.

The other side may give the rows and tokens of a step. Its completions are cut where psigrad would have ended them.
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
from psigrad.language.recipes.dispatch import fit_memory
from psigrad.language.recipes.online import Job, open_job
from psigrad.language.recipes.online_settings import check, method
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.language.rollout.collectors import PendingRewards, ScoredRollout
from psigrad.language.rollout.samplers.distribution import filter_logits
from psigrad.language.rollout.types import Completion, FinishReason, Prompt, Trajectory
from psigrad.language.training.online.batching import minibatches
from psigrad.language.training.online.online_rl import step
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective import Batch, Loss, PolicyGradient, PolicyOutputs, Prepared, Totals
from psigrad.records.run_folder import NullRunFolder
from psigrad.runs.journal import Journal
from psigrad.runs.machine import prepare_torch
from psigrad_extras.investigate.what_if import WatchedOptimizer

Step = dict[str, Any]


def record(config: OnlineConfig, folder: Path, steps: int, handed: Sequence[Step] = (), rows: int = 0) -> tuple[list[Step], int]:
    """Train for `steps` steps. Return (their records, the number of rows in the dataset).

    `handed` are the other side's steps. Their rows and tokens are used, from a dataset of `rows` rows. Without them, psigrad
    draws the rows and samples. `folder` is for temporary files. Raises `UserError` on invalid settings or data.
    """
    algorithm = method(config)
    if not isinstance(algorithm, PolicyGradient) or config.plays or config.asks:
        raise UserError(
            "psigrad referee compares only policy-gradient methods on single completions; choose one, such as grpo, and remove "
            "environment, tools and agent."
        )
    check(config, algorithm)
    data, run = replace(config.data, eval_dataset="", eval_split="test"), config.run
    if handed:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row, default=repr) + "\n" for one in handed for row in one["rows"]))
        data = replace(data, dataset=str(folder / "rows.jsonl"), columns="", split="train", max_rows=0)
    # Switch off writing, evaluation, and the check that stops a run whose log-probs differ.
    run = replace(run, output_dir=str(folder / "run"), resume="never", report=False, progress=False, callbacks=(), report_to=())
    config = replace(config, data=data, run=run, evaluation=Evaluation(eval_prompts=0), hub=Hub(), placement=Placement(), lag=0)
    config = fit_memory(replace(config, keep_activations_gb=0.0, max_logp_difference=1e9))
    prepare_torch(config.run, recompute=config.model.gradient_checkpointing)
    journal = Journal(NullRunFolder(folder / "run", finished=False))
    with open_job(config, journal, None, (RewardSetup.of(config), None)) as job:
        expected = sum(len(one["rows"]) for one in handed) or len(job.run.prompts)
        if len(job.run.prompts) != expected:
            raise UserError(
                f"psigrad keeps {len(job.run.prompts)} of the {expected} rows with samples; change the settings that drop rows."
            )
        total = config.run.steps(rows or expected, config.prompts_per_step)
        job = replace(job, run=replace(job.run, total_steps=total))
        return list(_steps(job, min(steps, len(handed) or steps), handed)), rows or expected


def _steps(job: Job, steps: int, handed: Sequence[Step]) -> Iterator[Step]:
    run, state, first = job.run, job.state, 0
    shares, config = run.config.num_minibatches, run.config
    for number in range(steps):
        notes, make = _Notes(run), None
        batch = (run.config.prompts_per_step, run.config.num_generations, run.config.num_iterations * shares)
        notes.step["batch"] = dict(zip(("prompts", "completions of each", "updates"), batch, strict=True))
        if handed:
            given = handed[number]
            groups = len(given["rows"])
            order = _order(given, minibatches(groups, shares, config.run.seed, state.step, 0))
            config = replace(config, prompts_per_step=groups, num_generations=len(given["tokens"]) // groups)
            make, first = partial(notes.take, given, run.prompts[first : first + groups], order), first + groups
        inner = run.rollout
        rollout = _Rollout(inner.collector, inner.scorer, inner.to_samples, handed=make, notes=notes)
        optimizer: Any = _Optimizer(run.optimizer, True)
        optimizer.notes, watched = notes, object.__new__(_Algorithm)
        vars(watched).update(vars(run.algorithm), notes=notes)
        state = step(replace(run, config=config, rollout=rollout, algorithm=watched, optimizer=optimizer), state).state
        yield notes.step


def _order(given: Step, shares: Sequence[Tensor]) -> list[int]:
    """Return the order of groups in the batch, so that psigrad's first pass has the same groups in each update as the other."""
    groups = len(given["rows"])
    theirs = [row * groups // len(given["tokens"]) for update in given["updates"] for row in update["rows of the update"]]
    return [
        group for _, group in sorted(zip(torch.cat([*shares]).tolist(), dict.fromkeys([*theirs, *range(groups)]), strict=True))
    ]


class _Notes:
    """The record of one step, filled while the step runs. A completion's seed identifies its index in the record."""

    def __init__(self, run: OnlineRun) -> None:
        self.run = run
        self.step: Step = {"updates": []}
        self.now: dict[str, Any] = {}
        """The record of the current update."""
        self.place: dict[int, int] = {}

    @torch.no_grad()
    def take(self, given: Step, prompts: Sequence[Prompt], order: Sequence[int], version: int) -> list[Trajectory]:
        """Return the other side's completions as psigrad's trajectories, with their groups in this order."""
        model, params, made = self.run.model, self.run.params, list[Trajectory]()
        sampling: dict[int, tuple[float, ...]] = {}
        stops = {*params.stop_token_ids, *model.eos_token_ids}
        ended = [_end(ids, stops, params.max_tokens) for ids in given["tokens"]]
        self.step["completion ids"] = [[*ids, end] for ids, end in ended]
        size = len(ended) // len(given["rows"])
        for group in order:
            ids, prompt = [ids for ids, _ in ended[group * size :][:size]], prompts[group].ids
            logps = model.evaluate(Groups([prompt], [ids]), temperature=params.temperature).logp.tolist()
            for row, own, each in zip(range(group * size, (group + 1) * size), ids, logps, strict=True):
                known = tuple(each[: len(own)])
                sampling[row] = self._sampling(prompt, own) if params.filtered else known
                finite = tuple(q if math.isfinite(q) else logp for q, logp in zip(sampling[row], known, strict=True))
                reason: FinishReason = "stop" if ended[row][1] == "stop" else "length"
                completion = Completion(own, known, finite, reason, row)
                text = decode(model.tokenizer, own)
                made.append(Trajectory(prompts[group].index, row % size, prompt, completion, version, text=text))
                self.place[row] = row
        self.step["sampling log-probs"] = [list(sampling[row]) for row in range(len(ended))]
        return made

    def _sampling(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return the log-probs of a completion under the filtered distribution, computed from the full vocabulary's logits."""
        top = self.run.model.most_probable(Groups([prompt], [[ids]]), self.run.model.vocabulary)[1]
        logits = torch.empty_like(top.logp[0]).scatter_(1, top.ids[0], top.logp[0]) / self.run.params.temperature
        found = filter_logits(logits, self.run.params).log_softmax(-1)
        return tuple(found.gather(1, torch.tensor(ids, device=found.device)[:, None])[:, 0].tolist())

    def collected(self, made: Sequence[Trajectory]) -> None:
        """Record the rows, tokens and log-probs of the scored trajectories."""
        self.place = self.place or {t.completion.seed: n for n, t in enumerate(made)}
        ordered = sorted(made, key=lambda t: self.place[t.completion.seed])
        prompts = {prompt.index: prompt for prompt in self.run.prompts}
        rows = [prompts[t.row].row for t in ordered if t.k == 0]
        self.step.setdefault("completion ids", [[*t.completion.ids, t.completion.finish_reason] for t in ordered])
        self.step.setdefault("sampling log-probs", [list(t.completion.sampling_logprobs) for t in ordered])
        self.step |= {
            "rows": [{"prompt": row.dataset_prompt, **row.columns} for row in rows],
            "rendered prompt": [self.run.model.tokenizer.decode([*t.prompt_ids]) for t in ordered],
            "prompt ids": [list(t.prompt_ids) for t in ordered],
            "tokens": [list(t.completion.ids) for t in ordered],
            "log-probs": [list(t.completion.logprobs) for t in ordered],
        }

    def rows_of(self, batch: Batch) -> list[int]:
        """Return the indices of a batch's rows in the record."""
        return [self.place[t.completion.seed] for t in batch.inputs]

    def by_row(self, batch: Batch, column: Tensor) -> dict[int, list[float]]:
        """Return a tensor [N, T] as index in the record -> values, as many as the completion has tokens."""
        lists = column.detach().float().cpu().tolist()
        return {n: each[: len(self.step["tokens"][n])] for n, each in zip(self.rows_of(batch), lists, strict=True)}


class _Algorithm(PolicyGradient):
    """The run's algorithm, with methods that also record their results."""

    notes: _Notes

    def prepare(self, batch: Batch, state: Mapping[str, float], *, metrics: bool = True) -> Prepared:
        made, notes = super().prepare(batch, state, metrics=metrics), self.notes
        columns = {"mask": (batch.mask & made.keep[:, None]).float(), "advantages": made.advantage}
        if self.needs_reference and batch.logp_ref is not None:
            columns["reference log-probs"] = batch.logp_ref
        for name, column in columns.items():  # a row that a filter dropped has zeros
            found = notes.by_row(batch, column)
            notes.step[name] = [found.get(n, [0.0] * len(ids)) for n, ids in enumerate(notes.step["tokens"])]
        names, scored = list(notes.run.reward_weights), dict(zip(notes.rows_of(batch), batch.inputs, strict=True))
        notes.step["rewards"] = {
            n: [_number(t.parts.get(name)) for name in names] + [_number(t.reward)] for n, t in scored.items()
        }
        return made

    def totals(self, prepared: Prepared, rows: Tensor | None = None) -> Totals:
        part = prepared if rows is None else prepared.select(rows)
        columns: dict[str, Any] = {name: {} for name in ("log-probs of the pass", "loss weights", "loss slopes")}
        self.notes.now = {"rows of the update": sorted(self.notes.rows_of(part.batch)), **columns, "loss": 0.0}
        return super().totals(prepared, rows)

    def policy_loss(
        self, prepared: Prepared, evaluation: PolicyOutputs, totals: Totals, state: Mapping[str, float], *, metrics: bool = True
    ) -> Loss:
        made, batch, now = (
            super().policy_loss(prepared, evaluation, totals, state, metrics=metrics),
            prepared.batch,
            self.notes.now,
        )
        mask = batch.mask & prepared.keep[:, None]
        now["log-probs of the pass"] |= self.notes.by_row(batch, evaluation.logp)
        now["loss weights"] |= self.notes.by_row(batch, self.aggregate(mask, totals) * mask)
        evaluation.logp.register_hook(lambda slope: now["loss slopes"].update(self.notes.by_row(batch, slope)))
        now["loss"] += float(made.value.detach())
        return made


class _Optimizer(WatchedOptimizer):
    """The run's optimiser, which also records each gradient and update."""

    notes: _Notes

    def apply(self, norm: float, lr: float) -> None:
        before = self._weights()
        super().apply(norm, lr)
        update = {name: after - before[name] for name, after in self._weights().items()}
        self.notes.step["updates"].append({**self.notes.now, "gradient": self.gradient, "learning rate": lr, "update": update})
        self.gradient = {}

    def _weights(self) -> dict[str, Tensor]:
        return {name: w.parameter.detach().float().cpu().clone() for name, w in self.inner.weights.items()}


@dataclass(frozen=True)
class _Rollout(ScoredRollout):
    """A rollout that also records its trajectories.

    With `handed`, the trajectories are the other side's, scored by the run's rewards, and nothing is sampled.
    """

    handed: Callable[[int], list[Trajectory]] | None = None
    notes: Any = None

    def __call__(self, *given: Any, **named: Any) -> list[Trajectory]:
        if self.notes.place:
            return []  # a refill: the other side drew no further completions
        if self.handed is None:
            made = super().__call__(*given, **named)
        else:
            scoring = PendingRewards(self.scorer, self.to_samples({p.index: p.row for p in self.notes.run.prompts}))
            scoring.add_all(drawn := self.handed(given[4]))  # the version of the policy
            made = scoring.assign_to(drawn)
        self.notes.collected(made)
        return made


def _end(ids: Sequence[int], stops: set[int], longest: int) -> tuple[tuple[int, ...], str]:
    """Return (the tokens up to the point where psigrad ends a completion, "stop", "length" or "goes on")."""
    for n, token in enumerate(ids, 1):
        if token in stops or n == longest:
            return tuple(ids[:n]), "stop" if token in stops else "length"
    return tuple(ids), "goes on"


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
