"""A run that goes on finds everything as it was, or says by name what changed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from cases import slow
from tiny_jobs import online_config, preference_config, sft_config

from psigrad import importing
from psigrad.compat.foreign_names import load
from psigrad.config import OnlineConfig, PreferenceConfig, SFTConfig
from psigrad.config.load import to_dict
from psigrad.control import builder
from psigrad.control import run as control_run
from psigrad.errors import UserError
from psigrad.language.recipes import online, preference, sft
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.records import pins, read

pytestmark = pytest.mark.usefixtures("rewards_here")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def interrupted(folder):
    """A finished run as one that was killed before its end."""
    shutil.rmtree(folder / "model")
    newest = max((folder / "checkpoints").iterdir())
    shutil.rmtree(newest)


def events(folder, kind):
    return [event for event in lines(folder / "events.jsonl") if event["kind"] == kind]


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


@pytest.fixture
def copied(job, tmp_path):
    """The job in a folder that a test may change."""
    shutil.copytree(job, tmp_path / "job")
    return tmp_path / "job"


REWARD = "def mine(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
HELPER = "import scales\n\ndef mine(completions, **columns):\n    return [scales.FACTOR * len(c) for c in completions]\n"


def with_reward(job, tmp_path, **settings):
    made = online_config(job, tmp_path / "run", **settings)
    return replace(made, reward=(f"{tmp_path / 'mine.py'}:mine",), evaluation=replace(made.evaluation, eval_prompts=0))


def test_another_reward_is_refused_by_name_and_taken_when_allowed(copied, tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(REWARD)
    online.run(with_reward(copied, tmp_path))
    interrupted(tmp_path / "run")
    source.write_text(REWARD.replace("float(", "2.0 * ("))
    with pytest.raises(UserError, match=r"was trained with another reward\. .* --allow reward,"):
        online.run(with_reward(copied, tmp_path))
    online.run(with_reward(copied, tmp_path, allow=("reward",)))
    (taken,) = events(tmp_path / "run", "allowed")
    assert taken["name"] == "reward" and taken["before"] != taken["now"]
    codes = [event["code"] for kind in ("started", "resumed") for event in events(tmp_path / "run", kind)]
    assert [codes[0], codes[-1]] == [{"reward": taken["before"]}, {"reward": taken["now"]}]
    interrupted(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    # the checkpoint that is left is from before the change: it still wants the word
    with pytest.raises(UserError, match="another reward"):
        online.run(with_reward(copied, tmp_path))


def test_what_a_reward_imports_is_pinned_too(copied, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "scales.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "mine.py").write_text(HELPER)
    first = pins.hash_code(importing.imported(f"{tmp_path / 'mine.py'}:mine", "reward"))
    assert first == pins.hash_code(importing.imported(f"{tmp_path / 'mine.py'}:mine", "reward"))
    (tmp_path / "scales.py").write_text("FACTOR = 2.0\n")
    assert pins.hash_code(importing.imported(f"{tmp_path / 'mine.py'}:mine", "reward")) != first


CONSTANT = "from scales import FACTOR\n\n\ndef mine(completions, **columns):\n    return [FACTOR] * len(completions)\n"
LATER = "def mine(completions, **columns):\n    from parts.scales import FACTOR\n\n    return [FACTOR] * len(completions)\n"
RELATIVE = "from .scales import FACTOR\n\n\ndef mine(completions, **columns):\n    return [FACTOR] * len(completions)\n"
DATA = "import json, pathlib\n\nWORDS = json.loads(pathlib.Path(__file__).with_name('words.json').read_text())\n\n\n"
DATA += "def mine(completions, **columns):\n    return [float(c in WORDS) for c in completions]\n"
THROUGH = "from reading import mine\n"


@pytest.mark.parametrize(
    ("files", "reward", "changed"),
    [
        ({"mine.py": CONSTANT, "scales.py": "FACTOR = 1.0"}, "mine.py:mine", "scales.py"),
        (
            {"mine.py": CONSTANT, "scales.py": "from deeper import FACTOR", "deeper.py": "FACTOR = 1.0"},
            "mine.py:mine",
            "deeper.py",
        ),
        ({"mine.py": LATER, "parts/__init__.py": "", "parts/scales.py": "FACTOR = 1.0"}, "mine.py:mine", "parts/scales.py"),
        ({"own/__init__.py": "", "own/mine.py": RELATIVE, "own/scales.py": "FACTOR = 1.0"}, "own.mine:mine", "own/scales.py"),
        ({"mine.py": DATA, "words.json": '["a"]'}, "mine.py:mine", "words.json"),
        ({"mine.py": THROUGH, "reading.py": DATA, "words.json": '["a"]'}, "mine.py:mine", "words.json"),
    ],
    ids=["constant", "deeper", "in a function", "relative", "data", "data of a helper"],
)
def test_a_reward_is_another_when_what_it_is_made_of_changes(files, reward, changed, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def now():
        for name in [
            name for name, module in sys.modules.items() if str(tmp_path.parent) in str(getattr(module, "__file__", ""))
        ]:
            del sys.modules[name]  # as a fresh process
        importlib.invalidate_caches()
        return pins.hash_code(importing.imported(str(tmp_path / reward) if ".py:" in reward else reward, "reward"))

    first = now()
    assert now() == first
    (tmp_path / "unrelated.py").write_text("FACTOR = 3.0")
    assert now() == first
    (tmp_path / changed).write_text((tmp_path / changed).read_text().replace("1.0", "2.0").replace('"a"', '"b"'))
    os.utime(tmp_path / changed, (1, 1))  # a change within one second is none to Python's cache of compiled modules
    assert now() != first


SAME = "\n\ndef mine(completions, **columns):\n    return [float(len(str(W)))] * len(completions)\n"
BESIDE = "__file__.replace('mine.py', {!r})"


def reads(how, name="words.txt"):
    return how.format(BESIDE.format(name)) + SAME


OWN = {
    "in a hidden folder": (".work/p/mine.py", reads("W = open({}).read()"), "words.txt", "a", "b"),
    "a name of bytes": ("mine.py", reads("import os\nW = open(os.fsencode({})).read()"), "words.txt", "a", "b"),
    "sqlite": ("mine.py", reads("import sqlite3\nW = sqlite3.connect({})"), "words.txt", "a", "b"),
    "exec": ("mine.py", reads("exec(open({}).read())", "x.py"), "x.py", "W = 1", "W = 2"),
    "runpy": ("mine.py", reads("import runpy\nW = runpy.run_path({})", "x.py"), "x.py", "K = 1", "K = 2"),
    "by its name": (
        "mine.py",
        f"import importlib as i\nW = i.import_module('extra_k').K{SAME}",
        "extra_k.py",
        "K = 1",
        "K = 2",
    ),
    "a partial": ("mine.py", "from functools import partial\nmine = partial(max, 1.0)\n", "mine.py", "1.0", "2.0"),
    "another's function": ("mine.py", "from own_made import of\nmine = of(1.0)\n", "mine.py", "1.0", "2.0"),
}


@pytest.mark.parametrize("way", OWN)
def test_a_reward_is_another_also_by_ways_that_no_import_statement_shows(way, tmp_path, monkeypatch):
    place, source, changed, before, now = OWN[way]
    folder = (tmp_path / place).parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_made.py").write_text(
        "def of(k):\n    def made(completions, **columns):\n        return [k]\n\n    return made\n"
    )
    if changed != "mine.py":
        (folder / changed).write_text(before)
    (folder / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))

    def pinned():
        for name in ("own_made", "extra_k"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return pins.hash_code(importing.imported(f"{tmp_path / place}:mine", "reward"))

    first = pinned()
    assert first is not None and pinned() == first
    (folder / changed).write_text((folder / changed).read_text().replace(before, now))
    os.utime(folder / changed, (1, 1))
    assert pinned() != first


@pytest.mark.parametrize("engine", ["embedded 2", "transformers 9.9"])
def test_another_engine_or_version_is_refused_by_name_and_taken_when_allowed(engine, job, tmp_path, monkeypatch):
    config = online_config(job, tmp_path / "run")
    online.run(config)
    interrupted(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "control")
    monkeypatch.setattr(EmbeddedSampler, "engine", engine)
    with pytest.raises(UserError, match=rf"was trained with engine embedded 1 \(now {engine}\)\. .* --allow engine,"):
        online.run(config)
    online.run(replace(config, run=replace(config.run, allow=("engine",))))
    (taken,) = events(tmp_path / "run", "allowed")
    assert (taken["name"], taken["before"], taken["now"]) == ("engine", "embedded 1", engine)
    monkeypatch.undo()
    online.run(online_config(job, tmp_path / "control"))
    assert not events(tmp_path / "control", "allowed"), "negative control: the same engine resumes"


@pytest.mark.parametrize(
    ("part", "changed"), [("reference", {"ref_model_sync_steps": 1}), ("critic", {"algorithm": "ppo", "num_generations": 2})]
)
def test_an_allowed_change_that_needs_a_part_that_no_checkpoint_has_is_refused(part, changed, job, tmp_path):
    config = online_config(job, tmp_path / "run")
    online.run(config)
    interrupted(tmp_path / "run")
    with pytest.raises(UserError, match=rf"step-\d+ has no {part}, since the run was started with settings that need none"):
        online.run(replace(config, **changed, run=replace(config.run, allow=tuple(changed))))


@pytest.mark.parametrize("changed", ["reward", "dataset"])
def test_a_finished_run_says_what_has_changed_since(changed, copied, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(REWARD)
    made = with_reward(copied, tmp_path)
    online.run(made)
    if changed == "reward":
        (tmp_path / "mine.py").write_text(REWARD.replace("float(", "2.0 * ("))
    else:
        rows = copied / made.data.dataset
        rows.write_text("".join(reversed(rows.read_text().splitlines(keepends=True))))
    with pytest.raises(UserError, match={"reward": "another reward", "dataset": "other rows or images in dataset"}[changed]):
        online.run(made)
    online.run(replace(made, run=replace(made.run, allow=(changed,))))
    assert "is finished; nothing was done" in capsys.readouterr().err


def test_a_librarys_code_and_psigrads_are_not_pinned():
    assert pins.hash_code(json.dumps, torch.nn.Linear, sft.run) is None


@pytest.mark.parametrize("made", ["online", "sft"])
def test_another_base_model_is_refused_by_name(made, copied, tmp_path):
    run, config = {"online": (online.run, online_config), "sft": (sft.run, sft_config)}[made]
    run(config(copied, tmp_path / "run"))
    interrupted(tmp_path / "run")
    weights = copied / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x00\x3f")
    with pytest.raises(UserError, match="was trained with another model"):
        run(config(copied, tmp_path / "run"))
    run(config(copied, tmp_path / "run", allow=("model",)))


def test_a_folder_is_looked_at_again_and_by_its_place(tmp_path, monkeypatch):
    """In a notebook the model of a run may be trained on, or a relative name mean another folder."""
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "weights").write_text(name)
    monkeypatch.chdir(tmp_path / "a")
    first = pins.identify_model("model")
    assert first == pins.identify_model("model") == pins.identify_model(str(tmp_path / "a" / "model"))
    monkeypatch.chdir(tmp_path / "b")
    assert pins.identify_model("model") not in (first, None)
    (tmp_path / "a" / "model" / "weights").write_text("a, trained on")
    assert pins.identify_model(str(tmp_path / "a" / "model")) != first


def test_another_reference_is_refused_by_name(copied, tmp_path):
    shutil.copytree(copied / "base", copied / "reference")
    config = replace(preference_config(copied, tmp_path / "run"), reference=str(copied / "reference"))
    preference.run(config)
    interrupted(tmp_path / "run")
    (copied / "reference" / "note.txt").write_text("another")
    with pytest.raises(UserError, match="was trained with another reference"):
        preference.run(config)


def test_other_threads_are_refused_with_both_numbers(job, tmp_path):
    sft.run(sft_config(job, tmp_path / "run", threads=1))
    interrupted(tmp_path / "run")
    with pytest.raises(UserError, match=r"run\.threads was 1 and is 2.*--allow run\.threads"):
        sft.run(sft_config(job, tmp_path / "run", threads=2))
    with pytest.raises(UserError, match=r"threads 1 \(now 2\).*--allow threads"):  # 0: one per core, of another machine
        pins.check_pins(tmp_path, {"threads": "1"}, {"threads": "2"})
    sft.run(sft_config(job, tmp_path / "run", threads=2, allow=("threads",)))


@pytest.mark.needs("compiler")
def test_kernels_switched_off_are_noticed(job, tmp_path, monkeypatch):
    sft.run(sft_config(job, tmp_path / "run"))
    interrupted(tmp_path / "run")
    monkeypatch.setattr("psigrad.language.recipes.run_pins.kernels", lambda: "switched off")
    with pytest.raises(UserError, match=r"kernels on \(now off\)"):
        sft.run(sft_config(job, tmp_path / "run"))


def test_a_name_that_nothing_has_is_refused(job, tmp_path):
    sft.run(sft_config(job, tmp_path / "run"))
    with pytest.raises(UserError, match=r"run\.allow has 'rewards'.*did you mean"):
        sft.run(sft_config(job, tmp_path / "run", allow=("rewards",)))


def test_a_setting_may_be_changed_by_name_and_is_recorded(job, tmp_path):
    sft.run(sft_config(job, tmp_path / "run"))
    interrupted(tmp_path / "run")

    def changed(**settings):
        made = sft_config(job, tmp_path / "run", **settings)
        return replace(made, optim=replace(made.optim, learning_rate=0.02))

    with pytest.raises(UserError, match=r"optim\.learning_rate was 0\.01 and is 0\.02.*--allow optim\.learning_rate"):
        sft.run(changed())
    sft.run(changed(allow=("learning_rate",)))
    assert events(tmp_path / "run", "settings_changed")[-1]["changes"] == {"optim.learning_rate": [0.01, 0.02]}


def test_a_changed_part_of_an_algorithm_is_told_and_not_that_it_has_no_name_now(tmp_path):
    before, now = (to_dict(load(OnlineConfig, flags={"algorithm": "grpo", **more})) for more in ({}, {"beta": 0.1}))
    with pytest.raises(UserError, match=r"algorithm\.kl") as refused:
        pins.check_settings(tmp_path, before, now)
    assert "grpo" not in str(refused.value)
    for other in ("ppo", {"preset": "ppo", "kl": {"coefficient": 0.1}}):
        with pytest.raises(UserError, match=r"\(algorithm was 'grpo' and is 'ppo'"):
            pins.check_settings(tmp_path, before, before | {"algorithm": other})


@pytest.mark.parametrize(
    ("settings", "plain", "changed", "names"),
    [
        (OnlineConfig, {"algorithm": "grpo"}, {"beta": 0.1}, "algorithm.kl.coefficient"),
        (PreferenceConfig, {"loss": "dpo"}, {"beta": 0.2}, "loss.beta"),
        (SFTConfig, {}, {"lr_scheduler_kwargs": {"num_cycles": 2}}, "optim.lr_scheduler_kwargs.num_cycles"),
    ],
)
def test_what_is_advised_is_taken_also_where_a_setting_came_or_went(settings, plain, changed, names, tmp_path):
    one, other = (to_dict(load(settings, flags={**plain, **more})) for more in ({}, changed))
    for before, now in ((one, other), (other, one)):
        with pytest.raises(UserError, match=f"{names} was .*--allow .*{names} accepts") as refused:
            pins.check_settings(tmp_path, before, now, settings)
        advised = str(refused.value).partition("--allow ")[2].partition(" accepts")[0].split()
        now = now | {"run": now["run"] | {"allow": advised}}
        assert [change.name for change in pins.check_settings(tmp_path, before, now, settings)] == advised


def test_a_smaller_micro_batch_mends_a_run_that_was_out_of_memory(job, tmp_path):
    sft.run(sft_config(job, tmp_path / "run"))
    interrupted(tmp_path / "run")
    smaller = replace(sft_config(job, tmp_path / "run"), micro_batch_tokens=16)
    sft.run(smaller)
    assert "micro_batch_tokens" in events(tmp_path / "run", "settings_changed")[-1]["changes"]


def test_a_finished_run_says_so_and_does_nothing(job, tmp_path, capsys):
    first = sft.run(sft_config(job, tmp_path / "run"))
    before = contents(first.folder)
    again = sft.run(sft_config(job, tmp_path / "run"))
    assert "is finished; nothing was done" in capsys.readouterr().err
    assert (again.model, again.before, again.after) == (first.model, first.before, first.after)
    assert contents(first.folder) == before


@pytest.mark.parametrize(
    ("what", "damage"),
    [*(("sft", "cut"), ("sft", "gone"), ("online", "gone"), ("control", "gone")), *slow(("online", "cut"), ("control", "cut"))],
)
def test_a_finished_run_without_its_weights_writes_them_again_bitwise(what, damage, job, tmp_path, capsys):
    small = {"n_steps": 16, "n_envs": 1, "total_timesteps": 32, "batch_size": 16, "eval_episodes": 0, "progress": False}
    run, config = {
        "sft": (sft.run, sft_config(job, tmp_path / "run")),
        "online": (online.run, online_config(job, tmp_path / "run")),
        "control": (control_run.run, builder.settings("ppo", "CartPole-v1", {**small, "output_dir": str(tmp_path / "run")})),
    }[what]
    weights = run(config).model / "model.safetensors"
    content, rows = weights.read_bytes(), (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for _ in range(2):
        if damage == "gone":
            weights.unlink()
        else:
            weights.write_bytes(content[:-4])
        assert run(config).model / "model.safetensors" == weights and weights.read_bytes() == content
        assert "model is written again" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == rows
    run(config)
    assert "is finished; nothing was done" in capsys.readouterr().err


def test_a_longer_run_is_asked_for_by_name(job, tmp_path):
    sft.run(sft_config(job, tmp_path / "run", max_steps=4))
    with pytest.raises(UserError, match=r"run\.max_steps was 4 and is 8.*give --extend"):
        sft.run(sft_config(job, tmp_path / "run", max_steps=8))
    with pytest.raises(UserError, match=r"was 4 and is 2.*set run.max_steps above 4"):
        sft.run(sft_config(job, tmp_path / "run", max_steps=2, extend=True))
    sft.run(sft_config(job, tmp_path / "run", max_steps=8, extend=True))
    assert max(row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")) == 8
    sft.run(sft_config(job, tmp_path / "run", max_steps=8, extend=True))  # the same command again: finished


def test_a_start_that_is_refused_leaves_the_settings_as_they_were(job, tmp_path):
    """Else a finished run that was to go on, and was refused for its data, would be finished at the new end for good."""
    data = tmp_path / "rows.jsonl"
    data.write_bytes((job / "train.jsonl").read_bytes())
    config, longer = (
        replace(made, data=replace(made.data, dataset=str(data)))
        for made in (
            sft_config(job, tmp_path / "run", max_steps=4),
            sft_config(job, tmp_path / "run", max_steps=8, extend=True),
        )
    )
    sft.run(config)
    settings = (tmp_path / "run" / "config.json").read_bytes()
    data.write_bytes(data.read_bytes() + data.read_bytes().splitlines()[0] + b"\n")
    with pytest.raises(UserError, match="other rows or images in dataset"):
        sft.run(longer)
    assert (tmp_path / "run" / "config.json").read_bytes() == settings and not events(tmp_path / "run", "settings_changed")
    sft.run(replace(longer, run=replace(longer.run, allow=("dataset", "eval_dataset"))))
    assert max(row["step"] for row in lines(tmp_path / "run" / "metrics.jsonl")) == 8
    (changed,) = events(tmp_path / "run", "settings_changed")
    assert changed["changes"]["run.max_steps"] == [4, 8]


def test_other_versions_are_recorded(job, tmp_path, monkeypatch):
    sft.run(sft_config(job, tmp_path / "run"))
    interrupted(tmp_path / "run")
    monkeypatch.setattr("psigrad.runs.machine.versions", lambda: {"torch": "9.9"})
    sft.run(sft_config(job, tmp_path / "run"))
    (event,) = events(tmp_path / "run", "versions_changed")
    assert event["versions"]["torch"] == [torch.__version__, "9.9"]


CUSTOM = """
from pathlib import Path
from transformers import PreTrainedConfig
Path({mark!r}).write_text("ran")
class CustomConfig(PreTrainedConfig):
    model_type = "custom"
