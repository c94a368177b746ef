"""On Ray itself: a worker with room for several jobs is at them at once, and one without does one after the other."""

from __future__ import annotations

import itertools
import os

import pytest
from clusters import PATIENT
from ranks import ROOT, SUPPORT
from sleeper import Sleeper

from psigrad_extras.cluster.actor_pool import ActorPool

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def ray():
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**PATIENT, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}.items():
            patch.setenv(name, value)
        ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
        yield ray
        ray.shutdown()


@pytest.mark.parametrize("depth", [1, 3])
def test_as_many_jobs_as_there_is_room_for_are_under_way_at_once(ray, depth):
    wants = {"name": "sleeper", "address": "auto", "count": 1, "cpus": 1, "minutes": 2.0, "log": lambda *a, **k: None}
    pool = ActorPool(Sleeper, (), depth=depth, **wants)
    try:
        spans = sorted(span for _, span in pool.run([lambda worker: worker.sleep.remote()] * 3))
    finally:
        pool.close()
    together = [later[0] < earlier[1] for earlier, later in itertools.pairwise(spans)]
    assert together == [depth > 1] * 2, spans
