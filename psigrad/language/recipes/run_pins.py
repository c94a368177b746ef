"""The pins of a language model's run: values that must be the same when it resumes, such as hashes of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from psigrad.compiled import kernels, triton_kernels
from psigrad.config import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.algorithms import resolve_loss, resolve_online
from psigrad.importing import imported_callable
from psigrad.language import images
from psigrad.language.data.chat.rendering import day_of, reads_clock
from psigrad.language.data.row_cache import PreparedRows
from psigrad.language.data.sources import parse_mixture
from psigrad.language.episodes import environments
from psigrad.language.loading.model_source import resolve_path
from psigrad.language.recipes.conversation import list_tools
from psigrad.language.recipes.row_encoding import sum_parts
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.records import pins
from psigrad.runs.machine import device, pins_of

Config = SFTConfig | OnlineConfig | RewardConfig | PreferenceConfig


def collect_pins(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    prepared: PreparedRows[Any],
    judges: Sequence[RewardSetup | None] = (),
) -> dict[str, str]:
    """Return the pins of a run: values, under the names of `pins.PINS`, that must be the same when the run resumes.

    `judges` are the reward and the held-out metric.
    """
    content = pins.hash_parts({"tokenizer": tokenizer.get_vocab(), "chat_template": tokenizer.chat_template})
    if (image_format := images.image_format_of(tokenizer)) is not None:
        content["processor"] = str(getattr(image_format, "version", ""))
    rows = prepared.sums or sum_parts(prepared)
    day = {"date": day_of(tokenizer).isoformat()} if reads_clock(tokenizer) else {}
    # On a GPU, do not call `kernels()`: in a checkout it would compile the CPU's kernels for a minute.
    used = kernels() if device(config.run) == "cpu" else triton_kernels()
    return {**rows, **content, **day, **_models(config), **_code(config, judges), **pins_of(config.run, used)}


def static_pins(config: Config, judges: Sequence[RewardSetup | None] = ()) -> dict[str, str]:
    """Return the pins (see `collect_pins`) that need neither rows nor model. In a finished run, only these are checked."""
    data = {name: _data(getattr(config.data, name)) for name in ("dataset", "eval_dataset")}
    return {**{name: found for name, found in data.items() if found}, **_models(config), **_code(config, judges)}


def _data(given: Any) -> str:
    """Return the hashes of the files or rows in `given`, a dataset setting. A dataset that is not on this machine has none."""
    if isinstance(given, list | tuple) and not all(isinstance(one, str) for one in given):
        return pins.hash_parts({"rows": given})["rows"]
    names = [share.dataset for share in parse_mixture(given) if isinstance(share.dataset, str) and share.dataset]
    return " ".join(filter(None, map(pins.identify_data, names)))


def _models(config: Config) -> dict[str, str]:
    named: dict[str, list[str]] = {}
    if isinstance(config, PreferenceConfig | OnlineConfig):
        named["reference"] = [config.reference]
    if isinstance(config, OnlineConfig):
        named["critic"] = [config.critic]
    if not isinstance(config, RewardConfig):
        named["reward_model"] = list(config.reward_model)
    found = {name: [pins.identify_model(resolve_path(path)) for path in paths if path] for name, paths in named.items()}
    found["model"] = [pins.identify_model(resolve_path(config.model.path), config.model.revision)]
    return {name: " ".join(filter(None, ids)) for name, ids in found.items() if any(ids)}


def _code(config: Config, judges: Sequence[RewardSetup | None]) -> dict[str, str]:
    users: dict[str, list[object]] = {"reward": [one for judge in judges if judge is not None for one in judge.functions]}
    if isinstance(config, OnlineConfig):
        own = config.environment and not environments.library_of(config.environment)
        users["environment"] = [environments.resolve(config.environment)] if own else []
        users["agent"] = [imported_callable(config.agent, "agent")] if isinstance(config.agent, str) and config.agent else []
        users["agent"] += [config.agent] if callable(config.agent) else []
        users["tools"] = list(list_tools(config))
        algorithm = resolve_online(config.algorithm)
        users["algorithm"] = [algorithm, *(getattr(algorithm, f.name) for f in fields(algorithm))]
    if isinstance(config, PreferenceConfig):
        users["algorithm"] = [resolve_loss(config.loss)]
    if not isinstance(config, RewardConfig) and ":" in config.sampling.sampler:
        users["sampler"] = [imported_callable(config.sampling.sampler, "sampler")]
    found = {name: pins.hash_code(*objects) for name, objects in users.items()}
    return {name: digest for name, digest in found.items() if digest is not None}
