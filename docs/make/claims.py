"""Writes docs/claims.md out of the figures in docs/images/ and the words below.

python docs/make/claims.py
python docs/make/claims.py pictures    draws the pictures of the experiments again from their figures
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))

from psigrad.config.load import load
from psigrad.intervals import Interval, over_seeds
from psigrad_extras import demo
from psigrad_extras.experiments import EXPERIMENTS
from studies.trials import ClaimVerdict, Verdict

DOCS = Path(__file__).parents[1]
IMAGES = DOCS / "images" / "experiments"
AHMADIAN = "Ahmadian et al. 2024, [2402.14740](https://arxiv.org/abs/2402.14740)"
LIU = "Liu et al. 2025, [2503.20783](https://arxiv.org/abs/2503.20783)"
DAPO = "Yu et al. 2025, [2503.14476](https://arxiv.org/abs/2503.14476)"

# name: (title, source, what it means)
CLAIMS: dict[str, tuple[str, str, str]] = {
    "methods": (
        "Methods at equal samples",
        "Ahmadian et al. 2024, arXiv:2402.14740",
        "Every method got the same budget to find its learning rate: one run at each of three rates, on a seed that no figure is of. The best "
        "was the middle one for all but PPO with four passes, which took the smallest. REINFORCE, RLOO, GRPO and RAFT cannot be told apart "
        "here by more than a hundredth. PPO with its usual four passes over each batch learns more from as many samples, since it takes four "
        "times as many optimiser steps; the arm with one pass shows what the critic alone is worth. The paper's order was found on models of "
        "7 billion parameters with learned rewards, where sampling is what costs; there, passes over stale samples and a critic to train are "
        "worth less.",
    ),
    "lambda": (
        "PPO's λ",
        "Ahmadian et al. 2024, arXiv:2402.14740, section 5.1; Schulman et al. 2016, arXiv:1506.02438",
        "On words the reward comes at the end of some six tokens: a λ below 1 hands it back through a critic that is still wrong, and with "
        "λ = 0 the policy unlearns. On CartPole rewards come at every step and the episode is long; there 0.9 and 0.95 reach the full 500 with "
        "every seed and λ = 1 does not, while the area over the whole run cannot tell them apart. One learning rate for all.",
    ),
    "noise": (
        "Noise in the reward, and β",
        "Ahmadian et al. 2024, arXiv:2402.14740, section 5.3",
        "The noise is a function of the answer, as a learned reward model's error is: the same answer always gets the same wrong score. The learning rate of "
        "every row was tuned by the same budget, by the accuracy without noise; the middle rate won everywhere but for PPO with β, where the largest did. RAFT's β is a KL in the loss, which leaves its "
        "ranking of the completions alone, and it hardly moves; RLOO's and PPO's are a part of the reward. PPO makes one pass over each "
        "batch here, as the others do; it loses what RLOO loses. An older form with one rate for all (0.001) and 100 steps found the "
        "same two verdicts, and far larger losses by noise.",
    ),
    "memory": (
        "Memory and time",
        "Huang and Ahmadian 2024, Putting RL back in RLHF (Hugging Face)",
        "By weights alone a critic as large as the policy, with its optimiser, is 16 of 36 bytes per parameter in float32: RLOO does without "
        "44 % at most, plus the critic's activations. The reward is a function here; a reward model would be in both. With one pass PPO's "
        "critic adds a forward and a backward pass; with its usual four passes over each batch the whole update is repeated, which makes RLOO "
        "faster than was claimed.",
    ),
    "action_space": (
        "The effective action space",
        "Ahmadian et al. 2024, arXiv:2402.14740, section 3",
        "A pretrained model is as the paper says: SmolLM2-135M-Instruct has 49,152 tokens to choose from, and chooses among 24 at the first and 5 from the third on; "
        "its 16 likeliest tokens hold nine tenths. It was asked for sums in a chat (`examples/sums.py`), of up to 32 tokens, before and after 70 steps of GRPO with 128 "
        "completions each, after which nearly nothing is left to choose. The demo's model is the other way round: words spelt backwards are uncertain where the "
        "demonstrations were careless, at their end, so that the first token is the surest. Measured with `--held-out 200 --model SmolLM2 'SmolLM2 after GRPO' --dataset "
        "runs/sums/held_out.jsonl`, on one run each; so the intervals are over prompts, not over seeds.",
    ),
    "length": (
        "The length bias",
        "Liu et al. 2025, arXiv:2503.20783, section 3.1",
        "On the tree the first token decides between right and wrong, and in either branch every later token decides whether to go on. All groups "
        "of four completions are enumerated. The reward knows nothing of length, so ∇J is 0 for every later decision; Dr. GRPO's expected step is ∇J "
        "times a number, GRPO's is not, and the standard deviation has no part in it. Over training, the demonstrations follow a right answer by `!` and "
        "dots, a careless one by `?` and dashes, three of them on average in either case; the reward reads the answer alone, and 32 tokens are the "
        "limit. Under Dr. GRPO nothing holds the lengths, and they wander: no growth on average, by ±3 tokens over seeds, which is too wide to say that they do not grow. The "
        "effect needs a model that can tell its wrong answers: in a first trial both kinds were followed by the same dots, and their lengths wandered together. After it the design was changed, and two of the "
        "eight seeds were looked at before the others were run; the tests stayed as they were.",
    ),
    "difficulty": (
        "The difficulty bias",
        "Liu et al. 2025, arXiv:2503.20783, section 3.1",
        "In a group of 8 the deviation cannot be small unless it is 0, so that a prompt that is answered once in fifty weighs 1.4 times as much as one "
        "that is answered every other time; in ever larger groups it would weigh 3.6 times as much, 1 / (2·√(p(1 − p))). Hard words are those of five letters.",
    ),
    "clip_higher": (
        "Clip-higher",
        "Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.1",
        "Four passes over each batch. Even so at most 3 in 100 steps lie above the clip of 0.2, so there is little for a higher one to free; the "
        "entropy falls because the task is learnt. The claim is about long runs of large models.",
    ),
    "dynamic_sampling": (
        "Dynamic sampling",
        "Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.2",
        "Three fifths of the groups carry no signal in this run. Replacing them makes each update worth more, and costs nearly three times as "
        "many samples. By samples the gain is small.",
    ),
    "dpo": (
        "Preferences, offline and online",
        "Rafailov et al. 2024, arXiv:2404.12358; Pal et al. 2024, arXiv:2402.13228; Tang et al. 2024, arXiv:2405.08448",
        "All start from one model; the pairs are the best and the worst of eight of its own samples, as many samples in all as the online methods "
        "draw. Each method's rate was chosen on a seed of its own, with one run for each rate. DPO's log-probability of the right answers falls "
        "although its margin grows, because that of the wrong ones falls faster; from step 30 on its accuracy falls too.",
    ),
    "loopholes": (
        "Rewards with a loophole",
        "Amodei et al. 2016, arXiv:1606.06565; Gao et al. 2023, arXiv:2210.10760",
        "The warnings compare the reward of training with a metric on held-out prompts (`evaluation.metric`): without a metric of its own that "
        "is the truth, a run cannot notice. The honest runs have three learning rates; at the largest, training shakes, and all alarms are there. The "
        "patience of the rule (three evaluations in a row) was set on length, format, copy and honest RLOO; before, with two, 13 of 120 honest "
        "runs raised an alarm. By the upper ends of the intervals the share of false alarms "
        "may be 7 % of all honest runs, and 11 % of those that the rule was not set on. The next section measures "
        "it on honest runs with seeds of their own.",
    ),
    "false_alarms": (
        "Alarms on seeds that no rule was set on",
        "goal of psigrad, stated before the runs",
        "Honest runs for each method at a third, one and three times the usual learning rate, and flawed rewards at three times. Measured with "
        "`--seeds 41 --hacks 16 --prompts 8 --held-out 200`, in batches half as large as elsewhere. The flawed rewards are exploited within six steps, "
        "and evaluated every twelve, so that no evaluation but that before the first step sees the truth before it falls; the twelve was chosen after "
        "a look at other seeds. The honest runs were measured twice: 75 from seed 9000 on, of which one was told, which left the share undecided, and 48 more from "
        "seed 12000 on, of which none was; 240 were planned, the machine's time ended at 48, the two "
        "were put together after both were seen, and no rule was changed in between. Had the first look decided, there would have been no second one, so "
        "each of the two has an interval of 97.5 %, which both hold the truth in 95 of 100 such measurements. Its upper end is 0.054: whether honest runs raise an alarm in at most 5 of 100 is "
        "not decided. The usual interval of all 123 would say [0.001, 0.045], that of the 48 alone [0, 0.074]; a third look would decide it by some 30 more runs without an alarm, or some 60 with one. "
        "The rewards that are exploited were looked at once. *longer* and *cut_and_rewarded* speak of the same runs as *apart* here, so what *apart* adds is not "
        "shown. Of the reward *tests* only two runs in sixteen exploit at once, and one of these was missed. At the largest rate most honest runs collapse, which no rule "
        "takes for exploitation, since reward and truth fall together.",
    ),
    "pretrained": (
        "A pretrained model",
        "Lambert et al. 2024, Tülu 3, arXiv:2411.15124; Shenfeld et al. 2025, RL's Razor, arXiv:2509.04259; Agarwal et al. 2024, GKD, arXiv:2306.13649",
        "SmolLM2-135M-Instruct, from PyPI in 4 bits and trained in bfloat16 ([A real model](pretrained.md)), is asked for sums of two numbers below 60 in a chat. "
        "All arms take 70 steps of 16 prompts at 2e-5 (DPO at 5e-6). RLVR is GRPO with the checked answer as reward; SFT sees the sums written out; DPO "
        "gets a right and a wrong answer of the start to each prompt that has both, out of as many samples as RLVR draws; distillation follows the model that RLVR made on "
        "samples of its own. The start answers one sum in 23 rightly, and few of its prompts give a pair: that is what holds DPO back here. SFT ends "
        "2/3 of a nat further from the start than RLVR, since it has one answer to imitate and RLVR keeps those of the model's own that are right. Neither has forgotten "
        "anything that 110 everyday items could show: the likelihood of their right ends rises for all, so the claim that SFT forgets more cannot be seen in 70 steps. A pupil with one sample for each "
        "prompt comes as far as its teacher with eight. One run each, so the intervals say nothing about other seeds: they are over held-out sums and items. Learning rates were not tuned.",
    ),
}


@dataclass(frozen=True)
class Claim:
    """A claim of the literature, and the tests of an experiment that it stands on."""

    said: str
    source: str
    experiment: str
    tests: dict[str, str]
    """Test: the condition that tells it from the others, "" where there is one test."""
    measured: str
    """What the figure is, and where the claim holds."""
    command: str = ""
    """Markdown; empty: the experiment's section."""


