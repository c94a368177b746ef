"""Who holds the weights while they are published."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from psigrad_extras.cluster import ray_sampler
from psigrad_extras.cluster.ray_sampler import RaySampler


@pytest.mark.parametrize("publishes", [True, False])
def test_only_who_publishes_holds_a_whole_model(publishes, monkeypatch):
    """All make the same calls, since weights may be in shards; each weight is let go before the next, but where they are sent."""
    kept, given, known = [], [], ray_sampler._array
    monkeypatch.setattr(ray_sampler, "_array", lambda weight: kept.append(1) or known(weight))

    def weights():
        for name in "abc":
            given.append(name)
            yield name, torch.ones(2)

    ray = SimpleNamespace(put=lambda held: tuple(held))
    pool = SimpleNamespace(ray=ray) if publishes else None
    sampler = RaySampler(pool, weights, lambda: 1, exact=True, prompts_per_task=1)
    version = sampler.snapshot().version
    assert given == ["a", "b", "c"] and len(kept) == 3 * publishes
    assert version.number == 0 and sampler._published[1].place == ([("a", "b", "c")] if publishes else [])
