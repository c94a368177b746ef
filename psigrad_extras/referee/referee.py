"""The referee's command: it runs two implementations on the same rows and tokens, and finds the first tensor that differs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from psigrad_extras.referee import recording, trl_side
from psigrad_extras.referee.first_difference import HALF, TOLERANCE, TensorResult, compare


def run(paths: Sequence[str], script: str, python: str, steps: int, tolerance: float) -> tuple[bool, list[str]]:
    """Run both sides for `steps` steps. Return (True if they differ by more than rounding or `tolerance`, the report's lines).

    With a `script`, one side is TRL, which runs it in the interpreter `python`. The other is psigrad, with the settings file in
    `paths` or the settings to which the script is converted. Without a script, `paths` are two settings files of psigrad. Raises
    `UserError` on invalid settings or data.
    """
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="psigrad-referee-") as made:
        folder, settings = Path(made), [trl_side.read_settings(path) for path in paths]
        if script:
            about, theirs = trl_side.run(script, python, steps, folder)
            if not settings:
                converted, notes = trl_side.settings(about, folder)
                settings = [converted]
            names, half = ("psigrad", f"TRL {about['version']}"), about["half"]
            ours, _ = recording.record(settings[0], folder, steps, theirs, about["rows"])
        else:
            names, half = (paths[0], paths[1]) if paths[0] != paths[1] else ("the first", "the second"), True
            ours, rows = recording.record(settings[0], folder, steps)
            theirs, _ = recording.record(settings[1], folder, steps, ours, rows)
        half = half and all(one.model.dtype != "float32" for one in settings)
        found: list[TensorResult] = []
        for one in compare(ours, theirs, names, tolerance or (HALF if half else TOLERANCE)):
            found.append(one)
            if one.parts:
                break
    return bool(found[-1].parts), [*notes, *_report(found, names)]


def _report(found: Sequence[TensorResult], names: tuple[str, str]) -> Iterator[str]:
    """Yield the lines of the report: each tensor with its difference, then the first one in which the sides differ."""
    place, last = "", found[-1]
    for one in found:
        if one.place != place:
            place = one.place
            yield place
        state = "DIFFERS" if one.parts else "equal" if not one.difference else f"equal to {one.difference:.1e}"
        yield f"  {one.name:<24}{state}"
    if not last.parts:
        yield f"\n{names[0]} and {names[1]} agree in all tensors up to step {last.step}."
        return
    yield f"\nThe first tensor in which they differ: {last.name}, in {last.place}."
    yield from (f"  {sentence}" for sentence in last.parts)
