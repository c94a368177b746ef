"""Why the desk says no. Each kind is one class, so that whoever serves the desk can map it to one answer."""

from __future__ import annotations

from psigrad.errors import UserError


class Refusal(UserError):
    """The desk won't do what was asked. `status` is the HTTP status that says the same."""

    status = 400


class Unknown(Refusal):
    """Who asks isn't known: no session or token, a wrong one, or one that has run out."""

    status = 401


class Forbidden(Refusal):
    """Who asks is known and may not."""

    status = 403


class Missing(Refusal):
    """There is no such thing, or none that the asker may see."""

    status = 404


class Conflict(Refusal):
    """Somebody or something was faster: a lease was lost, an answer stands already, a project is closed."""

    status = 409


class TooMany(Refusal):
    """Too many attempts in a short time."""

    status = 429


class Busy(Refusal):
    """The database stayed locked; the same call may be made again, with the same key."""

    status = 503