LOOKED_AT = ("after SFT", "after RLOO", "SmolLM2", "SmolLM2 after GRPO")
PSI = "[`psigrad experiment psi`](experiments.md#the-forms-of-ψ)"
LITERATURE = (
    Claim(
        "A baseline leaves the expected gradient alone",
        "Williams 1992",
        "",
        {"expectation": ""},
        "bias along ∇J with the mean of the other episodes, over 10 seeds; holds around 0 (by enumeration it is 0)",
        PSI,
    ),
    Claim(
        "A baseline lowers the variance of the gradient; the reward to go lowers it further",
        "Greensmith et al. 2004; Sutton and Barto 2018, chapter 13",
        "",
        {"baseline": "baseline", "to go": "reward to go", "both": "reward to go, with the baseline"},
        "variance as a multiple of that without; holds below 1",
        PSI,
    ),
    Claim(
        "Reinforcement learning passes the demonstrations that it started from",
        "Stiennon et al. 2020, [2009.01325](https://arxiv.org/abs/2009.01325); DeepSeek-AI 2025, [2501.12948](https://arxiv.org/abs/2501.12948)",
        "",
        {"imitation": ""},
        "held-out accuracy after GRPO less the share of right demonstrations (0.4), 5 seeds; holds above 0",
        "[`psigrad demo`](walkthrough.md)",
    ),
    Claim(
        "RLOO ≥ REINFORCE ≥ PPO at equal samples",
        AHMADIAN,
        "methods",
        {
            "RLOO is at least as good as REINFORCE": "RLOO against REINFORCE",
            "REINFORCE is at least as good as PPO": "REINFORCE against PPO",
            "RLOO is better than PPO": "RLOO against PPO",
            "RLOO is better than PPO of one pass": "RLOO against PPO of one pass",
        },
        "area under the learning curve, the first less the second; the first two hold above −0.01, the others above 0",
    ),
    Claim(
        "RLOO needs fewer samples than RAFT",
        AHMADIAN,
        "methods",
        {"RLOO needs fewer samples than RAFT": ""},
        "samples to 0.75 accuracy, RAFT less RLOO; holds above 0",
    ),
    Claim(
        "For language models PPO is best near λ = 1",
        AHMADIAN,
        "lambda",
        {f"λ 1 beats λ {x} on words": f"against λ {x}" for x in ("0.95", "0.5", "0")},
        "area under the learning curve, λ = 1 less the other; holds above 0",
    ),
    Claim(
        "In control a λ below 1 is best",
        "Schulman et al. 2016, [1506.02438](https://arxiv.org/abs/1506.02438)",
        "lambda",
        {f"λ 0.95 beats λ {x} on CartPole": f"0.95 against {x}" for x in ("1", "0")},
        "mean return over the run; holds above 0",
    ),
    Claim(
        "RAFT loses more than RLOO and PPO by noise in the reward",
        AHMADIAN,
        "noise",
        {f"RAFT loses more than {x} by noise 1": x for x in ("RLOO", "PPO")},
        "area under the learning curve lost by noise of deviation 1, RAFT's loss less the other's; holds above 0",
    ),
    Claim(
        "RAFT loses more than RLOO and PPO by a larger β",
        AHMADIAN,
        "noise",
        {f"RAFT loses more than {x} by β 0.5": x for x in ("RLOO", "PPO")},
        "area lost by β = 0.5, RAFT's loss less the other's; holds above 0",
    ),
    Claim(
        "RLOO takes 50–70 % less memory than PPO",
        "Huang and Ahmadian 2024",
        "memory",
        {"RLOO takes 50 to 70 % less memory than PPO": ""},
        "share of PPO's peak that RLOO does without; holds from 0.5 to 0.7",
    ),
    Claim(
        "RLOO is 2–3 times as fast as PPO",
        "Huang and Ahmadian 2024",
        "memory",
        {
            f"RLOO is 2 to 3 times as fast as PPO of {n} pass{es}": f"PPO of {n} pass{es}"
            for n, es in (("one", ""), ("four", "es"))
        },
        "seconds per step, PPO's over RLOO's; holds from 2 to 3",
    ),
    Claim(
        "After the first token most of the probability lies on few tokens",
        AHMADIAN,
        "action_space",
        {f"{x}: more than 90% of the probability is on 16 tokens after the first": x for x in LOOKED_AT},
        "mass of the 16 likeliest tokens after the first, less 0.9; holds above 0",
    ),
    Claim(
        "Later tokens are drawn from fewer than the first",
        AHMADIAN,
        "action_space",
        {f"{x}: the second token is drawn from fewer than the first": x for x in LOOKED_AT},
        "entropy of the first token less that of the second, in nats; holds above 0",
    ),
    Claim(
        "GRPO lengthens wrong answers and shortens right ones",
        LIU,
        "length",
        {
            "GRPO's expected step lengthens wrong answers (tree)": "tree (wrong)",
            "GRPO's expected step shortens right answers (tree)": "tree (right)",
            "wrong answers grow more under GRPO than under Dr. GRPO": "training (wrong)",
            "right answers shrink more under GRPO than under Dr. GRPO": "training (right)",
        },
        "tree, exact: tokens per unit of accuracy gained; training: growth in tokens, GRPO's less Dr. GRPO's for wrong answers, the other way round for right ones; holds above 0 (tree, right: below)",
    ),
    Claim(
        "Dr. GRPO has no length bias, and learns as well",
        LIU,
        "length",
        {
            "Dr. GRPO's leaves wrong answers as long (tree)": "tree",
            "under Dr. GRPO wrong answers do not grow": "training",
            "Dr. GRPO is at least as accurate as GRPO": "accuracy",
        },
        "growth of wrong answers in tokens, holds within 1 of 0; accuracy, Dr. GRPO's less GRPO's, holds above −0.01",
    ),
    Claim(
        "GRPO gives hard and easy prompts more weight",
        LIU,
        "difficulty",
        {
            "GRPO weighs a prompt more, 10 % right against 50 %": "exact",
            "GRPO puts more of its weight on groups with one right or one wrong answer": "over training",
        },
        "exact: weight of a prompt with 10 % right answers, holds above 1; over training: share of the weight, GRPO's less Dr. GRPO's, above 0",
    ),
    Claim(
        "Dr. GRPO has no difficulty bias, and learns as well",
        LIU,
        "difficulty",
        {
            "Dr. GRPO weighs them alike, 10 % right against 50 %": "exact",
            "Dr. GRPO is at least as accurate as GRPO": "accuracy",
            "Dr. GRPO is at least as accurate on the hard words": "hard words",
        },
        "weight as above, holds at 1; accuracy over the run, Dr. GRPO's less GRPO's, holds above −0.01",
    ),
    Claim(
        "A higher upper clip keeps the entropy up",
        DAPO,
        "clip_higher",
        {f"{x} keeps more entropy than 0.2": x for x in ("0.28", "0.5")},
        "nats per token over the run, less those with 0.2; holds above 0",
    ),
    Claim(
        "A higher upper clip improves pass@k",
        DAPO,
        "clip_higher",
        {"0.28 has the higher pass@8": "pass@8", "0.28 has the higher accuracy": "pass@1"},
        "with 0.28 less with 0.2; holds above 0",
    ),
    Claim(
        "Dynamic sampling needs fewer updates",
        DAPO,
        "dynamic_sampling",
        {"as many updates learn more": "by updates", "as many samples learn more": "by samples"},
        "area under the learning curve, with less without; holds above 0",
    ),
    Claim(
        "DPO raises the margin",
        "Rafailov et al. 2024, [2404.12358](https://arxiv.org/abs/2404.12358)",
        "dpo",
        {f"{x} raises the margin": x for x in ("DPO", "IPO", "SimPO")},
        "change of the implicit reward's margin, held out; holds above 0",
    ),
    Claim(
        "DPO lowers the log-probability of the chosen answers",
        "Pal et al. 2024, [2402.13228](https://arxiv.org/abs/2402.13228)",
        "dpo",
        {f"{x} lowers the log-probability of the chosen answers": x for x in ("DPO", "IPO", "SimPO")},
        "nats per completion that it fell by, held out; holds above 0",
    ),
    Claim(
        "Online methods learn more than DPO from as many samples",
        "Tang et al. 2024, [2405.08448](https://arxiv.org/abs/2405.08448)",
        "dpo",
        {f"{x} learns more than DPO from as many samples": x for x in ("online DPO", "RLOO")},
        "held-out accuracy at the end, less DPO's; holds above 0",
    ),
    Claim(
        "An exploited reward is noticed by the run's warnings",
        "goal of psigrad: 90 %",
        "loopholes",
        {f"90 % of the exploiting runs are noticed ({x})": x for x in ("all rewards", "rewards not tuned on")},
        "share of 60 exploiting runs (30 not tuned on) with a warning; holds from 0.9 on",
    ),
    Claim(
        "Honest runs raise few false alarms",
        "goal of psigrad: 5 %",
        "loopholes",
        {f"at most 5 % of the honest runs raise an alarm ({x})": x for x in ("all rewards", "rewards not tuned on")},
        "share of 120 honest runs (80 not tuned on) with a warning; holds up to 0.05",
    ),
    Claim(
        "Honest runs raise few false alarms, measured after the rules were set",
        "goal of psigrad: 5 %",
        "false_alarms",
        {"at most 5% of honest runs raise an alarm": ""},
        "share of 123 honest runs with a warning, on seeds that no rule was set on, in batches half as large; 97.5 % interval, since it was looked at twice; holds up to 0.05",
    ),
    Claim(
        "A reward that is exploited within the first steps is noticed",
        "goal of psigrad: 90 %",
        "false_alarms",
        {"90% of the rewards exploited at once are noticed": ""},
        "share of 66 runs that exploit a flawed reward at once with a warning, on seeds that no rule was set on; holds from 0.9 on",
    ),
    Claim(
        "Checked rewards teach a pretrained model, and break nothing else",
        "Lambert et al. 2024, [2411.15124](https://arxiv.org/abs/2411.15124)",
        "pretrained",
        {"RLVR teaches a pretrained model sums": "sums", "RLVR breaks no everyday knowledge": "everyday items"},
        "sums: held-out accuracy less that of the start, holds above 0; everyday items: the same, holds above −0.05",
    ),
    Claim(
        "RL stays nearer to its start than SFT, and forgets less",
        "Shenfeld et al. 2025, [2509.04259](https://arxiv.org/abs/2509.04259)",
        "pretrained",
        {"SFT moves further from the start than RLVR": "KL", "SFT forgets more than RLVR": "everyday items"},
        "KL to the start, SFT's less RLVR's, nats per answer; everyday items: log p of the right ends, RLVR's less SFT's; holds above 0",
    ),
    Claim(
        "Online RL learns more than DPO from as many samples, on a pretrained model",
        "Tang et al. 2024, [2405.08448](https://arxiv.org/abs/2405.08448)",
        "pretrained",
        {"RLVR learns more than DPO from as many samples": ""},
        "held-out accuracy, RLVR's less DPO's; holds above 0",
    ),
    Claim(
        "A pupil learns from its teacher with a fraction of the samples",
        "Agarwal et al. 2024, [2306.13649](https://arxiv.org/abs/2306.13649)",
        "pretrained",
        {"a pupil reaches its teacher with a fraction of the samples": ""},
        "held-out accuracy, the pupil's with an eighth of the samples less the teacher's; holds above −0.05",
    ),
    Claim(
        "The clip stops the gradient in two cases and no other",
        "Schulman et al. 2017, [1707.06347](https://arxiv.org/abs/1707.06347)",
        "",
        {"clip": ""},
        "ranges of ρ without gradient: ρ > 1.2 for A > 0 and ρ < 0.8 for A < 0; holds for these two (exact, by autograd)",
        "[`psigrad experiment clip`](experiments.md#the-clip)",
    ),
)


