"""The command `python -m museum`."""

from __future__ import annotations

import argparse
import datetime
import importlib
import logging
import os
import sys
import warnings
from importlib import metadata

from museum.exhibit import LIBRARIES, Exhibit, find, load


def main(arguments: list[str] | None = None) -> int:
    """List the exhibits, explain one, or check libraries against them. Return 1 if a value is wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m museum", description="The museum of silent bugs.")
    parser.add_argument("--library", action="append", choices=[*LIBRARIES, "all"], help="library to check; repeatable")
    parser.add_argument("--exhibit", choices=load(), metavar="NAME", help="exhibit to explain, or to check alone with --library")
    given = parser.parse_args(arguments)
    chosen = [item for name, item in load().items() if given.exhibit in (None, name)]
    if given.library:
        return _compare(list(LIBRARIES) if "all" in given.library else given.library, chosen)
    for item in chosen:
        print(_explain(item) if given.exhibit else f"{item.name:20} {item.title}")
    return 0


def _explain(item: Exhibit) -> str:
    case = item.case
    values = f"Right: {list(case.right)}\nFaulty formula: {list(case.wrong)}\nTolerance: {case.tolerance:g}"
    return "\n".join([item.name, "", item.story, "", values, *item.links, *["psigrad had this fault too."] * item.psigrad_too])


def _compare(libraries: list[str], chosen: list[Exhibit]) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        adapters = {name: importlib.import_module(f"museum.adapters.{name}") for name in libraries}
    except ModuleNotFoundError as error:
        sys.exit(f"{error}; install it, or choose another --library.")
    known = {one.name.replace("-", "_"): one.version for one in metadata.distributions()}
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", *LIBRARIES) if name in known)
    print(f"{datetime.date.today()}: {versions}\n\n| exhibit | {' | '.join(libraries)} |\n|---|{'---|' * len(libraries)}")
    found = {(item.name, name): find(adapter, item) for item in chosen for name, adapter in adapters.items()}
    for item in chosen:
        print(f"| {item.name} | {' | '.join(found[item.name, name].state for name in libraries)} |")
    for (item_name, name), one in found.items():
        if len(libraries) == 1 or one.state in ("wrong", "refuses"):
            print(f"\n{item_name}, {name}: {one.state}: {one.note}")
    return int(any(one.state == "wrong" for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
