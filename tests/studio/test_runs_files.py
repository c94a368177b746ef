"""Reading what is being written: nothing is lost, nothing counts twice, whatever a trainer, a crash or a stranger leaves."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import random
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from run_folders import TOKENS, append, figures, make_run, rollout, words

from psigrad.records.run_folder import RunFolder, to_line
from psigrad_studio.runs import run_finder
from psigrad_studio.runs.advantage_notes import explained
from psigrad_studio.runs.curves import curves, thinned
from psigrad_studio.runs.files import Tail, opened
from psigrad_studio.runs.history import MOST_KEYS, History
from psigrad_studio.runs.rollout_index import RolloutIndex, RolloutQuery
from psigrad_studio.runs.run_cache import RunCache
from psigrad_studio.runs.run_finder import RunFinder
from psigrad_studio.runs.tokens import texts_of, token_table, tokenizer_of


def lines(tail: Tail) -> list[bytes]:
    return [line for _, line in tail.lines()]


def test_a_file_written_in_pieces_of_any_size_gives_each_line_once(tmp_path):
    rng, path = random.Random(0), tmp_path / "x.jsonl"
    content = b"".join(to_line({"step": i, "text": "é\ud800" * rng.randrange(200)}) for i in range(300))
    tail, seen, at = Tail(path), [], 0
    assert lines(tail) == []
    while at < len(content):
        size = rng.randrange(1, 3000)
        with path.open("ab") as stream:
            stream.write(content[at : at + size])
        at += size
        assert not tail.restarted()
        seen += lines(tail)
    assert b"".join(seen) == content and tail.generation == 0


@pytest.mark.parametrize("how", ["cut", "cut and grown", "replaced", "gone"])
def test_a_file_that_went_back_is_read_again(tmp_path, how):
    path = tmp_path / "x.jsonl"
    append(path, *({"step": i, "seconds": i * 1.5} for i in range(50)))
    tail = Tail(path)
    lines(tail)
    if how == "replaced":
        other = tmp_path / "y"
        append(other, *({"step": i, "seconds": i * 1.6} for i in range(60)))
        os.replace(other, path)
    elif how == "gone":
        path.unlink()
    else:
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size // 2 // 30 * 30)
        if how == "cut and grown":
            append(path, *({"step": i, "seconds": i * 1.7} for i in range(20, 90)))
    assert tail.restarted() and tail.generation == 1
    assert b"".join(lines(tail)) == (path.read_bytes() if path.exists() else b"")[: tail.offset]


def test_negative_control_a_file_that_only_grows_is_not_read_again(tmp_path):
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    for i in range(20):
        append(path, {"step": i})
        assert len(lines(tail)) == 1 and not tail.restarted()


def test_links_and_pipes_are_not_opened(tmp_path):
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "nothing"):
        with pytest.raises(OSError), opened(tmp_path / name):
            pass


def test_a_resumed_run_is_read_from_its_start(tmp_path):
    """The library's own way back: rows behind the checkpoint go, and others take their place."""
    with RunFolder.open(tmp_path / "run", {"a": 1}) as folder:
        for step in range(1, 31):
            folder.metrics(figures(step))
        history = History(tmp_path / "run")
        history.read()
        assert history.last_step == 30 and history.generation == 0 and history.state == "running"
        folder.rewind(10)
        for step in range(11, 41):
            folder.metrics(figures(step, reward=9.0))
        history.read()
    assert history.generation == 1
    assert history.series["reward"].values.tolist()[9:12] == [pytest.approx(0.3), 9.0, 9.0] and history.last_step == 40


BROKEN = b'{"step": 21, "rew\n\xff\xfe\n[1]\n"x"\nnull\n{}\n{"step": -1}\n{"step": true}\n'
ODD = {"step": 21, "reward": "NaN", "loss": "Infinity", "x": None, "y": [1], "z": {"a": 1}, "big": 10**400}
HARM = {
    "broken lines": lambda run: (run / "metrics.jsonl").open("ab").write(BROKEN),
    "deep": lambda run: (run / "metrics.jsonl").open("ab").write(b"[" * 100_000 + b"\n"),
    "a torn line": lambda run: (run / "metrics.jsonl").open("ab").write(b'{"step": 21, "reward": 0.'),
    "odd values": lambda run: append(run / "metrics.jsonl", ODD),
    "no config": lambda run: (run / "config.json").unlink(),
    "no metrics": lambda run: (run / "metrics.jsonl").unlink(),
    "no rollouts": lambda run: (run / "rollouts.jsonl").unlink(),
    "config of another kind": lambda run: (run / "config.json").write_text("[1, 2"),
    "a folder for a file": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
    "a link for a file": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").symlink_to("/etc/passwd")),
    "odd events": lambda run: append(run / "events.jsonl", {"kind": 7}, {"time": "never"}, {"kind": "saved", "step": {"x": 1}}),
}


