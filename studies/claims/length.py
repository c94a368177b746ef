"""GRPO's length bias: exact on a small tree, then in training, where a remark of any length may follow an answer.

The claim is that of Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv:2503.20783, section 3.1). GRPO divides the loss
of each completion by its own length. A longer wrong answer is therefore punished less per token, and wrong answers grow. Dr. GRPO
divides by a constant, and they do not grow.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psigrad import seeds
from psigrad.config import Data, Evaluation, Model, OnlineConfig, Optim, Run, SFTConfig
from psigrad.errors import UserError
from psigrad.language.recipes import sft
from psigrad_extras import demo
from studies import drawing, groups, trials
from studies.settings import LengthSettings
from studies.trials import Arm, ClaimVerdict, Verdict

SUCCESS, GROUP = 0.3, 4
"""The probability of a correct answer at the start of the tree, and the number of completions of a group."""
GAIN, GOAL = 0.02, 0.9
"""The accuracy that each step on the tree gains to first order, and the accuracy at which it ends."""
ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {"preset": "grpo", "kl": None},
    "Dr. GRPO": {"preset": "dr_grpo", "aggregate": {"part": "fixed_length", "n": 32}},
}
LONGEST = 32
METRIC = "studies.rewards:answered"
ACCURACY = "eval/answered/mean"
MORE, MOST = 0.75, 12
"""The probability of another dot or dash in the demonstrations (3 of them on average), and the greatest number."""
WINDOW = 5
"""The number of steps in each mean of lengths."""
TOKEN, SLACK, ZERO = 1.0, 0.01, 1e-9
"""The tolerances of the claims, and exact zeros.

Dr. GRPO's wrong answers count as unchanged within one token, its accuracy as no worse within a hundredth.
"""


@dataclass(frozen=True)
class ForkRow:
    """The exact figures of one method on the tree."""

    name: str
    weight: dict[int, float]
    """The weight of a token of a wrong answer, by the answer's length, in units of that of the shortest."""
    wrong: float
    """The tokens by which the mean wrong answer grows per unit of accuracy gained, at the start."""
    right: float
    """The same for correct answers."""
    angle: float
    """The angle between the expected gradient and ∇J, in degrees."""
    path: tuple[tuple[float, float], ...]
    """(accuracy, mean length of wrong answers) along the expected steps."""


@dataclass(frozen=True)
class LengthResult:
    """The results of `run`."""

    settings: LengthSettings
    exact: tuple[ForkRow, ...]
    arms: tuple[Arm, ...]
    """The arms. Their curves are the lengths of wrong answers."""
    findings: tuple[ClaimVerdict, ...]
    core_minutes: float = 0.0


def check(s: LengthSettings) -> None:
    """Raise an error for invalid settings."""
    trials.check(s)
    if not 3 <= s.longest <= 8:
        raise UserError(f"longest is {s.longest}; expected 3 to 8 tokens.")


def run(s: LengthSettings) -> LengthResult:
    """Solve the tree, then run every arm over seeds."""
    exact = tuple(climb(name, s.longest) for name in groups.METHODS)
    where = trials.files(s)
    start = tune_talkative(s, where)
    configs = {name: (algorithm["preset"], settings(s, where, start, algorithm)) for name, algorithm in ARMS.items()}
    figures = {
        "wrong, start": lambda run: trials.mean_of(_early(run), "wrong"),
        "wrong, end": lambda run: trials.mean_of(_late(run, s.steps), "wrong"),
        "grown": lambda run: trials.mean_of(_late(run, s.steps), "wrong") - trials.mean_of(_early(run), "wrong"),
        "right grown": lambda run: trials.mean_of(_late(run, s.steps), "right") - trials.mean_of(_early(run), "right"),
        "accuracy": lambda run: trials.last(run, ACCURACY),
    }
    more = lambda arm, seed: lengths(trials.rollouts(s, "length", arm, seed))  # noqa: E731
    arms = trials.run_arms(s, "length", configs, figures, key="wrong", more=more)
    return LengthResult(s, exact, tuple(arms.values()), verdicts(exact, arms), trials.core_minutes(s, "length"))


