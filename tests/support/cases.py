"""Many small cases in one test: what pytest's own parametrize would report one by one costs more than they do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Return cases of a parametrized test, tuples of several arguments or single ones, that `make test-slow` runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def repeat_for(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As pytest.mark.parametrize: the test runs once for each of `values`, all of them whatever fails, with the same fixtures.

    For cases of milliseconds that leave nothing behind. Raises an ExceptionGroup of those that failed, each with its values.
    """
    called, cases = names.replace(" ", "").split(",") if isinstance(names, str) else list(names), list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            assert cases, "no case"
            failed = [error for case in cases if (error := tried(case, fixtures))]
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(cases)} cases of {test.__name__}", failed)

        def tried(case: Any, fixtures: dict[str, Any]) -> Exception | None:
            try:
                test(**fixtures, **dict(zip(called, case if len(called) > 1 else (case,), strict=True)))
            except Exception as error:
                error.add_note(f"with {', '.join(called)} = {case!r}")
                return error
            return None

        signature = inspect.signature(test)
        taken = [parameter for name, parameter in signature.parameters.items() if name not in called]
        run.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
        return run

    return decorate
