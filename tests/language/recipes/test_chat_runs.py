"""Runs on chat templates that rewrite the past, end turns otherwise, or leave something out: trained, told or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_jobs import online_config
from tiny_rewards import Again, lengths, opened, tagged
from transformers import AutoModelForCausalLM, AutoTokenizer

from psigrad.config import Data, Evaluation, Model, Run, Sampling, SFTConfig
from psigrad.errors import UserError
from psigrad.language.data.chat import rendering
from psigrad.language.models import tiny
from psigrad.language.recipes import online, sft


def model(folder: Path, template: str, specials: tuple[str, ...] = ()) -> Path:
    """A small model with a template of TRL's."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    tokenizer = tiny.tokenizer(["what is two plus two"] * 5, 300)
    if specials:
        tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    tokenizer.chat_template = (Path(spec.origin).parent / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(*answers: str) -> list[dict]:
    return [
        turn for answer in answers for turn in ({"role": "user", "content": "two?"}, {"role": "assistant", "content": answer})
    ]


def sft_config(place: Path, folder: Path, rows: list, **data) -> SFTConfig:
    return SFTConfig(
        model=Model(path=str(folder)),
        data=Data(dataset=write(place / "rows.jsonl", rows), **data),
        evaluation=Evaluation(eval_prompts=0),
        run=Run(output_dir=str(place / "run"), max_steps=2, threads=1, progress=False, report=False, device="cpu"),
        batch_size=2,
    )


def events(place: Path) -> dict[str, dict]:
    return {(row := json.loads(line))["kind"]: row for line in (place / "events.jsonl").read_text().splitlines()}


def test_sft_on_qwen3_trains_every_turn_with_its_thoughts(tmp_path, capsys):
    folder = model(tmp_path / "model", "qwen3")
    rows = [{"messages": talk("<think>\na\n</think>\n\n2", "<think>\nb\n</think>\n\n4")}, {"messages": talk("6")}]
    sft.run(sft_config(tmp_path, folder, rows))
    assert events(tmp_path / "run")["turns_apart"] | {"rows": 2, "texts": 3} == events(tmp_path / "run")["turns_apart"]
    assert "2 rows are trained as 3 texts, because the chat template changes earlier turns" in capsys.readouterr().err


def test_a_row_that_the_template_cannot_say_stops_the_run_or_is_left_out_and_counted(tmp_path, capsys):
    folder = model(tmp_path / "model", "qwen2_5")
    named = [{"role": "user", "content": "two?", "name": "Al"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": talk("2")}, {"messages": named}, {"messages": talk("4")}]
    config = sft_config(tmp_path, folder, rows)
    with pytest.raises(UserError, match=r"rows.jsonl:2: column 'messages\[0\].name' is dropped .*--bad-rows skip"):
        sft.run(config)
    sft.run(replace(config, data=replace(config.data, bad_rows="skip"), run=replace(config.run, output_dir=str(tmp_path / "on"))))
    told = events(tmp_path / "on")["rows_refused"]
    assert (told["count"], told["kept"]) == (1, 2) and "rows.jsonl:2" in told["reasons"][0]
    assert "1 of 3 rows were rejected and skipped. The first one is rows.jsonl:2" in capsys.readouterr().err


SPECIALS = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")


@pytest.mark.slow
@pytest.mark.parametrize(("template", "specials", "several"), [("qwen3", (), True), ("deepseek_r1_distill", SPECIALS, False)])
def test_online_rl_starts_on_templates_that_change_the_past(template, specials, several, job, tmp_path):
    config = online_config(job, tmp_path / "run", max_steps=1)
    data = Data(dataset=write(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "two?"}]}] * 4))
    config = replace(
        config,
        model=Model(path=str(model(tmp_path / "model", template, specials))),
        data=data,
        evaluation=Evaluation(eval_prompts=0),
        sampling=Sampling(max_completion_length=8),
        **({"environment": Again, "reward": (), "max_turns": 2} if several else {"reward": (lengths, opened)}),
    )
    online.run(config)
    assert (tmp_path / "run" / "model" / "config.json").exists()
    if not several:
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert next(row["rewards/opened/mean"] for row in rows if "rewards/opened/mean" in row) == 1.0


