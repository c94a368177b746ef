"""What it costs several processes to have a step's trajectories between them: `python benchmarks/trajectories.py [--ranks 4]`.

Each rank has written `--completions` completions of `--tokens` tokens; what is measured begins there and ends when each holds
what its passes read: the way, the batch, its plan, and the figures. Processor seconds, bytes received and the growth of the peak
of memory of every rank, on gloo. With PYTHONPATH on another commit it measures that one.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import rank_trajectories
import ranks
from rank_trajectories import Written, collected, count_bytes, prompts_of

from psigrad.language.training.online.batching import inputs_of, share_of, to_batch
from psigrad.language.training.online.figures import collection_metrics
from psigrad.processes.parallel.world import World
from psigrad.step import Clock

SIZE = 8


def measure(world: World, folder: str, completions: str, tokens: str, lag: str = "") -> None:
    """Write what this rank found into the folder."""
    prompts = prompts_of(world.size * int(completions) // SIZE, 128)
    made: dict[int, Any] = {}
    write = Written.completion
    Written.completion = lambda self, seed: made.get(seed) or made.setdefault(seed, write(self, seed))  # type: ignore[method-assign]
    rank_trajectories.letters = lambda tokenizer, ids: "word" * len(ids)
    gathered = [0.0, 0.0]

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        begin = time.process_time(), time.perf_counter()
        yield
        if name == "gather":
            gathered[:] = time.process_time() - begin[0], time.perf_counter() - begin[1]

    for i in range(world.rank, len(prompts), world.size):
        for k in range(SIZE):
            Written(int(tokens)).completion(i * SIZE + k)
    world.all_gather(None)
    peak, sent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, count_bytes(world)
    rows = collected(world, prompts, SIZE, int(tokens), False, Clock(watch), bool(lag))
    begin = time.process_time(), time.perf_counter()
    batch = to_batch([rows[i : i + SIZE] for i in range(0, len(rows), SIZE)])
    for micro, _ in share_of(world, batch, batch.present, 16_384):
        inputs_of(batch, micro)
    planned = [time.process_time() - begin[0], time.perf_counter() - begin[1]]
    collection_metrics(rows, SIZE)
    found = {
        "tokens": int(batch.mask.sum()),
        "received_mb": sum(sent.values()) / 1e6,
        "peak_grew_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1e3,
        "processor": {"way": gathered[0], "batch": planned[0], "figures": time.process_time() - begin[0] - planned[0]},
        "clock": {"way": gathered[1], "batch": planned[1]},
    }
    Path(folder, f"{world.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Print a line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--lag", action="store_true", help="as with a lag where no cluster samples: all get whole rows")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.modules["trajectories"] = sys.modules["__main__"]
        ranks.run(given.ranks, "trajectories", "measure", folder, given.completions, given.tokens, "lag" * given.lag)
        for rank in range(given.ranks):
            print(json.dumps({"rank": rank, **json.loads(Path(folder, f"{rank}.json").read_text())}))


if __name__ == "__main__":
    main()
