"""The experiment with a pretrained model, on a tiny one that has seen a few sums."""

from __future__ import annotations

import json

import pytest

import psigrad
from psigrad import cli
from psigrad.errors import UserError
from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny
from psigrad_extras import sums
from studies import trials
from studies.claims import pretrained
from studies.settings import PretrainedSettings

QUICK = ["--steps", "2", "--prompts", "8", "--generations", "8", "--held-out", "6", "--completions", "2", "--processes", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny chat model that answers "What is 1 + 2?" with a sum, right or wrong."""
    folder = tmp_path_factory.mktemp("pretrained")
    train, _ = sums.prepare(folder)
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    tokenizer = tiny.tokenizer([f"{row['prompt'][0]['content']} {row['sum']}" for row in rows], 300)
    tokenizer.chat_template = CHATML
    tiny.model("llama", len(tokenizer), hidden=48, layers=2, heads=2, seed=0).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    said = [{"prompt": r["prompt"], "completion": [{"role": "assistant", "content": r["answer"]}]} for r in rows[:640]]
    settings = {"learning_rate": 5e-3, "batch_size": 32, "max_steps": 40, "eval_prompts": 0, "progress": False, "report": False}
    return str(psigrad.train("sft", model=folder / "base", dataset=said, output_dir=str(folder / "run"), **settings).model)


@pytest.mark.long
def test_the_quick_form_trains_measures_and_is_resumed(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["experiment", "pretrained", *QUICK, "--model", model, "--dtype", "float32", "--out", str(tmp_path)]
    assert cli.main(asked) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "pretrained.json").read_text())
    assert (tmp_path / "pretrained.png").read_bytes().startswith(b"\x89PNG") and "…" not in printed
    assert [one["name"] for one in found["outcomes"]] == ["start", "RLVR", "SFT", "DPO", "distillation"]
    assert [one["samples"] for one in found["outcomes"]] == [0, 128, 0, 128, 16]
    assert all(one["kl"][0] > 0 for one in found["outcomes"][1:]) and found["outcomes"][0]["kl"][0] == pytest.approx(0, abs=1e-5)
    assert len(found["findings"]) == 6 and all(f["claim"] in " ".join(printed.split()) for f in found["findings"])
    monkeypatch.setattr(trials.ProcessPoolExecutor, "submit", None)
    monkeypatch.setattr(pretrained.evaluate, "sample_and_score", None)
    assert cli.main(asked) == 0, "nothing is run or measured again"
    assert capsys.readouterr().out.split("A pretrained")[1] == printed.split("A pretrained")[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"steps": 0}, "steps is 0"), ({"generations": 1}, "at least 2"), ({"held_out": 201}, "expected at most 200")],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        pretrained.check(PretrainedSettings(**settings))
