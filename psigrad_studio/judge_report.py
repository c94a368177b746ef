"""Comparison of a judge with human votes and with itself: agreement, kappa, and biases by order, length and authorship.

Votes are the rows of a file that the labelling page exported (`preference`, or single votes), or those of a project in its
database. Each pair is shown to the judge in both orders, as the reward `ranking` does.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize

from psigrad.errors import UserError
from psigrad.intervals import LEAST_ROWS, wilson
from psigrad.language.rollout.scoring import Unscored, transcript_of
from psigrad_extras.judges.group_ranking import GroupRanking, Ranks
from psigrad_studio.labels import database, export, people, projects
from psigrad_studio.labels.agreement import cohen_kappa, percent_agreement

Z = 1.959964


@dataclass
class Unit:
    """A pair with human votes. `votes` are 1 if the first is better, −1 if the second is better, 0 for neither."""

    prompt: str
    texts: tuple[str, str]
    criterion: str = ""
    votes: list[int] = field(default_factory=list)
    models: tuple[str, str] = ("", "")

    @property
    def human(self) -> int | None:
        """The majority vote; None if no value has more than half of the votes."""
        value, count = Counter(self.votes).most_common(1)[0]
        return value if 2 * count > len(self.votes) else None


@dataclass
class JudgeReport:
    """The report: figures as (name, value, low, high, subject), the fitted slope of the judge, and counts of skipped rows."""

    rows: list[dict[str, Any]]
    slope: float
    left_out: dict[str, int]
    pairs: int


def read_votes(rows: Iterable[Mapping[str, Any]], left_out: Counter[str]) -> list[Unit]:
    """Return the pairs with their votes, from exported rows. Skipped rows are counted by reason in `left_out`.

    A row has prompt, chosen, rejected; or prompt, completions, and a vote's choice or ranks.
    """
    units: dict[tuple[str, str, str, str], Unit] = {}
    for number, row in enumerate(rows, 1):
        found = list(_of_row(row, left_out))
        if not found and "prompt" not in row:
            raise UserError(f"row {number} has no prompt, only {[*row]}; expected rows that the labelling desk exported.")
        prompt = transcript_of(row["prompt"])
        for first, second, vote, models, criterion in found:
            a, b = sorted((first, second))
            unit = units.setdefault((prompt, a, b, criterion), Unit(prompt, (a, b), criterion))
            unit.votes.append(vote if a == first else -vote)
            unit.models = models if a == first else models[::-1]
    return list(units.values())


def _of_row(row: Mapping[str, Any], left_out: Counter[str]) -> Iterator[tuple[str, str, int, tuple[str, str], str]]:
    """Yield (first text, second text, vote, their models, criterion) for each pair in a row, and for each aspect of a vote."""
    criterion = str(row.get("criterion") or "")
    if row.get("chosen") is not None:
        lineage = row.get("lineage") or {}
        wrote = (_model_of(lineage.get("chosen")), _model_of(lineage.get("rejected")))
        yield transcript_of(row["chosen"]), transcript_of(row["rejected"]), 1, wrote, criterion
        return
    completions = row.get("completions") or []
    if not row.get("stands", True) or row.get("action", "vote") != "vote":
        left_out["skipped or undone"] += 1
        return
    if row.get("check"):
        left_out["attention checks"] += 1
        return
    texts = [c if isinstance(c, str) else transcript_of(c.get("text", c)) for c in completions]
    models = [_model_of(c.get("origins")) if isinstance(c, Mapping) else "" for c in completions]
    ranks, answers = row.get("ranks"), row.get("answers") or {}
    said = {name: one.get("value") for name, one in answers.items() if one.get("kind") in ("better", "scale")}
    on = {name: vote for name, value in said.items() if (vote := _preferred(value)) is not None} if len(texts) == 2 else {}
    yield from ((texts[0], texts[1], vote, (models[0], models[1]), name) for name, vote in on.items())
    if row.get("choice") in ("a", "b", "tie", "both_bad") and len(texts) == 2:
        yield texts[0], texts[1], _preferred(row["choice"]) or 0, (models[0], models[1]), criterion
    elif isinstance(ranks, list) and len(ranks) == len(texts) > 1:
        for i, j in combinations(range(len(texts)), 2):
            yield texts[i], texts[j], (ranks[i] < ranks[j]) - (ranks[i] > ranks[j]), (models[i], models[j]), criterion
    elif not on:
        left_out["no comparison"] += 1


def _preferred(value: Any) -> int | None:
    """Return 1 if the first of a pair is better, −1 if the second is, 0 for neither. `value` is a choice, or two ratings."""
    if isinstance(value, list) and len(value) == 2:
        return _sign(value[0] - value[1])
    return {"a": 1, "b": -1, "tie": 0, "both_bad": 0}.get(value) if isinstance(value, str) else None


def _model_of(origins: Any) -> str:
    """Return the model that wrote a completion, if its origin names one."""
    for origin in origins if isinstance(origins, list) else [origins]:
        if isinstance(origin, Mapping):
            for key in ("model", "sampler", "run"):
                if origin.get(key):
                    return str(origin[key])
    return ""


def votes_of(source: str, project: str = "") -> list[Mapping[str, Any]]:
    """Return the rows of a JSONL file, or the votes of a project in the database of labels. Raises `UserError` if it can't."""
    path = Path(source)
    if not project:
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        except (OSError, ValueError) as error:
            raise UserError(f"{source} is not a JSONL file of votes ({error}); for a database, add --project NAME.") from error
    if "://" not in source and not path.is_file():
        raise UserError(f"{source} does not exist; give the labels' database, labels.db next to the runs folder.")
    db = database.connect(source)
    person = people.local(db)
    found = {one.settings.name: one.id for one in projects.mine(db, person)}
    if project not in found:
        raise UserError(f"{source} has no project {project!r}; expected one of {', '.join(found) or 'none'}.")
    return list(export.dump(db, person, found[project]))