"""


@pytest.mark.parametrize("run", [online.run, sft.run])
def test_code_that_comes_with_a_model_never_runs_unasked(run, copied, tmp_path):
    mark, base = tmp_path / "ran", copied / "base"
    settings = json.loads((base / "config.json").read_text())
    auto = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"}
    (base / "config.json").write_text(json.dumps({**settings, "model_type": "custom", "auto_map": auto}))
    (base / "custom.py").write_text(CUSTOM.format(mark=str(mark)))
    config = (online_config if run is online.run else sft_config)(copied, tmp_path / "run")
    with pytest.raises(UserError, match=r"set model\.trust_remote_code=true if you have read"):
        run(config)
    assert not mark.exists()
    with pytest.raises(UserError):  # negative control: asked for, it runs, and there is no such class in it
        run(
            replace(
                config,
                model=replace(config.model, trust_remote_code=True),
                run=replace(config.run, output_dir=str(tmp_path / "b")),
            )
        )
    assert mark.exists()


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_trust_reaches_the_code_of_a_reference(kind, job, copied, tmp_path):
    mark, base = tmp_path / "ran", copied / "base"
    settings = json.loads((base / "config.json").read_text())
    auto = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"}
    (base / "config.json").write_text(json.dumps({**settings, "model_type": "custom", "auto_map": auto}))
    (base / "custom.py").write_text(CUSTOM.format(mark=str(mark)))
    make, run = (preference_config, preference.run) if kind == "dpo" else (online_config, online.run)
    for trusts in (False, True):
        config = replace(make(job, tmp_path / f"{trusts}"), reference=str(base))
        with pytest.raises(UserError):  # there is no such class in it
            run(replace(config, model=replace(config.model, trust_remote_code=trusts)))
        assert mark.exists() == trusts


def test_a_revision_of_a_folder_is_refused(job, tmp_path):
    config = sft_config(job, tmp_path / "run")
    with pytest.raises(UserError, match=r"model\.revision is 'v1' but .* is a local folder"):
        sft.run(replace(config, model=replace(config.model, revision="v1")))


def test_a_revision_is_what_is_loaded_and_pinned(job, tmp_path, monkeypatch):
    asked, commit = [], tmp_path / "hub" / "models--some--model" / "snapshots" / "0123abc"
    shutil.copytree(job / "base", commit)

    def download(path, *, revision, allow_patterns):
        asked.append((path, revision))
        return str(commit)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("psigrad.records.pins.try_to_load_from_cache", lambda path, name, revision: str(commit / name))
    config = sft_config(job, tmp_path / "run")
    sft.run(replace(config, model=replace(config.model, path="some/model", revision="v1")))
    assert asked == [("some/model", "v1")]
    manifest = json.loads((max((tmp_path / "run" / "checkpoints").iterdir()) / "manifest.json").read_text())
    assert manifest["model"] == "0123abc"


def test_pages_show_an_algorithms_name_in_one_place(tmp_path):
    named, changed = tmp_path / "named", tmp_path / "changed"
    for folder, algorithm in ((named, "grpo"), (changed, {"preset": "grpo", "kl": {"coefficient": 0.1}})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"recipe": "online", "algorithm": algorithm}))
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    one, other = (read.load(folder).settings for folder in (named, changed))
    assert one["algorithm"] == other["algorithm"] == "grpo"
    assert other.items() - one.items() == {("algorithm.kl.coefficient", 0.1)}
