"""LoRA adapters of peft: fresh ones, those that go on, and what becomes of them at the end."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from psigrad.errors import UserError, kind_of, reason_of
from psigrad.language.models.coded_linear import uncode_linears
from psigrad.language.models.towers import lora_exclusion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CONFIG = "adapter_config.json"
# What an adapter of peft may have that psigrad's settings say: everything else must be as peft has it by default.
_SETTINGS = frozenset(("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save"))
# What changes nothing that is trained.
_DESCRIBES = frozenset(
    (
        "peft_type",
        "task_type",
        "peft_version",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
    )
)


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter: W + s·B A on the named modules ("all-linear": every linear layer but the head).

    Formula: s = alpha / rank, with `rslora` alpha / √rank; with `dora` the sum is scaled so that each of its rows has a learnt
    length. Modules named in `modules_to_save` are trained whole.

    Source: Hu et al. 2021, LoRA, arXiv:2106.09685; Kalajdzievski 2023, rsLoRA, arXiv:2312.03732; Liu et al. 2024, DoRA,
    arXiv:2402.09353.
    """

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)
    rslora: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The adapter that a peft configuration describes, as peft's `to_dict` or its file has it."""
        named = config.get("target_modules") or ("all-linear",)
        return cls(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            target_modules=(named,) if isinstance(named, str) else tuple(sorted(named)),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            modules_to_save=tuple(config.get("modules_to_save") or ()),
        )


def settings_of(config: Any) -> dict[str, Any]:
    """The settings (`lora_rank`, `lora_alpha`, …) that a peft `LoraConfig` means.

    Raises `UserError` where it is another kind of adapter, or has something that psigrad's settings cannot say.
    """
    import peft

    if not isinstance(config, peft.LoraConfig):
        raise UserError(f"peft_config is {kind_of(config)}; expected a peft.LoraConfig.")
    given, usual = config.to_dict(), peft.LoraConfig().to_dict()
    for name, value in given.items():
        if name not in _SETTINGS | _DESCRIBES and value != usual.get(name):
            raise UserError(
                f"peft_config has {name}={value!r}, which psigrad does not train; save such an adapter with peft and give its "
                "folder as the model."
            )
    lora = Lora.of(given)
    return {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "lora_target_modules": lora.target_modules,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "lora_modules_to_save": lora.modules_to_save,
    }


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    place = Path(path).expanduser()
    return (place / CONFIG).is_file() and not (place / "config.json").exists()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """What a saved adapter's configuration says. Raises `UserError` where it is none of LoRA."""
    try:
        held: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        kind, _ = held["peft_type"], held["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / CONFIG} is no adapter's configuration ({reason_of(error)}); save the adapter again."
        ) from error
    if kind != "LORA":
        raise UserError(
            f"The adapter {str(folder)!r} is of the kind {kind}; psigrad goes on with LORA. With model.adapter=merge it is added "
            "to its base, where it can be."
        )
    return held


def with_lora(hf: PreTrainedModel, lora: Lora, saved: Path | None, task: str) -> nn.Module:
    """The peft wrapper of a model that now has LoRA layers inside: fresh ones, or those saved in the folder `saved`."""
    import peft

    if saved is not None:
        config = peft.PeftConfig.from_pretrained(str(saved))
        held: Any = config
        held.lora_dropout = lora.dropout
        try:
            with without_peft_warning():
                wrapped: nn.Module = peft.PeftModel.from_pretrained(hf, saved, is_trainable=True, config=config)
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            raise UserError(f"The adapter {str(saved)!r} does not fit its base: {reason_of(error)}.") from error
        check_untied(hf)
        return wrapped
    if hf.name_or_path and Path(hf.name_or_path).is_dir():  # the adapter names its base, and is read from other folders too
        hf.name_or_path = str(Path(hf.name_or_path).resolve())
    targets = lora.target_modules[0] if lora.target_modules == ("all-linear",) else list(lora.target_modules)
    alpha: Any = lora.alpha  # peft takes any number
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=lora_exclusion(hf),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        task_type=task,
    )
    try:
        with without_peft_warning():
            wrapped = peft.get_peft_model(hf, config)
    except ValueError as error:
        layers = sorted({name.rpartition(".")[2] for name, module in hf.named_modules() if isinstance(module, nn.Linear)})
        raise UserError(
            f"No LoRA adapter could be put on {list(lora.target_modules)}: {reason_of(error)} The linear layers of this model "
            f"are {', '.join(layers)}; all-linear takes them all."
        ) from error
    check_untied(hf)
    return wrapped


def check_untied(network: Any) -> None:
    """Refuse an adapter on a matrix that is embedding and head: merged, what it adds to one would be added to the other too."""
    ends = [network.get_input_embeddings(), network.get_output_embeddings()]
    if None in ends or not any(hasattr(layer, "base_layer") for layer in ends):
        return
    one, other = (getattr(base_of(layer), "weight", None) for layer in ends)
    if one is other:
        raise UserError(
            "The adapter is on the embedding or the head, and these are one matrix in this model (tie_word_embeddings), so that "
            "it could not be merged; leave them out of lora_target_modules, or train them whole with lora_modules_to_save."
        )


@contextlib.contextmanager
def without_peft_warning() -> Iterator[None]:
    """Without transformers' warning that peft asks it by a name that goes away, which no user can do anything about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        yield


def merge_adapter(network: PreTrainedModel, adapter: nn.Module | None) -> Any:
    """The whole model, with a copy of its adapter merged in."""
    wrapped: Any = copy.deepcopy(adapter)
    if wrapped is None:
        return network
    uncode_linears(wrapped, network.dtype)
    return wrapped.merge_and_unload()


def base_of(module: Any) -> Any:
    """What a layer is when its adapter is off."""
    return getattr(module, "original_module", getattr(module, "base_layer", module))
