"""The connection to a Ray cluster, and a thread that checks if its head node answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from psigrad import extras
from psigrad.errors import UserError, reason_of

# The seconds without an answer after which the cluster's head node counts as lost. Ray would end this process after 60.
HEAD = 30.0


def connect(address: str) -> Any:
    """Return the module ray, connected to the cluster at `address`.

    If `address` is "auto", connect to a running cluster, or start one on this machine.
    """
    with extras.needing("placement.cluster", "cluster"):
        import ray
    if ray.is_initialized():
        return ray
    knock(address)
    passed = ("PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "PSIGRAD_CACHE", "PSIGRAD_CACHE_GB", "PSIGRAD_NATIVE")
    variables = {name: os.environ[name] for name in passed if name in os.environ}
    settings: dict[str, Any] = {
        "runtime_env": {"env_vars": {**variables, "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}},
        "logging_level": "ERROR",
        "log_to_driver": True,
    }
    try:
        ray.init(address=address, **settings)
    except ConnectionError as error:
        if "InvalidAuthToken" in "".join(traceback.format_exception(error)):
            raise UserError(
                f"The Ray cluster at {address!r} requires its token; set RAY_AUTH_MODE=token and the token in ~/.ray/auth_token "
                "or RAY_AUTH_TOKEN, as on the machine that started it."
            ) from error
        if address != "auto":
            raise UserError(
                f"There is no Ray cluster at {address!r} ({reason_of(error)}); start one with `ray start`."
            ) from error
        ray.init(include_dashboard=False, **settings)
    return ray


def knock(address: str) -> None:
    """Raise an error at once if nothing listens at the address. Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if address == "auto" or not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except OSError as error:
        raise UserError(f"There is no Ray cluster at {address!r} ({reason_of(error)}); start one with `ray start`.") from error


class HeadWatch(threading.Thread):
    """A thread that checks if the cluster's head node answers.

    Without it, Ray would end this process a minute after the head is lost, without an exception.
    """

    def __init__(self, ray: Any, lost: Callable[[], None]) -> None:
        super().__init__(name="the cluster's head", daemon=True)
        self.address, self.silent, self.over = "", False, threading.Event()
        self._lost = lost
        with contextlib.suppress(Exception):  # a Ray client has no such address
            self.address = ray.get_runtime_context().gcs_address
            self.start()

    def run(self) -> None:
        """Check every two seconds, until the pool is closed or the head is lost."""
        answered = time.monotonic()
        while not self.over.wait(2.0):
            try:
                knock(self.address)
                self.silent, answered = False, time.monotonic()
            except UserError:
                self.silent = True
            if time.monotonic() - answered > HEAD:
                self._lost()
                return
