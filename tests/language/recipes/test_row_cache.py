"""Rows are read and encoded once: the next start maps what the first one kept, unless something they depend on has changed."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import trl
from cases import slow
from hypothesis import given
from hypothesis import strategies as st
from lone_runs import Heard, OneOf
from timing import until

from psigrad.config import Data, Evaluation, RewardConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.language.data import row_cache
from psigrad.language.data.chat.dialect import specials_of
from psigrad.language.data.chat.rendering import set_render_settings
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.row_cache import ArrowSequence, PreparedRows, UncacheableError, pack, pack_row, unpack, unpack_row
from psigrad.language.data.templates import CHATML, encode_batch, examples
from psigrad.language.examples import Answer, Example, LabelledAnswer, Pair, Steps
from psigrad.language.models import tiny
from psigrad.language.recipes import row_encoding, sft
from psigrad.language.recipes.row_encoding import Encoder, encode_rows, prepare, sum_parts
from psigrad.language.recipes.row_limits import prepare_answers
from psigrad.runs.survival import StopSignal

TURNS = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
flags = st.lists(st.booleans(), min_size=1, max_size=6)
answers = st.builds(Answer, ids, flags, st.lists(st.builds(Answer, ids, flags), max_size=2).map(tuple))
texts = st.builds(Example, ids, flags, st.booleans())
made = st.one_of(
    st.lists(texts, min_size=1, max_size=3),
    st.builds(Pair, ids, answers, answers, st.one_of(st.none(), st.floats(allow_nan=False))),
    st.builds(LabelledAnswer, ids, answers, st.booleans()),
    st.builds(Steps, ids, ids, st.lists(st.floats(0, 1), min_size=1, max_size=4)),
)


@given(made)
def test_what_is_trained_on_comes_back_as_it_was(one: Any) -> None:
    assert unpack(*pack(one)) == one


def test_the_form_of_a_mask_is_the_lengths_of_its_runs() -> None:
    assert pack(Example([5, 6, 7], [False, True, True], False)) == (
        '{"Example": [{"ids": 3}, {"flags": [1, 2]}, false]}',
        [5, 6, 7],
    )
    assert pack(Example([5], [True], False))[0] == '{"Example": [{"ids": 1}, {"flags": [0, 1]}, false]}'


@pytest.mark.parametrize("column", ["\ud800", 1, 1.5, None, True, [{"b": [1]}], "é"])
def test_a_row_comes_back_as_it_was(column: Any) -> None:
    row = Row("x:1", prompt=TURNS[:1], steps=("a",), labels=(0.5,), columns={"c": column})
    assert unpack_row(*pack_row(row)) == row


@pytest.mark.parametrize("column", [(1, 2), {1: 2}, Path("a"), b"a"])
def test_a_row_that_json_would_change_is_not_kept(column: Any) -> None:
    with pytest.raises(UncacheableError):
        pack_row(Row("x:1", prompt="a", columns={"c": column}))


def test_packed_things_are_a_sequence() -> None:
    batches = [row_cache.batch_of([pack([i]) for i in some]) for some in ([1], [2], [], [3, 4])]
    found: ArrowSequence[Any] = ArrowSequence(batches, unpack)
    assert [*found] == [[1], [2], [3], [4]] and found[-1] == [4] and found[1:3] == [[2], [3]] and len(found) == 4
    with pytest.raises(IndexError):
        found[4]


def test_more_rows_than_one_batch_come_back_in_order(tmp_path: Path) -> None:
    items = [[i] for i in range(2049)]
    row_cache.write(tmp_path / "a.arrow", PreparedRows([], [], items, [[7]]), ["told"], 10**9)
    found, told = row_cache.read(tmp_path / "a.arrow") or (None, None)
    assert found is not None and [*found.items] == items and [*found.held_out_items] == [[7]] and told == ["told"]


@pytest.fixture
def tokenizer() -> Any:
    found = tiny.tokenizer(["ab c"] * 9, 280)
    found.chat_template = CHATML
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of rows that are many: three are enough to be kept."""
    monkeypatch.setenv("PSIGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_encoding, "FEW", 1)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": TURNS}) + "\n" for _ in range(3)))
    return tmp_path


