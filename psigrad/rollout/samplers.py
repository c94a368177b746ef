"""The samplers by name. One of your own is "module:Class" or "file.py:Class": a `Sampler` made from (model, settings)."""

from __future__ import annotations

from psigrad.config import Sampling
from psigrad.errors import UserError, nearest
from psigrad.importing import imported_callable
from psigrad.models.language_model import LanguageModel
from psigrad.rollout.embedded import EmbeddedSampler
from psigrad.rollout.types import Sampler

NAMES = ("embedded", "transformers", "vllm")


def make(sampling: Sampling, model: LanguageModel) -> Sampler:
    """The sampler that the settings ask for. Models that cannot run packed are sampled by transformers in place of ours.

    Raises `UserError` for an unknown name, and for what the machine or the model cannot do.
    """
    name = sampling.sampler
    if ":" in name:
        made = imported_callable(name, "sampler")(model, sampling)
        if not isinstance(made, Sampler):
            raise UserError(f"The sampler {name!r} made a {type(made).__name__}; expected a psigrad.rollout.types.Sampler.")
        return made
    if name not in NAMES:
        raise UserError(f"There is no sampler {name!r}; expected one of {', '.join(NAMES)} or module:Class{nearest(name, NAMES)}")
    if name == "vllm":
        from psigrad.rollout.vllm_backend import VLLMSampler

        return VLLMSampler(model, sampling.max_decode_batch, memory=sampling.vllm_memory)
    if name == "transformers" or model.why_padded:
        from psigrad.rollout.transformers_backend import TransformersSampler

        return TransformersSampler(model, sampling.max_decode_batch)
    if sampling.cuda_graphs and model.device.type != "cuda":
        raise UserError(f"sampling.cuda_graphs is for GPUs and the model is on {model.device}; leave it off.")
    return EmbeddedSampler(model, sampling.max_decode_batch, cuda_graphs=sampling.cuda_graphs)