@pytest.mark.parametrize("name", HARM)
def test_damaged_runs_are_listed(tmp_path, name):
    run = make_run(tmp_path / "run")
    HARM[name](run)
    (entry,), whole = RunCache(tmp_path).entries(5.0)
    assert whole and entry["name"] == "run"
    assert entry["step"] in ((0, 20) if "metrics" in name or "a f" in name or "a l" in name else (20, 21))
    json.dumps(entry["alerts"])


HOSTILE_FILES = {
    "a row of many names": ("metrics.jsonl", json.dumps({"step": 1, **{f"name{i}": i for i in range(30_000)}})),
    "ever new names": (
        "metrics.jsonl",
        "".join(json.dumps({"step": s, **{f"{s}-{i}": i for i in range(300)}}) + "\n" for s in range(100)),
    ),
    "events of any size": ("events.jsonl", "".join('{"kind": "x", "a": [' + "[]," * 99_999 + "[]]}\n" for _ in range(12))),
    "a long line": ("metrics.jsonl", '{"step": 1, "a": [' + "[]," * 999_999 + "[]]}\n"),
    "deep settings": ("config.json", '{"a":' * 900 + "1" + "}" * 900),
    "deep events": ("events.jsonl", '{"kind":' * 900 + "1" + "}" * 900 + "\n"),
    "a number that is none": (".lock", f"process ² on {socket.gethostname()}, since"),
}


@pytest.mark.parametrize("which", HOSTILE_FILES)
def test_a_hostile_run_is_listed_within_bounds_and_others_beside_it(which, tmp_path):
    name, text = HOSTILE_FILES[which]
    for run in ("bad", "good"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "events.jsonl").write_text('{"kind": "started", "step": 0}\n')
    (tmp_path / "runs" / "bad" / name).write_text(text)
    cache, began = RunCache(tmp_path / "runs"), time.process_time()
    found, _ = cache.entries(60.0)
    assert [entry["name"] for entry in found] == ["bad", "good"] and time.process_time() - began < 5.0
    history = cache.history(found[0]["id"])
    assert len(history.series) <= MOST_KEYS and len(history._names) <= MOST_KEYS
    assert len(pickle.dumps(history.events)) < 2 << 20


def test_folders_without_number_are_not_all_looked_through(tmp_path, monkeypatch):
    monkeypatch.setattr(run_finder, "MOST_FOLDERS", 3)
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "metrics.jsonl").touch()
    finder = RunFinder(tmp_path)
    assert [place.name for place in finder.places().values()] == ["0", "1"] and finder.more, "with the folder of runs itself"


def test_a_point_has_no_time_until_its_timings_are_written(tmp_path):
    """Half a second for each step. A step's metrics are written before its timings; what was answered is not asked for again."""
    run, cache = make_run(tmp_path / "run", 2, state="running"), RunCache(tmp_path)
    (ident,) = cache.finder.places()

    def ask(have, axis="time"):
        curve = curves(cache, ident, 0, {"reward": have}, ["reward"], axis)["curves"]["reward"]
        return curve["first"], curve["count"], curve["x"], curve["values"]

    append(run / "metrics.jsonl", figures(3))
    assert ask(0) == (0, 2, [0.5, 1.0], pytest.approx([0.21, 0.22])) and ask(0, "step")[1] == 3
    append(run / "timings.jsonl", {"step": 3, "step_time": 0.5})
    assert ask(2) == (2, 3, [1.5], pytest.approx([0.23]))
    append(run / "metrics.jsonl", figures(4))
    assert ask(3)[1:3] == (3, [])
    append(run / "events.jsonl", {"time": time.time(), "kind": "finished", "step": 4})
    assert ask(3)[1:3] == (4, [1.5]), "no timings will come"


