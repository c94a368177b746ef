"""The errors of the label store. Each kind is a class with the HTTP status that a server answers."""

from __future__ import annotations

from psigrad.errors import UserError


class Refusal(UserError):
    """The call was refused. `status` is the matching HTTP status."""

    status = 400


class Unknown(Refusal):
    """The caller is not identified: no session or token, or a wrong or expired one."""

    status = 401


class Forbidden(Refusal):
    """The caller is identified and may not do this."""

    status = 403


class Missing(Refusal):
    """It does not exist, or the caller may not see it."""

    status = 404


class Conflict(Refusal):
    """Something else came first: a lease was lost, an answer exists, a project is closed."""

    status = 409


class TooMany(Refusal):
    """Too many attempts in a short time."""

    status = 429


class Busy(Refusal):
    """The database stayed locked. The same call may be repeated, with the same key."""

    status = 503


class Damaged(Refusal):
    """The database is damaged; the message names it and says what to do."""

    status = 500
