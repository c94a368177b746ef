"""The Python front door: `psigrad.train` and `psigrad.evaluate`, with the settings of the command line as keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from psigrad.config import EvalConfig, PreferenceConfig, Reward, RewardConfig, SFTConfig
from psigrad.config.load import load, resolve_names
from psigrad.config.methods import TrainingConfig, of_spec
from psigrad.errors import UserError
from psigrad.objective import PolicyGradient
from psigrad.training.session import Result

if TYPE_CHECKING:
    from psigrad.recipes.score_rows import RowScore

Dataset = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


def train(
    method: str | PolicyGradient | Mapping[str, Any],
    *,
    model: str | os.PathLike[str],
    dataset: Dataset,
    reward: Reward | Iterable[Reward] = (),
    **settings: Any,
) -> Result:
    """Train `model` on `dataset` and return the `Result` (folder, model path, figures before and after).

    `method` is a name of `psigrad --help` ("sft", "grpo", "dpo", "reward", …), a mapping that changes a preset's parts, or a
    `PolicyGradient`. `dataset` is a file, folder or hub name, or rows. `settings` are those of the command line, by leaf name
    (learning_rate=1e-5) or dotted name (**{"optim.learning_rate": 1e-5}); the defaults are the command's. Raises `UserError` on a
    mistake.

        psigrad.train("grpo", model="Qwen/Qwen3-0.6B", dataset="prompts.jsonl", reward=my_reward, max_steps=100)
    """
    declared = of_spec(method)
    given: dict[str, Any] = {"model.path": model, "data.dataset": _rows(dataset)}
    if declared.settings is not RewardConfig:
        given["reward"] = _several(reward)
    named = resolve_names(declared.settings, settings)
    return run(load(declared.settings, flags={**declared.defaults, **given, **named}))


def run(config: TrainingConfig) -> Result:
    """Train as the settings say; their class says which recipe."""
    if isinstance(config, SFTConfig):
        from psigrad.recipes import sft

        return sft.run(config)
    if isinstance(config, RewardConfig):
        from psigrad.recipes import reward

        return reward.run(config)
    if isinstance(config, PreferenceConfig):
        from psigrad.recipes import preference

        return preference.run(config)
    from psigrad.recipes import online

    return online.run(config)


def score(
    *, dataset: Dataset, model: str | os.PathLike[str] = "", reward: Reward | Iterable[Reward] = (), **settings: Any
) -> list[float] | list[RowScore]:
    """What a reward model or reward functions give to each prompt-completion row of `dataset`, in order: higher is better.

    With `model` the scores alone; with `reward` a `RowScore` for each row: value, parts, reason and seconds.
    """
    rewards = _several(reward)
    if bool(model) == bool(rewards):
        raise UserError("score takes a reward model (model=) or reward functions (reward=); give one of them.")
    if rewards:
        from psigrad.recipes import score_rows

        return score_rows.score(rewards, _rows(dataset), **settings)
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
