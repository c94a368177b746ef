"""LoRA adapters of peft: their creation, loading, merging and dropout.

A dropout mask is a function of the run, the training step, the text and the layer, not of a random generator's state.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from psigrad import seeds
from psigrad.errors import UserError, kind_of, reason_of
from psigrad.language.models.attention import PackedLayout, on_device
from psigrad.language.models.coded_linear import CodedLinear, uncode_linears
from psigrad.language.models.towers import lora_exclusion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from psigrad.language.models.packing import ForwardInputs


CONFIG = "adapter_config.json"
# The fields of a peft adapter that psigrad's settings cover. All others must have peft's defaults.
_SETTINGS = frozenset(("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save"))
# The number of values of a 16-bit word, and the number of words in a 64-bit hash. Each word decides if one feature is dropped.
_VALUES, _FEATURES = 1 << 16, 4
# The types of models in which peft puts no adapter on modules named out_proj.
_OF_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
# The fields that do not affect training.
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
    """The settings of a LoRA adapter, which replaces the matrix W of each module in `target_modules` by W + s·B A.

    Formula: s = alpha / rank, or alpha / √rank with `rslora`. With `dora` each row of W + s·B A is scaled to a trained length.

    `target_modules` are names as in peft, or one regular expression for full names. "all-linear" means the linear layers except
    the head. The modules in `modules_to_save` are trained in full.

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
        """Return the settings in a peft configuration, given as a dict like `LoraConfig.to_dict()` or adapter_config.json."""
        named = config.get("target_modules") or ("all-linear",)
        return cls(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            target_modules=(_as_pattern(named),) if isinstance(named, str) else tuple(sorted(named)),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            modules_to_save=tuple(config.get("modules_to_save") or ()),
        )


def _as_pattern(name: str) -> str:
    """Return the regular expression `name`, written as `(?:name)` if `_is_pattern` would not recognise it as an expression."""
    return name if name == "all-linear" or _is_pattern(name) else f"(?:{name})"


def _is_pattern(name: str) -> bool:
    """Return True if a target module is a regular expression, that is, has a character that module names cannot have."""
    return re.search(r"[^\w.-]", name) is not None


def is_adapted(name: str, targets: Sequence[str]) -> bool:
    """Return True if peft puts an adapter on a linear layer with this full name. The caller must exclude the head."""
    if len(targets) == 1 and _is_pattern(targets[0]):
        return re.fullmatch(targets[0], name) is not None
    return tuple(targets) == ("all-linear",) or any(f".{name}".endswith(f".{target}") for target in targets)


def _peft_targets(targets: Sequence[str]) -> str | list[str]:
    """Return `target_modules` in peft's format. Raises `UserError` for an invalid pattern, or a pattern among other names."""
    patterns = [target for target in targets if target != "all-linear" and _is_pattern(target)]
    if patterns and len(targets) > 1:
        raise UserError(
            f"lora_target_modules has the regular expression {patterns[0]!r} and other names; give only the expression."
        )
    try:
        re.compile(patterns[0] if patterns else "")
    except re.error as error:
        raise UserError(f"lora_target_modules is {targets[0]!r}, which is not a regular expression ({error}).") from error
    return targets[0] if patterns or tuple(targets) == ("all-linear",) else list(targets)


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings (`lora_rank`, `lora_alpha`, …) that are equivalent to a peft `LoraConfig`.

    Raises `UserError` if `config` is not a `LoraConfig`, or has a field for which psigrad has no setting.
    """
    import peft

    if not isinstance(config, peft.LoraConfig):
        raise UserError(f"peft_config is {kind_of(config)}; expected a peft.LoraConfig.")
    given, usual = config.to_dict(), peft.LoraConfig().to_dict()
    for name, value in given.items():
        if name not in _SETTINGS | _DESCRIBES and value != usual.get(name):
            raise UserError(
                f"peft_config has {name}={value!r}, which psigrad cannot set; make the adapter with peft, save it, and give "
                "its folder as the model."
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
    """Return True if a folder contains an adapter and no complete model."""
    place = Path(path).expanduser()
    return (place / CONFIG).is_file() and not (place / "config.json").exists()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return a saved adapter's configuration. Raises `UserError` if it cannot be read or its type is not LORA."""
    try:
        held: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        kind, _ = held["peft_type"], held["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / CONFIG} is not the configuration of an adapter ({reason_of(error)}); save the adapter again."
        ) from error
    if kind != "LORA":
        raise UserError(
            f"The adapter {str(folder)!r} has the type {kind}, but psigrad trains only LORA. Set model.adapter=merge to merge "
            "it into its base, if peft can merge this type."
        )
    return held