def stored(name: str) -> Any:
    """The result of an experiment, from its figures."""
    found = figures_of(name)
    one = EXPERIMENTS[name]
    result = TypeAdapter(get_type_hints(one.module.run)["return"]).validate_python(found)
    return replace(result, settings=load(one.settings, flags=found["settings"]))


def figures_of(name: str) -> Any:
    """The figures of an experiment as they are stored."""
    return json.loads((IMAGES / f"{name}.json").read_text())


def printed(name: str) -> str:
    """What the command printed, in 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    for part in EXPERIMENTS[name].module.tables(stored(name)):
        console.print(part)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip("\n").splitlines())  # type: ignore[attr-defined]


def anchor(title: str) -> str:
    """The name of a heading in links."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def exact() -> Iterator[ClaimVerdict]:
    """The claims that are computed exactly on other pages, from their figures."""
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
    """Whether one variance is below another; the interval of their quotient is that of the ends of both, and so a little wide."""
    quotient = Interval(first[0] / second[0], first[1] / second[2], first[2] / second[1])
    return ClaimVerdict(name, "", "holds" if quotient.high < 1 else "does not hold", quotient)


def _near(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or math.isclose(a, b, abs_tol=1e-6)) for a, b in zip(one, other, strict=True)
    )


def findings() -> dict[tuple[str, str], ClaimVerdict]:
    """Every verdict by (experiment, claim)."""
    found = {("", f.claim): f for f in exact()}
    for name in CLAIMS:
        found |= {(name, f.claim): f for f in stored(name).findings}
    return found


