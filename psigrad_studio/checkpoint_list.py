"""The language models that the studio may load: those in the runs folder, and those named on the command line."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psigrad.config import Model, Run
from psigrad.errors import UserError
from psigrad.records.rows import parse_row
from psigrad_studio.runs.files import content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from psigrad.language.models.language_model import LanguageModel

DEEPEST = 4
MOST = 2000
"""The maximum number of checkpoints in a list, and of entries that are read from a folder. Further ones are ignored."""
MOST_FOLDERS = 20_000
# transformers imports lazily, and fails if two threads import at once.
_LOADING = threading.Lock()
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A model on the disk. Requests refer to it by `id`, so no request contains a path. `name` is displayed."""

    id: str
    name: str
    folder: Path
    bytes: int
    """The size of the model's weights."""
    stamp: int
    """The time at which the weights were written. If a folder gets new weights, it counts as another model."""
    run: str | None = None
    step: int | None = None
    adapter: bool = False

    def open(self) -> LanguageModel:
        """Load the model in its saved precision. Raises `UserError` if that fails."""
        with _LOADING:
            return self._open()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer alone. Raises `UserError` if that fails."""
        with _LOADING:
            from psigrad.language.models.tokenizer_files import read_tokenizer

            try:
                return read_tokenizer(self.folder)
            except (OSError, ValueError, KeyError) as error:
                raise UserError(f"The tokenizer of {self.name} cannot be loaded; choose another model.") from error

    def _open(self) -> LanguageModel:
        # Import torch and transformers on demand, so that the studio starts without them.
        import transformers

        from psigrad.language.loading.model_source import find_adapter, locate, lora_of
        from psigrad.language.models.backbone import DTYPES
        from psigrad.language.models.language_model import load
        from psigrad.runs.machine import device

        transformers.utils.logging.disable_progress_bar()
        where = device(Run())
        if not self.adapter:
            kind = str(_json(self.folder / "config.json").get("dtype"))
            return load(str(self.folder), dtype=kind if kind in DTYPES else "float32", device=where)
        settings = _model_of(self.folder)
        before = find_adapter(settings)
        base = locate(settings if before is None else before.base)
        numbers: dict[str, Any] = {"dtype": settings.dtype, "base": settings.quantize_base}
        return load(base, device=where, lora=lora_of(settings), adapter=self.folder, **numbers)


def find(runs: Path, named: Sequence[Path] = ()) -> dict[str, Checkpoint]:
    """Return id -> checkpoint of all causal language models under `runs` and in `named`; the newest run first, then by step.

    Links are not followed. Folders without such a model (control runs, reward models, partially written folders) are skipped.
    """
    folders = islice(_folders(runs, DEEPEST), MOST_FOLDERS)
    made = [found for folder in folders if (found := _read(folder, runs)) is not None]
    made.sort(key=lambda c: (c.run or "", c.step is None, c.step or 0, c.name))
    own = [found for folder in named if (found := _read(Path(folder), None)) is not None]
    return {c.id: c for c in [*own, *made][:MOST]}


def _folders(root: Path, depth: int) -> Iterator[Path]:
    """Yield `root` and the folders down to `depth` below it, sorted by name. Links are not followed."""
    for folder, folders, _ in os.walk(root):
        yield Path(folder)
        deepest = len(Path(folder).relative_to(root).parts) == depth
        folders[:] = [] if deepest else sorted(name for name in folders if not name.startswith("."))


def _read(folder: Path, runs: Path | None) -> Checkpoint | None:
    """Return the checkpoint in a folder; None if there is none, or if it is being written or deleted."""
    try:
        with os.scandir(folder) as held:
            entries = list(islice(held, MOST))
        plain = all(entry.is_file() or entry.is_dir() for entry in entries)  # opening a pipe would block forever
        names = [e.name for e in entries if e.name.endswith(".safetensors") and e.name != "optimizer.safetensors"]
        weights = [(folder / name).stat() for name in names] if plain else []
    except OSError:
        return None
    adapter = (folder / "adapter_config.json").is_file()
    if not weights or not (_causal_adapter(folder) if adapter else _causal(folder)):
        return None
    place = str(folder.resolve() if runs is None else folder.relative_to(runs))
    run, step = _run_folder(folder), _step_of(folder)
    owner = None
    if runs is not None and run != folder:
        owner = _printable(str(run.relative_to(runs)) if run != runs else runs.resolve().name)
    return Checkpoint(
        id=hashlib.sha256(f"{runs is None}\0{place}".encode("utf-8", "surrogateescape")).hexdigest()[:20],
        name=_name(_printable(place), owner, step),
        folder=folder,
        bytes=sum(stat.st_size for stat in weights),
        stamp=max(stat.st_mtime_ns for stat in weights),
        run=owner,
        step=step,
        adapter=adapter,
    )


def _name(place: str, run: str | None, step: int | None) -> str:
    return place if run is None else f"{run}, step {step}" if step is not None else f"{run}, final model"


def _printable(path: str) -> str:
    """Return a file name as text. Its bytes may be invalid."""
    return path.encode("utf-8", "backslashreplace").decode("utf-8")


def _run_folder(folder: Path) -> Path:
    """Return the run folder of a model in run/model or run/checkpoints/step-…; for another model, its own folder."""
    if _step_of(folder) is not None and folder.parent.name == "checkpoints":
        return folder.parent.parent
    return folder.parent if folder.name == "model" else folder


def _step_of(folder: Path) -> int | None:
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def _causal(folder: Path) -> bool:
    kinds = _json(folder / "config.json").get("architectures")
    # a vision-language model chats about text; encoder-decoders with this name have no image processor
    sees = ("ForConditionalGeneration",) if (folder / "preprocessor_config.json").is_file() else ()
    return isinstance(kinds, list) and any(str(kind).endswith(("ForCausalLM", "LMHeadModel", *sees)) for kind in kinds)


def _causal_adapter(folder: Path) -> bool:
    return _json(folder / "adapter_config.json").get("task_type") == "CAUSAL_LM" and bool(_model_of(folder).path)


def _model_of(folder: Path) -> Model:
    """Return the `Model` settings of the run to which a folder belongs; if they are damaged, those in a checkpoint's manifest."""
    settings = _json(_run_folder(folder) / "config.json") or _json(folder / "manifest.json").get("settings")
    given = settings.get("model") if isinstance(settings, dict) else None
    known = given if isinstance(given, dict) else {}
    return Model(**{name: value for name, value in known.items() if name in Model.__dataclass_fields__})


def _json(file: Path) -> dict[str, Any]:
    return parse_row(content(file.resolve())) or {}
