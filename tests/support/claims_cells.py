"""The verdicts and figures that docs/claims.md shows, from the stored results in docs/images/."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from psigrad.compat.foreign_names import load
from psigrad.intervals import Interval, over_seeds
from psigrad_extras import demo
from psigrad_extras.experiments import EXPERIMENTS
from studies.trials import ClaimVerdict, Verdict

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images" / "experiments"
# claim: its experiment, and of each of its tests the condition that tells it from the others ("" where there is one test)
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    "A baseline does not change the expected gradient": ("", {"expectation": ""}),
    "A baseline lowers the variance of the gradient; the reward to go lowers it further": ("", {
        "baseline": "baseline",
        "to go": "reward to go",
        "both": "reward to go, added to the baseline",
    }),
    "Reinforcement learning surpasses the demonstrations that it started from": ("", {"imitation": ""}),
    "RLOO ≥ REINFORCE ≥ PPO with the same number of samples": ("methods", {
        "RLOO is at least as good as REINFORCE": "RLOO against REINFORCE",
        "REINFORCE is at least as good as PPO": "REINFORCE against PPO",
        "RLOO is better than PPO": "RLOO against PPO",
        "RLOO is better than PPO of one pass": "RLOO against PPO with one pass",
    }),
    "RLOO needs fewer samples than RAFT": ("methods", {"RLOO needs fewer samples than RAFT": ""}),
    "For language models PPO is best near λ = 1": ("lambda", {
        "λ 1 beats λ 0.95 on words": "against λ 0.95",
        "λ 1 beats λ 0.5 on words": "against λ 0.5",
        "λ 1 beats λ 0 on words": "against λ 0",
    }),
    "In control a λ below 1 is best": ("lambda", {
        "λ 0.95 beats λ 1 on CartPole": "0.95 against 1",
        "λ 0.95 beats λ 0 on CartPole": "0.95 against 0",
    }),
    "Noise in the reward hurts RAFT more than RLOO and PPO": ("noise", {
        "RAFT loses more than RLOO by noise 1": "RLOO",
        "RAFT loses more than PPO by noise 1": "PPO",
    }),
    "A larger β hurts RAFT more than RLOO and PPO": ("noise", {
        "RAFT loses more than RLOO by β 0.5": "RLOO",
        "RAFT loses more than PPO by β 0.5": "PPO",
    }),
    "RLOO takes 50–70 % less memory than PPO": ("memory", {"RLOO takes 50 to 70 % less memory than PPO": ""}),
    "RLOO is 2–3 times as fast as PPO": ("memory", {
        "RLOO is 2 to 3 times as fast as PPO of one pass": "PPO with one pass",
        "RLOO is 2 to 3 times as fast as PPO of four passes": "PPO with four passes",
    }),
    "After the first token most of the probability is on few tokens": ("action_space", {
        "after SFT: more than 90% of the probability is on 16 tokens after the first": "after SFT",
        "after RLOO: more than 90% of the probability is on 16 tokens after the first": "after RLOO",
        "SmolLM2: more than 90% of the probability is on 16 tokens after the first": "SmolLM2",
        "SmolLM2 after GRPO: more than 90% of the probability is on 16 tokens after the first": "SmolLM2 after GRPO",
    }),
    "Later tokens are drawn from fewer candidates than the first": ("action_space", {
        "after SFT: the second token is drawn from fewer than the first": "after SFT",
        "after RLOO: the second token is drawn from fewer than the first": "after RLOO",
        "SmolLM2: the second token is drawn from fewer than the first": "SmolLM2",
        "SmolLM2 after GRPO: the second token is drawn from fewer than the first": "SmolLM2 after GRPO",
    }),
    "GRPO lengthens wrong answers and shortens right ones": ("length", {
        "GRPO's expected step lengthens wrong answers (tree)": "tree (wrong)",
        "GRPO's expected step shortens right answers (tree)": "tree (right)",
        "wrong answers grow more under GRPO than under Dr. GRPO": "training (wrong)",
        "right answers shrink more under GRPO than under Dr. GRPO": "training (right)",
    }),
    "Dr. GRPO has no length bias, and learns as well": ("length", {
        "Dr. GRPO's leaves wrong answers as long (tree)": "tree",
        "under Dr. GRPO wrong answers do not grow": "training",
        "Dr. GRPO is at least as accurate as GRPO": "accuracy",
    }),
    "GRPO gives hard and easy prompts more weight": ("difficulty", {
        "GRPO weighs a prompt more, 10 % right against 50 %": "exact",
        "GRPO puts more of its weight on groups with one right or one wrong answer": "over training",
    }),
    "Dr. GRPO has no difficulty bias, and learns as well": ("difficulty", {
        "Dr. GRPO weighs them alike, 10 % right against 50 %": "exact",
        "Dr. GRPO is at least as accurate as GRPO": "accuracy",
        "Dr. GRPO is at least as accurate on the hard words": "hard words",
    }),
    "A higher upper clip keeps the entropy up": ("clip_higher", {
        "0.28 keeps more entropy than 0.2": "0.28",
        "0.5 keeps more entropy than 0.2": "0.5",
    }),
    "A higher upper clip improves pass@k": ("clip_higher", {
        "0.28 has the higher pass@8": "pass@8",
        "0.28 has the higher accuracy": "pass@1",
    }),
    "Dynamic sampling needs fewer updates": ("dynamic_sampling", {
        "as many updates learn more": "by updates",
        "as many samples learn more": "by samples",
    }),
    "DPO raises the margin": ("dpo", {
        "DPO raises the margin": "DPO",
        "IPO raises the margin": "IPO",
        "SimPO raises the margin": "SimPO",
    }),
    "DPO lowers the log-probability of the chosen answers": ("dpo", {
        "DPO lowers the log-probability of the chosen answers": "DPO",
        "IPO lowers the log-probability of the chosen answers": "IPO",
        "SimPO lowers the log-probability of the chosen answers": "SimPO",
    }),
    "Online methods learn more than DPO from as many samples": ("dpo", {
        "online DPO learns more than DPO from as many samples": "online DPO",
        "RLOO learns more than DPO from as many samples": "RLOO",
    }),
    "The run's warnings report an exploited reward": ("loopholes", {
        "90 % of the exploiting runs are noticed (all rewards)": "all runs",
        "90 % of the exploiting runs are noticed (rewards not tuned on)": "runs not used for tuning",
    }),
    "Honest runs raise few false alarms": ("loopholes", {
        "at most 5 % of the honest runs raise an alarm (all rewards)": "all runs",
        "at most 5 % of the honest runs raise an alarm (rewards not tuned on)": "runs not used for tuning",
    }),
    "Honest runs raise few false alarms, measured after the rules were set": ("false_alarms", {
        "at most 5% of honest runs raise an alarm": "",
    }),
    "A reward that is exploited within the first steps is reported": ("false_alarms", {
        "90% of the rewards exploited at once are noticed": "",
    }),
    "Verifiable rewards (RLVR) teach a pretrained model, and break nothing else": ("pretrained", {
        "RLVR teaches a pretrained model sums": "sums",
        "RLVR breaks no everyday knowledge": "everyday knowledge",
    }),
    "RL stays nearer to its start than SFT, and forgets less": ("pretrained", {
        "SFT moves further from the start than RLVR": "KL",
        "SFT forgets more than RLVR": "everyday knowledge",
    }),
    "Online RL learns more than DPO from as many samples, on a pretrained model": ("pretrained", {
        "RLVR learns more than DPO from as many samples": "",
    }),
    "A student learns from its teacher with a fraction of the samples": ("pretrained", {
        "a pupil reaches its teacher with a fraction of the samples": "",
    }),
    "The clip stops the gradient in two cases and no other": ("", {"clip": ""}),
}  # fmt: skip


def figures_of(name: str) -> Any:
    """Return the stored figures of an experiment."""
    return json.loads((IMAGES / f"{name}.json").read_text())


def exact() -> Iterator[ClaimVerdict]:
    """Yield the claims that other pages compute exactly, from their figures."""
    rows = {(row["name"], row["critic"]): row for row in figures_of("psi")["rows"]}
    total, to_go, base, both = (
        rows[name, ""] for name in ("total return R", "reward to go G", "R − others' mean", "G − others' mean")
    )
    bias = Interval(*base["along"])
    holds = base["exact_bias"] < 1e-9 and bias.low < 0 < bias.high
    yield ClaimVerdict("expectation", "", "holds" if holds else "does not hold", bias)
    for name, above, below in (("baseline", base, total), ("to go", to_go, total), ("both", both, base)):
        yield below_one(name, above["variance"], below["variance"])
    finals = json.loads((DOCS / "images" / "demo.json").read_text())["final"].values()
    gained = over_seeds(run["accuracy after RL"] - (1 - demo.WRONG_SHARE) for run in finals)
    yield ClaimVerdict("imitation", "", "holds" if gained.low > 0 else "does not hold", gained)
    clip = {row["advantage"]: row["silent"] for row in figures_of("clip")["rows"] if row["name"] == "clip (PPO)"}
    silent = {(sign, span["low"], span["high"]) for sign, spans in clip.items() for span in spans}
    asked = {(1, 1.2, None), (-1, 0.0, 0.8)}
    same = len(silent) == len(asked) and all(any(_near(one, other) for other in asked) for one in silent)
    count = float(len(silent))
    yield ClaimVerdict("clip", "", "holds" if same else "does not hold", Interval(count, count, count))


def below_one(name: str, first: list[float], second: list[float]) -> ClaimVerdict:
    """Return the verdict that one variance is below another; the interval of the quotient is from both ends, so a little wide."""
    quotient = Interval(first[0] / second[0], first[1] / second[2], first[2] / second[1])
    return ClaimVerdict(name, "", "holds" if quotient.high < 1 else "does not hold", quotient)


def _near(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or math.isclose(a, b, abs_tol=1e-6)) for a, b in zip(one, other, strict=True)
    )


def stored(name: str) -> Any:
    """Return the result of an experiment, from its figures."""
    one, figures = EXPERIMENTS[name], figures_of(name)
    result = TypeAdapter(get_type_hints(one.module.run)["return"]).validate_python(figures)
    return replace(result, settings=load(one.settings, flags=figures["settings"]))


def findings(experiment: str) -> dict[str, ClaimVerdict]:
    """Return the verdicts of an experiment by claim; "" has those that other pages compute exactly."""
    return {found.claim: found for found in (stored(experiment).findings if experiment else exact())}


def summary(verdicts: dict[str, Verdict]) -> str:
    """Return one verdict for several; if they differ, each with its conditions."""
    order: tuple[Verdict, ...] = ("holds", "undecided", "does not hold")
    by = {v: [condition for condition, own in verdicts.items() if own == v] for v in order}
    found = {v: own for v, own in by.items() if own}
    if len(found) == 1:
        return f"**{next(iter(found))}**"
    return "<br>".join(f"**{v}**: {', '.join(own)}" for v, own in found.items())


def figure(d: Interval) -> str:
    """Return a figure with its interval, if it has one."""
    if d.low == d.high:
        return "0" if abs(d.mean) < 1e-9 else f"{d.mean:.3g}".replace("-", "−")
    sign, most = "" if d.low > 0 and d.high <= 1 else "+", max(abs(d.low), abs(d.high))
    form = f"{sign},.0f" if most >= 100 else f"{sign}.1f" if most >= 10 else f"{sign}.2g" if most >= 0.1 else f"{sign}.3f"
    return f"{d.mean:{form}} [{d.low:{form}}, {d.high:{form}}]".replace("-", "−")


def cells(claim: str, found: dict[str, ClaimVerdict]) -> tuple[str, str]:
    """Return the verdict and the figures of a claim, as two cells of the table."""
    tests = {condition: found[test] for test, condition in ROWS[claim][1].items()}
    figures = "<br>".join((f"{c}: " if c else "") + figure(f.difference) for c, f in tests.items())
    return summary({condition: f.verdict for condition, f in tests.items()}), figures
