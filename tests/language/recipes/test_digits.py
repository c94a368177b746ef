"""Handwritten digits from random weights: teachers of whom half err, then GRPO, which leaves them behind.

digits.png has 100 of each digit of scikit-learn's `load_digits`, those of k in row k: 8 × 8 pixels, by E. Alpaydin and C. Kaynak
(Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, doi:10.24432/C50P49, CC BY 4.0), in 16 of 17 greys.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from PIL import Image

import psigrad
from psigrad.language.models import tiny

pytestmark = pytest.mark.usefixtures("rewards_here")
SHEET = Path(__file__).parents[2] / "support" / "digits.png"
TOWERS = ("vision_model", "connector")
ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]


def rows(columns):
    """The digits of some columns of the sheet."""
    sheet = Image.open(SHEET).convert("L")
    boxes = [(digit, (8 * x, 8 * digit, 8 * x + 8, 8 * digit + 8)) for x in columns for digit in range(10)]
    return [row(digit, str(digit)) | {"images": [sheet.crop(box)]} for digit, box in boxes]


def row(digit, said):
    return {"prompt": ASKED, "completion": [{"role": "assistant", "content": said}], "answer": str(digit)}


@pytest.mark.slow
def test_a_model_learns_to_read_digits_and_surpasses_its_teachers(tmp_path):
    """The optimum is 1 and chance is 0.1; beside another digit's picture the answers are worth no more than that.

    That a tower moves: test_pictures.py; that its numbers are right: language/models/test_vision.py.
    """
    known, held_out, coin = rows(range(80)), rows(range(80, 100)), random.Random(0)
    shown = [one | row(one["answer"], str(coin.randrange(10))) if coin.random() < 0.5 else one for one in known]
    tiny.save_vision_model(["? 0123456789"], tmp_path / "base", pixels=8, patch=4, layers=1)
    more = {"threads": 1, "progress": False, "report": False, "adam_beta2": 0.99, "trained_towers": TOWERS}
    more |= {"eval_dataset": held_out, "eval_prompts": len(held_out), "max_completion_length": 2}
    sft = psigrad.train(
        "sft", model=tmp_path / "base", dataset=shown, metric="exact", learning_rate=4e-3, batch_size=64, max_steps=150,
        output_dir=tmp_path / "sft", **more,
    )  # fmt: skip
    grpo = psigrad.train(
        {"preset": "grpo", "kl": None}, model=sft.model, dataset=known, reward="exact", learning_rate=2e-3, max_steps=60,
        prompts_per_step=32, num_generations=8, output_dir=tmp_path / "grpo", **more,
    )  # fmt: skip
    after = {run: found.after["eval/exact/mean"] for run, found in (("sft", sft), ("grpo", grpo))}
    others = [one | {"images": other["images"]} for one, other in zip(held_out, held_out[1:] + held_out[:1], strict=True)]
    blind = psigrad.evaluate(model=grpo.model, dataset=others, reward="exact", max_completion_length=2, threads=1)
    assert 0.3 < after["sft"] < 0.6 < 0.7 < after["grpo"]
    assert blind["eval/exact/mean"] < 0.2, "negative control"
