"""Opening the sampling engine of a model, or of the newest model of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from psigrad.config import Model, Run, Sampling
from psigrad.config.load import from_dict
from psigrad.language.loading import samplers
from psigrad.language.loading.load_model import load_model
from psigrad.runs import machine
from psigrad_serve.engine.engine import SamplingEngine


@contextlib.contextmanager
def opened_engine(
    path: str,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "auto",
    threads: int = 0,
    sampler: str = "embedded",
    max_batch: int = 64,
    chat_template_path: str = "",
    trust_remote_code: bool = False,
    vision: bool = False,
) -> Iterator[SamplingEngine]:
    """Open the sampling engine of a model, and close it after the block.

    `path` is a folder, a hub name, an adapter (which is merged), or a run: then the trained model is opened, or the one of the
    newest checkpoint. Raises `UserError` if the model can't be loaded.
    """
    run = from_dict(Run, {"device": device, "threads": threads}, "")
    machine.prepare_torch(run)
    named = {"path": path, "dtype": dtype, "chat_template_path": chat_template_path}
    settings = from_dict(Model, {**named, "adapter": "merge", "trust_remote_code": trust_remote_code, "vision": vision}, "")
    sampling = replace(from_dict(Sampling, {"sampler": sampler}, ""), max_decode_batch=max_batch)
    model = load_model(settings, run, None)
    made = samplers.make(sampling, model)
    engine = SamplingEngine(model, max_batch, made)
    try:
        yield engine
    finally:
        engine.close()
        made.close()
