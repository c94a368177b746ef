"""Functions that save models, and that find, freeze and save the vision and audio towers of multimodal checkpoints.

The text half of such a checkpoint is its language model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.language.images import image_format_of
from psigrad.language.models.coded_linear import CODED_BASE, coded_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The attribute of a network that holds its `Towers`.
_TOWERS = "psigrad_towers"
# The files that processors of images and sounds are read from.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def text_half(network: Any) -> Any:
    """Return the module that maps embeddings to hidden states. In a multimodal model it is the language model without towers."""
    return network.base_model if network.config.get_text_config() is network.config else network.get_decoder()


def layers_of(network: Any) -> list[nn.Module]:
    """Return the transformer blocks of the text half, whose weights FSDP gathers one block at a time.

    FSDP gathers vision and audio towers together with the embedding and the head.
    """
    names, half = set(getattr(network, "_no_split_modules", None) or ()), text_half(network)
    found = [module for module in half.modules() if type(module).__name__ in names]
    return found or [m for child in half.modules() if isinstance(child, nn.ModuleList) for m in child]


def towers_of(network: Any) -> list[str]:
    """Return the names of a network's modules outside its text half: vision and audio towers, and their projectors."""
    config = network.config
    if config.get_text_config() is config:
        return []
    base, decoder = network.base_model, network.get_decoder()
    beside = [module for module in base.children() if decoder is not base and decoder not in set(module.modules())]
    return [name for name, module in network.named_modules() if any(module is one for one in beside)]


def tower_parameters(network: Any) -> list[nn.Parameter]:
    """Return the parameters of all modules outside the text half."""
    return [p for name in towers_of(network) for p in network.get_submodule(name).parameters()]


def freeze_towers(network: Any, learns: Sequence[str] = ()) -> None:
    """Freeze all modules outside the text half except those named in `learns`; see `check_names`."""
    names = towers_of(network)
    for name in check_names(names, learns):
        network.get_submodule(name).requires_grad_(False)


def check_names(names: Sequence[str], learns: Sequence[str]) -> list[str]:
    """Return the names of modules that stay frozen: those in `names` whose last part (such as "connector") is not in `learns`."""
    short = {name.rpartition(".")[2]: name for name in names}
    for name in learns:
        if name not in short:
            known = f"expected modules outside the language model: {', '.join(short)}" if short else "this model has no towers"
            raise UserError(f"trained_towers has {name!r}; {known}.")
    return [name for own, name in short.items() if own not in learns]