def verdicts(exact: Sequence[ForkRow], arms: Mapping[str, Arm]) -> tuple[ClaimVerdict, ...]:
    """Return the claims, each by the test stated beforehand."""
    tree, test = {row.name: row for row in exact}, "tokens per unit of accuracy gained, exact"
    wrong, right, as_long = tree["GRPO"].wrong, tree["GRPO"].right, tree["Dr. GRPO"].wrong
    grpo, dr = arms["GRPO"], arms["Dr. GRPO"]
    nothing = [0.0] * len(dr.each["grown"])
    unchanged = trials.compare_pairs("", "", dr.each["grown"], nothing).difference
    within: Verdict = "undecided"
    if len(nothing) > 1:
        inside = unchanged.low > -TOKEN and unchanged.high < TOKEN
        outside = unchanged.low >= TOKEN or unchanged.high <= -TOKEN
        within = "holds" if inside else "does not hold" if outside else "undecided"
    return (
        trials.exactly("GRPO's expected step lengthens wrong answers (tree)", test, wrong, wrong > ZERO),
        trials.exactly("GRPO's expected step shortens right answers (tree)", test, right, right < -ZERO),
        trials.exactly("Dr. GRPO's leaves wrong answers as long (tree)", test, as_long, abs(as_long) < ZERO),
        trials.compare("wrong answers grow more under GRPO than under Dr. GRPO", grpo, dr, "grown"),
        ClaimVerdict("under Dr. GRPO wrong answers do not grow", f"grown: within {TOKEN:g} token of 0", within, unchanged),
        trials.compare("right answers shrink more under GRPO than under Dr. GRPO", dr, grpo, "right grown"),
        trials.compare("Dr. GRPO is at least as accurate as GRPO", dr, grpo, "accuracy", least=-SLACK),
    )


def climb(name: str, longest: int) -> ForkRow:
    """Return the figures of one method on the tree."""
    method, theta, path = groups.METHODS[name], groups.logits(longest, SUCCESS), []
    first = groups.enumerate_groups(method, longest, theta, GROUP)
    _, slope = groups.accuracy(longest, theta)
    grown = {right: groups.mean_length(longest, theta, right=right)[1] @ first.gradient for right in (True, False)}
    per_gain = slope @ first.gradient
    cosine = per_gain / math.sqrt((slope @ slope) * (first.gradient @ first.gradient))
    shortest = first.weight[False, 2]
    weight = {length: value / shortest for (right, length), value in first.weight.items() if not right}
    step = first.gradient
    while True:
        now, slope = groups.accuracy(longest, theta)
        path.append((now, groups.mean_length(longest, theta, right=False)[0]))
        if now >= GOAL:
            break
        theta = theta + (GAIN / (slope @ step) * step).reshape(theta.shape)
        step = groups.enumerate_groups(method, longest, theta, GROUP).gradient
    angle = math.degrees(math.acos(min(1.0, float(cosine))))
    return ForkRow(name, weight, float(grown[False] / per_gain), float(grown[True] / per_gain), angle, tuple(path))


