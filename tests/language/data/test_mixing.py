"""Several datasets as one, tasks by name, and reading only the first rows."""

from __future__ import annotations

import json
from collections import Counter

import datasets
import pytest

from psigrad.cli import flags
from psigrad.compat.foreign_names import load as settings
from psigrad.config import Data, OnlineConfig
from psigrad.config.load import to_dict
from psigrad.errors import UserError
from psigrad.language.data import sources
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.sources import mix, parse_mixture, quotas, read_rows


def rows_of(name: str, n: int) -> list[Row]:
    return [Row(f"{name}:{i}", prompt=f"{name} {i}") for i in range(n)]


@pytest.fixture
def files(tmp_path):
    for name, n in (("a", 60), ("b", 20)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(n)))
    return tmp_path


def read(files, *names: str, **given):
    asked = ["--dataset", *(str(files / name) for name in names), "--eval-prompts", "8"]
    config = flags.parse(OnlineConfig, "grpo", [*asked, *given.get("more", [])], {"algorithm": "grpo"})
    train, held = read_rows(config.data, "prompt-only", config.evaluation.eval_prompts, config.run.seed)
    return config, [str(row.prompt) for row in train], [str(row.prompt) for row in held]


def shares(prompts) -> Counter:
    return Counter(prompt[0] for prompt in prompts)


@pytest.mark.parametrize("total", [1, 7, 10, 1000, 999_983])
@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (3, 1, 5, 1), (0.001, 0.999)])
def test_quotas_lose_nothing_and_are_within_one(total, weights):
    found = quotas(total, weights)
    assert sum(found) == total
    assert all(abs(n - total * w / sum(weights)) < 1 for n, w in zip(found, weights, strict=True))


def test_weights_give_shares_and_each_row_its_fair_number_of_times(files):
    config, train, held = read(files, "a.jsonl:0.25", "b.jsonl:0.75")
    assert shares(held) == {"a": 2, "b": 6} and not set(train) & set(held)
    assert shares(train) == {"a": 18, "b": 54}, "72 rows are left to train on"
    times = Counter(prompt for prompt in train if prompt[0] == "b")
    assert len(times) == 14 and set(times.values()) == {3, 4}
    assert len({prompt for prompt in train if prompt[0] == "a"}) == 18, "no row twice where there are enough"
    assert read(files, "a.jsonl:0.25", "b.jsonl:0.75")[1] == train
    assert read(files, "a.jsonl:0.25", "b.jsonl:0.75", more=["--seed", "1"])[1] != train
    assert to_dict(config)["data"]["dataset"] == [f"{files}/a.jsonl:0.25", f"{files}/b.jsonl:0.75"]
    assert settings(OnlineConfig, flags=to_dict(config)) == settings(OnlineConfig, flags=to_dict(config))


def test_without_weights_every_row_comes_once_and_held_out_rows_go_by_size(files):
    _, train, held = read(files, "a.jsonl", "b.jsonl")
    assert shares(held) == {"a": 6, "b": 2} and shares(train) == {"a": 54, "b": 18} and len(set(train)) == 72


def test_one_dataset_stays_one(files):
    config, train, _ = read(files, "a.jsonl")
    assert config.data.dataset == str(files / "a.jsonl") and len(train) == len(set(train)) == 52


def test_a_mixture_in_a_file_and_in_python(files):
    given = {"data": {"dataset": [f"{files}/a.jsonl:1", f"{files}/b.jsonl:1"]}, "evaluation": {"eval_prompts": 0}}
    train, _ = read_rows(settings(OnlineConfig, flags=given).data, "prompt-only", 0, seed=0)
    assert shares(row.prompt for row in train) == {"a": 40, "b": 40}


def test_what_is_no_list_of_names_is_no_mixture():
    for dataset in ("a.jsonl:0.5", [{"prompt": "x"}], []):
        assert parse_mixture(dataset) == [(dataset, None)]
    assert parse_mixture(["openai/gsm8k:main:0.5", "b:2"]) == [("openai/gsm8k:main", 0.5), ("b", 2.0)]
    assert parse_mixture(["openai/gsm8k:main", "b"]) == [("openai/gsm8k:main", None), ("b", None)]


