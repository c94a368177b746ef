"""Values that come out of a sandbox: read within bounds, whatever a program writes."""

from __future__ import annotations

import json
import time

import pytest

from psigrad.processes.sandbox.executor import MissingValue, decode_value

PRIME = (1 << 61) - 1  # Python's hash of a number is its rest by this one


@pytest.mark.parametrize(
    "value",
    [
        {"set": [{"int": hex(PRIME * i)} for i in range(1, 20_000)]},
        {"dict": [[{"int": hex(PRIME * i)}, None] for i in range(1, 20_000)]},
        {"list": [{"tuple": [{"int": hex(PRIME * i)}]} for i in range(1, 20_000)]},
        {"int": "0x1" + "0" * 300_000},
    ],
    ids=["set", "dict", "list of tuples", "a number"],
)
def test_values_that_would_take_for_ever_to_judge_are_none(value):
    """A set of n numbers with one hash takes n² steps; so does the division of long numbers."""
    began = time.process_time()
    assert isinstance(decode_value(json.dumps({"value": value}).encode()), MissingValue)
    assert time.process_time() - began < 3.0  # 20,000² steps take half a minute


def test_values_that_are_only_many_or_large_are_read():
    for value in (
        [-1, -2] * 5000,
        [0] * 5000,
        list(range(5000)),
        [[1], [2]] * 2000,
        1 << 500_000,
        {str(i): i for i in range(5000)},
    ):
        assert decode_value(json.dumps({"value": tagged(value)}).encode()) == value
    assert decode_value(json.dumps({"value": {"set": [tagged(i) for i in range(5000)]}}).encode()) == set(range(5000))


def tagged(value):
    """As the driver writes it."""
    if isinstance(value, list):
        return {"list": [tagged(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[k, tagged(v)] for k, v in value.items()]}
    return {"int": hex(value)}
