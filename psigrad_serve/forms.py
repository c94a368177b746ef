"""The fields of request bodies: which are read, which have no effect here, and which are rejected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from psigrad.errors import nearest
from psigrad.language.episodes.tool_calls import finite
from psigrad_serve.api_errors import ApiError

F = TypeVar("F", bound="SamplingForm")


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _divides(temperature: float) -> float:
    if 0 < temperature < LEAST:
        raise ValueError(f"expected 0 or at least {LEAST:g}")
    return temperature


LEAST = 1e-38
"""The least temperature above 0. Logits divided by a smaller one overflow float32."""
Whole = Annotated[int, BeforeValidator(_integral)]
"""An integer. A float with an integral value is accepted, since some clients write 3.0."""
Count = Annotated[Whole, Field(ge=1)]
_NAME = re.compile(r"(?!str$|list$)[A-Za-z_]+")
MOST_CHOICES, MOST_TOP, MOST_STOPS = 128, 20, 16
IDLE = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "verbosity", "reasoning_effort", "reasoning", "include", "cache_control", "betas", "speed"),
        *("thinking", "context_management", "compaction", "inference_geo", "diagnostics", "user_profile_id", "workspace_id"),
        *("billing_policy", "fallbacks", "fallback_credit_token", "access_programs", "background_options", "moderation"),
        *("stream_options", "max_tool_calls", "prediction"),
    }
)
"""Fields that are accepted but have no effect here: the chat template decides about thinking, and no history is edited."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "background": (False,),
    "truncation": ("disabled",),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "mcp_servers": ([],),
    "extra_body": ({},),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("min_tokens", "prompt_logprobs"), (0,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "early_stopping", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("continue_final_message", "echo"), (False,)),
    **dict.fromkeys(("stop", "stop_sequences", "tools"), ([],)),
}
"""Fields that would affect sampling but are not supported -> their values without effect, which are accepted."""


class SamplingForm(BaseModel):
    """The fields common to all APIs.

    `top_k`, `min_p`, `stop_token_ids` and `chat_template_kwargs` extend OpenAI's fields, as in vLLM. `return_token_ids` adds the
    token ids to the answer.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_divides)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default=[])
    chat_template_kwargs: dict[str, Any] = Field(default={})
    return_token_ids: bool = False
    stream: bool = False

    def asked(self, max_tokens: int | None) -> dict[str, Any]:
        """Return the sampling settings of the request, for the argument `asked` of `Served.call`."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids")
        return {name: getattr(self, name) for name in names} | {"max_tokens": max_tokens or 0}


class PenaltyForm(SamplingForm):
    """The fields of OpenAI's two completion APIs that penalise or favour tokens."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] = Field(default={})

    @property
    def penalties(self) -> dict[str, Any]:
        """The penalties, as the arguments of `Wish`."""
        bias = {int(token): value for token, value in self.logit_bias.items()}
        return {"frequency": self.frequency_penalty, "presence": self.presence_penalty, "bias": bias}


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object."""
    try:
        found = json.loads(body, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON ({error}).", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(f"The body is a JSON {type(found).__name__}; expected a JSON object.", code="invalid_json")
    return found


def read_form(form: type[F], body: Mapping[str, Any]) -> F:
    """Return the body of a request as an object of class `form`.

    Null counts as absent. Raises `ApiError` with the invalid field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, values in NEUTRAL.items():
        if name in given and name not in form.model_fields and given[name] not in values:
            raise ApiError(
                f"{name} is {json.dumps(given[name])[:80]}, which this server does not support; remove it.",
                param=name, code="unsupported_parameter",
            )  # fmt: skip
    kept = {name: value for name, value in given.items() if name in form.model_fields or name not in {*IDLE, *NEUTRAL}}
    try:
        return form.model_validate(kept)
    except ValidationError as error:
        # For a field of several types, report the error of the type that was meant: the one whose error is not a wrong type.
        first = next((one for one in error.errors() if not one["type"].endswith("_type")), error.errors()[0])
        place = _place(first["loc"])
        if first["type"] == "extra_forbidden":
            hint = nearest(place, form.model_fields) or "."
            raise ApiError(f"Unrecognized request argument supplied: {place}{hint}", param=place) from None
        if first["type"] == "missing":
            raise ApiError(f"Missing required parameter: {place!r}.", param=place, code="missing_required_parameter") from None
        raise ApiError(f"Invalid value for {place!r}: {first['msg']}.", param=place, code="invalid_value") from None


def _place(location: Iterable[int | str]) -> str:
    """Format a location in the body as the APIs do: messages[0].content."""
    text = ""
    for part in location:
        if isinstance(part, str) and not _NAME.fullmatch(part):  # the type of a union
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def read_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings. Raises `ApiError` for too many, and for an empty one, which would end every completion at once."""
    stops = tuple([stop] if isinstance(stop, str) else stop or ())
    if len(stops) > MOST_STOPS or not all(stops):
        raise ApiError(f"stop is invalid; expected up to {MOST_STOPS} non-empty strings.", param="stop", code="invalid_value")
    return stops


def offers(choice: Any) -> bool:
    """Return True unless the request's `tool_choice` forbids all tools."""
    return choice not in ("none", {"type": "none"})
