"""Requests with images: the APIs read the same tokens, refuse what they do not read, and show no client the images of another."""

from __future__ import annotations

import base64
import copy
import gc
import io

import anthropic
import httpx2
import openai
import pytest
import torch
import vision_models
from painters import draw, encoded

from psigrad.language import images
from psigrad.language.data.sources import from_rows
from psigrad.language.data.templates import prompt_ids
from psigrad_serve import pictures, terminal_chat
from psigrad_serve.engine.served_model import opened_engine
from psigrad_serve.served import Served
from psigrad_serve.serving import running

RED, BLUE = encoded(draw("red", (40, 24))), encoded(draw("blue", (20, 12)))


of_one = pytest.mark.parametrize("behind", ["idefics3"], indirect=True)


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module", params=["idefics3", pytest.param("gemma3", marks=pytest.mark.slow), "qwen3_5"])
def behind(request, tmp_path_factory):
    folder = vision_models.make(request.param, tmp_path_factory.mktemp("seen") / "base", hidden=32, layers=2)
    with opened_engine(str(folder), threads=1, max_batch=4, vision=True) as engine:
        for name, weight in engine.model.network.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # zeros at the start
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
        served = Served(engine, ("eyes",))
        with running(served) as at:
            yield served, at


@pytest.fixture
def client(behind):
    _, at = behind
    with openai.OpenAI(base_url=f"{at.url}/v1", api_key=at.token, max_retries=0) as made:
        yield made


def chat_parts(*of):
    return [
        {"type": "text", "text": x} if isinstance(x, str) else {"type": "image_url", "image_url": {"url": url(x)}} for x in of
    ]


def test_the_three_apis_read_an_image_as_a_row_and_sample_its_tokens(behind, client):
    served, at = behind
    talk = [{"role": "user", "content": chat_parts("how many?", RED, BLUE, "say it")}]
    ask = {"model": "eyes", "seed": 7, "max_tokens": 6, "extra_body": {"return_token_ids": True}}
    first = client.chat.completions.create(messages=talk, **ask)
    row = from_rows([{"prompt": talk}], "prompt-only").rows[0]
    ids, image_format = prompt_ids(served.tokenizer, row), served.pictures.image_format
    assert sum(token >= images.FIRST for token in ids) == sum(image_format.count(images.picture(d)) for d in digests(row)) > 0
    assert first.prompt_token_ids == images.replace_image_ids(ids, image_format.token_id)
    assert first.usage.prompt_tokens == len(ids)
    want = served.engine.submit(ids, served.call({}, row, tuple(ids), {"max_tokens": 6}).params, 7).result()
    assert tuple(first.choices[0].token_ids) == want.ids
    other = [{"role": "user", "content": chat_parts("how many?", BLUE, RED, "say it")}]
    assert client.chat.completions.create(messages=other, **ask).usage == first.usage
    assert logps(client, talk) != logps(client, other), "negative control: the same images in another order"

    parts = [{"type": "input_image", "image_url": p["image_url"]["url"]} if "image_url" in p else
             {"type": "input_text", "text": p["text"]} for p in talk[0]["content"]]  # fmt: skip
    made = client.responses.create(model="eyes", input=[{"role": "user", "content": parts}], max_output_tokens=6)
    assert made.usage.input_tokens == len(ids)
    follow = client.responses.create(model="eyes", input="and now?", previous_response_id=made.id, max_output_tokens=2)
    assert follow.usage.input_tokens > made.usage.total_tokens
    blocks = [{"type": "text", "text": p["text"]} if "text" in p else block(p["image_url"]["url"]) for p in talk[0]["content"]]
    with anthropic.Anthropic(base_url=at.url, api_key=at.token, max_retries=0) as their:
        asked = {"model": "eyes", "messages": [{"role": "user", "content": blocks}]}
        assert their.messages.create(**asked, max_tokens=6).usage.input_tokens == len(ids)
        assert their.messages.count_tokens(**asked).input_tokens == len(ids)


def digests(row):
    return images.MARK.findall(row.prompt[0]["content"])


def block(data_url):
    head, _, data = data_url.partition(",")
    return {"type": "image", "source": {"type": "base64", "media_type": head[5:].split(";")[0], "data": data}}


def logps(client, talk):
    choice = client.chat.completions.create(model="eyes", messages=talk, seed=7, max_tokens=6, logprobs=True).choices[0]
    return [one.logprob for one in choice.logprobs.content]


def test_a_tool_answers_with_an_image(behind, client):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"role": "tool", "tool_call_id": "a", "content": chat_parts("seen", RED)}
    shown = client.chat.completions.create(model="eyes", messages=[*said, tool], max_tokens=2)
    without = client.chat.completions.create(model="eyes", messages=[*said, tool | {"content": "seen"}], max_tokens=2)
    assert shown.usage.prompt_tokens > without.usage.prompt_tokens
    _, at = behind
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}, block(url(RED))]}
    turns = [("user", "look"), ("assistant", [use]), ("user", [result])]
    with anthropic.Anthropic(base_url=at.url, api_key=at.token, max_retries=0) as their:
        messages = [{"role": role, "content": content} for role, content in turns]
        assert (
            their.messages.create(model="eyes", max_tokens=2, messages=messages).usage.input_tokens == shown.usage.prompt_tokens
        )


BOMB = b"\x89PNG\r\n\x1a\n" + bytes.fromhex("0000000d49484452000186a0000186a00802000000") + bytes(64)
HTTP = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
FILE = {"type": "image_url", "image_url": {"url": "/etc/hostname"}}


