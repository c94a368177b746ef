"""What lm-eval logs as metrics with intervals, by hand: a document stands there once for each filter."""

from __future__ import annotations

import pytest

from psigrad_extras.connect.task_metrics import metrics_of


def logged(doc, filter, **values):
    return {"doc_id": doc, "filter": filter, "metrics": list(values), **values}


OWN = [
    logged(0, "strict-match", exact_match=1.0),
    logged(0, "flexible-extract", exact_match=1.0),
    logged(1, "strict-match", exact_match=0.0),
    logged(1, "flexible-extract", exact_match=1.0),
]
BASE = [one | {"exact_match": 0.0} for one in sorted(OWN, key=lambda one: one["filter"])]


def test_each_filter_of_a_task_has_metrics_of_its_own():
    found = list(metrics_of({"samples": {"gsm8k": OWN}}))
    assert [(one.task, one.metric, one.documents, one.model.mean) for one in found] == [
        ("gsm8k", "exact_match,strict-match", 2, 0.5),
        ("gsm8k", "exact_match,flexible-extract", 2, 1.0),
    ]
    # Wilson's interval of 1 of 2, z = 1.96: 0.5 ± 1.96 · √(0.25 / 2 + 3.8415 / 16) / (1 + 3.8415 / 2)
    assert found[0].model.high == pytest.approx(0.5 + 1.96 * (0.125 + 0.24009) ** 0.5 / 2.92073, abs=1e-4)


def test_a_baseline_is_compared_by_document_within_a_filter():
    strict, flexible = metrics_of({"samples": {"gsm8k": OWN}}, {"samples": {"gsm8k": BASE}})
    assert strict.difference.mean == 0.5 and strict.baseline.mean == 0.0
    assert strict.difference[1:] == (-1.0, 1.0), "12.7 · 0.7071/√2 from 0.5, within the bounds of a difference"
    assert flexible.difference == (1.0, -1.0, 1.0), "two documents prove nothing"


def test_a_task_with_one_filter_keeps_the_plain_name_and_one_without_documents_has_nothing():
    rows = [logged(0, "none", acc=1.0, brier=(0.1, 0.2)), logged(1, "none", acc=0.0, brier=(0.1, 0.2))]
    (one,) = metrics_of({"samples": {"none_asked": [], "choice": rows}})
    assert (one.task, one.metric, one.documents, one.model.mean) == ("choice", "acc", 2, 0.5)


def test_documents_that_all_agree_leave_a_difference_possible():
    """The rule of three: of 60 documents none differs, so up to 3/60 may. With two, 1.96·0.181/√60 = 0.046 is less than that."""
    base = [{"metrics": ["acc"], "acc": i % 2} for i in range(60)]
    other = [{**one, "acc": 1} if i in (0, 2) else one for i, one in enumerate(base)]
    same, moved = (next(metrics_of({"samples": {"t": own}}, {"samples": {"t": base}})).difference for own in (base, other))
    assert same == (0.0, -0.05, 0.05)
    assert moved.mean == pytest.approx(2 / 60) and moved.low == pytest.approx(2 / 60 - 0.05)
