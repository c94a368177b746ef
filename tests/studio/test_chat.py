"""The chat page's routes: what is found, what is written, what is stopped, what is stored, and what is refused."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_models
from chat_runs import make_runs
from hostile import routes
from live_studio import LiveStudio, live_studio
from timing import PATIENCE, quickest, until

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode, prompt_ids
from psigrad.language.models import language_model
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad_studio import chat_answers, comparisons, serve
from psigrad_studio.chat_answers import ChatAnswer, converse
from psigrad_studio.chat_question import ChatQuestion, abilities
from psigrad_studio.checkpoint_list import find
from psigrad_studio.labels import export, people, projects
from psigrad_studio.labels.database import connect
from psigrad_studio.model_cache import LONGEST_LINE, ModelCache
from psigrad_studio.security import Refused

torch.set_num_threads(1)
PLAIN, TALKING, SILENT = "chat/plain, final model", "chat/talking, step 7", "chat/silent, final model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_runs(tmp_path_factory.mktemp("chat") / "runs")


@pytest.fixture(scope="module")
def studio(folder):
    with live_studio(runs=folder) as running:
        yield running


@pytest.fixture
def leisurely(monkeypatch):
    """A model that writes five tokens a second: no long answer ends before a test has done what it does meanwhile."""
    step = chat_answers._Writer.step

    def slow(self):
        time.sleep(0.2)
        return step(self)

    monkeypatch.setattr(chat_answers._Writer, "step", slow)


def ids(studio: LiveStudio) -> dict[str, str]:
    return {model["name"]: model["id"] for model in studio.ask("GET", "/api/chat/models").json["models"]}


def question(studio: LiveStudio, *names: str, words: str = "say a:", **more: Any) -> dict[str, Any]:
    known = ids(studio)
    return {"models": [known[name] for name in names], "messages": [{"role": "user", "content": words}], "seed": 3, **more}


def events_of(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]


def asked(studio: LiveStudio, *names: str, **more: Any) -> list[dict[str, Any]]:
    reply = studio.post("/api/chat/answer", question(studio, *names, **more))
    assert reply.status == 200, reply
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.body)


def written(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {event["side"]: event for event in events if event["event"] == "written"}


@contextmanager
def listening(studio: LiveStudio, content: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """An answer that is read as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", studio.settings.port, timeout=PATIENCE)
    connection.request("POST", "/api/chat/answer", json.dumps(content), studio.headers)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def next_event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := stream.readline()).startswith(b"data: "):
        assert line, "the stream ended"
    return json.loads(line[6:])


def oracle(checkpoint, row: Row, which: int, params: SamplingParams) -> str:
    """The answer, straight from the sampler."""
    model = checkpoint.open()
    seed = seeds.derive(3, "chat", which)
    done = EmbeddedSampler(model).sample([Request(tuple(prompt_ids(model.tokenizer, row)), (seed,))], params)[0][0]
    return decode(model.tokenizer, done.ids)


# ---- what there is


def test_only_language_models_are_found_and_no_link_is_followed(folder, studio):
    found = [model["name"] for model in studio.ask("GET", "/api/chat/models").json["models"]]
    assert found == ["base", "chat/adapter, step 2", PLAIN, SILENT, TALKING]
    assert (folder / "link").is_symlink() and (folder / "control" / "model" / "config.json").exists()


@pytest.mark.parametrize("processor", [True, False])
def test_a_vision_language_model_chats_about_text_and_an_encoder_decoder_is_none(processor, tmp_path):
    made = vision_models.make("idefics3", tmp_path / "seen")
    if not processor:
        (made / "preprocessor_config.json").unlink()
    found = list(find(tmp_path).values())
    assert [one.name for one in found] == ["seen"] * processor
    for one in found:
        ids = one.tokenizer()("a").input_ids
        (completion,) = EmbeddedSampler(one.open()).sample([Request(tuple(ids), (1,))], SamplingParams(max_tokens=2))[0]
        assert completion.ids


def test_names_that_are_no_text_are_spelt_out(folder, tmp_path):
    odd = tmp_path / os.fsdecode(b"r\xff") / "model"
    shutil.copytree(folder / "base", odd)
    with live_studio(runs=tmp_path) as studio:
        reply = studio.ask("GET", "/api/chat/models")
        assert reply.status == 200 and reply.json["models"][0]["name"] == "r\\udcff, final model"
        words = {"models": [reply.json["models"][0]["id"]], "messages": [{"role": "user", "content": "a\ud800"}], "max_tokens": 2}
        answer = studio.post("/api/chat/answer", words)
        assert answer.status == 422 or events_of(answer.body)[-1]["event"] == "written"


