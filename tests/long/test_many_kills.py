"""More SIGKILLs than the default suite has time for: `make test-long`."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest
from resuming import RECIPES, digest, dying_at, run_to_end
from tiny_jobs import forked, make_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_hundred_seeded_kills_change_nothing(recipe, job, tmp_path, record_property):
    run, config = RECIPES[recipe]

    def counted():
        seen: list[str] = []
        dying_at(0, seen)
        run(config(job, tmp_path / "whole"))
        (tmp_path / "events.json").write_text(json.dumps(seen))

    assert forked(counted) == 0
    events, expected = json.loads((tmp_path / "events.json").read_text()), digest(tmp_path / "whole")
    rng = random.Random(7)
    record_property("count", 200)
    for k in range(200):
        point, output = rng.randrange(1, len(events) + 1), tmp_path / f"run-{k}"

        def doomed(point=point, output=output):
            dying_at(point)
            run(config(job, output))

        status = forked(doomed)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert run_to_end(run, config, job, output) == 0
        assert digest(output) == expected, f"killed at event {point}: {events[point - 1]}"
