"""CSV and TSV: text with quotes, commas and line ends in it; what is wrong is named by line."""

from __future__ import annotations

import pytest

from psigrad.errors import UserError
from psigrad.language.data.sources import load
from psigrad.language.rewards.builtin import exact


def write(tmp_path, text: str | bytes, name: str = "rows.csv") -> str:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_cells_are_text_whatever_is_in_them(tmp_path):
    text = 'prompt,answer,note\n"2 + 2, quickly\nplease",04,\n"say ""yes""",yes,x\n'
    first, second = load(write(tmp_path, text), form="prompt-only").rows
    assert first.prompt == "2 + 2, quickly\nplease" and first.columns == {"answer": "04", "note": None}
    assert second.prompt == 'say "yes"' and second.columns == {"answer": "yes", "note": "x"}
    assert first.source == "rows.csv:3" and second.source == "rows.csv:4"


def test_tabs_separate_a_tsv_and_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    rows = load(write(tmp_path, b"\xef\xbb\xbfprompt\tcompletion\none, two\tthree\n", "rows.tsv"), form="sft").rows
    assert (rows[0].prompt, rows[0].completion) == ("one, two", "three")


@pytest.mark.parametrize(("cell", "label"), [("true", True), ("False", False), ("1", True), ("0", False)])
def test_labels_are_read_as_such(tmp_path, cell, label):
    (row,) = load(write(tmp_path, f"prompt,completion,label\na,b,{cell}\n"), form="unpaired-preference").rows
    assert row.label is label


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize("delimiter", [";", ",", "\t", "|"])
def test_the_header_shows_the_delimiter(tmp_path, suffix, delimiter):
    text = 'prompt,answer\n"2, 3; 4|5\t6",7\n'.replace("t,a", f"t{delimiter}a").replace('",', f'"{delimiter}')
    (row,) = load(write(tmp_path, text, f"rows.{suffix}"), form="prompt-only").rows
    assert (row.prompt, row.columns) == ("2, 3; 4|5\t6", {"answer": "7"})


def test_a_column_named_label_is_a_boolean_in_unpaired_preferences_alone(tmp_path):
    path = write(tmp_path, "prompt,completion,label\na,b,0\nc,d,1\ne,f,2\n")
    rows = load(path, form="prompt-only", columns={"label": "answer"}).rows
    assert [row.columns["answer"] for row in rows] == ["0", "1", "2"]
    assert exact(["0", "1", "1"], [row.columns["answer"] for row in rows]) == [1, 1, 0]
    with pytest.raises(UserError, match="column 'label' is '2'; it must be true"):
        load(path, form="unpaired-preference")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt,answer\na\n", "rows.csv:2: has fewer values than the first line has columns"),
        ("prompt,answer\na,b,c\n", "rows.csv:2: has more values than the first line has columns"),
        ("prompt,prompt\na,b\n", "must have a different name for each column"),
        ("prompt,\na,b\n", "must have a different name for each column"),
        ("", "must have a different name for each column"),
        ('prompt\n"a\n', "is not CSV"),
        (b"prompt\n\xff\xfe\n", "is not UTF-8 (byte 0xff)"),
        ("answer\nx\n", "prompt"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, said):
    with pytest.raises(UserError) as error:
        load(write(tmp_path, text), form="prompt-only")
    assert said in str(error.value)


def test_bad_rows_may_be_left_out(tmp_path):
    found = load(write(tmp_path, "prompt,answer\na,b\nc\nd,e\n"), form="prompt-only", bad_rows="skip")
    assert [row.prompt for row in found.rows] == ["a", "d"] and len(found.skipped) == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("x" * (2**25 + 1), "rows.csv:2 is a line of over 33,554,432 characters"),
        ("a," * (2**24 + 1), "rows.csv:2 is a line of over 33,554,432 characters"),
        ('"' + ("x" * 2**20 + "\n") * 32 + 'x"', r"is not CSV \(field larger than field limit \(33554432\)\)"),
    ],
    ids=["cell", "cells", "lines"],
)
def test_a_line_or_cell_beyond_32_mib_is_refused(row, said, tmp_path):
    with pytest.raises(UserError, match=said):
        load(write(tmp_path, f"prompt\n{row}\n"), form="prompt-only")
