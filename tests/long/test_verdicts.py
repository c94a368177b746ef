"""The figures of docs/runs.md: false verdicts and power by exact sums, coverage of intervals by simulation; -s prints them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from psigrad.intervals import mean_interval, paired_difference

ROWS = (*range(10, 51), 55, 60, 64, 70, 80, 90, 100, 128, 150, 200, 256, 300, 400, 500)
RATES = tuple(float(rate) for rate in np.linspace(0.02, 0.98, 25))
GAINS = (0.05, 0.1, 0.2, 0.3, 0.5)


def chances(n, rate, gain, fixed=0.0):
    """[better, worse]: the probability that so many of n rows of 0 and 1 turn. A share `fixed` of the rows never turns."""
    turned = max((1 - fixed) * (rate * (1 - rate - gain) + (1 - rate) * (rate + gain)), gain)
    better, worse = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
    rest = n - better - worse
    log = special.gammaln(n + 1) + special.xlogy(better, (turned + gain) / 2) + special.xlogy(worse, (turned - gain) / 2)
    for count in (better, worse, np.maximum(rest, 0)):
        log = log - special.gammaln(count + 1)
    return np.where(rest >= 0, np.exp(log + special.xlogy(np.maximum(rest, 0), 1 - turned)), 0.0)


def verdicts(n):
    """[better, worse]: True where psigrad, a paired z test and McNemar's mid-p test see a change."""
    better, worse = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
    turned, change = better + worse, (better - worse) / n
    with np.errstate(all="ignore"):
        z = np.abs(change) / np.sqrt((turned - n * change**2) / (n - 1) / n) > stats.norm.ppf(0.975)
    fewer = np.minimum(better, worse)
    mcnemar = 2 * stats.binom.cdf(fewer, turned, 0.5) - stats.binom.pmf(fewer, turned, 0.5) <= 0.05
    ours = np.zeros((n + 1, n + 1), bool)
    for up in range(n + 1):
        for down in range(min(up, n - up) + 1):  # the other half is its mirror image
            before, after = [0.0] * up + [1.0] * down, [1.0] * up + [0.0] * down
            rest = [0.0] * (n - up - down)
            ours[up, down] = ours[down, up] = paired_difference(before + rest, after + rest).low > 0
    return ours, z & (turned <= n), mcnemar & (turned <= n)


@pytest.mark.long
def test_false_verdicts_and_power_at_every_size():
    means, worst, lines = [], 0.0, []
    for n in ROWS:
        ours, z, mcnemar = verdicts(n)
        false = [float(chances(n, rate, 0.0)[ours].sum()) for rate in RATES]
        fixed = [float(chances(n, rate, 0.0, share)[ours].sum()) for rate in RATES for share in (0.5, 0.9)]
        seen = []
        for rate, gain in ((rate, gain) for rate in RATES for gain in GAINS if rate + gain <= 0.98):
            for share in (0.0, 0.5):
                found = chances(n, rate, gain, share)
                power, of_z, of_mcnemar = (float(found[which].sum()) for which in (ours, z, mcnemar))
                assert power >= (of_z - 1e-12 if n >= 50 else 0.9 * of_mcnemar), (n, rate, gain, share)
                seen += [power] if (round(rate, 2), gain, share) == (0.3, 0.2, 0.0) else []
        means, worst = [*means, np.mean(false)], max(worst, *false, *fixed)
        lines.append(f"{n:4} {np.mean(false):8.1%} {max(false):8.1%} {seen[0]:8.1%}")
    print("\n   n     mean     most   0.3 → 0.5", *lines, sep="\n")
    mean = np.trapezoid(means, ROWS) / (ROWS[-1] - ROWS[0])  # every size counts alike
    print(f"all sizes {mean:.2%}, at most {worst:.2%}")
    assert mean <= 0.05 and worst <= 0.065


def means_of_four(rng, n, rate):
    return rng.binomial(4, rate, n) / 4


def of_mixed_prompts(rng, n, rate):
    """A prompt is right at a rate of its own, most near 0 or 1."""
    return rng.binomial(4, rng.beta(rate, 1 - rate, n)) / 4


# (how one evaluation is drawn, its rate before and after, the least coverage of the mean's and of the change's interval)
DRAWN = [
    *((means_of_four, rates, 0.93, 0.93) for rates in ((0.02, 0.02), (0.1, 0.1), (0.3, 0.3), (0.5, 0.5), (0.1, 0.3), (0.5, 0.9))),
    *((of_mixed_prompts, rates, 0.93, 0.93) for rates in ((0.3, 0.3), (0.2, 0.4))),
    (lambda rng, n, mean: rng.uniform(0, 2 * mean, n), (0.5, 0.4), 0.93, 0.93),
    (lambda rng, n, mean: rng.normal(mean, 3, n), (1, 2), 0.935, 0.935),
    (lambda rng, n, mean: rng.exponential(mean, n), (3, 3), 0.88, 0.935),  # of a skewed mean 0.95 needs more than 100 rows
]


@pytest.mark.long
@pytest.mark.parametrize(("draw", "rates", "least", "least_change"), DRAWN)
def test_intervals_cover_means_and_changes_of_real_values(draw, rates, least, least_change):
    rng, line = np.random.default_rng(5), []
    for n in (10, 20, 50, 100, 200):
        hits = np.zeros(2)
        for _ in range(4000):
            before, after = (draw(rng, n, rate).tolist() for rate in rates)
            low, high = mean_interval(before)
            change = paired_difference(before, after)
            hits += [low <= rates[0] <= high, change.low <= rates[1] - rates[0] <= change.high]
        covered = hits / 4000
        line.append("{:.3f}/{:.3f}".format(*covered))
        assert covered[0] >= least and covered[1] >= least_change, (n, covered)
    print(f"\n{draw.__name__} {rates}:", *line)