def test_a_checkpoint_that_was_named_comes_first_and_one_that_is_trained_again_is_another(folder, tmp_path):
    base = folder / "base"
    named = next(iter(find(tmp_path, [base]).values()))
    assert named.name == str(base.resolve()) and named.run is None
    first = find(folder)
    os.utime(base / "model.safetensors", ns=(1, 1))
    again = find(folder)
    assert set(again) == set(first) and next(c for c in again.values() if c not in first.values()).stamp == 1


@pytest.mark.parametrize("wrong", [{"checkpoints": ["/nowhere"]}, {"model_memory": 0.0}, {"model_memory": float("nan")}])
def test_a_wrong_checkpoint_or_memory_is_refused_before_the_studio_starts(wrong):
    with pytest.raises(UserError, match=r"/nowhere|model_memory is"):
        serve.studio(**wrong, open_browser=False)


def test_about_says_what_a_template_can(studio):
    known = ids(studio)
    about = {name: studio.post("/api/chat/about", {"model": known[name]}).json for name in (PLAIN, TALKING, SILENT)}
    assert about[PLAIN] == {"template": False, "system": False}
    assert about[TALKING] == {"template": True, "system": True}
    assert about[SILENT] == {"template": True, "system": False}


# ---- one answer


def test_the_answer_is_the_samplers_own_and_comes_in_pieces(folder, studio):
    by_name = {c.name: c for c in find(folder).values()}
    params = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9}
    plain = asked(studio, PLAIN, **params)
    assert [event["event"] for event in plain[:3]] == ["begun", "loading", "writing"] and plain[0]["duel"] is None
    pieces = [event["text"] for event in plain if event["event"] == "text"]
    last = written(plain)[0]
    assert len(pieces) > 3 and "".join(pieces) == last["text"] and last["tokens"] <= 24 and last["seed"] == 3
    assert last["text"] == oracle(by_name[PLAIN], Row("a", prompt="say a:"), 0, SamplingParams(**params))
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say a:"}]
    said = written(asked(studio, TALKING, system="be brief", **params))[0]
    assert said["text"] == oracle(by_name[TALKING], Row("a", prompt=talk), 0, SamplingParams(**params))
    again = asked(studio, TALKING, system="be brief", **params)
    assert written(again)[0]["text"] == said["text"] and "loading" not in [event["event"] for event in again]
    other = written(asked(studio, TALKING, **params))[0]
    assert other["text"] != said["text"], "negative control: the system prompt reaches the model"


def test_a_lora_checkpoint_answers_with_its_adapter(folder, studio):
    adapter = {c.name: c for c in find(folder).values()}["chat/adapter, step 2"]
    params = SamplingParams(12, temperature=0)
    said = written(asked(studio, "chat/adapter, step 2", max_tokens=12, temperature=0.0))[0]["text"]
    assert said == oracle(adapter, Row("a", prompt="say a:"), 0, params)
    bare = replace(adapter, folder=folder / "base", adapter=False)
    assert said != oracle(bare, Row("a", prompt="say a:"), 0, params), "negative control: without it another text"


def test_pieces_never_end_in_half_a_character(studio):
    """The random model writes bytes at random, so characters of several tokens and broken ones both occur."""
    for seed in range(4):
        events = asked(studio, PLAIN, seed=seed, max_tokens=80, temperature=2.0)
        whole, told = written(events)[0]["text"], "".join(e["text"] for e in events if e["event"] == "text")
        assert whole.startswith(told) or told == whole


def test_a_prompt_that_leaves_little_room_gets_a_short_answer_and_none_a_sentence(studio):
    assert written(asked(studio, PLAIN, words="1" * 250, max_tokens=256))[0]["tokens"] <= 6
    failed = asked(studio, PLAIN, words="1" * 300)[-1]
    assert failed["event"] == "failed" and "300 tokens" in failed["message"] and "256" in failed["message"]
    assert asked(studio, SILENT, system="be brief")[-1]["message"].startswith(
        "This model's chat template does not support a system prompt"
    )


# ---- stopping, waiting, memory


