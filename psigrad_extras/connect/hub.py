"""The upload of a finished run's model to the Hugging Face hub: `psigrad push`, `push_to_hub` and `Result.push_to_hub`."""

from __future__ import annotations

import shlex
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, and not re-exported by name

from psigrad import __version__, redaction
from psigrad.config.sections import Hub
from psigrad.errors import UserError, name_reason, reason_of
from psigrad.records.report import card

# Files of a previously pushed model, which a loader would read together with those of the new one.
_STALE = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
          "adapter_config.json", "pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter/*")  # fmt: skip
_LOG_IN = "set HF_TOKEN, or log in with `hf auth login`"


def push(folder: str | Path, repository: str, *, private: bool = False, revision: str = "") -> str:
    """Upload `model/` of a run folder with its model card as one commit. Return the address of the repository.

    A missing repository is created. In an existing one, the new commit replaces the model. A hand-written card
    (`model/README.md`) is uploaded unchanged. `revision` is a branch, which is created if it is missing. Raises `UserError` for a
    folder without a language model, a wrong name, a missing or refused token, and an unreachable hub.
    """
    model = _model_of(Path(folder))
    check_name(repository)
    check_token()
    api = _api()
    try:
        there = _repository(api, repository, private)
        if revision and revision != "main":
            api.create_branch(there, branch=revision, exist_ok=True)
        files = {path.relative_to(model).as_posix(): path for path in sorted(model.rglob("*")) if path.is_file()}
        files = {name: path for name, path in files.items() if not any(part.startswith(".") for part in Path(name).parts)}
        before = api.list_repo_files(there, revision=revision or None)
        changes = [huggingface_hub.CommitOperationAdd(name, path) for name, path in files.items() if name != "README.md"]
        changes.append(huggingface_hub.CommitOperationAdd("README.md", _card(Path(folder), there).encode()))
        gone = [name for name in before if name not in files and any(fnmatch(name, pattern) for pattern in _STALE)]
        api.create_commit(
            there,
            [*changes, *map(huggingface_hub.CommitOperationDelete, gone)],
            commit_message=f"Model of {Path(folder).resolve().name}, trained by psigrad {__version__}",
            revision=revision or None,
        )
    except UserError:
        raise
    except Exception as error:  # errors of the hub, its client and the network have no common class
        raise UserError(f"{folder} could not be pushed to {repository!r}: {_why(error, repository)}.") from error
    return f"{api.endpoint}/{there}" + (f"/tree/{revision}" if revision and revision != "main" else "")


def check(hub: Hub, output_dir: str = "") -> None:
    """Check before a run that the upload after it can work. Raises `UserError` for a wrong name or a missing or refused token.

    For an unreachable hub, only print a warning, since it may be reachable when the run ends.
    """
    if repository := hub.hub_model_id or (output_dir and Path(output_dir).resolve().name):
        check_name(repository)
    check_token()
    try:
        _api().whoami()
    except Exception as error:  # as in push
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise UserError(f"push_to_hub is set, but {_why(error, '')}.") from error
        redaction.say(f"push_to_hub is set, but {_why(error, '')}. The run continues, and its model is pushed at the end.")


def after_run(hub: Hub, folder: Path) -> None:
    """Push a finished run to the repository of its settings. If that fails, print the command that pushes it later."""
    repository = hub.hub_model_id or folder.resolve().name
    try:
        address = push(folder, repository, private=hub.hub_private_repo, revision=hub.hub_revision)
        redaction.say(f"pushed {folder / 'model'} to {address}")
    except Exception as error:  # an error of the hub must not fail a finished run
        more = ["--private"] * hub.hub_private_repo + (["--revision", hub.hub_revision] if hub.hub_revision else [])
        command = shlex.join(["psigrad", "push", str(folder), repository, *more])
        redaction.say(f"{error} The run is finished and saved. Push it with: {command}")


def check_name(repository: str) -> None:
    """Raise `UserError` for an invalid name of a repository."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(
            f"{repository!r} is not a valid repository name on the hub ({reason_of(error).rstrip('.')}); expected user/name, "
            "as in --hub-model-id user/name."
        ) from error


def check_token() -> None:
    """Raise `UserError` if there is no token."""
    if get_token() is None:
        raise UserError(f"There is no hub token; {_LOG_IN}.")


def _api() -> HfApi:
    return HfApi(library_name="psigrad", library_version=__version__)


def _model_of(folder: Path) -> Path:
    """Return the folder of a run's language model. Raises `UserError` if there is none."""
    model = folder / "model"
    if not folder.is_dir():
        raise UserError(f"There is no folder {str(folder)!r}; name the output_dir of a run.")
    if not model.is_dir():
        raise UserError(f"{str(folder)!r} has no folder model; name the output_dir of a finished run.")
    if not any((model / name).exists() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{str(model)!r} holds no language model; psigrad push takes runs of language models.")
    return model


def _repository(api: HfApi, repository: str, private: bool) -> str:
    """Return the full name of the repository, which is created if it is missing."""
    made = api.create_repo(repository, private=True if private else None, exist_ok=True).repo_id
    if private and not api.model_info(made).private:
        raise UserError(f"The repository {made} is already public; make it private on the hub, or choose another name.")
    return made


def _card(folder: Path, repository: str) -> str:
    """Return the text of the model card: the file beside the weights if a user edited it, else a card for this repository."""
    own = folder / "model" / "README.md"
    if own.is_file() and (written := own.read_text(encoding="utf-8")) != card.text(folder):
        return written
    return card.text(folder, repository)


def _why(error: Exception, repository: str) -> str:
    """Return the cause of an error and what to do, as the end of a sentence."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    if isinstance(error, RepositoryNotFoundError):
        return f"this token cannot write to the repository {repository!r}; name one of yours, or use another token"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        said = {
            401: f"the hub refuses the token; {_LOG_IN} with a token that may write",
            403: "the token may not write to this repository; name one of yours (user/name), or use a token that may write to it",
            429: "the hub limits the rate of requests; try again in a few minutes",
        }
        return said.get(status, f"the hub answered {status} ({reason_of(error).rstrip('.')})")
    # huggingface_hub passes on the errors of its client: httpx before its version 2, httpx2 since.
    clients = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if isinstance(error, ConnectionError | TimeoutError) or clients & {"httpx", "httpx2"}:
        return f"the hub at {_api().endpoint} cannot be reached ({reason_of(error).rstrip('.')})"
    return name_reason(error).rstrip(".")
