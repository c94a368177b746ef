"""Who may come in and what they may do: invites, passwords, sessions, tokens, roles."""

from __future__ import annotations

import contextlib

import pytest
from at_once import at_once
from sqlalchemy import select, text

from psigrad_studio.labels import assignments, export, intake, invites, passwords, people, projects, results
from psigrad_studio.labels.people import HOUR, Person
from psigrad_studio.labels.projects import ProjectSettings
from psigrad_studio.labels.refusals import Conflict, Forbidden, Missing, Refusal, TooMany, Unknown
from psigrad_studio.labels.schema import Audit

PASSWORD = "correct horse battery"


@pytest.fixture
def project(db, owner):
    return projects.create(db, owner, ProjectSettings("one", seed=1))


@pytest.fixture
def ann(db, owner, project):
    return invites.accept(db, invites.invite(db, owner, project, "labeller"), "Ann", PASSWORD)


# Coming in


def test_a_new_database_has_no_account_and_no_password(db):
    for name, password in (("admin", "admin"), ("local", ""), ("local", "local"), ("root", "password")):
        with pytest.raises(Unknown):
            people.log_in(db, name, password)


def test_the_first_link_makes_an_administrator_once(db):
    old, token = invites.first(db), invites.first(db)
    with pytest.raises(Missing):
        invites.accept(db, old, "Eve", PASSWORD)
    assert invites.look(db, token).role == "admin"
    admin = invites.accept(db, token, "Ada", PASSWORD).person
    assert admin.admin
    projects.create(db, admin, ProjectSettings("hers"))
    for call in (lambda: invites.accept(db, token, "Eve", PASSWORD), lambda: invites.look(db, token)):
        with pytest.raises(Missing, match="ask for a new one"):
            call()
    with pytest.raises(Conflict, match="administrator already"):
        invites.first(db)


def test_a_link_lets_one_of_many_in(db, owner, project):
    token = invites.invite(db, owner, project, "labeller")

    def follow(n):
        with contextlib.suppress(Missing):
            return invites.accept(db, token, f"guest {n}", PASSWORD)

    assert sum(login is not None for login in at_once(8, follow)) == 1
    with db.session(write=False) as session:
        assert session.execute(text("SELECT count(*) FROM users WHERE name LIKE 'guest%'")).scalar_one() == 1


def test_links_run_out_and_can_be_revoked(db, owner, project, clock):
    token = invites.invite(db, owner, project, "viewer", lasts_ms=HOUR)
    clock.advance(3599)
    assert invites.look(db, token).project == "one"
    clock.advance(1)
    with pytest.raises(Missing):
        invites.accept(db, token, "Late", PASSWORD)
    other = invites.invite(db, owner, project, "viewer")
    (open_one,) = invites.pending(db, owner, project)
    invites.revoke(db, owner, open_one["id"])
    with pytest.raises(Missing):
        invites.accept(db, other, "Late", PASSWORD)
    assert invites.pending(db, owner, project) == []


def test_a_member_can_join_another_project_and_keeps_the_higher_role(db, owner, project, ann):
    second = projects.create(db, owner, ProjectSettings("two"))
    assert invites.join(db, ann.person, invites.invite(db, owner, second, "admin")) == second
    invites.join(db, ann.person, invites.invite(db, owner, second, "viewer"))
    assert {p.settings.name: p.may for p in projects.mine(db, ann.person)} == {
        "one": {"see", "label"},
        "two": {"see", "results", "label", "manage"},
    }


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        *((name, Refusal, "name has 1 to 80") for name in ("", "   ", "a" * 81, "line\nend\x00", "bidi \u202e")),
        *((name, Conflict, "taken") for name in ("ann", "ANN", " Ann  ", "\uff21nn")),
        ("Local", Conflict, "the studio's owner"),
    ],
)
def test_a_name_that_cannot_be_shown_or_is_taken_is_refused(db, owner, project, ann, name, error, said):
    with pytest.raises(error, match=said):
        invites.accept(db, invites.invite(db, owner, project, "viewer"), name, PASSWORD)
    assert [user["name"] for user in people.everyone(db, owner)] == ["Ann", "local"]


