"""The owner's sessions. The first visit needs a key. Later requests need a signed cookie and, except for pages, a CSRF token.

Browsers send a cookie to every port of a host, so a server of another user on this machine can read it. The CSRF token is given
to the page that was opened with the key. The page stores it in its local storage, which belongs to one port. So a stolen cookie
opens only pages without data.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

ONE_TIME_SECONDS = 120


class Sessions:
    """Sessions that are not stored: the cookie is `issued.nonce.signature`, signed with a secret made when the server starts.

    So nobody else can create a session (session fixation), and a restart ends all sessions.
    """

    def __init__(self, key: str, session_seconds: float, now: Callable[[], float] = time.time) -> None:
        self._key, self._session_seconds, self._now = key.encode(), session_seconds, now
        self._secret = secrets.token_bytes(32)
        self._once: dict[str, float] = {}

    def one_time_key(self) -> str:
        """Return a key for the browser that is opened automatically.

        It works once and for two minutes, since other users can see command lines.
        """
        key = secrets.token_urlsafe(32)
        self._once[key] = self._now() + ONE_TIME_SECONDS
        return key

    def admits(self, key: str) -> bool:
        """Return True if a key opens the studio. A one-time key is then invalid."""
        given = key.encode("utf-8", "surrogateescape")
        for once in list(self._once):
            if hmac.compare_digest(given, once.encode()):
                return self._once.pop(once) > self._now()
        return hmac.compare_digest(given, self._key)

    def new_session(self) -> str:
        """Return the value of a new cookie."""
        body = f"{int(self._now())}.{secrets.token_urlsafe(18)}"
        return f"{body}.{self._sign('session', body)}"

    def session_of(self, cookie: str) -> str | None:
        """Return the identifier of a cookie's session; None if the cookie is forged, malformed or expired."""
        body, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode("utf-8", "surrogateescape"), self._sign("session", body).encode()):
            return None
        issued = int(body.partition(".")[0])
        return body if 0 <= self._now() - issued <= self._session_seconds else None

    def csrf_token(self, session: str) -> str:
        """Return the CSRF token that pages of this session send with every data request. The cookie does not reveal it."""
        return self._sign("csrf", session)

    def csrf_holds(self, session: str, token: str) -> bool:
        """Return True if this is the CSRF token of the session."""
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.csrf_token(session).encode())

    def _sign(self, purpose: str, text: str) -> str:
        return hmac.new(self._secret, f"{purpose}\0{text}".encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
