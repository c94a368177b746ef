"""The types of the keyword arguments of `psigrad.train`, for editors and type checkers. At run time, this module is empty."""

# A section and an argument may share a name and differ in type: "model" is a path here.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from dataclasses import dataclass, field
    from typing import Any, Concatenate, ParamSpec, TypeVar

    import peft
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from psigrad import config
    from psigrad.objective import PolicyGradient
    from psigrad.runs.result import Result

    P = ParamSpec("P")
    M = TypeVar("M", bound=str | PolicyGradient | Mapping[str, Any])
    Path = str | os.PathLike[str]
    Dataset = Path | Iterable[Mapping[str, Any]]

    @dataclass(frozen=True, kw_only=True)
    class Settings(
        config.Model, config.Data, config.Optim, config.Sampling, config.Evaluation, config.Run, config.Placement, config.Hub,
        config.SFTConfig, config.OnlineConfig, config.PreferenceConfig, config.RewardConfig,
    ):  # fmt: skip
        """All settings of all methods, and `peft_config`. Models, tokenizers, datasets and rewards may be objects or names."""

        model: Path | PreTrainedModel = ""
        tokenizer: Path | PreTrainedTokenizerBase = ""
        dataset: Dataset = ""
        eval_dataset: Dataset = ""
        reward: config.Reward | Iterable[config.Reward] = ""
        peft_config: peft.LoraConfig | None = None
        data: Any = field(init=False)
        optim: Any = field(init=False)
        sampling: Any = field(init=False)
        evaluation: Any = field(init=False)
        run: Any = field(init=False)
        placement: Any = field(init=False)
        hub: Any = field(init=False)

    def accept(settings: Callable[P, object]) -> Callable[[Callable[[M], Result]], Callable[Concatenate[M, P], Result]]:
        """Return a decorator that adds the parameters of `settings` to an overload of `train`."""
        ...
