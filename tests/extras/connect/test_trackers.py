"""Trackers are told the figures and never stop a run."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from timing import quickest

from psigrad.errors import UserError
from psigrad_extras.connect.trackers import COLUMNS, Background, open_trackers

CONFIG = {"run": {"seed": 0}}


class Fake(types.ModuleType):
    """wandb or trackio: records the calls; `init` gives the module itself as the run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple] = []

    def init(self, **settings):
        self.calls.append(("init", settings))
        return self

    def log(self, figures, **settings):
        self.calls.append(("log", figures, settings))

    def Table(self, columns=None, data=None, dataframe=None):
        return ("table", columns, data) if dataframe is None else ("table", list(dataframe.columns), dataframe.values.tolist())

    def finish(self):
        self.calls.append(("finish",))


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise ConnectionError("no route to host")

    def close(self):
        self.calls += 1


def run(names: list[str], folder: Path) -> None:
    for tracker in open_trackers(names, folder, CONFIG):
        tracker.log(1, {"loss": 0.5, "reward/mean": 1.0})
        tracker.log(2, {"loss": 0.25})
        tracker.close()


def test_no_names_give_no_trackers(tmp_path):
    assert open_trackers([], tmp_path, CONFIG) == []


def test_tensorboard_reads_back_what_was_told(tmp_path):
    run(["tensorboard"], tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    told = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert told == {"loss": [(1, 0.5), (2, 0.25)], "reward/mean": [(1, 1.0)]}
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (again,) = open_trackers(["tensorboard"], tmp_path, CONFIG)  # the run was killed behind its checkpoint, and resumes
    for step in (2, 3):
        again.log(step, {"loss": 1 / step})
    again.close()
    events.Reload()
    resumed = EventAccumulator(str(tmp_path / "tensorboard"))
    resumed.Reload()
    assert [(e.step, e.value) for e in resumed.Scalars("loss")] == [(1, 0.5), (2, 0.5), (3, pytest.approx(1 / 3))]


def test_wandb_gets_each_step_and_one_folder_is_one_run(tmp_path, monkeypatch):
    ids = []
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        fake = Fake("wandb")
        monkeypatch.setitem(sys.modules, "wandb", fake)
        run(["wandb"], folder)
        (_, settings), *rest = fake.calls
        ids.append(settings["id"])
        assert settings["name"] == folder.name and settings["config"] == CONFIG and settings["resume"] == "allow"
        assert rest == [
            ("log", {"loss": 0.5, "reward/mean": 1.0}, {"step": 1}),
            ("log", {"loss": 0.25}, {"step": 2}),
            ("finish",),
        ]
    assert ids[0] == ids[1] != ids[2]


def test_trackio_gets_each_step(tmp_path, monkeypatch):
    fake = Fake("trackio")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    run(["trackio"], tmp_path)
    assert fake.calls[0] == ("init", {"project": "psigrad", "name": tmp_path.name, "config": CONFIG})
    assert fake.calls[1:] == [
        ("log", {"step": 1, "loss": 0.5, "reward/mean": 1.0}, {}),
        ("log", {"step": 2, "loss": 0.25}, {}),
        ("finish",),
    ]


class FakeMLflow(Fake):
    """mlflow's functions as they are called, with the run ids that it gives away."""

    def set_experiment(self, name):
        self.calls.append(("experiment", name))

    def start_run(self, run_id=None, run_name=None):
        self.calls.append(("start", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "abc"))

    def log_params(self, values):
        self.calls.append(("params", values))

    def log_metrics(self, values, step=None):
        self.calls.append(("metrics", values, step))

    def log_table(self, columns, file):
        self.calls.append(("table", columns, file))

    def end_run(self):
        self.calls.append(("end",))


def test_mlflow_gets_each_step_and_one_folder_is_one_run(tmp_path, monkeypatch):
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    first, again = FakeMLflow("mlflow"), FakeMLflow("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", first)
    run(["mlflow"], tmp_path)
    assert first.calls == [
        ("experiment", "psigrad"),
        ("start", None, tmp_path.name),
        ("params", {"run.seed": "0"}),
        ("metrics", {"loss": 0.5, "reward/mean": 1.0}, 1),
        ("metrics", {"loss": 0.25}, 2),
        ("end",),
    ]
    monkeypatch.setitem(sys.modules, "mlflow", again)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    (tracker,) = open_trackers(["mlflow"], tmp_path, CONFIG)
    tracker.log(3, {"eval/pass@4": 1.0})
    tracker.completions(1, [{"step": 1, "kind": "train", "prompt": "p", "completion": "c", "reward": 1.0}])
    tracker.close()
    assert again.calls == [
        ("start", "abc", None),
        ("metrics", {"eval/pass_4": 1.0}, 3),
        ("table", dict(zip(COLUMNS, ([1], ["train"], ["p"], ["c"], [1.0], [None]), strict=True)), "completions.json"),
        ("end",),
    ]


def test_swanlab_gets_each_step_and_one_folder_is_one_run(tmp_path, monkeypatch):
    ids = []
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        fake = Fake("swanlab")
        fake.Text = lambda text: ("text", text)
        fake.Settings = type("Settings", (SimpleNamespace,), {"Probe": SimpleNamespace})
        monkeypatch.setitem(sys.modules, "swanlab", fake)
        (tracker,) = open_trackers(["swanlab"], folder, CONFIG)
        tracker.log(1, {"loss": 0.5})
        tracker.completions(1, [{"step": 1, "kind": "train", "prompt": "p", "completion": "c", "reward": 1.0}])
        tracker.close()
        (_, settings), *rest = fake.calls
        ids.append(settings["id"])
        assert settings["project"] == "psigrad" and settings["resume"] == "allow" and settings["config"] == CONFIG
        text = "step: 1\nkind: train\nprompt: p\ncompletion: c\nreward: 1.0\nadvantage: None"
        assert rest == [("log", {"loss": 0.5}, {"step": 1}), ("log", {"completions": [("text", text)]}, {"step": 1}), ("finish",)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("words", [["psigrad", "grpo", "--hub-token", "flagged-value"], ["psigrad", "grpo", "--seed", "1"]])
def test_a_command_that_holds_secrets_is_not_written_down_by_trackers(words, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", words)
    secret = "--hub-token" in words
    wandb, swanlab = Fake("wandb"), Fake("swanlab")
    wandb.Settings = SimpleNamespace
    swanlab.Settings = type("Settings", (SimpleNamespace,), {"Probe": SimpleNamespace})
    for fake in (wandb, swanlab):
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        run([fake.__name__], tmp_path)
    assert wandb.calls[0][1].get("settings") == (SimpleNamespace(x_disable_meta=True) if secret else None)
    probe = swanlab.calls[0][1]["settings"].probe
    assert probe == SimpleNamespace(git=False, runtime=not secret), "the address of git's remote may hold a token"


def test_a_tracker_that_raises_is_told_about_once_and_left_alone(capsys):
    failing = Failing()
    tracker = Background("mine", lambda: failing)
    tracker.log(1, {})
    tracker._thread.join(10)
    tracker.log(2, {})
    tracker.close()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "tracker mine failed and is no longer used: ConnectionError: no route" in told
    assert failing.calls == 1


def test_a_tracker_that_does_not_start_is_told_about_and_left_out(tmp_path, monkeypatch, capsys):
    broken, sound = Fake("wandb"), Fake("trackio")
    broken.init = lambda **settings: Failing().log(0, {})
    monkeypatch.setitem(sys.modules, "wandb", broken)
    monkeypatch.setitem(sys.modules, "trackio", sound)
    run(["wandb", "trackio"], tmp_path)
    assert "tracker wandb failed" in capsys.readouterr().err
    assert sound.calls[-1] == ("finish",)


@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_a_tracker_that_hangs_holds_nothing_up(where, monkeypatch, capsys):
    monkeypatch.setattr(Background, "PATIENCE", 0.2)
    forever = threading.Event()
    hanging = SimpleNamespace(log=lambda step, figures: None, close=lambda: None)
    if where == "start":
        make = forever.wait
    else:
        setattr(hanging, where, lambda *given: forever.wait())
        make = lambda: hanging  # noqa: E731

    def logged() -> None:
        tracker = Background("mine", make)
        for step in range(100):
            tracker.log(step, {"loss": 1.0})
        tracker.close()

    assert quickest(logged, 5) < 5
    assert "tracker mine did not answer for 0.2 s" in capsys.readouterr().err
    forever.set()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_names_the_command(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"^The tracker {name} needs {name}, .* Run `pip install {name}`\.$"):
        open_trackers([name], tmp_path, CONFIG)


def test_an_unknown_name_is_refused_before_any_tracker_starts(tmp_path, monkeypatch):
    fake = Fake("trackio")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with pytest.raises(
        UserError, match="no tracker 'wandbb'; expected one of tensorboard, wandb, trackio, mlflow, swanlab; did you mean 'wandb'"
    ):
        open_trackers(["trackio", "wandbb"], tmp_path, CONFIG)
    assert fake.calls == []


ROWS = [
    {
        "step": 1,
        "kind": "train",
        "prompt": [{"role": "user", "content": "2 | 3"}],
        "completion": "5",
        "reward": 1.0,
        "advantage": 0.5,
    },
    {"step": 1, "kind": "train", "prompt": "q", "completion": "a", "reward": None},
]
TABLE = [[1, "train", "user: 2 | 3", "5", 1.0, 0.5], [1, "train", "q", "a", None, None]]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_completions_become_a_table(name, tmp_path, monkeypatch):
    """By the recorded calls of a module of the same shape."""
    fake = Fake(name)
    monkeypatch.setitem(sys.modules, name, fake)
    (tracker,) = open_trackers([name], tmp_path, CONFIG)
    tracker.completions(1, ROWS)
    tracker.completions(2, [{**row, "step": 2} for row in ROWS])
    tracker.completions(3, [{"step": 3, "kind": "eval", "completion": "x"}] * 100)
    tracker.close()
    tables = [figures["completions"] for kind, figures, *_ in (call for call in fake.calls if call[0] == "log")]
    assert len(tables) == 2, "training completions of every tenth step, held-out ones always"
    assert tables[0][1] == list(COLUMNS) and [[None if v != v else v for v in row] for row in tables[0][2]] == TABLE
    assert len(tables[1][2]) == 32


def test_tensorboard_shows_completions_as_text(tmp_path):
    (tracker,) = open_trackers(["tensorboard"], tmp_path, CONFIG)
    tracker.completions(10, [{**row, "step": 10} for row in ROWS])
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    text = events.Tensors("completions/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| user: 2 \\| 3 | 5 | 1.0 | 0.5 |" in text