@pytest.mark.parametrize(("names", "said"), [(["a:0.5", "b"], "'b' has none"), (["a:0", "b:1"], "weight 0")])
def test_weights_that_say_nothing_are_refused(names, said):
    with pytest.raises(UserError, match=said):
        parse_mixture(names)


def test_the_rows_that_come_once_more_are_drawn_by_the_seed_alone():
    a, b = rows_of("a", 10), rows_of("b", 30)
    found = mix([a, b], [0.5, 0.5], seed=3)
    assert found == mix([a, b], [0.5, 0.5], seed=3) and Counter(row.source[0] for row in found) == {"a": 20, "b": 20}


def test_a_task_is_a_dataset_of_different_prompts():
    rows = sources.load("task:gcd,size=50,seed=2,max_value=60", form="prompt-only").rows
    assert len({row.prompt for row in rows}) == 50 and all(row.columns["task"] == "gcd" for row in rows)
    assert [row.prompt for row in sources.load("task:gcd,size=50,seed=2,max_value=60", form="prompt-only").rows] == [
        row.prompt for row in rows
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("task:gdc", "did you mean 'gcd'"),
        ("task:gcd,50", "expected settings such as task:gcd,size=2000"),
        ("task:gcd,size=many", "expected whole numbers"),
        ("task:gcd,max_valeu=3", "cannot be made with"),
        ("task:gcd,size=10,max_numbers=-1", "cannot be made with"),
    ],
)
def test_a_task_that_cannot_be_made_is_answered(name, said):
    with pytest.raises(UserError, match=said):
        sources.load(name, form="prompt-only")


def test_only_the_first_rows_of_a_streamed_dataset_are_read(monkeypatch):
    """datasets' own streaming form, of local rows: the hub is not reached in tests."""
    seen: list[int] = []

    def rows():
        for i in range(1000):
            seen.append(i)
            yield {"prompt": f"p {i}"}

    asked = {}

    def load_dataset(name, config, split, streaming):
        asked.update(name=name, streaming=streaming)
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = sources.load("someone/large", form="prompt-only", max_rows=5)
    assert [row.prompt for row in found.rows] == [f"p {i}" for i in range(5)]
    assert asked == {"name": "someone/large", "streaming": True} and max(seen) < 10


def test_only_the_first_rows_of_a_file_are_read(files):
    (files / "a.jsonl").open("a").write("not json\n")
    assert len(sources.load(str(files / "a.jsonl"), form="prompt-only", max_rows=3).rows) == 3
    with pytest.raises(UserError, match="is not JSON"):
        sources.load(str(files / "a.jsonl"), form="prompt-only")


@pytest.mark.parametrize(
    ("sizes", "weights", "held"),
    [
        ((10, 1000), (0.9, 0.1), {"a": 1, "b": 6}),
        ((25, 1000), (0.5, 0.5), {"a": 3, "b": 32}),
        ((5, 1, 4), (), {}),
        ((600, 200), (), {"a": 48, "b": 16}),
    ],
)
def test_a_small_dataset_of_much_weight_is_not_held_out_whole(sizes, weights, held, tmp_path):
    """64 of 1,010 rows by 9 to 1 are 58 and 6, and a has only 10: a tenth of it."""
    names = []
    for name, n in zip("abc", sizes, strict=False):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(n)))
        names.append(f"{tmp_path}/{name}.jsonl")
    data = Data(dataset=[f"{name}:{weight}" for name, weight in zip(names, weights, strict=True)] if weights else names)
    train, kept = read_rows(data, "prompt-only", None, seed=0)
    assert shares(row.prompt for row in kept) == held and not {row.prompt for row in train} & {row.prompt for row in kept}
    if weights:
        with pytest.raises(UserError, match=rf"of {sizes[0]} rows; lower eval_prompts"):
            read_rows(data, "prompt-only", 64, seed=0)
