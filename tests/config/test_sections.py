"""Sections of settings: columns and objects written as text, and numbers that follow from others."""

from __future__ import annotations

import pytest

from psigrad.config.sections import Run, Sampling, object_of, parse_columns
from psigrad.errors import UserError


def test_columns_are_pairs_and_a_comma_within_one_belongs_to_it():
    assert parse_columns("question=prompt,b.c=answer") == {"question": "prompt", "b.c": "answer"}
    assert parse_columns("prompt={q}, think first.\\n,a=b") == {"prompt": "{q}, think first.\n", "a": "b"}
    for wrong, said in (("question", "has 'question'; expected pairs"), ("a=", "has 'a='"), ("a=b,a=c", "has 'a' twice")):
        with pytest.raises(UserError, match=said):
            parse_columns(wrong)


def test_an_object_is_json_or_a_mapping():
    assert object_of('{"power": 2}') == object_of({"power": 2}) == {"power": 2} and object_of("") == object_of({}) == ""
    with pytest.raises(UserError, match="expected a mapping of names to values"):
        object_of("[1]")


def test_steps_cover_the_passes_and_an_engine_alone_takes_most_of_its_gpus():
    assert [Run(num_train_epochs=n).steps(10, 4) for n in (0.5, 1, 2)] == [2, 3, 5] and Run(max_steps=7).steps(10, 4) == 7
    assert Sampling().vllm_memory_alone() == 0.8 and Sampling().vllm_memory_alone(0.5) == 0.4
    assert [Sampling(**x).filtered for x in ({}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.1})] == [False, True, True, True]
