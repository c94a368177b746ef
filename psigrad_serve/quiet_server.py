"""uvicorn with the settings of psigrad's servers: only HTTP, no output, and a callback when it accepts requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import uvicorn


class QuietServer(uvicorn.Server):
    """A server for `app` that calls `ready` when it accepts requests. `settings` are uvicorn's."""

    def __init__(self, app: Any, ready: Callable[[], None], **settings: Any) -> None:
        quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
        plain: dict[str, Any] = {"ws": "none", "lifespan": "off", "proxy_headers": False}
        super().__init__(uvicorn.Config(app, **quiet, **plain, **settings))
        self._ready = ready

    async def startup(self, *arguments: Any, **named: Any) -> None:
        """Start listening, then call `ready`."""
        await super().startup(*arguments, **named)
        if self.started:
            self._ready()