def report(judge: GroupRanking, rows: Iterable[Mapping[str, Any]], *, most: int = 0, own: str = "") -> JudgeReport:
    """Compare a judge with human votes, and with itself. `own` names the model whose texts count as written by the judge.

    `most` limits the number of pairs (0: all).
    """
    left_out: Counter[str] = Counter()
    units = read_votes(rows, left_out)
    if any(not unit.criterion for unit in units):  # drop votes on criteria that the judge does not have
        left_out["other questions"] = sum(bool(unit.criterion) and unit.criterion not in judge.criteria for unit in units)
        units = [unit for unit in units if not unit.criterion or unit.criterion in judge.criteria]
    left_out["split votes"] = sum(unit.human is None for unit in units)
    units = [unit for unit in units if unit.human is not None and unit.texts[0] != unit.texts[1]]
    units = units[:most] if most else units
    # The judge ranks a pair only once, for all its aspects.
    shown = {(unit.prompt, unit.texts): unit for unit in sorted(units, key=lambda unit: not unit.criterion)}
    with ThreadPoolExecutor(judge.concurrency) as threads:
        found = dict(zip(shown, threads.map(lambda pair: judge.rank(*pair), shown), strict=True))
    reasons = [ranks.reason for ranks in found.values() if isinstance(ranks, Unscored)]
    left_out["no ranking by the judge"] = len(reasons)
    judged = [(unit, ranks) for unit in units if not isinstance(ranks := found[unit.prompt, unit.texts], Unscored)]
    once = [(unit, ranks) for unit, ranks in judged if shown[unit.prompt, unit.texts] is unit]
    if not judged:
        none = "no pair has a majority vote on one of the judge's criteria"
        raise UserError(f"The judge ranked no pair: {reasons[0].rstrip('.') if reasons else none}.")
    made = [*_beside_people(judge, judged), *_beside_itself(judge, once, own or judge.model)]
    return JudgeReport(made, _slope(judge, once), {k: v for k, v in left_out.items() if v}, len(once))


Judged = Sequence[tuple[Unit, list[Ranks]]]


def _difference(ranks: Sequence[Mapping[str, Sequence[float]]], weights: Mapping[str, float]) -> float:
    """Return the weighted score of the first text minus that of the second, averaged over the orders."""
    total = sum(weights.values()) * len(ranks)
    return math.fsum(w * (own[c][0] - own[c][1]) for own in ranks for c, w in weights.items()) / total


def _sign(value: float) -> int:
    return (value > 1e-9) - (value < -1e-9)


def _row(name: str, count: float, n: int, of: str) -> dict[str, Any]:
    if not n:
        return {"name": name, "value": math.nan, "unit": f"of 0 {of}"}
    low, high = wilson(count, n)
    return {"name": name, "value": count / n, "low": low, "high": high, "unit": f"of {n} {of}"}


