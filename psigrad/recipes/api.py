"""The Python front door: `psigrad.train` and `psigrad.evaluate`, with the settings of the command line as keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from psigrad.config import EvalConfig, OnlineConfig, PreferenceConfig, Reward, RewardConfig, SFTConfig
from psigrad.config.load import load, resolve_names
from psigrad.objective import PolicyGradient
from psigrad.objective.preference_catalog import names as preference_losses

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

    `method` is "sft", "reward" (a reward model), a preference loss ("dpo", "kto", …), an online preset ("grpo", "ppo", …), a
    mapping that changes an online preset's parts, or a `PolicyGradient`. `dataset` is a file, folder or hub name, or rows.
    `settings` are those of the command line, by leaf name (learning_rate=1e-5) or dotted name
    (**{"optim.learning_rate": 1e-5}). Raises `UserError` on a mistake.

        psigrad.train("grpo", model="Qwen/Qwen3-0.6B", dataset="prompts.jsonl", reward=my_reward, max_steps=100)
    """
    given: dict[str, Any] = {"model.path": model, "data.dataset": _rows(dataset)}
    if method == "reward":
        from psigrad.recipes import reward as rewarding

        return rewarding.run(load(RewardConfig, flags={**given, **resolve_names(RewardConfig, settings)}))
    given["reward"] = _several(reward)
    if method == "sft":
        from psigrad.recipes import sft

        return sft.run(load(SFTConfig, flags={**given, **resolve_names(SFTConfig, settings)}))
    if isinstance(method, str) and method in preference_losses():
        from psigrad.recipes import preference

        return preference.run(
            load(PreferenceConfig, flags={"loss": method, **given, **resolve_names(PreferenceConfig, settings)})
        )
    from psigrad.recipes import online

    return online.run(load(OnlineConfig, flags={"algorithm": method, **given, **resolve_names(OnlineConfig, settings)}))


def score(*, model: str | os.PathLike[str], dataset: Dataset, **settings: Any) -> list[float]:
    """What the reward model `model` says of each prompt-completion row of `dataset`, in order: higher is better."""
    from psigrad.recipes import reward as rewarding

    return rewarding.score(os.fspath(model), _rows(dataset), **settings)


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
