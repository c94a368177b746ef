"""Errors for rejected requests, in the formats of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.responses import Response

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""HTTP status -> Anthropic's error type; any other status has invalid_request_error."""
_OPENAI = {404: "invalid_request_error", 401: "invalid_request_error", 413: "invalid_request_error", 500: "server_error"}


class ApiError(Exception):
    """An error for a rejected request: the reason, the invalid field, OpenAI's error code, and the HTTP status."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def openai(self) -> dict[str, Any]:
        """Return the body of the response in OpenAI's format."""
        kind = _OPENAI.get(self.status, KINDS.get(self.status, "invalid_request_error"))
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self, request_id: str = "") -> dict[str, Any]:
        """Return the body of the response in Anthropic's format."""
        said: dict[str, Any] = {"type": KINDS.get(self.status, "invalid_request_error"), "message": self.message}
        if self.code:
            said["details"] = {"error_code": self.code}
        return {"type": "error", "error": said, "request_id": request_id}

    def response(self, path: str, request_id: str) -> Response:
        """Return the response in the format of the API to which `path` belongs."""
        body = self.anthropic(request_id) if is_anthropic(path) else self.openai()
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        return as_json(body, self.status, headers)


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response in ASCII. A model or a client may write half of a surrogate pair, which UTF-8 cannot encode."""
    from starlette.responses import Response  # from the extra "serve", which a chat on the terminal does not need

    return Response(json.dumps(content), status, headers, "application/json")


def is_anthropic(path: str) -> bool:
    """Return True if a route is one of Anthropic's."""
    return "/v1/messages" in path
