"""Where rows come from: files, folders, saved datasets, the hub (faked), Python iterables; and what must survive on the way."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hub_stand_in import cut_off
from huggingface_hub import constants

from psigrad.config import Data
from psigrad.errors import UserError
from psigrad.language.data import sources, tasks
from psigrad.language.data.dataset_rows import Row, RowError, validate
from psigrad.language.data.sources import LoadedRows, from_rows, load, read_rows
from psigrad.seeds import permutation

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "yes"}
RECORDS = [{"prompt": f"p{i}", "answer": i, "info": {"x": [i, None]}} for i in range(5)]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def prompts(rows: LoadedRows) -> list[Any]:
    return [row.prompt for row in rows.rows]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "parquet"])
def test_all_file_types_give_the_same_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"my.{suffix}"
    if suffix == "parquet":
        datasets.Dataset.from_list(RECORDS).to_parquet(str(path))
    elif suffix == "json":
        path.write_text(json.dumps(RECORDS))
    else:
        jsonl(path, RECORDS)
    rows = load(str(path), form="prompt-only")
    lines = [1] * 5 if suffix == "json" else range(1, 6)
    columns = [{"answer": i, "info": {"x": [i, None]}} for i in range(5)]
    expected = [Row(f"my.{suffix}:{line}", prompt=f"p{i}", columns=columns[i]) for i, line in enumerate(lines)]
    assert rows == LoadedRows(expected, [])


def test_json_lines_in_a_json_file_and_a_list_over_many_lines_keep_their_line_numbers(tmp_path: Path) -> None:
    lines = jsonl(tmp_path / "lines.json", RECORDS[:2])
    assert [row.source for row in load(str(lines), form="prompt-only").rows] == ["lines.json:1", "lines.json:2"]
    listed = tmp_path / "list.json"
    listed.write_text('\n[\n\n{"prompt":\n"a"},{"prompt": "b"}\n,\n{"prompt": "c"}]\n')
    assert [row.source for row in load(str(listed), form="prompt-only").rows] == ["list.json:4", "list.json:5", "list.json:7"]


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}\r\n')
    rows = load(str(path), form="prompt-only")
    assert [(row.source, row.prompt) for row in rows.rows] == [("my.jsonl:1", "a"), ("my.jsonl:4", "b")]
    (tmp_path / "my.json").write_bytes(b'\xef\xbb\xbf[{"prompt": "a"}]')
    assert prompts(load(str(tmp_path / "my.json"), form="prompt-only")) == ["a"]


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "nul\x00", "\u202ebidi", "line\u2028\x85", "x" * 1_000_000, "<|im_end|>"])
def test_odd_text_survives_reading(text: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "my.jsonl", [{"prompt": text, "note": text}, {"prompt": [{"role": "user", "content": text}]}])
    rows = load(str(path), form="prompt-only").rows
    assert rows[0].prompt == text and rows[0].columns == {"note": text}
    assert rows[1].prompt == [{"role": "user", "content": text}]


def test_an_error_about_odd_text_can_be_printed() -> None:
    with pytest.raises(UserError) as caught:
        from_rows([{"prompt": 1, "a\ud800": 2}, {"prompt": [{"role": "\udfff", "content": "a"}]}], "prompt-only")
    assert "rows:2" in str(caught.value).encode("utf-8").decode()


def test_every_form_is_read_into_its_fields() -> None:
    def read(form: Any, **raw: Any) -> Row:
        return validate(raw, form, "x")

    chat, answer = [USER], [BOT]
    assert read("prompt-only", prompt="a", completion="gold", k=1) == Row("x", prompt="a", columns={"k": 1})
    assert read("prompt-only", prompt=chat) == Row("x", prompt=chat)
    assert read("prompt-completion", prompt="a", completion="b", messages="m") == Row("x", "a", "b", columns={"messages": "m"})
    assert read("prompt-completion", prompt=chat, completion=answer) == Row("x", chat, answer)
    assert read("messages", messages=[*chat, *answer], prompt="p") == Row("x", messages=[*chat, *answer], columns={"prompt": "p"})
    assert read("messages", text="a") == Row("x", completion="a")


def test_the_sft_form_takes_prompt_and_completion_first_then_messages_then_text() -> None:
    both = {"prompt": "a", "completion": "b", "messages": [USER, BOT]}
    assert validate(both, "sft", "x").completion == "b"
    assert validate(both | {"completion": None}, "sft", "x").messages == [USER, BOT]
    assert validate({"messages": None, "text": "t"}, "sft", "x").completion == "t"


def test_nulls_that_parquet_puts_into_messages_are_dropped(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add"}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "", "name": "add"}]
    turns += [{"role": "tool", "content": "4"}, BOT]
    datasets.Dataset.from_list([{"messages": turns}]).to_parquet(str(tmp_path / "my.parquet"))
    row = load(str(tmp_path / "my.parquet"), form="messages").rows[0]
    call["function"]["arguments"] = {}
    assert row.messages == turns


def test_a_bad_row_raises_a_typed_error_with_column_and_reason() -> None:
    with pytest.raises(RowError) as caught:
        validate({"prompt": "a", "x": np.float32("inf")}, "prompt-only", "my.jsonl:3")
    assert (caught.value.bad.source, caught.value.bad.column) == ("my.jsonl:3", "x")
    assert "inf" in caught.value.bad.reason


def test_python_rows_are_checked_like_files() -> None:
    assert prompts(from_rows(iter(RECORDS), "prompt-only")) == [f"p{i}" for i in range(5)]
    stored = from_rows(datasets.Dataset.from_list(RECORDS), "prompt-only", source="mine")
    assert prompts(stored) == [f"p{i}" for i in range(5)] and stored.rows[4].source == "mine:5"
    skipped = from_rows([{"prompt": "a"}, 7, {3: "b"}], "prompt-only", bad_rows="skip").skipped
    assert [(bad.source, bad.column) for bad in skipped] == [("rows:2", ""), ("rows:3", "")]
    for wrong in ({"form": "prompts"}, {"form": "sft", "bad_rows": "drop"}):
        with pytest.raises(UserError, match="must be"):
            from_rows([{"prompt": "a"}], **wrong)


def test_a_value_may_have_a_hundred_levels_and_no_more() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    assert from_rows([{"prompt": "a", "extra": value}], "prompt-only").rows[0].columns == {"extra": value}
    with pytest.raises(UserError, match="'extra' is nested 101 levels deep; at most 100 are read"):
        from_rows([{"prompt": "a", "extra": {"a": value}}], "prompt-only")


def test_a_folder_is_read_in_name_order_and_by_split(tmp_path: Path) -> None:
    for name in ("b", "a", "sub/c"):
        jsonl(tmp_path / "plain" / f"{name}.jsonl", [{"prompt": name}])
    (tmp_path / "plain" / "notes.txt").write_text("not data")
    rows = load(str(tmp_path / "plain"), form="prompt-only")
    assert [(row.source, row.prompt) for row in rows.rows] == [("a.jsonl:1", "a"), ("b.jsonl:1", "b"), ("sub/c.jsonl:1", "sub/c")]
    shards = ["data/train-00000-of-00002", "data/train-00001-of-00002"]
    for name in (*shards, "data/test-00000-of-00001", "dev"):
        jsonl(tmp_path / "split" / f"{name}.jsonl", [{"prompt": name}])
    assert prompts(load(str(tmp_path / "split"), form="prompt-only")) == shards
    assert prompts(load(str(tmp_path / "split"), form="prompt-only", split="test")) == ["data/test-00000-of-00001"]
    assert prompts(load(str(tmp_path / "split"), form="prompt-only", split="validation")) == ["dev"]
    (tmp_path / "split" / "dev.jsonl").unlink()
    with pytest.raises(UserError, match="no files of the split 'validation'; name one of its splits: test, train"):
        load(str(tmp_path / "split"), form="prompt-only", split="validation")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \.jsonl"):
        load(str(tmp_path / "empty"), form="prompt-only")


def compress(path: Path, ending: str) -> None:
    """Replace a file by a compressed one."""
    data = path.read_bytes()
    packed = path.with_name(path.name + ending)
    if ending == ".zst":
        with pa.CompressedOutputStream(str(packed), "zstd") as file:
            file.write(data)
    else:
        packed.write_bytes({".gz": gzip, ".bz2": bz2, ".xz": lzma}[ending].compress(data))
    path.unlink()


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_folder_of_mixed_kinds_is_read_whole(ending: str, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    compress(jsonl(tmp_path / "b.jsonl", [{"prompt": "b"}]), ending)
    jsonl(tmp_path / "C.JSONL", [{"prompt": "c"}])
    (tmp_path / "d.csv").write_text("prompt\nd\n")
    compress(tmp_path / "d.csv", ending)
    (tmp_path / "e.json").write_text('[{"prompt": "e"}]')
    compress(tmp_path / "e.json", ending)
    datasets.Dataset.from_list([{"prompt": "f"}]).to_parquet(tmp_path / "f.Parquet")
    jsonl(tmp_path / ".cache" / "left.jsonl", [{"prompt": "hidden"}])
    jsonl(tmp_path / "._a.jsonl", [{"prompt": "hidden"}])
    rows = load(str(tmp_path), form="prompt-only").rows
    assert sorted((row.prompt, row.source) for row in rows) == [
        ("a", "a.jsonl:1"), ("b", f"b.jsonl{ending}:1"), ("c", "C.JSONL:1"), ("d", f"d.csv{ending}:2"),
        ("e", f"e.json{ending}:1"), ("f", "f.Parquet:1"),
    ]  # fmt: skip
    cut = tmp_path / f"b.jsonl{ending}"
    cut.write_bytes(cut.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"b.jsonl.* can't be read"):
        load(str(tmp_path), form="prompt-only")


@pytest.mark.parametrize("kind", ["a link to a folder", "a link to nothing", "a pipe"])
def test_a_folder_in_which_rows_would_be_missing_silently_is_refused(kind: str, tmp_path: Path) -> None:
    """`rglob` skips all three. Links to files are read, as in the hub's cache, and a broken link without rows is ignored."""
    folder, other = tmp_path / "rows", tmp_path / "other"
    jsonl(folder / "a.jsonl", [{"prompt": "a"}])
    jsonl(other / "b.jsonl", [{"prompt": "b"}])
    (folder / "b.jsonl").symlink_to(other / "b.jsonl")
    (folder / "README").symlink_to("gone")
    assert [row.prompt for row in load(str(folder), form="prompt-only").rows] == ["a", "b"], "negative control"
    odd = folder / ("c.d" if "folder" in kind else "c.jsonl")
    os.mkfifo(odd) if kind == "a pipe" else odd.symlink_to(other if "folder" in kind else "gone")
    with pytest.raises(UserError, match=rf"{odd.name}, which is neither a regular file nor a link to one"):
        load(str(folder), form="prompt-only")


