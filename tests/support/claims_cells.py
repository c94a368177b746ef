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
from studies.trials import ClaimVerdict

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images" / "experiments"
# claim: its experiment, and each of its tests with the label of its figure ("" where there is one test)
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    "A baseline does not change the expected gradient": ("", {"expectation": ""}),
    "A baseline lowers the variance of the gradient; the reward to go lowers it further": ("", {
        "baseline": "a baseline",
        "to go": "reward to go",
        "both": "reward to go after a baseline",
    }),
    "RL surpasses the demonstrations that it started from": ("", {"imitation": ""}),
    "RLOO ≥ REINFORCE ≥ PPO from the same number of samples": ("methods", {
        "RLOO is at least as good as REINFORCE": "RLOO − REINFORCE",
        "REINFORCE is at least as good as PPO": "REINFORCE − PPO",
    }),
    "RLOO is better than PPO from the same number of samples": ("methods", {
        "RLOO is better than PPO": "PPO",
        "RLOO is better than PPO of one pass": "PPO, 1 pass",
    }),
    "RLOO needs fewer samples than RAFT": ("methods", {"RLOO needs fewer samples than RAFT": ""}),
    "For language models PPO is best near λ = 1": ("lambda", {
        "λ 1 beats λ 0.95 on words": "λ = 0.95",
        "λ 1 beats λ 0.5 on words": "λ = 0.5",
        "λ 1 beats λ 0 on words": "λ = 0",
    }),
    "For control tasks a λ below 1 is best": ("lambda", {
        "λ 0.95 beats λ 1 on CartPole": "λ = 1",
        "λ 0.95 beats λ 0 on CartPole": "λ = 0",
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
        "RLOO is 2 to 3 times as fast as PPO of one pass": "PPO, 1 pass",
        "RLOO is 2 to 3 times as fast as PPO of four passes": "PPO, 4 passes",
    }),
    "After the first token most of the probability is on few tokens": ("action_space", {
        "after SFT: more than 90% of the probability is on 16 tokens after the first": "word model after SFT",
        "after RLOO: more than 90% of the probability is on 16 tokens after the first": "word model after RLOO",
        "SmolLM2: more than 90% of the probability is on 16 tokens after the first": "SmolLM2",
        "SmolLM2 after GRPO: more than 90% of the probability is on 16 tokens after the first": "SmolLM2 after GRPO",
    }),
    "Later tokens are drawn from fewer candidates than the first": ("action_space", {
        "after SFT: the second token is drawn from fewer than the first": "word model after SFT",
        "after RLOO: the second token is drawn from fewer than the first": "word model after RLOO",
        "SmolLM2: the second token is drawn from fewer than the first": "SmolLM2",
        "SmolLM2 after GRPO: the second token is drawn from fewer than the first": "SmolLM2 after GRPO",
    }),
    "In expectation, GRPO lengthens wrong answers and shortens right ones": ("length", {
        "GRPO's expected step lengthens wrong answers (tree)": "wrong answers",
        "GRPO's expected step shortens right answers (tree)": "right answers",
    }),
    "In training, GRPO lengthens wrong answers and shortens right ones": ("length", {
        "wrong answers grow more under GRPO than under Dr. GRPO": "wrong answers",
        "right answers shrink more under GRPO than under Dr. GRPO": "right answers",
    }),
    "In expectation, Dr. GRPO does not lengthen wrong answers": ("length", {
        "Dr. GRPO's leaves wrong answers as long (tree)": "",
    }),
    "In training, Dr. GRPO does not lengthen wrong answers": ("length", {"under Dr. GRPO wrong answers do not grow": ""}),
    "Dr. GRPO learns as well as GRPO": ("length", {"Dr. GRPO is at least as accurate as GRPO": ""}),
    "In expectation, GRPO gives hard and easy prompts more weight": ("difficulty", {
        "GRPO weighs a prompt more, 10 % right against 50 %": "",
    }),
    "In training, GRPO gives hard and easy prompts more weight": ("difficulty", {
        "GRPO puts more of its weight on groups with one right or one wrong answer": "",
    }),
    "In expectation, Dr. GRPO gives all prompts the same weight": ("difficulty", {
        "Dr. GRPO weighs them alike, 10 % right against 50 %": "",
    }),
    "Dr. GRPO learns as well as GRPO, also on hard words": ("difficulty", {
        "Dr. GRPO is at least as accurate as GRPO": "all words",
        "Dr. GRPO is at least as accurate on the hard words": "words of five letters",
    }),
    "A higher upper clip keeps the entropy up": ("clip_higher", {
        "0.28 keeps more entropy than 0.2": "0.28",
        "0.5 keeps more entropy than 0.2": "0.5",
    }),
    "A higher upper clip improves pass@k": ("clip_higher", {
        "0.28 has the higher pass@8": "pass@8",
        "0.28 has the higher accuracy": "pass@1",
    }),
    "Dynamic sampling learns more from the same number of updates": ("dynamic_sampling", {"as many updates learn more": ""}),
    "Dynamic sampling learns more from the same number of samples": ("dynamic_sampling", {"as many samples learn more": ""}),
    "DPO raises the margin between chosen and rejected answers": ("dpo", {
        "DPO raises the margin": "DPO",
        "IPO raises the margin": "IPO",
        "SimPO raises the margin": "SimPO",
    }),
    "DPO lowers the log-probability of the chosen answers": ("dpo", {
        "DPO lowers the log-probability of the chosen answers": "DPO",
        "IPO lowers the log-probability of the chosen answers": "IPO",
        "SimPO lowers the log-probability of the chosen answers": "SimPO",
    }),
    "Online methods learn more than DPO from the same number of samples": ("dpo", {
        "online DPO learns more than DPO from as many samples": "online DPO",
        "RLOO learns more than DPO from as many samples": "RLOO",
    }),
    "Warnings report 90 % of the runs that exploit a flawed reward": ("loopholes", {
        "90 % of the exploiting runs are noticed (all rewards)": "all 60",
        "90 % of the exploiting runs are noticed (rewards not tuned on)": "30 not used for tuning",
    }),
    "At most 5 % of the honest runs raise a false alarm": ("loopholes", {
        "at most 5 % of the honest runs raise an alarm (all rewards)": "all 120",
        "at most 5 % of the honest runs raise an alarm (rewards not tuned on)": "80 not used for tuning",
    }),
    "At most 5 % of the honest runs raise a false alarm, on new seeds": ("false_alarms", {
        "at most 5% of honest runs raise an alarm": "",
    }),
    "Warnings report 90 % of the runs that exploit a flawed reward from the start": ("false_alarms", {
        "90% of the rewards exploited at once are noticed": "",
    }),
    "Verifiable rewards (RLVR) teach a pretrained model": ("pretrained", {"RLVR teaches a pretrained model sums": ""}),
    "RLVR leaves other abilities intact": ("pretrained", {"RLVR breaks no everyday knowledge": ""}),
    "RL stays closer to its start than SFT": ("pretrained", {"SFT moves further from the start than RLVR": ""}),
    "RL forgets less than SFT": ("pretrained", {"SFT forgets more than RLVR": ""}),
    "RLVR learns more than DPO from the same number of samples": ("pretrained", {
        "RLVR learns more than DPO from as many samples": "",
    }),
    "A student learns from its teacher with a fraction of the samples": ("pretrained", {
        "a pupil reaches its teacher with a fraction of the samples": "",
    }),
    "PPO's clip stops the gradient in exactly two cases": ("", {"clip": ""}),
}  # fmt: skip
# test: the factor and the summand that turn its stored figure into the one that is shown
SHOWN = {
    "right answers shrink more under GRPO than under Dr. GRPO": (-1, 0.0),
    **dict.fromkeys(ROWS["After the first token most of the probability is on few tokens"][1], (1, 0.9)),
}


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


def figure(d: Interval) -> str:
    """Return a figure with its interval, if it has one."""
    if d.low == d.high:
        return "0" if abs(d.mean) < 1e-9 else f"{d.mean:.3g}".replace("-", "−")
    most = max(abs(d.low), abs(d.high))
    places = 0 if most >= 100 else 1 if most > 1 and d.high - d.low >= 0.1 else 2 if most >= 0.1 and d.high - d.low >= 0.02 else 3
    return f"{d.mean:z.{places}f} [{d.low:z.{places}f}, {d.high:z.{places}f}]".replace("-", "−")


def shown(test: str, d: Interval) -> Interval:
    """Return the interval of a test as the page shows it."""
    factor, summand = SHOWN.get(test, (1, 0.0))
    low, high = sorted((factor * d.low, factor * d.high))
    return Interval(factor * d.mean + summand, low + summand, high + summand)


def cell(claim: str, found: dict[str, ClaimVerdict]) -> str:
    """Return the verdicts and the figures of a claim, as one cell of the table."""
    return "<br>".join(
        f"{f'{label}: ' if label else ''}**{found[test].verdict}**, {figure(shown(test, found[test].difference))}"
        for test, label in ROWS[claim][1].items()
    )
