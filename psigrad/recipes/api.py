"""The Python front door: `psigrad.train` and `psigrad.evaluate`, with the settings of the command line as keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from psigrad.config import EvalConfig, OnlineConfig, Reward, SFTConfig
from psigrad.objective import PolicyGradient
from psigrad.recipes.load import load, resolve_names

Dataset = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


def train(
    method: str | PolicyGradient | Mapping[str, Any],
    *,
    model: str | os.PathLike[str],
    dataset: Dataset,
    reward: Reward | Iterable[Reward] = (),
    **settings: Any,
) -> Any:
    """Train `model` on `dataset` and return the `Result` (folder, model path, figures before and after).

    `method` is "sft", a preset of the catalog ("grpo", "rloo", …), a mapping that changes a preset's parts, or a
    `PolicyGradient`. `dataset` is a file, folder or hub name, or rows. `settings` are those of the command line, by leaf name
    (learning_rate=1e-5) or dotted name (**{"optim.learning_rate": 1e-5}). Raises `UserError` on a mistake.

        psigrad.train("grpo", model="Qwen/Qwen3-0.6B", dataset="prompts.jsonl", reward=my_reward, max_steps=100)
    """
    from psigrad.recipes import online, sft

    cls = SFTConfig if method == "sft" else OnlineConfig
    given = {"model.path": model, "data.dataset": _rows(dataset), "reward": _several(reward), **resolve_names(cls, settings)}
    if method == "sft":
        return sft.run(load(SFTConfig, flags=given))
    return online.run(load(OnlineConfig, flags={"algorithm": method, **given}))


def evaluate(
    *, model: str | os.PathLike[str], dataset: Dataset, reward: Reward | Iterable[Reward], **settings: Any
) -> dict[str, Any]:
    """Held-out figures of `model` on the prompts of `dataset` by `reward`: the mean with its interval, pass@k, lengths."""
    from psigrad.recipes import evaluate as recipe

    given = {
        "model.path": model,
        "data.dataset": _rows(dataset),
        "reward": _several(reward),
        **resolve_names(EvalConfig, settings),
    }
    return recipe.run(load(EvalConfig, flags=given)).figures


def _rows(dataset: Dataset) -> Any:
    """A name as it is; rows as a list, since they are read more than once."""
    return dataset if isinstance(dataset, str | os.PathLike) else list(dataset)


def _several(reward: Reward | Iterable[Reward]) -> tuple[Reward, ...]:
    return (reward,) if isinstance(reward, str | dict) or callable(reward) else tuple(reward)
