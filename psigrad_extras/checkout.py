"""What stands in psigrad's source checkout and not in the wheel: its studies and its benchmarks."""

from __future__ import annotations

from pathlib import Path


def checkout_folder(name: str) -> Path | None:
    """A folder of psigrad's source checkout that the wheel does not hold (`studies`, `benchmarks`), or None where there is none.

    It is looked for beside the package, then in the current folder, where that is a checkout.
    """
    for root in (Path(__file__).parents[1], Path.cwd()):
        if (root / name).is_dir() and (root / "psigrad" / "importing.py").is_file():
            return root / name
    return None
