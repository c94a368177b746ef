"""Every online method learns a task with a known optimum, over seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import slow
from in_memory import advance, log_of, make, with_reference

from psigrad.config import Optim
from psigrad.language.rollout.types import SamplingParams, State
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective.catalog import METHODS as PRESETS

STEPS = 100
# Steps to which those go that show that what was reached stays: of seed 0, which every run of the tests has, and of others.
LAST = {0: 45}
# Steps over which a share counts.
LASTING = 10


def begins_with_a_letter(completions, **columns):
    """The optimum is 1; a random byte-level model gets about 0.1."""
    return [float(text[:1].isascii() and text[:1].islower()) for text in completions]


def worth_nothing(completions, completion_ids, **columns):
    """A reward that does not depend on the completion's beginning: nothing to learn from."""
    return [float(len(ids) % 2) for ids in completion_ids]


def run_of(algorithm, seed, function, tokenizer) -> OnlineRun:
    """A run of eight prompts with eight completions each."""
    settings = {"steps": STEPS, "prompts_per_step": 8, "num_generations": 8, "optim": Optim(learning_rate=1e-2)}
    run = make(tokenizer, algorithm, function=function, seed=seed, **settings)
    # half of the vocabulary ends a completion: an untrained model's would nearly all be cut, which DAPO leaves out
    return replace(run, params=SamplingParams(max_tokens=6, stop_token_ids=tuple(range(132, 264))))


def trained(algorithm, seed, function, tokenizer, enough: float = 2.0, last: int = STEPS) -> list[float]:
    """The share of completions that begin with a letter, step by step, until its mean over `LASTING` steps is above `enough`."""
    return shares_of(run_of(algorithm, seed, function, tokenizer), enough, last)


def shares_of(run: OnlineRun, enough: float, last: int = STEPS) -> list[float]:
    """The same, of a run."""
    state, shares = State(algorithm=run.algorithm.initial_state()), []
    for _ in range(last):
        state = advance(run, state)
        lines = [line for line in log_of(run).lines if line["step"] == state.step]
        shares.append(sum(begins_with_a_letter([line["completion"] for line in lines])) / len(lines))
        if lasting(shares) > enough:
            break
    return shares


def reached(algorithm: str, shares: list[float]) -> bool:
    """Whether the method's own optimum was found. Where four completions never all miss, pass@4 has nothing more to teach."""
    share = lasting(shares)
    return 1 - (1 - share) ** 4 > 0.999 if algorithm == "pass_at_k" else share > 0.9


def lasting(shares: list[float]) -> float:
    return sum(shares[-LASTING:]) / LASTING


# Behind the first token nothing matters here, and stays random: the fifth of the tokens that are least sure is never the first.
MOST = {"preset": "top_entropy", "keep": ["has_signal", "not_truncated", {"part": "top_entropy", "share": 0.8}]}


# one of each kind of Psi: learnt values, a group's mean, a moving average
TO_THE_END = ("ppo", "grpo", "reinforce_moving_average")
# and of each kind of choice of groups, completions and tokens; the others, whose gradients are enumerated, are slow
OFTEN = (*TO_THE_END, "dapo", "gspo", "raft", "pass_at_k", "top_entropy", "process_grpo")


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in PRESETS if name != "distill"]
)
def test_the_method_finds_the_optimum(algorithm, seed, tokenizer):
    # that what was reached stays is shown by those that go on; the others end where it is reached
    whole = algorithm in TO_THE_END
    method = MOST if algorithm == "top_entropy" else algorithm
    last = LAST.get(seed, STEPS) if whole else STEPS
    shares = trained(method, seed, begins_with_a_letter, tokenizer, 2.0 if whole else 0.9, last)
    assert shares[0] < 0.3 and (len(shares) == last or not whole)
    assert reached(algorithm, shares)


@pytest.fixture(scope="module")
def teacher(tokenizer):
    """A run that learnt by reward, and how well."""
    run = run_of("grpo", 0, begins_with_a_letter, tokenizer)
    return run, lasting(shares_of(run, 0.95))


@pytest.mark.parametrize("estimator", ["exact", "k1+", *slow("exact_forward", "exact_js")])
def test_distillation_finds_what_its_teacher_does(estimator, teacher, tokenizer):
    """The pupil sees no reward."""
    teacher, good = teacher
    method = {"preset": "distill", "kl": {"estimator": estimator}}
    pupil = with_reference(run_of(method, 1, worth_nothing, tokenizer), teacher.model.frozen_copy())
    shares = shares_of(pupil, 0.9)
    assert shares[0] < 0.3 and lasting(shares) > 0.9 * good > 0.8


def test_negative_control_tokens_that_are_sure_learn_nothing_where_the_others_are_not_what_matters(tokenizer):
    assert lasting(trained("top_entropy", 0, begins_with_a_letter, tokenizer, last=LAST[0])) < 0.4


def test_negative_control_an_unrelated_reward_teaches_it_nothing(tokenizer):
    shares = trained("grpo", 0, worth_nothing, tokenizer, last=LAST[0])
    assert len(shares) == LAST[0] and lasting(shares) < 0.6