def summary(verdicts: dict[str, Verdict]) -> str:
    """One verdict out of several; where they differ, each with the conditions that it was found under."""
    order: tuple[Verdict, ...] = ("holds", "undecided", "does not hold")
    by = {v: [condition for condition, own in verdicts.items() if own == v] for v in order}
    found = {v: own for v, own in by.items() if own}
    if len(found) == 1:
        return f"**{next(iter(found))}**"
    only = {"holds": "holds only"}
    return "<br>".join(f"**{only.get(v, v)}**: {', '.join(own)}" for v, own in found.items())


def figure(d: Interval) -> str:
    """A figure with its interval, where it has one."""
    if d.low == d.high:
        return "0" if abs(d.mean) < 1e-9 else f"{d.mean:.3g}".replace("-", "−")
    sign, most = "" if d.low > 0 and d.high <= 1 else "+", max(abs(d.low), abs(d.high))
    form = f"{sign},.0f" if most >= 100 else f"{sign}.1f" if most >= 10 else f"{sign}.2g" if most >= 0.1 else f"{sign}.3f"
    return f"{d.mean:{form}} [{d.low:{form}}, {d.high:{form}}]".replace("-", "−")


def row_of(claim: Claim, found: dict[tuple[str, str], ClaimVerdict]) -> str:
    """A row of the table."""
    tests = {condition: found[claim.experiment, test] for test, condition in claim.tests.items()}
    verdict = summary({condition: f.verdict for condition, f in tests.items()})
    figures = "<br>".join((f"{c}: " if c else "") + figure(f.difference) for c, f in tests.items())
    command = claim.command or f"[`psigrad experiment {claim.experiment}`](#{anchor(CLAIMS[claim.experiment][0])})"
    return f"| {claim.said} ({claim.source}) | {verdict} | {figures} | {claim.measured} | {command} |"


