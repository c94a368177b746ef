"""The Python interface: `psigrad.train`, `evaluate` and `score`, with the command line's settings as keyword arguments."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from psigrad.compat.conversion import convert_object
from psigrad.compat.foreign_names import load, resolve_names
from psigrad.config import EvalConfig, Reward, RewardConfig
from psigrad.config.methods import of_spec
from psigrad.errors import UserError, kind_of
from psigrad.language import images
from psigrad.language.data.named_datasets import keep_images_encoded
from psigrad.language.data.sources import remove_format
from psigrad.language.data.splits import parse_split
from psigrad.language.loading import model_object
from psigrad.language.loading.model_object import START, ModelObject
from psigrad.language.models.vision import requires_vision
from psigrad.language.recipes import dispatch
from psigrad.objective import PolicyGradient
from psigrad.paths import TypedPath, absolute, find_absolute
from psigrad.runs.result import Result
from psigrad.runs.session import new_folder

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from psigrad.language.recipes import typed_settings as typed
    from psigrad.language.recipes.score_rows import RowScore

Dataset = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


if TYPE_CHECKING:

    @overload
    @typed.accept(typed.Settings)
    def train(method: str | PolicyGradient | Mapping[str, Any], /) -> Result: ...
    @overload
    def train(method: str | PolicyGradient | Mapping[str, Any], **settings: Any) -> Result: ...


def train(  # type: ignore[misc]  # the settings of a dataclass may be positional, too
    method: str | PolicyGradient | Mapping[str, Any],
    *,
    model: str | os.PathLike[str] | PreTrainedModel | None = None,
    dataset: Dataset | None = None,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | ProcessorMixin | None = None,
    eval_dataset: Dataset | None = None,
    reward: Reward | Iterable[Reward] | None = None,
    peft_config: peft.LoraConfig | None = None,
    **settings: Any,
) -> Result:
    """Train `model` on `dataset` and return the `Result`: run folder, trained model, and evaluations before and after training.

    - `method` is a method's name ("sft", "grpo", "dpo", …; `psigrad --all` lists them), a mapping that changes parts of a method,
      such as {"preset": "grpo", "kl": None}, or a `PolicyGradient`.
    - `model` is a folder, a hub name, or a transformers model. A model object is trained in place: afterwards it has the trained
      weights, with any adapter merged in.
    - `tokenizer` is a transformers tokenizer or processor, or a name. The default is the model's own tokenizer.
    - `dataset` and `eval_dataset` are a file, folder or hub name, or rows: a list of dicts, a `datasets.Dataset`, a DataFrame.
    - `reward` is a reward function, a reward's name as in `--reward`, or a list of these.
    - `peft_config` adds a LoRA adapter to the model, in place of the `lora_…` settings.
    - `settings` are the settings of the command line, with the same defaults. Pass them by leaf name (learning_rate=1e-5) or by
      dotted name (**{"optim.learning_rate": 1e-5}). TRL's names, such as `train_dataset`, are accepted too. `args` may be a TRL
      configuration such as `GRPOConfig(…)`. Other settings override it.

    Raises `UserError` for a mistake in the arguments or the data.

        psigrad.train("grpo", model="Qwen/Qwen3-0.6B", dataset="prompts.jsonl", reward=my_reward, max_steps=100)
    """
    given_by = settings.pop("args", None)
    if given_by is not None:
        method, settings = _from_trl(given_by, method, settings, has_eval_dataset=eval_dataset is not None)
    declared = of_spec(method)
    processing = settings.pop("processing_class", None)
    if tokenizer is not None and processing is not None:
        raise UserError("tokenizer and processing_class are two names for the same argument; give only one.")
    tokenizer = processing if tokenizer is None else tokenizer
    own = {"model.path": model, "data.dataset": dataset, "data.eval_dataset": eval_dataset, "reward": reward}
    named = resolve_names(declared.settings, {name: value for name, value in own.items() if value is not None} | settings)
    model, dataset = named.pop("model.path", None), named.pop("data.dataset", None)
    if model is None:
        raise UserError("No model was given; pass model= to psigrad.train: a folder, a hub name, or a transformers model.")
    if dataset is None and not named.get("environment"):  # an environment may bring its own rows
        raise UserError("No dataset was given; pass dataset= to psigrad.train: a file, a folder, a hub name, or rows.")
    eval_dataset, reward = named.pop("data.eval_dataset", ""), named.pop("reward", ())
    splits = (named.get("data.split", "train"), named.get("data.eval_split", "test"))
    overrides: dict[str, Any] = {
        "data.dataset": _rows("" if dataset is None else dataset, splits[0]),
        "data.eval_dataset": _rows(eval_dataset, splits[1], "eval_split", "test"),
    }
    if declared.settings is not RewardConfig:
        overrides["reward"] = _as_tuple(reward)
    overrides |= _adapter(peft_config, named)
    objects = model_object.wrap_objects(model, tokenizer)
    if objects is None or objects.network is None:
        overrides["model.path"] = model
    else:
        overrides |= _in_memory(objects, named, of_spec(method).settings.__name__.removesuffix("Config").lower())
    return dispatch.run(load(declared.settings, flags={**declared.defaults, **named, **overrides}), objects)


def _from_trl(args: Any, method: Any, settings: Mapping[str, Any], *, has_eval_dataset: bool) -> tuple[Any, dict[str, Any]]:
    """Return (method, settings) converted from `args`, a TRL configuration. The user's `settings` override the converted ones.

    Warn about differences from TRL. Raise `UserError` if `args` configures a method other than `method`.
    """
    converted = convert_object(args)
    if method not in (converted.trainer, converted.method):
        raise UserError(
            f"args is {kind_of(args)}, which is for {converted.trainer}, but the method is {method!r}; call "
            f'psigrad.train("{converted.method}", …).'
        )
    for difference in converted.differs:
        warnings.warn(difference, stacklevel=3)
    own = resolve_names(of_spec(converted.method).settings, settings)
    if has_eval_dataset:  # TRL holds nothing out by default, and the converted settings reflect that
        converted.settings.pop("evaluation.eval_prompts", None)
    parts = ("algorithm.", "loss.")
    rest = {name: value for name, value in converted.settings.items() if name not in own and not name.startswith(parts)}
    return converted.spec, {**rest, **settings}


def _in_memory(objects: ModelObject, named: Mapping[str, Any], recipe: str) -> dict[str, Any]:
    """Return the settings for a model in memory (`objects`): output folder, path of the initial weights, precision, vision.

    `named` are the user's settings. If no output folder is set, the name of a new one starts with `recipe`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not named.get("run.output_dir"):
        raise UserError("Several processes train the model, but output_dir is not set; give all of them the same folder.")
    folder = Path(named.get("run.output_dir") or new_folder(recipe))
    start = TypedPath(str(absolute(folder / START)), str(folder / START))
    if named.get("model.dtype", objects.dtype) != objects.dtype:
        raise UserError(
            f"The model's weights are {objects.dtype} but dtype is {named['model.dtype']!r}; remove dtype, or convert "
            "the model first."
        )
    network: Any = objects.network
    sees = (
        {}
        if images.image_format_of(objects.tokenizer) is None or requires_vision(network.config.model_type)
        else {"model.vision": True}
    )
    return {"run.output_dir": folder, "model.path": start, "model.dtype": objects.dtype, **sees}


