"""Models in other forms than a folder of transformers: GGUF files, and adapters of peft. They are converted once, into a cache.

The folder in the cache is named by what it was made of, so that another file of the same name is converted anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from psigrad.errors import UserError, reason_of

ADAPTER = "adapter_config.json"


def plain_folder(path: str) -> str:
    """Where `path` lies as a folder of transformers: itself, unless it is a GGUF file, a folder with one such file and no
    config.json, or an adapter of peft (which is merged into its base).

    Raises `UserError` where it cannot be converted.
    """
    place = Path(path).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return _once(_identity([place]), place, _from_gguf)
    if not place.is_dir() or (place / "config.json").exists():
        return path
    if (place / ADAPTER).exists():
        return _once(_identity([place / ADAPTER, *sorted(place.glob("adapter_model.*"))]), place, _merged)
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"The folder {path!r} has several GGUF files ({names}); name one of them.")
    return _once(_identity(files), files[0], _from_gguf) if files else path


def _identity(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:24]


def _once(name: str, source: Path, make: Callable[[Path, Path], None]) -> str:
    """The converted folder, made unless it is there; what was begun and not ended is never taken for one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "psigrad" / "models"
    place = cache / name
    if place.is_dir():
        return str(place)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as folder:
        made = Path(folder) / "model"
        with _in_a_sentence(source):
            make(source, made)
        try:
            made.rename(place)
        except OSError:  # another process was first
            if not place.is_dir():
                raise
            shutil.rmtree(made)
    return str(place)


@contextlib.contextmanager
def _in_a_sentence(source: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, AttributeError, KeyError, RuntimeError, struct.error) as error:
        raise UserError(f"The model {str(source)!r} cannot be converted: {reason_of(error)}.") from error


def _from_gguf(file: Path, folder: Path) -> None:
    """The weights as numbers, whatever their quantisation was, with the tokenizer and chat template of the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **given)
    if hasattr(model.config, "quantization_config"):  # it is none any more
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)


def _merged(adapter: Path, folder: Path) -> None:
    """The base with the adapter's weights added."""
    import peft
    from transformers import AutoTokenizer

    base = json.loads((adapter / ADAPTER).read_text())["base_model_name_or_path"]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, dtype="auto").merge_and_unload()
    model.save_pretrained(folder)
    has_tokenizer = (adapter / "tokenizer_config.json").exists()
    AutoTokenizer.from_pretrained(adapter if has_tokenizer else base).save_pretrained(folder)
