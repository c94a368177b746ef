"""Images of rows: every form in which they are given, files that are odd or broken, and where they stand in the text."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from painters import draw, encoded
from PIL import Image

from psigrad.config import Data
from psigrad.config.load import to_dict
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data import image_rows
from psigrad.language.data.sources import from_rows, load
from psigrad.language.rewards import reward_worker
from psigrad.language.rollout.scoring import Samples
from psigrad.processes.workers.shipping import pack

RED, BLUE = encoded(draw("red")), encoded(draw("blue"))
R, B = (f"\ufffc{hashlib.sha256(data).hexdigest()}\ufffc" for data in (RED, BLUE))
PART = {"type": "image"}


def say(*parts, role="user"):
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def read(form="prompt-only", **row):
    return from_rows([row], form).rows[0]


X, Y = say("x", role="assistant"), say("y", role="assistant")
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {}}]}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return tmp_path


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "given", [RED, {"bytes": RED, "path": "gone.png"}, url(RED), lambda folder: str(folder / "red.png"), lambda f: f / "red.png"]
)
def test_an_image_is_its_bytes_however_it_is_given(files, given):
    given = given(files) if callable(given) else given
    assert read(prompt=[say(PART, "what?")], images=[given]).prompt[0]["content"] == f"{R}what?"
    row = read(prompt=[say("what?", {"type": "image", "image": given}, "!")])
    assert row.prompt[0]["content"] == f"what?{R}!"
    assert row.columns == {"images": [str(given) if isinstance(given, Path) else given]}
    assert image_rows.observation_text([{"type": "image", "image": given}, "!"]) == f"{R}!"
    answered = read("messages", messages=[say("look"), CALLS, say({"type": "image", "image": given}, role="tool"), X])
    assert answered.messages[2]["content"] == R
    picture = images.picture(R[1:-1])
    assert (picture.width, picture.height, picture.read()) == (16, 8, RED)


def test_openai_parts_pillow_and_null_keys_of_arrow():
    parts = [
        {"type": "image_url", "image_url": {"url": url(RED)}, "text": None},
        {"type": "text", "text": "a", "image_url": None},
    ]
    assert read(prompt=[{"role": "user", "content": parts}]).prompt[0]["content"] == f"{R}a"
    pillow = draw("red")
    row = read(prompt="how?", image=pillow)
    assert row.prompt[66:] == "how?"
    assert images.picture(row.prompt[1:65]).open().tobytes() == pillow.tobytes()
    assert row.columns["image"] is pillow


@pytest.mark.parametrize(
    ("form", "row", "wanted"),
    [
        ("prompt-only", {"prompt": "how?", "images": [RED, BLUE]}, {"prompt": f"{R}{B}how?"}),
        ("prompt-only", {"prompt": [say("be", role="system"), say("a")], "images": [RED, BLUE]}, {"prompt": ["be", f"{R}{B}a"]}),
        ("prompt-only", {"prompt": [say("a", PART, "b", PART)], "images": [RED, BLUE]}, {"prompt": [f"a{R}b{B}"]}),
        ("messages", {"messages": [say(PART), X, say(PART, "c"), Y], "images": [RED, BLUE]},
         {"messages": [R, "x", f"{B}c", "y"]}),
        ("sft", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "image": RED},
         {"messages": [f"{R}a", "b"]}),
        ("preference", {"prompt": [say(PART, "a")], "chosen": [X], "rejected": [Y], "images": [RED]},
         {"prompt": [f"{R}a"], "completion": ["x"], "rejected": ["y"]}),
        ("preference", {"chosen": [say("a"), X], "rejected": [say("a"), Y], "images": [RED]},
         {"prompt": [f"{R}a"], "completion": ["x"], "rejected": ["y"]}),
        ("prompt-completion", {"prompt": [say("a")], "images": [RED], "completion": [CALLS, say(PART, role="tool"), X]},
         {"prompt": ["a"], "completion": ["", R, "x"]}),
    ],
)  # fmt: skip
def test_images_stand_where_the_parts_say_or_first(form, row, wanted):
    found = read(form, **row)
    for name, texts in wanted.items():
        value = getattr(found, name)
        assert (value if isinstance(value, str) else [turn.get("content", "") for turn in value]) == texts


def test_two_equal_images_are_one_and_two_different_are_two():
    row = read(prompt=[say(PART, PART, PART)], images=[RED, RED, BLUE])
    assert image_rows.digests_of(row) == [R[1:-1], R[1:-1], B[1:-1]]
    assert images.first_id(R[1:-1]) != images.first_id(B[1:-1])


def refused(row, form="prompt-only"):
    with pytest.raises(UserError) as error:
        from_rows([row], form)
    return str(error.value).replace("column '", "column ").replace("' ", " ")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": [say(PART, PART)], "images": [RED]}, "rows:1: column prompt has 2 image parts"),
        ({"prompt": [say(PART)]}, "rows:1: column prompt has 1 image part without an image, but 0 images are"),
        (
            {"prompt": "a", "images": ["https://a.b/c.png"]},
            "rows:1: column images[0] is the URL https://a.b/c.png; save the image",
        ),
        ({"prompt": "a", "image": 3}, "rows:1: column image is of type 'int'"),
        ({"prompt": "a", "images": [RED, None]}, "rows:1: column images[1] is of type 'NoneType'"),
        ({"prompt": "a", "image": "gone.png"}, "rows:1: column image is 'gone.png', and there is no file"),
        ({"prompt": "a", "image": b""}, "rows:1: column image has no bytes"),
        ({"prompt": "a", "image": b"%PDF-1.4 no image"}, "which cannot be read as an image (expected PNG, JPEG"),
        (
            {"prompt": "a", "image": encoded(draw("red", (64, 64)), "JPEG")[:-60]},
            "bytes, which cannot be read as an image (OSError",
        ),
        ({"prompt": "a", "image": "data:image/png;base64,???"}, "rows:1: column image is a data URL that is not base64"),
        (
            {"prompt": [say({"type": "audio"})]},
            "rows:1: column prompt[0].content[0] is of type 'audio'; expected text or an image",
        ),
        (
            {"prompt": [say(PART), say(PART, role="assistant")], "images": [RED, RED]},
            "column prompt[1] has an image in the assistant",
        ),
        ({"prompt": f"a{R}"}, "rows:1: column prompt has the character U+FFFC"),
        ({"prompt": [say("\ufffc", PART)], "image": RED}, "rows:1: column prompt[0].content[0].text has the character U+FFFC"),
        ({"prompt": "a", "tools": [{"name": R}]}, "rows:1: column tools[0].name has the character U+FFFC"),
    ],
)
def test_what_is_no_image_is_refused_by_row_and_column(row, said):
    assert said in refused(row)


def test_a_lone_replacement_character_in_text_is_text():
    assert read(prompt="a \ufffc b").prompt == "a \ufffc b"


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_bomb_is_refused_before_it_is_decoded():
    head = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    assert "400000000 pixels" in refused({"prompt": "a", "image": bomb}).replace(",", "")


def pixels(data):
    picture = images.picture(image_rows.digests_of(read(prompt="a", image=data))[0])
    found = picture.open()
    assert found.size == (picture.width, picture.height)  # by which its features are counted
    return found


def test_odd_files_are_upright_and_rgb():
    turned = draw("red", (16, 8))
    turned.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the top of the scene is at the right
    for form in ("PNG", "TIFF", "WEBP"):  # Pillow itself turns TIFF
        found = pixels(encoded(turned, form, exif=exif, lossless=True))
        assert found.size == (8, 16) and found.getpixel((7, 0)) == (0, 0, 255)
    assert pixels(encoded(turned, "JPEG", exif=exif)).size == (8, 16)
    for size in ((7, 30), (30, 1), (1, 1)):  # less than the eighth at which a JPEG is checked
        assert pixels(encoded(draw("white", size), "JPEG")).getpixel((0, 0)) == (255, 255, 255)
    assert pixels(encoded(draw((255, 0, 0, 0), mode="RGBA"))).getpixel((0, 0)) == (255, 255, 255)
    assert pixels(encoded(draw((10, 20, 30, 128), mode="RGBA"))).getpixel((0, 0)) == (132, 137, 142)
    palette = draw("red").quantize(2)
    assert pixels(encoded(palette)).getpixel((0, 0)) == (255, 0, 0)
    assert pixels(encoded(draw((0, 255, 255, 0), mode="CMYK"), "TIFF")).getpixel((0, 0)) == (255, 0, 0)
    deep = Image.fromarray(np.full((2, 2), 257 * 100, np.uint16))
    assert pixels(encoded(deep)).getpixel((0, 0)) == (100, 100, 100)
    assert pixels(encoded(draw(1, mode="1"))).getpixel((0, 0)) == (255, 255, 255)


def test_an_animation_is_its_first_frame_and_that_is_said():
    moving = encoded(draw("red"), "GIF", save_all=True, append_images=[draw("blue")])
    loaded = from_rows([{"prompt": "a", "image": moving}, {"prompt": "b", "image": RED}], "prompt-only")
    assert loaded.recognised == {image_rows.MOVES: 1}
    assert pixels(moving).getpixel((0, 0)) == (255, 0, 0)


def test_paths_are_relative_to_the_file_of_the_row_and_bad_rows_are_skipped(files):
    (files / "part").mkdir()
    (files / "part" / "blue.png").write_bytes(RED)
    rows = [{"prompt": "a", "image": "blue.png"}, {"prompt": "b", "image": "gone.png"}]
    for name in ("a.jsonl", "part/b.jsonl"):
        (files / name).write_text("\n".join(map(json.dumps, rows)))
    for name, mark in (("a.jsonl", B), ("part/b.jsonl", R)):
        found = load(str(files / name), form="prompt-only", bad_rows="skip")
        assert [row.prompt for row in found.rows] == [f"{mark}a"]
        assert str(found.skipped[0]).startswith(f"{name.split('/')[-1]}:2: column 'image' is 'gone.png', and there is no file")
    found = load(str(files), form="prompt-only", bad_rows="skip")
    assert [row.prompt for row in found.rows] == [f"{B}a", f"{R}a"]


def test_a_changed_file_is_refused_and_a_new_reading_has_its_new_digest(files):
    row = {"prompt": "a", "image": str(files / "red.png")}
    (files / "red.png").write_bytes(encoded(draw("green")))
    before = read(**row)
    (files / "red.png").write_bytes(BLUE)
    with pytest.raises(UserError, match="has changed since the run began"):
        images.picture(image_rows.digests_of(before)[0]).read()
    assert image_rows.digests_of(read(**row)) == [B[1:-1]]


def test_rewards_get_parts_and_images_opened_by_pillow(files):
    given = [{"bytes": RED, "path": None}, draw("red"), url(RED), {"bytes": None, "path": str(files / "red.png")}]
    row = read(prompt=[say("a")], images=[*given, files / "red.png"])
    service = reward_worker.service([("seen", pack(seen, "reward"))])
    samples = Samples([row.prompt, "a" + R], ["x"] * 2, [[]] * 2, {"images": [row.columns["images"]] * 2}).arguments
    assert list(service([([0], samples)])) == [[5.0, 0.0]]


def seen(prompts, completions, images):
    assert [part.get("text", part["type"]) for part in prompts[0][0]["content"]] == ["image"] * 5 + ["a"]
    return [float(sum(one.getpixel((0, 0)) == (255, 0, 0) for one in images[0])), float(prompts[1] != "a")]


def test_a_written_row_is_read_back(files):
    row = read(prompt=[say("a", PART, PART)], images=[RED, str(files / "blue.png")], answer="3")
    written = json.loads(json.dumps(image_rows.to_json_row({**row.columns, "prompt": row.prompt, "completion": [X]})))
    again = read("prompt-completion", **written)
    assert (again.prompt, again.columns["answer"]) == (row.prompt, "3")


def test_images_of_datasets_are_the_bytes_of_their_files(files):
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    given = [str(files / "red.png"), {"bytes": BLUE, "path": None}]
    data = datasets.Dataset.from_dict({"prompt": ["a"], "images": [given]}, features=features)
    assert from_rows(data, "prompt-only").rows[0].prompt == f"{R}{B}a"
    data.save_to_disk(str(files / "saved"))
    assert load(str(files / "saved"), form="prompt-only").rows[0].prompt == f"{R}{B}a"
    data.to_parquet(str(files / "a.parquet"))
    assert load(str(files / "a.parquet"), form="prompt-only").rows[0].prompt == f"{R}{B}a"


def test_rows_with_pillow_s_images_are_known_by_their_pixels():
    one, same, other = ([{"prompt": "a", "image": draw(colour)}] for colour in ("red", "red", "blue"))
    identify = lambda rows: to_dict(Data(rows))["dataset"]  # noqa: E731
    assert identify(one) == identify(same) != identify(other)


def test_base64_may_have_line_breaks_and_must_be_named():
    broken = "data:image/png;base64," + base64.encodebytes(RED).decode()
    assert read(prompt="a", image=broken).prompt == f"{R}a"
    assert 'column image is a data URL without ";base64"; expected "data:image/png;base64,…"' in refused(
        {"prompt": "a", "image": "data:image/png,iVBOR"}
    )
