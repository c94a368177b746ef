"""The start of the studio: find a port, print the address, open a browser, run the server."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from psigrad import extras
from psigrad.errors import UserError
from psigrad_studio.studio_settings import LOOPBACK, StudioSettings

FIRST_PORT, PORTS = 8420, 20
NEEDED = ("fastapi", "uvicorn", "sqlalchemy", "zxcvbn")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")


def studio(
    runs: str = "",
    *,
    port: int = 0,
    open_browser: bool = True,
    say: Callable[[str], None] | None = None,
    checkpoints: Sequence[str] = (),
    model_memory: float = 8.0,
    database: str = "",
    allow_host: Sequence[str] = (),
) -> None:
    """Serve the studio on this machine until Ctrl-C. With a folder of `runs` it opens on their page.

    `port` 0 uses the first free port from 8420.

    The chat page offers `checkpoints` in addition to the models of the runs, and caches up to `model_memory` GB of weights.
    Labels are stored in `database`, a path or a postgresql:// URL. `allow_host` lists the host names of a reverse proxy.

    Raises `UserError` if a folder, the database or the port cannot be used, or the extra is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        command = extras.install_command("studio")
        raise UserError(f"The studio needs {', '.join(missing)}, which is not installed. Run `{command}`.")
    if runs and not Path(runs).is_dir():
        raise UserError(f"The runs folder {runs!r} does not exist; name the folder that holds your runs, or omit it for `runs`.")
    for folder in checkpoints:
        if not Path(folder).is_dir():
            raise UserError(f"The checkpoint {folder!r} is not a folder; name a folder with a model.")
    if not 0 < model_memory < 1e6:
        raise UserError(f"model_memory is {model_memory}; expected gigabytes above 0.")
    for name in allow_host:
        if not _HOST.fullmatch(name):
            raise UserError(
                f"The host {name!r} is not a host name in lower case; expected one such as labels.example.org, without http://."
            )
    if database:  # open it once, so that an error appears at the start and not only when somebody labels
        from psigrad_studio.labels.database import connect

        connect(database).close()
    listening = listen(port)
    settings = replace(
        StudioSettings(port=listening.getsockname()[1]),
        runs=Path(runs or "runs"),
        home="runs" if runs else "",
        checkpoints=tuple(Path(folder) for folder in checkpoints),
        model_bytes=int(model_memory * 1e9),
        database=database,
        allowed_hosts=tuple(allow_host),
    )
    serve(settings, listening, open_browser=open_browser, say=say or partial(print, flush=True))


def copied(runs: str, database: str, backup: str, restore: str) -> str:
    """Back up the labels to a file, or restore them from one, and return a report. Raises `UserError` if that fails."""
    from psigrad_studio.labels import label_backup
    from psigrad_studio.labels.database import local_file

    if backup and restore:
        raise UserError("--backup and --restore were both given; give one of them.")
    place = local_file(replace(StudioSettings(), runs=Path(runs or "runs"), database=database).labels)
    if backup:
        size = label_backup.backup(place, Path(backup))
        return f"{place} was copied to {backup} ({size / 1e6:.1f} MB)."
    kept = label_backup.restore(Path(restore), place)
    return f"{place} was restored from {restore}." + ("" if kept is None else f" The previous labels are in {kept}.")


def listen(port: int = 0) -> socket.socket:
    """Return a socket on the loopback interface: on `port`, or on the first free port from 8420."""
    if not 0 <= port <= 65535:
        raise UserError(f"The port is {port}; expected 1 to 65535, or no --port for the first free port from {FIRST_PORT} on.")
    candidates = [port] if port else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    why = ""
    for candidate in candidates:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, candidate))
            listening.listen(512)  # on Linux two sockets may bind the same port until one of them listens
            return listening
        except OSError as error:
            listening.close()
            why = error.strerror or str(error)
    raise UserError(f"The port {port} cannot be used ({why}); give another --port, or omit it for a free one.")


def serve(settings: StudioSettings, listening: socket.socket, *, open_browser: bool, say: Callable[[str], None]) -> None:
    """Run the server on a socket, and print its address once it answers."""
    from psigrad_studio.app import create_app
    from psigrad_studio.sessions import Sessions
    from psigrad_studio.web_server import server

    sessions = Sessions(settings.key, settings.session_seconds)
    address = f"http://{LOOPBACK}:{settings.port}/enter?key="

    def greet() -> None:
        say(f"psigrad studio  {address}{settings.key}")
        say("The address contains the key; keep it secret. Ctrl-C stops the studio.")
        if open_browser and _has_screen():
            # other users can see the browser's command line, so it contains only a one-time key
            threading.Thread(target=webbrowser.open, args=(address + sessions.one_time_key(),), daemon=True).start()

    try:
        server(create_app(settings, sessions), settings, greet).run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn raises it after a normal shutdown, which Ctrl-C requested
        say("The studio has stopped.")


def _has_screen(system: str = sys.platform, environment: Any = os.environ) -> bool:
    """Return True if a browser can open a window instead of taking over the terminal."""
    return not system.startswith("linux") or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
