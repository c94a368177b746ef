"""Episodes whose environments and tools answer with pictures: each is in the context once, in its turn, and kept for a resume."""

from __future__ import annotations

import json

import pytest
from painters import Gallery, draw, encoded, look
from pictures import tokenizer

from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.image_rows import digests_of
from psigrad.language.data.reward_view import reward_view
from psigrad.language.data.row_cache import PreparedRows
from psigrad.language.data.sources import from_rows
from psigrad.language.data.templates import prompt_ids
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes, cut, play
from psigrad.language.episodes.tools import CallForm, ToolBoxes
from psigrad.language.images import FIRST
from psigrad.language.recipes.row_encoding import sum_parts
from psigrad.language.rollout.collectors import rollout_row
from psigrad.language.rollout.exchange import pack, unpack
from psigrad.language.rollout.types import Completion, Sampler, SamplingParams, Trajectory
from psigrad.records.read import prompt_text
from psigrad.records.report.html import thumbnails

WORDS = tokenizer()
CALL = '<tool_call>\n{"name": "look", "arguments": {"width": 16}}\n</tool_call>'


class Saying(Sampler):
    """Says the same in each turn, and remembers what it read."""

    def __init__(self, *texts):
        self.texts, self.read = texts, []

    def steps(self, requests, params, cache=None):
        said = self.texts[min(len(self.read), len(self.texts) - 1)]
        self.read.append([request.prompt_ids for request in requests])
        ids = (*WORDS(said, add_special_tokens=False)["input_ids"], WORDS.convert_tokens_to_ids("<|im_end|>"))
        made = lambda seed: Completion(ids, (-1.0,) * len(ids), (-1.0,) * len(ids), "stop", seed)  # noqa: E731
        yield [(place, list(map(made, request.seeds))) for place, request in enumerate(requests)]


def row_of(**raw):
    return from_rows([raw], "prompt-only").rows[0]


def played(playing, row, *texts, limit=2000):
    sampler = Saying(*texts)
    rules, prompt = Episodes(playing, form=CallForm("hermes")), tuple(prompt_ids(WORDS, row))
    with playing:
        found = play(
            rules, sampler, [(0, prompt, row)], SamplingParams(64), num_generations=1, seed_of=lambda i, k: k,
            tokenizer=WORDS, version=0, max_length=limit,
        )  # fmt: skip
    return found[0], sampler


def counts(ids):
    """The numbers of features of the images in these ids."""
    found = {}
    for token in ids:
        if token >= FIRST:
            found.setdefault(images.split_id(token)[0].digest, []).append(token)
    return [len(tokens) for tokens in found.values()]


@pytest.mark.parametrize("made", [InProcess, lambda factory: EnvironmentPool(factory, timeout=60.0)])
def test_pictures_of_an_environment_stay_in_the_context(made):
    row = row_of(prompt=[{"role": "user", "content": "what?"}], images=[encoded(draw("white"))])
    found, sampler = played(made(Gallery), row, "red")
    assert found.reason == ""
    assert [counts(read[0]) for read in sampler.read] == [[2], [2, 1], [2, 1, 2], [2, 1, 2, 3]]
    assert all(later[0][: len(before[0])] == before[0] for before, later in zip(sampler.read, sampler.read[1:], strict=False))
    assert not any(own for token, own in zip(found.completion.ids, found.mask, strict=True) if token >= FIRST)
    assert "[image 8×8 " in found.text and "[image 24×8 " in found.text
    again = unpack(pack([found]))[0]
    assert (again.prompt_ids, again.completion.ids) == (found.prompt_ids, found.completion.ids)
    samples = reward_view(WORDS, plays=True)({0: row})([found])
    said = [samples.arguments["prompts"][0][0]["content"], samples.arguments["completions"][0][3]["content"]]
    assert [[part.get("text", part.get("width")) for part in parts] for parts in said] == [[16, "what?"], ["next", 16]]


def test_a_tool_answers_with_a_picture():
    row = Row("a row", [{"role": "user", "content": "look"}])
    found, sampler = played(InProcess(ToolBoxes([look])), row, CALL, "blue")
    assert [counts(read[0]) for read in sampler.read] == [[], [2]]
    assert found.messages[1]["content"].startswith("seen:\ufffc")


def test_a_cut_never_tears_a_picture_and_text_never_becomes_one():
    mark = images.register(images.Picture("ab" * 32, 8, 8, data=encoded(draw("red", (8, 8)))))
    assert [cut(f"abc{mark}d", kept) for kept in (2, 4, 68, 69)] == ["ab…", "abc…", "abc…", f"abc{mark}…"]

    class Typing(Gallery):
        def step(self, completion):
            return self.said, 0.0, False

    bad = ("gone.png", "https://example.com/a.png", encoded(draw("red", (64, 64)), "JPEG")[:-60])
    for said in (mark, "an <image>", *([{"type": "image", "image": given}] for given in bad)):
        Typing.said = said
        found, _ = played(InProcess(Typing), row_of(prompt=[{"role": "user", "content": "a"}]), "red")
        assert "the environment's" in found.reason


@pytest.fixture
def forgotten(monkeypatch):
    """A process that has read no image."""

    def forget():
        for name in ("_register", "_by_first", "_run"):
            monkeypatch.setattr(images, name, type(getattr(images, name))())

    forget()
    return forget


def test_a_resumed_run_finds_its_images_and_refuses_changed_ones(tmp_path, forgotten):
    (tmp_path / "wide.png").write_bytes(encoded(draw("green", (24, 8))))
    raw = {"prompt": [{"role": "user", "content": "a"}], "images": [{"bytes": encoded(draw("cyan"))}, str(tmp_path / "wide.png")]}
    row = row_of(**raw)
    ids = prompt_ids(WORDS, row)
    images.store_in(tmp_path / "run" / "images", digests_of(row))
    own, wide = digests_of(row)
    assert (tmp_path / "run" / "images" / f"{own}.png").read_bytes() == encoded(draw("cyan"))
    assert json.loads((tmp_path / "run/images/paths.jsonl").read_text()) == [wide, str(tmp_path / "wide.png"), 24, 8]
    later = images.register(images.Picture("cd" * 32, 8, 8, data=encoded(draw("pink"))))
    assert images.picture(later[1:-1]).path == tmp_path / "run" / "images" / f"{'cd' * 32}.png"

    shown = rollout_row(TRAJECTORY, 1, "eval", row.dataset_prompt)["prompt"]
    assert prompt_text(shown) == f"user: [image 16×8 {own[:6]}]\n[image 24×8 {wide[:6]}]\na"
    assert [one.startswith("data:image/png;base64,") for one in thumbnails(tmp_path / "run", prompt_text(shown))] == [True, True]

    forgotten()
    with pytest.raises(UserError, match="of an image that this run has not read"):
        images.split_id(max(ids))
    images.store_in(tmp_path / "run" / "images")
    assert [images.split_id(token)[1] for token in ids if token >= FIRST] == [0, 1, 0, 1, 2]
    assert images.picture(own).open().getpixel((0, 0)) == (0, 255, 255)

    pinned = lambda: sum_parts(PreparedRows([row_of(**raw)], [], [], []))  # noqa: E731
    before = pinned()
    assert pinned() == before
    (tmp_path / "wide.png").write_bytes(encoded(draw("black", (24, 8))))
    assert pinned()["dataset"] != before["dataset"]


TRAJECTORY = Trajectory(0, 0, (), Completion((), (), (), "stop", 0), 0)
