"""Every command that takes a model takes the folder of a run."""

from __future__ import annotations

from dataclasses import replace

from tiny_jobs import sft_config

from psigrad import cli
from psigrad.language.recipes import sft
from psigrad_serve.engine.served_model import opened_engine


def test_every_command_takes_a_run(job, tmp_path, monkeypatch, capsys):
    """And one whose model is an adapter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = sft_config(job, tmp_path / "run", max_steps=2)
    assert (sft.run(replace(made, model=replace(made.model, lora_rank=2))).model / "adapter_config.json").exists()
    rows = ["--dataset", str(job / "held_out.jsonl")]
    for command in (
        ["eval", "--model", "run", *rows, "--reward", "exact", "--max-completion-length", "2"],
        ["sample", "--model", "run", *rows, "--output", "drawn.jsonl", "--max-completion-length", "2"],
        ["plan", "sft", "--model", "run", *rows],
        ["score", "--reward", "length", "--tokenizer", "run", *rows],
        ["export", "run", "--to", "merged"],
        ["sft", "--model", "run", *rows, "--max-steps", "1", "--eval-prompts", "0", "--output-dir", "second", "--no-report"],
    ):
        assert cli.main(command) == 0, (command, capsys.readouterr().err)
    assert f"model: {tmp_path / 'run' / 'model'} " in capsys.readouterr().out
    with opened_engine("run") as engine:
        assert engine.model.tokenizer("a").input_ids
