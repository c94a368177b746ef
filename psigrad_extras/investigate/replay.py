"""The replay of a step of an online run, and the effect of other methods on its samples.

The replay starts from the run's checkpoint. Completions are sampled again with the same weights and seeds, and compared with the
run's rollout rows. Rewards are taken from these rows. On the same machine, metrics, gradient and advantages are bitwise the same.
Nothing is written to the run's files.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from psigrad.config import OnlineConfig, Placement
from psigrad.config.load import from_dict
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.episodes.episodes import settle
from psigrad.language.episodes.players import PlayedPrompt, PlayerCollector, PlayRequest
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.changes import apply_changes
from psigrad.language.recipes.online import open_job
from psigrad.language.recipes.online_settings import correct, method
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.language.rollout.collectors import ScoredRollout
from psigrad.language.rollout.types import Branch, Completion, Sampler, SamplingParams, State, Trajectory
from psigrad.language.training.online.collect import group_scored
from psigrad.language.training.online.online_rl import learn, step
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective import PolicyGradient
from psigrad.objective.preferences.preference_loss import OnlinePreference
from psigrad.optim import learning_rate
from psigrad.records import checkpoint
from psigrad.records.pins import PINS, check_format
from psigrad.records.read import kind_of
from psigrad.records.row_lines import read_lines, read_steps, rollout_files
from psigrad.records.rows import parse_row
from psigrad.records.run_folder import NullRunFolder, to_line
from psigrad.runs.journal import Journal
from psigrad.runs.machine import prepare_torch
from psigrad.step import Clock, Outcome
from psigrad_extras.investigate.what_if import MethodWatch, WatchedOptimizer, remember

Row = dict[str, Any]
Method = PolicyGradient | OnlinePreference
_TOLD = ("allowed", "versions_changed", "ranks_changed")


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    run: str
    step: int
    begun: int
    """The step of the checkpoint from which the replay started; 0: the initial model."""
    differences: list[str]
    """The differences from the recorded step, the most informative first."""
    notes: list[str]
    """Sentences on how this machine or these files differ from those of the run."""
    methods: dict[str, dict[str, Any]]
    """Method -> its metrics, the run's own method first."""
    groups: list[Row]
    """The groups for which the methods' token weights differ most, with figures per token."""
    seconds: dict[str, float]
    """The wall-clock seconds of the run's update, and of each method's update in the replay."""


class _Folder(NullRunFolder):
    """The run's folder, opened for reading. Output of the replay is kept in memory instead of written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, finished=False)
        self.figures: Row = {}
        self.completions: list[Row] = []
        self.notes: list[str] = []

    def take(self, outcome: Outcome[State]) -> State:
        """Store a step's metrics and rows, converted as if a run had written and read them, and return its state."""
        self.figures = json.loads(to_line({"step": outcome.state.step, **outcome.metrics}))
        self.completions = [json.loads(to_line(row)) for row in outcome.rows]
        return outcome.state

    def event(self, kind: str, **fields: Any) -> None:
        if kind in _TOLD:
            self.notes.append(f"{kind.replace('_', ' ')}: {'; '.join(f'{name} {value}' for name, value in fields.items())}")


