"""Sources of a model: a folder, the hub, a GGUF file, or a PEFT adapter, which is either trained further or merged into its base.

Converted and merged models are kept in a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from psigrad import redaction
from psigrad.cache_folder import cache_folder
from psigrad.config import Model
from psigrad.errors import UserError, nearest, reason_of
from psigrad.language.data.named_datasets import go_offline_without_network
from psigrad.language.data.templates import stop_token_ids
from psigrad.language.models.backbone import LOADING_ERRORS
from psigrad.language.models.coded_linear import CODED_BASE
from psigrad.language.models.fused.gguf_weights import WEIGHTS, ends_in, has_head
from psigrad.language.models.language_model import load
from psigrad.language.models.lora import (
    CONFIG,
    Lora,
    check_peft_warnings,
    check_untied,
    describe_merging,
    is_adapter,
    is_beside_towers,
    read_adapter_config,
)
from psigrad.language.models.tokenizer_files import read_tokenizer
from psigrad.language.models.towers import disable_progress_bars, open_towers, save_pretrained, write
from psigrad.language.models.vision import configure_vision, needs_vision
from psigrad.records.rows import parse_row

CONVERSIONS = 16
"""The number of converted models that the cache keeps."""
# The files of a hub model's revision, without other frameworks' weights.
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


@dataclass(frozen=True)
class TrainedAdapter:
    """A previously trained adapter whose training continues: its `folder`, its LoRA settings, and its `base` model."""

    folder: Path
    lora: Lora
    base: Model

    @property
    def tokenizer(self) -> str:
        """The folder of the adapter's own tokenizer; empty if the base's tokenizer is used."""
        return str(self.folder) if (self.folder / "tokenizer_config.json").exists() else ""


def locate(settings: Model) -> str:
    """Return the folder or hub name to load the model from, after converting, merging or downloading it if necessary."""
    settings = replace(settings, path=resolve_path(settings.path))
    check_path(settings.path)
    if settings.revision and settings.quantize_base != "gguf":
        return str(_download(settings.path, settings.revision))
    found = _adapter_on_hub(settings.path)
    return _folder_of(settings) if found is None else convert_to_folder(str(found))


def find_adapter(settings: Model, *, local: bool = False) -> TrainedAdapter | None:
    """Return the adapter that these settings continue to train; None if the model is not an adapter, or is to be merged.

    With `local`, use only earlier downloads from the hub.
    """
    if settings.lora_rank or settings.adapter == "merge" or not settings.path:
        return None
    settings = replace(settings, path=resolve_path(settings.path))
    check_path(settings.path)
    folder: Path | None = Path(settings.path).expanduser()
    if not (folder is not None and is_adapter(folder)):
        folder = _adapter_on_hub(settings.path, settings.revision, local=local)
    if folder is None:
        return None
    held = read_adapter_config(folder)
    base = str(held["base_model_name_or_path"])
    if not Path(base).is_absolute() and not Path(base).exists() and (folder / base).is_dir():
        base = str(folder / base)
    _check_base(base, settings.path)
    lora = replace(Lora.of(held), dropout=settings.lora_dropout)
    vision = settings.vision or (is_beside_towers(folder) and needs_vision(base, True))
    plain = replace(settings, path=base, revision=held.get("revision") or "", adapter="merge", vision=vision)
    return TrainedAdapter(folder, lora, plain)


def lora_of(settings: Model) -> Lora | None:
    """Return the LoRA settings of the adapter to train, whether it is new or continued; None if all weights are trained."""
    if settings.lora_rank:
        return Lora(
            settings.lora_rank,
            settings.lora_alpha,
            settings.lora_dropout,
            settings.lora_target_modules,
            settings.use_rslora,
            settings.use_dora,
            settings.lora_modules_to_save,
        )
    found = find_adapter(settings)
    if found is None and settings.quantize_base:
        raise UserError(
            f"quantize_base is {settings.quantize_base}, which quantises the base of a LoRA adapter, but every weight is "
            "trained; set lora_rank=16, or remove quantize_base."
        )
    return None if found is None else found.lora


def resolve_for_plan(settings: Model, *, local: bool = False) -> Model:
    """Return `settings` for the memory planner, with the base and the LoRA settings of an adapter that is trained further.

    With `local`, use only earlier downloads from the hub.
    """
    found = find_adapter(settings, local=local)
    if found is None:
        return replace(settings, path=_folder_of(settings)) if settings.path else settings
    lora = found.lora
    return replace(found.base, lora_rank=lora.rank, lora_alpha=lora.alpha, lora_target_modules=lora.target_modules)


def tokenizer_path(settings: Model) -> str:
    """Return the path from which the model's tokenizer is loaded."""
    found = find_adapter(settings)
    return _folder_of(settings) if found is None else found.tokenizer or found.base.path


