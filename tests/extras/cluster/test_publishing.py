"""Who holds the weights while they are published."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from psigrad_extras.cluster.ray_sampler import RaySampler


@pytest.mark.parametrize("publishes", [True, False])
def test_only_who_publishes_holds_a_whole_model(publishes):
    """All make the same calls, since weights may be in shards; each weight is let go before the next, but where they are sent."""
    given = []

    def weights():
        for name in "abc":
            given.append(name)
            yield name, torch.ones(2, device="cpu" if publishes else "meta")  # without numbers, it cannot be held

    store = SimpleNamespace(put=lambda held: {name: x.tolist() for name, x in held.items()})
    sampler = RaySampler(SimpleNamespace(ray=store) if publishes else None, weights, lambda: 1, exact=True, prompts_per_task=1)
    version = sampler.snapshot().version
    assert given == ["a", "b", "c"] and version.number == 0
    assert version.place == ([{name: [1.0, 1.0] for name in "abc"}] if publishes else [])