def test_stop_ends_the_answer_and_keeps_what_was_written(studio, leisurely):
    with listening(studio, question(studio, TALKING, max_tokens=240, temperature=0.0)) as stream:
        begun = next_event(stream)
        while next_event(stream)["event"] != "text":
            pass
        assert studio.post("/api/chat/stop", {"writing": begun["writing"]}).json == {"stopped": True}
        (last,) = written(events_of(stream.read())).values()  # the answer can be stopped until the stream ends
    assert last["reason"] == "stopped" and 0 < last["tokens"] < 240
    assert studio.post("/api/chat/stop", {"writing": begun["writing"]}).json == {"stopped": False}


def test_who_goes_away_stops_the_answer_and_the_next_one_has_the_model():
    models, stop, said = ModelCache(10**9, lambda c: pytest.fail("loaded for nobody")), threading.Event(), []
    checkpoint = next(iter(find(Path("nowhere"), []).values()), None) or _fake("a")
    stop.set()
    turn = models.join([checkpoint])
    converse(models, turn, ChatQuestion(({"role": "user", "content": "x"},)), [ChatAnswer(checkpoint)], (0,), stop, said.append)
    assert said[-1]["reason"] == "stopped" and models.join([checkpoint]).ahead() == 0


def test_a_closed_connection_stops_the_writer(studio, leisurely):
    with listening(studio, question(studio, TALKING, max_tokens=240, temperature=0.0)) as stream:
        while next_event(stream)["event"] != "text":
            pass
        stream.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "chat"])


def test_the_studio_answers_others_while_a_model_writes(studio, leisurely):
    with listening(studio, question(studio, TALKING, max_tokens=240, temperature=0.0)) as stream:
        begun = next_event(stream)
        while next_event(stream)["event"] != "text":
            pass
        assert quickest(lambda: studio.ask("GET", "/api/grid/algorithms"), 1.0) < 1.0
        # the same model is taken: the second asker is told so, then has its turn
        with listening(studio, question(studio, TALKING, max_tokens=2)) as second:
            assert next_event(second)["event"] == "begun"
            assert next_event(second) == {"event": "waiting", "ahead": 1}
            studio.post("/api/chat/stop", {"writing": "x"})
            assert studio.post("/api/chat/stop", {"writing": begun["writing"]}).json == {"stopped": True}
            assert next_event(second)["event"] == "writing"


def _fake(name: str, size: int = 10):
    from psigrad_studio.checkpoint_list import Checkpoint

    return Checkpoint(id=name, name=name, folder=Path(name), bytes=size, stamp=0)


def test_turns_come_in_order_and_only_where_models_are_shared():
    models, (a, b, c) = ModelCache(100), (_fake(n) for n in "abc")
    first, second, third, fourth = (models.join(wanted) for wanted in ([a], [b], [a, b], [c]))
    assert [turn.ahead() for turn in (first, second, third, fourth)] == [0, 0, 2, 0]
    second.leave()
    assert third.ahead() == 1
    waiter = threading.Timer(0.05, first.leave)
    waiter.start()
    assert third.ahead(wait=PATIENCE) == 0
    for _ in range(LONGEST_LINE - 2):
        models.join([c])
    with pytest.raises(Refused, match="try again in a moment"):
        models.join([a])


def test_the_model_used_longest_ago_is_freed_and_those_in_use_stay():
    loaded: list[str] = []
    models = ModelCache(25, lambda checkpoint: loaded.append(checkpoint.name) or checkpoint.name)
    a, b, c, big = _fake("a"), _fake("b"), _fake("c"), _fake("big", 26)
    for wanted in (a, b, a):
        turn = models.join([wanted])
        assert models.get(wanted) == wanted.name
        turn.leave()
    turn = models.join([c])
    models.get(c)
    assert (models.has(a), models.has(b), models.has(c)) == (True, False, True) and loaded == ["a", "b", "c"]
    other = models.join([a])
    with pytest.raises(UserError, match="There is not enough memory for b and the models in use"):
        models.get(b)
    other.leave()
    assert models.get(b) == "b" and not models.has(a)
    with pytest.raises(UserError, match="--model-memory"):
        models.get(big)
    turn.leave()


def test_a_model_that_does_not_load_leaves_no_trace():
    def broken(checkpoint):
        raise UserError("no such model")

    models = ModelCache(25, broken)
    turn = models.join([_fake("a", 20)])
    for _ in range(2):
        with pytest.raises(UserError, match="no such model"):
            models.get(_fake("a", 20))
    turn.leave()


# ---- two answers