def _kappa(name: str, a: Sequence[int], b: Sequence[int]) -> dict[str, Any]:
    """Return Cohen's kappa with Cohen's interval: κ ± 1.96·√(p_o (1 − p_o) / (n (1 − p_e)²))."""
    kappa, observed, n = cohen_kappa(a, b), sum(x == y for x, y in zip(a, b, strict=True)) / len(a), len(a)
    row = {"name": name, "value": kappa, "unit": f"of {n} pairs"}
    if math.isnan(kappa) or kappa == 1:
        return row
    reach = Z * math.sqrt(observed * (1 - observed) / n) * (1 - kappa) / (1 - observed)  # 1 − p_e = (1 − p_o) / (1 − κ)
    return row | {"low": max(-1.0, kappa - reach), "high": min(1.0, kappa + reach)}


def _beside_people(judge: GroupRanking, judged: Judged) -> Iterator[dict[str, Any]]:
    several = [unit.votes for unit, _ in judged if len(unit.votes) > 1]
    if several:
        table = np.full((max(map(len, several)), len(several)), np.nan)
        for place, votes in enumerate(several):
            table[: len(votes), place] = votes
        yield {"name": "people agree with each other", "value": percent_agreement(table), "unit": f"of {len(several)} pairs"}
    asked = {unit.criterion for unit, _ in judged}
    for name, weights in {"all criteria": judge.criteria, **{c: {c: 1.0} for c in judge.criteria}}.items():
        if name != "all criteria" and len(judge.criteria) == 1:
            continue
        # Votes on one of the judge's criteria count for that criterion. Other votes count for the overall judgement.
        others = name not in asked
        own = [(u, r) for u, r in judged if (u.criterion not in judge.criteria if others else u.criterion == name)]
        if not own:
            continue
        people_say, judge_says = ([u.human or 0 for u, _ in own], [_sign(_difference(r, weights)) for _, r in own])
        same = sum(a == b for a, b in zip(people_say, judge_says, strict=True))
        yield _row(f"agreement, {name}", same, len(own), "pairs")
        yield _kappa(f"kappa, {name}", people_say, judge_says)


def _beside_itself(judge: GroupRanking, judged: Judged, own: str) -> Iterator[dict[str, Any]]:
    if judge.swap:
        turns = [[_sign(_difference([one], judge.criteria)) for one in ranks] for _, ranks in judged]
        yield _row("the same in both orders", sum(first == second for first, second in turns), len(turns), "pairs")
        first_shown = [first == 1 for first, _ in turns if first] + [second == -1 for _, second in turns if second]
        yield _row("prefers what is shown first", sum(first_shown), len(first_shown), "choices")
    said = [(unit, _sign(_difference(ranks, judge.criteria))) for unit, ranks in judged]
    longer = [(1 if len(u.texts[0]) > len(u.texts[1]) else -1, u.human, v) for u, v in said if len(u.texts[0]) != len(u.texts[1])]
    mine = [(1 if u.models[0] == own else -1, u.human, v) for u, v in said if (u.models[0] == own) != (u.models[1] == own)]
    for what, of in (("the longer", longer), (f"{own}'s own", mine)):
        for who, verdicts in (("judge", [(s, v) for s, _, v in of if v]), ("people", [(s, h) for s, h, _ in of if h])):
            if verdicts:
                name = f"{who} prefer{'s' * (who == 'judge')} {what}"
                yield _row(name, sum(s == v for s, v in verdicts), len(verdicts), "choices")


def _slope(judge: GroupRanking, judged: Judged) -> float:
    """Return the b that maximises the likelihood of the human choices, with P(first is better) = σ(b·difference of scores).

    One artificial vote in each direction, at a difference of 1, is added, so that b is finite.
    """
    votes = [(_difference(r, judge.criteria), u.human) for u, r in judged if u.human]
    x = np.array([*(d * h for d, h in votes if h), 1.0, -1.0])
    found: Any = optimize.minimize_scalar(lambda b: float(np.logaddexp(0, -b * x).sum()), bounds=(0.0, 50.0), method="bounded")
    return float(found.x)


def lines_of(found: JudgeReport) -> Iterator[str]:
    """Yield the lines that the terminal prints below the table."""
    yield f"{found.pairs} pairs" + "".join(f", {count} left out ({reason})" for reason, count in found.left_out.items())
    if found.pairs < LEAST_ROWS:
        yield f"With fewer than {LEAST_ROWS} pairs, the intervals are too wide to judge by."
    yield f"calibration: {{reward: ranking, slope: {found.slope:.3g}, …}} scores by the chance that people prefer a completion"
