"""A model and a tokenizer passed as Python objects. The model is trained in place; its initial weights are saved."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin

from psigrad.errors import UserError, kind_of, reason_of
from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.lora import check_peft_warnings, is_adapter, read_adapter_config
from psigrad.language.models.probe import dropouts_of
from psigrad.language.models.tokenizer_files import read_tokenizer
from psigrad.language.models.towers import write
from psigrad.language.models.vision import configure_vision, tokenizer_of
from psigrad.paths import find_absolute
from psigrad.processes.parallel.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from psigrad.language.models.language_model import LanguageModel
    from psigrad.language.models.scalar_model import ScalarModel

START = "start"
_DIGEST = "psigrad_weights.json"
# The run folder that a module was trained into. Its weights then differ from the run's initial weights.
_TRAINED: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()


@dataclass
class ModelObject:
    """A network and a tokenizer as objects. `network` is None if the model was given as a name.

    The network's initial weights are saved in the folder `start/` of the run folder.
    """

    network: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    model: LanguageModel | ScalarModel | None = field(default=None, repr=False)
    """The model that a recipe built around the network."""

    @property
    def dtype(self) -> str:
        """The network's precision, as a value of the setting `dtype`. Raises `UserError` unless it is float32 or bfloat16."""
        assert self.network is not None
        name = next((name for name, dtype in DTYPES.items() if dtype == self.network.dtype and name != "float64"), None)
        if name is None:
            raise UserError(
                f"The model's weights are {self.network.dtype}; expected float32 or bfloat16; call model.to(torch.bfloat16)."
            )
        return name

    def save_start(self, folder: Path, world: World, allowed: bool) -> None:
        """In a new run, save the network's weights in `folder`. In a resumed run, compare the network with the model in `folder`.

        If only the weights differ, load the saved ones if `allowed`, or if this process trained the network in this run.
        Otherwise a difference raises `UserError`.
        """
        network = self.network
        assert network is not None
        if world.lockstep:
            raise UserError(
                "The model is an object, but placement.strategy=fsdp loads a model from files; save it with save_pretrained and "
                "give the folder."
            )
        known = world.broadcast(json.loads((folder / _DIGEST).read_text()) if (folder / _DIGEST).exists() else None)
        now = {"class": type(network).__name__, "weights": weights_digest(network)}
        if known is None:
            if world.rank == 0:
                self._write(folder, now)
            world.all_gather(None)  # wait until the folder is written
        elif known["class"] != now["class"] or (known != now and _TRAINED.get(network) != folder.resolve() and not allowed):
            raise UserError(
                f"The run in {folder.parent} started from another model, which is saved in {folder}. To resume the run, give "
                "that model, or set allow=['model'] if only the weights differ. To start a new run, choose another output_dir."
            )
        elif known != now:
            load_weights(network, folder)
        _TRAINED[network] = folder.resolve()

    def _write(self, folder: Path, digest: Mapping[str, str]) -> None:
        """Write the network, the tokenizer and the `digest` of the weights to `folder`, atomically."""
        beside = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(beside, ignore_errors=True)
        write(self.network, self.tokenizer, beside)
        (beside / _DIGEST).write_text(json.dumps(digest))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(beside, folder)

    @contextlib.contextmanager
    def restore_after(self) -> Iterator[None]:
        """After the block, merge an adapter that the run added, and restore settings that training changes, such as dropout."""
        network: Any = self.network
        if network is None:
            yield
            return
        own = network.config._attn_implementation
        # The configurations of some vision-language models have no pad_token_id.
        mode, padding, recomputes = network.training, getattr(network.config, "pad_token_id", None), _recomputes(network)
        dropouts = dropouts_of(network)
        learns = {name: p.requires_grad for name, p in network.named_parameters()}
        try:
            yield
        finally:
            if self.model is not None and self.model.adapter is not None:
                adapter: Any = self.model.adapter
                adapter.merge_and_unload()
            network.set_attn_implementation(own)
            if hasattr(network.config, "pad_token_id"):
                network.config.pad_token_id = padding
            if _recomputes(network) and not recomputes:
                network.gradient_checkpointing_disable()
            for module, attribute, p in dropouts:
                setattr(module, attribute, p)
            for name, p in network.named_parameters():
                p.requires_grad_(learns.get(name, True))
            network.train(mode)


def _recomputes(network: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in network.modules())


def weights_digest(network: nn.Module) -> str:
    """Return the SHA-256 of the names, types, shapes and bytes of a module's state."""
    digest = hashlib.sha256()
    digest_weights(digest, network.state_dict().items())
    return digest.hexdigest()


def digest_weights(digest: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Update the hashlib object `digest` with the (name, tensor) pairs `named`, in order of their names."""
    for name, tensor in sorted(named):
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def load_weights(network: PreTrainedModel, folder: Path) -> None:
    """Load the weights of the model in `folder` into `network`. If `folder` has an adapter, merge it into its base first."""
    if is_adapter(folder):
        from peft import PeftModel

        base: Any = type(network).from_pretrained(read_adapter_config(folder)["base_model_name_or_path"], dtype=network.dtype)
        with check_peft_warnings():
            wrapped: Any = PeftModel.from_pretrained(base, folder)
        network.load_state_dict(wrapped.merge_and_unload().state_dict())
        return
    network.load_state_dict(type(network).from_pretrained(folder, dtype=network.dtype).state_dict())


def wrap_objects(model: Any, tokenizer: Any) -> ModelObject | None:
    """Return the `ModelObject` of a model and a tokenizer. Each of them is an object, a folder or a hub name.

    Return None if the model is a name and `tokenizer` is None.
    """
    named = isinstance(model, str | os.PathLike)
    if named and tokenizer is None:
        return None
    if not named:
        _check(model)
    if tokenizer is None:
        tokenizer = getattr(model.config, "_name_or_path", "")
        if not tokenizer:
            raise UserError("The model was not loaded from a folder or the hub, so its tokenizer is unknown; give tokenizer=.")
    if isinstance(tokenizer, str | os.PathLike):
        try:
            tokenizer = read_tokenizer(find_absolute(os.fspath(tokenizer)))
        except (OSError, ValueError) as error:
            raise UserError(
                f"No tokenizer could be loaded from {os.fspath(tokenizer)!r} ({reason_of(error)}); give tokenizer= as an "
                "object, a folder or a hub name."
            ) from error
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = tokenizer_of(
            tokenizer, AutoConfig.from_pretrained(find_absolute(os.fspath(model))) if named else model.config
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            f"tokenizer is {kind_of(tokenizer)}; expected a tokenizer or processor of transformers, a folder or a hub name."
        )
    if not named:
        configure_vision(tokenizer, model, getattr(model.config, "_name_or_path", ""))
    return ModelObject(None if named else model, tokenizer)


def _check(model: Any) -> None:
    """Raise `UserError` unless `model` is a model of transformers that is not quantised and has no adapter."""
    from transformers import PreTrainedModel  # imported here, since it takes seconds and a run from a folder does not need it

    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise UserError(
            f"The model is {kind_of(model)}, which has an adapter; give its base model and peft_config=, or save the adapter "
            "and give its folder as the model."
        )
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"model is {kind_of(model)}; expected a folder, a hub name, or a model of transformers (PreTrainedModel)."
        )
    if getattr(model, "is_quantized", False):
        raise UserError(f"The model is a quantised {kind}, whose weights cannot be trained; load it in float32 or bfloat16.")