def add_lora(hf: PreTrainedModel, lora: Lora, saved: Path | None, task: str, towers: Sequence[str] = ()) -> nn.Module:
    """Add LoRA layers, new or saved in the folder `saved`, to a model. Return the peft wrapper of the model.

    Modules outside the language model get new layers only if `towers` names them. `task` is peft's task_type.
    """
    import peft

    if saved is not None:
        config = peft.PeftConfig.from_pretrained(str(saved))
        held: Any = config
        held.lora_dropout = lora.dropout
        try:
            with check_peft_warnings():
                wrapped: nn.Module = peft.PeftModel.from_pretrained(
                    hf, saved, is_trainable=True, config=config, autocast_adapter_dtype=not _in_half(hf, lora)
                )
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            raise UserError(
                f"The adapter {str(saved)!r} could not be loaded onto its base ({reason_of(error)}); check "
                "base_model_name_or_path in its adapter_config.json."
            ) from error
        check_untied(hf)
        return wrapped
    # the saved adapter stores the path of its base, and may be loaded in another working directory
    if hf.name_or_path and Path(hf.name_or_path).is_dir():
        hf.name_or_path = str(Path(hf.name_or_path).resolve())
    targets = _peft_targets(lora.target_modules)
    alpha: Any = lora.alpha  # peft accepts any number
    # peft rejects the output layers of Mamba mixers, because GPU kernels read their weights without the adapter
    mixers = r".*\.out_proj" if targets == "all-linear" and hf.config.model_type in _OF_MAMBA else None
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules="|".join(filter(None, (lora_exclusion(hf, towers), mixers))) or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        task_type=task,
    )
    try:
        with check_peft_warnings():
            wrapped = peft.get_peft_model(hf, config, autocast_adapter_dtype=not _in_half(hf, lora))
    except ValueError as error:
        layers = sorted({name.rpartition(".")[2] for name, module in hf.named_modules() if isinstance(module, nn.Linear)})
        raise UserError(
            f"No LoRA adapter could be put on {list(lora.target_modules)}: {reason_of(error)} The linear layers of this model "
            f"are {', '.join(layers)}; set lora_target_modules to some of these, or to all-linear."
        ) from error
    check_untied(hf)
    return wrapped


def _in_half(hf: PreTrainedModel, lora: Lora) -> bool:
    """Return True if the adapter must be bfloat16: on a GPU, with a bfloat16 base that is not quantised, and without DoRA."""
    # float32 would need casts, 10 % of a step's time; the optimiser has float32 copies by default
    coded = any(isinstance(module, CodedLinear) for module in hf.modules())
    return hf.device.type == "cuda" and hf.dtype == torch.bfloat16 and not lora.dora and not coded


def check_untied(network: Any) -> None:
    """Raise `UserError` if an adapter is on a matrix that is both embedding and head. Merging would change both."""
    ends = [network.get_input_embeddings(), network.get_output_embeddings()]
    if None in ends or not any(hasattr(layer, "base_layer") for layer in ends):
        return
    one, other = (getattr(base_of(layer), "weight", None) for layer in ends)
    if one is other:
        raise UserError(
            "The adapter could not be merged: it is on the embedding or the head, which share one matrix in this model "
            "(tie_word_embeddings). Remove both from lora_target_modules, or train them in full with lora_modules_to_save."
        )


@contextlib.contextmanager
def check_peft_warnings() -> Iterator[None]:
    """In this context, raise `ValueError` if a saved adapter lacks weights. peft only warns, and leaves them random."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)  # peft uses this name
        warnings.filterwarnings("error", message="Found missing adapter keys", category=UserWarning)
        try:
            yield
        except UserWarning as warning:
            first = str(warning).partition("['")[2].partition("'")[0]
            raise ValueError(f"it has no weight {first}, so it was trained on another model") from None


def is_beside_towers(adapter: Path) -> bool:
    """Return True if a saved adapter was trained on a model that has towers (encoders of images) and a `language_model`."""
    import peft

    try:
        return any(".language_model." in name for name in peft.load_peft_weights(str(adapter), device="cpu"))
    except Exception:  # a missing or broken file; loading the adapter raises an error that names it
        return False


def merge_adapter(network: PreTrainedModel, adapter: nn.Module | None) -> Any:
    """Return a copy of the complete model with its adapter merged in. If `adapter` is None, return `network` itself."""
    wrapped: Any = copy.deepcopy(adapter)
    if wrapped is None:
        return network
    uncode_linears(wrapped, network.dtype)
    return wrapped.merge_and_unload()


@torch.no_grad()
def merging_loss(adapter: Any) -> float:
    """Return the share of an adapter's update ΔW that merging rounds away: ‖round(W + ΔW) − W − ΔW‖ / ‖ΔW‖. Skip DoRA layers."""
    lost = whole = 0.0
    for module in adapter.modules():
        base = getattr(getattr(module, "base_layer", None), "weight", None)
        if base is None or base.dtype not in (torch.bfloat16, torch.float16):
            continue
        for name in getattr(module, "active_adapters", ()):
            if hasattr(module, "get_delta_weight") and name in module.lora_A and not module.use_dora.get(name):
                update = module.get_delta_weight(name).float()
                kept = (base + update.to(base.dtype)).float() - base.float()
                lost, whole = lost + float((kept - update).square().sum()), whole + float(update.square().sum())
    return float((lost / whole) ** 0.5) if whole else 0.0