def test_nothing_that_is_sent_tells_the_models_apart(studio, monkeypatch):
    """The order is drawn; with both orders forced, the events are the same but for the texts that change places."""
    seen = {}
    for left in (0, 1):
        monkeypatch.setattr(comparisons.secrets, "randbelow", lambda n, left=left: left)
        seen[left] = asked(studio, PLAIN, TALKING, max_tokens=8)
    monkeypatch.undo()
    assert PLAIN not in json.dumps(seen) and TALKING not in json.dumps(seen)
    assert not set(ids(studio).values()) & set(json.dumps(seen[0]).split('"'))
    texts = [{side: event["text"] for side, event in written(seen[left]).items()} for left in (0, 1)]
    assert texts[0][0] == texts[1][1] and texts[0][1] == texts[1][0] and texts[0][0] != texts[0][1]
    alone = [written(asked(studio, name, max_tokens=8))[0]["text"] for name in (PLAIN, TALKING)]
    assert sorted(alone) == sorted(texts[0].values()), "the seed repeats an answer, alone or compared"
    for events in seen.values():
        assert [e["side"] for e in events if e["event"] == "written"] == [0, 1]
        assert next(e["side"] for e in events if e["event"] == "text") == 0
        # in lockstep: as long as both write, neither is more than a token's text ahead
        assert [e["side"] for e in events if e["event"] == "text"][:6].count(0) in (2, 3, 4)


def test_the_order_is_drawn(studio):
    orders = {comparisons.ChatComparisons(None).begin(ChatAnswer(_fake("a")), ChatAnswer(_fake("b"))).sides for _ in range(40)}
    assert orders == {(0, 1), (1, 0)}


def test_a_choice_is_stored_with_its_lineage_and_tells_the_names(folder, tmp_path):
    with live_studio(runs=folder, database=str(tmp_path / "labels.db")) as studio:
        stored = []
        for seed, choice in enumerate(["left", "right", "tie", "both_bad"]):
            events = asked(studio, TALKING, SILENT, seed=seed, max_tokens=8)
            form = {"duel": events[0]["duel"], "choice": choice}
            told = studio.post("/api/chat/choose", form).json
            assert sorted(told["names"]) == sorted([TALKING, SILENT]) and told["note"] == "" and told["project"]
            # the first choice stands
            assert studio.post("/api/chat/choose", {**form, "choice": "tie"}).json == told
            stored.append((told, written(events)))
            if choice == "tie":  # taken back once another is stored: only the newest can be
                tie = form
        assert studio.post("/api/chat/undo", {"duel": tie["duel"]}).status == 409
        database = connect(str(tmp_path / "labels.db"))
        person = people.local(database)
        assert projects.progress(database, person, told["project"]).answered == 4
        exported = export.preference(database, person, told["project"])
        assert len(exported.rows) == 2
        for told, texts in stored[:2]:
            best = 0 if told["choice"] == "left" else 1
            row = next(r for r in exported.rows if r["chosen"][0]["content"] == texts[best]["text"])
            assert row["rejected"][0]["content"] == texts[1 - best]["text"]
            lineage = json.dumps(row["lineage"])
            assert told["names"][best] in lineage and '"chat/talking"' in lineage and '"step": 7' in lineage
        dumped = export.dump(database, person, told["project"])
        shown = [one["display"] for one in dumped]
        assert len(dumped) == 4 and all(sorted(order) == [0, 1] for order in shown)
        # the newest is taken back, and the one before it then is the newest
        assert studio.post("/api/chat/undo", {"duel": form["duel"]}).json == {"undone": True}
        assert studio.post("/api/chat/undo", {"duel": tie["duel"]}).json == {"undone": True}
        assert projects.progress(database, person, told["project"]).answered == 2
        assert studio.post("/api/chat/undo", {"duel": "unknown"}).status == 422
        database.close()


def test_what_cannot_be_compared_is_told_and_not_stored(studio):
    same = asked(studio, PLAIN, PLAIN, temperature=0.0, max_tokens=4)
    told = studio.post("/api/chat/choose", {"duel": same[0]["duel"], "choice": "tie"}).json
    assert told["project"] is None and "the same" in told["note"]
    mixed = asked(studio, PLAIN, TALKING, max_tokens=4)
    told = studio.post("/api/chat/choose", {"duel": mixed[0]["duel"], "choice": "left"}).json
    assert told["project"] is None and "different prompts" in told["note"]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]
    empty = asked(studio, TALKING, SILENT, max_tokens=4, messages=talk)  # an empty answer was the better one
    told = studio.post("/api/chat/choose", {"duel": empty[0]["duel"], "choice": "both_bad"}).json
    assert told["project"] is None and told["note"].startswith(("An earlier message is empty", "One of the answers is empty"))
    pair = {"temperature": 0.0, "max_tokens": 6}
    notes = []
    for _ in range(2):
        events = asked(studio, TALKING, SILENT, **pair)
        notes.append(studio.post("/api/chat/choose", {"duel": events[0]["duel"], "choice": "tie"}).json["note"])
    assert notes[0] == "" and notes[1].startswith("These completions were compared before")