def test_rows_that_are_no_numbers_raise_the_alert(tmp_path):
    HARM["odd values"](make_run(tmp_path / "run"))
    (entry,), _ = RunCache(tmp_path).entries(5.0)
    assert [(a["rule"], a["step"]) for a in entry["alerts"]] == [("not_finite", 21)]


def test_runs_are_found_wherever_they_lie_and_links_are_not_followed(tmp_path):
    root = tmp_path / "runs"
    for name in ("a", "compare/grpo-0", "compare/grpo-1", "x/y/z"):
        make_run(root / name)
    make_run(tmp_path / "outside")
    make_run(root / "a" / "checkpoints" / "inner")
    make_run(root / ".hidden")
    (root / "base").mkdir()
    (root / "base" / "config.json").write_text("{}")  # a model is no run
    (root / "link").symlink_to(tmp_path / "outside")
    found = RunFinder(root).places()
    assert [place.name for place in found.values()] == ["a", "compare/grpo-0", "compare/grpo-1", "x/y/z"]
    assert [p.name for p in RunFinder(root / "a").places().values()] == ["a"]
    assert RunFinder(tmp_path / "none").places() == {}


def test_the_state_of_a_run_is_its_last_word_and_the_life_of_its_process(tmp_path):
    for state in ("finished", "stopped"):
        assert _state(make_run(tmp_path / state, state=state)) == state
    with RunFolder.open(tmp_path / "alive", {}) as folder:
        folder.event("started", step=0)
        assert _state(tmp_path / "alive") == "running"
    assert _state(tmp_path / "alive") == "failed"  # the lock is gone, and nobody said a word
    killed = make_run(tmp_path / "killed", state="running")
    old = time.time() - 3600
    for file in killed.iterdir():
        os.utime(file, (old, old))
    assert _state(killed) == "failed"
    fresh = make_run(tmp_path / "fresh", state="running")
    assert _state(fresh) == "running"  # on another machine: it wrote a moment ago


def _state(run: Path) -> str:
    history = History(run)
    history.read()
    return history.state


