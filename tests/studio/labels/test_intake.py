"""What comes in: rows, files, a run's rollouts, what `psigrad sample` writes; once each, in any order, with bad input named."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import func, select

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import RowError
from psigrad.records.run_folder import RunFolder, to_line
from psigrad_studio.labels import completion_groups, intake
from psigrad_studio.labels.intake import Added, TaskOptions
from psigrad_studio.labels.refusals import Forbidden, Refusal
from psigrad_studio.labels.schema import LabelTask, Origin, Seat, StoredCompletion, StoredPrompt, TaskItem

TALK = [{"role": "user", "content": "hello"}]


def said(text):
    return [{"role": "assistant", "content": text}]


def contents(db, column):
    with db.session(write=False) as session:
        return session.scalars(select(column).order_by(column.class_.id)).all()


def counted(db, table):
    with db.session(write=False) as session:
        return session.scalar(select(func.count()).select_from(table))


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "p", "completions": ["x", "y", "z"]}],
        [{"prompt": "p", "completion": "x"}, {"prompt": "p", "completion": "y"}, {"prompt": "p", "completion": "z"}],
        [{"prompt": "p", "chosen": "x", "rejected": "y"}, {"prompt": "p", "completion": "z"}],
        [{"prompt": TALK, "completions": [said("x"), said("y"), said("z")]}],
        [{"prompt": TALK, "completion": said(c)} for c in "xyz"],
    ],
)
def test_every_form_gives_the_same_tasks(desks, db, rows):
    made = desks()
    assert made.add(rows) == Added(prompts=1, completions=3, tasks=3)
    pairs = set()
    crowd = [made.person(f"P{n}") for n in range(3)]
    for person in crowd:
        shown = made.next(person)
        pairs.add(tuple(sorted(c if isinstance(c, str) else c[0]["content"] for c in shown.completions)))
    assert pairs == {("x", "y"), ("x", "z"), ("y", "z")}


@pytest.mark.parametrize("kind, tasks, items", [("pair", 15, 2), ("ranking", 2, 3), ("rating-5", 6, 1), ("rating-10", 6, 1)])
def test_six_completions_make_these_tasks(desks, db, kind, tasks, items):
    made = desks(kind=kind)
    made.add([{"prompt": "p", "completions": list("abcdef")}])
    assert counted(db, LabelTask) == tasks and counted(db, TaskItem) == tasks * items and counted(db, Seat) == tasks


@pytest.mark.parametrize("k", range(2, 14))
def test_a_ranking_has_two_or_more_and_at_most_so_many(desks, db, k):
    made = desks(kind="ranking")
    made.add([{"prompt": "p", "completions": [f"answer {n}" for n in range(k)]}], ranked=4)
    with db.session(write=False) as session:
        sizes = session.scalars(select(func.count()).select_from(TaskItem).group_by(TaskItem.task_id)).all()
    assert all(2 <= size <= 4 for size in sizes) and sum(sizes) == k


def test_so_many_pairs_of_a_prompt_are_drawn(desks, db):
    made = desks()
    made.add([{"prompt": f"p{n}", "completions": list("abcdef")} for n in range(20)], per_prompt=3)
    with db.session(write=False) as session:
        assert set(session.scalars(select(func.count()).select_from(LabelTask).group_by(LabelTask.prompt_id))) == {3}
        drawn = session.execute(select(LabelTask.prompt_id, LabelTask.hash)).all()
    assert len({h for _, h in drawn}) == 60


@pytest.mark.parametrize("shuffle", [True, False])
def test_so_many_prompts_are_drawn_and_the_same_ones_again(desks, db, shuffle):
    made = desks()
    assert made.pairs(40, prompts=10, shuffle=shuffle).prompts == 10
    assert made.pairs(40, prompts=10, shuffle=shuffle) == Added(known=10)
    numbers = [int(p.split()[1]) for p in contents(db, StoredPrompt.content)]
    assert (numbers == sorted(numbers)) != shuffle and numbers != list(range(10))


def test_bringing_in_twice_adds_nothing_and_a_new_completion_only_its_pairs(desks, db):
    made = desks(overlap=2)
    rows = [{"prompt": f"p{n}", "completions": ["x", "y"]} for n in range(5)]
    made.add(rows)
    before = {t: counted(db, t) for t in (StoredPrompt, StoredCompletion, Origin, LabelTask, TaskItem, Seat)}
    assert made.add(rows) == Added(known=5)
    assert {t: counted(db, t) for t in before} == before
    assert made.add([{"prompt": "p0", "completions": ["x", "y", "new"]}]) == Added(completions=1, tasks=2, known=1)


def test_equal_texts_are_shown_once_and_keep_all_their_origins(desks, db):
    made = desks()
    added = made.add([{"prompt": "p", "completions": ["x", "x", "y"], "samplers": ["one", "two", "two"]}])
    assert (added.completions, added.tasks, added.repeated) == (2, 1, 1)
    assert sorted(contents(db, Origin.sampler)) == ["one", "two", "two"]
    alone = made.add([{"prompt": "q", "completions": ["x", "x"]}, {"prompt": "r", "completion": "x"}])
    assert (alone.tasks, alone.alone) == (0, 2)


def test_large_imports_are_stored_in_parts_and_all_of_them(desks, db):
    made = desks()
    n = 2 * intake.CHUNK + 17
    assert made.pairs(n, shuffle=True) == Added(prompts=n, completions=2 * n, tasks=n)
    order = contents(db, StoredPrompt.content)
    assert order != sorted(order, key=lambda p: int(p.split()[1])) and len(set(order)) == n


def test_places_tell_nothing_about_which_came_first(desks, db):
    made = desks()
    made.add([{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(400)], gold=True)
    with db.session(write=False) as session:
        gold = session.scalars(select(LabelTask.gold)).all()
        wrong = [
            session.get_one(StoredCompletion, session.get_one(TaskItem, (task.id, task.gold)).completion_id).content
            for task in session.scalars(select(LabelTask).limit(50))
        ]
    assert 150 < sum(gold) < 250
    assert all(text.startswith("good") for text in wrong)


@pytest.mark.parametrize(
    "text", ["nul \0", "lone \ud800 surrogate", "bidi \u202e", "line \u2028 separator", "x" * 1_000_000, "<script>"]
)
def test_odd_texts_come_back_as_they_went_in(desks, text):
    made = desks()
    made.add(
        [{"prompt": "p" + text, "completions": [text, "other"], "samplers": [text, "s"], "run": text, "step": 2**70, "k": 1}]
    )
    shown = made.next(made.owner)
    assert shown.prompt == "p" + text and set(shown.completions) == {text, "other"}


@pytest.mark.parametrize(
    "row, place, said",
    [
        ("text", "rows:2", "must be an object"),
        ({"prompt": "p"}, "rows:2", "completion"),
        ({"completion": "x"}, "rows:2", "prompt"),
        ({"prompt": "p", "completion": ""}, "rows:2", "empty string"),
        ({"prompt": "p", "completion": said("x")}, "rows:2", "both must be strings"),
        ({"prompt": "p", "completions": []}, "rows:2", "must be a list"),
        ({"prompt": "p", "completions": "xy"}, "rows:2", "must be a list"),
        ({"prompt": "p", "completions": ["x", 3]}, "rows:2", r"completions\[1\]"),
        ({"prompt": "p", "completions": ["x", "y"], "samplers": ["one"]}, "rows:2", "one entry for each"),
        ({"prompt": "p", "chosen": "x", "rejected": "x"}, "rows:2", "same as chosen"),
        ({"prompt": "p", "completion": "x", "weight": float("nan")}, "rows:2", "finite"),
        ({"prompt": "p", "completion": "x", "images": ["a.png"]}, "rows:2", "has an image, but labelling shows only text"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": said("x")},
            "rows:2",
            "images are not read in these rows",
        ),
        ({"prompt": "p", "completion": "x", "thing": object()}, "rows:2", "JSON"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "completion": said("x")}, "rows:2", "role"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_stored(desks, db, row, place, said):
    made = desks()
    with pytest.raises(RowError, match=said) as error:
        made.add([{"prompt": "fine", "completions": ["x", "y"]}, row])
    assert place in str(error.value)
    assert counted(db, StoredPrompt) == 0


@pytest.mark.parametrize(
    "making", [{"prompts": 0}, {"per_prompt": 0}, {"ranked": 1}, {"ranked": 13}, {"overlap": 0}, {"overlap_share": 1.5}]
)
def test_a_making_that_makes_no_sense_is_refused(making):
    with pytest.raises(Refusal, match=next(iter(making))):
        TaskOptions(**making)


# Files


def test_what_psigrad_sample_wrote_keeps_reward_and_columns(desks, db, tmp_path):
    path = tmp_path / "samples.jsonl"
    rows = [
        {"difficulty": 3, "prompt": TALK, "completion": said(c), "reward": r, "finish_reason": "stop"}
        for c, r in (("x", 0.5), ("y", 1.0))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = desks()
    added = intake.add_file(db, made.owner, made.project, path, sampler="model one")
    assert added == Added(prompts=1, completions=2, tasks=1)
    assert contents(db, StoredPrompt.columns) == [{"difficulty": 3}]
    about = contents(db, Origin.about)
    assert sorted(a["reward"] for a in about) == [0.5, 1.0]
    assert {a["source"] for a in about} == {f"{path}:1", f"{path}:2"} and {a["sampler"] for a in about} == {"model one"}


def test_columns_that_rows_of_a_prompt_do_not_share_are_dropped():
    rows = [
        ("f:1", {"prompt": "p", "completion": "x", "level": 1, "seen": 1}),
        ("f:2", {"prompt": "p", "completion": "y", "level": 1, "seen": 2}),
    ]
    (group,) = completion_groups.gather(rows).groups.values()
    assert group.columns == {"level": 1}


def test_a_file_that_is_torn_malformed_or_missing(desks, db, tmp_path):
    made, good = desks(), json.dumps({"prompt": "p", "completions": ["x", "y"]})
    torn = tmp_path / "torn.jsonl"
    torn.write_text(good + "\n\n" + good[:20])
    assert intake.add_file(db, made.owner, made.project, torn).tasks == 1
    bad = tmp_path / "bad.jsonl"
    bad.write_text(good + "\nnonsense\n")
    with pytest.raises(UserError, match=r"bad.jsonl:2 is not JSON"):
        intake.add_file(db, made.owner, made.project, bad)
    bad.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"bad.jsonl:1 is not JSON"):
        intake.add_file(db, made.owner, made.project, bad)
    bad.write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"bad.jsonl:1 is not JSON"):
        intake.add_file(db, made.owner, made.project, bad)
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            intake.add_file(db, made.owner, made.project, path)


# Runs


def rollout(step, row, k, text, kind="train", prompt="question", **more):
    return {
        "step": step,
        "kind": kind,
        "row": row,
        "k": k,
        "prompt": prompt,
        "completion": text,
        "completion_ids": [1, 2],
        "reward": 0.25 * k,
        "parts": {"exact": 1.0},
        "status": "scored",
        "reason": "",
        "advantage": -0.5,
        "seed": 2**62 + k,
        "finish_reason": "stop",
        "version": step - 1,
    } | more


@pytest.fixture
def run(tmp_path):
    """A run folder as the trainer writes it."""
    with RunFolder.open(tmp_path / "my-run", {"run": {"seed": 1}}) as folder:
        for step in (1, 2):
            folder.rollouts([rollout(step, 7, k, f"text {k} of {step}") for k in range(3)])
        folder.rollouts([rollout(2, 7, 0, "held out", kind="eval", reward=float("nan"))])
        folder.rollouts([rollout(3, 7, 0, ""), rollout(3, 7, 1, "text 1 of 1"), rollout(3, 8, 0, "talk", prompt=TALK)])
    with (tmp_path / "my-run" / "rollouts.jsonl").open("ab") as stream:
        stream.write(to_line(rollout(4, 7, 0, "torn"))[:30])
    return tmp_path / "my-run"


def test_completions_of_a_step_are_compared_with_one_another(desks, db, run):
    made = desks()
    added = intake.add_run(db, made.owner, made.project, run)
    assert added == Added(prompts=2, completions=7, tasks=6, alone=2, unusable=1)
    with db.session(write=False) as session:
        steps = {
            tuple(
                sorted(
                    {
                        o.step
                        for o in session.scalars(
                            select(Origin)
                            .join(TaskItem, TaskItem.completion_id == Origin.completion_id)
                            .where(TaskItem.task_id == t)
                        )
                    }
                )
            )
            for t in session.scalars(select(LabelTask.id))
        }
    assert steps == {(1,), (1, 3), (2,)}  # one text was sampled in steps 1 and 3


def test_the_lineage_of_a_rollout_is_kept(desks, db, run):
    made = desks()
    intake.add_run(db, made.owner, made.project, run, steps=range(1, 2))
    about = contents(db, Origin.about)
    assert {(a["run"], a["step"], a["row"], a["k"], a["sampler"]) for a in about} == {
        ("my-run", 1, 7, k, "step 1") for k in range(3)
    }
    assert {a["seed"] for a in about} == {2**62 + k for k in range(3)}
    assert contents(db, StoredPrompt.columns) == [{}]


def test_steps_and_kinds_can_be_chosen_and_compared_across(desks, db, run):
    made = desks()
    assert intake.add_run(db, made.owner, made.project, run, steps=range(1, 3), across_steps=True).tasks == 15
    assert intake.add_run(db, made.owner, made.project, run / "rollouts.jsonl", kind="eval").completions == 1
    talk = desks()
    assert intake.add_run(db, talk.owner, talk.project, run, kind=None, steps=range(3, 4)).unusable == 1
    assert said("talk") in contents(db, StoredCompletion.content)


def test_a_damaged_line_of_a_run_costs_no_other_and_is_counted(desks, db, run):
    made, damaged = (
        desks(),
        (b"{\n", b'{"step": "1"}\n', b'{"step": 1, "kind": "train", "prompt": 7, "completion": "x"}\n', b"\xff\n"),
    )
    file = run / "rollouts.jsonl"
    file.write_bytes(b"".join(damaged) + file.read_bytes())
    assert intake.add_run(db, made.owner, made.project, run) == Added(prompts=2, completions=7, tasks=6, alone=2, unusable=1 + 4)


def test_a_folder_that_is_no_online_run_is_refused(desks, db, tmp_path):
    made = desks()
    with pytest.raises(UserError, match=r"no rollouts.jsonl"):
        intake.add_run(db, made.owner, made.project, tmp_path)
    (tmp_path / "rollouts.jsonl").write_text('{"prompt": "p", "completion": "x"}\n')
    with pytest.raises(UserError, match=r"rollouts.jsonl:1 is not a rollout"):
        intake.add_run(db, made.owner, made.project, tmp_path)


def test_a_pair_from_another_page_keeps_its_lineage_and_comes_first(desks, db):
    made = desks()
    made.pairs(3)
    about = {"run": "my-run", "step": 5, "row": 2, "sampler": "step 5", "secret": "no column of ours"}
    first, second = ({**about, "k": k, "completion": text} for k, text in enumerate(("yes", "no")))
    prompt = [{"role": "user", "content": "well?"}]
    assert intake.add_pair(db, made.owner, made.project, prompt, first, second).tasks == 1
    assert intake.add_pair(db, made.owner, made.project, prompt, second, first) == Added(known=1)
    shown = made.next(made.person("ann"))
    assert shown.prompt == prompt and [{"role": "assistant", "content": "yes"}] in shown.completions
    found = [a for a in contents(db, Origin.about) if a.get("run")]
    assert sorted((a["run"], a["step"], a["row"], a["k"], a["sampler"]) for a in found) == [
        ("my-run", 5, 2, k, "step 5") for k in range(2)
    ]
    assert not any("secret" in columns for columns in contents(db, StoredPrompt.columns))


def test_pairs_go_to_projects_of_pairs_and_have_two_texts(desks, db):
    made, ranked = desks(), desks(kind="ranking")
    one, other = {"completion": "a"}, {"completion": "b"}
    with pytest.raises(Refusal, match="is not a project of pairs"):
        intake.add_pair(db, made.owner, ranked.project, "p", one, other)
    with pytest.raises(Refusal, match="are equal"):
        intake.add_pair(db, made.owner, made.project, "p", one, dict(one))
    with pytest.raises(UserError, match="completion"):
        intake.add_pair(db, made.owner, made.project, "p", one, {})
    with pytest.raises(Forbidden):
        intake.add_pair(db, made.person("ann"), made.project, "p", one, other)
