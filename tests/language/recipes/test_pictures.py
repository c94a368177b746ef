"""Every recipe on rows with images, each of another family: killed and resumed to the same bits, and refused if an image has
changed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import vision_models
from PIL import Image, ImageDraw
from resuming import digest, dying_at
from tiny_jobs import forked, online_config, ppo_config, preference_config, reward_config, sft_config
from transformers import AutoModelForImageTextToText
from vision_models import TOWERS

import psigrad
from psigrad.errors import UserError
from psigrad.language.loading import samplers
from psigrad.language.recipes import online, preference, reward, sft

pytestmark = pytest.mark.usefixtures("rewards_here")
COUNT = 24


def digits(completions, answer, images, **_):
    """The share of an answer's characters that are digits, and a tenth for each image."""
    said = (c if isinstance(c, str) else c[0]["content"] for c in completions)
    return [sum(x.isdigit() for x in text) / max(len(text), 1) + len(own) / 10 for text, own in zip(said, images, strict=True)]


@pytest.fixture(scope="module")
def pictured(request, tmp_path_factory):
    """A tiny model and rows that ask how many squares an image has; every fourth asks of two, every fourth of none."""
    folder = tmp_path_factory.mktemp("pictured")
    vision_models.make(getattr(request, "param", "idefics3"), folder / "base", hidden=32, layers=2)
    rng, rows = random.Random(0), []
    for i in range(COUNT):
        names = [f"{i}-{k}.png" for k in range((1, 2, 1, 0)[i % 4])]
        counts = [rng.randint(1, 3) for _ in names]
        for name, count in zip(names, counts, strict=True):
            drawn = Image.new("RGB", (24, 16), "white")
            for k in range(count):
                ImageDraw.Draw(drawn).rectangle((8 * k + 1, 4, 8 * k + 6, 10), fill=(255, 10 * i, 0))
            drawn.save(folder / name)
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": "How many?"}]
        prompt, answer = [{"role": "user", "content": parts}], str(sum(counts))
        said, wrong = ([{"role": "assistant", "content": text}] for text in (answer, "x"))
        rows.append({"prompt": prompt, "images": names, "answer": answer, "completion": said, "chosen": said, "rejected": wrong})
    for name, keys in (
        ("train", ("completion", "answer")),
        ("held_out", ("completion", "answer")),
        ("pairs", ("chosen", "rejected")),
    ):
        part = rows[:8] if name == "held_out" else rows
        lines = [{key: row[key] for key in ("prompt", "images", *keys)} for row in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def adapted(made):
    """The tower learns too, and passes hold a prompt with two images and its completions."""
    kind = json.loads((Path(made.model.path) / "config.json").read_text())["model_type"]
    made = replace(made, model=replace(made.model, vision=True, trained_towers=TOWERS[kind]), micro_batch_tokens=128)
    return replace(made, run=replace(made.run, max_steps=4))


def grpo(job, output):
    return adapted(replace(online_config(job, output), num_iterations=2, reward=(digits,)))


RECIPES = {
    "sft": (sft.run, lambda *of: adapted(sft_config(*of))),
    "grpo": (online.run, grpo),
    "dpo": (preference.run, lambda *of: adapted(preference_config(*of))),
    "reward": (reward.run, lambda *of: adapted(reward_config(*of))),
    "ppo": (online.run, lambda *of: adapted(replace(ppo_config(*of), reward=(digits,)))),
}


FAMILY = {"sft": "smolvlm", "grpo": "idefics3", "dpo": "gemma3", "reward": "qwen3_5", "ppo": "qwen3_vl"}


@pytest.mark.parametrize(("name", "pictured"), FAMILY.items(), indirect=["pictured"])
def test_a_run_with_images_is_killed_and_resumed_bitwise_and_moves_the_tower(name, pictured, tmp_path):
    run, config = RECIPES[name]

    def work():
        seen: list[str] = []
        dying_at(0, seen)
        run(config(pictured, tmp_path / "whole"))
        (tmp_path / "events").write_text("\n".join(seen))

    assert forked(work) == 0
    events = (tmp_path / "events").read_text().splitlines()
    before, after = (
        AutoModelForImageTextToText.from_pretrained(place).state_dict()
        for place in (pictured / "base", tmp_path / "whole" / "model")
    )
    moved = {key for key in before if not before[key].equal(after[key])}
    assert all(any(f".{tower}." in key for key in moved) for tower in TOWERS[FAMILY[name]])

    _kill(lambda: run(config(pictured, tmp_path / "killed")), 2 * len(events) // 3)
    assert list((tmp_path / "killed" / "checkpoints").iterdir())
    assert forked(lambda: run(config(pictured, tmp_path / "killed"))) == 0
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


def _kill(run, event):
    def doomed():
        dying_at(event)
        run()

    status = forked(doomed)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_a_frozen_tower_keeps_its_bits(pictured, tmp_path):
    made = replace(grpo(pictured, tmp_path / "run"), model=replace(grpo(pictured, tmp_path).model, trained_towers=()))
    online.run(made)
    before, after = (
        AutoModelForImageTextToText.from_pretrained(place).state_dict()
        for place in (pictured / "base", tmp_path / "run" / "model")
    )
    moved = {key for key in before if not before[key].equal(after[key])}
    assert moved and not any(".vision_model." in key or ".connector." in key for key in moved)


def test_a_resume_is_refused_where_an_image_has_changed(pictured, tmp_path):
    _kill(lambda: online.run(grpo(pictured, tmp_path / "run")), 110)
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    file, held = pictured / "0-0.png", (pictured / "0-0.png").read_bytes()
    Image.new("RGB", (24, 16), "blue").save(file)
    try:
        with pytest.raises(UserError, match="other rows or images in dataset"):
            online.run(grpo(pictured, tmp_path / "run"))
    finally:
        file.write_bytes(held)


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("grpo", {"model.vision": True, "sampler": "vllm"}, "model.vision loads a vision tower, but sampling.sampler=vllm reads"),
        ("dpo", {"trained_towers": ["connector"], "sampler": "transformers"}, "set sampler to embedded"),
        ("sft", {"model.vision": True, "strategy": "fsdp", "cp_size": 2}, "placement.cp_size=2 can split only rows of text; set"),
        ("reward", {"model.vision": True, "strategy": "fsdp", "cp_size": 2}, "set cp_size to 1"),
        ("grpo", {"model.vision": True, "cluster": "auto"}, "placement.cluster samples on machines that get no images"),
        ("distill", {"model.vision": True, "reference": "http://localhost:1/v1"}, "give a folder as reference"),
    ],
)
def test_settings_that_read_text_alone_are_refused_before_anything_is_loaded(method, settings, said, tmp_path):
    scored = {"reward": digits} if method == "grpo" else {}
    with pytest.raises(UserError, match=said):
        psigrad.train(
            method, model=tmp_path / "none", dataset=[{"prompt": "a"}], output_dir=tmp_path / "run", **scored, **settings
        )
    assert list(tmp_path.iterdir()) == []


