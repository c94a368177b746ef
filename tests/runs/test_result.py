"""Results as objects, and how a notebook shows a run while it goes on and afterwards."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace

import nbclient
import nbformat
import pandas
import pytest
import torch
from tiny_jobs import online_config, reward_config
from transformers import AutoModelForCausalLM

from psigrad.config import Model
from psigrad.errors import UserError
from psigrad.language.recipes import online, reward
from psigrad.runs.result import MetricsHistory, Result


@pytest.fixture(scope="module")
def result(job, tmp_path_factory) -> Result:
    return online.run(online_config(job, tmp_path_factory.mktemp("run") / "a<b", report=True))


def test_the_figures_are_those_of_the_files(result):
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert result.history == lines and pandas.DataFrame(result.history).shape[0] == len(lines)
    assert result.metrics["step"] == 6 and result.metrics["reward"] == [r["reward"] for r in lines if "reward" in r][-1]
    assert result.metrics["eval/early_letters/mean"] == result.after["eval/early_letters/mean"]
    table = result.history.to_pandas()
    assert list(table.index) == list(range(7)) and table["reward"].count() == 6 and table["eval/kl"].count() == 3
    assert result.history.series("eval/kl")[0] == [0, 3, 6]
    assert MetricsHistory().to_pandas().empty


def test_the_model_and_the_tokenizer_are_loaded_by_transformers(result, job, tmp_path):
    ids = torch.tensor([result.tokenizer()("say a:").input_ids])
    assert torch.equal(result.load()(ids).logits, AutoModelForCausalLM.from_pretrained(result.model)(ids).logits)
    config = online_config(job, tmp_path / "adapter")
    config = replace(config, model=Model(path=config.model.path, lora_rank=2, lora_save="adapter"))
    adapted = online.run(config).load()
    assert any("lora" in name for name, _ in adapted.named_parameters())
    judge = reward.run(reward_config(job, tmp_path / "reward"))
    assert type(judge.load(dtype=torch.bfloat16)).__name__ == "Qwen3ForSequenceClassification"
    with pytest.raises(UserError, match="is not a language model; load a control agent"):
        Result(tmp_path, tmp_path, None).load()


def test_a_notebook_shows_the_figures_with_their_intervals_and_escapes_names(result):
    page = result._repr_html_()
    after = result.after["eval/early_letters/mean"]
    low, high = result.after["eval/early_letters/low"], result.after["eval/early_letters/high"]
    assert f"→ {after:.3g} [{low:.3g}, {high:.3g}]" in page and "a&lt;b" in page and "a<b" not in page
    assert "<td>early_letters/mean</td>" in page and "report.html" in page
    assert "the last 10 of" in MetricsHistory([{"step": i, "x": 0.5} for i in range(30)])._repr_html_()
    assert "<b>" in replace(result, before={}, after={})._repr_html_()


@pytest.mark.slow
def test_a_run_in_a_notebook_has_a_bar_below_its_cell_and_a_table_at_the_end(job, tmp_path):
    """Without a kernel: test_a_notebook_shows_the_figures_with_their_intervals_and_escapes_names."""
    code = f"""
        import psigrad
        result = psigrad.train("sft", model={str(job / "base")!r}, dataset={str(job / "train.jsonl")!r}, max_steps=3, threads=1,
                               eval_prompts=4, report=False, output_dir={str(tmp_path / "run")!r})
        result
    """
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(code).strip())])
    nbclient.NotebookClient(book, timeout=240, kernel_name="python3").execute()
    outputs = book.cells[0].outputs
    bars = [o for o in outputs if o.output_type == "display_data"]
    assert len(bars) == 1 and '<progress value="3" max="3"' in bars[0].data["text/html"]
    assert bars[0].data["text/plain"].startswith("SFT 3/3  loss ")
    shown = [o for o in outputs if o.output_type == "execute_result"]
    assert "held-out loss" in shown[0].data["text/html"] and shown[0].data["text/plain"].startswith("Result(")
    assert not [o for o in outputs if o.output_type == "stream" and "3/3" in o.text]