def _adapter(config: peft.LoraConfig | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` as psigrad's LoRA settings. Raise `UserError` if one of them is also in `named`, the user's settings."""
    if config is None:
        return {}
    from psigrad.language.models.lora import settings_of

    meant = {f"model.{name}": value for name, value in settings_of(config).items()}
    if twice := sorted(meant.keys() & named.keys()):
        raise UserError(f"peft_config and {twice[0].partition('.')[2]} are both given; remove one of them.")
    return meant


def score(
    *, dataset: Dataset, model: str | os.PathLike[str] = "", reward: Reward | Iterable[Reward] = (), **settings: Any
) -> list[float] | list[RowScore]:
    """Score each prompt-completion row of `dataset` with a reward model or reward functions. Higher is better.

    Return a number per row from a reward model, or a `RowScore` per row from reward functions.
    """
    rewards = _as_tuple(reward)
    if bool(model) == bool(rewards):
        raise UserError("score needs exactly one of model= (a reward model) and reward= (reward functions).")
    if rewards:
        from psigrad.language.recipes import score_rows

        return score_rows.score(rewards, _load_rows(dataset, settings), **settings)
    from psigrad.language.recipes import reward as rewarding

    return [
        row["reward"] for row in rewarding.score_rows(find_absolute(os.fspath(model)), _load_rows(dataset, settings), **settings)
    ]


def evaluate(
    *, model: str | os.PathLike[str], dataset: Dataset, reward: Reward | Iterable[Reward], **settings: Any
) -> dict[str, Any]:
    """Sample completions of `dataset`'s prompts and score them with `reward`. Return mean, 95 % interval, pass@k, lengths."""
    from psigrad.language.recipes import evaluate as recipe

    given = {
        "model.path": model,
        "data.dataset": _load_rows(dataset, settings),
        "reward": _as_tuple(reward),
        **resolve_names(EvalConfig, settings),
    }
    return recipe.run(load(EvalConfig, flags=given)).figures


def _load_rows(dataset: Dataset, settings: Mapping[str, Any]) -> Any:
    return _rows(dataset, str(settings.get("split", "test")), default_split="test")


def _rows(dataset: Dataset, split: str = "train", setting: str = "split", default_split: str = "train") -> Any:
    """Return a dataset in a form that can be read more than once: a name, or a list of rows.

    For a `DatasetDict`, return the rows of `split`. Rows without splits count as `default_split`. `setting` is the name of the
    argument in error messages.
    """
    name = parse_split(split).name  # the recipe applies a slice, such as train[:90%], later
    if isinstance(dataset, str | os.PathLike):
        return find_absolute(os.fspath(dataset))
    if isinstance(dataset, Mapping):
        if name not in dataset:
            raise UserError(
                f"The dataset has the splits {', '.join(map(str, dataset))} but not {name!r}; set {setting} to one of them."
            )
        dataset = dataset[name]
    elif name != default_split:
        raise UserError(f"{setting} is {split!r}, but the given rows have no splits; remove {setting}.")
    if type(dataset).__name__ == "DataFrame":
        frame: Any = dataset
        return _plain(frame.to_dict("records"))
    if not isinstance(dataset, Iterable):
        raise UserError(f"The dataset is {dataset!r}; expected the name of a file, folder or hub dataset, or rows.")
    return list(keep_images_encoded(remove_format(dataset)))


def _plain(value: Any) -> Any:
    """Convert a value of a DataFrame to JSON types: arrays become lists, and missing values (NaN, NaT, NA) become None."""
    import pandas

    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else None if pandas.isna(value) else value


def _as_tuple(reward: Reward | Iterable[Reward]) -> tuple[Reward, ...]:
    if isinstance(reward, str | dict) or callable(reward):
        return (reward,)
    if not isinstance(reward, Iterable):
        raise UserError(f"The reward is {reward!r}; expected a name, a function, or a list of them.")
    return tuple(reward)