def describe_merging(adapter: Any) -> str:
    """Return a message with the share of the update that merging into half precision rounds away, or "" if it is below 1 %."""
    lost = merging_loss(adapter)
    if lost < 0.01:
        return ""
    return (
        f"Merging rounds away {lost:.0%} of the adapter's update, since the base is in half precision; keep the adapter "
        "separate, or merge into float32, to keep the whole update."
    )


def base_of(module: Any) -> Any:
    """Return the original layer inside a layer that peft has wrapped. Return any other layer unchanged."""
    return getattr(module, "original_module", getattr(module, "base_layer", module))


@dataclass
class DropoutMasks:
    """The seed and the token hashes of the current pass, from which `CountedDropout` computes a model's dropout masks."""

    seed: int = 0
    tokens: Tensor | None = None
    """[B, S] for each token of the forward pass, the hash of the text up to and including it (`hash_tokens`)."""
    used: bool = False
    """True if the adapter has dropout."""

    def count(self, adapter: nn.Module) -> None:
        """Replace each dropout layer of a peft adapter by a `CountedDropout` that computes its mask from this object."""
        for name, module in list(adapter.named_modules()):
            if isinstance(module, nn.Dropout) and ".lora_dropout." in name:
                adapter.set_submodule(name, CountedDropout(module.p, name, self))
                self.used = True

    def draw(self, *parts: int | str) -> None:
        """Set the masks' seed for the next passes. It is derived from `parts`, such as the run's seed and the training step."""
        self.seed = seeds.derive("dropout", *parts)

    def read(self, inputs: ForwardInputs) -> None:
        """Store the hashes of a pass's tokens, from which dropout masks are computed. Do nothing if gradients are disabled."""
        if self.used and torch.is_grad_enabled():
            whole = inputs.token_hashes is None
            self.tokens = hash_tokens(inputs.input_ids, inputs.position_ids, inputs.layout) if whole else inputs.token_hashes


class CountedDropout(nn.Module):
    """Dropout whose mask is a hash, so that it is the same in every micro-batch, on every rank and after a restart.

    Formula: in training mode x · m / (1 − p), with m = 0 at a share p of the features of x, and 1 elsewhere. m is a function of
    the seed of `masks`, the layer's name and the text up to the token.

    Source: Srivastava et al. 2014, Dropout, JMLR 15:1929.
    """

    def __init__(self, p: float, layer: str, masks: DropoutMasks) -> None:
        super().__init__()
        self.threshold, self.layer, self.masks = min(round(p * _VALUES), _VALUES - 1), layer, masks

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [B, S, …] or [B·S, …], or [B, E] with one token per text. Raises `UserError` for other shapes."""
        if not self.training or not self.threshold:
            return x
        tokens = self._tokens_of(x)
        rows = tokens ^ seeds.derive(self.masks.seed, self.layer)
        width = x.numel() // len(rows)
        words = seeds.words_on_device(rows[:, None], torch.arange(-(-width // _FEATURES), device=x.device))
        dropped = words.view(torch.int16)[:, :width] < self.threshold - _VALUES // 2
        return x.masked_fill(dropped.reshape(x.shape), 0.0) / (1 - self.threshold / _VALUES)

    def _tokens_of(self, x: Tensor) -> Tensor:
        """Return, for each row of `x`, the hash of the text up to its token. Raises `UserError` if `x` has only some tokens."""
        tokens = self.masks.tokens
        assert tokens is not None, "no forward pass has given its text"
        if x.shape[:2] == tokens.shape or len(x) == tokens.numel():
            return tokens.flatten()
        if x.dim() == 2 and len(x) == len(tokens):
            return tokens[:, 0]
        raise UserError(
            f"lora_dropout does not work in the layer {self.layer}, which reads only some of the tokens, as an expert does; "
            "remove lora_dropout, or remove that layer from lora_target_modules."
        )


def hash_tokens(ids: Tensor, positions: Tensor, layout: Any = None) -> Tensor:
    """Return a hash of the text up to each token [B, S]: Σ_i w(id_i, i) modulo 2^64, with w a pseudo-random function.

    `positions` [B, S] are the positions i. A packed row needs its `layout`.
    """
    sums = seeds.words_on_device(ids, positions).cumsum(-1)
    if not isinstance(layout, PackedLayout):  # padding is at the end, and no text follows it
        return sums
    pieces, flat = layout.pieces, torch.nn.functional.pad(sums[0], (1, 0))
    starts, before, base, lengths = (
        on_device(x, ids.device) for x in (pieces.starts, pieces.before, pieces.base, pieces.lengths)
    )
    shift = flat[base + before] - flat[base] - flat[starts]
    return sums + shift.repeat_interleave(lengths)