def test_rows_with_images_are_refused_before_the_first_sampling_and_rows_of_text_are_not(pictured, tmp_path, monkeypatch):
    made = grpo(pictured, tmp_path / "run")
    made = replace(made, model=replace(made.model, vision=False, trained_towers=()))
    made = replace(made, sampling=replace(made.sampling, sampler="transformers"), run=replace(made.run, max_steps=1))
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "How many?", "answer": "1"}\n' * 8)
    online.run(replace(made, reward=("exact",), data=replace(made.data, dataset=str(text), eval_dataset=str(text))))
    monkeypatch.setattr(samplers, "make", None)
    with pytest.raises(UserError, match=r"train.jsonl:1 has an image, but sampling.sampler=transformers reads only text"):
        online.run(replace(made, run=replace(made.run, output_dir=str(tmp_path / "other"))))
    with pytest.raises(UserError, match=r"train.jsonl:1 has an image"):
        psigrad.evaluate(model=pictured / "base", dataset=pictured / "train.jsonl", split="train", reward=digits,
                         sampler="transformers")  # fmt: skip


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
@pytest.mark.parametrize("pictured", ["qwen3_vl"], indirect=True)
def test_an_image_processor_of_another_model_is_refused_though_no_step_would_read_an_image(pictured, tmp_path, recipe):
    base = shutil.copytree(pictured / "base", tmp_path / "base")
    file = base / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"merge_size": 1}))
    lines = (pictured / "train.jsonl").read_text().splitlines()
    texts = [line for line in lines if not json.loads(line)["images"]]
    run, config = RECIPES[recipe]

    def train(name, lines):
        (pictured / f"{name}.jsonl").write_text("\n".join(lines))
        made = config(pictured, tmp_path / name)
        data = replace(made.data, dataset=str(pictured / f"{name}.jsonl"), eval_dataset=str(pictured / "texts.jsonl"))
        run(replace(made, model=replace(made.model, path=str(base)), data=data, run=replace(made.run, max_steps=1)))

    train("texts", texts)
    with pytest.raises(UserError, match=r"tower gives \d+ features for 1 images, but the prompts have \d+ image tokens"):
        train("last", [*texts * 20, lines[0]])
    assert not (tmp_path / "last" / "metrics.jsonl").read_text()


def test_a_resume_downloads_images_again_and_refuses_other_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIGRAD_CACHE", str(tmp_path / "cache"))
    site, cache = tmp_path / "site", tmp_path / "cache" / "images"
    vision_models.make("idefics3", tmp_path / "base", hidden=32, layers=2)
    site.mkdir()
    for i in range(3):
        Image.new("RGB", (24, 16), (80 * i, 0, 0)).save(site / f"{i}.png")
    served = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site)))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    said = [{"role": "assistant", "content": "1"}]
    urls = [f"http://127.0.0.1:{served.server_port}/{i % 3}.png" for i in range(12)]
    rows = [json.dumps({"prompt": prompt, "images": [url], "completion": said}) for url in urls]
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

    def train(steps):
        made = sft_config(tmp_path, tmp_path / "run", max_steps=steps, extend=True)
        sft.run(replace(made, data=replace(made.data, image_urls=True)))
        assert len(list(cache.iterdir())) == 3
        shutil.rmtree(cache)

    train(2)
    train(4)
    Image.new("RGB", (24, 16), "green").save(site / "0.png")
    with pytest.raises(UserError, match="other rows or images in dataset"):
        train(6)
    served.shutdown()
    served.server_close()
