"""What the runs page is told: curves to the last digit, what changed as it changes, and nothing that lies elsewhere."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import math
import os
import threading
from pathlib import Path

import pytest
from live_studio import live_studio
from run_folders import GIF, TOKENS, append, figures, make_run, rollout
from timing import PATIENCE, quickest, until

from psigrad.errors import UserError
from psigrad.records.run_folder import RunFolder, to_line
from psigrad_studio.labels import people, projects
from psigrad_studio.runs import run_finder
from psigrad_studio.runs.run_cache import RunCache
from psigrad_studio.runs.run_notes import RunNotes

FORMS = {
    "/api/runs/curves": {"runs": []},
    "/api/runs/about": {"run": "0" * 16},
    "/api/runs/notes": {"run": "0" * 16, "tags": []},
    "/api/runs/table": {"runs": []},
    "/api/runs/rollouts": {"run": "0" * 16},
    "/api/runs/group": {"run": "0" * 16, "n": 0},
    "/api/runs/send": {"run": "0" * 16, "n": 0, "other": 1},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("studio") / "runs"
    for seed in range(3):
        make_run(root / "compare" / f"grpo-{seed}", seed=seed)
    make_run(root / "rloo", 30, algorithm="rloo", rollouts=2)
    control = make_run(root / "cartpole", rollouts=0, recipe="control", algorithm="ppo", env="CartPole-v1", total_timesteps=20)
    (control / "episode.gif").write_bytes(GIF)
    append(
        control / "rollouts.jsonl",
        *({"step": 20, "kind": "episode", "episode": i, "reward": 9.0 + i, "length": 9} for i in range(5)),
    )
    return root


@pytest.fixture(scope="module")
def studio(root):
    unlimited = {"requests_per_second": 1e6, "burst": 10**6, "strangers_per_second": 1e6, "strangers_burst": 10**6}
    with pytest.MonkeyPatch.context() as patch, live_studio(runs=root, **unlimited) as running:
        patch.setattr(run_finder, "SCAN_SECONDS", 0.0)  # a run is found at once
        yield running


@pytest.fixture(scope="module")
def ids(studio):
    return {run["name"]: run["id"] for run in studio.ask("GET", "/api/runs").json["runs"]}


def states(root: Path) -> dict[str, tuple[str, int]]:
    files = (p for p in root.rglob("*") if p.is_file())
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def test_the_list_says_what_each_run_is(studio):
    answer = studio.ask("GET", "/api/runs").json
    runs = {run["name"]: run for run in answer["runs"]}
    assert answer["whole"] and set(runs) == {"compare/grpo-0", "compare/grpo-1", "compare/grpo-2", "rloo", "cartpole"}
    first = runs["compare/grpo-0"]
    assert (first["method"], first["model"], first["state"], first["step"], first["total"], first["seed"]) == (
        *("grpo", "tiny/model", "finished", 20, 20, 0),
    )
    assert first["last"] == {"name": "reward", "value": pytest.approx(0.4)} and first["alerts"] == []
    assert len({runs[f"compare/grpo-{seed}"]["group"] for seed in range(3)}) == 1
    assert runs["rloo"]["group"] != first["group"]
    assert (runs["cartpole"]["kind"], runs["cartpole"]["model"]) == ("control", "CartPole-v1")
    names = [signal["name"] for signal in answer["signals"]]
    assert len(names) == len(set(names)) > 20


def test_curves_are_the_files_numbers(studio, root, ids):
    rows = [json.loads(line) for line in (root / "rloo" / "metrics.jsonl").read_text().splitlines()]
    asked = {"runs": [{"id": ids["rloo"]}], "names": None, "axis": "step"}
    (answer,) = studio.post("/api/runs/curves", asked).json
    reward = answer["curves"]["reward"]
    assert reward["values"] == [row["reward"] for row in rows] and reward["count"] == 30
    assert answer["grids"][reward["steps"]] == [row["step"] for row in rows]
    assert "samples" in answer["keys"] and "samples" not in answer["curves"]
    (more,) = studio.post("/api/runs/curves", {**asked, "names": ["samples", "nothing"]}).json
    assert more["curves"]["samples"]["values"] == [8] * 30 and set(more["curves"]) == {"samples"}
    (timed,) = studio.post("/api/runs/curves", {**asked, "names": ["reward"], "axis": "time"}).json
    assert timed["curves"]["reward"]["x"] == pytest.approx([0.5 * s for s in range(1, 31)])


def test_curves_go_on_from_where_the_page_has_them(studio, root, ids):
    run = make_run(root / "growing", 5, state="running")
    ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "growing")
    ask = lambda have, generation=0: studio.post(  # noqa: E731
        "/api/runs/curves", {"runs": [{"id": ident, "have": {"reward": have}, "generation": generation}], "names": ["reward"]}
    ).json[0]
    assert ask(0)["curves"]["reward"]["count"] == 5
    append(run / "metrics.jsonl", figures(6), figures(7, reward="NaN"))
    more = ask(5)["curves"]["reward"]
    assert (more["first"], more["count"], more["values"]) == (5, 7, [pytest.approx(0.26), None])
    assert ask(7)["curves"]["reward"]["values"] == []
    assert ask(99)["curves"]["reward"]["first"] == 0  # what the page has cannot be
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    back = ask(7)
    assert back["generation"] == 1 and (back["curves"]["reward"]["first"], back["curves"]["reward"]["count"]) == (0, 3)


def test_what_changes_is_told_as_it_changes(studio, root, ids):
    """Server-sent events while the library writes a run, until it is finished."""
    with RunFolder.open(root / "live", {"algorithm": "grpo", "run": {"seed": 0}}) as folder:
        folder.event("started", step=0)
        folder.metrics(figures(1))
        ident = until(lambda: next((r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "live"), None))
        told: list[dict] = []
        thread = threading.Thread(target=_listen, args=(studio, ident, told), daemon=True)
        thread.start()
        until(lambda: told and told[-1]["step"] == 1 and told[-1]["state"] == "running")
        steps = itertools.count(2)

        def another() -> None:
            step = next(steps)
            folder.metrics(figures(step, loss="NaN"))
            until(lambda: told[-1]["step"] == step)

        waited = quickest(another, 3)
        assert [a["rule"] for a in told[-1]["alerts"]] == ["not_finite"]
        folder.event("finished")
    until(lambda: told[-1]["state"] == "finished")
    print(f"\n{1000 * waited:.0f} ms from a row written to a row told")
    assert waited < 3


def _listen(studio, ident, told):
    connection = http.client.HTTPConnection("127.0.0.1", studio.settings.port, timeout=PATIENCE)
    connection.request("GET", f"/api/runs/live?runs={ident}", headers=studio.headers)
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    while line := response.readline():
        if line.startswith(b"data: "):
            told.append(json.loads(line[6:]))
            if told[-1]["state"] == "finished":
                break
    connection.close()


def test_a_studio_that_stops_doesnt_wait_for_who_listens(root):
    with live_studio(runs=root) as studio:
        ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "rloo")
        connection = http.client.HTTPConnection("127.0.0.1", studio.settings.port, timeout=PATIENCE)
        connection.request("GET", f"/api/runs/live?runs={ident}", headers=studio.headers)
        response = connection.getresponse()
        response.readline()
        studio.app.state.ending.set()
        assert response.read() is not None
        connection.close()


def test_seeds_of_other_code_are_another_group(tmp_path):
    """A band of seeds and its mean are drawn over one group."""
    codes = {"a": {"reward": "1" * 64}, "b": {"reward": "1" * 64}, "edited": {"reward": "2" * 64}, "unknown": None}
    for seed, (name, code) in enumerate(codes.items()):
        append(make_run(tmp_path / name, seed=seed) / "events.jsonl", {"kind": "resumed", **({"code": code} if code else {})})
    groups = {entry["name"]: entry["group"] for entry in RunCache(tmp_path).entries(PATIENCE)[0]}
    assert groups["a"] == groups["b"] and len(set(groups.values())) == 3


def test_completions_are_listed_and_their_group_is_whole(studio, ids):
    found = studio.post("/api/runs/rollouts", {"run": ids["compare/grpo-0"], "step": 7, "count": 3}).json
    assert (found["total"], found["found"], len(found["rows"]), found["whole"]) == (80, 4, 3, True)
    assert found["rows"][1]["completion"] == "answer 1 of step 7" and found["rewards"] == [0.0, 1.0]
    group = studio.post(
        "/api/runs/group", {"run": ids["compare/grpo-0"], "n": found["rows"][1]["n"], "generation": found["generation"]}
    ).json
    assert [m["k"] for m in group["members"]] == [0, 1, 2, 3] and group["prompt"][0]["content"].startswith("Prompt 7")
    tokens = group["members"][0]["tokens"]
    assert tokens["logprob"] == TOKENS["logprobs"] and tokens["ratio"][1] == pytest.approx(1.10517, abs=1e-5)
    assert not group["names"] and tokens["text"] == ["#5", "#6", "#7", "#8"]


def test_episodes_and_their_picture(studio, ids):
    found = studio.post("/api/runs/rollouts", {"run": ids["cartpole"], "kind": "episode", "order": "best"}).json
    assert [row["reward"] for row in found["rows"]] == [13.0, 12.0, 11.0, 10.0, 9.0]
    group = studio.post("/api/runs/group", {"run": ids["cartpole"], "n": found["rows"][0]["n"]}).json
    assert len(group["members"]) == 5 and group["members"][0]["tokens"] is None
    picture = studio.ask("GET", f"/api/runs/picture?run={ids['cartpole']}")
    assert picture.status == 200 and picture.headers["content-type"] == "image/gif" and picture.body == GIF
    assert studio.ask("GET", f"/api/runs/picture?run={ids['rloo']}").status == 404


def test_alerts_name_the_step_and_its_worst_completions(studio, root):
    run = make_run(root / "bad", 5)
    append(
        run / "metrics.jsonl",
        *(figures(s, **{"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 0.5}) for s in range(6, 16)),
    )
    append(
        run / "rollouts.jsonl",
        *(
            rollout(6, row, k, reward=float(row == 0), finish_reason="length" if k == 1 else "stop")
            for row in range(3)
            for k in range(4)
        ),
    )
    ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "bad")
    alerts = {a["rule"]: a for a in studio.post("/api/runs/about", {"run": ident}).json["alerts"]}
    assert set(alerts) == {"dead_groups", "truncated"} and {a["step"] for a in alerts.values()} == {6}
    assert [row["cut"] for row in alerts["truncated"]["rollouts"]] == [True] * 3
    assert [row["reward"] for row in alerts["dead_groups"]["rollouts"]] == [0.0] * 3
    assert alerts["dead_groups"]["said"] == "Of 3 groups at step 6, 3 have equal rewards: 1 the run's highest, 2 its lowest."


def test_two_completions_go_to_the_labelling_desk_with_their_lineage(studio, ids):
    sent = {"run": ids["compare/grpo-1"], "n": 8, "other": 9}
    answer = studio.post("/api/runs/send", sent).json
    assert answer["tasks"] == 1 and answer["name"] == "Sent from runs"
    assert studio.post("/api/runs/send", {**sent, "n": 9, "other": 8}).json["known"] == 1
    assert [p["id"] for p in studio.ask("GET", "/api/runs/projects").json] == [answer["project"]]
    store = studio.app.state.labels
    person = people.local(store.db)
    assert projects.progress(store.db, person, answer["project"]).tasks == 1
    from sqlalchemy import select

    from psigrad_studio.labels.schema import Origin

    with store.db.session(write=False) as session:
        origins = session.scalars(select(Origin)).all()
        assert {(o.run, o.step, o.about["row"], o.about["k"]) for o in origins} == {
            ("compare/grpo-1", 3, 3, 0),
            ("compare/grpo-1", 3, 3, 1),
        }
    for bad in ({"other": 8}, {"other": 12}, {"other": 9999}, {"project": 77}):
        assert studio.post("/api/runs/send", {**sent, **bad}).status in (404, 403, 422), bad


def test_who_was_invited_to_label_sees_no_run(studio, ids):
    store = studio.app.state.labels
    db = store.db
    admin = people.local(db)
    with db.session(write=True) as session:
        user = people.new_user(session, "mallory", "a long enough password")
        login = people.open_session(session, user)
    assert admin.admin
    cookie = {"Host": studio.host, "Cookie": f"psigrad-desk-{studio.settings.port}={login.token}"}
    for path in ("/runs", "/api/runs", "/api/runs/live", f"/api/runs/picture?run={ids['cartpole']}", "/api/runs/projects"):
        assert studio.ask("GET", path, headers=cookie).status == 403, path


TRICKS = ["../rloo", "..%2frloo", "/etc/passwd", "compare/grpo-0", "0" * 16, "", "\x00", "a" * 17, "%s", "0000000000000000/../.."]


@pytest.mark.parametrize("trick", TRICKS)
def test_no_text_of_a_request_becomes_a_path(studio, trick):
    for path, form in FORMS.items():
        content = {**form, "runs": [{"id": trick}]} if "runs" in form else {**form, "run": trick}
        assert studio.post(path, content).status == 422, (path, trick)
    from urllib.parse import quote

    picture = studio.ask("GET", f"/api/runs/picture?run={quote(trick)}")
    assert picture.status in (400, 404, 422) or (trick == "" and picture.body == b"")
    live = studio.ask("GET", f"/api/runs/live?runs={quote(trick)}")
    assert live.status in (200, 400) and b"data" not in live.body


def test_a_link_in_place_of_a_file_leads_nowhere(studio, root, tmp_path):
    run = make_run(root / "linked", 3)
    (tmp_path / "secret.gif").write_bytes(GIF)
    (run / "episode.gif").symlink_to(tmp_path / "secret.gif")
    (run / "rollouts.jsonl").unlink()
    (tmp_path / "secret.jsonl").write_text((root / "rloo" / "rollouts.jsonl").read_text())
    (run / "rollouts.jsonl").symlink_to(tmp_path / "secret.jsonl")
    ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "linked")
    assert studio.ask("GET", f"/api/runs/picture?run={ident}").status == 404
    assert studio.post("/api/runs/rollouts", {"run": ident}).json["total"] == 0


@pytest.mark.parametrize("change", [
    {"n": -1}, {"n": "0"}, {"n": 10**12}, {"run": 5}, {"generation": 1}, {"x": 1}, {"n": None},
])  # fmt: skip
def test_mistakes_are_sentences(studio, ids, change):
    reply = studio.post("/api/runs/group", {"run": ids["rloo"], "n": 0, **change})
    assert reply.status == (409 if "generation" in change else 422) and reply.json["error"]["message"].endswith("."), reply.body


def test_text_of_a_model_is_spelt_out_where_it_could_deceive(studio, root):
    run = make_run(root / "odd", 1, rollouts=0)
    append(
        run / "rollouts.jsonl",
        rollout(
            1,
            0,
            0,
            reward=math.nan,
            completion="a\u202eb\x07<script>\ud800",
            prompt=[{"role": "<b>", "content": "\x1b[31m"}, "x", 3],
        ),
    )
    ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "odd")
    group = studio.post("/api/runs/group", {"run": ident, "n": 0}).json
    assert group["members"][0]["completion"] == "a\\u202eb\\x07<script>\\ud800"
    assert group["members"][0]["reward"] is None
    assert group["prompt"] == [{"role": "<b>", "content": "\\x1b[31m"}]


def test_rows_of_another_shape_are_shown_as_far_as_they_go(studio, root):
    run = make_run(root / "foreign", 1, rollouts=0)
    with (run / "rollouts.jsonl").open("ab") as stream:
        stream.write(
            b'{"step": 1, "k": NaN, "turns": 1e999, "completion": {"a": [1]}, "completion_ids": "x", "parts": [1], "mask": 3}\n'
        )
        stream.write(
            b'{"step": 1, "kind": "train", "reward": {}, "completion_ids": [1, null], "logprobs": [1e999, "x"], "mask": [1]}\n'
        )
        for name in (
            rollout(1, 0, 0) | TOKENS | {"mask": [], "advantages": [], "kept": True, "step_rewards": [], "turns": 1, "cuts": []}
        ):
            for odd in (3, "x", {"a": 1}, [None], [[]], None, True):
                row = rollout(1, 0, 0, advantage=0.0, **TOKENS) | {name: odd}
                stream.write(to_line(row | {"step": 1}))
    ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "foreign")
    found = studio.post("/api/runs/rollouts", {"run": ident, "count": 200}).json
    assert found["found"] == len(found["rows"]) > 100
    for n in range(found["found"]):
        answer = studio.post("/api/runs/group", {"run": ident, "n": n})
        assert answer.status == 200 and answer.json["members"], answer.body
    assert studio.post("/api/runs/about", {"run": ident}).status == 200


def test_what_the_environment_said_and_the_policy_did_not_read_is_shown(studio, root):
    run = make_run(root / "cut", 1, rollouts=0)
    cuts = [{"turn": 0, "kind": "cut", "reason": "<b>"}, {"turn": 2, "kind": "dropped", "reason": "9000 characters: no room"}, 3]
    append(run / "rollouts.jsonl", rollout(1, 0, 0) | {"turns": 2, "cuts": cuts}, rollout(1, 1, 0))
    ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "cut")
    shown = [studio.post("/api/runs/group", {"run": ident, "n": n}).json["members"][0]["cuts"] for n in (0, 1)]
    assert shown == [["The opening was cut (<b>).", "The answer to turn 2 was dropped (9000 characters: no room)."], []]


def test_nothing_is_written_where_the_runs_are(studio, root, ids):
    before = states(root)
    locks = {p: p.stat().st_mtime_ns for p in root.rglob(".lock")}
    studio.ask("GET", "/api/runs")
    for path, form in FORMS.items():
        if path != "/api/runs/send":
            studio.post(path, {**form, "runs": [{"id": ids["rloo"]}]} if "runs" in form else {**form, "run": ids["rloo"]})
    studio.post("/api/runs/send", {"run": ids["rloo"], "n": 0, "other": 1})
    assert states(root) == before and all(p.stat().st_mtime_ns == t for p, t in locks.items())
    # a trainer that starts now is not refused
    with RunFolder.open(root / "rloo-again", {}):
        assert os.path.exists(root / "rloo-again" / "config.json")


def test_the_first_rows_are_shown_as_the_model_read_them_and_damaged_ones_are_not(root, studio):
    path = make_run(root / "rows")
    ident = next(run["id"] for run in studio.ask("GET", "/api/runs").json["runs"] if run["name"] == "rows")
    assert studio.post("/api/runs/about", {"run": ident}).json["first_rows"] == []
    pieces = [["prompt", "<|im_start|>user\n<b>"], ["trained", "x" * 9000]]
    append(
        path / "events.jsonl",
        {"time": 1.0, "kind": "first_rows", "rows": [["a.jsonl:1", pieces], ["torn"], 3, ["b", 4], ["c", [5]]]},
    )
    about = studio.post("/api/runs/about", {"run": ident}).json
    assert about["first_rows"] == [{"title": "a.jsonl:1", "pieces": [pieces[0], ["trained", "x" * 4000]]}]
    assert "first_rows" not in {event["kind"] for event in about["events"]}, "they are no line of the table of events"


def test_alerts_come_by_kind_with_their_first_and_last_step(tmp_path):
    run = make_run(tmp_path / "runs" / "leaps", 0, rollouts=0)
    leaps = {30: 30.0, 50: 40.0, 70: 30.0}
    append(run / "metrics.jsonl", *(figures(s, reward=0.5) | {"grad_norm": leaps.get(s, 1.0)} for s in range(1, 91)))
    append(run / "metrics.jsonl", *(figures(s, reward=0.5) | {"grad_norm": 1.0, "entropy": 0.001} for s in range(91, 96)))
    (entry,), _ = RunCache(tmp_path / "runs").entries(60)
    found = [(a["rule"], a["count"], a["step"], a["ended"], a["calm"]) for a in entry["alerts"]]
    assert found == [("entropy", 1, 91, None, False), ("grad_norm", 3, 30, 71, True)]


@pytest.mark.parametrize(("reward", "calm"), [(0.97, True), (0.6, False)])
def test_alerts_that_a_solved_task_explains_ask_for_nothing(tmp_path, reward, calm):
    run = make_run(tmp_path / "runs" / "solved", 0, rollouts=0)
    rows = (
        figures(s, reward=reward if s > 20 else 0.2) | {"entropy": 1.0 if s < 50 else 0.001, "frac_reward_zero_std": s / 100}
        for s in range(1, 101)
    )
    append(run / "metrics.jsonl", *({**row, "completions/clipped_ratio": 0.9} for row in rows))
    (entry,), _ = RunCache(tmp_path / "runs").entries(60)
    kinds = {a["rule"]: a for a in entry["alerts"]}
    assert {"entropy", "dead_groups", "truncated"} <= set(kinds) and not kinds["truncated"]["calm"]
    assert [kinds[name]["calm"] for name in ("entropy", "dead_groups")] == [calm, calm]
    assert ("Nothing to do: the task is solved (0.97 of 1)" in kinds["entropy"]["says"]) == calm


def test_a_table_has_last_figures_and_the_settings_that_differ(studio, ids):
    runs = [ids["compare/grpo-0"], ids["compare/grpo-2"], ids["rloo"]]
    found = studio.post("/api/runs/table", {"runs": [*runs, "0" * 16]}).json
    assert [row["id"] for row in found["rows"]] == runs
    assert found["rows"][1]["figures"]["reward"] == pytest.approx(0.2 + 20 / 100 + 2 / 10)
    assert found["settings"] == ["algorithm", "run.seed", "run.max_steps"]
    assert [row["settings"]["run.seed"] for row in found["rows"]] == ["0", "2", "0"]
    assert studio.post("/api/runs/table", {"runs": runs[:1]}).json["settings"] == []


def test_tags_and_notes_are_kept_beside_the_runs(studio, root, ids):
    ident, before = ids["rloo"], sorted((root / "rloo").iterdir())
    kept = studio.post("/api/runs/notes", {"run": ident, "tags": [" paper", "best", "best", ""], "note": " the one\n"})
    assert kept.json == {"tags": ["best", "paper"], "note": "the one"}
    entries = {run["name"]: run for run in studio.ask("GET", "/api/runs").json["runs"]}
    assert entries["rloo"]["tags"] == ["best", "paper"] and entries["compare/grpo-0"]["tags"] == []
    assert studio.post("/api/runs/about", {"run": ident}).json["note"] == "the one"
    assert sorted((root / "rloo").iterdir()) == before
    assert studio.post("/api/runs/notes", {"run": ident, "tags": [], "note": ""}).json == {"tags": [], "note": ""}
    assert json.loads((root.parent / "run_notes.json").read_text()) == {}


@pytest.mark.parametrize("text", ["[1, 2", "[" * 200_000, " " * ((8 << 20) + 1)], ids=["cut", "deep", "large"])
def test_a_damaged_file_of_notes_is_not_written_over(text, tmp_path):
    (tmp_path / "run_notes.json").write_text(text)
    notes = RunNotes(tmp_path / "runs")
    assert notes.of("a") == {"tags": [], "note": ""}
    with pytest.raises(UserError, match="is not a file of notes"):
        notes.put("a", ["x"], "")
    assert (tmp_path / "run_notes.json").read_text() == text