@pytest.mark.parametrize("name", ["b.arrow", "b.xlsx", "b.parquet.gz", "sub/b.zip"])
def test_a_folder_with_data_that_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=f"has a.jsonl, but also {name}, which cannot be read"):
        load(str(tmp_path), form="prompt-only")


def test_a_file_of_no_split_beside_files_of_splits_is_refused(tmp_path: Path) -> None:
    for name in ("train", "test", "extra"):
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}])
    with pytest.raises(UserError, match=r"files of the splits test, train, but extra\.jsonl has no split in its name"):
        load(str(tmp_path), form="prompt-only")


@pytest.fixture(params=["file", "folder", "folder of splits", "saved", "saved splits", "hub", "task"])
def ten(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A source of ten rows p0 … p9, which is the split train."""
    rows, path = [{"prompt": f"p{i}"} for i in range(10)], tmp_path / "rows"
    whole = datasets.Dataset.from_list(rows)
    whole.to_json(tmp_path / "hub.jsonl")
    match request.param:
        case "file":
            return str(jsonl(tmp_path / "rows.jsonl", rows))
        case "folder":
            jsonl(path / "a.jsonl", rows[:3])
            jsonl(path / "b.jsonl", rows[3:])
        case "folder of splits":
            jsonl(path / "train.jsonl", rows)
            jsonl(path / "test.jsonl", [{"prompt": "other"}])
        case "saved":
            whole.save_to_disk(path)
        case "saved splits":
            datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(path)
        case "hub":
            file, kept = {"train": str(tmp_path / "hub.jsonl")}, str(tmp_path / "cache")
            read = partial(datasets.load_dataset, "json", data_files=file, cache_dir=kept)
            monkeypatch.setattr(datasets, "load_dataset", lambda name, config, **asked: read(**asked))
            return "org/name"
        case "task":
            monkeypatch.setattr(tasks, "rows_by_name", lambda name: rows)
            return "task:made"
    return str(path)


@pytest.mark.parametrize("streamed", [0, 100])
@pytest.mark.parametrize(
    ("split", "first", "behind"),
    [("train", 0, 10), ("train[:4]", 0, 4), ("train[4:]", 4, 10), ("train[2:5]", 2, 5), ("train[:90%]", 0, 9),
     ("train[90%:]", 9, 10), ("train[:25%]", 0, 2), ("train[25%:]", 2, 10), ("train[-3:]", 7, 10), ("train[-20%:]", 8, 10)],
)  # fmt: skip
def test_a_slice_of_a_split_is_obeyed_in_every_source(split: str, first: int, behind: int, streamed: int, ten: str) -> None:
    rows = load(ten, form="prompt-only", split=split, max_rows=streamed)
    assert prompts(rows) == [f"p{i}" for i in range(first, behind)]


@pytest.mark.parametrize("split", ["nonsense", "validation", "nonsense[:4]", "train[:x]", "train[4]"])
def test_a_split_that_does_not_exist_is_refused_in_every_source(split: str, ten: str) -> None:
    with pytest.raises(UserError, match="split"):
        load(ten, form="prompt-only", split=split)


def test_a_file_without_splits_trains_as_train_and_evaluates_as_test_too(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "d.jsonl", RECORDS))
    rows, held = read_rows(Data(dataset=path, eval_dataset=path), "prompt-only", None, 0)
    assert len(rows) == len(held) == 5
    with pytest.raises(UserError, match=r"d\.jsonl has only one split, and it is not 'test'; leave out the split's name"):
        read_rows(Data(dataset=path, split="test"), "prompt-only", 0, 0)
    own = str(jsonl(tmp_path / "test.jsonl", RECORDS))
    assert len(read_rows(Data(dataset=own, split="test[:2]"), "prompt-only", 0, 0)[0]) == 2
    in_memory = Data(dataset=RECORDS, split="train[:2]", eval_dataset=RECORDS, eval_split="test[2:]")
    assert [*map(len, read_rows(in_memory, "prompt-only", None, 0))] == [2, 3]


@pytest.mark.parametrize("format", ["torch", "numpy", None])
def test_rewards_get_plain_values_of_a_dataset_in_any_format(format: str | None, tmp_path: Path) -> None:
    record = {"prompt": "5?", "answer": 5, "share": 0.5, "list": [1, 2], "info": {"x": [1.5]}}
    made = datasets.Dataset.from_list([record]).with_format(format)
    made.save_to_disk(tmp_path / "saved")
    wanted = {name: value for name, value in record.items() if name != "prompt"}
    given = [
        from_rows(made, "prompt-only"),
        from_rows(list(made), "prompt-only"),
        load(str(tmp_path / "saved"), form="prompt-only"),
    ]
    for (row,) in (one.rows for one in given):
        assert row.columns == wanted and json.loads(json.dumps(row.columns)) == wanted


def test_a_dataset_saved_to_disk_is_read_and_a_damaged_one_named(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(RECORDS)
    one.save_to_disk(str(tmp_path / "one"))
    assert prompts(load(str(tmp_path / "one"), form="prompt-only")) == [f"p{i}" for i in range(5)]
    datasets.DatasetDict({"train": one, "test": one.select([4])}).save_to_disk(str(tmp_path / "two"))
    assert prompts(load(str(tmp_path / "two"), form="prompt-only", split="test")) == ["p4"]
    with pytest.raises(UserError, match="no split 'dev'; name one of its splits: train, test"):
        load(str(tmp_path / "two"), form="prompt-only", split="dev")
    data = next((tmp_path / "one").glob("*.arrow"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(UserError, match="one can't be read"):
        load(str(tmp_path / "one"), form="prompt-only")


def test_other_names_go_to_the_hub_with_split_and_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def fake(path: str, name: str | None, split: str, streaming: bool = False) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", fake)
    rows = load("openai/gsm8k:main", form="prompt-only", split="test")
    load("trl-lib/tldr", form="prompt-only")
    assert asked == [("openai/gsm8k", "main", "test"), ("trl-lib/tldr", None, "train")]
    assert rows.rows[2].source == "openai/gsm8k:main[test]:3"


def test_a_name_that_is_neither_file_nor_reachable_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nwith a long trace")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-prompts").mkdir()
    with pytest.raises(UserError) as caught:
        load("my-promts", form="prompt-only")
    message = str(caught.value)
    assert "the network; did you mean 'my-prompts'?" in message and "Couldn't reach the Hub" in message
    assert "long trace" not in message


@pytest.mark.parametrize("name", ["promts.jsonl", "./promts.jsonl", "{folder}/promts.jsonl"])
def test_a_mistyped_path_gets_the_nearest_name_of_its_folder(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jsonl(tmp_path / "prompts.jsonl", RECORDS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no file or folder .* did you mean 'prompts.jsonl'"):
        load(name.format(folder=tmp_path), form="prompt-only")


def test_rows_of_another_form_are_told_once_with_the_form_that_they_fit(tmp_path: Path) -> None:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 7
    with pytest.raises(UserError) as caught:
        load(str(jsonl(tmp_path / "pairs.jsonl", pairs)), form="sft")
    said = str(caught.value)
    assert said.count("column 'completion' is missing") == 1 and "7 malformed of 7 rows" in said
    assert "these are rows of the form preference" in said
    with pytest.raises(UserError, match="no preference row is left; fix the rows"):
        load(str(jsonl(tmp_path / "odd.jsonl", [{"question": "a"}])), form="preference")


@pytest.mark.parametrize("name", ["prompts.jsonl:0.5", "prompts.csv:x"])
def test_what_stands_behind_a_file_name_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match="only a weight can follow it, as in --dataset"):
        load(name, form="prompt-only")


def test_without_a_network_the_hub_is_not_asked_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(monkeypatch)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: asked.append(constants.HF_HUB_OFFLINE) or RECORDS)
    assert load("org/name", form="prompt-only").rows and asked == [True]


@pytest.mark.parametrize("name", ["", "  ", "a\0b", "x" * 5000, "/no/such/folder/x.jsonl"])
def test_impossible_names_are_user_errors(name: str) -> None:
    with pytest.raises(UserError):
        load(name, form="prompt-only")


def asked(rows: Iterable[Row]) -> list[Any]:
    return [row.prompt for row in rows]


def hold_out(rows: list[Row], n: int, seed: int = 0) -> tuple[list[Row], list[Row]]:
    (train,), held = sources.hold_out([rows], [n], seed)
    return train, held


def test_held_out_rows_are_drawn_by_the_seed() -> None:
    rows = from_rows(RECORDS, "prompt-only").rows
    train, held = hold_out(rows, 2)
    assert len(held) == 2 and sorted(asked(train) + asked(held)) == [f"p{i}" for i in range(5)]
    assert asked(train) == sorted(asked(train)), "in the order of the source"
    drawn = Counter(prompt for seed in range(200) for prompt in asked(hold_out(rows, 2, seed)[1]))
    assert hold_out(rows, 2) == (train, held) and min(drawn.values()) > 50, "each of the five is held out in about 80 of 200"
    assert hold_out(rows, 0) == (rows, [])
    for n in (-1, 5, 6):
        with pytest.raises(UserError, match=rf"Cannot hold out {n} of 5.*--eval-prompts"):
            hold_out(rows, n)


def test_rows_of_different_prompts_are_split_as_they_always_were() -> None:
    """The split of a run that goes on must be the one it began with: the first places of a permutation by the seed."""
    rows = from_rows([{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(100)], "preference").rows
    first = sorted(permutation(100, 3, "held out")[:7])
    assert asked(hold_out(rows, 7, 3)[1]) == [f"p{i}" for i in first]
    assert first == [10, 39, 52, 60, 61, 93, 99], "on every machine"


def messages(*words: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]


FOURS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "prompt-only": lambda p, i: {"prompt": f"p{p}", "answer": i},
    "prompt-completion": lambda p, i: {"prompt": messages(f"p{p}"), "completion": [{"role": "assistant", "content": f"c{i}"}]},
    "messages": lambda p, i: {"messages": messages(f"p{p}", f"c{i}", "and", "so")},
    "preference": lambda p, i: {"prompt": f"p{p}", "chosen": f"good {i}", "rejected": "bad"},
    "unpaired-preference": lambda p, i: {"prompt": f"p{p}", "completion": f"c{i}", "label": i % 2 == 0},
    "stepwise": lambda p, i: {"prompt": f"p{p}", "completions": [f"c{i}"], "labels": [True]},
}


@pytest.mark.parametrize("form", FOURS)
def test_all_rows_of_a_prompt_are_on_one_side(form: str) -> None:
    said: list[str] = []
    raw = [FOURS[form](i % 10, i) for i in range(40)]  # ten prompts, four rows each, far apart
    train, held = read_rows(Data(dataset=raw), form, 10, 0, lambda kind, text, **_: said.append(text))
    assert (len(train), len(held)) == (32, 8), "two prompts of four rows fit into ten"
    assert Counter(int(row.source.removeprefix("rows:")) % 10 for row in held).most_common()[0][1] == 4
    assert not {int(row.source.removeprefix("rows:")) % 10 for row in held} & {int(row.source[5:]) % 10 for row in train}
    assert said[-1] == (
        "8 of 40 rows, drawn at random, always all rows of a prompt together (10 were requested), are held out; "
        "--eval-prompts sets their number."
    )
    assert read_rows(Data(dataset=raw), form, 10, 0) == (train, held) != read_rows(Data(dataset=raw), form, 10, 1)


def test_a_prompt_is_what_is_read_before_the_first_trained_turn() -> None:
    """Text and one user turn are alike to a chat model; how a conversation goes on makes no other prompt of its beginning."""
    system = [{"role": "system", "content": "s"}]
    untrained = [*messages("a"), {"role": "assistant", "content": "x", "weight": 0}]
    groups: list[list[dict[str, Any]]] = [
        [{"prompt": "a", "completion": "1"}, {"prompt": messages("a"), "completion": messages("", "2")[1:]}],
        [{"messages": [*system, *messages("a", "1")]}, {"prompt": "a", "system": "s", "completion": "2"}],
        [{"messages": messages("b", "1")}, {"messages": messages("b", "2", "c", "3")}],
        [{"messages": [*untrained, *messages("d", "4")]}, {"messages": [*untrained, *messages("d", "5")]}],
        [{"text": "a"}, {"text": "a"}],
    ]
    rows = from_rows([row for group in groups for row in group], "sft").rows
    sides = {tuple(int(row.source[5:]) - 1 for row in hold_out(rows, 2, seed)[1]) for seed in range(100)}
    assert sides == {(2 * i, 2 * i + 1) for i in range(5)}, "five prompts of two rows"


def test_a_prompt_in_two_datasets_is_on_one_side_of_both(tmp_path: Path) -> None:
    for name, order in (("a", range(40)), ("b", reversed(range(40)))):
        lines = [json.dumps({"prompt": f"p{i}", "answer": name}) for i in order]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    train, held = read_rows(Data(dataset=[f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]), "prompt-only", 10, 0)
    assert asked(held) == asked(held)[:5] + asked(held)[4::-1] and not set(asked(train)) & set(asked(held))
    assert Counter(row.columns["answer"] for row in held) == {"a": 5, "b": 5} and len(train) == 70


def test_where_no_prompt_fits_the_nearest_does_and_else_the_run_says_so() -> None:
    def split(prompts: int, count: int, wanted: int | None) -> tuple[int, bool, list[str]]:
        said: dict[str, str] = {}
        raw = [{"prompt": f"p{i % prompts}", "chosen": f"good {i}", "rejected": "bad"} for i in range(count)]
        train, held = read_rows(Data(dataset=raw), "preference", wanted, 0, lambda kind, text, **_: said.update({kind: text}))
        return len(held), bool(set(asked(train)) & set(asked(held))), [said[kind] for kind in said if kind == "held_out_seen"]

    assert split(4, 20, 3) == (5, False, []), "one of five rows is nearer to three than none"
    assert split(10, 20, None) == (2, False, []) and split(5, 10, None) == (2, False, []), "a tenth, and of ten rows two"
    what = "a prompt that is also in the training rows, so figures on them may measure memorisation."
    assert split(1, 40, 8) == (8, True, [f"8 held-out rows have {what}"])
    assert split(2, 40, 1) == (1, True, [f"1 held-out row has {what}"])
    said: list[str] = []
    data = Data(dataset=RECORDS, eval_dataset=[{"prompt": "p1"}, {"prompt": "p7"}])
    assert len(read_rows(data, "prompt-only", 2, 0, lambda kind, text, **_: said.append(text))[1]) == 2
    assert said == [f"1 held-out row has {what}"]


def test_no_more_than_a_tenth_is_held_out_unless_it_is_asked_for() -> None:
    def held(count: int, form: str = "prompt-only", asked: int | None = None, **data: Any) -> int:
        raw = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(count)]
        said: list[str] = []
        found = read_rows(Data(dataset=raw, **data), form, asked, 0, lambda kind, text, **_: said.append(text))[1]
        if not data and asked != 0:
            told = f"{len(found)} of {count} rows, drawn at random, {'is' if len(found) == 1 else 'are'} held out"
            assert [told in text for text in said] == [True] * bool(found), said
        return len(found)

    assert [held(n) for n in (9, 19, 39, 640, 5000)] == [0, 1, 3, 64, 64]
    assert [held(n, "preference") for n in (39, 5000)] == [3, 256]
    assert [held(20, asked=n) for n in (0, 8, 19)] == [0, 8, 19]
    assert held(9, eval_dataset=[{"prompt": f"q{i}"} for i in range(50)]) == 50, "rows of their own are not taken from any"
    with pytest.raises(UserError, match="Cannot hold out 20 of 20"):
        held(20, asked=20)


def test_held_out_rows_of_an_eval_dataset_are_not_its_first() -> None:
    rows = [{"prompt": f"q{i:03}"} for i in range(500)]
    held = [row.prompt for row in read_rows(Data(dataset=RECORDS, eval_dataset=rows), "prompt-only", 50, 0)[1]]
    assert len(held) == 50 and held == sorted(held) and held[-1] > "q400"


def test_both_answers_of_a_pair_are_on_one_side() -> None:
    pairs = [{"prompt": f"p{i // 2}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    train, held = read_rows(Data(dataset=pairs), "unpaired-preference", 10, 0)
    assert (len(train), len(held)) == (72, 8), "80 answers to 20 prompts, four each: two prompts fit into ten"
    assert not {row.prompt for row in train} & {row.prompt for row in held}
    one = [{**pair, "prompt": "p"} for pair in pairs]
    train, held = read_rows(Data(dataset=one), "unpaired-preference", 10, 0)
    assert len(held) == 10 and not {row.source for row in train} & {row.source for row in held}


def test_the_splits_of_a_dataset_are_no_rows() -> None:
    with pytest.raises(UserError, match="a mapping with the keys train, test; give the rows of one"):
        from_rows({"train": "d.jsonl", "test": "t.jsonl"}, "prompt-only")
