"""The errors of the label store. Each kind is a class with the HTTP status of the server's response."""

from __future__ import annotations

from psigrad.errors import UserError


class Refusal(UserError):
    """The base class of errors for refused calls. `status` is the HTTP status of the response."""

    status = 400


class Unknown(Refusal):
    """An error for an unidentified caller: no session or token, or a wrong or expired one."""

    status = 401


class Forbidden(Refusal):
    """An error for an identified caller without the permission."""

    status = 403


class Missing(Refusal):
    """An error for an object that does not exist, or that the caller has no permission to see."""

    status = 404


class Conflict(Refusal):
    """An error for a conflicting change: a lost lease, an existing answer, a closed project."""

    status = 409


class TooMany(Refusal):
    """An error for too many attempts in a short time."""

    status = 429


class Busy(Refusal):
    """An error for a database that stayed locked. The same call may be repeated, with the same key."""

    status = 503


class Damaged(Refusal):
    """An error for a damaged database. The message names it and says how to recover."""

    status = 500
