"""The labelling page's routes: who may what, what they don't tell, and that nothing is stored twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hostile import routes
from live_desk import PASSWORD, Guest, bring, entered, guest, invite, key, project, stranger, told
from live_studio import live_studio

from psigrad_studio.label_api.project_routes import _runs
from psigrad_studio.studio_settings import StudioSettings

UNLIMITED = {"requests_per_second": 1e9, "burst": 10**9, "strangers_per_second": 1e9, "strangers_burst": 10**9}


pytestmark = pytest.mark.usefixtures("cheap_hashes")


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    runs = tmp_path_factory.mktemp("work") / "runs"
    run = runs / "grpo-secret-run"
    run.mkdir(parents=True)
    rows = [
        {"step": s, "kind": "train", "row": r, "k": k, "prompt": f"q{r}", "completion": f"answer {s} {r} {k}", "reward": 0.25 * k}
        for s in (1, 2)
        for r in range(4)
        for k in range(2)
    ]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with live_studio(**UNLIMITED, runs=runs) as running:
        yield running


# ---- a labeller's way


def test_from_invite_to_vote_to_undo(studio):
    made = project(studio, 2)
    ann = guest(studio, made)
    task = ann.next(made)
    assert set(task) == {"assignment", "kind", "prompt", "completions", "lease_ms"} and 590_000 < task["lease_ms"] <= 600_000
    receipt = told(ann.vote(task, choice="left", reason="clearer", client_ms=900))
    assert receipt["action"] == "vote"
    assert ann.next(made)["assignment"] != task["assignment"]
    assert told(ann.post("/api/label/undo", {"project": made, "key": key()}))["undone"] == receipt["vote"]
    assert ann.next(made)["prompt"] == task["prompt"]
    found = told(ann.post("/api/label/next", {"project": made, "count": True}))
    assert found["mine"] == {"answered": 0, "skipped": 0} and found["left"] == 2


def test_every_kind_and_its_refusals(studio):
    rows = [{"prompt": "q", "completions": ["one", "two", "three"]}]
    kinds = {
        "ranking": ({"ranks": [2, 1, 2]}, {"ranks": [1, 3, 3]}),
        "rating-5": ({"rating": 5}, {"rating": 6}),
        "rating-10": ({"rating": 10}, {"rating": 0}),
    }
    for kind, (good, bad) in kinds.items():
        made = project(studio, 0, kind=kind)
        bring(studio, made, rows)
        ann = guest(studio, made)
        task = ann.next(made)
        assert ann.vote(task, **bad).status == 400 and ann.vote(task, choice="left").status == 400
        assert told(ann.vote(task, **good))["action"] == "vote"


def test_renewing_and_losing_a_lease(studio):
    made = project(studio, 1, lease_s=10)
    ann, bob = guest(studio, made), guest(studio, made)
    task = ann.next(made)
    assert bob.next(made) is None
    assert 9_000 < told(ann.post("/api/label/renew", {"assignment": task["assignment"]}))["lease_ms"] <= 10_000
    refused = bob.post("/api/label/renew", {"assignment": task["assignment"]})
    assert refused.status == 404 and refused.code == "missing"


# ---- blindness


def test_nothing_that_a_labeller_can_ask_tells_where_a_completion_comes_from(studio):
    made = project(studio, 3, name="a blind one")
    told(studio.post("/api/label/import-run", {"project": made, "run": "grpo-secret-run", "across_steps": True}))
    ann = guest(studio, made)
    said = b""
    for path in (p for p in routes(studio) if p.startswith(("/label", "/api/label/")) or p == "/api/join/look"):
        for content in ({"project": made}, {"project": made, "count": True}, {"id": 1}):
            said += ann.post(path, content).body
        for query in (f"?project={made}", f"?project={made}&form=votes"):
            said += ann.get(path + query).body
    while (task := ann.next(made)) is not None:
        said += json.dumps(task).encode() + ann.vote(task, choice="left").body
    for word in (b"SAMPLER", b"secret-run", b"rollouts.jsonl", b"rows.jsonl", b"seed", b'"step"', b"reward", b"origins"):
        assert word not in said, word
    owner = studio.ask("GET", f"/api/label/export?project={made}").body
    assert b"SAMPLER" in owner and b"secret-run" in owner  # negative control: it is there to be told


# ---- who may what


def _status(who: Guest, path: str, content: dict | None = None) -> int:
    return (who.get(path) if content is None else who.post(path, content)).status


def test_rights_of_each_role(studio):
    made, other = project(studio, 5), project(studio, 1)
    ann, eve, adm = guest(studio, made), guest(studio, made, "viewer"), guest(studio, made, "admin")
    asks = {
        "label": [("/api/label/next", {"project": made})],
        "results": [(f"/api/label/{part}?project={made}", None) for part in ("results", "export", "left-out")],
        "manage": [
            (f"/api/label/people?project={made}", None),
            ("/api/label/change", {"project": made, "instructions": "x"}),
            ("/api/label/import", {"project": made, "text": "", "name": "x"}),
            ("/api/label/invite", {"project": made, "role": "labeller"}),
            ("/api/label/pair", {"project": made, "prompt": "p", "first": {"completion": "a"}, "second": {"completion": "b"}}),
        ],
        "studio": [
            ("/api/label/create", {"name": f"new {made}"}),
            ("/api/label/users", None),
            ("/api/label/runs", None),
            ("/api/label/invite", {"role": "admin"}),
            ("/api/label/disable", {"id": 1}),
            ("/api/label/import-run", {"project": made, "run": "grpo-secret-run"}),
        ],
    }
    allowed = [(ann, {"label"}), (eve, {"results"}), (adm, {"label", "results", "manage"})]
    for who, may in allowed:
        for group, requests in asks.items():
            for path, content in requests:
                status = _status(who, path, content)
                assert status == (200 if group in may else 403), (who.name, path, status)
        assert _status(who, f"/api/label/results?project={other}") == 404
        assert _status(who, "/api/label/next", {"project": other}) == 404


def test_a_guest_sees_the_labelling_page_and_nothing_else_of_the_studio(studio):
    ann = guest(studio, project(studio, 1))
    for path in routes(studio):
        if path.startswith(("/static/", "/enter")):
            continue
        for method in ("GET", "HEAD", "POST", "DELETE"):
            reply = studio.ask(method, path, {} if method not in ("GET", "HEAD") else None, ann.headers)
            own = path in ("/", "/label", "/join") or path.startswith(("/api/label/", "/api/join/"))
            assert own or reply.status == 403, (method, path, reply.status)
            assert method == "HEAD" or own or reply.code == "guest"
            if path == "/api/join/logout" and method == "POST":
                ann = guest(studio, project(studio, 1))
    document = ann.get("/label").body.decode()
    assert 'href="/label"' in document and 'href="/grid"' not in document
    assert studio.ask("GET", "/", headers=ann.headers).headers["location"] == "/label"
    assert 'href="/grid"' in studio.ask("GET", "/label").body.decode()


def test_an_invite_works_once_and_a_login_afterwards(studio):
    made = project(studio, 1)
    token = invite(studio, made)
    assert told(studio.ask("POST", "/api/join/look", {"token": token}, stranger(studio)))["role"] == "labeller"
    body = {"token": token, "name": "Ann Once", "password": PASSWORD}
    ann = entered(studio, "Ann Once", studio.ask("POST", "/api/join/accept", body, stranger(studio)))
    again = studio.ask("POST", "/api/join/accept", body | {"name": "another"}, stranger(studio))
    assert again.status == 404 and "set-cookie" not in again.headers
    assert told(ann.get("/api/label/me")) == {"name": "Ann Once", "admin": False, "owner": False, "outside": []}
    back = studio.ask("POST", "/api/join/login", {"name": "ann  once", "password": PASSWORD}, stranger(studio))
    other = entered(studio, "Ann Once", back)
    assert other.cookie != ann.cookie
    told(ann.post("/api/join/logout", {}))
    assert ann.get("/api/label/me").status == 401 and other.get("/api/label/me").status == 200
    wrong = studio.ask("POST", "/api/join/login", {"name": "Ann Once", "password": "a wrong password"}, stranger(studio))
    assert wrong.status == 401 and "set-cookie" not in wrong.headers


def test_a_second_invite_adds_a_project_to_who_is_logged_in(studio):
    first, second = project(studio, 1), project(studio, 1)
    ann = guest(studio, first)
    assert told(ann.post("/api/join/use", {"token": invite(studio, second)}))["project"] == second
    assert {p["id"] for p in told(ann.get("/api/label/projects"))} == {first, second}


def test_the_owner_is_told_that_the_key_counts_for_more(studio):
    token = invite(studio, project(studio, 1))
    assert told(studio.post("/api/join/look", {"token": token}))["owner"] is True
    reply = studio.post("/api/join/accept", {"token": token, "name": "me", "password": PASSWORD})
    assert reply.status == 409 and "private window" in reply.json["error"]["message"]


def test_a_guests_session_is_held_to_host_origin_and_token_as_the_owners_is(studio):
    made = project(studio, 1)
    ann, bob = guest(studio, made), guest(studio, made)
    port = studio.settings.port
    cases = [
        ({"X-Psigrad-CSRF": ""}, "csrf"),
        ({"X-Psigrad-CSRF": bob.csrf}, "csrf"),
        ({"X-Psigrad-CSRF": studio.csrf}, "csrf"),
        ({"Origin": "http://evil.example"}, "origin"),
        ({"Host": f"evil.example:{port}"}, "host"),
        ({"Sec-Fetch-Site": "cross-site"}, "site"),
        ({"Cookie": f"{ann.cookie}; {bob.cookie}"}, "session"),
        ({"Cookie": ann.cookie.replace("desk-", "")}, "session"),
        ({"Cookie": ann.cookie + "x"}, "session"),
    ]
    for changed, code in cases:
        reply = studio.ask("POST", "/api/label/next", {"project": made}, ann.headers | changed)
        assert 400 <= reply.status < 500 and reply.code == code, (changed, reply.body)
    assert studio.ask("POST", "/api/label/next", {"project": made}, ann.headers).status == 200


def test_a_guests_cookie_alone_opens_nothing_and_does_not_keep_anybody_from_logging_in(studio):
    ann = guest(studio, project(studio, 1))
    alone = {"Host": studio.host, "Cookie": ann.cookie}
    assert studio.ask("GET", "/label", headers=alone).status == 200
    for path in ("/api/label/me", "/api/label/projects", "/api/label/tokens"):
        assert studio.ask("GET", path, headers=alone).code == "csrf"
        assert ann.get(path).status == 200
    left_over = alone | {"Origin": studio.base, "Content-Type": "application/json"}
    again = entered(studio, ann.name, studio.ask("POST", "/api/join/login", {"name": ann.name, "password": PASSWORD}, left_over))
    assert told(again.get("/api/label/me"))["name"] == ann.name


def test_who_is_shut_out_is_out_at_once(studio):
    made = project(studio, 1)
    ann = guest(studio, made, name="Ann Out")
    number = next(
        m["id"] for m in told(studio.ask("GET", f"/api/label/people?project={made}"))["members"] if m["name"] == "Ann Out"
    )
    told(studio.post("/api/label/disable", {"id": number}))
    assert ann.get("/api/label/me").status == 401
    assert studio.ask("POST", "/api/join/login", {"name": "Ann Out", "password": PASSWORD}, stranger(studio)).status == 401


def test_the_cookie_is_out_of_reach_of_scripts_and_stays_with_https(studio):
    token = invite(studio, project(studio, 1))
    body = {"token": token, "name": "Cookie", "password": PASSWORD}
    cookie = studio.ask("POST", "/api/join/accept", body, stranger(studio)).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "Domain" not in cookie and "Secure" not in cookie


# ---- programs


def test_an_api_token_needs_no_cookie_and_no_csrf_and_may_no_more_than_its_role(studio):
    made = project(studio, 2)
    value = told(studio.post("/api/label/token", {"name": "script", "role": "labeller", "project": made}))
    headers = {"Host": studio.host, "Authorization": f"Bearer {value['token']}", "Content-Type": "application/json"}

    def ask(method: str, path: str, content: dict | None = None, **more: str):
        return studio.ask(method, path, content, headers | more)

    task = told(ask("POST", "/api/label/next", {"project": made}))["task"]
    told(ask("POST", "/api/label/vote", {"assignment": task["assignment"], "key": key(), "choice": "tie"}))
    assert ask("GET", f"/api/label/results?project={made}").status == 403
    assert ask("POST", "/api/label/create", {"name": "by a script"}).status == 403
    assert ask("GET", "/label").status == 403 and ask("GET", "/grid").status == 403
    assert ask("POST", "/api/label/next", {"project": made}, Origin="http://evil.example").status == 403
    # what a browser adds by itself doesn't help a token that is wrong
    wrong = {"Authorization": "Bearer psigrad_api_wrong", "Cookie": studio.cookie}
    assert ask("GET", "/api/label/me", **wrong).status == 401
    told(studio.post("/api/label/untoken", {"id": value["id"]}))
    assert ask("GET", "/api/label/me").status == 401


def test_a_proxys_own_authorization_is_no_business_of_ours(studio):
    headers = studio.headers | {"Authorization": "Basic YTpi"}
    assert studio.ask("GET", "/api/label/me", headers=headers).status == 200


# ---- material, results, export


def test_import_says_line_and_column_and_stores_nothing(studio):
    made = project(studio, 0)
    for text, said in (('{"prompt": "p"}\n', "rows.jsonl:1"), ("{}\nnot json", "rows.jsonl:2"), ("[1]", "rows.jsonl:1")):
        reply = studio.post("/api/label/import", {"project": made, "text": text, "name": "rows.jsonl"})
        assert reply.status == 422 and said in reply.json["error"]["message"], reply.body
    assert told(studio.ask("GET", f"/api/label/results?project={made}"))["progress"]["tasks"] == 0


def test_a_large_file_is_the_administrators_alone(studio):
    made = project(studio, 0)
    row = {"prompt": "p" * 400_000, "completions": ["a", "b"]}
    assert bring(studio, made, [row])["tasks"] == 1
    adm = guest(studio, made, "admin")
    assert adm.post("/api/label/import", {"project": made, "text": json.dumps(row), "name": "x"}).status == 413
    assert studio.post("/api/label/create", {"name": "x" * 400_000}).status == 413


def test_runs_are_named_by_the_list_and_by_nothing_else(studio):
    made = project(studio, 0)
    assert told(studio.ask("GET", "/api/label/runs")) == ["grpo-secret-run"]
    for name in ("..", "../runs/grpo-secret-run", "/etc", "", "grpo-secret-run/../grpo-secret-run", "\u0000"):
        assert studio.post("/api/label/import-run", {"project": made, "run": name}).status == 422
    added = told(studio.post("/api/label/import-run", {"project": made, "run": "grpo-secret-run", "first": 2, "last": 2}))
    assert added["tasks"] == 4
    assert told(studio.post("/api/label/import-run", {"project": made, "run": "grpo-secret-run", "last": 0}))["known"] == 0
    assert told(studio.post("/api/label/import-run", {"project": made, "run": "grpo-secret-run", "last": 1}))["tasks"] == 4


def test_runs_to_import_are_found_where_the_runs_page_finds_them(tmp_path):
    root = tmp_path.resolve() / "runs"
    for place in (root, root / "a" / "b" / "c" / "d" / "e", root / "a" / "b" / "c" / "d" / "f" / "too deep"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "rollouts.jsonl").touch()
    assert _runs(root) == {"runs": root, "a/b/c/d/e": root / "a/b/c/d/e"}
    with live_studio(**UNLIMITED, runs=root) as running:
        (root / "rollouts.jsonl").write_text("".join(
            json.dumps({"step": 1, "kind": "train", "row": 0, "k": k, "prompt": "p", "completion": f"{k}"}) + "\n" for k in (0, 1)
        ))  # fmt: skip
        assert sorted(told(running.ask("GET", "/api/label/runs"))) == ["a/b/c/d/e", "runs"]
        made = project(running, 0)
        assert told(running.post("/api/label/import-run", {"project": made, "run": "runs"}))["tasks"] == 1
        ann = guest(running, made)
        told(ann.vote(ann.next(made), choice="left"))
        row = json.loads(running.ask("GET", f"/api/label/export?project={made}").body.splitlines()[0])
        assert row["lineage"]["chosen"][0]["run"] == "runs"


def test_a_pair_comes_with_its_lineage_through_to_the_export(studio):
    made = project(studio, 3)
    about = {"run": "r", "step": 7, "row": 1, "reward": 0.5, "sampler": "step 7"}
    body = {"project": made, "prompt": [{"role": "user", "content": "hi"}]}
    body |= {"first": {"completion": "hello", "k": 0, **about}, "second": {"completion": "yo", "k": 3, **about}}
    assert told(studio.post("/api/label/pair", body))["tasks"] == 1
    assert told(studio.post("/api/label/pair", body))["tasks"] == 0
    ann = guest(studio, made)
    task = ann.next(made)  # ahead of what waits
    texts = [c[0]["content"] for c in task["completions"]]
    told(ann.vote(task, choice=("left", "right")[texts.index("hello")]))
    row = json.loads(studio.ask("GET", f"/api/label/export?project={made}").body.splitlines()[0])
    assert row["chosen"] == [{"role": "assistant", "content": "hello"}]
    origin = row["lineage"]["chosen"][0]
    assert (origin["run"], origin["step"], origin["row"], origin["k"], origin["reward"]) == ("r", 7, 1, 0, 0.5)
    same = body | {"second": body["first"]}
    assert studio.post("/api/label/pair", same).status == 400


def test_results_and_exports(studio):
    made = project(studio, 20, overlap=2, strengths=3)
    for who in (guest(studio, made), guest(studio, made)):
        while (task := who.next(made)) is not None:
            side = ("left", "right")[not task["completions"][0].startswith("good")]
            told(who.vote(task, choice=side, strength=2))
    found = told(studio.ask("GET", f"/api/label/results?project={made}"))
    assert found["progress"]["answered"] == 40 and found["agreement"]["percent"] == 1.0
    assert found["ranking"]["places"][0]["name"] == "SAMPLER-X" and found["ranking"]["prior_sd"] == 3.0
    assert found["ranking"]["tie"] is None  # -inf, as JSON has it
    counted = told(studio.ask("GET", f"/api/label/left-out?project={made}"))
    assert counted["preference"] == {"rows": 20, "left_out": {}} and counted["unpaired"]["rows"] == 40
    reply = studio.ask("GET", f"/api/label/export?project={made}&margin=true")
    assert reply.headers["content-disposition"].startswith("attachment; filename=") and reply.headers["content-type"].startswith(
        "application/x-ndjson"
    )
    rows = [json.loads(line) for line in reply.body.splitlines()]
    assert len(rows) == 20 and all(row["chosen"].startswith("good") and row["margin"] == 2 for row in rows)
    empty = told(studio.ask("GET", f"/api/label/results?project={project(studio, 1)}"))
    assert "No answer compares" in empty["ranking"]["why"] and empty["agreement"]["percent"] is None


def test_the_page_of_the_documentation_says_where_every_route_is(studio):
    root = Path(__file__).parents[2]
    page = (root / "docs" / "studio.md").read_text()
    (place,) = re.findall(r"requests under `/api/label/` are defined in the source folder `(\w+/\w+/)`", page)
    declared = [re.findall(r'@routes\.\w+\("/([a-z-]+)"', file.read_text()) for file in (root / place).glob("*.py")]
    found = {path.removeprefix("/api/label/") for path in routes(studio) if path.startswith("/api/label/")}
    assert {name for names in declared for name in names} == found


# ---- names and databases


def test_a_proxys_name_is_allowed_only_when_it_is_given(tmp_path):
    with live_studio(allowed_hosts=("labels.example.org",), **UNLIMITED) as studio:
        made = project(studio, 1)
        ann = guest(studio, made)
        assert told(studio.ask("GET", "/api/label/me"))["outside"] == ["https://labels.example.org"]
        outside = {"Host": "labels.example.org", "Origin": "https://labels.example.org"}
        assert studio.ask("POST", "/api/label/next", {"project": made}, ann.headers | outside).status == 200
        login = {"name": ann.name, "password": PASSWORD}
        reply = studio.ask("POST", "/api/join/login", login, stranger(studio) | outside)
        assert reply.status == 200 and "Secure" in reply.headers["set-cookie"]
        other = {"Host": "evil.example", "Origin": "https://evil.example"}
        assert studio.ask("POST", "/api/label/next", {"project": made}, ann.headers | other).status == 421
        entering = studio.ask("GET", f"/enter?key={studio.settings.key}", headers={"Host": "labels.example.org"})
        assert entering.status == 403 and "own machine" in entering.json["error"]["message"]


def test_where_labels_are_kept():
    assert StudioSettings(runs=Path("/data/runs")).labels == "/data/labels.db"
    assert StudioSettings(runs=Path("runs")).labels == "labels.db"
    beside = {".": "../labels.db", "..": "../../labels.db", "../runs": "../labels.db", "a/../runs": "labels.db"}
    assert {runs: StudioSettings(runs=Path(runs)).labels for runs in beside} == beside
    assert StudioSettings(database="postgresql://x/y").labels == "postgresql://x/y"


def test_who_never_labels_has_no_database(tmp_path):
    with live_studio(database=str(tmp_path / "labels.db")) as studio:
        assert studio.ask("GET", "/label").status == 200 and not list(tmp_path.iterdir())
        told(studio.ask("GET", "/api/label/projects"))
        assert (tmp_path / "labels.db").exists()


def test_a_database_that_cannot_be_opened_is_said_so(tmp_path):
    (tmp_path / "labels.db").write_text("this is no database, whatever it is called " * 50)
    with live_studio(database=str(tmp_path / "labels.db")) as studio:
        reply = studio.ask("GET", "/api/label/projects")
        assert reply.status == 422 and "is damaged (file is not a database)" in reply.json["error"]["message"]


def test_a_labeller_who_asks_too_much_keeps_nobody_else_out():
    with live_studio(burst=100, requests_per_second=1.0, strangers_burst=10**6) as studio:
        made = project(studio, 1)
        ann, bob = guest(studio, made), guest(studio, made)
        statuses = [ann.get("/api/label/me").status for _ in range(60)]
        assert statuses[0] == 200 and statuses[-1] == 429 and set(statuses) == {200, 429}
        assert bob.get("/api/label/me").status == 200 and studio.ask("GET", "/api/label/me").status == 200


def test_guessing_passwords_and_links_ends_in_429():
    with live_studio(strangers_burst=20, strangers_per_second=0.5) as studio:
        statuses = [studio.ask("POST", "/api/join/look", {"token": f"guess {n}"}, stranger(studio)).status for n in range(40)]
        assert statuses[0] == 404 and statuses[-1] == 429
        assert studio.ask("GET", "/api/label/me").status == 200
