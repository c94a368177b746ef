"""A callback that finds a run's best evaluation, saves a checkpoint of its weights, and can end training early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from psigrad.config import Evaluation
from psigrad.errors import UserError, nearest
from psigrad.records.rows import comparison_figure
from psigrad.runs.callbacks import Callback, Control


class Best(Callback):
    """A callback that tracks the best evaluation. It requests a checkpoint of the best weights, and can end the run early."""

    def __init__(self, settings: Evaluation) -> None:
        self.settings, self.figure = settings, ""
        self.step, self.value, self.waited = 0, math.nan, 0

    @staticmethod
    def is_needed(settings: Any) -> bool:
        """Return True if the settings of a run need this callback."""
        return bool(getattr(settings, "load_best_model_at_end", False) or getattr(settings, "early_stopping_patience", 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the best evaluation's step and value, the metric's name, and the number of evaluations without improvement."""
        return {"step": self.step, "value": self.value if self.step else None, "waited": self.waited, "figure": self.figure}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.step, self.waited, self.figure = state["step"], state["waited"], state.get("figure", "")
        self.value = math.nan if state["value"] is None else state["value"]

    def on_evaluate(self, args: Any, state: Any, control: Control, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Compare the evaluation with the best one. The evaluation before the first step is never the best."""
        value, greater = self._figure(metrics, state.step)
        if state.step == 0:
            return
        gain = (value - self.value) * (1 if greater else -1) if self.step or math.isnan(value) else math.inf
        # As in transformers, the threshold does not count for the best evaluation. NaN is no improvement.
        self.waited = 0 if gain > self.settings.early_stopping_threshold else self.waited + 1
        if gain > 0:
            self.step, self.value = state.step, value
            control.should_save = control.should_save or self.settings.load_best_model_at_end
        if self.settings.early_stopping_patience and self.waited >= self.settings.early_stopping_patience:
            control.should_training_stop = True

    def _figure(self, metrics: Mapping[str, Any], step: int) -> tuple[float, bool]:
        """Return (value, True if greater is better) of the metric that ranks evaluations; the value is NaN if it is missing."""
        name = self.figure or self.settings.metric_for_best_model
        found = comparison_figure(metrics, name, self.settings.greater_is_better)
        known = [key.removeprefix("eval/") for key in metrics if key.startswith("eval/")]
        if found is None and step and not self.figure and (name or not known):
            near = nearest(name.removeprefix("eval_"), known) or f"; it has {', '.join(known) or 'none'}."
            raise UserError(f"metric_for_best_model is {name!r}, but this run's evaluation has no such metric{near}")
        self.figure, value, greater = found or (self.figure, math.nan, True)
        return value, greater
