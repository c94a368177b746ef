"""A corpus of malformed files: each must be refused with file, line or row, column and reason, and nothing but a UserError."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import repeat_for
from datasets import Dataset, DatasetDict

from psigrad.errors import UserError
from psigrad.language.data import row_files
from psigrad.language.data.sources import load

GOOD = '{"prompt": "a", "answer": 1}'
USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "yes"}


@dataclass(frozen=True)
class Case:
    """`data` is the file; the message must hold every string of `says`. Bad rows are not the first, so their number is tested."""

    id: str
    name: str
    data: bytes
    says: tuple[str, ...]
    form: Any = "prompt-only"


def line(id: str, bad: str | bytes, *says: str, form: Any = "prompt-only", good: str = GOOD) -> Case:
    raw = bad.encode() if isinstance(bad, str) else bad
    return Case(id, "my.jsonl", good.encode() + b"\n" + raw + b"\n" + good.encode() + b"\n", ("my.jsonl:2", *says), form)


def called(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


IMAGE = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
CALLED = "messages[1].tool_calls[0].function"
CROSSED = [
    USER,
    {**BOT, "tool_calls": [{"id": one, "function": {"name": "f", "arguments": {}}} for one in "ab"]},
    {"role": "tool", "tool_call_id": "b", "content": "4"},
    {"role": "tool", "tool_call_id": "a", "content": "5"},
    BOT,
]


def row(id: str, value: Any, column: str, *says: str, form: Any = "prompt-only") -> Case:
    good = {
        "prompt-only": {"prompt": "a"},
        "prompt-completion": {"prompt": "a", "completion": "b"},
        "messages": {"messages": [USER, BOT]},
        "sft": {"prompt": "a", "completion": "b"},
    }[form]
    return line(id, json.dumps(value), f"column '{column}'", *says, form=form, good=json.dumps(good))


def listed(id: str, text: str, *says: str) -> Case:
    return Case(id, "my.json", text.encode(), says)


PC: Any = "prompt-completion"
JSONL = [
    line("bad utf-8", b'{"prompt": "\xff"}', "my.jsonl:2:13", "not UTF-8", "0xff"),
    line("latin-1", '{"prompt": "déjà"}'.encode("latin-1"), "my.jsonl:2:14", "not UTF-8"),
    line("surrogate bytes", b'{"prompt": "\xed\xa0\x80"}', "not UTF-8"),
    line("cut object", '{"prompt": "a', "my.jsonl:2:12", "Unterminated string"),
    line("missing comma", '{"prompt": "a" "b": 1}', "my.jsonl:2:16", "','"),
    line("trailing comma", '{"prompt": "a",}', "my.jsonl:2", "not JSON"),
    line("single quotes", "{'prompt': 'a'}", "my.jsonl:2:2", "double quotes"),
    line("python literal", '{"prompt": None}', "my.jsonl:2:12", "Expecting value"),
    line("two objects", GOOD + GOOD, "my.jsonl:2:29", "Extra data"),
    line("raw newline escape", '{"prompt": "a\tb"}', "Invalid control character"),
    line("raw nul", b'{"prompt": "a\x00b"}', "Invalid control character"),
    line("bad escape", r'{"prompt": "\x41"}', "Invalid \\"),
    line("second bom", b"\xef\xbb\xbf" + GOOD.encode(), "not JSON"),
    line("not json at all", "prompt,answer", "my.jsonl:2:1", "not JSON"),
    line("duplicate key", '{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
    line("nested duplicate key", '{"prompt": "a", "info": {"x": 1, "x": 2}}', "'x' twice"),
    line("nan literal", '{"prompt": "a", "answer": NaN}', "'answer'", "nan", "finite"),
    line("infinity literal", '{"prompt": "a", "answer": -Infinity}', "'answer'", "-inf"),
    line("overflowing number", '{"prompt": "a", "answer": 1e999}', "'answer'", "inf"),
    line("nan deep inside", '{"prompt": "a", "info": {"x": [1, {"y": NaN}]}}', "'info.x[1].y'", "nan"),
    line("nan as prompt", '{"prompt": NaN}', "'prompt'", "a number"),
    line("huge integer", '{"prompt": "a", "answer": ' + "9" * 5000 + "}", "can't be decoded", "4300"),
    line("nested too deep", '{"prompt": ' + "[" * 200000 + "}", "my.jsonl:2"),
    line("top-level list", '["a"]', "a list", "object"),
    line("top-level string", '"a"', "a string"),
    line("top-level null", "null", "null"),
    line("top-level number", "7", "a number"),
    Case("json list named jsonl", "my.jsonl", b"[\n" + GOOD.encode() + b"\n]\n", ("my.jsonl:1:2", "must be named .json")),
    Case("utf-16", "my.jsonl", GOOD.encode("utf-16"), ("my.jsonl:1", "UTF-16", "UTF-8")),
    Case("empty file", "my.jsonl", b"", ("my.jsonl", "no rows")),
    Case("blank lines only", "my.jsonl", b"\n \n\r\n", ("my.jsonl", "no rows")),
    Case("bom only", "my.jsonl", b"\xef\xbb\xbf", ("my.jsonl", "no rows")),
    Case("unknown suffix", "my.txt", b"prompt\na\n", ("my.txt", ".jsonl", "convert")),
    Case("old mac line ends", "my.jsonl", f"{GOOD}\r{GOOD}".encode(), ("my.jsonl:1:30", "Extra data")),
]
FORMS = [
    row("missing column", {"answer": 1}, "prompt", "missing", "found: answer"),
    row("mistyped column", {"promt": "a"}, "prompt", "missing", "did you mean 'promt'"),
    row("empty object", {}, "prompt", "missing", "none"),
    row("null prompt", {"prompt": None}, "prompt", "null"),
    row("number prompt", {"prompt": 3}, "prompt", "a number", "string or a list"),
    row("object prompt", {"prompt": USER}, "prompt", "an object"),
    row("empty prompt", {"prompt": ""}, "prompt", "empty string"),
    row("empty conversation", {"prompt": []}, "prompt", "empty list"),
    row("strings as messages", {"prompt": ["a"]}, "prompt[0]", "a string", "role"),
    row("unknown role", {"prompt": [{"role": "moderator", "content": "a"}]}, "prompt[0].role", "'moderator'", "one of system"),
    row("foreign role", {"prompt": [{"role": "human", "content": "a"}]}, "prompt[0].role", "did you mean 'user'"),
    row("mistyped role", {"prompt": [{"role": "usr", "content": "a"}]}, "prompt[0].role", "did you mean 'user'"),
    row("no role", {"prompt": [{"content": "a"}]}, "prompt[0].role", "None"),
    row("sharegpt role", {"prompt": [{"from": "narrator", "value": "a"}]}, "prompt[0].from", "'narrator'", "one of system"),
    row("no content", {"prompt": [{"role": "user"}]}, "prompt[0].content", "missing"),
    row("null content", {"prompt": [{"role": "user", "content": None}]}, "prompt[0].content", "missing or null"),
    row("empty content", {"prompt": [{"role": "user", "content": ""}]}, "prompt[0].content", "empty"),
    row("part without text", {"prompt": [{**USER, "content": [{"type": "text"}]}]}, "prompt[0].content[0]", "no text"),
    row("no image", {"prompt": [IMAGE]}, "prompt[0].content[0]", "'a.png', and there is no file"),
    row("half a weight", {"messages": [USER, {**BOT, "weight": 0.5}]}, "messages[1].weight", "0.5", form="messages"),
    row("a user's weight", {"messages": [{**USER, "train": True}, BOT]}, "messages[0].train", "assistant", form="messages"),
    row(
        "call not JSON",
        {"messages": [USER, called("{a")]},
        f"{CALLED}.arguments",
        "not JSON",
        form="messages",
    ),
    row(
        "call with a list",
        {"messages": [USER, called([1])]},
        f"{CALLED}.arguments",
        "object",
        form="messages",
    ),
    row("call without name", {"messages": [USER, called({}, "")]}, CALLED, "name", form="messages"),
    row("answers crossed", {"messages": CROSSED}, "messages[2].tool_call_id", "'b'", "order", form="messages"),
    row(
        "answer to no call",
        {"messages": [*CROSSED[:3], {**CROSSED[3], "tool_call_id": "z"}, BOT]},
        "messages[3].tool_call_id",
        "'z'",
        "calls before it are 'a', 'b'",
        form="messages",
    ),
    row(
        "call without answer",
        {"messages": [*CROSSED[:3], BOT]},
        "messages[2].tool_call_id",
        "'b'",
        "the call 'a' has no answer",
        form="messages",
    ),
    row("deep message", {"prompt": [{**USER, "x": deep(200)}]}, "prompt[0]", "nested"),
    row("prompt of an answer alone", {"prompt": [BOT]}, "prompt", "ends with the role 'assistant'"),
    row("prompt ends with system", {"prompt": [{"role": "system", "content": "a"}]}, "prompt", "ends with the role 'system'"),
    row("tool without a call", {"prompt": [USER, {"role": "tool", "content": "4"}]}, "prompt[1]", "after user"),
    row("taken name", {"prompt": "a", "completions": ["x"]}, "completions", "argument", "rename"),
    row("tools not json", {"prompt": "a", "tools": "["}, "tools", "not JSON"),
    row("tools object", {"prompt": "a", "tools": {"a": 1}}, "tools", "an object", "list"),
    row("template arguments", {"prompt": "a", "chat_template_kwargs": [1]}, "chat_template_kwargs", "a list"),
    row("missing completion", {"prompt": "a"}, "completion", "missing", form=PC),
    row("null completion", {"prompt": "a", "completion": None}, "completion", "null", form=PC),
    row("empty completion", {"prompt": "a", "completion": ""}, "completion", "empty", form=PC),
    row(
        "another prompt",
        {"prompt": "b", "completion": [USER, BOT]},
        "prompt",
        "completion has no user's turn with this text",
        form=PC,
    ),
    row("completion starts with user", {"prompt": [USER, BOT, USER], "completion": [USER, BOT]}, "completion", "starts", form=PC),
    row("two system turns", {"system": "b", "prompt": [{"role": "system", "content": "a"}, USER]}, "system", "that differ"),
    row("completion ends with user", {"prompt": [USER], "completion": [BOT, USER]}, "completion", "ends", form=PC),
    row("missing messages", {"prompt": "a"}, "messages", "missing", "found: prompt", form="messages"),
    row("messages string", {"messages": "a"}, "messages", "a string", "list of messages", form="messages"),
    row("no assistant turn", {"messages": [USER]}, "messages", "no assistant turn", form="messages"),
    row("assistant first", {"messages": [BOT, USER]}, "messages[0]", "before it", form="messages"),
    row("tool first", {"messages": [{"role": "tool", "content": "4"}, BOT]}, "messages[0]", "after nothing", form="messages"),
    row("text not a string", {"text": 4}, "text", "a number", form="messages"),
    row("tool calls of a user", {"messages": [USER | {"tool_calls": [1]}, BOT]}, "messages[0].tool_calls", form="messages"),
    row("neither form", {"question": "a"}, "prompt", "missing", "question", form="sft"),
    row("no form of sft", {"conversations": []}, "prompt", "so are messages and text", "(found: conversations)", form="sft"),
]
LISTS = [
    listed("list cut short", '[\n{"prompt": "a"},\n{"prompt": "b"', "my.json:3", "not JSON"),
    listed("list without comma", '[\n{"prompt": "a"}\n{"prompt": "b"}]', "my.json:3:1", "Expecting ','"),
    listed("list with trailing comma", '[{"prompt": "a"},\n]', "my.json:2:1", "Expecting value"),
    listed("data behind the list", '[{"prompt": "a"}]\nx', "my.json:2:1", "Extra data"),
    listed("element not an object", '[{"prompt": "a"},\n\n7]', "my.json:3", "a number"),
    listed("element with bad column", '[{"prompt": "a"},\n{"prompt": 7}]', "my.json:2", "'prompt'", "a number"),
    listed("element with duplicate key", '[{"prompt": "a"},\n{"prompt": "b", "prompt": ""}]', "my.json:2", "'prompt' twice"),
    listed("element with nan", '[{"prompt": "a"},\n{"prompt": "b", "x": NaN}]', "my.json:2", "'x'", "nan"),
    listed("element with a huge integer", '[{"prompt": "a"},\n{"prompt": ' + "9" * 5000 + "}]", "my.json:2", "4300"),
    listed("one object over lines", '{"data": [\n{"prompt": "a"}\n]}', "my.json:1", "one JSON object"),
    listed("one object in a line", '{"data": [{"prompt": "a"}]}', "my.json:1", "'prompt'", "found: data"),
    listed("empty list", "[ ]", "my.json", "no rows"),
    listed("only an opening bracket", "[", "my.json:1:2", "not JSON"),
    listed("empty json", "", "my.json", "no rows"),
    Case("list in utf-16", "my.json", "[]".encode("utf-16"), ("my.json:1", "UTF-16")),
    Case("list with bad utf-8", "my.json", b'[{"prompt": "a"},\n{"prompt": "\xff"}]', ("my.json:2", "not UTF-8", "0xff")),
]


@repeat_for("case", [*JSONL, *FORMS, *LISTS])
def test_a_malformed_text_file_is_refused_by_place_and_reason(case: Case, tmp_path: Path) -> None:
    path = tmp_path / case.name
    path.write_bytes(case.data)
    with pytest.raises(UserError) as caught:
        load(str(path), form=case.form)
    message = str(caught.value)
    assert [part for part in case.says if part not in message] == [], message
    assert "\n" not in message and len(message) < 700


@repeat_for("case", [*JSONL, *FORMS])
def test_skipping_leaves_out_the_bad_line_alone(case: Case, tmp_path: Path) -> None:
    path = tmp_path / case.name
    path.write_bytes(case.data)
    if "my.jsonl:2" not in case.says:
        with pytest.raises(UserError):  # nothing good in the file
            load(str(path), form=case.form, bad_rows="skip" if case.id != "json list named jsonl" else "stop")
        return
    rows = load(str(path), form=case.form, bad_rows="skip")
    assert [row.source for row in rows.rows] == ["my.jsonl:1", "my.jsonl:3"]
    assert len(rows.skipped) == 1 and rows.skipped[0].source.startswith("my.jsonl:2") and rows.skipped[0].reason


def write(path: Path, table: pa.Table | None = None, **columns: Any) -> Path:
    pq.write_table(table if table is not None else pa.table(columns), path)
    return path


def cut(at: float) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        data = write(path, prompt=[f"prompt {i}" for i in range(500)]).read_bytes()
        path.write_bytes(data[: int(len(data) * at)])

    return make


def bad_cell(path: Path) -> None:
    write(path, prompt=["good", "ABCDEFGH", "good"])
    path.write_bytes(path.read_bytes().replace(b"ABCDEFGH", b"ABC\xffEFGH"))


def twice(path: Path) -> None:
    write(path, pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]))


def wrong_magic(path: Path) -> None:
    path.write_bytes(b"PAR2" + write(path, prompt=["a"]).read_bytes()[4:-4] + b"PAR2")


def nested(roles: list[str]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write(path, prompt=[[USER], [{"role": role, "content": "a"} for role in roles]])

    return make


PARQUET: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("truncated early", cut(0.01), ("not a complete Parquet file", "copy it again")),
    ("truncated in the middle", cut(0.5), ("not a complete Parquet file",)),
    ("truncated by a byte", cut(0.9999), ("not a complete Parquet file",)),
    ("empty file", lambda path: path.write_bytes(b""), ("not a complete Parquet file",)),
    ("text in disguise", lambda path: path.write_text(GOOD), ("not a complete Parquet file",)),
    ("wrong magic", wrong_magic, ("not a complete Parquet file",)),
    ("no rows", lambda path: write(path, prompt=pa.array([], pa.string())), ("no rows",)),
    ("missing column", lambda path: write(path, question=["a"]), ("my.parquet:1", "'prompt'", "found: question")),
    ("null cell", lambda path: write(path, prompt=["a", None]), ("my.parquet:2", "'prompt'", "null")),
    ("null in a later batch", lambda path: write(path, prompt=["a"] * 1499 + [None]), ("my.parquet:1500", "'prompt'", "null")),
    ("number column", lambda path: write(path, prompt=[1, 2]), ("my.parquet:1", "'prompt'", "a number")),
    ("empty cell", lambda path: write(path, prompt=["a", "b", ""]), ("my.parquet:3", "'prompt'", "empty")),
    ("nan cell", lambda path: write(path, prompt=["a", "b"], x=[0.0, float("nan")]), ("my.parquet:2", "'x'", "nan")),
    ("bytes column", lambda path: write(path, prompt=[b"a"]), ("my.parquet:1", "'prompt'", "bytes")),
    ("bad utf-8 cell", bad_cell, ("my.parquet:2", "'prompt'", "not UTF-8", "0xff")),
    ("column twice", twice, ("'prompt' twice",)),
    ("bad role in a list column", nested(["bot"]), ("my.parquet:2", "'prompt[0].role'", "did you mean 'assistant'")),
    ("bad order in a list column", nested(["user", "system"]), ("my.parquet:2", "'prompt'", "ends with")),
    ("empty list cell", nested([]), ("my.parquet:2", "'prompt'", "empty list")),
]


@pytest.mark.parametrize(("make", "says"), [case[1:] for case in PARQUET], ids=[case[0] for case in PARQUET])
def test_a_malformed_parquet_file_is_refused_by_place_and_reason(
    make: Callable[[Path], object], says: tuple[str, ...], tmp_path: Path
) -> None:
    make(tmp_path / "my.parquet")
    with pytest.raises(UserError) as caught:
        load(str(tmp_path / "my.parquet"), form="prompt-only")
    message = str(caught.value)
    assert [part for part in ("my.parquet", *says) if part not in message] == [], message


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(JSONL) + len(FORMS) + len(LISTS) + len(PARQUET) >= 60


def test_a_line_of_50_megabytes_is_refused_by_size_and_the_next_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    size = 50_000_000
    with path.open("wb") as file:
        file.write(GOOD.encode() + b"\n" + b'{"prompt": "' + b"x" * (size - 14) + b'"}\n' + GOOD.encode())
    rows = load(str(path), form="prompt-only", bad_rows="skip")
    assert [row.source for row in rows.rows] == ["my.jsonl:1", "my.jsonl:3"]
    assert rows.skipped[0].source == "my.jsonl:2" and f"{size + 1} bytes" in rows.skipped[0].reason


def bombs(path: Path) -> None:
    """Write 300 rows of 20,000 letters, or 50,000 nulls, into a file of a few kilobytes."""
    rows, kind = [{"prompt": "x" * 20_000}] * 300, path.name.partition(".")[2]
    if kind == "parquet" and path.stem == "nulls":
        write(path, prompt=pa.nulls(50_000, pa.string()))
    elif kind == "parquet":
        texts = pa.array([row["prompt"] for row in rows])
        write(path, prompt=texts.dictionary_encode() if path.stem == "categories" else texts)
    else:
        text = {
            "jsonl.gz": "\n".join(map(json.dumps, rows)),
            "json.xz": json.dumps(rows),
            "csv.bz2": "prompt,x\n" + "".join(f"{row['prompt']},1\n" for row in rows),
        }[kind]
        {"gz": gzip, "xz": lzma, "bz2": bz2}[kind[-3:].strip(".l")].open(path, "wb").write(text.encode())


@pytest.mark.parametrize("name", ["texts.parquet", "categories.parquet", "nulls.parquet", "a.jsonl.gz", "a.json.xz", "a.csv.bz2"])
def test_a_decompression_bomb_is_refused_within_the_limit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "LEAST_BYTES", 2**20)
    monkeypatch.setattr(row_files, "MOST_GROWTH", 1)
    bombs(tmp_path / name)
    added: list[int] = []
    add = row_files._Expansion.add
    monkeypatch.setattr(row_files._Expansion, "add", lambda self, size: added.append(size) or add(self, size))
    with pytest.raises(UserError, match=rf"{name} expands to over 1 MiB, .* write its rows to an uncompressed \.jsonl"):
        load(str(tmp_path / name), form="prompt-only")
    assert 2**20 < sum(added) < 3.5 * 2**20, "each piece is small, though the file holds 6 MB"
    monkeypatch.undo()
    assert "nulls" in name or len(load(str(tmp_path / name), form="prompt-only").rows) == 300, "negative control: no bomb"


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_a_saved_dataset_with_compressed_buffers_is_refused_before_they_expand(
    codec: Any, dictionary: bool, tmp_path: Path
) -> None:
    """`datasets` writes none, and without compression a folder holds at most what its files do."""
    DatasetDict({"train": Dataset.from_list([{"prompt": "a"}])}).save_to_disk(tmp_path)
    (file,) = tmp_path.glob("train/*.arrow")
    texts = pa.array(["x" * 1000] * 300)
    table = pa.table({"prompt": texts.dictionary_encode() if dictionary else texts})
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as made:
        made.write_table(table)
    if codec is None:
        assert len(load(str(tmp_path), form="prompt-only").rows) == 300, "negative control"
        return
    before = pa.total_allocated_bytes()
    with pytest.raises(UserError, match="train has compressed buffers"):
        load(str(tmp_path), form="prompt-only")
    assert pa.total_allocated_bytes() - before < 300_000, "nothing was expanded"


@pytest.mark.parametrize("extra", [0, 1])
def test_the_longest_line_is_exactly_the_limit(extra: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MAX_LINE_BYTES", 100)
    text = '{"prompt": "' + "x" * (85 + extra) + '"}\n'
    assert len(text) == 100 + extra
    path = tmp_path / "my.jsonl"
    path.write_text(f"{GOOD}\n{text}{GOOD}\n")
    assert len(load(str(path), form="prompt-only", bad_rows="skip").skipped) == extra


def test_many_bad_rows_are_counted_and_the_first_five_shown(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text("\n".join([GOOD, *['{"prompt": 1}'] * 12, GOOD]))
    with pytest.raises(UserError) as caught:
        load(str(path), form="prompt-only")
    message = str(caught.value)
    assert "12 malformed of 14 rows" in message and "and 7 more" in message and "--bad-rows skip" in message
    assert [n for n in range(1, 15) if f"my.jsonl:{n}:" in message] == [2, 3, 4, 5, 6]


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip, cut, delete, insert or double some bytes."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, max(len(out), 1)))
        end = at + int(rng.integers(1, 20))
        match int(rng.integers(0, 5)):
            case 0:
                if out:
                    out[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                del out[at:]
            case 2:
                del out[at:end]
            case 3:
                out[at:at] = rng.bytes(end - at)
            case _:
                out[at:at] = out[at:end]
    return bytes(out)


def good_file(suffix: str, path: Path) -> bytes:
    records = [{"prompt": f"what is {i} plus é?", "answer": i, "info": {"x": [i / 2, None]}} for i in range(20)]
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif suffix == ".json":
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False))
    else:
        path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_a_mutated_file_gives_good_rows_or_a_user_error(
    suffix: str, bad_rows: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("count", 400)
    path = tmp_path / f"my{suffix}"
    data = good_file(suffix, path)
    assert len(load(str(path), form="prompt-only").rows) == 20
    rng = np.random.default_rng(7)
    hurt = 0
    for _ in range(400):
        path.write_bytes(mutate(data, rng))
        try:
            rows = load(str(path), form="prompt-only", bad_rows=bad_rows)
        except UserError as error:
            hurt += 1
            assert path.name in str(error)
        else:
            hurt += bool(rows.skipped)
            assert rows.rows and all(isinstance(row.prompt, str) and row.prompt for row in rows.rows)
            assert all(bad.source.startswith(path.name) and bad.reason for bad in rows.skipped)
    assert hurt > 100, "the mutations must hurt, or this test shows nothing"
