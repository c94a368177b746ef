"""Images by Python and in the commands around a run: objects train as their folder does, and rows keep their images."""

from __future__ import annotations

import json

import pytest
import vision_models
from painters import draw, encoded
from transformers import AutoModelForImageTextToText, AutoTokenizer

import psigrad
from psigrad.language.data.image_rows import to_agent_row
from psigrad.language.data.sources import from_rows
from psigrad.language.models.tokenizer_files import read_tokenizer

pytestmark = pytest.mark.usefixtures("rewards_here")


def digits(completions, images, **_):
    """The share of digits, and the mean red of the row's images."""
    said = (c if isinstance(c, str) else c[0]["content"] for c in completions)
    red = lambda one: (one if hasattr(one, "getpixel") else draw()).getpixel((0, 0))[0] / 255  # noqa: E731
    return [sum(x.isdigit() for x in text) / 5 + sum(map(red, own)) for text, own in zip(said, images, strict=True)]


def rows(colour=(200, 0, 0)):
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    return [{"prompt": asked, "images": [draw((i, *colour[1:]), (24, 16))], "answer": str(i)} for i in (50, 100, 150, 200)]


@pytest.fixture(scope="module", params=["idefics3", "qwen3_5"])
def base(request, tmp_path_factory):
    return vision_models.make(request.param, tmp_path_factory.mktemp("base") / request.param, hidden=32, layers=2)


def test_a_model_and_its_processor_train_as_their_folder_does(base, tmp_path):
    def trained(name, own, dataset, **more):
        settings = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 6, "eval_prompts": 0}
        settings |= {"threads": 1, "progress": False, "learning_rate": 1e-2, "output_dir": tmp_path / name}
        made = psigrad.train("grpo", model=own, dataset=dataset, reward=digits, **settings, **more)
        said: dict[str, object] = {}
        exec((made.model / "README.md").read_text().partition("```python")[2].partition("```")[0], said)
        assert type(said["model"]) is type(made.load()) is type(network())
        return said["model"].state_dict()

    network = lambda: AutoModelForImageTextToText.from_pretrained(base)  # noqa: E731
    processor = vision_models.processor_of(base.name, read_tokenizer(base))
    by_name = trained("name", base, rows(), **{"model.vision": True})
    by_processor = trained("processor", network(), rows(), processing_class=processor)
    bare = trained("bare", network(), rows(), tokenizer=AutoTokenizer.from_pretrained(base))
    other = trained("other", network(), rows((200, 90, 0)))
    assert all(by_name[key].equal(by_processor[key]) and by_name[key].equal(bare[key]) for key in by_name)
    assert any(not by_name[key].equal(other[key]) for key in by_name), "negative control: other pictures"
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["model"]["vision"] is (base.name == "qwen3_5")


@pytest.mark.parametrize("base", ["idefics3"], indirect=True)
def test_eval_reads_the_images_of_rows(base, tmp_path):
    kept = [{**row, "images": [{"bytes": encoded(row["images"][0])}]} for row in rows()]
    more = {"reward": digits, "num_generations": 2, "max_completion_length": 4, "threads": 1}
    figures = psigrad.evaluate(model=base, dataset=kept, output=tmp_path / "eval.json", **more)
    mean = sum((50, 100, 150, 200)) / 255 / 4
    assert mean <= figures["eval/digits/mean"] <= mean + 0.8


def test_an_agent_s_program_gets_json_that_it_can_send():
    row = from_rows(rows(), "prompt-only").rows[0]
    sent = json.loads(json.dumps(to_agent_row(row, as_json=True)))
    url = sent["prompt"][0]["content"][0]["image_url"]["url"]
    assert url.startswith("data:image/png;base64,") and sent["images"] == [url]
    again = from_rows([{"prompt": sent["prompt"]}], "prompt-only").rows[0]
    assert again.prompt == row.prompt