@dataclass(frozen=True)
class RecordedSessions:
    """A `Player` that takes the place of agents.

    It takes the tokens from the run's rows, by seed, and recomputes their log-probs.
    """

    rows: Mapping[int, Row]

    def play(
        self, sampler: Sampler, prompts: Sequence[PlayedPrompt], params: SamplingParams, asked: PlayRequest
    ) -> list[Trajectory]:
        """Return the recorded sessions as trajectories, with log-probs under the sampler's weights. See `Player`."""
        made = [
            self._session(sampler, params, Trajectory(index, k, ids, Completion((), (), (), "stop", seed), asked.version))
            for place, (index, ids, _row) in enumerate(prompts)
            for k, seed in ((k, asked.seed_of(place, k)) for k in range(asked.num_generations))
        ]
        return settle(sampler, made, params)

    def _session(self, sampler: Sampler, params: SamplingParams, asked: Trajectory) -> Trajectory:
        row = self.rows.get(asked.completion.seed)
        if row is None:
            return replace(asked, reason="rollouts.jsonl has no row of this completion", turns=0, answer="")
        (_, prompt), *branches = row["contexts"]
        mask = tuple(map(bool, row.get("mask", ())))
        made = replace(
            asked,
            prompt_ids=tuple(prompt),
            completion=replace(asked.completion, ids=tuple(row["completion_ids"]), finish_reason=row["finish_reason"]),
            text=row["completion"],
            reason=row["reason"],
            mask=mask,
            turns=row.get("turns", 0),
            branches=tuple(Branch(at, tuple(ids)) for at, ids in branches),
            answer="",
        )
        logps: list[float] = []
        for context in made.contexts:
            (found,) = sampler.log_probs(context.prompt_ids, [context.ids], params) or [[]] if context.ids else [[]]
            logps += found
        own = tuple(logp if chosen else 0.0 for logp, chosen in zip(logps, mask, strict=True))
        return replace(made, completion=replace(made.completion, logprobs=own, sampling_logprobs=own))


@dataclass
class _Recorded:
    """The run's rows by the unique seed of each completion. A call replaces sampled completions by them."""

    rows: dict[int, Row]
    model: LanguageModel
    temperature: float
    weights: Mapping[str, float]
    differences: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    found: dict[int, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, drawn: list[Trajectory]) -> list[Trajectory]:
        """Return the completions with the tokens and rewards of their rows. A completion without a row gets the reward 0."""
        made = [self._of(one) for one in drawn]
        for one in made:
            self.found[self.rows.get(one.completion.seed, {}).get("step", -1)].append(one)
        return made

    def _of(self, drawn: Trajectory) -> Trajectory:
        row = self.rows.get(drawn.completion.seed)
        if row is None:
            return replace(drawn, reward=0.0, status="scored")
        said, ids = self.differences[row["step"]], tuple(row["completion_ids"])
        if ids != (now := drawn.completion.ids):
            at = next((i for i, (a, b) in enumerate(zip(ids, now, strict=False)) if a != b), min(len(ids), len(now)))
            recorded, again = (str(x[at]) if at < len(x) else "no more" for x in (ids, now))
            said.append(f"{_name(row)}: token {at} is {recorded} in its row, but {again} in the replay")
            branches = tuple(Branch(start, tuple(prompt)) for start, prompt in row.get("contexts", ())[1:])
            mask, held = tuple(map(bool, row.get("mask", ()))), replace(drawn.completion, ids=ids)
            drawn = self._with_log_probs(replace(drawn, completion=held, branches=branches, mask=mask))
        steps = tuple((int(place), float(reward)) for place, reward in row.get("step_rewards", ()))
        parts, reward = row.get("parts") or {}, row["reward"]
        own = {name: part for name, part in parts.items() if part is not None and name not in ("environment", "agent")}
        worth = [self.weights.get(name, 1.0) * float(part) for name, part in own.items()]
        whole = math.fsum((*worth, *(r for _, r in steps)))
        if parts and reward is not None and not math.isclose(whole, reward, rel_tol=1e-5, abs_tol=1e-6):
            said.append(f"{_name(row)}: its reward is {reward:g} in its row, but its rewards sum to {whole:g}")
        return replace(drawn, reward=reward, status=row["status"], reason=row["reason"], parts=parts, step_rewards=steps)

    @torch.no_grad()
    def _with_log_probs(self, drawn: Trajectory) -> Trajectory:
        pieces = [piece for piece in drawn.contexts if piece.ids]
        found = [self.model.evaluate(Groups([p.prompt_ids], [[p.ids]]), temperature=self.temperature).logp[0] for p in pieces]
        logps = tuple(logp for piece in found for logp in piece.tolist())
        return replace(drawn, completion=replace(drawn.completion, logprobs=logps, sampling_logprobs=logps))


