"""The preference losses: online DPO is DPO on a run's own samples, and which losses need a reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psigrad.config.algorithms import resolve_loss
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES
from psigrad.objective.preferences.preference_catalog import ONLINE_DPO
from psigrad.objective.preferences.preference_catalog import ONLINE_METHODS as ONLINE


@pytest.mark.parametrize(("name", "reference"), [("dpo", True), ("simpo", False), ("kto", True)])
def test_whether_a_reference_is_needed_is_a_property(name, reference):
    loss = resolve_loss(name)
    assert loss.needs_reference is reference
    if name != "kto":
        online = replace(ONLINE_DPO, loss=loss)
        assert online.needs_reference is reference and online.needs_critic is False


def test_online_dpo_is_dpo_on_groups_of_two_or_more():
    online = ONLINE["online_dpo"].algorithm
    assert (online.loss, online.min_group_size) == (LOSSES["dpo"].algorithm, 2)
