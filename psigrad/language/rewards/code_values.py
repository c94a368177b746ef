"""Comparison and arithmetic for values from a sandbox, with a tolerance for rounding and with bounds on time and memory."""

from __future__ import annotations

import decimal
import fractions
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

# Numbers that differ by less are equal up to rounding: 0.1 + 0.2 is 0.3.
ROUNDING = 1e-9
_LONGEST = 1_000_000
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_ORDER: dict[str, Callable[[Any, Any], bool]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_SEQUENCES = (list, tuple, deque)


def same(a: Any, b: Any, tolerance: float = ROUNDING) -> bool:
    """Return True if the values are equal as in Python, but with a tolerance for floats, and with NaN equal to NaN.

    Two floats can differ by `tolerance` times the larger absolute value, or by `tolerance` if both are below 1.
    """
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(a, _SEQUENCES) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in a)
    return bool(a == b)


def compare(sign: str, a: Any, b: Any) -> bool:
    """Return `a sign b` as in Python, but with `same` for equality, and with equal types and values for `is`.

    Raise `TypeError` for the order of NaN, or of two infinities: a test would accept an infinite error within an infinite
    tolerance.
    """
    match sign:
        case "==" | "!=":
            return same(a, b) == (sign == "==")
        case "is" | "is not":
            return (type(a) is type(b) and bool(a == b)) == (sign == "is")
        case "in" | "not in":
            found = a in b if isinstance(b, str | bytes | range) else any(same(a, item) for item in b)
            return found == (sign == "in")
    if any(isinstance(side, float) and math.isnan(side) for side in (a, b)):
        raise TypeError("NaN cannot be ordered")
    if all(isinstance(side, float) and math.isinf(side) for side in (a, b)):
        raise TypeError("two infinities cannot be ordered")
    return bool(_ORDER[sign](a, b))


def arithmetic(sign: str, a: Any, b: Any) -> Any:
    """Return `a sign b` if that is fast; otherwise raise `TypeError`."""
    if sign == "**":
        return power(a, b)
    texts = [side for side in (a, b) if not isinstance(side, int | float | complex) and hasattr(side, "__len__")]
    if (sign == "%" and isinstance(a, str | bytes)) or (sign == "*" and texts and not _short(a, b)):
        raise TypeError(f"{sign} could take too long")
    return _ARITHMETIC[sign](a, b)


def _short(a: Any, b: Any) -> bool:
    times = [side for side in (a, b) if isinstance(side, int)]
    return len(times) == 1 and times[0] * len(b if times[0] is a else a) <= _LONGEST


def power(a: Any, b: Any) -> Any:
    """Return `a ** b` for small numbers. Raise `TypeError` if it could take too long."""
    if not all(isinstance(side, int | float | complex) for side in (a, b)) or abs(b) > 1000 or abs(a) > 1e100:
        raise TypeError("** could take too long")
    return a**b


def short_range(*bounds: int) -> range:
    """Return a range of bounded length. Raise `TypeError` for a longer one."""
    found = range(*bounds)
    if len(found) > _LONGEST:
        raise TypeError(f"a range of {len(found)} numbers is too long")
    return found


def isclose(a: Any, b: Any, **tolerances: float) -> bool:
    """Return `math.isclose(a, b)`, or `numpy.isclose(a, b)` if a tolerance has numpy's name, `rtol` or `atol`."""
    if tolerances.keys() & {"rtol", "atol"}:
        return allclose(a, b, tolerances.get("rtol", 1e-5), tolerances.get("atol", 1e-8))
    return math.isclose(a, b, **tolerances)


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return `numpy.allclose` without broadcasting: an empty list is close only to another empty list."""
    if isinstance(b, _SEQUENCES) or isinstance(a, _SEQUENCES):
        if not (isinstance(a, _SEQUENCES) and isinstance(b, _SEQUENCES) and len(a) == len(b)):
            return False
        return all(allclose(x, y, rtol, atol, equal_nan) for x, y in zip(a, b, strict=True))
    within = abs(a - b) <= atol + rtol * abs(b) < math.inf
    return bool(a == b or within or (equal_nan and a != a and b != b))


def agree(found: Any, expected: Any, tolerance: float) -> bool:
    """Return True if MBPP+'s assertion would hold: equal values, or floats within `tolerance` (1e-6 if it is 0)."""
    return same(found, expected, max(ROUNDING, float(tolerance) or 1e-6))


def Fraction(*parts: Any) -> fractions.Fraction:
    """Return `fractions.Fraction`. Raise `TypeError` for a text with an exponent, which could take a gigabyte."""
    if any(isinstance(part, str) and "e" in part.lower() for part in parts):
        raise TypeError("Fraction of a text with an exponent could take too long")
    return fractions.Fraction(*parts)


def Decimal(part: Any) -> decimal.Decimal:
    """Return `decimal.Decimal`. Raise `TypeError` for a text with an exponent, which could take a gigabyte."""
    if isinstance(part, str) and "e" in part.lower():
        raise TypeError("Decimal of a text with an exponent could take too long")
    return decimal.Decimal(part)