@dataclass(frozen=True)
class _RecordedRollout(ScoredRollout):
    """A rollout whose trajectories are replaced by the recorded ones."""

    recorded: Callable[[list[Trajectory]], list[Trajectory]] = list

    def __call__(self, *given: Any, **named: Any) -> list[Trajectory]:
        return self.recorded(super().__call__(*given, **named))


def replay(folder: str | Path, number: int, methods: Sequence[Any] = (), *, most_groups: int = 4) -> Replay:
    """Recompute step `number` (from 1) of the online run in `folder`, from the nearest checkpoint before it.

    `methods` are algorithms as in the settings. Each gets the same completions under the same weights. `most_groups` limits
    `Replay.groups`. Raises `UserError` if the folder is no online run or lacks the step, and for an invalid method.
    """
    path = Path(folder)
    config, recorded = _settings(path, number), _metrics(path)
    if number not in recorded:
        has = f"steps {min(recorded)} to {max(recorded)}" if recorded else "no step"
        raise UserError(f"{path} has no step {number}; its metrics.jsonl has {has}. Give one of those with --step.")
    newest = checkpoint.latest(path / "checkpoints", number - 1)
    others = {_label(spec): spec for spec in methods}
    algorithms = {name: _other(config, name, spec) for name, spec in others.items()}
    if lacking := [name for name, one in algorithms.items() if one.needs_critic and not method(config).needs_critic]:
        raise UserError(f"This run trained no critic, which {', '.join(lacking)} needs; give --method a method without a critic.")
    every = itertools.chain.from_iterable(map(read_steps, rollout_files(path)))
    trained = (r for r in every if r.get("kind") == "train" and r["step"] > newest.step)
    rows = {r["seed"]: r for r in trained if {"seed", "completion_ids", "reward", "status", "reason"} <= r.keys()}
    own = _Folder(path)
    prepare_torch(config.run, recompute=config.model.gradient_checkpointing)
    setup = (RewardSetup.of(config), RewardSetup.of_metric(config))
    reads_reference = any(one.needs_reference for one in algorithms.values())
    journal = Journal(own)
    with open_job(config, journal, newest.path, setup, scores=False, reference=reads_reference) as opened:
        job, state, differences = opened.run, opened.state, [*newest.ignored]
        rewards = _Recorded(rows, job.model, job.params.temperature, job.reward_weights)
        collector = (
            PlayerCollector(RecordedSessions(rows), job.sampler, job.model, True) if config.asks else job.rollout.collector
        )
        job = replace(job, rollout=_RecordedRollout(collector, None, job.rollout.to_samples, recorded=rewards))
        for now in range(newest.step + 1, number):
            state = _with_changes(path, state)
            state = own.take(step(apply_changes(job, state.changes), state))
            differences += _compare(rewards, own, rows, recorded.get(now, {}), now)
        state = _with_changes(path, state)
        job = apply_changes(job, state.changes)
        put_back = remember(job) if algorithms else None
        watch = MethodWatch(job.algorithm, WatchedOptimizer(job.optimizer, applies=True), job.single_pass)
        still = replace(job.config, ref_model_sync_steps=0)  # a sync would change the reference that the other methods use
        own.take(step(replace(job, optimizer=watch.optimizer, token_figures=watch.watch_tokens, config=still), state))  # type: ignore[arg-type]
        watch.metrics = own.figures
        differences += _compare(rewards, own, rows, recorded[number], number)
        timed = [row for row in read_steps(path / "timings.jsonl") if row["step"] == number and "time/update" in row]
        seconds = {"the run's update": timed[-1]["time/update"] if timed else math.nan}
        watches = {f"{_label(job.config.algorithm)} (the run's)": watch}
        for name, algorithm in algorithms.items():
            assert put_back is not None
            put_back()
            clock, asked = Clock(), replace(config, algorithm=others[name])
            with clock(name):
                watches[name] = _try(job, algorithm, asked, state, rewards.found[number], journal)
            seconds[name] = clock.phases[name]
        figures = {name: one.figures(watch) for name, one in watches.items()}
        groups = group_scored(rewards.found[number], config.num_generations, 1)
        shown = _groups(watches, groups, rows, job.model.tokenizer)[:most_groups]
    return Replay(str(path), number, newest.step, differences, own.notes, figures, shown, seconds)