def test_a_running_run_that_falls_silent_is_said_so(tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
        folder.event("started", step=0)
        folder.metrics(figures(1))
        history = History(tmp_path / "run")
        history.read()
        assert history.alerts("running") == []
        history.written -= 1000
        assert [a.rule for a in history.alerts("running")] == ["silent"]
        assert history.alerts("finished") == []


def test_two_keys_of_one_figure_are_not_mixed(tmp_path):
    append(
        tmp_path / "metrics.jsonl",
        *({"step": s, "eval/exact/mean": 0.25, "eval/brevity/mean": 9.0, "reward": 1.0} for s in (1, 2)),
    )
    history = History(tmp_path)
    history.read()
    assert history.series["held_out"].values.tolist() == [0.25, 0.25]
    assert history.series["eval/brevity/mean"].values.tolist() == [9.0, 9.0]


def test_x_is_seconds_and_tokens_too(tmp_path):
    history = History(make_run(tmp_path / "run", 20))
    history.read()
    steps = history.series["reward"].steps
    assert history.at("step", steps) == list(range(1, 21))
    assert history.at("time", steps) == pytest.approx([0.5 * s for s in range(1, 21)])
    assert history.at("tokens", steps) == [1000.0 * s for s in range(1, 21)]


def test_thinning_keeps_what_a_picture_shows():
    rng = random.Random(3)
    values = [rng.gauss(0, 1) for _ in range(100_003)]
    values[7_777], values[50_000], values[60_000] = 50.0, -50.0, math.nan
    kept = thinned(values, 2_000)
    assert kept == sorted(set(kept)) and len(kept) <= 2_000
    assert {7_777, 50_000} <= set(kept)
    edges = np.linspace(0, len(values), 1_001).astype(int)
    for start, end in itertools.pairwise(edges.tolist()):
        stretch = [v for v in values[start:end] if v == v]
        there = [values[i] for i in kept if start <= i < end]
        assert (min(there), max(there)) == (min(stretch), max(stretch))


# ---- completions


def test_an_index_does_not_depend_on_the_order_of_keys(tmp_path):
    rng = random.Random(0)
    rows = [rollout(s, r, k, reward=rng.random(), **TOKENS) for s in range(1, 4) for r in range(3) for k in range(4)]
    rows += [{"step": 4, "kind": "episode", "episode": i, "reward": float(i), "length": 3} for i in range(3)]
    found = []
    for name, order in (("written", list), ("shuffled", lambda items: rng.sample(items, len(items)))):
        (tmp_path / name).mkdir()
        append(tmp_path / name / "rollouts.jsonl", *(dict(order(list(row.items()))) for row in rows))
        index = RolloutIndex(tmp_path / name)
        assert index.read()
        numbers, _ = index.find(RolloutQuery(order="best", kind="train"))
        groups = [index.group(n) for n in range(len(index))]
        found.append((index.overview(), numbers, groups, index.dead(2.0), index.worst(2.0, "reward")))
    assert found[0] == found[1] and len(found[0][1]) == 36


def test_groups_are_prompts_of_a_step_also_when_a_prompt_comes_twice(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append(path, *(rollout(1, 4, k) for k in (0, 1, 2, 0, 1, 2)), *(rollout(2, 4, k) for k in (0, 1)))
    append(path, *({"step": 2, "kind": "episode", "episode": i, "reward": 1.0, "length": 3} for i in range(3)))
    index = RolloutIndex(tmp_path)
    assert index.read()
    assert [index.group_of(n) for n in (0, 4, 7, 9, 99)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 10], []]


def test_searching_filtering_and_order(tmp_path):
    run = make_run(tmp_path / "run", 10)
    append(
        run / "rollouts.jsonl",
        rollout(11, 0, 0, completion="Größe “A”\n", reward=7.0),
        rollout(11, 0, 1, reward=None, status="unscored", advantage=None),
    )
    index = RolloutIndex(run)
    index.read()
    rows = lambda **wanted: [row for _, row in index.rows(index.find(RolloutQuery(**wanted))[0])]  # noqa: E731
    assert len(rows()) == 42 and rows()[0]["step"] == 11 and rows(order="oldest")[0]["step"] == 1
    assert {row["step"] for row in rows(step=3.0)} == {3} and len(rows(step=3.0)) == 4
    assert len(rows(text="GRÖSSE")) == 1 and rows(text="grosse") == [] and len(rows(text="größe “a”")) == 1
    assert len(rows(text="Answer 2 OF step 7")) == 1 and len(rows(text='say “reward": 5')) == 0
    assert rows(order="best")[0]["reward"] == 7.0 and rows(order="worst")[0]["reward"] == 0.0
    assert {row["reward"] for row in rows(low=0.5, high=2)} == {1.0}
    assert [row["reward"] for row in rows(status="unscored")] == [None] and rows(kind="eval") == [] and rows(zero=True) == []
    assert [n // 4 + 1 for n in index.worst(5.0, "reward")] == [5, 5, 5]


def test_an_index_follows_a_run_that_goes_back(tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
        folder.rollouts([rollout(s, s, k) for s in range(1, 5) for k in range(2)])
        index = RolloutIndex(tmp_path / "run")
        index.read()
        assert len(index) == 8
        folder.rewind(2)
        folder.rollouts([rollout(s, s + 100, k) for s in range(3, 9) for k in range(2)])
        index.read()
        assert len(index) == 16 and index.generation == 1
        assert [row["row"] for _, row in index.rows([4, 5])] == [103, 103]


def test_ten_thousand_rollouts_are_listed_within_200_ms(tmp_path):
    append(
        tmp_path / "rollouts.jsonl",
        *(rollout(n // 64, n // 8, n % 8, completion="word " * 60, completion_ids=list(range(100))) for n in range(10_000)),
    )
    cold = min(_seconds(RolloutIndex(tmp_path).read) for _ in range(3))
    index = RolloutIndex(tmp_path)
    again = min(_seconds(lambda: (index.read(), index.rows(index.find(RolloutQuery(order="worst"))[0][:50]))) for _ in range(3))
    print(f"\n10,000 rollouts: {1000 * cold:.0f} ms to index, {1000 * again:.0f} ms to list")
    assert len(index) == 10_000 and cold + again < 0.2


def _seconds(do) -> float:
    begun = time.process_time()
    do()
    return time.process_time() - begun


# ---- words and tokens


def test_why_an_advantage_is_zero():
    group = [rollout(1, 0, k, reward=1.0, advantage=0.0) for k in range(4)]
    assert "All 4 rewards of its group are 1 (all are right)" in explained(group[0], group)
    wrong = [rollout(1, 0, k, reward=0.0, advantage=0.0) for k in range(4)]
    assert "all are wrong" in explained(wrong[0], wrong)
    mean = [rollout(1, 0, k, reward=r, advantage=r - 0.5) for k, r in enumerate((0.0, 0.5, 1.0))]
    assert "equals the mean of its group" in explained(mean[1], mean) and explained(mean[0], mean) == ""
    lost = rollout(1, 0, 0, status="unscored", reason="time-out after 10 s", reward=None, advantage=None)
    assert "time-out after 10 s" in explained(lost, [lost, *mean])
    cut = rollout(1, 0, 1, finish_reason="length", kept=False, advantage=0.7)
    assert "A filter dropped the completion, because the length limit cut it" in explained(cut, [cut])
    unused = [dict(row, advantage=None) for row in group]
    assert "the group was dropped" in explained(unused[0], unused)
    masked = rollout(1, 0, 0, mask=[0, 0, 0, 0], advantage=0.0)
    assert "all are masked" in explained(masked, [masked])
    pairs = [rollout(1, 0, k, reward=r, advantage=a) for k, (r, a) in enumerate(((0.0, -1.0), (0.2, 0.0), (1.0, 1.0)))]
    assert "neither the best nor the worst" in explained(pairs[1], pairs)
    assert "empty" in explained(rollout(1, 0, 0, completion_ids=[], advantage=0.0), group)
    assert "not trained on" in explained(rollout(1, 0, 0, kind="eval"), group)
    cancel = rollout(1, 0, 0, advantage=0.0, advantages=[0.5, -0.5, 0.0, 0.0])
    assert "have the mean 0" in explained(cancel, [cancel, group[0]])


def test_token_figures_are_what_their_names_say():
    row = rollout(
        1,
        0,
        0,
        logprobs=[-1.0, -2.0, -3.0],
        trained_logprobs=[-1.0, -1.5, "NaN"],
        ref_logprobs=[-1.5, -2.0, -3.0],
        mask=[1, 0],
        step_rewards=[[1, 0.25], ["x"], 3],
    )
    table = token_table(row, ["a", "b", "c"])
    assert table["ratio"] == [1.0, pytest.approx(math.exp(0.5)), None]
    assert table["kl"] == [pytest.approx(math.exp(-0.5) - 1 + 0.5), 0.0, 0.0]
    assert table["mask"] == [True, False, False] and table["earned"] == [None, 0.25, None]
    assert "entropy" not in table and {len(column) for column in table.values()} == {3}


def test_texts_of_tokens_join_to_the_text(tmp_path):
    from psigrad.language.models import tiny

    tokenizer = tiny.tokenizer(["spell this word", "größe 日本 🙂"], 280)
    tokenizer.save_pretrained(tmp_path / "run" / "model")
    found = tokenizer_of(tmp_path / "run", {}, tmp_path)
    text = "größe 日本 🙂 word"
    ids = tokenizer.encode(text)
    assert len(ids) > 5 and "".join(texts_of({"completion_ids": ids}, found)) == tokenizer.decode(ids)
    assert texts_of({"completion_ids": [3, "x", -1, True, 4]}, None) == ["#3", "#4"]


def test_a_tokenizer_is_only_read_from_among_the_runs(tmp_path):
    root = tmp_path / "runs"
    (root / "run").mkdir(parents=True)
    for place in (root / "base", tmp_path / "outside"):
        words(place)
    (root / "link").symlink_to(tmp_path / "outside")
    of = lambda path: tokenizer_of(root / "run", {"model": {"path": path}}, root)  # noqa: E731
    assert of(str(root / "base")) is not None
    for path in (
        str(tmp_path / "outside"),
        "../outside",
        str(root / ".." / "outside"),
        str(root / "link"),
        "Qwen/Qwen3-0.6B",
        "\0",
        "",
    ):
        assert of(path) is None, path
