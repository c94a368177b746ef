"""Writes docs/warnings.md out of the rules that raise alerts: python docs/make/alerts.py"""

from __future__ import annotations

from pathlib import Path

from psigrad.records.warnings import RULES, SIGNAL_BY_NAME, Rule

PAGE = Path(__file__).parents[1] / "warnings.md"
MORE = {
    "not_finite": "A single such step is skipped and counted; after many in a row the run stops.",
    "flat_reward": "With a group of equal rewards every advantage is 0. [The reward reads the wrong column](debugging.md) shows one.",
    "dead_groups": "A prompt that is always solved and one that never is teach nothing. The share rises by itself as the task is learnt.",
    "truncated": "A completion that is cut is judged without its answer. It says nothing about how good the policy would be with more room.",
    "cut_and_rewarded": "Both rise together where the reward counts something that more text has more of.",
    "mismatch": "With the embedded sampler the two compute the same and differ by rounding alone. vLLM, transformers' generate, a lag and "
    "lower precision differ more. Runs that correct for it (`algorithm.correction`, which they take by themselves there) raise *Much is "
    "corrected* instead.",
    "corrected": "`sampling/importance_sampling_ratio/mean` is the mean weight: 1 where nothing needs correction, less where weights are cut. "
    "Up to a tenth the correction does its work and nothing is raised.",
    "entropy": "A policy without entropy samples the same text again and again, so that groups die. On a solved task that is the end; "
    "before it, it is a stop.",
    "clipped": "A clipped token has no gradient. Some are clipped in every run with several passes; a third of them is much.",
    "critic": "Explained variance is 1 − Var(R − V)/Var(R): 1 where the critic foresees every return, 0 where it says a constant. The "
    "first ten rows are left out.",
    "grad_norm": "Most leaps are a rare batch: a long row, a first success. It matters where the reward falls after it.",
    "longer": "Longer answers may be better ones; here the held-out metric says that they are not.",
    "apart": "The held-out metric must be something else than the reward to show this. It is below its best by more than one and a half "
    "half-widths of the difference's interval, three evaluations in a row. [The reward is exploited](debugging.md) shows one.",
    "cut": "",
    "unscored": "A completion without a score is left out, never counted as 0. Above `max_unscored` the run stops.",
    "silent": "",
}


def section(rule: Rule) -> str:
    """One alert: its name, what is wrong, when it is raised, what to do."""
    figure = SIGNAL_BY_NAME[rule.signal].title if rule.signal else ""
    when = f"Raised after {rule.patience} rows in a row" if rule.patience > 1 else "Raised at once"
    drawn = f" It is drawn as *{figure}*." if figure else ""
    more = f"\n\n{MORE[rule.name]}" if MORE[rule.name] else ""
    grave = " It is shown in red." if rule.grave else ""
    return f"## {rule.title}\n\n{rule.says}{more}\n\n**What to do.** {rule.remedy}\n\n{when}.{drawn}{grave}"


def page() -> str:
    """The text of docs/warnings.md."""
    sections = "\n\n".join(map(section, RULES))
    return f"""# Alerts

Rules look at every row of figures and say when a run goes wrong: on the terminal, in `report.html`, in the studio and in `events.jsonl`. Each
is raised once and taken back when its figure is well again, so that one that trembles about a threshold is one alert.
[Debugging](debugging.md) shows most of them in a run that was spoilt on purpose; how often each is right and wrong was measured, see
[Claims](claims.md).

{sections}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