def _try(
    job: OnlineRun, algorithm: Method, config: OnlineConfig, state: State, found: list[Trajectory], journal: Journal
) -> MethodWatch:
    """Compute the effect of a method on the step's completions. If it takes one optimiser step, weights stay unchanged."""
    made = correct(algorithm, config, job.sampler, job.model, journal)
    critic = job.critic if made.needs_critic else None
    watch = MethodWatch(made, WatchedOptimizer(job.optimizer, applies=not job.single_pass), job.single_pass)
    groups = list(group_scored(found, job.config.num_generations, made.min_group_size))
    if not groups:
        return watch
    known = made.initial_state()
    before = replace(state, algorithm={**known, **{k: v for k, v in state.algorithm.items() if k in known}})
    job = replace(job, algorithm=made, optimizer=watch.optimizer, token_figures=watch.watch_tokens, critic=critic)  # type: ignore[arg-type]
    watch.metrics = learn(job, groups, before, learning_rate(job.config.optim, state.step, job.total_steps)).metrics
    return watch


def _settings(path: Path, number: int) -> OnlineConfig:
    """Return the settings at a step: those in the first checkpoint at or after it, or else the run's final ones."""
    found = parse_row((path / "config.json").read_bytes()) if (path / "config.json").is_file() else None
    if found is None or kind_of(found) != "online":
        lacks = "the folder has no config.json" if path.is_dir() else "the folder does not exist"
        says = f"its config.json is of the kind {kind_of(found)}" if found else lacks
        raise UserError(f"{path} is not the folder of an online RL run, because {says}; give the folder of one.")
    check_format(path, found)
    for later in sorted((path / "checkpoints").glob("step-*/manifest.json")):
        if (checkpoint.step_of(later.parent) or 0) >= number and (manifest := parse_row(later.read_bytes())):
            found = manifest.get("settings") or found
            break
    config = from_dict(OnlineConfig, found, str(path / "config.json"))
    if config.asks and (config.model.dtype != "float32" or config.sampling.filtered):
        raise UserError(
            f"{path} ran an agent with dtype {config.model.dtype} or with top_p, top_k or min_p. Its replay would have to run "
            "the agent again. Choose a run in float32 without these settings."
        )
    return replace(config, run=replace(config.run, allow=PINS, callbacks=()), placement=Placement())


def _other(config: OnlineConfig, name: str, spec: Any) -> Method:
    found = method(replace(config, algorithm=spec))
    if isinstance(found, OnlinePreference) and config.asks:
        raise UserError(f"{name} compares two completions of one prompt, but an agent writes its own prompts; give "
                        "--method a policy gradient.")  # fmt: skip
    return found


def _label(spec: Any) -> str:
    if isinstance(spec, str):
        return spec
    return " ".join(str(value) if name == "preset" else f"{name}={json.dumps(value)}" for name, value in dict(spec).items())


def _metrics(path: Path) -> dict[int, Row]:
    """Return the rows of metrics.jsonl by step, without held-out metrics."""
    return {row["step"]: row for row in read_steps(path / "metrics.jsonl") if "learning_rate" in row}