@pytest.mark.parametrize("skip", [True, False])
def test_rewards_of_a_run_read_special_tokens_only_where_they_are_shown(skip, job, tmp_path):
    """Half of the vocabulary is special, so that nearly every random completion has such tokens, in training and evaluation."""
    folder = model(tmp_path / "model", "qwen2_5", tuple(f"<{end}s{i}>" for i in range(150) for end in ("", "/")))
    config = online_config(job, tmp_path / "run", max_steps=1)
    rows = write(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": "two?"}]}] * 4)
    config = replace(
        config,
        model=Model(path=str(folder)),
        data=Data(dataset=rows),
        sampling=Sampling(max_completion_length=8),
        evaluation=Evaluation(eval_prompts=2),
        **({} if skip else {"skip_special_tokens": False}),
        reward=(lengths, tagged),
    )
    online.run(config)
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [row[name] for row in found for name in ("rewards/tagged/mean", "eval/rewards/tagged/mean") if name in row]
    assert len(seen) >= 2 and all(value == 0 if skip else value > 0.5 for value in seen), seen
    assert ("special_tokens_hidden" in events(tmp_path / "run")) == skip
    said = [json.loads(line)["completion"] for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert any("<s" in text for text in said), "the record has what the policy wrote"


def test_a_run_that_goes_on_tomorrow_reads_the_date_of_its_start(job, tmp_path, monkeypatch):
    folder = model(tmp_path / "model", "llama3_2", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))
    rows = [{"messages": talk("2")}, {"messages": talk("4")}]
    config = sft_config(tmp_path, folder, rows)
    config = replace(config, run=replace(config.run, save_steps=1, max_steps=1))

    class Then(date):
        @classmethod
        def today(cls):
            return cls(2001, 2, 3)

    seen = []
    real = rendering.render
    monkeypatch.setattr("psigrad.language.data.chat.turns.render", lambda *a, **k: seen.append(real(*a, **k)) or seen[-1])
    monkeypatch.setattr("psigrad.language.loading.load_model.date", Then)
    sft.run(config)
    monkeypatch.setattr("psigrad.language.loading.load_model.date", date)
    first, seen[:] = list(seen), []
    sft.run(replace(config, run=replace(config.run, max_steps=2, extend=True)))
    assert first and all("03 Feb 2001" in text for text in (*first, *seen)) and seen, "the day of the start, on both days"


MOODY = "{{ mood | default('calm') }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
MOODY += "{% if add_generation_prompt %}assistant:{% endif %}"


def test_a_run_goes_on_with_the_templates_arguments_eos_and_text_that_it_began_with(tmp_path):
    """What a run reads from outside is pinned. `mood: calm` renders what no argument does, and is another all the same."""
    folder = model(tmp_path / "model", "qwen2_5", ("<|im_end|>", "<|other|>"))
    (own := tmp_path / "mine.jinja").write_text(MOODY)
    config = sft_config(tmp_path, folder, [{"messages": talk("2")}, {"messages": talk("4")}])
    config = replace(
        config,
        model=replace(config.model, chat_template_path=str(own), chat_template_kwargs='{"mood": "gay"}', eos_token="<|im_end|>"),
        run=replace(config.run, save_steps=1, max_steps=1),
    )
    sft.run(config)
    longer = replace(config, run=replace(config.run, max_steps=2, extend=True))
    for changed, named in (
        ({"chat_template_kwargs": '{"mood": "calm"}'}, "chat_template_kwargs"),
        ({"chat_template_kwargs": ""}, "chat_template_kwargs"),
        ({"eos_token": "<|other|>"}, "eos_token"),
        ({"eos_token": ""}, "eos_token"),
    ):
        with pytest.raises(UserError, match=rf"model\.{named}.*{named}"):
            sft.run(replace(longer, model=replace(longer.model, **changed)))
    own.write_text(MOODY.replace("calm", "tame"))
    with pytest.raises(UserError, match="another chat template"):
        sft.run(longer)
    own.write_text(MOODY)
    sft.run(longer)
    assert (tmp_path / "run" / "model" / "config.json").exists(), "the same goes on"


@pytest.mark.parametrize("eos", ["", "<|other|>"])
def test_others_end_the_trained_models_turns_where_training_does(eos, tmp_path):
    """The model ends with <|endoftext|>, 0, its template with <|im_end|>, 3; `generate` reads generation_config.json alone."""
    folder = model(tmp_path / "model", "qwen2_5", ("<|im_end|>", "<|other|>"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.6, "do_sample": False}))
    config = sft_config(tmp_path, folder, [{"messages": talk("2")}, {"messages": talk("4")}])
    done = sft.run(replace(config, model=replace(config.model, eos_token=eos)))  # that makes no sense, and is Llama 2's
    other = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|other|>")
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 0
    found = AutoModelForCausalLM.from_pretrained(done.model).generation_config.eos_token_id
    assert found == [0, 3] + ([other] if eos else [])