@pytest.mark.parametrize(
    ("password", "why"),
    [
        ("aaaaaaaaaaaa", "Repeats like"),
        ("password12345", "commonly used"),
        ("qwertyuiop12", "commonly used"),
        ("Bob Cratchit 1", "choose a longer one"),
        ("abcabcabcabcabc", "Repeats like"),
        ("psigradstudio", "choose a longer one"),
    ],
)
def test_a_password_that_would_be_guessed_is_refused_and_the_link_stays_good(db, owner, project, password, why):
    token = invites.invite(db, owner, project, "labeller")
    with pytest.raises(Refusal, match=why):
        invites.accept(db, token, "Bob Cratchit", password)
    login = invites.accept(db, token, "Bob Cratchit", PASSWORD)
    with pytest.raises(Refusal, match="easy to guess"):
        people.change_password(db, login.person, PASSWORD, "bobcratchit!")
    people.change_password(db, login.person, PASSWORD, PASSWORD + "x" * 900)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Paul", "P\u0430ul"),  # a Cyrillic a
        ("Paul", "Pau1"),
        ("Iris", "lris"),
        ("Iris", "\u0406ris"),
        ("Bob", "B0b"),
        ("\u0440\u0430\u0441\u0435", "pace"),  # Cyrillic as a whole
        ("Nora", "N\u03bfra"),  # a Greek o
        ("Marnie", "Mamie"),
        ("Wendy", "\uff37endy"),
        ("local", "l\u043ecal"),
        ("local", "loca1"),
    ],
)
def test_names_that_look_alike_are_refused(db, owner, project, first, second):
    if first != "local":
        invites.accept(db, invites.invite(db, owner, project, "viewer"), first, PASSWORD)
    with pytest.raises(Conflict):
        invites.accept(db, invites.invite(db, owner, project, "viewer"), second, PASSWORD)


def test_names_that_differ_to_the_eye_are_taken(db, owner, project):
    names = [
        "Paul",
        "Paula",
        "guest 1",
        "guest 2",
        "guest 11",
        "Jos\u00e9",
        "Jose",
        "\u041e\u043b\u044c\u0433\u0430",
        "Ali",
        "All",
    ]
    for name in names:
        invites.accept(db, invites.invite(db, owner, project, "viewer"), name, PASSWORD)


@pytest.mark.parametrize("password", ["short", "x" * 9, "x" * 1025])
def test_a_password_of_the_wrong_length_is_refused_and_the_link_stays_good(db, owner, project, password):
    token = invites.invite(db, owner, project, "viewer")
    with pytest.raises(Refusal, match="10 to 1024"):
        invites.accept(db, token, "Bob", password)
    invites.accept(db, token, "Bob", PASSWORD)


# Sessions


def test_logging_in_and_out(db, ann):
    login = people.log_in(db, "ann", PASSWORD)
    assert login.token != ann.token and login.token == passwords.session_token(login.csrf) and login.csrf not in login.token
    assert people.who(db, login.token) == Person(ann.person.id, "Ann")
    people.log_out(db, login.token)
    with pytest.raises(Unknown):
        people.who(db, login.token)
    assert people.who(db, ann.token).name == "Ann"


@pytest.mark.parametrize("token", [None, "", "psigrad_session_", "psigrad_api_x", "\0", "\ud800", "x" * 100_000])
def test_a_token_that_is_none_is_nobody(db, ann, token):
    with pytest.raises(Unknown):
        people.who(db, token)


def test_sessions_end_by_the_clock_idle_or_not(db, ann, clock):
    clock.advance(24 * 3600 - 1)
    people.who(db, ann.token)
    clock.advance(24 * 3600 - 1)
    people.who(db, ann.token)
    clock.advance(24 * 3600)
    with pytest.raises(Unknown):
        people.who(db, ann.token)
    login = people.log_in(db, "Ann", PASSWORD)
    for _ in range(30 * 2 - 1):
        clock.advance(12 * 3600)
        people.who(db, login.token)
    clock.advance(12 * 3600)
    with pytest.raises(Unknown):
        people.who(db, login.token)


