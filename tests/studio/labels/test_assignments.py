"""The desk: what is shown to whom and when, leases by a clock that the test moves, answers, skips and undo."""

from __future__ import annotations

import contextlib

import label_checks
import pytest
from at_once import at_once
from scipy.stats import binomtest
from sqlalchemy import func, select

from psigrad_studio.labels import assignments, database, export, intake, people, projects
from psigrad_studio.labels.assignments import LabelAnswer
from psigrad_studio.labels.refusals import Conflict, Forbidden, Missing, Refusal
from psigrad_studio.labels.schema import Assignment, LabelTask, Seat, StoredCompletion, TaskItem, Vote


@pytest.fixture(autouse=True)
def nothing_drifts(db):
    yield
    assert label_checks.faults(db) == []


@pytest.fixture
def pair(desks):
    made = desks()
    made.ann, made.bob = made.person("Ann"), made.person("Bob")
    return made


def votes(db):
    with db.session(write=False) as session:
        return list(session.scalars(select(Vote).order_by(Vote.id)))


# Leases


def test_two_people_get_different_tasks_and_none_is_left_when_all_are_out(pair):
    pair.pairs(2)
    one, two = pair.next(pair.ann), pair.next(pair.bob)
    assert one.prompt != two.prompt
    pair.vote(pair.ann, one, "left")
    assert pair.next(pair.ann) is None
    pair.vote(pair.bob, two, "left")
    assert pair.next(pair.bob) is None


def test_asking_again_shows_the_same_task_in_the_same_order(pair, clock):
    pair.pairs(5)
    one = pair.next(pair.ann)
    clock.advance(30)
    again = pair.next(pair.ann)
    assert (again.assignment, again.completions) == (one.assignment, one.completions)
    assert again.lease_until == one.lease_until + 30_000


def test_a_lease_ends_by_the_clock_to_the_millisecond(pair, clock):
    pair.pairs(1)
    one = pair.next(pair.ann)
    assert one.lease_until == clock() + 600_000
    clock.at = one.lease_until - 1
    assert pair.next(pair.bob) is None
    clock.at = one.lease_until
    assert pair.next(pair.bob).prompt == one.prompt


def test_a_vote_after_the_lease_counts_unless_somebody_else_has_the_task(pair, clock):
    pair.pairs(2)
    one = pair.next(pair.ann)
    clock.advance(3600)
    assert pair.vote(pair.ann, one, "left").action == "vote"
    two = pair.next(pair.ann)
    clock.advance(3600)
    taken = pair.next(pair.bob)
    assert taken.prompt == two.prompt
    with pytest.raises(Conflict, match="somebody else has it now"):
        pair.vote(pair.ann, two, "left")
    pair.vote(pair.bob, taken, "left")
    assert len(votes(pair.db)) == 2


def test_a_late_vote_takes_another_free_seat_of_its_task(desks, clock):
    made = desks(overlap=2)
    ann, bob = made.person("Ann"), made.person("Bob")
    made.pairs(1)
    one = made.next(ann)
    clock.advance(3600)
    made.vote(bob, made.next(bob), "left")  # Bob was given Ann's seat, the other one is free
    made.vote(ann, one, "left")
    assert projects.progress(made.db, made.owner, made.project).answered == 2


def test_renewing_keeps_a_task_and_fails_when_it_is_lost(pair, clock):
    pair.pairs(1)
    one = pair.next(pair.ann)
    clock.advance(599)
    assert assignments.renew(pair.db, pair.ann, one.assignment) == clock() + 600_000
    clock.advance(599)
    assert pair.next(pair.bob) is None
    clock.advance(1)
    pair.next(pair.bob)
    with pytest.raises(Conflict, match="somebody else has it now"):
        assignments.renew(pair.db, pair.ann, one.assignment)


def test_a_clock_that_goes_back_or_far_ahead_loses_no_answer(pair, clock):
    pair.pairs(3)
    one = pair.next(pair.ann)
    clock.advance(-86_400)
    pair.vote(pair.ann, one, "left")
    two = pair.next(pair.ann)
    clock.advance(400 * 86_400)
    pair.vote(pair.ann, two, "right")
    assert [v.action for v in votes(pair.db)] == ["vote", "vote"]