def end_tokens(tokenizer: Any) -> list[int]:
    """Return the stop tokens for programs that do not read the chat template: the EOS, and the template's end of a turn."""
    ends = [tokenizer.eos_token_id]
    with contextlib.suppress(UserError):  # the template may show no end
        ends += stop_token_ids(tokenizer) if tokenizer.chat_template else []
    return list(dict.fromkeys(ends))


def write_end_tokens(folder: Path, tokenizer: Any, known: Sequence[int] = ()) -> None:
    """Add the tokenizer's `end_tokens`, and those in `known`, to generation_config.json for `generate` and servers."""
    file = folder / "generation_config.json"  # edited as JSON: transformers refuses to save a change if the original has errors
    held = json.loads(file.read_text()) if file.exists() else None
    own = held["eos_token_id"] if held and "eos_token_id" in held else []
    ends = {*(own if isinstance(own, list) else [own])} - {None}
    if held is not None and not ends.issuperset(more := {*end_tokens(tokenizer), *known} - {None}):
        file.write_text(json.dumps({**held, "eos_token_id": sorted(ends.union(more))}, indent=2, sort_keys=True) + "\n")


def load_tokenizer(path: str) -> Any:
    """Load a model's tokenizer without its weights. Raises `UserError` if it cannot be read."""
    path = resolve_path(path)
    if not Path(path).exists():
        go_offline_without_network()
    try:
        return read_tokenizer(path)
    except LOADING_ERRORS as error:
        raise UserError(
            f"The tokenizer of {path!r} cannot be read ({reason_of(error)}); name a model's folder or a hub model."
        ) from error


def check_path(text: str, what: str = "") -> None:
    """Raise `UserError` if `text` is a missing local path, or a file that is not GGUF. `what` describes the path in messages."""
    path = Path(text).expanduser()
    local = text.startswith((".", "/", "~")) or text.count("/") > 1 or ("/" in text and Path(text.split("/")[0]).is_dir())
    if local and not path.exists():
        around = path.parent
        hint = nearest(path.name, [x.name for x in around.iterdir()]) if around.is_dir() else ""
        of = f" ({what})" if what else ""
        raise UserError(
            f"There is no folder {text!r}{of}; give the folder of a model, or a hub name such as org/name{hint or '.'}"
        )
    if path.is_file() and path.suffix != ".gguf":
        of = f" ({what})" if what else ""
        raise UserError(f"{text!r}{of} is a file; give the folder of a model, a GGUF file, or a hub name such as org/name.")


def _check_base(base: str, adapter: str) -> None:
    """Raise `UserError` if the base of an adapter is missing. PEFT would otherwise read the base's path as a hub name."""
    made = Path(base).parent == cache_folder("models")
    again = (
        "; psigrad had converted this base; to convert it again, run any command on the original GGUF file or adapter"
        if made
        else ""
    )
    check_path(base, f"the base of the adapter {adapter!r}{again}")


def check_exists(settings: Model, run: str) -> None:
    """Raise `UserError` if the model does not exist. `run` is the run folder."""
    from transformers.utils import cached_file

    path = resolve_path(settings.path)
    check_path(path)
    # Loading reports a missing hub model, but a misspelt name in an old run folder would first be reported as a changed setting.
    settled = parse_row(begun.read_bytes()) if run and (begun := Path(run) / "config.json").is_file() else None
    if settled is None or (settled.get("model") or {}).get("path") == path or Path(path).expanduser().exists():
        return
    go_offline_without_network()
    try:
        if _adapter_on_hub(path, settings.revision) is None:
            cached_file(path, "config.json", revision=settings.revision or None)
    except (OSError, ValueError) as error:
        raise UserError(f"There is no model {path!r} ({reason_of(error)}); give a folder or a hub name.") from error