def tune_talkative(s: LengthSettings, where: Mapping[str, Path]) -> Path:
    """Train the fine-tuned model further on demonstrations with remarks, and return its path."""
    folder = Path(s.out) / "start" / f"{s.words}-words-{s.sft_steps}-steps"
    if (model := folder / "remarks" / "model").exists():
        return model
    demonstrations = write_remarks(where["demonstrations"], folder / "remarks.jsonl")
    made = sft.run(
        SFTConfig(
            model=Model(path=str(where["model"])),
            data=Data(dataset=str(demonstrations)),
            optim=Optim(learning_rate=1e-3, adam_beta2=0.99, weight_decay=0.01, warmup_steps=20),
            run=Run(
                output_dir=str(folder / "remarks"), max_steps=max(1, s.sft_steps // 2), progress=False, report=False, threads=1
            ),
            batch_size=64,
        )
    )
    return made.model


def write_remarks(demonstrations: Path, to: Path) -> Path:
    """Write the same demonstrations, each with a remark, to `to`, and return that path.

    A correct answer is followed by "!" and some dots, a careless one by "?" and some dashes. The reward reads only the answer, so
    that dots and dashes earn and cost nothing. A model that has written "?" usually knows that the answer is wrong.
    """
    if not to.exists():
        rows = [json.loads(line) for line in demonstrations.read_text().splitlines()]
        longer = [{**row, "completion": row["completion"] + remark(i, row["right"])} for i, row in enumerate(rows)]
        to.write_text("".join(json.dumps(row) + "\n" for row in longer))
    return to


def remark(index: int, right: bool) -> str:
    """Return a mark and up to `MOST` dots or dashes.

    Their number depends only on the index, not on the correctness of the answer.
    """
    rng, more = random.Random(seeds.derive(0, "remark", index)), 0
    while more < MOST and rng.random() < MORE:
        more += 1
    return "!" + "." * more if right else "?" + "-" * more


def settings(s: LengthSettings, where: Mapping[str, Path], start: Path, algorithm: Any) -> OnlineConfig:
    """Return the settings of one run."""
    return trials.online(
        s,
        where,
        algorithm,
        model=Model(path=str(start)),
        reward=(METRIC,),
        sampling=replace(demo.SAMPLING, max_completion_length=LONGEST),
        evaluation=Evaluation(eval_prompts=s.held_out, metric=METRIC, eval_steps=max(1, s.steps // 4)),
    )


def lengths(rollouts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean tokens of wrong and of correct completions, for every `WINDOW` steps of training."""
    found: dict[tuple[int, str], list[int]] = {}
    for row in rollouts:
        until = WINDOW * math.ceil(row["step"] / WINDOW)
        found.setdefault((until, "right" if row["reward"] == 1 else "wrong"), []).append(len(row["completion_ids"]))
    return [{"step": step, kind: math.fsum(own) / len(own)} for (step, kind), own in sorted(found.items())]


def _early(run: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in run if row["step"] <= WINDOW]


def _late(run: Sequence[Mapping[str, Any]], steps: int) -> list[Mapping[str, Any]]:
    return [row for row in run if row["step"] > 0.8 * steps]


def tables(result: LengthResult) -> drawing.Printed:
    """Yield the tables of the tree, the runs, then the claims."""
    lengths = sorted(result.exact[0].weight)
    table = drawing.new_table(
        "The length bias, exact on a small tree", "", *(f"{n} tok." for n in lengths), "wrong", "right", "angle"
    )
    for row in result.exact:
        grown = (f"{x:+.2f}" if abs(x) > ZERO else "0" for x in (row.wrong, row.right))
        angle = f"{row.angle:.0f}°" if row.angle > 1e-3 else "0°"
        table.add_row(row.name, *(f"{row.weight[n]:.2f}" for n in lengths), *grown, angle)
    yield table
    yield drawing.note(
        "n tok.: weight of each token of a wrong answer of that length; the shortest: 1",
        "wrong, right: tokens that such answers grow by per unit of accuracy gained",
        f"angle: of the expected step to ∇J. Groups of {GROUP}, {SUCCESS:.0%} right",
    )
    yield trials.arms_table("The length bias over training", result.arms, ".2f")
    yield drawing.note(
        "95 % intervals over seeds (Student's t).",
        f"wrong: mean tokens of wrong completions, of the first {WINDOW} steps and of the last fifth",
        "grown: their difference; right grown: the same of right completions",
        "accuracy: held out, at the end",
    )
    yield trials.findings_text(result.findings)


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot weights and lengths on the tree, and lengths over training."""
    figure, (left, middle, right) = drawing.new_figure(12.5, 3.5, 1, 3)
    styles: dict[str, dict[str, Any]] = {
        name: {"color": c} for name, c in zip(groups.METHODS, (drawing.BLUE, drawing.GREEN, drawing.RUST), strict=True)
    }
    styles["GRPO without std"] |= {"linestyle": (0, (4, 2))}
    for row in found["exact"]:
        style: dict[str, Any] = {**styles[row["name"]], "linewidth": 1.7, "label": row["name"]}
        left.plot([int(n) for n in row["weight"]], list(row["weight"].values()), marker="o", markersize=4, **style)
        middle.plot(*zip(*row["path"], strict=True), **style)
    for arm in found["arms"]:
        drawing.band(right, arm["steps"], arm["curve"], styles[arm["name"]]["color"], label=arm["name"])
    drawing.tidy(left, "Exact: weight of a token of a wrong answer", "y", "tokens of the wrong answer", legend=True)
    drawing.tidy(middle, "Exact: tokens of a wrong answer", "y", "accuracy, as it rises")
    drawing.tidy(right, "Training: tokens of a wrong answer", "y", "steps", legend=True)
    left.set_ylim(0, 1.1)
    left.set_xticks([int(n) for n in found["exact"][0]["weight"]])
    return drawing.save(figure, path)
