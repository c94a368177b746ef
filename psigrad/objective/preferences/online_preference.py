"""Preference losses on pairs that the policy samples itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psigrad.objective.catalog import Catalog
from psigrad.objective.preferences.preference_catalog import DPO
from psigrad.objective.preferences.preference_loss import Preference

METHODS: Catalog[OnlinePreference] = Catalog()


@dataclass(frozen=True)
class OnlinePreference:
    """A preference loss on pairs that the policy samples and a reward ranks, step by step.

    Source: Guo et al. 2024, online DPO, arXiv:2402.04792, with a reward in place of the judge.
    """

    loss: Preference = DPO
    """The loss of each pair."""
    name: str = ""
    min_group_size: int = 2
    """Completions of one prompt that a pair is picked from."""
    needs_critic: ClassVar[bool] = False

    def initial_state(self) -> dict[str, float]:
        """It has no memory."""
        return {}

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of a reference policy are read."""
        return self.loss.needs_reference


ONLINE_DPO = METHODS.declare("online_dpo", "preference loss on the best and worst completion of each group", OnlinePreference())