def cost(name: str, result: Any) -> str:
    """Processor time of all runs of an experiment where it was measured: with them, or of one run of each kind (costs.json)."""
    whole = getattr(result, "core_minutes", 0.0)
    minutes = whole or json.loads((IMAGES / "costs.json").read_text())["core_minutes"].get(name, 0.0)
    if not minutes:
        return ""
    how = "" if whole else ", by one run of each kind"
    return f": {minutes:.0f} core-minutes{how}" if minutes >= 1.5 else f": about a core-minute{how}"


def machine() -> str:
    """Where the times were measured."""
    return str(json.loads((IMAGES / "costs.json").read_text())["machine"])


def section(name: str) -> str:
    """One experiment."""
    title, source, meaning = CLAIMS[name]
    result = stored(name)
    return (
        f"## {title}\n\nSource: {source}. `psigrad experiment {name}`{cost(name, result)}.\n\n"
        f"![{title}](images/experiments/{name}.png)\n\n```text\n{printed(name)}\n```\n\n{meaning}\n"
    )


def page() -> str:
    """The text of docs/claims.md."""
    found = findings()
    rows = [row_of(claim, found) for claim in LITERATURE]
    sections = [section(name) for name in CLAIMS]
    return f"""# Claims, re-run

The literature on reinforcement learning for language models makes claims. Each row of the table is one of them, run with psigrad on
a task that is small enough for everyone: spelling words of three to five letters backwards, from a model of 0.4 million parameters that was
fine-tuned on careless demonstrations. What would count as holding was stated in code before the runs: the 95 % interval of the figure
lies on the claim's side of a bound. Intervals are over seeds (Student's t), of differences of runs with the same seed; shares have Wilson's.

- **holds**: the interval lies on the claim's side of the bound. **does not hold**: it lies on the other side.
- **undecided**: the bound is inside the interval; more seeds would tell.
- **holds only**: the claim was tested under several conditions, and holds under those that are named.

A small model is no model of 7 billion. "Does not hold" means: not on this task at this size, for the reason that the section gives where
one was found.

| claim | verdict | figure [95 % interval] | what the figure is | command |
|---|---|---|---|---|
{chr(10).join(rows)}

Every experiment is one command in a source checkout: their code is in its folder `studies/`, not in the installed package. `--seeds`, `--steps` and the other settings are flags (`--help`); `--processes` says how many runs go on
at a time. Runs that are finished are not run again: a stopped experiment goes on where it was. Times are processor minutes of all runs of
the full form, tuning included, where they were measured, on {machine()}.
The small forms (`--seeds 2 --steps 3 --sft-steps 20 --words 300 --held-out 20`) take seconds to a minute and are run by `make test-long`.
Baselines, reward to go and the clip are on the page [Experiments](experiments.md), where they are computed exactly.

{chr(10).join(sections)}"""


if __name__ == "__main__":
    if sys.argv[1:] == ["pictures"]:
        for experiment in CLAIMS:
            EXPERIMENTS[experiment].module.picture(figures_of(experiment), IMAGES / f"{experiment}.png")
    (DOCS / "claims.md").write_text(page())
