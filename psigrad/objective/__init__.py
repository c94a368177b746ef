"""The mathematics of policy gradients, preference losses and Q-learning. It imports torch, and nothing from the rest of psigrad.

Read batch.py, then policy_gradient.py, then catalog.py. The files in parts/ are grouped by the slots that their parts fill.
"""

from __future__ import annotations

from psigrad.objective.batch import Batch, Loss, PolicyOutputs, Prepared, Totals, terminal
from psigrad.objective.policy_gradient import PolicyGradient

__all__ = ["Batch", "Loss", "PolicyGradient", "PolicyOutputs", "Prepared", "Totals", "terminal"]