@of_one
@pytest.mark.parametrize(
    ("parts", "words", "code"),
    [
        ([HTTP], "this server downloads nothing; send a data URL", "invalid_image_url"),
        ([FILE], "the URL /etc/hostname, and this server downloads nothing", "invalid_image_url"),
        ([{"type": "image", "path": "/etc/hostname"}], "downloads nothing", "invalid_image_url"),
        ([{"type": "image_url"}], "an image with no URL", "invalid_image_url"),
        (chat_parts(RED[:60]), "cannot be read as an image", "invalid_image"),
        (chat_parts(BOMB), "cannot be read as an image", "invalid_image"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}], "not base64", "invalid_image"),
        (chat_parts(*[RED] * 600), "more tokens than this model's", "context_length_exceeded"),
        ([{"type": "text", "text": f"\ufffc{'ab' * 32}\ufffc"}], "U+FFFC", None),
        (chat_parts(RED, "a <image> <start_of_image> <|image_pad|>"), "messages has the text '<image>', which marks", None),
    ],
)  # fmt: skip
def test_what_is_no_image_within_bounds_is_the_client_s_400(behind, client, parts, words, code):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="eyes", messages=[{"role": "user", "content": parts}], max_tokens=2)
    assert words in caught.value.message and caught.value.code == code
    assert (caught.value.param or "").startswith("messages")


@of_one
def test_refusals_are_in_the_endpoint_s_own_form_and_place(behind, monkeypatch):
    served, at = behind
    head = {"x-api-key": at.token, "authorization": f"Bearer {at.token}"}

    def refused(path, body):
        answer = httpx2.post(f"{at.url}/v1/{path}", json={"model": "eyes", **body}, headers=head)
        assert answer.status_code == 400
        return answer.json()["error"]

    of = lambda source: {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}  # noqa: E731
    said = refused("messages", of({"type": "url", "url": "https://example.com/a.png"}))
    assert said["type"] == "invalid_request_error" and "messages[0].content[0].source is an image with the URL" in said["message"]
    assert "'base64'" in refused("messages", of({"type": "file", "file_id": "f"}))["message"]
    given = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url(b"x")}]}]
    assert refused("responses", {"input": given})["param"] == "input[0].content[1]"
    given[0]["content"][1] = {"type": "input_image", "file_id": "f"}
    assert "by its file_id" in refused("responses", {"input": given})["message"]
    assert "U+FFFC" in refused("completions", {"prompt": f"\ufffc{'ab' * 32}\ufffc"})["message"]
    mine = {"messages": [{"role": "user", "content": chat_parts(RED)}]}
    assert (
        "turn"
        in refused("chat/completions", {"messages": [*mine["messages"], {"role": "assistant", "content": chat_parts(RED)}]})[
            "message"
        ]
    )
    monkeypatch.setattr(pictures, "MOST_PIXELS", 1000)
    assert (
        "1,000 pixels"
        in refused("chat/completions", {"messages": [{"role": "user", "content": chat_parts(RED, BLUE)}]})["message"]
    )
    monkeypatch.setattr(served.pictures, "image_format", None)
    assert "reads only text; remove it" in refused("chat/completions", mine)["message"]


@of_one
def test_images_that_no_request_has_are_dropped_beyond_their_bytes(client, monkeypatch):
    drawn = [encoded(draw((i, 1, 2), (9, 9))) for i in range(4)]
    names = [images.register(vision_models.known(one, 9, 9))[1:-1] for one in drawn]
    for name in names:
        images.unregister(name)
    monkeypatch.setattr(pictures, "KEPT_BYTES", 2 * len(drawn[0]) + 10)
    for one in drawn:
        client.chat.completions.create(model="eyes", messages=[{"role": "user", "content": chat_parts(one)}], max_tokens=1)
        gc.collect()
    assert not images.is_registered(names[0]) and images.is_registered(names[-1])
    again = client.chat.completions.create(
        model="eyes", messages=[{"role": "user", "content": chat_parts(drawn[0])}], max_tokens=1
    )
    assert again.usage.completion_tokens == 1


@of_one
def test_an_image_is_kept_from_its_mark_on(behind, monkeypatch):
    """Two requests are read at once: the one that is held first drops nothing of the other."""
    served, _ = behind
    monkeypatch.setattr(pictures, "KEPT_BYTES", 0)
    one, two = ([{"role": "user", "content": chat_parts(encoded(draw((i, 3, 4), (9, 9))))}] for i in (1, 2))
    _, held = served.pictures.marked(one, {})
    served.conversation(two, None)
    (digest,) = held.digests
    assert images.is_registered(digest)
    row, _ = served.conversation(one, None)
    del held
    served.conversation(two, None)
    assert images.is_registered(digest), "the row keeps it"
    del row
    gc.collect()
    served.conversation(two, None)
    assert not images.is_registered(digest)


@of_one
def test_a_chat_on_the_terminal_shows_an_image(behind, tmp_path):
    served, _ = behind
    (tmp_path / "a.png").write_bytes(RED)
    said: list[str] = []
    seen: list[int] = []
    engine = copy.copy(served.engine)
    engine.submit = lambda ids, *more: seen.append(sum(t >= images.FIRST for t in ids)) or served.engine.submit(ids, *more)
    lines = f"/image {tmp_path}/no.png\n/image {tmp_path}/a.png\nwhat?\nand?\n\n"
    terminal_chat.talk(engine, io.StringIO(lines), said.append, max_tokens=2)
    assert "there is no file" in "".join(said) and seen[0] == seen[1] > 0
