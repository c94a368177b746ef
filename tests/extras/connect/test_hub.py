"""A finished run's model on the hub: every file bit for bit, a card that says what it is, and no run that is lost by it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hub_stand_in import TOKEN, Repository, hub_stand_in, reach
from huggingface_hub import ModelCard, constants
from tiny_jobs import online_config, preference_config, reward_config, sft_config

from psigrad import cli
from psigrad.config import Hub, Model
from psigrad.errors import UserError
from psigrad.language.recipes import dispatch, online, reward
from psigrad.records.report import card
from psigrad.runs.result import Result
from psigrad_extras.investigate import comparison

pytestmark = pytest.mark.usefixtures("rewards_here")


@pytest.fixture(scope="module")
def result(job, tmp_path_factory) -> Result:
    config = online_config(job, tmp_path_factory.mktemp("runs") / "letters")
    return online.run(replace(config, model=replace(config.model, lora_rank=2, lora_save="both")))


@pytest.fixture
def hub(monkeypatch):
    with hub_stand_in() as standing_in:
        reach(monkeypatch, standing_in.address)
        yield standing_in


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---")[1])


def test_every_file_arrives_bit_for_bit_in_one_commit(result, hub):
    assert result.push_to_hub("letters") == f"{hub.address}/ada/letters"
    there = hub.repositories["ada/letters"]
    sent, own = dict(there.branches["main"]), files_of(result.model)
    assert b'from_pretrained("ada/letters")' in sent.pop("README.md") and own.pop("README.md")
    assert sent == own and {"model.safetensors", "adapter/adapter_model.safetensors", "config.json", "tokenizer.json"} <= set(
        sent
    )
    assert len(there.commits) == 1 and not there.private
    assert [p for p in hub.asked if p.startswith("PUT")], "weights go by LFS"
    result.push_to_hub("ada/letters")  # the name is taken, by ourselves: nothing has changed, so there is no second commit
    assert len(there.commits) == 1


@pytest.mark.parametrize("held", ["held.jsonl", ""])
def test_the_card_names_the_rows_that_were_held_out(held, result, tmp_path):
    run = shutil.copytree(result.folder, tmp_path / "copy")
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"dataset": "all.jsonl", "eval_dataset": held}
    (run / "config.json").write_text(json.dumps(config))
    (index,) = front(card.text(run))["model-index"][0]["results"]
    assert index["dataset"] == {"name": held or "all.jsonl", "type": held or "all.jsonl"}


def test_the_card_says_what_trained_the_model_on_what_and_what_came_of_it(result, job):
    text = (result.model / "README.md").read_text()
    assert text == card.text(result.folder) and ModelCard(text).data.library_name == "transformers"
    data = front(text)
    assert data["tags"] == ["psigrad", "grpo"] and data["pipeline_tag"] == "text-generation" and "base_model" not in data
    (index,) = data["model-index"][0]["results"]
    assert f'from_pretrained("{result.model}")' in text
    assert [m | {"name": ""} for m in index["metrics"]] == [
        {"name": "", "type": "early_letters", "value": result.after["eval/early_letters/mean"]}
    ]
    assert (
        f"{result.before['eval/early_letters/mean']:.4g} [" in text and f"{result.after['eval/early_letters/mean']:.4g} [" in text
    )
    manifest = max(result.folder.glob("checkpoints/*/manifest.json")).read_text()
    for said in (
        "32 rows and 4 held out",
        "On 4 held-out prompts",
        "LoRA of rank 2",
        "early_letters",
        "finished: 20",
        "psigrad 0.",
    ):
        assert said in text, said
    for pin in ("SHA-256 of the rows ", "SHA-256 of its files "):
        assert text.partition(pin)[2][:64] in manifest
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert settings["optim"] == {"learning_rate": 0.01} and settings["model"]["lora_rank"] == 2 and "hub" not in settings
    assert settings["prompts_per_step"] == 4 and "output_dir" not in settings["run"]
    published = card.text(result.folder, "ada/letters")
    assert str(job) in text and str(job) not in published and "`train.jsonl`" in published and "path: base" in published


def test_the_settings_of_a_card_train_the_same_model(job, tmp_path):
    first = dispatch.run(sft_config(job, tmp_path / "first"))
    text = (first.model / "README.md").read_text()
    (tmp_path / "settings.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    assert cli.main(["sft", "--config", str(tmp_path / "settings.yaml"), "--output-dir", str(tmp_path / "second"),
                     "--no-progress", "--no-report", "--threads", "1"]) == 0  # fmt: skip
    second = files_of(tmp_path / "second" / "model")
    assert second.pop("README.md") and second == {n: c for n, c in files_of(first.model).items() if n != "README.md"}


def test_the_base_and_its_licence_are_told_and_passed_on(job, tmp_path, result):
    base = tmp_path / "base"
    base.mkdir()
    for name, content in files_of(job / "base").items():
        (base / name).write_bytes(content)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: Qwen/Qwen3-0.6B\n---\n# Base\n")
    config = preference_config(job, tmp_path / "dpo")
    done = dispatch.run(replace(config, model=Model(path=str(base), lora_rank=2, lora_save="adapter")))
    data = front((done.model / "README.md").read_text())
    assert data["license"] == "apache-2.0" and data["base_model"] == "Qwen/Qwen3-0.6B" and data["library_name"] == "peft"
    assert data["base_model_relation"] == "adapter" and data["tags"] == ["psigrad", "dpo"]
    judge = front((reward.run(reward_config(job, tmp_path / "judge")).model / "README.md").read_text())
    assert judge["pipeline_tag"] == "text-classification" and judge["tags"] == ["psigrad", "reward-model", "reward"]


def test_names_on_the_hub_are_linked_and_files_are_not(result, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(result.folder, run)
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"dataset": ["openai/gsm8k:main", "rows.jsonl"], "eval_dataset": ""}
    config["model"]["path"] = "Qwen/Qwen3-0.6B"
    (run / "config.json").write_text(json.dumps(config))
    for manifest in run.glob("checkpoints/*/manifest.json"):
        held = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**held, "model": "c1899de289a04d12100db370d81485cdf75e47ca"}))
    text = card.text(run)
    assert front(text)["datasets"] == ["openai/gsm8k"] and front(text)["base_model"] == "Qwen/Qwen3-0.6B"
    assert "(commit c1899de289a04d12100db370d81485cdf75e47ca)" in text and "datasets/openai/gsm8k)" in text


def test_a_card_that_was_written_by_hand_goes_up_as_it_is(result, hub, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(result.folder, run)
    (run / "model" / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    Result(run, run / "model", None).push_to_hub("mine")
    assert hub.repositories["ada/mine"].branches["main"]["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    (run / "model" / "README.md").unlink()  # as psigrad 0.1 left it
    Result(run, run / "model", None).push_to_hub("mine")
    assert b"library_name" in hub.repositories["ada/mine"].branches["main"]["README.md"]


def test_a_model_that_is_replaced_leaves_no_weights_behind_and_other_files_stay(result, hub):
    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "plot.png": b"mine"}
    hub.repositories["ada/old"] = Repository(branches={"main": dict(old)})
    result.push_to_hub("ada/old")
    now = hub.repositories["ada/old"].branches["main"]
    assert now["plot.png"] == b"mine" and "model.safetensors" in now and not set(now) & set(list(old)[:2])


def test_branches_and_private_repositories(result, hub, capsys):
    assert cli.main(["push", str(result.folder), "ada/new", "--private", "--revision", "second"]) == 0
    assert capsys.readouterr().out.strip() == f"{hub.address}/ada/new/tree/second"
    made = hub.repositories["ada/new"]
    assert made.private and not made.branches["main"] and "model.safetensors" in made.branches["second"]
    hub.repositories["ada/open"] = Repository(private=False)
    with pytest.raises(UserError, match="is already public; make it private"):
        result.push_to_hub("ada/open", private=True)
    assert not hub.repositories["ada/open"].branches["main"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a/b/c", "is not a valid repository name"),
        ("no spaces", "is not a valid repository name"),
        ("bob/letters", "may not write to this repository; name one of yours"),
        ("bob/theirs", "may not write to this repository; name one of yours"),
    ],
)
def test_names_that_cannot_be_are_one_sentence(result, hub, name, says, capsys):
    hub.repositories["bob/theirs"] = Repository()
    assert cli.main(["push", str(result.folder), name]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1 and not any(hub.repositories["bob/theirs"].branches.values())


def test_tokens_that_are_missing_or_refused_are_one_sentence(result, hub, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert cli.main(["push", str(result.folder), "ada/x"]) == 2
    assert "the hub refuses the token; set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert cli.main(["push", str(result.folder), "ada/x"]) == 2
    assert capsys.readouterr().err == ("psigrad: There is no hub token; set HF_TOKEN, or log in with `hf auth login`.\n")
    assert not hub.repositories


def test_what_is_no_finished_run_is_refused(hub, tmp_path, capsys):
    for folder, says in ((tmp_path / "none", "There is no folder"), (tmp_path, "has no folder model")):
        assert cli.main(["push", str(folder), "x"]) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    assert cli.main(["push", str(tmp_path), "x"]) == 2
    assert "holds no language model" in capsys.readouterr().err
    assert cli.main(["push", str(tmp_path)]) == 2 and "the usage is psigrad push RUN REPO" in capsys.readouterr().err
    assert not hub.asked


def test_a_run_pushes_at_its_end_where_it_is_asked_to_and_only_there(job, tmp_path, hub):
    dispatch.run(sft_config(job, tmp_path / "quiet"))
    assert not hub.asked
    config = replace(sft_config(job, tmp_path / "loud"), hub=Hub(push_to_hub=True, hub_private_repo=True))
    dispatch.run(config)
    assert hub.repositories["ada/loud"].private and "model.safetensors" in hub.repositories["ada/loud"].branches["main"]


def test_a_push_that_fails_loses_nothing_and_the_same_run_pushes_again(job, tmp_path, hub, capsys):
    run = tmp_path / "run"
    config = replace(sft_config(job, run), hub=Hub(push_to_hub=True, hub_model_id="ada/kept", hub_revision="v2"))
    hub.fail = "/commit/"
    done = dispatch.run(config)
    said = capsys.readouterr().err
    assert "the hub answered 500" in said and f"psigrad push {run} ada/kept --revision v2" in said and done.load() is not None
    hub.fail = ""
    assert "model.safetensors" not in hub.repositories["ada/kept"].branches["v2"]
    dispatch.run(config)
    assert "model.safetensors" in hub.repositories["ada/kept"].branches["v2"]


def test_what_cannot_be_pushed_is_refused_before_the_first_step(job, tmp_path, hub, monkeypatch, capsys):
    with pytest.raises(UserError, match="is not a valid repository name"):
        dispatch.run(replace(sft_config(job, tmp_path / "a"), hub=Hub(push_to_hub=True, hub_model_id="a/b/c")))
    with pytest.raises(UserError, match="'my run' is not a valid repository name"):
        dispatch.run(replace(sft_config(job, tmp_path / "my run"), hub=Hub(push_to_hub=True)))
    with pytest.raises(UserError, match="compare pushes no models; remove push_to_hub"):
        made = online_config(job, tmp_path / "compare")
        comparison.check(comparison.Comparison(("grpo",), replace(made, hub=Hub(push_to_hub=True))))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match="push_to_hub is set, but the hub refuses the token"):
        dispatch.run(replace(sft_config(job, tmp_path / "a"), hub=Hub(push_to_hub=True)))
    assert not (tmp_path / "a").exists()


def test_a_hub_that_is_down_stops_no_run(job, tmp_path, hub, monkeypatch, capsys):
    reach(monkeypatch, "http://127.0.0.1:9")
    done = dispatch.run(replace(sft_config(job, tmp_path / "run"), hub=Hub(push_to_hub=True)))
    said = capsys.readouterr().err
    assert said.count("cannot be reached") == 2 and f"psigrad push {tmp_path / 'run'} run" in said and done.model.is_dir()


def test_the_command_reaches_the_hub_that_the_environment_names(result, hub):
    asked = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "psigrad", "push", str(result.folder), "from-shell"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert done.stdout == f"{hub.address}/ada/from-shell\n"
    assert "model.safetensors" in hub.repositories["ada/from-shell"].branches["main"]
