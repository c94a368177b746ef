"""Decoding steps that are recorded on a CPU."""

from __future__ import annotations

from psigrad.language.rollout.samplers import embedded
from psigrad.language.rollout.samplers.cuda_graph import CudaGraphDecoding
from psigrad.language.rollout.types import SamplingParams

PARAMS = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(40)))  # some end early


def again(run):
    """Replays by running, after a first run of which nothing may be left."""
    run()
    return run


def watch(monkeypatch, recorder, most=256):
    """Record on the CPU too, in at most so many slots; returns the shapes that are recorded, one list for each set of
    recordings.
    """
    shapes = []

    class Watched(CudaGraphDecoding):
        def __init__(self, *given):
            shapes.append([])
            super().__init__(*given, record=recorder)

        def _step(self, params, *shape):
            if shape not in shapes[-1]:
                shapes[-1].append(shape)
            super()._step(params, *shape)

    monkeypatch.setattr(embedded, "CudaGraphDecoding", Watched)
    monkeypatch.setattr(embedded, "fitting", lambda model, room: room._replace(slots=min(room.slots, most)))
    return shapes


def texts(groups):
    return [[(c.ids, c.finish_reason) for c in group] for group in groups]