def test_overlap_gives_a_task_to_so_many_people_and_to_each_once(desks):
    made = desks(overlap=3)
    made.pairs(2)
    crowd = [made.person(f"P{i}") for i in range(5)]
    seen: dict[str, int] = {}
    for person in crowd:
        while (shown := made.next(person)) is not None:
            seen[shown.prompt] = seen.get(shown.prompt, 0) + 1
            made.vote(person, shown, "left")
    assert seen == {"question 0": 3, "question 1": 3}


def test_part_of_the_tasks_may_be_shared(desks, db):
    made = desks()
    made.pairs(400, overlap=3, overlap_share=0.25)
    with db.session(write=False) as session:
        by_task = session.scalars(select(func.count()).select_from(Seat).group_by(Seat.task_id)).all()
    assert set(by_task) == {1, 3}
    assert binomtest(by_task.count(3), 400, 0.25).pvalue > 1e-4


def test_raising_the_overlap_asks_for_more_answers_and_lowering_is_refused(pair):
    pair.pairs(1)
    pair.vote(pair.ann, pair.next(pair.ann), "left")
    assert pair.next(pair.bob) is None
    projects.change(pair.db, pair.owner, pair.project, {"overlap": 2})
    pair.vote(pair.bob, pair.next(pair.bob), "left")
    assert pair.next(pair.ann) is None
    with pytest.raises(Refusal, match="only be raised"):
        projects.change(pair.db, pair.owner, pair.project, {"overlap": 1})


def test_higher_priority_comes_first(pair):
    pair.pairs(2)
    pair.add([{"prompt": "urgent", "completions": ["x", "y"]}], priority=5)
    assert pair.next(pair.ann).prompt == "urgent"
    assert pair.next(pair.bob).prompt == "question 0"


def test_many_threads_that_ask_at_once_never_share_a_task(desks):
    made = desks()
    made.pairs(60)
    crowd = [made.person(f"P{i}") for i in range(8)]

    def skip_six(n):
        for time in range(6):  # a skipped task goes back: somebody else may take it
            shown = made.next(crowd[n])
            assignments.skip(made.db, crowd[n], shown.assignment, f"{n}-{time}-{shown.assignment:08}")

    at_once(8, skip_six)
    assert len(set(at_once(8, lambda n: made.next(crowd[n]).prompt))) == 8


def test_one_person_with_two_windows_gets_one_task(pair):
    pair.pairs(20)
    assert len(set(at_once(8, lambda window: pair.next(pair.ann).assignment))) == 1


# What is shown


def test_what_is_shown_tells_nothing_about_where_it_came_from(pair):
    pair.add(
        [{"prompt": "q", "completions": ["x", "y"], "samplers": ["model one", "model two"], "reward": 1.0, "run": "secret run"}]
    )
    shown = pair.next(pair.ann)
    assert set(vars(shown)) == {"assignment", "kind", "prompt", "completions", "lease_until"}
    assert "model" not in repr(shown) and "secret" not in repr(shown)


@pytest.mark.one_database
def test_sides_are_drawn_evenly_for_places_and_for_people(desks, db):
    made = desks(overlap=2)
    made.pairs(120)
    people_ = [made.person("Ann"), made.person("Bob")]
    orders = {}
    for person in people_:
        while (shown := made.next(person)) is not None:
            made.vote(person, shown, "left")
            orders.setdefault(shown.prompt, []).append(shown.completions[0].startswith("good"))
    flat = [side for sides in orders.values() for side in sides]
    assert binomtest(sum(flat), len(flat), 0.5).pvalue > 1e-4
    assert binomtest(sum(a == b for a, b in orders.values()), 120, 0.5).pvalue > 1e-4
    with db.session(write=False) as session:
        first = session.scalars(select(Assignment.display)).all()
    assert binomtest(sum(d == [0, 1] for d in first), 240, 0.5).pvalue > 1e-4