def test_wrong_names_and_wrong_passwords_get_the_same_sentence(db, ann):
    said = set()
    for name, password in (("Ann", "not her password"), ("Nobody", PASSWORD), ("local", PASSWORD)):
        with pytest.raises(Unknown) as error:
            people.log_in(db, name, password)
        said.add(str(error.value))
    assert len(said) == 1


@pytest.mark.parametrize("name", ["\0", "\ud800", "x" * 100_000, "'; DROP TABLE users; --", "local\u202e"])
def test_a_name_that_is_none_is_a_wrong_name(db, ann, name):
    with pytest.raises(Unknown, match="wrong"):
        people.log_in(db, name, PASSWORD)


@pytest.mark.parametrize("number", [-1, 0, 2**31, 2**63, 10**40])
def test_a_number_of_nothing_is_missing_however_large(db, owner, project, number):
    for call in (
        lambda: projects.info(db, owner, number),
        lambda: assignments.next_task(db, owner, number),
        lambda: assignments.skip(db, owner, number, "a key of mine"),
        lambda: invites.revoke(db, owner, number),
        lambda: people.revoke_token(db, owner, number),
        lambda: people.disable(db, owner, number),
        lambda: projects.set_role(db, owner, project, number, "viewer"),
    ):
        with pytest.raises(Missing):
            call()


def test_guessing_is_stopped_and_others_are_not(db, owner, project, ann, clock):
    for n in range(10):
        with pytest.raises(Unknown):
            people.log_in(db, "ann", f"guess number {n}")
    with pytest.raises(TooMany):
        people.log_in(db, "Ann", PASSWORD)
    bob = invites.accept(db, invites.invite(db, owner, project, "viewer"), "Bob", PASSWORD)
    assert people.log_in(db, "Bob", PASSWORD).person == bob.person
    clock.advance(900)
    people.log_in(db, "Ann", PASSWORD)


def test_guesses_from_elsewhere_do_not_lock_out_a_browser_that_was_logged_in_before(db, ann):
    for n in range(11):
        with pytest.raises((Unknown, TooMany)):
            people.log_in(db, "Ann", f"guess number {n}")
    for device in ("", "made.up", ann.device[:-1], ann.device.upper()):
        with pytest.raises(TooMany, match="logged in before"):
            people.log_in(db, "Ann", PASSWORD, device)
    again = people.log_in(db, "Ann", PASSWORD, ann.device)
    assert again.person == ann.person and again.device not in ("", ann.device)
    for n in range(10):  # whoever has stolen what a browser shows can't guess on
        with pytest.raises(Unknown):
            people.log_in(db, "Ann", f"guess number {n}", ann.device)
    with pytest.raises(TooMany):
        people.log_in(db, "Ann", PASSWORD, ann.device)
    assert people.log_in(db, "Ann", PASSWORD, again.device)


def test_what_a_browser_shows_holds_for_its_user_and_until_the_password_is_changed(db, owner, project, ann):
    bob = invites.accept(db, invites.invite(db, owner, project, "viewer"), "Bob", PASSWORD)
    for n in range(10):
        with pytest.raises(Unknown):
            people.log_in(db, "Ann", f"guess number {n}")
    with pytest.raises(TooMany):
        people.log_in(db, "Ann", PASSWORD, bob.device)
    people.change_password(db, ann.person, PASSWORD, "another good password")
    with pytest.raises(TooMany):
        people.log_in(db, "Ann", "another good password", ann.device)


def test_the_old_password_cannot_be_guessed_in_a_stolen_session(db, ann):
    for n in range(10):
        with pytest.raises(Forbidden):
            people.change_password(db, ann.person, f"guess number {n}", "another good password")
    with pytest.raises(TooMany):
        people.change_password(db, ann.person, PASSWORD, "another good password")
    assert people.log_in(db, "Ann", PASSWORD).person == ann.person


