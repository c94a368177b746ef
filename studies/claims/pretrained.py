"""SmolLM2-135M-Instruct learns sums by RLVR, SFT, DPO and on-policy distillation; side effects are measured too.

There are four claims. Verified rewards teach a pretrained model (Lambert et al. 2024, Tülu 3, arXiv:2411.15124) and damage no
other ability. Reinforcement learning stays closer to its start than SFT and forgets less (Shenfeld et al. 2025, RL's
Razor, arXiv:2509.04259). Pairs of a model's own samples teach less than the same number of samples online (Tang et al. 2024,
arXiv:2405.08448). A teacher passes on its knowledge for a fraction of the samples (Agarwal et al. 2024, GKD, arXiv:2306.13649).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from psigrad.config import (
    Data,
    EvalConfig,
    Evaluation,
    Model,
    OnlineConfig,
    Optim,
    PreferenceConfig,
    Run,
    SampleConfig,
    Sampling,
    SFTConfig,
)
from psigrad.errors import UserError
from psigrad.intervals import Interval, mean_interval, over_seeds
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.recipes import evaluate
from psigrad.records.report.plots import COLOURS
from psigrad.records.row_lines import replace_file
from psigrad_extras import sums
from psigrad_extras.connect import likelihood
from psigrad_extras.datasets import sample
from studies import drawing, trials
from studies.settings import PretrainedSettings
from studies.trials import ClaimVerdict, Trial

NAME = "pretrained"
START, RLVR, SFT, DPO, DISTILLED = "start", "RLVR", "SFT", "DPO", "distillation"
SAMPLING = Sampling(max_completion_length=16)
MARGIN = 0.05
"""The tolerance of "as good as": not worse by more than this."""
SHOWN = 4
"""The number of held-out questions whose answers are reported."""


@dataclass(frozen=True)
class TrainedModel:
    """One model: its training and its abilities."""

    name: str
    samples: int
    """The number of completions of the policy that its training drew."""
    accuracy: Interval
    """The share of correct answers to held-out sums; intervals are over sums."""
    kl: Interval
    """The exact KL(model‖start) of an answer, in nats; intervals are over sums."""
    everyday: Interval
    """The share of the everyday items whose correct ending is the most likely."""
    likelihood: Interval
    """The change of the log-probability of the correct endings, in nats; intervals are over items."""
    answers: tuple[tuple[str, str], ...]
    """A few held-out questions and the model's answers."""


@dataclass(frozen=True)
class PretrainedResult:
    """The results of `run`."""

    settings: PretrainedSettings
    outcomes: tuple[TrainedModel, ...]
    findings: tuple[ClaimVerdict, ...]
    core_minutes: float = 0.0
    """The processor time of the training runs, without sampling DPO's pairs and without measuring."""


@dataclass(frozen=True)
class _Measured:
    """One model's measurements: share of correct answers and mean KL of each held-out sum; correctness and log p of each everyday
    item.
    """

    accuracy: tuple[float, ...]
    kl: tuple[float, ...]
    right: tuple[float, ...]
    logp: tuple[float, ...]
    answers: tuple[tuple[str, str], ...]


def check(s: PretrainedSettings) -> None:
    """Raise an error for invalid settings."""
    for name in ("steps", "prompts", "held_out", "completions", "processes"):
        if getattr(s, name) < 1:
            raise UserError(f"{name} is {getattr(s, name)}; it must be at least 1.")
    if s.generations < 2:
        raise UserError(f"generations is {s.generations}; groups need at least 2 completions of a prompt.")
    if s.held_out > sums.HELD_OUT:
        raise UserError(f"held_out is {s.held_out}; expected at most {sums.HELD_OUT}.")


def run(s: PretrainedSettings) -> PretrainedResult:
    """Train every arm from one model, then distil the teacher into a student. Measure each."""
    folder = Path(s.out) / NAME
    base = convert_to_folder(s.model or str(sums.smollm2(folder / "model")))
    train, held_out = sums.prepare(folder / "data")
    usual = _usual(s, base, train, held_out)
    jobs = {
        RLVR: Trial(RLVR, s.seed, "grpo", replace(usual, algorithm={"preset": "grpo", "kl": None})),
        SFT: Trial(SFT, s.seed, "sft", _sft(s, usual, folder / "data")),
        DPO: Trial(DPO, s.seed, "dpo", _dpo(s, usual, folder / "data")),
    }
    trials.run_all(s, NAME, list(jobs.values()))
    teacher = str(trials.place(s, NAME, RLVR, s.seed) / "model")
    pupil = replace(usual, algorithm="distill", reference=teacher, num_generations=1)
    trials.run_all(s, NAME, [Trial(DISTILLED, s.seed, "distill", pupil)])
    drawn = s.steps * s.prompts
    samples = {START: 0, RLVR: drawn * s.generations, SFT: 0, DPO: drawn * s.generations, DISTILLED: drawn}
    found = {START: _measure(s, base, base, held_out, folder / "measured" / START)}
    for name in (RLVR, SFT, DPO, DISTILLED):
        place = trials.place(s, NAME, name, s.seed)
        found[name] = _measure(s, str(place / "model"), base, held_out, place)
    outcomes = tuple(_outcome(name, samples[name], found) for name in found)
    return PretrainedResult(s, outcomes, tuple(_findings(found)), trials.core_minutes(s, NAME))