def test_the_stored_choice_is_the_completion_that_was_seen_on_that_side(pair, db):
    pair.pairs(30)
    expected = {}
    while (shown := pair.next(pair.ann)) is not None:
        receipt = pair.prefer(pair.ann, shown, next(c for c in shown.completions if c.startswith("good")))
        expected[receipt.vote] = True
    with db.session(write=False) as session:
        rows = session.execute(select(Vote.choice, Assignment).join(Assignment, Vote.assignment_id == Assignment.id)).all()
        for choice, assignment in rows:
            item = session.get_one(TaskItem, (assignment.task_id, "ab".index(choice)))
            assert session.get_one(StoredCompletion, item.completion_id).content.startswith("good")
        assert {choice for choice, _ in rows} == {"a", "b"}


# Answers


@pytest.mark.parametrize("choice", ["left", "right", "tie", "both_bad"])
def test_each_choice_is_kept_with_its_reason_and_time(pair, db, clock, choice):
    pair.pairs(1)
    shown = pair.next(pair.ann)
    clock.advance(12.5)
    pair.vote(pair.ann, shown, choice, reason="because\0 \ud800 <b>", client_ms=12_400)
    (vote,) = votes(db)
    assert vote.choice == {"tie": "tie", "both_bad": "both_bad"}.get(choice, vote.choice)
    assert (vote.reason, vote.client_ms, vote.decided_at - vote.shown_at) == ("because\0 \ud800 <b>", 12_400, 12_500)


