"""Callbacks: user objects that a run calls at each step, evaluation and checkpoint, and that can change settings or stop the run.

Subclasses of transformers' `TrainerCallback` work too, but are called only for the events in `EVENTS`.
"""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from psigrad.config.fields import LIVE, find_marked, settings_of
from psigrad.config.load import reword
from psigrad.config.nested import flat_names
from psigrad.errors import UserError, nearest
from psigrad.importing import imported_callable
from psigrad.paths import kept_folder
from psigrad.processes.parallel.world import ALONE, World
from psigrad.records.row_lines import read_steps
from psigrad.records.rows import comparison_figure, headline, merge_by_step
from psigrad.records.run_folder import RunFolder
from psigrad.step import RunState

S = TypeVar("S", bound=RunState)
EVENTS = ("on_init_end", "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
# The name of the held-out figure that measures the run's progress, among the metrics of `on_evaluate`.
HEADLINE = "headline"
# Sections of the settings in which a callback can change every number.
PARTS = ("algorithm", "loss")


class Callback:
    """A base class for callbacks. It has a method for each event; override the ones you need.

    `args` has the run's settings, such as `args.learning_rate`. `kwargs` has `model` and `processing_class`. `state` has `step`,
    `max_steps`, `metrics` (the newest figures), `history` (all rows of metrics.jsonl), `best_metric` and `best_global_step`.
    To change the run, set `control.should_training_stop`, `should_evaluate` or `should_save`, or call `control.change`.

    To keep a callback's state when the run is resumed, define `state_dict()`, which returns a JSON value, and
    `load_state_dict(value)`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Control, **kwargs: Any) -> None:
        """Handle the start of training, before the first step. A resumed run sends this event again."""

    def on_step_begin(self, args: Any, state: Any, control: Control, **kwargs: Any) -> None:
        """Handle the start of each step."""

    def on_step_end(self, args: Any, state: Any, control: Control, **kwargs: Any) -> None:
        """Handle a step's end. To skip a due evaluation or save, set `control.should_evaluate` or `should_save` to False."""

    def on_log(self, args: Any, state: Any, control: Control, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Handle each row of metrics, passed as `logs`."""

    def on_evaluate(self, args: Any, state: Any, control: Control, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Handle the end of each evaluation. `metrics` has each figure under two keys: "eval/…" and transformers' "eval_…"."""

    def on_save(self, args: Any, state: Any, control: Control, **kwargs: Any) -> None:
        """Handle each saved checkpoint. `kwargs["checkpoint"]` is its folder."""

    def on_train_end(self, args: Any, state: Any, control: Control, **kwargs: Any) -> None:
        """Handle the end of training, before the final model is written."""


@dataclass
class Control:
    """The requests of callbacks, as in transformers' `TrainerControl`. `should_epoch_stop` and `should_log` have no effect."""

    should_training_stop: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    should_epoch_stop: bool = False
    should_log: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    """The settings that callbacks have changed during the current event, by dotted name."""
    check: Callable[[str, Any], tuple[str, Any]] = field(default=lambda name, value: (name, value), repr=False)

    def change(self, **settings: Any) -> None:
        """Change settings from the next step on. In `on_step_begin`, this is the step that begins.

        Name a setting by its full dotted name or by the last part: `change(**{"algorithm.kl.coefficient": 0.1})`,
        `change(learning_rate=1e-6)`. Raise `UserError` for a setting that cannot be changed during a run.
        """
        self.changes |= dict(self.check(name, value) for name, value in settings.items())


class Arguments:
    """The argument `args` of callbacks: the run's settings, and the fields that transformers' own callbacks read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._names = dict(flat_names(type(config)))
        self._others: dict[str, Any] = {}
        evaluates = any(getattr(self, name) != 0 for name in ("eval_prompts", "eval_episodes") if name in self._names)
        given = getattr(config, "evaluation", None)
        self.decides = (given.metric_for_best_model, given.greater_is_better) if given else ("", None)
        self.greater_is_better = True
        self._others |= {
            "eval_strategy": "steps" if evaluates else "no",
            "save_strategy": "steps",
            "logging_strategy": "steps",
            "metric_for_best_model": (given.metric_for_best_model if given else "") or HEADLINE if evaluates else None,
            **({} if "load_best_model_at_end" in self._names else {"load_best_model_at_end": False}),
            "gradient_accumulation_steps": 1,
            "run_name": config.run.output_dir,
            "disable_tqdm": not config.run.progress,
        }

    def __getattr__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        if name not in self._names:
            raise AttributeError(f"psigrad has no setting {name!r}{nearest(name, self._names) or '.'}")
        value = self._config
        for part in self._names[name].split("."):
            value = getattr(value, part)
        return value


@dataclass
class Callbacks:
    """The callbacks of a run. Rank 0 calls them at each event of the run, and all ranks carry out their requests."""

    callbacks: Sequence[Any] = ()
    config: Any = None
    folder: RunFolder | None = None
    world: World = ALONE

    def __post_init__(self) -> None:
        self.control = Control(check=self._check)
        self.trial: Callable[[Mapping[str, Any]], Any] = dict
        """A function of changed settings. It raises an error if the run cannot be changed to them."""
        self.args: Any = Arguments(self.config) if self.callbacks else None
        self.current: list[str] = []
        self.changed_values: dict[str, Any] = {}
        self.visible_state: Any = SimpleNamespace(
            step=0, global_step=0, max_steps=0, epoch=0.0, metrics={}, history=[], log_history=[], best_metric=None,
            best_global_step=None, best_model_checkpoint=None, num_input_tokens_seen=0, num_train_epochs=0,
            is_world_process_zero=True, is_local_process_zero=True, is_hyper_param_search=False,
        )  # fmt: skip
        self.model: Any = None
        self.tokenizer: Any = None
        self._rows: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def set_model(self, model: Any, tokenizer: Any = None) -> None:
        """Set the model and tokenizer that callbacks receive."""
        self.model, self.tokenizer = model, tokenizer

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Store a row of metrics. The callbacks receive it at the next event."""
        if self.callbacks:
            self._rows.append(dict(row))

    def begin(self, state: S, total: int) -> S:
        """Restore the callbacks' states, then call `on_init_end` and `on_train_begin`. `total` is the run's number of steps."""
        if not self.callbacks:
            return state
        self.visible_state.max_steps = total
        if self.folder is not None and self.world.rank == 0:
            self._take_history(list(read_steps(self.folder.path / "metrics.jsonl")))
        self.changed_values = dict(state.changes)

        def restore() -> None:
            for name, callback in self._name_each():
                self.current = [name, "load_state_dict"]
                if name in state.callbacks:
                    load(callback, state.callbacks[name])

        self._on_rank_0(restore, state)
        return self._call_all("on_train_begin", self._call_all("on_init_end", state))

    def step_begin(self, state: S) -> S:
        """Call `on_step_begin` of all callbacks. Return `state` with the changes that they requested."""
        return self._call_all("on_step_begin", state) if self.callbacks else state

    def step_end(self, state: S, evaluate: bool, save: bool) -> S:
        """Call `on_step_end` of all callbacks. Return `state` with the changes that they requested.

        `evaluate` and `save` are True if an evaluation or a checkpoint is due. Callbacks can change both (`Control`).
        """
        self.control.should_evaluate, self.control.should_save = evaluate, save
        return self._call_all("on_step_end", state) if self.callbacks else state

    def after_evaluation(self, state: S) -> S:
        """Call `on_evaluate` of all callbacks with the new figures. Return `state` with the changes that they requested."""
        if not self.callbacks:
            return state
        metrics = {k: v for row in self._rows for k, v in row.items() if k.startswith("eval/")}
        metrics |= {name.replace("eval/", "eval_", 1): value for name, value in metrics.items()}
        name = (self.args.metric_for_best_model or HEADLINE).removeprefix("eval_")
        decides, found = comparison_figure(metrics, *self.args.decides), headline(metrics)
        if found is not None and name != HEADLINE:
            metrics[f"eval_{HEADLINE}"] = found.value
        if decides is not None:
            _, metrics[f"eval_{name}"], self.args.greater_is_better = decides
        state = self._call_all("on_evaluate", state, metrics=metrics)
        self._keep_best(metrics, state.step)
        return state

    def after_save(self, state: S, checkpoint: Any) -> S:
        """Call `on_save` of all callbacks with the folder `checkpoint`. Return `state` with the changes that they requested."""
        return self._call_all("on_save", state, checkpoint=checkpoint) if self.callbacks else state

    def end(self, state: S) -> S:
        """Call `on_train_end` of all callbacks. Return `state` with the changes that they requested."""
        return self._call_all("on_train_end", state) if self.callbacks else state

    def collect_memory(self, state: S) -> S:
        """Return `state` with the callbacks' own states added, for a checkpoint. Ranks other than 0 return it unchanged."""
        if not self.callbacks or self.world.rank:
            return state
        held: dict[str, Any] = {}
        for name, callback in self._name_each():
            try:
                if (kept := collect_memory(callback)) is not None:
                    held[name] = json.loads(json.dumps(kept))
            except Exception as error:
                raise CallbackError(_describe(error, (name, "state_dict"))) from error
        return replace(state, callbacks=held)

    def _name_each(self) -> list[tuple[str, Any]]:
        """Return (a unique name, the callback) for each callback."""
        names = [type(callback).__name__ for callback in self.callbacks]
        return [
            (name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}", callback)
            for i, (name, callback) in enumerate(zip(names, self.callbacks, strict=True))
        ]

    def _check(self, name: str, value: Any) -> tuple[str, Any]:
        change = check_change(self.config, name, value)
        self.trial(dict([change]))
        return change

    def _value_before(self, setting: str) -> Any:
        """Return a setting's value before a change; None if unknown."""
        if setting in self.changed_values or setting.partition(".")[0] in PARTS:
            return self.changed_values.get(setting)
        return getattr(self.args, setting.rpartition(".")[2])

    def _keep_best(self, row: Mapping[str, Any], step: int) -> None:
        best = self.visible_state.best_metric
        if (found := comparison_figure(row, *self.args.decides)) is not None:
            name, value, self.args.greater_is_better = found
            self.args.decides = name, self.args.decides[1]  # the same figure in every evaluation
            if value == value and (best is None or (value > best if self.args.greater_is_better else value < best)):
                self.visible_state.best_metric, self.visible_state.best_global_step = value, step

    def _take_history(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Restore the history of a resumed run: all rows of metrics, and the best evaluation."""
        self.visible_state.history = self.visible_state.log_history = list(history)
        for step, row in merge_by_step(history).items():  # an evaluation may have several rows
            self._keep_best(row, step)

    def _call_all(self, event: str, state: S, **more: Any) -> S:
        """Call `event` of all callbacks with `more`, then `on_log` for each new row. Return `state`, updated as requested."""

        def call() -> None:
            visible = self.visible_state
            visible.step = visible.global_step = state.step
            visible.num_input_tokens_seen = state.tokens
            rows, self._rows = self._rows, []
            for row in rows:
                visible.history.append(row)
                visible.epoch = row.get("epoch", visible.epoch)
                visible.metrics = row if event != "on_evaluate" else {**visible.metrics, **row}
            for name, callback in self._name_each():
                self._call(name, callback, event, state.step, **more)
            for row in rows:
                for name, callback in self._name_each():
                    self._call(name, callback, "on_log", state.step, logs=dict(row))

        return self._on_rank_0(call, state)

    def _call(self, name: str, callback: Any, event: str, step: int, **more: Any) -> None:
        method = getattr(callback, event, None)
        if method is None:
            return
        before = dict(self.control.changes), self.control.should_training_stop
        self.current = [name, event]
        with kept_folder():
            method(self.args, self.visible_state, self.control, model=self.model, processing_class=self.tokenizer, **more)
        for setting, value in self.control.changes.items():
            if self.folder is not None and before[0].get(setting) != value:
                self.folder.event("changed", step=step, callback=name, changes={setting: [self._value_before(setting), value]})
                self.changed_values[setting] = value
        if self.control.should_training_stop and not before[1] and self.folder is not None:
            self.folder.event("stop_asked", step=step, callback=name)

    def _on_rank_0(self, work: Callable[[], None], state: S) -> S:
        """Run `work` on rank 0. If it fails, all ranks raise `CallbackError`. Return `state`, updated as callbacks requested."""
        failure = ""
        if self.world.rank == 0:
            try:
                work()
            except Exception as error:
                failure = _describe(error, self.current)
        else:
            self._rows = []
        c = self.control
        asked = (failure, c.should_training_stop, c.should_evaluate, c.should_save, c.changes)
        failure, c.should_training_stop, c.should_evaluate, c.should_save, changes = self.world.broadcast(asked)
        if failure:
            raise CallbackError(failure)
        c.changes = {}
        if not (changes or c.should_training_stop):
            return state
        return replace(state, changes={**state.changes, **changes}, ended=state.ended or c.should_training_stop)


def check_change(config: Any, name: str, value: Any) -> tuple[str, Any]:
    """Return (dotted name, checked value). Raise `UserError` if callbacks cannot change the setting or the value is invalid."""
    leaves = dict(flat_names(type(config)))
    dotted = leaves.get(name, name)
    if dotted.partition(".")[0] in PARTS and "." in dotted and hasattr(config, dotted.partition(".")[0]):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{dotted} cannot be changed to {value!r}; expected a number.")
        return dotted, value
    known = find_marked(type(config), LIVE)
    if dotted not in known:
        parts = " and ".join(f"numbers in {part}" for part in PARTS if hasattr(config, part))
        raise UserError(
            f"{name} cannot be changed during a run; a callback can change {', '.join(known)}{', ' if parts else ''}{parts}"
            f"{nearest(name, [*known, *(own.rpartition('.')[2] for own in known)]) or '.'}"
        )
    if dotted.startswith("sampling.") and getattr(config, "lag", False):
        raise UserError(f"{name} cannot be changed with lag={config.lag}, since completions are sampled in advance; set lag=0.")
    try:
        return dotted, TypeAdapter(settings_of(type(config))[dotted].annotated).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{name} cannot be changed to {value!r}; {reword(error.errors()[0]['msg'])}.") from error


class CallbackError(UserError):
    """Raised on all ranks if a callback raises an error."""


def _describe(error: Exception, asked: Sequence[str]) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parents[1])]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    name, event = asked
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return (
        f"The callback {name} raised in {event}{place}: {kind}{str(error).rstrip('.')}. Fix or remove the callback, and repeat "
        "the command to resume the run."
    )


def collect_memory(callback: Any) -> Any:
    """Return a callback's state from `state_dict()`, or from transformers' `state()`; None if it has neither method."""
    if hasattr(callback, "state_dict"):
        return callback.state_dict()
    state = getattr(callback, "state", None)
    return state()["attributes"] if callable(state) else None


def load(callback: Any, state: Any) -> None:
    """Restore a callback's `state`, the value that `collect_memory(callback)` returned."""
    if hasattr(callback, "load_state_dict"):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def resolve(given: Any) -> Any:
    """Return the callback that `given` describes: an object, a class, "module:Class", or {"callback": …, parameter: value}.

    Raise `UserError` if the callback cannot be created, or handles no event of `EVENTS`.
    """
    parameters: dict[str, Any] = {}
    found = given
    if isinstance(found, Mapping):
        parameters = {name: value for name, value in found.items() if name != "callback"}
        if "callback" not in found:
            raise UserError(
                f"The callback {dict(found)!r} has no key 'callback'; write it as {{callback: module:Class, parameter: value}}."
            )
        found = found["callback"]
    if isinstance(found, str):
        if ":" not in found:
            raise UserError(f"The callback {found!r} is not the name of a class; write module:Class or file.py:Class.")
        found = imported_callable(found, "callback")
    if inspect.isclass(found) or inspect.isfunction(found):
        try:
            found = found(**parameters)
        except TypeError as error:
            raise UserError(f"The callback {given!r} cannot be created: {error}.") from error
    if not any(hasattr(found, event) for event in EVENTS):
        raise UserError(f"The callback {given!r} has none of the methods {', '.join(EVENTS[1:])}; define at least one.")
    return found


def never_called(callback: Any) -> list[str]:
    """Return the names of transformers' events that a callback handles but psigrad never sends."""
    bases = [base for base in type(callback).__mro__ if base.__module__ not in ("transformers.trainer_callback", __name__)]
    return sorted({name for base in bases for name in vars(base) if name.startswith("on_")} - set(EVENTS))