def test_a_changed_password_ends_every_session(db, ann):
    with pytest.raises(Forbidden, match="old password is wrong"):
        people.change_password(db, ann.person, "not her password", "another good password")
    people.change_password(db, ann.person, PASSWORD, "another good password")
    with pytest.raises(Unknown):
        people.who(db, ann.token)
    with pytest.raises(Unknown):
        people.log_in(db, "Ann", PASSWORD)
    people.log_in(db, "Ann", "another good password")


def test_who_is_disabled_is_out_at_once(db, owner, ann, project):
    _, token = people.make_token(db, ann.person, "script")
    people.disable(db, owner, ann.person.id)
    for value in (ann.token, token):
        with pytest.raises(Unknown):
            people.who(db, value)
    with pytest.raises(Unknown):
        people.log_in(db, "Ann", PASSWORD)
    with pytest.raises(Missing):
        assignments.next_task(db, ann.person, project)
    with pytest.raises(Conflict, match="your own account"):
        people.disable(db, owner, owner.id)


# API tokens


def test_an_api_token_does_no_more_than_its_role_and_only_where_it_may(db, owner, project):
    other = projects.create(db, owner, ProjectSettings("other"))
    _, viewer = people.make_token(db, owner, "reader", "viewer", project_id=project)
    program = people.who(db, viewer)
    assert projects.progress(db, program, project).tasks == 0
    for call in (
        lambda: assignments.next_task(db, program, project),
        lambda: projects.close(db, program, project),
        lambda: projects.create(db, program, ProjectSettings("more")),
        lambda: invites.invite(db, program, project, "admin"),
        lambda: people.make_token(db, program, "more"),
        lambda: people.disable(db, program, 1),
    ):
        with pytest.raises(Forbidden):
            call()
    with pytest.raises(Missing):
        projects.progress(db, program, other)


def test_an_api_token_can_be_listed_revoked_and_runs_out(db, owner, project, ann, clock):
    _number, token = people.make_token(db, ann.person, "short", lasts_ms=1000)
    lasting, other = people.make_token(db, ann.person, "long")
    clock.advance(0.999)
    people.who(db, token)
    clock.advance(0.001)
    with pytest.raises(Unknown):
        people.who(db, token)
    assert [t["name"] for t in people.tokens(db, ann.person)] == ["short", "long"]
    assert token not in str(people.tokens(db, ann.person))
    with pytest.raises(Missing):
        people.revoke_token(db, owner, lasting)
    people.revoke_token(db, ann.person, lasting)
    with pytest.raises(Unknown):
        people.who(db, other)


def test_nothing_that_is_stored_can_be_used_to_log_in(db, where, owner, project, ann):
    secrets = [
        PASSWORD,
        ann.token,
        ann.csrf,
        people.make_token(db, ann.person, "s")[1],
        invites.invite(db, owner, project, "viewer"),
    ]
    with db.session(write=False) as session:
        tables = session.execute(text("SELECT * FROM users")).all() + session.execute(text("SELECT * FROM sessions")).all()
        tables += session.execute(text("SELECT * FROM api_tokens")).all() + session.execute(text("SELECT * FROM invites")).all()
        tables += session.execute(text("SELECT * FROM audit")).all()
    # behind the prefix too; what is left of a token behind a "_" near its end is too short to mean anything
    pieces = [piece for value in secrets for piece in (value, value.split("_", 1)[-1]) if piece == PASSWORD or len(piece) >= 16]
    assert len(pieces) >= len(secrets)
    assert not any(piece in str(tables) for piece in pieces)
    assert "scrypt$" in str(tables)


def test_passwords_are_hashed_at_full_cost_and_salted(monkeypatch):
    monkeypatch.undo()
    one, two = passwords.hash_password(PASSWORD), passwords.hash_password(PASSWORD)
    assert one != two and one.startswith("scrypt$15$8$3$")
    assert passwords.check_password(PASSWORD, one) and not passwords.check_password(PASSWORD + "x", one)
    assert not passwords.check_password(PASSWORD, None)


def test_a_password_is_the_same_however_its_letters_were_typed():
    assert passwords.check_password("passwo\u0308rter", passwords.hash_password("passw\u00f6rter"))


# Roles