@pytest.mark.parametrize(
    "settings, answer, said",
    [
        ({}, LabelAnswer(), "has nothing; expected only choice"),
        ({}, LabelAnswer(choice="lefft"), "did you mean 'left'"),
        ({}, LabelAnswer(choice="a"), "expected one of left, right, tie, both_bad"),
        ({}, LabelAnswer(rating=3), "expected only choice"),
        ({}, LabelAnswer(choice="left", rating=3), "choice and rating"),
        ({}, LabelAnswer(choice="left", strength=1), "none in this project"),
        ({"ties": False}, LabelAnswer(choice="tie"), "expected one of left, right, both_bad"),
        ({"both_bad": False}, LabelAnswer(choice="both_bad"), "expected one of left, right, tie"),
        ({"strengths": 3}, LabelAnswer(choice="left", strength=4), "expected 1 to 3"),
        ({"strengths": 3}, LabelAnswer(choice="left", strength=0), "expected 1 to 3"),
        ({"strengths": 3}, LabelAnswer(choice="tie", strength=1), "together with a chosen side"),
        ({}, LabelAnswer(choice="left", reason="x" * 10_001), "10001 characters"),
        ({}, LabelAnswer(choice="left", client_ms=-1), "client_ms is -1"),
        ({"kind": "rating-5"}, LabelAnswer(rating=6), "expected 1 to 5"),
        ({"kind": "rating-5"}, LabelAnswer(rating=0), "expected 1 to 5"),
        ({"kind": "rating-10"}, LabelAnswer(rating=11), "expected 1 to 10"),
        ({"kind": "rating-10"}, LabelAnswer(choice="left"), "expected only rating"),
        ({"kind": "ranking"}, LabelAnswer(ranks=(1, 2)), "expected 3 ranks from 1"),
        ({"kind": "ranking"}, LabelAnswer(ranks=(0, 1, 2)), "from 1"),
        ({"kind": "ranking"}, LabelAnswer(ranks=(1, 1, 2)), "1, 2, 2, 4"),
        ({"kind": "ranking"}, LabelAnswer(ranks=(1, 5, 9)), "from 1"),
        ({"kind": "ranking", "ties": False}, LabelAnswer(ranks=(1, 1, 3)), "no equal ranks"),
        ({"kind": "ranking"}, LabelAnswer(ranks=(1, 2, 3), strength=1), "none in this project"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_and_stores_nothing(desks, db, settings, answer, said):
    made = desks(**settings)
    made.add([{"prompt": "q", "completions": ["x", "y", "z"]}])
    shown = made.next(made.owner)
    with pytest.raises(Refusal, match=said):
        assignments.vote(db, made.owner, shown.assignment, answer, "a key of mine")
    assert votes(db) == []
    assert made.next(made.owner).assignment == shown.assignment


def test_a_ranking_is_stored_by_place_and_a_rating_as_it_is(desks, db):
    made = desks(kind="ranking")
    made.add([{"prompt": f"q{n}", "completions": ["x", "y", "z"]} for n in range(12)])
    wanted = {"y": 1, "x": 2, "z": 3}
    while (shown := made.next(made.owner)) is not None:
        made.vote(made.owner, shown, ranks=tuple(wanted[c] for c in shown.completions))
    with db.session(write=False) as session:
        orders = session.scalars(select(Assignment.display)).all()
        places = (
            select(StoredCompletion.content)
            .join(TaskItem, TaskItem.completion_id == StoredCompletion.id)
            .order_by(TaskItem.place)
        )
        for row in session.scalars(select(Vote)):
            texts = session.scalars(places.where(TaskItem.task_id == session.get_one(Assignment, row.assignment_id).task_id))
            assert row.ranks == [wanted[text] for text in texts]
    assert len({tuple(order) for order in orders}) > 2
    rated = desks(kind="rating-10")
    rated.add([{"prompt": "q", "completions": ["x", "y"]}])
    seen = []
    while (shown := rated.next(rated.owner)) is not None:
        seen += shown.completions
        rated.vote(rated.owner, shown, rating=10)
    assert sorted(seen) == ["x", "y"] and votes(db)[-1].rating == 10


# Keys


def test_the_same_submission_again_gives_the_same_receipt_and_is_stored_once(pair, db, clock):
    pair.pairs(2)
    shown = pair.next(pair.ann)
    first = pair.vote(pair.ann, shown, "left", key="key of this vote", client_ms=900)
    clock.advance(50)
    assert pair.vote(pair.ann, shown, "left", key="key of this vote", client_ms=950) == first
    other = pair.next(pair.ann)
    skipped = pair.skip(pair.ann, other, key="key of this skip")
    assert pair.skip(pair.ann, other, key="key of this skip") == skipped
    undone = pair.undo(pair.ann, key="key of this undo")
    assert pair.undo(pair.ann, key="key of this undo") == undone
    assert [v.action for v in votes(db)] == ["vote", "skip", "undo"]
    # even when the project was closed in between
    projects.close(db, pair.owner, pair.project)
    assert pair.vote(pair.ann, shown, "left", key="key of this vote") == first


def test_a_key_used_for_something_else_is_refused(pair, db):
    pair.pairs(2)
    shown = pair.next(pair.ann)
    pair.vote(pair.ann, shown, "left", key="key of this vote")
    with pytest.raises(Conflict, match="another submission"):
        pair.vote(pair.ann, shown, "right", key="key of this vote")
    with pytest.raises(Conflict, match="another submission"):
        pair.undo(pair.ann, key="key of this vote")
    with pytest.raises(Conflict, match="another submission"):
        pair.vote(pair.ann, pair.next(pair.ann), "left", key="key of this vote")
    # keys of two people have nothing to do with one another
    pair.vote(pair.bob, pair.next(pair.bob), "left", key="key of this vote") if pair.next(pair.bob) else None
    assert {v.user_id for v in votes(db)} <= {pair.ann.id, pair.bob.id}


@pytest.mark.parametrize("key", ["", "short", "x" * 201, "with\nline end", "with é accent"])
def test_a_key_that_is_none_is_refused(pair, key):
    pair.pairs(1)
    with pytest.raises(Refusal, match="8 to 200 ASCII"):
        assignments.vote(pair.db, pair.ann, pair.next(pair.ann).assignment, LabelAnswer(choice="left"), key)


def test_one_vote_sent_by_many_threads_at_once_is_stored_once(pair, db):
    pair.pairs(20)
    for number in range(20):
        shown, key = pair.next(pair.ann), f"vote number {number}"
        assert len(set(at_once(8, lambda _, shown=shown, key=key: pair.vote(pair.ann, shown, "left", key=key)))) == 1
    assert len(votes(db)) == 20


def test_two_different_votes_on_one_task_at_once_leave_one(pair, db):
    pair.pairs(20)
    for number in range(20):
        shown = pair.next(pair.ann)

        def send(window, shown=shown, number=number):
            with contextlib.suppress(Conflict):
                return pair.vote(pair.ann, shown, ("left", "right")[window % 2], key=f"vote {number} by window {window}")

        assert sum(receipt is not None for receipt in at_once(4, send)) == 1
    assert len(votes(db)) == 20


# Skip and undo


def test_a_skipped_task_goes_to_others_and_not_back_to_who_skipped_it(pair):
    pair.pairs(1)
    shown = pair.next(pair.ann)
    pair.skip(pair.ann, shown)
    assert pair.next(pair.ann) is None
    assert pair.next(pair.bob).prompt == shown.prompt
    assert assignments.mine(pair.db, pair.ann, pair.project) == {"answered": 0, "skipped": 1}


def test_undo_brings_the_last_answer_back_as_it_was_shown_and_keeps_its_row(pair, db):
    pair.pairs(3)
    first = pair.next(pair.ann)
    pair.vote(pair.ann, first, "left")
    second = pair.next(pair.ann)
    given = pair.vote(pair.ann, second, "tie")
    third = pair.next(pair.ann)
    undone = pair.undo(pair.ann)
    assert undone.undone == given.vote
    back = pair.next(pair.ann)
    assert (back.assignment, back.completions) == (second.assignment, second.completions)
    pair.vote(pair.ann, back, "right")
    assert pair.next(pair.ann).assignment == third.assignment  # which they held all the while
    assert [v.action for v in votes(db)] == ["vote", "vote", "undo", "vote"]
    assert assignments.mine(db, pair.ann, pair.project) == {"answered": 2, "skipped": 0}


def test_undo_goes_back_step_by_step_and_only_over_ones_own(pair, db):
    pair.pairs(3)
    pair.vote(pair.bob, pair.next(pair.bob), "left")
    shown = [pair.next(pair.ann)]
    pair.vote(pair.ann, shown[0], "left")
    shown.append(pair.next(pair.ann))
    pair.skip(pair.ann, shown[1])
    assert pair.undo(pair.ann).assignment == shown[1].assignment
    assert pair.undo(pair.ann).assignment == shown[0].assignment
    with pytest.raises(Conflict, match="nothing to undo"):
        pair.undo(pair.ann)
    assert assignments.mine(db, pair.bob, pair.project) == {"answered": 1, "skipped": 0}


def test_an_undone_task_is_kept_from_others_until_the_lease_is_over(pair, clock):
    pair.pairs(1)
    pair.vote(pair.ann, pair.next(pair.ann), "left")
    pair.undo(pair.ann)
    assert pair.next(pair.bob) is None
    clock.advance(600)
    assert pair.next(pair.bob) is not None
    assert pair.next(pair.ann) is None


def test_what_is_left_is_what_could_still_be_given(pair, clock):
    pair.pairs(4)
    assert assignments.left(pair.db, pair.ann, pair.project) == 4
    pair.vote(pair.ann, pair.next(pair.ann), "left")
    pair.skip(pair.ann, pair.next(pair.ann))
    assert assignments.left(pair.db, pair.ann, pair.project) == 2
    pair.next(pair.bob)  # the skipped one
    pair.skip(pair.bob, pair.next(pair.bob))
    pair.next(pair.bob)
    assert (assignments.left(pair.db, pair.ann, pair.project), assignments.left(pair.db, pair.bob, pair.project)) == (1, 2)
    clock.advance(600)
    assert (assignments.left(pair.db, pair.ann, pair.project), assignments.left(pair.db, pair.bob, pair.project)) == (2, 2)


def test_a_skip_cannot_be_undone_once_somebody_else_has_the_task(pair):
    pair.pairs(1)
    pair.skip(pair.ann, pair.next(pair.ann))
    pair.next(pair.bob)
    with pytest.raises(Conflict, match="Somebody else has the task"):
        pair.undo(pair.ann)
    assert assignments.mine(pair.db, pair.ann, pair.project)["skipped"] == 1


@pytest.mark.parametrize("overlap", [1, 2])
def test_an_answered_task_takes_no_second_answer_from_the_same_person(pair, overlap):
    pair.pairs(1, overlap=overlap)
    shown = pair.next(pair.ann)
    pair.vote(pair.ann, shown, "left")
    for again in (lambda: pair.vote(pair.ann, shown, "right"), lambda: pair.skip(pair.ann, shown)):
        with pytest.raises(Conflict, match="undo that first"):
            again()
    with pytest.raises(Conflict, match="undo that first"):
        assignments.renew(pair.db, pair.ann, shown.assignment)


# Who may


def test_another_persons_task_and_a_task_that_is_none_look_alike(pair):
    pair.pairs(1)
    shown = pair.next(pair.ann)
    for number in (shown.assignment, 10**6, -1):
        with pytest.raises(Missing, match=f"no task {number} "):
            assignments.vote(pair.db, pair.bob, number, LabelAnswer(choice="left"), "a key of mine")


def test_viewers_strangers_and_closed_projects_get_nothing(pair, db):
    pair.pairs(1)
    viewer = pair.person("Vera", "viewer")
    with pytest.raises(Forbidden, match="may not label"):
        pair.next(viewer)
    stranger = people.Person(999, "Nobody")
    with pytest.raises(Missing, match="no project"):
        pair.next(stranger)
    shown = pair.next(pair.ann)
    projects.close(db, pair.owner, pair.project)
    for call in (lambda: pair.next(pair.ann), lambda: pair.vote(pair.ann, shown, "left"), lambda: pair.undo(pair.ann)):
        with pytest.raises(Conflict, match="closed"):
            call()
    projects.close(db, pair.owner, pair.project, closed=False)
    pair.vote(pair.ann, shown, "left")


def test_an_undo_leads_to_no_doubled_row_when_repeated_after_a_crash(pair, where, clock):
    """The client never heard of the first answer: another process gets the same call and finds it done."""
    pair.pairs(1)
    pair.vote(pair.ann, pair.next(pair.ann), "left")
    receipt = pair.undo(pair.ann, key="undo of the last")
    again = database.connect(where, clock)
    assert assignments.undo(again, pair.ann, pair.project, "undo of the last") == receipt
    again.close()
    assert len(votes(pair.db)) == 2


def test_negative_control_drift_is_noticed(desks, db):
    made = desks()
    made.pairs(1)
    made.vote(made.owner, made.next(made.owner), "left")
    for break_, mend in ((Seat.done, True), (Assignment.vote_id, 1)):
        table = break_.class_
        with db.session(write=True) as session:
            session.execute(table.__table__.update().values({break_.key: False if mend is True else None}))
        assert label_checks.faults(db)
        with db.session(write=True) as session:
            session.execute(table.__table__.update().values({break_.key: mend}))


def test_making_tasks_is_the_same_whoever_is_asked_again(desks, db):
    made = desks()
    first = made.pairs(5)
    again = made.pairs(5)
    assert (first.tasks, again.tasks, again.known) == (5, 0, 5)
    assert isinstance(first, intake.Added)


@pytest.mark.parametrize("seconds", [0, 601])
def test_another_page_stores_a_pair_again_that_was_taken_back(pair, db, clock, seconds):
    """Within the lease and after it, with the sides as they were and turned: the choice is of what was seen on that side."""
    pair.pairs(1)
    with db.session(write=False) as session:
        task = session.scalars(select(LabelTask.id)).one()

    def record(display):
        return assignments.record(db, pair.ann, task, display, LabelAnswer(choice="left"), next(pair.keys))

    chosen = []
    for display in ([0, 1], [1, 0], [0, 1]):
        receipt = record(display)
        chosen.append(export.dump(db, pair.owner, pair.project)[-1]["choice"])
        with pytest.raises(Conflict, match="compared before"):
            record(display)
        assignments.undo(db, pair.ann, pair.project, next(pair.keys), only=receipt.vote)
        clock.advance(seconds)
    assert chosen == ["a", "b", "a"]


def test_another_page_takes_the_persons_own_seat_before_any_other(desks, db, clock):
    made = desks(overlap=2)
    made.pairs(1)
    bob, ann = made.person("Bob"), made.person("Ann")
    made.next(bob)
    made.next(ann)
    clock.advance(601)  # both seats are free again, and Bob's comes first
    with db.session(write=False) as session:
        task = session.scalars(select(LabelTask.id)).one()
    assert assignments.record(db, ann, task, [0, 1], LabelAnswer(choice="left"), next(made.keys)).action == "vote"
