"""`psigrad plan METHOD`: the plan of a run, and the warning of a run that may not fit."""

from __future__ import annotations

import json
import sys

from psigrad.preflight.plan import show
from psigrad.preflight.plan.arithmetic import Config
from psigrad.preflight.plan.hardware import machine
from psigrad.preflight.plan.placements import smallest, splits
from psigrad.preflight.plan.predict import Plan, lengths_of, predict
from psigrad.preflight.settings import PlanConfig
from psigrad.runs import session


def run(config: Config, asked: PlanConfig) -> str:
    """The plan of the run that `config` describes, as text or as JSON."""
    device = session.device(config.run)
    found = machine(device, config.model.dtype, config.run.threads, asked.memory, asked.tflops)
    lengths, rows, source = lengths_of(config, asked.prompt_length, asked.completion_length)
    if asked.devices:
        found_splits = splits(config, lengths, found, asked.devices, asked.network * 1e9, rows)
        fewest = smallest(config, lengths, found)
        return json.dumps(show.placements(found_splits)) if asked.json else show.divisions(found_splits, source, fewest)
    plan = predict(config, lengths, found, dataset=rows, eight_bit=asked.eight_bit)
    return json.dumps(show.figures(plan)) if asked.json else show.table(plan, source)


def warning(config: Config) -> str:
    """One line for a run that may not fit this machine; empty where it fits or that is unknown.

    Lengths are the settings' bounds and guesses: no row is read, and nothing is asked of the network.
    """
    try:
        device = session.device(config.run)
        here = machine(device, config.model.dtype, measure=False)
        lengths, _, _ = lengths_of(config, read=False)
        if predict(config, lengths, here, quick=True).fits:  # at most what it takes: plain PyTorch keeps more than our kernels
            return ""
        made = predict(config, lengths, here)
        return "" if made.fits else _sentence(made)
    except ValueError:
        return ""  # wrong settings: the run itself refuses them, with a better sentence


def warn(config: Config) -> None:
    """That line on stderr."""
    if line := warning(config):
        print(f"psigrad: {line}", file=sys.stderr)


def _sentence(plan: Plan) -> str:
    way = next((name for name, other in plan.ways if other.fits), "")
    advice = f"try {way}" if way else "`psigrad plan` shows where it goes"
    return f"The run may need {show.size(plan.memory.peak)} of memory and there are {show.size(plan.machine.memory)}; {advice}."