def everything(db, person, project, user):
    """Every call on a project, by what it takes."""
    return {
        "see": [lambda: projects.info(db, person, project)],
        "label": [
            lambda: assignments.next_task(db, person, project),
            lambda: assignments.mine(db, person, project),
            lambda: assignments.undo(db, person, project, "undo-undo"),
        ],
        "results": [
            lambda: projects.progress(db, person, project),
            lambda: results.agreement(db, person, project),
            lambda: results.ranking(db, person, project),
            lambda: export.preference(db, person, project),
            lambda: export.unpaired(db, person, project),
            lambda: export.dump(db, person, project),
        ],
        "manage": [
            lambda: projects.change(db, person, project, {"lease_s": 60}),
            lambda: projects.close(db, person, project, False),
            lambda: projects.members(db, person, project),
            lambda: projects.set_role(db, person, project, user, "viewer"),
            lambda: invites.invite(db, person, project, "viewer"),
            lambda: invites.pending(db, person, project),
            lambda: intake.add_rows(db, person, project, [{"prompt": "p", "completions": ["x", "y"]}]),
            lambda: intake.add_file(db, person, project, "/etc/passwd"),
            lambda: intake.add_run(db, person, project, "/etc"),
        ],
        "administer": [
            lambda: projects.create(db, person, ProjectSettings(f"of {person.name}")),
            lambda: invites.invite(db, person, None, "admin"),
            lambda: people.disable(db, person, user),
        ],
    }


@pytest.mark.parametrize(
    "role, may",
    [
        ("viewer", {"see", "results"}),
        ("labeller", {"see", "label"}),
        ("admin", {"see", "results", "label", "manage"}),
        (None, set()),
    ],
)
def test_each_role_may_what_it_may_and_nothing_else(db, owner, project, role, may):
    person = invites.accept(db, invites.invite(db, owner, project, role or "viewer"), "Pat", PASSWORD).person
    other = invites.accept(db, invites.invite(db, owner, project, "viewer"), "Other", PASSWORD).person
    if role is None:
        projects.set_role(db, owner, project, person.id, None)
    for needed, calls in everything(db, person, project, other.id).items():
        for call in calls:
            try:
                call()
                refused = False
            except (Forbidden, Missing):
                refused = True
            except (Conflict, ValueError):  # allowed, and there is nothing to do or to read
                refused = False
            assert refused == (needed not in may), needed


def test_a_role_is_looked_up_each_time_and_not_believed(db, owner, project, ann):
    forged = Person(ann.person.id, "Ann", admin=True)
    with pytest.raises(Forbidden):
        projects.close(db, forged, project)
    with pytest.raises(Forbidden):
        projects.create(db, forged, ProjectSettings("mine"))
    projects.set_role(db, owner, project, ann.person.id, "viewer")
    with pytest.raises(Forbidden):
        assignments.next_task(db, ann.person, project)


def test_what_was_done_is_in_the_audit(db, owner, project, ann):
    projects.close(db, owner, project)
    with db.session(write=False) as session:
        done = session.scalars(select(Audit.action).order_by(Audit.id)).all()
    assert done == ["project created", "invited", "invite accepted", "project closed"]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"name": ""}, "1 to 120"),
        ({"kind": "pairs"}, "did you mean 'pair'"),
        ({"overlap": 0}, "1 to 1000"),
        ({"lease_s": 1}, "10 seconds"),
        ({"strengths": 10}, "0 to 9"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(Refusal, match=said):
        ProjectSettings(**{"name": "p"} | settings)


def test_changing_what_cannot_change_is_refused(db, owner, project):
    for changes in ({"kind": "ranking"}, {"seed": 5}, {"colour": "red"}):
        with pytest.raises(Refusal, match="cannot be changed"):
            projects.change(db, owner, project, changes)
    projects.create(db, owner, ProjectSettings("two"))
    with pytest.raises(Conflict, match="There is a project 'two'"):
        projects.change(db, owner, project, {"name": "two"})
    with pytest.raises(Conflict, match="There is a project 'two'"):
        projects.create(db, owner, ProjectSettings(" two "))