class Towers:
    """The configuration, tensors and processor files of a checkpoint from which only the text half was loaded."""

    def __init__(self, config: dict[str, Any], files: Sequence[Path], processors: dict[str, bytes]) -> None:
        self.config, self.processors = config, processors
        # The files stay open, so that the model can be saved even if they are deleted during training.
        self._open = [safe_open(file, framework="pt") for file in files]
        self.text: dict[str, str] = {}
        """The names of the text half's tensors in the checkpoint, by their plain names (see `_plain`)."""
        self.other_tensors: list[tuple[Any, str]] = []
        for file in self._open:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                if "language_model." in name or name.startswith("lm_head."):
                    self.text[_plain(name)] = name
                else:
                    self.other_tensors.append((file, name))

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @classmethod
    def find(cls, path: str, network: Any) -> Self | None:
        """Return the towers of the checkpoint at `path`, from which `network` was loaded; None if all tensors were loaded."""
        from transformers import PreTrainedConfig

        config, _ = PreTrainedConfig.get_config_dict(path)
        if "text_config" not in config or config.get("model_type") == network.config.model_type:
            return None
        return cls(config, _weight_files(path), processor_files(path))

    def put_back(self, folder: Path) -> bool:
        """Add the towers to the text half saved in `folder`. Return False if its tensors are not named as in the checkpoint."""
        shards = sorted(folder.glob("model*.safetensors"))
        last = len(shards) + 1
        names = [name for shard in shards for name in _header(shard)]
        if ({_plain(name) for name in names} ^ self.text.keys()) - {"lm_head.weight"}:  # the head is not saved if it is tied
            return False
        named: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            part = folder / f"model-{number:05d}-of-{last:05d}.safetensors"
            named |= dict.fromkeys(_rename(shard, part, lambda name: self.text.get(_plain(name), name)), part.name)
            shard.unlink()
        rest = {name: file.get_tensor(name) for file, name in self.other_tensors}
        part = folder / f"model-{last:05d}-of-{last:05d}.safetensors"
        save_file(rest, part, {"format": "pt"})
        named |= dict.fromkeys(rest, part.name)
        size = sum(file.stat().st_size for file in folder.glob("model-*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": named}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        dtype = json.loads((folder / "config.json").read_text()).get("dtype")
        whole = {**self.config, "dtype": dtype, "text_config": {**self.config["text_config"], "dtype": dtype}}
        (folder / "config.json").write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")
        for name, content in self.processors.items():
            (folder / name).write_bytes(content)
        return True


def processor_files(path: str) -> dict[str, bytes]:
    """Return the contents of the image, sound and video processors' configuration files at `path`, by file name."""
    return {name: file.read_bytes() for name in _PROCESSORS if (file := file_of(path, name)) is not None}


def read_tensor(path: str, name: str) -> Any:
    """Return the tensor `name` of the checkpoint at `path`; None if it has no such tensor."""
    for file in _weight_files(path):
        with safe_open(file, framework="pt") as held:
            if name in held.keys():  # noqa: SIM118 (it is no dictionary)
                return held.get_tensor(name)
    return None


def open_towers(network: Any, path: str) -> None:
    """Open the tensors of the checkpoint at `path` that `network` lacks, such as a vision tower, for a later `put_back`."""
    setattr(network, _TOWERS, Towers.find(path, network))


def put_back(network: Any, folder: Path) -> bool:
    """Add the towers found by `open_towers`, if any, to the model in `folder`. Return False if `Towers.put_back` cannot."""
    found: Towers | None = getattr(network, _TOWERS, None)
    return found is None or not (folder / "config.json").exists() or found.put_back(folder)


def tower_names(network: Any) -> list[str]:
    """Return the names of all modules outside the text half in a network's checkpoint, including those that were not loaded."""
    found = getattr(network, _TOWERS, None)
    tensors = [] if found is None else [name for _, name in found.other_tensors]
    return towers_of(network) or sorted({".".join(name.split(".")[: 1 + name.startswith("model.")]) for name in tensors})


def lora_exclusion(network: nn.Module, learns: Sequence[str] = ()) -> str | None:
    """Return a regular expression for the towers that get no adapter, since `learns` lacks them; None if there are none."""
    names = check_names(towers_of(network), learns)
    return rf"({'|'.join(map(re.escape, names))})(\..*)?" if names else None


def _plain(name: str) -> str:
    """Return a tensor's name without the prefixes `model.` and `language_model.` of the modules that enclose the text half."""
    return name.replace("language_model.", "").removeprefix("model.").removeprefix("model.")


def file_of(path: str, name: str) -> Path | None:
    """Return the path of the file `name` of the model at `path`, a folder or hub name; None if it has no such file."""
    from transformers.utils import cached_file

    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    found = cached_file(path, name, **quiet)
    return None if found is None else Path(found)


def _weight_files(path: str) -> list[Path]:
    index = file_of(path, "model.safetensors.index.json")
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index is not None else ["model.safetensors"]
    return [file for name in names if (file := file_of(path, name)) is not None]


def _header(file: Path) -> dict[str, Any]:
    """Return the header entries of a safetensors file by tensor name."""
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: value for name, value in header.items() if name != "__metadata__"}


def _rename(source: Path, target: Path, renamed: Callable[[str], str]) -> list[str]:
    """Copy a safetensors file with its tensors renamed by `renamed`. Return the new names. The data is not loaded into memory."""
    header = {renamed(name): value for name, value in _header(source).items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with source.open("rb") as old, target.open("wb") as new:
        old.seek(8 + int.from_bytes(old.read(8), "little"))
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(old, new, 1 << 24)
    return list(header)


@contextlib.contextmanager
def disable_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would hide psigrad's, in this context. Then restore the caller's setting."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_pretrained(network: Any, folder: Path, **given: Any) -> None:
    """Call `network.save_pretrained(folder, **given)`, and write weights in this process even if it is not rank 0."""
    network.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        network.save_pretrained(folder, safe_serialization=True, **given)
    finally:
        del network.should_save_on_this_rank


@disable_progress_bars()
def write(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model's weights, tokenizer and image processor to `folder` in Hugging Face format, with its towers."""
    save_pretrained(model, folder)
    tokenizer.save_pretrained(folder)
    if (vision := image_format_of(tokenizer)) is not None:
        vision.save(folder)
    if not put_back(getattr(model, "network", model), folder):
        redaction.say(
            f"{folder} has only the language model, without its towers, since the names of its weights differ from those in the "
            "original checkpoint."
        )
    if isinstance(model, nn.Module) and (kind := coded_as(model)) is not None:  # sharded weights (`_Saved`) have no modules
        numbers = {"quantize_base": kind, "dtype": str(model.dtype).removeprefix("torch.")}
        (folder / CODED_BASE).write_text(json.dumps(numbers) + "\n")
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():  # safetensors creates files that only their owner can read
        path.chmod(0o666 & ~umask)