class Start:
    """A start of a run; it says how often rows were made, and what was told."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.config = SFTConfig(data=Data(str(folder / "a.jsonl")), evaluation=Evaluation(eval_prompts=1))
        self.tokenizer, self.times, self.journal, self.limit = tokenizer, 0, Heard(), 64

    @property
    def told(self) -> list[str]:
        return [text for _, text, _ in self.journal.said]

    def __call__(self, **data: Any) -> PreparedRows[Any]:
        config = replace(self.config, data=replace(self.config.data, **data))
        settings = ["sft", self.limit, config.train_empty_thinking, config.evaluation.eval_prompts, config.run.seed]

        def make(log: Any) -> PreparedRows[Any]:
            self.times += 1
            return sft._prepare(config, self.tokenizer, self.limit, log)

        return prepare(config.data, self.tokenizer, settings, self.journal, make)


def files(home: Path) -> list[Path]:
    return sorted((home / "cache" / "rows").glob("*"))


def test_the_second_start_maps_what_the_first_has_kept(home: Path, tokenizer: Any) -> None:
    start = Start(home, tokenizer)
    first, told = start(), [*start.told]
    second = start()
    assert start.times == 1 and start.told == [*told, *told] and told
    for name in ("rows", "held_out", "items", "held_out_items"):
        assert [*getattr(first, name)] == [*getattr(second, name)]
    assert [*second.items] == [examples(tokenizer, row) for row in second.rows] and len(second.rows) == 2
    assert second.sums == sum_parts(second) == sum_parts(sft._prepare(start.config, tokenizer, 64, lambda *_, **__: None))
    (line,) = {row.source for row in second.held_out}
    assert line.startswith("a.jsonl:")


CHANGES: dict[str, Callable[[Start, Path], Any]] = {
    "a row": lambda start, home: (home / "a.jsonl").write_text((home / "a.jsonl").read_text().replace("a b", "a c", 1)),
    "the template": lambda start, home: setattr(start.tokenizer, "chat_template", CHATML.replace("<|im_start|>", "<|pad|>")),
    "the template's arguments": lambda start, home: set_render_settings(
        start.tokenizer, {"enable_thinking": False}, date(2026, 1, 1)
    ),
    "the tokenizer": lambda start, home: start.tokenizer.add_tokens(["zz"]),
    "the limit": lambda start, home: setattr(start, "limit", 60),
    "the seed": lambda start, home: setattr(start, "config", replace(start.config, run=replace(start.config.run, seed=1))),
    "a setting of the data": lambda start, home: setattr(
        start, "config", replace(start.config, data=replace(start.config.data, max_rows=3))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_rows_depend_on_makes_them_anew(change: str, home: Path, tokenizer: Any) -> None:
    start = Start(home, tokenizer)
    start()
    CHANGES[change](start, home)
    start()
    assert start.times == 2
    start()
    assert start.times == 2


def test_the_number_of_processes_is_no_reason_to_make_them_anew(home: Path, tokenizer: Any) -> None:
    start = Start(home, tokenizer)
    start()
    start(num_proc=2)
    assert start.times == 1


@pytest.mark.parametrize("harm", ["cut", "one bit", "empty", "half"])
def test_a_damaged_file_is_noticed_and_written_again(harm: str, home: Path, tokenizer: Any) -> None:
    start = Start(home, tokenizer)
    before = [*start().items]
    (file,) = files(home)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes({"cut": data[:-1], "one bit": data, "empty": b"", "half": data[: len(data) // 2]}[harm])
    assert [*start().items] == before and start.times == 2
    assert [*start().items] == before and start.times == 2


def test_what_a_kill_left_is_no_file_of_rows_and_goes(home: Path, tokenizer: Any) -> None:
    start = Start(home, tokenizer)
    start()
    (file,) = files(home)
    left = file.with_name(f".{file.name}.0badcafe")
    left.write_bytes(file.read_bytes()[:99])
    fresh = left.with_suffix(".1badcafe")
    fresh.write_bytes(b"of a process that may still write")
    for leftover, minutes in ((left, 61), (fresh, 59)):
        os.utime(leftover, (0, time.time() - 60 * minutes))
    file.unlink()
    start()
    assert start.times == 2 and files(home) == [fresh, file]


def test_a_disk_that_is_full_only_means_that_nothing_is_kept(home: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    start = Start(home, tokenizer)
    assert [*start().items] == [*start().items] and start.times == 2 and not files(home)


def test_the_files_used_longest_ago_go_first(home: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(home, tokenizer)
    start()
    (first,) = files(home)
    os.utime(first, (1, 1))
    monkeypatch.setenv("PSIGRAD_CACHE_GB", str(1.5 * first.stat().st_size / 1e9))
    start.limit = 60
    start()
    assert first not in files(home) and len(files(home)) == 1
    monkeypatch.setenv("PSIGRAD_CACHE_GB", "0")
    start.limit = 61
    start()
    start()
    assert start.times == 4 and len(files(home)) == 1
    monkeypatch.setenv("PSIGRAD_CACHE_GB", "many")
    with pytest.raises(UserError, match="PSIGRAD_CACHE_GB is 'many'"):
        start()


@pytest.mark.parametrize("given", [[{"messages": TURNS}] * 3, "someone/rows", "task:leg_counting"])
def test_rows_of_which_no_file_is_here_are_not_kept(given: Any, home: Path, tokenizer: Any) -> None:
    nothing: Any = PreparedRows([], [], [], [])
    assert prepare(Data(given), tokenizer, [], Heard(), lambda log: nothing) is nothing
    assert not files(home)


def _start_twice(home: Path, tokenizer: Any) -> None:
    assert len(Start(home, tokenizer)().items) == 2


def test_two_starts_at_once_leave_one_whole_file(home: Path, tokenizer: Any) -> None:
    both = [get_context("fork").Process(target=_start_twice, args=(home, tokenizer)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
        assert one.exitcode == 0
    start = Start(home, tokenizer)
    start()
    assert start.times == 0 and len(files(home)) == 1


def test_of_several_ranks_the_first_alone_makes_them(home: Path, tokenizer: Any) -> None:
    together, ranks = threading.Barrier(2, timeout=60), [Start(home, tokenizer) for _ in range(2)]
    for number, start in enumerate(ranks):
        start.journal = Heard(world=OneOf(2, number, broadcast=lambda value: together.wait()))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(Start.__call__, ranks)
    assert [start.times for start in ranks] == [1, 0] and [*first.items] == [*second.items] and len(first.items) == 2


@pytest.fixture
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_encoding, "_AT_ONCE", 10)


@pytest.mark.usefixtures("_few_at_once")
def test_several_processes_give_what_one_gives_in_the_same_order(tokenizer: Any) -> None:
    rows = [Row(f"x:{i}", messages=[TURNS[0], {**TURNS[1], "content": "abc"[: i % 3 + 1]}]) for i in range(25)]
    encoder: Encoder[Row] = Encoder(tokenizer, partial(examples, tokenizer), sft._with_targets)
    alone, counts = encode_rows(rows, encoder, Data(num_proc=1))
    several, counted = encode_rows(rows, encoder, Data(num_proc=3))
    assert [*alone] == [*several] and isinstance(several, ArrowSequence)
    assert counts == counted and counts["rows"] == 25


@pytest.mark.usefixtures("_few_at_once")
def test_a_row_that_one_of_several_processes_refuses_is_named(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% if 'c' in messages[-1]['content'] %}{{ raise_exception('no c') }}{% endif %}" + CHATML
    rows = [Row(f"x:{i}", messages=[TURNS[0], {**TURNS[1], "content": "c" if i in (11, 20) else "a"}]) for i in range(21)]
    encoder: Encoder[Row] = Encoder(tokenizer, partial(examples, tokenizer), sft._with_targets)
    with pytest.raises(UserError, match=r"x:11: .*no c.* \(and 1 more of 21\)"):
        encode_rows(rows, encoder, Data(num_proc=2))
    assert len(encode_rows(rows, encoder, Data(num_proc=2, bad_rows="skip"))[0]) == 19


@pytest.mark.usefixtures("_few_at_once")
def test_a_process_that_dies_is_said_and_nobody_waits_for_it(tokenizer: Any) -> None:
    encoder: Encoder[int] = Encoder(tokenizer, lambda i: os._exit(9) if i == 15 else [i])
    with pytest.raises(UserError, match="One of the 2 encoding processes ended"):
        encode_rows(range(20), encoder, Data(num_proc=2))


class _Engine:
    """Of the process that made it; ending it in another is what a process group of gloo crashes at."""

    def __init__(self, said: Path) -> None:
        self.said, self.itself, self.process = said, self, os.getpid()

    def __del__(self) -> None:
        with self.said.open("a") as stream:
            stream.write("here " if os.getpid() == self.process else "in another process ")


@pytest.mark.usefixtures("_few_at_once")
def test_what_a_run_had_is_not_collected_by_the_processes_that_encode(tokenizer: Any, tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.touch()
    gc.collect()
    gc.disable()  # it is garbage from the beginning, and still there where they begin
    try:
        _Engine(said)
        encode_rows(range(20), Encoder(tokenizer, lambda i: [gc.collect() * 0 + i]), Data(num_proc=2))
        assert said.read_text() == ""
    finally:
        gc.enable()
    gc.collect()
    assert said.read_text() == "here "


def _encode_slowly(tokenizer: Any, begun: Path) -> None:
    """Exits with 3 where a stop was asked for and yet every row encoded."""
    os.setsid()

    def encode(i: int) -> list[int]:
        begun.touch()
        time.sleep(0.1)
        return [i]

    with StopSignal() as stop:
        made, _ = encode_rows(range(20), Encoder(tokenizer, encode), Data(num_proc=2))
    os._exit(3 if stop.requested and [*made] == [[i] for i in range(20)] else 1)


@pytest.mark.usefixtures("_few_at_once")
@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGTERM, signal.SIGHUP)])
def test_a_signal_to_all_of_them_is_answered_by_the_run_alone(tokenizer: Any, tmp_path: Path, number: int) -> None:
    run = get_context("fork").Process(target=_encode_slowly, args=(tokenizer, begun := tmp_path / "begun"))
    run.start()
    until(begun.exists)
    os.killpg(run.pid, number)  # as `timeout` does, and a terminal
    run.join(60)
    assert run.exitcode == 3


def test_answers_above_the_limit_are_left_out_and_counted(tokenizer: Any) -> None:
    from psigrad.language.data.pairs import encode_pair

    # a prompt of 3 tokens; answers of 1 and 2 tokens, and 1 and 4, each with its EOS: 3 + 3 and 3 + 5
    rows = [{"prompt": "a b", "chosen": "a", "rejected": text} for text in ("ba", "baba")]
    journal = Heard()
    tokenizer.chat_template = None
    encoder: Encoder[Row] = Encoder(tokenizer, partial(encode_pair, tokenizer))
    config = RewardConfig(data=Data(rows), evaluation=Evaluation(eval_prompts=0))
    assert len(prepare_answers(config, encoder, 6, journal).items) == 1
    assert ("rows_left_out", {"longer_than_max_length": 1, "kept": 1}) in [(kind, facts) for kind, _, facts in journal.said]
    with pytest.raises(UserError, match="All 2 rows have more than 5 tokens"):
        prepare_answers(config, encoder, 5, journal)


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TALKS = [
    [("user", "a b"), ("assistant", "b a")],
    [("user", "a"), ("assistant", "\n b"), ("user", " a b"), ("assistant", "a\ud800b\n")],
    [("system", "a"), ("user", "b"), ("assistant", "<think>\na\n</think>\n\nb"), ("user", "a"), ("assistant", "b")],
    [("user", "no answer")],
]


@pytest.mark.parametrize("family", ["", "qwen3", "llama3", "gemma", "phi3", "gptoss"])
def test_what_is_encoded_ahead_is_what_is_encoded_row_by_row(family: str) -> None:
    """Byte for byte of what is kept, with what is refused and counted."""
    tokenizer = tiny.tokenizer(["a b", "b a"], 270)
    tokenizer.chat_template = CHATML
    if family:
        template = (TEMPLATES / f"{family}.jinja").read_text()
        words = sorted(set(re.findall(r"<[|｜]?[a-zA-Z_▁]+[|｜]>|<(?:start|end)_of_turn>|</s>", template)))
        tokenizer.add_special_tokens({"additional_special_tokens": words, "bos_token": "<bos>"})
        tokenizer.chat_template = template
    talks = [[{"role": role, "content": text} for role, text in talk] for talk in TALKS]
    rows = [Row(f"x:{i}", messages=talk) for i, talk in enumerate(talks * 2)]
    rows += [Row("x:p", prompt=talks[0][:1], completion=talks[0][1:]), Row("x:t", prompt="a", completion="b")]
    for empty in (False, True):
        encode = partial(examples, tokenizer, empty_thinking=empty)
        plain = Encoder(tokenizer, encode, sft._with_targets)
        ahead = replace(plain, encode_batch=partial(encode_batch, tokenizer, empty_thinking=empty))
        assert (found := row_encoding._encode(ahead, rows)) == row_encoding._encode(plain, rows)
        assert found[1] and found[2]["rows"] == len(rows) - len(found[1])
        wrong = replace(plain, encode_batch=partial(_spoil, tokenizer))
        assert row_encoding._encode(wrong, rows) != found, "what is made ahead is what is taken"


def _spoil(tokenizer: Any, rows: Any) -> None:
    encode_batch(tokenizer, rows)
    for ids in specials_of(tokenizer).encoded.values():
        ids.append(5)