def _with_changes(path: Path, state: State) -> State:
    """Return the state with the settings that callbacks had changed by then, according to the run's events."""
    events = [row for line in read_lines(path / "events.jsonl") if (row := parse_row(line)) and row.get("kind") == "changed"]
    then = [event["changes"] for event in events if event.get("step", 0) <= state.step]
    return replace(state, changes={**state.changes, **{name: now for made in then for name, (_, now) in made.items()}})


def _name(row: Mapping[str, Any]) -> str:
    return f"step {row['step']}, row {row['row']}, completion {row['k']}"


def _compare(found: _Recorded, now: _Folder, rows: Mapping[int, Row], recorded: Row, number: int) -> list[str]:
    """Return the differences between the run's files and the replay of a step."""
    lines = list(found.differences[number])
    again = {row["seed"]: row for row in now.completions}
    for seed, row in rows.items():
        if row["step"] != number:
            continue
        if seed not in again:
            lines.append(f"{_name(row)}: the replay has no completion with its seed")
            continue
        pairs = [(key, value, again[seed].get(key)) for key, value in row.items() if key not in ("reason", "completion_ids")]
        lines += [
            f"{_name(row)}: {key} is {_brief(a)} in its row, but {_brief(b)} in the replay" for key, a, b in pairs if a != b
        ]
    lines += [f"{_name(row)}: in the replay, but not in rollouts.jsonl" for seed, row in again.items() if seed not in rows]
    figures = [(name, value, now.figures.get(name)) for name, value in recorded.items()]
    return lines + [f"step {number}: {n} is {a!r} in metrics.jsonl, but {b!r} in the replay" for n, a, b in figures if a != b]


def _brief(value: Any) -> str:
    return text if len(text := json.dumps(value)) < 60 else f"{text[:57]}…"


def _groups(
    watches: Mapping[str, MethodWatch], groups: Iterable[list[Trajectory]], rows: Mapping[int, Row], tokenizer: Any
) -> list[Row]:
    """Return groups of completions with every method's figures per token, ordered by how much the methods' weights differ."""
    tables: dict[int, dict[str, dict[str, list[float]]]] = defaultdict(dict)
    for name, watch in watches.items():
        columns = watch.columns()
        for n, t in enumerate(watch.trajectories()):
            tables[t.completion.seed][name] = {key: x[n, : len(t.completion.ids)].tolist() for key, x in columns.items()}

    def spread(group: Sequence[Trajectory]) -> float:
        weights = [[own["weight"] for own in tables[t.completion.seed].values()] for t in group]
        pairs = [pair for first, *rest in filter(None, weights) for other in rest for pair in zip(first, other, strict=True)]
        return max((abs(a - b) for a, b in pairs if not math.isnan(a + b)), default=0.0)

    def shown(t: Trajectory) -> Row:
        tokens = [images.decode(tokenizer, [i]) for i in t.completion.ids]
        return {"k": t.k, "reward": t.reward, "tokens": tokens, "methods": tables[t.completion.seed]}

    ordered = sorted(groups, key=spread, reverse=True)
    prompts = [rows.get(group[0].completion.seed, {}).get("prompt", "") for group in ordered]
    return [{"row": g[0].row, "prompt": p, "completions": list(map(shown, g))} for g, p in zip(ordered, prompts, strict=True)]


def lines_of(found: Replay) -> Iterator[str]:
    """Yield the lines of the report for the terminal, except the table of metrics."""
    back = found.step - found.begun
    origin = f"the checkpoint of step {found.begun}" if found.begun else "the beginning"
    yield f"step {found.step} of {found.run}, from {origin}: {back} step{'s' * (back > 1)} recomputed"
    yield from found.notes
    if not found.differences:
        yield "The step's metrics, gradient and rows equal the recorded ones bit for bit."
        return
    yield f"{len(found.differences)} difference{'s' * (len(found.differences) > 1)} from the record:"
    yield from (f"  {line}" for line in found.differences[:12])
    if len(found.differences) > 12:
        yield f"  and {len(found.differences) - 12} more"
