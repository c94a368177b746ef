"""One run of any recipe, from its settings to its model on disk and on the hub."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TypeVar

from psigrad import extras
from psigrad.config import PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.methods import TrainingConfig
from psigrad.language import images
from psigrad.language.loading import model_object
from psigrad.language.loading.model_object import ModelObject
from psigrad.language.loading.model_source import check_exists
from psigrad.language.recipes.row_limits import check_images
from psigrad.optim import check_schedule
from psigrad.processes.parallel import launch
from psigrad.runs import machine
from psigrad.runs.result import Result

C = TypeVar("C", bound=TrainingConfig)
UNPLANNED = 8192
"""Tokens of a micro-batch if `micro_batch_tokens` is 0 (as many as fit) and the memory planner is not installed."""


def fit_memory(config: C) -> C:
    """Return the settings with automatic values, such as the size of micro-batches, chosen to fit the device's memory."""
    machine.check_device(config.run)  # a missing device has no memory to plan with
    if config.run.max_memory or (not config.micro_batch_tokens and extras.find("fit")):
        made: C = extras.load("fit").fit(config)
        return made
    return config if config.micro_batch_tokens else replace(config, micro_batch_tokens=UNPLANNED)


def run(config: TrainingConfig, given: ModelObject | None = None) -> Result:
    """Train by the method of the settings: an `SFTConfig`, for example, runs SFT. `given` is the user's model object, if any."""
    config = fit_memory(config)
    check_schedule(config.optim)
    check_images(config)
    speaks = config.hub.push_to_hub and launch.is_first_rank()
    if speaks:
        hub = extras.load("hub")
        hub.check(config.hub, str(config.run.output_dir))
    try:
        with contextlib.nullcontext() if given is None else given.restore_after():
            result = _run(config, given)
    finally:
        images.store_in(None)
    if given is not None and given.network is not None and given.model is None:  # the run had already finished
        model_object.load_weights(given.network, result.model)
    if speaks:
        hub.after_run(config.hub, result.folder)
    return result


def _run(config: TrainingConfig, given: ModelObject | None) -> Result:
    if given is None or given.network is None:
        check_exists(config.model, str(config.run.output_dir))
    if isinstance(config, SFTConfig):
        from psigrad.language.recipes import sft

        return sft.run(config, given)
    if isinstance(config, RewardConfig):
        from psigrad.language.recipes import reward

        return reward.run(config, given)
    if isinstance(config, PreferenceConfig):
        from psigrad.language.recipes import preference

        return preference.run(config, given)
    from psigrad.language.recipes import online

    return online.run(config, given)