def _usual(s: PretrainedSettings, base: str, train: Path, held_out: Path) -> OnlineConfig:
    """Return the settings of an online run with no special options."""
    return OnlineConfig(
        model=Model(path=base, dtype=s.dtype),
        data=Data(dataset=str(train), eval_dataset=str(held_out)),
        optim=Optim(learning_rate=s.learning_rate),
        run=Run(max_steps=s.steps, progress=False, report=False, threads=1, logging_steps=0),
        reward=("numeric",),
        prompts_per_step=s.prompts,
        num_generations=s.generations,
        sampling=SAMPLING,
        evaluation=Evaluation(eval_prompts=0),
    )


def _sft(s: PretrainedSettings, usual: OnlineConfig, folder: Path) -> SFTConfig:
    """Return settings for SFT on the worked sums, as many as RLVR has prompts."""
    rows = [json.loads(line) for line in Path(usual.data.dataset).read_text().splitlines()]
    written = folder / "written.jsonl"
    sample.write_jsonl(written, [{**row, "completion": [{"role": "assistant", "content": row["sum"]}]} for row in rows])
    return SFTConfig(
        model=usual.model,
        data=Data(dataset=str(written)),
        optim=usual.optim,
        run=usual.run,
        evaluation=usual.evaluation,
        batch_size=s.prompts,
    )


def _dpo(s: PretrainedSettings, usual: OnlineConfig, folder: Path) -> PreferenceConfig:
    """Return settings for DPO on pairs of a correct and a wrong answer. The initial model draws as many samples as RLVR."""
    pairs = folder / f"pairs-{s.steps}-{s.prompts}-{s.generations}-{s.seed}.jsonl"
    if not pairs.exists():
        asked = SampleConfig(
            model=usual.model,
            data=usual.data,
            sampling=SAMPLING,
            evaluation=Evaluation(eval_prompts=s.steps * s.prompts, num_generations_eval=s.generations),
            run=Run(progress=False, threads=s.processes, seed=s.seed),
            reward=usual.reward,
            keep="pairs",
            output=str(folder / "sampled.jsonl"),
        )
        trials.pairs(asked, pairs)
    return PreferenceConfig(
        model=usual.model,
        data=Data(dataset=str(pairs)),
        optim=Optim(learning_rate=s.dpo_learning_rate),
        run=usual.run,
        evaluation=usual.evaluation,
        batch_size=s.prompts,
    )