def resolve_path(text: str) -> str:
    """Return the path of the trained model or newest checkpoint if `text` is a run folder; otherwise return `text`."""
    path = Path(text or "-").expanduser()
    if not path.is_dir() or _is_model(path):
        return text
    checkpoints = [*path.glob("checkpoints/step-*"), *path.glob("step-*"), *path.glob("checkpoint-*")]
    checkpoints.sort(key=lambda folder: int(digits) if (digits := folder.name.rpartition("-")[2]).isdecimal() else -1)
    inside = next((folder for folder in (path / "model", *reversed(checkpoints)) if _is_model(folder)), None)
    if inside is None and (path / "events.jsonl").exists():
        raise UserError(f"{text!r} is a run that has saved no language model yet; give the folder of a model.")
    return text if inside is None else str(inside)


def _is_model(folder: Path) -> bool:
    """Return True if the folder has an adapter or a config.json with a model type; a run's config.json has none."""
    try:
        return is_adapter(folder) or "model_type" in json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False


def _download(path: str, revision: str) -> Path:
    if Path(path).exists():
        raise UserError(f"model.revision is {revision!r} but {path!r} is a local folder; remove the revision.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=_MODEL_FILES))
    except (OSError, ValueError) as error:
        raise UserError(
            f"The revision {revision!r} of {path!r} could not be downloaded ({reason_of(error)}); give a branch, tag or commit "
            "of a hub model."
        ) from error


@lru_cache(maxsize=8)
def _adapter_on_hub(path: str, revision: str = "", *, local: bool = False) -> Path | None:
    """Download a hub adapter and return its folder; None if `path` names none. With `local`, use only an earlier download."""
    from huggingface_hub import snapshot_download
    from transformers.utils import cached_file

    if Path(path).expanduser().exists():
        return None
    if not local:
        go_offline_without_network()
    which: dict[str, Any] = {"revision": revision or None, "local_files_only": local}
    try:
        quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
        adapter, whole = (cached_file(path, name, **which, **quiet) for name in (CONFIG, "config.json"))
        if adapter is None or whole is not None:
            return None
        return Path(snapshot_download(path, allow_patterns=_MODEL_FILES, **which))
    except (OSError, ValueError):  # the loader reports what is wrong with the name
        return None


def convert_to_folder(path: str) -> str:
    """Return a path that transformers can load: the folder of a converted copy, or `path` if it needs no conversion.

    A GGUF file is converted to plain weights, and a PEFT adapter is merged into its base.
    """
    path = resolve_path(path)
    place = Path(path).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return _convert_once(_identity([place]), place, _convert_gguf)
    if not place.is_dir() or (place / "config.json").exists():
        return path
    if (place / CONFIG).exists():
        _check_base(str(json.loads((place / CONFIG).read_text())["base_model_name_or_path"] or ""), path)
        own = [place / CONFIG, *sorted(place.glob("adapter_model.*")), *place.glob(CODED_BASE)]
        return _convert_once(_identity(own, _base_identity(place)), place, _merge_adapter)
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"The folder {path!r} has several GGUF files ({names}); name one of them.")
    return _convert_once(_identity(files), files[0], _convert_gguf) if files else path


def _folder_of(settings: Model) -> str:
    """Return a folder or hub name that can be loaded. With quantize_base=gguf, return a folder with a link to the GGUF file."""
    return str(_without_weights(settings.path)) if settings.quantize_base == "gguf" else convert_to_folder(settings.path)


def _without_weights(path: str) -> Path:
    """Return a folder with the configuration and tokenizer of a GGUF file, and a link to the file, which has the weights."""
    place = Path(path).expanduser()
    if (place / WEIGHTS).exists():  # the base that an adapter names
        return place
    found = [place] if place.suffix == ".gguf" else sorted(place.glob("*.gguf"))
    if len(found) != 1:
        raise UserError(f"quantize_base is gguf, but the model is {path!r}; give a GGUF file, or set quantize_base=nf4.")
    folder = Path(_convert_once(_identity(found, "without weights"), found[0], _convert_tokenizer))
    if not (link := folder / WEIGHTS).exists() or not link.samefile(found[0]):
        link.unlink(missing_ok=True)
        link.symlink_to(found[0].resolve())
    return folder


def _identity(files: list[Path], *more: str) -> str:
    digest = hashlib.sha256("\n".join(("2", *more)).encode())  # increase "2" when conversions change, so that they are repeated
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:24]


