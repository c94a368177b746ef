"""Models as files, and the vision and audio towers next to the text half of a checkpoint, which are never lost.

If transformers loads the whole model (Gemma 3 and 4), its towers are frozen. If it loads the text half alone (Qwen3.5), a saved
model gets them back from its original checkpoint.
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
from psigrad.language.images import sight_of
from psigrad.language.models.coded_linear import CODED_BASE, coded_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The attribute of a network that holds its `Towers`.
_BESIDE = "beside_text"
# The files that processors of images and sounds are read from.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def text_half(network: Any) -> Any:
    """Return the module that maps embeddings to hidden states: the text half of a model with towers."""
    return network.base_model if network.config.get_text_config() is network.config else network.get_decoder()


def layers_of(network: Any) -> list[nn.Module]:
    """Return the blocks of the text half, which shards gather one at a time."""
    names, half = set(getattr(network, "_no_split_modules", None) or ()), text_half(network)
    found = [module for module in half.modules() if type(module).__name__ in names]
    return found or [m for child in half.modules() if isinstance(child, nn.ModuleList) for m in child]


def towers_of(network: Any) -> list[str]:
    """Return the names of the modules of a network outside its text half."""
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
    """Freeze all modules outside the text half but those whose names end in one of `learns`. Raises `UserError` for others."""
    names = towers_of(network)
    for name in check_names(names, learns):
        network.get_submodule(name).requires_grad_(False)


def check_names(names: Sequence[str], learns: Sequence[str]) -> list[str]:
    """Return the towers' names that are none of `learns`. Raises `UserError` for a name in `learns` that no tower has."""
    short = {name.rpartition(".")[2]: name for name in names}
    for name in learns:
        if name not in short:
            raise UserError(f"trained_towers has {name!r}, and the modules outside the text half are {list(short)}.")
    return [name for own, name in short.items() if own not in learns]


class Towers:
    """The parts of a checkpoint outside the text half that was loaded from it: configuration, tensors and processors.

    The files stay open, so that they may be deleted meanwhile.
    """

    def __init__(self, config: dict[str, Any], files: Sequence[Path], processors: dict[str, bytes]) -> None:
        self.config, self.processors = config, processors
        self._open = [safe_open(file, framework="pt") for file in files]
        self.text: dict[str, str] = {}
        """The name in the checkpoint of each tensor of the text half, by its plain name."""
        self.beside: list[tuple[Any, str]] = []
        for file in self._open:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                if "language_model." in name or name.startswith("lm_head."):
                    self.text[_plain(name)] = name
                else:
                    self.beside.append((file, name))

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @classmethod
    def find(cls, path: str, network: Any) -> Self | None:
        """Return the towers of the checkpoint at `path` whose text half is `network`; None if `network` is all of it."""
        from transformers import PreTrainedConfig

        config, _ = PreTrainedConfig.get_config_dict(path)
        if "text_config" not in config or config.get("model_type") == network.config.model_type:
            return None
        return cls(config, _weight_files(path), processor_files(path))

    def put_back(self, folder: Path) -> bool:
        """Extend the saved text half in `folder` to the complete checkpoint. If names do not fit, return False and change
        nothing.
        """
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
        rest = {name: file.get_tensor(name) for file, name in self.beside}
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
    """Return the files at `path` from which processors of images, sounds and video are read."""
    return {name: file.read_bytes() for name in _PROCESSORS if (file := _file(path, name)) is not None}


def read_tensor(path: str, name: str) -> Any:
    """Return the tensor `name` of the checkpoint at `path`; None if it has none."""
    for file in _weight_files(path):
        with safe_open(file, framework="pt") as held:
            if name in held.keys():  # noqa: SIM118 (it is no dictionary)
                return held.get_tensor(name)
    return None


def keep_towers(network: Any, path: str) -> None:
    """Store the parts of the checkpoint at `path` outside `network`, for `put_back`."""
    setattr(network, _BESIDE, Towers.find(path, network))


def put_back(network: Any, folder: Path) -> bool:
    """Make the model saved in `folder` complete again. Return False if it stays the text half alone."""
    found: Towers | None = getattr(network, _BESIDE, None)
    return found is None or not (folder / "config.json").exists() or found.put_back(folder)


def names_beside(network: Any) -> list[str]:
    """Return the names of the modules in a network's checkpoint outside the text half, loaded or not."""
    found = getattr(network, _BESIDE, None)
    tensors = [] if found is None else [name for _, name in found.beside]
    return towers_of(network) or sorted({".".join(name.split(".")[: 1 + name.startswith("model.")]) for name in tensors})


def lora_exclusion(network: nn.Module, learns: Sequence[str] = ()) -> str | None:
    """Return the regular expression of the modules that get no adapter: the towers but `learns`; None if there are none."""
    names = check_names(towers_of(network), learns)
    return rf"({'|'.join(map(re.escape, names))})(\..*)?" if names else None


def _plain(name: str) -> str:
    """Return the name of a tensor of the text half without the modules that it is nested in."""
    return name.replace("language_model.", "").removeprefix("model.").removeprefix("model.")


def _file(path: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    found = cached_file(path, name, **quiet)
    return None if found is None else Path(found)


def _weight_files(path: str) -> list[Path]:
    index = _file(path, "model.safetensors.index.json")
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index is not None else ["model.safetensors"]
    return [file for name in names if (file := _file(path, name)) is not None]


def _header(file: Path) -> dict[str, Any]:
    """Return the header entry of each tensor in a safetensors file."""
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: value for name, value in header.items() if name != "__metadata__"}


def _rename(source: Path, target: Path, renamed: Callable[[str], str]) -> list[str]:
    """Copy a safetensors file with its tensors renamed, and return the new names. The data is not loaded into memory."""
    header = {renamed(name): value for name, value in _header(source).items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with source.open("rb") as old, target.open("wb") as new:
        old.seek(8 + int.from_bytes(old.read(8), "little"))
        new.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(old, new, 1 << 24)
    return list(header)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Disable transformers' progress bar per weight file, which hides psigrad's; the caller's setting is restored."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_pretrained(network: Any, folder: Path, **given: Any) -> None:
    """Call `network.save_pretrained` on any process: transformers 5.23 silently writes weights on rank 0 alone."""
    network.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        network.save_pretrained(folder, safe_serialization=True, **given)
    finally:
        del network.should_save_on_this_rank


@without_bars()
def write(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights and tokenizer in Hugging Face form."""
    save_pretrained(model, folder)
    tokenizer.save_pretrained(folder)
    if (vision := sight_of(tokenizer)) is not None:
        vision.save(folder)
    if not put_back(getattr(model, "network", model), folder):
        redaction.say(f"{folder} holds the text half alone: the names of its weights are not those of the checkpoint it is from.")
    if isinstance(model, nn.Module) and (kind := coded_as(model)) is not None:  # weights in shards have no modules here
        numbers = {"quantize_base": kind, "dtype": str(model.dtype).removeprefix("torch.")}
        (folder / CODED_BASE).write_text(json.dumps(numbers) + "\n")
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():  # safetensors makes its files readable by their owner alone
        path.chmod(0o666 & ~umask)
