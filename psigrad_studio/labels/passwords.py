"""Creation, hashing and comparison of passwords and tokens. Nothing that is stored can be used to log in."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import unicodedata
from dataclasses import dataclass

from zxcvbn import zxcvbn

from psigrad_studio.labels.refusals import Refusal

SHORTEST, LONGEST = 10, 1024
# The least zxcvbn score (from which 10^8 guesses are not enough), and the most characters that it judges, in quadratic time.
_SAFE, _JUDGED = 3, 72


@dataclass(frozen=True)
class ScryptCost:
    """The cost of one scrypt hash: 128 · 2^log_n · r bytes of memory, computed p times."""

    log_n: int = 15
    r: int = 8
    p: int = 3


COST = ScryptCost()


def hash_password(password: str, *, name: str = "") -> str:
    """Return `scrypt$log_n$r$p$salt$hash` of a password of a user with that name.

    Raises `Refusal` if it is too short, too long, or easily guessed.
    """
    if not SHORTEST <= len(password) <= LONGEST:
        raise Refusal(f"The password has {len(password)} characters; expected {SHORTEST} to {LONGEST}.")
    judged = zxcvbn(password[:_JUDGED], user_inputs=[name, "".join(name.split()), *name.split(), "psigrad", "studio"])
    if judged["score"] < _SAFE:
        why = judged["feedback"]["warning"].rstrip(".") or "many passwords are similar"
        raise Refusal(f"The password is easy to guess ({why}); choose a longer one, such as four unrelated words.")
    salt = secrets.token_bytes(16)
    parts = (COST.log_n, COST.r, COST.p, *(base64.b64encode(b).decode() for b in (salt, _scrypt(password, salt, COST))))
    return "$".join(("scrypt", *map(str, parts)))


def check_password(password: str, stored: str | None) -> bool:
    """Return True if the password matches `stored`.

    It takes the same time if `stored` is None, so that names cannot be found by timing.
    """
    if stored is None:
        _scrypt(password[:LONGEST], b"no such person..", COST)
        return False
    _, log_n, r, p, salt, expected = stored.split("$")
    found = _scrypt(password[:LONGEST], base64.b64decode(salt), ScryptCost(int(log_n), int(r), int(p)))
    return hmac.compare_digest(found, base64.b64decode(expected)) and len(password) <= LONGEST


def _scrypt(password: str, salt: bytes, cost: ScryptCost) -> bytes:
    n = 2**cost.log_n
    text = unicodedata.normalize("NFKC", password).encode("utf-8", "surrogatepass")
    return hashlib.scrypt(text, salt=salt, n=n, r=cost.r, p=cost.p, maxmem=132 * n * cost.r * cost.p + 2**20, dklen=32)


def token(kind: str) -> str:
    """Return a new token of 256 random bits. Its prefix names its kind, so that leaked tokens can be recognised."""
    return f"psigrad_{kind}_{secrets.token_urlsafe(32)}"


def hash_token(value: str) -> str:
    """Return the stored form of a token. One round of SHA-256 is enough, since 256 random bits cannot be guessed."""
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def session_token(csrf: str) -> str:
    """Return the token for the cookie of a session, given the secret `csrf` that the session's pages send.

    It is a hash of the secret. Servers on other ports of the host can read the cookie, but cannot derive the secret from it.
    """
    return f"psigrad_session_{hashlib.sha256(b'psigrad cookie' + csrf.encode('utf-8', 'surrogatepass')).hexdigest()}"


def new_device(stored: str) -> str:
    """Return a proof of a login for the browser: `nonce.signature`, signed with the hash of the user's password."""
    nonce = secrets.token_urlsafe(12)
    return f"{nonce}.{_device_signature(nonce, stored)}"


def device_holds(device: str, stored: str) -> bool:
    """Return True if a user with this password hash has logged in on the device, with the current password."""
    nonce, _, signature = device.partition(".")
    return hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), _device_signature(nonce, stored).encode())


def _device_signature(nonce: str, stored: str) -> str:
    text = f"psigrad device {nonce}".encode("utf-8", "surrogatepass")
    return hmac.new(stored.encode(), text, hashlib.sha256).hexdigest()