def _base_identity(adapter: Path) -> str:
    """Identify an adapter's base: a folder by the sizes and modification times of its files, a hub model by its snapshot."""
    from transformers.utils import cached_file

    base = Path(json.loads((adapter / CONFIG).read_text())["base_model_name_or_path"] or "")
    if base.is_dir():
        files = [file for file in sorted(base.iterdir()) if file.is_file()]
        return "\n".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    with contextlib.suppress(OSError, ValueError):
        return str(cached_file(str(base), "config.json"))
    return ""


def _convert_once(name: str, source: Path, make: Callable[[Path, Path], None]) -> str:
    """Return the cached folder `name`. `make(source, folder)` writes it if it is missing. No process sees it incomplete."""
    conversions = cache_folder("models")
    place = conversions / name
    if place.is_dir():
        _note_use(place)
        return str(place)
    conversions.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=conversions, prefix=".making-") as folder:
        made = Path(folder) / "model"
        with contextlib.nullcontext() if sys.stderr.isatty() else disable_progress_bars(), _report_errors(source):
            make(source, made)
        try:
            made.rename(place)
        except OSError:  # another process finished first
            if not place.is_dir():
                raise
            shutil.rmtree(made)
    _note_use(place)
    return str(place)


def _note_use(folder: Path) -> None:
    """Mark a converted folder as just used, and delete all but the `CONVERSIONS` last used ones. Open files stay readable."""
    with contextlib.suppress(OSError):  # the file is another user's, or another process removed it first
        os.utime(folder)
        for old in sorted(folder.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-CONVERSIONS]:
            shutil.rmtree(old)


@contextlib.contextmanager
def _report_errors(source: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, AttributeError, KeyError, RuntimeError, struct.error) as error:
        raise UserError(f"The model {str(source)!r} cannot be converted: {reason_of(error)}.") from error


def _convert_gguf(file: Path, folder: Path) -> None:
    """Convert a GGUF file to plain weights, whatever its quantisation, with its tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **given)
    if hasattr(model.config, "quantization_config"):  # the weights are no longer quantised
        del model.config.quantization_config
    model.hf_quantizer = None
    save_pretrained(model, folder)
    _save_tokenizer(AutoTokenizer.from_pretrained(file.parent, **given), file, folder)


def _convert_tokenizer(file: Path, folder: Path) -> None:
    """Write the configuration and tokenizer of a GGUF file, but not its weights, to `folder` in transformers' format."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.tie_word_embeddings = not has_head(file)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _save_tokenizer(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), file, folder)


def quantisation_of(adapter: Path) -> dict[str, Any]:
    """Return the `quantize_base` and `dtype` that the base had in the adapter's training; {} if the base was not quantised."""
    file = adapter / CODED_BASE
    return (parse_row(file.read_bytes()) or {}) if file.is_file() else {}


def _save_tokenizer(tokenizer: Any, file: Path, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    write_end_tokens(folder, tokenizer, ends_in(file))


def _merge_adapter(adapter: Path, folder: Path) -> None:
    """Merge an adapter into its base, and save the model in `folder`. If training quantised the base, dequantise it first."""
    import peft
    from transformers import AutoModelForImageTextToText

    if coded := quantisation_of(adapter):
        found = find_adapter(Model(path=str(adapter)))
        assert found is not None
        options = {"base": coded["quantize_base"], "dtype": coded["dtype"], "vision": found.base.vision}
        trained = load(locate(found.base), lora=found.lora, adapter=found.folder, tokenizer=found.tokenizer, **options)
        trained.save_merged(folder)
        return write_end_tokens(folder, trained.tokenizer)
    base = json.loads((adapter / CONFIG).read_text())["base_model_name_or_path"]
    kind: Any = peft.AutoPeftModelForCausalLM
    if needs_vision(base, is_beside_towers(adapter)):  # peft has no class for vision models, though their adapters load alike
        kind = type("AutoPeftModel", (kind,), {"_target_class": AutoModelForImageTextToText})
    with check_peft_warnings():
        wrapped: Any = kind.from_pretrained(adapter, dtype="auto")
        check_untied(wrapped.get_base_model())
        if lost := describe_merging(wrapped):
            redaction.say(lost)
        model = wrapped.merge_and_unload()
    has_tokenizer = (adapter / "tokenizer_config.json").exists()
    tokenizer = read_tokenizer(adapter if has_tokenizer else base)
    open_towers(model, base)
    configure_vision(tokenizer, model, base)
    write(model, tokenizer, folder)
    write_end_tokens(folder, tokenizer)