def _measure(s: PretrainedSettings, model: str, base: str, held_out: Path, place: Path) -> _Measured:
    """Measure the abilities of a model and its distance from the initial model. The result is cached."""
    kept = place / f"measured-{s.held_out}-{s.completions}.json"
    if kept.exists():
        return _Measured(**{key: tuple(value) for key, value in json.loads(kept.read_text()).items()})
    asked = EvalConfig(
        model=Model(path=model, dtype=s.dtype),
        data=Data(dataset=str(held_out)),
        sampling=SAMPLING,
        evaluation=Evaluation(eval_prompts=s.held_out, num_generations_eval=s.completions),
        run=Run(progress=False, threads=s.processes, seed=s.seed),
        reward=("numeric",),
    )
    report = evaluate.sample_and_score(asked, True)
    kls = evaluate.kls_to(model, base, report, asked)
    rewards = [t.reward or 0.0 for t in report.trajectories]
    groups = range(0, len(rewards), s.completions)
    items = likelihood.everyday(load_model(asked.model, asked.run, None))
    shown = [json.loads(line)["prompt"][0]["content"] for line in held_out.read_text().splitlines()[:SHOWN]]
    answers = [(question, t.text) for question, t in zip(shown, report.trajectories[:: s.completions], strict=False)]
    found = _Measured(
        tuple(statistics.fmean(rewards[i : i + s.completions]) for i in groups),
        tuple(statistics.fmean(kls[i : i + s.completions]) for i in groups),
        tuple(float(item.right) for item in items),
        tuple(item.logp for item in items),
        tuple(answers),
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    replace_file(kept, [json.dumps(vars(found)).encode() + b"\n"])
    return found


def _outcome(name: str, samples: int, found: Mapping[str, _Measured]) -> TrainedModel:
    own, start = found[name], found[START]
    return TrainedModel(
        name,
        samples,
        over_seeds(own.accuracy),
        over_seeds(own.kl),
        Interval(sum(own.right) / len(own.right), *mean_interval(own.right)),
        over_seeds(a - b for a, b in zip(own.logp, start.logp, strict=True)),
        own.answers,
    )


def _findings(found: Mapping[str, _Measured]) -> Iterator[ClaimVerdict]:
    """Yield the verdict on each claim. Differences are paired by sum or everyday item, and the intervals are over these."""
    start, rlvr, sft, dpo, pupil = (found[name] for name in (START, RLVR, SFT, DPO, DISTILLED))
    paired = trials.compare_pairs
    yield paired("RLVR teaches a pretrained model sums", "accuracy: RLVR > start, by sum", rlvr.accuracy, start.accuracy)
    yield paired(
        "RLVR breaks no everyday knowledge",
        f"everyday: RLVR > start − {MARGIN}, by item",
        rlvr.right,
        start.right,
        least=-MARGIN,
    )
    yield paired("SFT moves further from the start than RLVR", "KL: SFT > RLVR, by sum", sft.kl, rlvr.kl)
    yield paired("SFT forgets more than RLVR", "log p of right ends: RLVR > SFT, by item", rlvr.logp, sft.logp)
    yield paired("RLVR learns more than DPO from as many samples", "accuracy: RLVR > DPO, by sum", rlvr.accuracy, dpo.accuracy)
    yield paired(
        "a pupil reaches its teacher with a fraction of the samples",
        f"accuracy: distillation > RLVR − {MARGIN}, by sum",
        pupil.accuracy,
        rlvr.accuracy,
        least=-MARGIN,
    )


def tables(result: PretrainedResult) -> drawing.Printed:
    """Yield one row for each model, answers of each, then the claims."""
    table = drawing.new_table("A pretrained model on sums", "", "samples", "right", "KL", "everyday", "log p")
    for one in result.outcomes:
        table.add_row(
            one.name,
            f"{one.samples:,}",
            drawing.around(one.accuracy, ".3f"),
            drawing.around(one.kl, ".2f"),
            f"{one.everyday.mean:.2f} [{one.everyday.low:.2f}, {one.everyday.high:.2f}]",
            drawing.around(one.likelihood, "+.2f"),
        )
    yield table
    yield drawing.note(
        "95 % intervals over held-out sums and everyday items, of one run each",
        "samples: completions drawn to learn from; right: share of held-out sums",
        "KL: exact, to the start, in nats per answer",
        "everyday: share of 110 facts and points of grammar that it knows",
        "log p: change of the right ends' log-probability, in nats",
    )
    text = Text()
    for one in result.outcomes:
        text.append(f"{one.name}\n", style="italic")
        for question, answer in one.answers:
            text.append(f"  {question} → {' '.join(answer.split())}\n", style="dim")
    yield text
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot the abilities of each model, and its distance from the initial model against its retained knowledge."""
    figure, (left, right) = drawing.new_figure(9.5, 3.6, 1, 2)
    for place, (one, colour) in enumerate(zip(found["outcomes"], (drawing.INK, *COLOURS), strict=False)):
        mean, low, high = one["accuracy"]
        left.bar([place], [mean], 0.6, yerr=[[mean - low], [high - mean]], color=colour, error_kw={"linewidth": 1.2})
        (x, *_), (y, low, high) = one["kl"], one["likelihood"]
        right.errorbar([x], [y], [[y - low], [high - y]], color=colour, marker="o", markersize=5, linewidth=1.4)
        crowded = any(0 < other["kl"][0] - x < 1 for other in found["outcomes"])  # a close point to its right
        side: dict[str, Any] = {"xytext": (-6, 5), "ha": "right"} if crowded else {"xytext": (6, 5)}
        right.annotate(one["name"], (x, y), textcoords="offset points", fontsize=8, color=colour, **side)
    drawing.tidy(left, "Share of right answers to held-out sums", grid="y")
    drawing.tidy(right, "Everyday sentences: change of log p (nats)", "y", "KL to the start, nats per answer")
    left.set_xticks(range(len(found["outcomes"])), [one["name"] for one in found["outcomes"]])
    left.set_ylim(0, 1)
    right.margins(x=0.2)
    return drawing.save(figure, path)