def test_a_pair_is_compared_again_once_its_choice_is_taken_back(studio, monkeypatch):
    for left in (0, 1):  # the sides turned the second time
        monkeypatch.setattr(comparisons.secrets, "randbelow", lambda most, left=left: left)
        events = asked(studio, TALKING, SILENT, temperature=0.0, max_tokens=7)
        told = studio.post("/api/chat/choose", {"duel": events[0]["duel"], "choice": "left"}).json
        assert told["note"] == "" and told["vote"]
        assert studio.post("/api/chat/undo", {"duel": events[0]["duel"]}).json == {"undone": True}


def test_a_choice_waits_for_both_answers(studio, leisurely):
    with listening(studio, question(studio, TALKING, SILENT, max_tokens=200, temperature=0.0)) as stream:
        begun = next_event(stream)
        early = studio.post("/api/chat/choose", {"duel": begun["duel"], "choice": "left"})
        assert early.status == 422 and "still being written" in early.json["error"]["message"]
    assert studio.post("/api/chat/choose", {"duel": "unknown", "choice": "left"}).status == 422


# ---- what is refused

TALK = [{"role": "user", "content": "a"}]
WRONG = {
    "a path": {"models": ["../../etc"]},
    "an unknown model": {"models": ["0" * 20]},
    "no model": {"models": []},
    "three models": {"models": ["0" * 20] * 3},
    "a long id": {"models": ["0" * 65]},
    "no message": {"messages": []},
    "an empty message": {"messages": [{"role": "user", "content": ""}]},
    "a long message": {"messages": [{"role": "user", "content": "x" * 20_001}]},
    "a long talk": {"messages": [{"role": ("user", "assistant")[i % 2], "content": "x" * 15_000} for i in range(9)]},
    "many messages": {"messages": TALK * 201},
    "the wrong turn": {"messages": [*TALK, {"role": "assistant", "content": "b"}]},
    "two in a row": {"messages": TALK * 3},
    "a system message": {"messages": [{"role": "system", "content": "a"}]},
    "another key": {"messages": [{**TALK[0], "tool_calls": []}]},
    "no tokens": {"max_tokens": 0},
    "many tokens": {"max_tokens": 4097},
    "a negative temperature": {"temperature": -1.0},
    "a hot one": {"temperature": 6.0},
    "no top_p": {"top_p": 0.0},
    "a seed below 0": {"seed": -1},
    "a text for a seed": {"seed": "1"},
    "a template": {"chat_template": "{{ 1 }}"},
    "a long system prompt": {"system": "x" * 20_001},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_question_is_refused_in_a_sentence(studio, what):
    right = question(studio, PLAIN, max_tokens=1)
    reply = studio.post("/api/chat/answer", {**right, **WRONG[what]})
    assert reply.status == 422 and reply.code in ("invalid", "mistake"), reply
    assert "Traceback" not in reply.json["error"]["message"]


def test_negative_control_the_right_question_is_answered(studio):
    assert asked(studio, PLAIN, max_tokens=1)[-1]["event"] == "written"


def test_the_hostile_corpus_covers_the_routes(studio):
    assert {"/chat", *(f"/api/chat/{name}" for name in ("models", "about", "answer", "stop", "choose"))} <= set(routes(studio))


def test_only_the_owner_of_the_studio_may_chat(studio):
    for path in ("/chat", "/api/chat/models"):
        assert studio.ask("GET", path, headers={"Host": studio.host}).status == 401


def test_a_template_that_raises_has_no_system_prompt(folder):
    tokenizer = language_model.load(str(folder / "base")).tokenizer
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert abilities(tokenizer) == (True, False)


def test_models_and_tokenizers_are_loaded_one_at_a_time(folder, monkeypatch):
    """transformers' lazy imports break where two threads meet in them."""
    at_once, most, found = [], [], next(iter(find(folder).values()))

    def watched(*arguments, **named):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.02)
        at_once.pop()

    monkeypatch.setattr(language_model, "load", watched)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", watched)
    threads = [threading.Thread(target=work) for work in (found.open, found.tokenizer) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 6
