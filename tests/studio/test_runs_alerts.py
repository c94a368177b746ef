"""The rules that watch a run: each is raised by what it is about, left alone by a run that goes well, and doesn't tremble."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from run_folders import figures

from psigrad.records.signals import SIGNAL_BY_NAME as SIGNALS
from psigrad.records.warnings import BY_NAME, RULES, Watch, name_of

ROWS = 80
rng_seed = SimpleNamespace(value=0)
BEGIN = 60


def named(row):
    return {name_of(key): value for key, value in row.items() if key != "step"}


def watched(change, rows=ROWS, begin=BEGIN):
    """The alerts of a run that goes well until row `begin`, and from there as `change(row number)` says."""
    watch = Watch()
    for step in range(1, rows + 1):
        watch.update(step, named(figures(step) | (change(step) if step >= begin else {})))
    return watch.alerts()


WRONG = {
    "not_finite": lambda s: {"loss": math.nan if s == BEGIN else 1.0},
    "flat_reward": lambda s: {"reward_std": 0.0},
    "dead_groups": lambda s: {"frac_reward_zero_std": 0.9},
    "truncated": lambda s: {"completions/clipped_ratio": 0.5},
    "cut_and_rewarded": lambda s: {"completions/clipped_ratio": 0.19 if s > BEGIN + 4 else 0.02, "reward": 1 + s / 100},
    "mismatch": lambda s: {"sampling/sampling_logp_difference/mean": 0.05},
    "corrected": lambda s: {"sampling/importance_sampling_ratio/mean": 0.7, "sampling/sampling_logp_difference/mean": 0.05},
    "entropy": lambda s: {"entropy": 0.05},
    "clipped": lambda s: {"clip_ratio/region_mean": 0.4},
    "critic": lambda s: {"explained_variance": -0.5},
    "grad_norm": lambda s: {"grad_norm": 30.0 if s == BEGIN else 1.0},
    "longer": lambda s: {"completions/mean_length": 90.0, **({"eval/exact/mean": 0.3} if s % 3 == 0 else {})},
    "unscored": lambda s: {"unscored": 4},
    "cut": lambda s: {"eval/episodes/cut": 3},
    "apart": lambda s: {"eval/exact/mean": 0.9 - 0.02 * (s - BEGIN), "eval/exact/low": 0.85 - 0.02 * (s - BEGIN)},
}


def test_there_is_a_case_for_every_rule():
    assert set(WRONG) | {"silent"} == set(BY_NAME) and len(BY_NAME) == len(RULES)
    assert all(rule.signal in {"", *SIGNALS} and rule.until <= rule.above for rule in RULES)


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_is_raised_by_what_it_is_about_and_names_the_step(name):
    found = {alert.rule: alert for alert in watched(WRONG[name])}
    assert name in found
    assert BEGIN <= found[name].step <= BEGIN + 15 and found[name].worst_step >= found[name].step
    assert set(found) <= {name, "truncated", "entropy"} | ({"cut_and_rewarded"} if name == "truncated" else set())


def test_negative_control_a_run_that_goes_well_raises_nothing():
    assert watched(lambda s: {}, rows=400) == []


def test_a_difference_that_is_corrected_is_not_called_off_policy_besides():
    apart = {"sampling/sampling_logp_difference/mean": 0.05}
    found = lambda **more: {alert.rule for alert in watched(lambda s: apart | more)}  # noqa: E731
    assert found() == {"mismatch"}
    assert found(**{"sampling/importance_sampling_ratio/mean": 0.97}) == set()


@pytest.mark.parametrize("name", [n for n in WRONG if BY_NAME[n].patience > 1])
def test_negative_control_fewer_rows_than_its_patience_raise_nothing(name):
    few = BY_NAME[name].patience - 1
    alerts = watched(lambda s: WRONG[name](s) if s < BEGIN + few and name not in ("critic", "longer", "cut_and_rewarded") else {})
    assert name not in {alert.rule for alert in alerts}


def evaluated(rewards, solved, prompts=64, every=5):
    """The rules that a run raises whose reward and chance to solve a held-out prompt are such, evaluated every five steps."""
    watch, rng = Watch(), random.Random(repr((rewards[0], solved[-1], len(rewards), rng_seed.value)))
    for step, (reward, chance) in enumerate(zip(rewards, solved, strict=True)):
        row = {"reward": reward + rng.gauss(0, 0.05)}
        if step % every == 0:
            mean = sum(rng.random() < chance for _ in range(prompts)) / prompts
            row |= {"eval/exact/mean": mean, "eval/exact/low": mean - 1.96 * math.sqrt(mean * (1 - mean) / prompts)}
        watch.update(step, named(row))
    return {alert.rule for alert in watch.alerts()}


def hacked_at_once(rewards, last=0.01):
    """The alerts of a run that is evaluated before it has a reward, whose metric falls at its first steps and stays there."""
    watch = Watch()
    for step in range(31):
        held_out = 0.67 if step == 0 else last
        row = {} if step == 0 else {"reward": rewards[min(step, len(rewards)) - 1]}
        watch.update(step, named(row | ({"eval/m/mean": held_out, "eval/m/low": held_out - 0.01} if step % 10 == 0 else {})))
    return [alert for alert in watch.alerts() if alert.rule == "apart"]


def test_a_hack_in_the_first_steps_is_held_against_the_evaluation_before_them():
    """As in the course's chapter 5: 0.67 of the truth at step 0 and next to nothing from step 10 on. The distance in half widths
    is (0.67 − 0.01) / (0.01 √2) = 46.7, at steps 10, 20 and 30: the third evaluation in a row raises the alert.
    """
    (alert,) = hacked_at_once([0.1, 0.3, 0.6, 0.8])
    assert (alert.step, alert.ended) == (10, None) and alert.value == pytest.approx(0.66 / (0.01 * math.sqrt(2)))


@pytest.mark.parametrize(("rewards", "last"), [([0.5, 0.4, 0.3, 0.2], 0.01), ([0.1, 0.3, 0.6, 0.8], 0.665), ([0.4] * 4, 0.01)])
def test_negative_control_where_the_reward_falls_too_or_the_truth_stays_nothing_was_hacked(rewards, last):
    assert hacked_at_once(rewards, last) == []


def test_a_row_of_held_out_figures_takes_no_warning_of_nan_back():
    watch = Watch()
    for row in ({"loss": 1.0}, {"loss": math.nan}, {"eval/m/mean": 0.5, "eval/completions/mean_length": 3.0}, {"eval/loss": 1.0}):
        watch.update(1, named(row))
    assert [alert.ended for alert in watch.alerts()] == [None]
    watch.update(2, named({"loss": 1.0}))  # negative control: a sound step does
    assert [alert.ended for alert in watch.alerts()] == [2]


def test_the_mean_of_one_reward_function_is_not_the_held_out_metric():
    assert named({"eval/rewards/short/mean": 1.0, "eval/reward/mean": 2.0}) == {"eval/rewards/short/mean": 1.0, "held_out": 2.0}


def test_how_often_the_held_out_rule_is_right(record_property):
    """200 runs each: a metric that stays, one that rises with the reward, and rewards that are exploited."""
    rates = {}
    for name, last in (("stays", 0.5), ("rises", 0.8), ("exploited", 0.2)):
        hits = 0
        for rng_seed.value in range(200):
            share = [step / 199 for step in range(200)]
            hits += "apart" in evaluated([0.5 + 0.4 * x for x in share], [0.5 + (last - 0.5) * x for x in share])
        rates[name] = hits / 200
    record_property("rates", rates)
    assert rates["stays"] <= 0.1 and rates["rises"] <= 0.02 and rates["exploited"] >= 0.95, rates


def test_a_rule_that_trembles_about_its_threshold_is_raised_once():
    alerts = watched(lambda s: {"completions/clipped_ratio": 0.25 if s < BEGIN + 5 or s % 2 else 0.17}, rows=160)
    assert [alert.rule for alert in alerts].count("truncated") == 1
    assert next(a for a in alerts if a.rule == "truncated").ended is None


def test_negative_control_below_the_second_threshold_it_is_taken_back():
    alerts = watched(lambda s: {"completions/clipped_ratio": 0.5 if s < BEGIN + 5 else 0.1}, rows=100)
    found = next(a for a in alerts if a.rule == "truncated")
    assert (found.step, found.worst_step, found.value, found.ended) == (BEGIN, BEGIN, 0.5, BEGIN + 7)


def test_it_is_raised_again_when_it_comes_again():
    alerts = watched(lambda s: {"completions/clipped_ratio": 0.5 if s % 20 < 5 else 0.1}, rows=120)
    found = [a for a in alerts if a.rule == "truncated"]
    assert [a.step for a in found] == [100, 80, 60]
    assert [a.ended is None for a in found] == [False] * 3


def test_a_steady_or_noisy_gradient_is_no_leap():
    rng = random.Random(0)
    skewed = [math.exp(rng.gauss(0, 0.3)) for _ in range(200)]
    for norms, told in (([2.0] * 200, 0), (skewed, 0), ([2.0] * 40 + [7.9], 0), ([2.0] * 40 + [8.1], 1)):
        watch = Watch()
        for step, norm in enumerate(norms):
            watch.update(step, {"grad_norm": norm})
        assert len(watch.alerts()) == told


def test_the_deviation_of_the_gradient_is_that_of_the_last_50_rows():
    import statistics

    from psigrad.records.warnings import Memory

    memory, rng = Memory(), random.Random(1)
    values = [rng.uniform(0, 1e3) for _ in range(500)]
    for value in values:
        memory.keep(value)
    mean, deviation = memory.spread()
    assert mean == pytest.approx(statistics.fmean(values[-50:])) and deviation == pytest.approx(statistics.pstdev(values[-50:]))


def test_imitation_may_lose_its_entropy():
    watch = Watch()
    for step in range(50):
        watch.update(step, {"entropy": 2.0 if step < 10 else 0.01, "loss": 1.0})
    assert watch.alerts() == []


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward", "reward"),
        ("rollout/ep_rew_mean", "return"),
        ("frac_reward_zero_std", "dead_groups"),
        ("train/clip_fraction", "clipped"),
        ("optim/entropy", "entropy"),
        ("mismatch_kl/all", "mismatch"),
        ("eval/exact/mean", "held_out"),
        ("eval/return/mean", "held_out"),
        ("eval/completions/mean_length", "eval/completions/mean_length"),
        ("eval/length/mean", "eval/length/mean"),
        ("my/own", "my/own"),
    ],
)
def test_each_trainers_key_has_one_name(key, name):
    assert name_of(key) == name


def test_no_key_belongs_to_two_signals():
    keys = [key for signal in SIGNALS.values() for key in signal.keys]
    assert len(keys) == len(set(keys)) and all(
        signal.says or signal.name in ("learning_rate", "step_time") for signal in SIGNALS.values()
    )
    assert all(len(signal.labels) == 1 + len(signal.extra_keys) for signal in SIGNALS.values())
