"""Images that rows name by URL, from a server of this machine: downloaded once if the setting allows it, and refused by row."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from painters import draw, encoded

from psigrad.config import Data
from psigrad.errors import UserError
from psigrad.language import images
from psigrad.language.data import image_rows, image_urls
from psigrad.language.data.sources import from_rows, read_rows

FILES = {
    "/red.png": encoded(draw("red")),
    "/blue": encoded(draw("blue"), "JPEG"),
    "/page": b"<html>",
    "/cut": encoded(draw("red"))[:-30],
}
TURNS = [{"role": "assistant", "content": "2"}]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The address of a server and a count of the requests for each path. `/late.png` answers only the second request."""
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked[self.path] += 1
            late = self.path == "/late.png" and asked[self.path] == 1
            body = FILES.get("/red.png" if self.path == "/late.png" else self.path)
            self.send_response(503 if late else 404 if body is None else 200)
            self.end_headers()
            self.wfile.write(b"" if late or body is None else body)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("PSIGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(image_urls, "_WAITS", (0.0, 0.0))
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}", asked
    served.shutdown()
    served.server_close()


def colours(rows, form="prompt-only", **how):
    """The colour of each image of each row, by its first pixel."""
    loaded = from_rows(rows, form, urls=True, **how)
    return [[images.picture(one).open().getpixel((0, 0)) for one in image_rows.digests_of(row)] for row in loaded.rows]


def test_a_url_is_downloaded_once_wherever_a_row_may_have_an_image(server):
    at, asked = server
    red, blue = (255, 0, 0), (0, 0, 254)
    part = {"type": "image_url", "image_url": {"url": f"{at}/red.png"}}
    rows = [
        {"prompt": "a", "images": [f"{at}/red.png", f"{at}/blue"]},
        {"prompt": "a", "image": f"{at}/blue"},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": f"see {at}/page"}]}]},
        {"prompt": f"text with {at}/page"},
    ]
    assert colours(rows) == [[red, blue], [blue], [red], []]
    assert colours([{"prompt": "a", "photo": f"{at}/red.png"}], columns={"photo": "image"}) == [[red]]
    talk = [{"from": "human", "value": [{"type": "image", "url": f"{at}/red.png"}]}, {"from": "gpt", "value": "2"}]
    assert colours([{"conversations": talk}], "sft") == [[red]]
    assert asked == {"/red.png": 1, "/blue": 1}


def test_rewards_get_the_downloaded_file(server):
    at, _ = server
    row = from_rows([{"prompt": "a", "images": [f"{at}/red.png"]}], "prompt-only", urls=True).rows[0]
    assert Path(row.columns["images"][0]).read_bytes() == FILES["/red.png"]


def test_a_server_that_is_late_is_asked_again_and_one_that_refuses_is_not(server):
    at, asked = server
    rows = [{"prompt": "a", "image": f"{at}/late.png"}, {"prompt": "b", "image": f"{at}/gone.png"}]
    found = from_rows(rows, "prompt-only", bad_rows="skip", urls=True)
    assert [row.prompt[66:] for row in found.rows] == ["a"]
    assert str(found.skipped[0]) == f"rows:2: column 'image' is the URL {at}/gone.png, which the server refuses with status 404"
    assert asked == {"/late.png": 2, "/gone.png": 1}


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/page", "gives no image: the answer is 6 bytes, which cannot be read as an image (expected PNG, JPEG"),
        ("/cut", "which cannot be read as an image (OSError"),
        ("/gone", "404"),
    ],
)
def test_what_is_no_image_is_named_by_row_and_column_and_not_kept(server, tmp_path, path, why):
    at, _ = server
    rows = [{"prompt": "a", "image": f"{at}/red.png"}, {"prompt": "a", "images": [f"{at}/red.png", f"{at}{path}"]}]
    with pytest.raises(UserError) as error:
        from_rows(rows, "prompt-only", urls=True)
    assert f"rows:2: column 'images[1]' is the URL {at}{path}, which " in str(error.value) and why in str(error.value)
    assert len(list((tmp_path / "cache" / "images").iterdir())) == 1


def test_without_any_download_the_first_rows_end_the_reading(server):
    at, asked = server
    with pytest.raises(UserError, match="None of 256 images could be downloaded"):
        from_rows(({"prompt": "a", "image": f"{at}/gone/{i}"} for i in range(1000)), "prompt-only", urls=True)
    assert len(asked) == 256


def test_the_setting_is_off_by_default_and_reaches_the_rows(server):
    at, asked = server
    rows = [{"prompt": "a", "image": f"{at}/red.png"}]
    with pytest.raises(UserError, match=r"save the image and give its path .*data\.image_urls"):
        read_rows(Data(rows), "prompt-only", 0, seed=0)
    assert not asked
    assert len(read_rows(Data(rows, image_urls=True), "prompt-only", 0, seed=0)[0]) == 1
