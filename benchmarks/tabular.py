"""Sparse MDPs solved by value iteration: the scaling curve to a million states, and pymdptoolbox beside it.

python benchmarks/tabular.py [--limit SECONDS] [--repeats N] [--quick]

Prints one JSON line for each measurement and a table, and writes benchmarks/results/tabular.json. Each measurement runs in a
process of its own, so that its peak memory is its own. The world is a square grid, slip 0.2, γ = 0.99, in which one cell in 200
holds a treasure (+1) or a trap (−1, three in four); `far` has one treasure in a corner, so that values must travel the whole way.
pymdptoolbox 4.0b3 gets the same matrices, and equal values are asserted before any time is compared. Its time is that of its
constructor, which checks the matrices and bounds the number of sweeps, and of run(), within 16 GB of memory; ours is that of
building the grid, its MDP (with all checks) and of solve(). The sweeps alone are compared as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import platform
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from psigrad.tabular import MDP, GridWorld, solve

RESULTS = Path(__file__).parent / "results" / "tabular.json"
EPSILON = 1e-6
SCALING = (32, 100, 316, 1000)
BESIDE = (32, 64, 100, 150, 200)
MEMORY_GB = 16  # what pymdptoolbox may take: its checks grow with the square of the number of states


def world(side: int, kind: str) -> GridWorld:
    """The grid of a benchmark: `field` with many prizes, `far` with one."""
    if kind == "far":
        return GridWorld(side, side, {(side - 1, side - 1): 1.0}, slip=0.2, gamma=0.99)
    rng = np.random.default_rng(0)
    cells = rng.integers(0, side, (side * side // 200, 2)).tolist()
    prizes = {(r, c): 1.0 if k % 4 == 0 else -1.0 for k, (r, c) in enumerate(cells)}
    return GridWorld(side, side, prizes, slip=0.2, gamma=0.99)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(side: int, kind: str, method: str) -> dict[str, Any]:
    """One solution by psigrad."""
    before = peak_mb()
    start = time.perf_counter()
    mdp = world(side, kind).mdp(outcomes=False)
    built = time.perf_counter()
    solution = solve(mdp, method=method, epsilon=EPSILON)
    done = time.perf_counter()
    return {
        "what": "psigrad", "method": method, "kind": kind, "states": mdp.n_states, "nonzeros": int(mdp.transitions.nnz),
        "build_s": built - start, "solve_s": done - built, "total_s": done - start, "steps": solution.iterations,
        "error_bound": solution.error_bound, "peak_mb": peak_mb(), "import_mb": before, "value_sum": float(solution.value.sum()),
    }  # fmt: skip


def matrices(mdp: MDP) -> list[Any]:
    """The (S, S) matrix of each action, with loops where an episode is over, as pymdptoolbox wants them."""
    n = mdp.n_states
    loops = sparse.diags_array(mdp.is_terminal.astype(float))
    return [sparse.csr_matrix(mdp.transitions[a * n : (a + 1) * n] + loops) for a in range(mdp.n_actions)]


def theirs(side: int, kind: str) -> dict[str, Any]:
    """One solution by pymdptoolbox's ValueIteration, compared with ours."""
    from mdptoolbox.mdp import ValueIteration

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GB << 30, MEMORY_GB << 30))
    warnings.simplefilter("ignore")
    mdp = world(side, kind).mdp(outcomes=False)
    parts, rewards = matrices(mdp), np.ascontiguousarray(mdp.rewards)
    start = time.perf_counter()
    peer = ValueIteration(parts, rewards, mdp.gamma, epsilon=EPSILON)
    built = time.perf_counter()
    peer.run()
    done = time.perf_counter()
    difference = float(np.abs(np.array(peer.V) - solve(mdp, method="value_iteration", epsilon=EPSILON).value).max())
    assert difference < 2 * EPSILON, f"The values differ by {difference}; nothing to compare."
    return {
        "what": "pymdptoolbox", "method": "value_iteration", "kind": kind, "states": mdp.n_states, "build_s": built - start,
        "solve_s": done - built, "total_s": done - start, "steps": peer.iter, "peak_mb": peak_mb(),
        "largest_difference": difference,
    }  # fmt: skip


