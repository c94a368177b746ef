"""The samplers by name. A custom sampler is named "module:Class" or "file.py:Class" and is constructed from (model, settings)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from psigrad import extras, redaction
from psigrad.config import Sampling
from psigrad.errors import UserError, kind_of, nearest
from psigrad.importing import imported_callable
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import stop_token_ids
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler, why_not_embedded
from psigrad.language.rollout.types import Sampler, SamplingParams

NAMES = ("embedded", "transformers", "vllm")


def make(
    sampling: Sampling,
    model: LanguageModel,
    log: Callable[..., None] | None = None,
    longest: int = 0,
    whole: Callable[[], LanguageModel] | None = None,
) -> Sampler:
    """Return the sampler that the settings name. If psigrad's sampler does not support the model, return that of transformers.

    `longest` is vLLM's limit on the tokens of a prompt plus its completion; 0 means the model's limit. `whole` returns a full
    copy of a sharded model. `log(kind, text, **fields)` receives messages; without it they are printed. Close the sampler
    after use.
    """
    name = sampling.sampler
    if ":" in name:
        sampler = imported_callable(name, "sampler")(model, sampling)
        if not isinstance(sampler, Sampler):
            raise UserError(f"sampler={name!r} gives {kind_of(sampler)}; expected a psigrad.language.rollout.types.Sampler.")
        return sampler
    if name not in NAMES:
        raise UserError(f"There is no sampler {name!r}; expected one of {', '.join(NAMES)} or module:Class{nearest(name, NAMES)}")
    if name != "vllm" and (sampling.vllm_sleep or sampling.tensor_parallel_size > 1):
        raise UserError(
            f"sampling.vllm_sleep and sampling.tensor_parallel_size are settings of vLLM, but the sampler is {name}; "
            "remove them, or set sampler=vllm."
        )
    if name == "vllm":
        vllm_sampler: Sampler = extras.load("vllm").VLLMSampler(
            model,
            sampling.max_decode_batch,
            memory=sampling.vllm_memory,
            tensor_parallel_size=sampling.tensor_parallel_size,
            device=sampling.vllm_device,
            sleep=sampling.vllm_sleep,
            longest=longest,
            readback=sampling.vllm_readback,
            log=log,
            whole=whole,
        )
        return vllm_sampler
    reason = "" if name == "transformers" or model.why_padded else why_not_embedded(model)
    if name == "transformers" or model.why_padded or reason:
        from psigrad.language.rollout.samplers.transformers_backend import TransformersSampler

        if reason:
            (log or redaction.log)("sampled_by_transformers", f"transformers samples in place of psigrad: {reason}.")
        return TransformersSampler(model, sampling.max_decode_batch, exact=not reason)
    return EmbeddedSampler(model, sampling.max_decode_batch, cuda_graphs=sampling.cuda_graphs)


def check_sampling(sampling: Sampling) -> None:
    """Raise `ValueError` for sampling settings out of range, before anything is loaded."""
    SamplingParams(sampling.max_completion_length, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def sampling_params(
    sampling: Sampling, model: LanguageModel | None, rows: Iterable[Row], temperature: float | None = None
) -> SamplingParams:
    """Return the settings as `SamplingParams`, with the chat template's stop tokens if `rows` are conversations.

    `temperature` replaces the setting's value, for example in evaluations.
    """
    conversations = islice((row for row in rows if not isinstance(row.prompt, str)), 1000)
    conversation = max(conversations, key=lambda row: bool(row.columns.get("tools")), default=None)
    # Chat models do not always end a turn with the EOS. A server (`model` is None) adds these stop tokens itself.
    chat = stop_token_ids(model.tokenizer, conversation) if conversation is not None and model is not None else ()
    return SamplingParams(
        max_tokens=sampling.max_completion_length,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=(*sampling.stop_token_ids, *chat),
    )