def _run(connection: Any, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    try:
        connection.send(function(*arguments))
    except MemoryError:
        connection.send({"what": function.__name__, "arguments": arguments, "failed": f"more than {MEMORY_GB} GB of memory"})


def alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The measurement of a function in a fresh process; printed as it comes."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        raise SystemExit(f"{function.__name__}{arguments} ended without a result; see the traceback above.") from None
    process.join()
    print(json.dumps(found), flush=True)
    return found


def beside(side: int, repeats: int) -> dict[str, Any] | None:
    """Alternated runs of both at one size, and the ratios of their medians; None where the peer has not enough memory."""
    runs = []
    for _ in range(repeats):
        peer = alone(theirs, side, "field")
        if "failed" in peer:
            return None
        runs.append((peer, alone(ours, side, "field", "value_iteration")))
    return ratios(runs)


def ratios(runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Medians of alternated runs (peer, ours) at one size, and how many times faster ours is."""
    median = {
        f"{name}_{part}_s": statistics.median(run[k][f"{part}_s"] for run in runs)
        for k, name in enumerate(("peer", "psigrad"))
        for part in ("build", "solve", "total")
    }
    return {
        "states": runs[0][0]["states"], "runs": len(runs), "peer_peak_mb": runs[0][0]["peak_mb"],
        "largest_difference": max(run[0]["largest_difference"] for run in runs), **median,
        "times_faster": median["peer_total_s"] / median["psigrad_total_s"],
        "times_faster_sweeps_only": median["peer_solve_s"] / median["psigrad_solve_s"],
    }  # fmt: skip


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Rows as aligned text."""
    cells = [list(columns)] + [[format(row[key], spec) for key, spec in columns.items()] for row in rows]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=400, help="seconds that one run of pymdptoolbox may be expected to take")
    parser.add_argument("--repeats", type=int, default=3, help="alternated runs at each size, where the peer takes under 100 s")
    parser.add_argument("--quick", action="store_true", help="small sizes only, and nothing is written")
    options = parser.parse_args()
    scaling = []
    for side in SCALING[:2] if options.quick else SCALING:
        for kind in ("field", "far"):
            for method in ("value_iteration", "modified_policy_iteration"):
                runs = [alone(ours, side, kind, method) for _ in range(options.repeats)]
                scaling.append(sorted(runs, key=lambda run: run["total_s"])[len(runs) // 2])
    compared: list[dict[str, Any]] = []
    for side in BESIDE[:2] if options.quick else BESIDE:
        expected = compared[-1]["peer_total_s"] * (side**2 / compared[-1]["states"]) ** 2 if compared else 0.0
        if expected > options.limit:
            print(f"{side * side} states would take pymdptoolbox about {expected:.0f} s; the limit is {options.limit:.0f} s.")
            break
        found = beside(side, options.repeats if expected < 100 else 1)
        if found is None:
            print(f"{side * side} states need more than the {MEMORY_GB} GB that pymdptoolbox may take here.")
            break
        compared.append(found)
    report(scaling, compared, write=not options.quick)


def report(scaling: list[dict[str, Any]], compared: list[dict[str, Any]], *, write: bool) -> None:
    """Prints the tables and writes the results."""
    columns = {"states": ",", "kind": "", "method": "", "nonzeros": ",", "build_s": ".3f", "solve_s": ".3f", "steps": ""}
    print(table(scaling, columns | {"error_bound": ".1e", "peak_mb": ".0f", "import_mb": ".0f"}))
    columns = {
        "states": ",",
        "runs": "",
        "peer_peak_mb": ".0f",
        "largest_difference": ".1e",
        "peer_build_s": ".3f",
        "peer_solve_s": ".3f",
    }
    columns |= {"psigrad_build_s": ".3f", "psigrad_solve_s": ".3f", "times_faster": ".1f", "times_faster_sweeps_only": ".1f"}
    print(table(compared, columns))
    if not write:
        return
    processor = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": processor, "python": platform.python_version(), "numpy": np.__version__}
    RESULTS.write_text(
        json.dumps({"machine": machine, "epsilon": EPSILON, "scaling": scaling, "beside": compared}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
