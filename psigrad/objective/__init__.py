"""The mathematics of policy gradients on tensors. It imports torch and no other package of psigrad.

Read batch.py, then policy_gradient.py, then catalog.py. The parts are grouped by the slots that they fill.
"""

from __future__ import annotations

from psigrad.objective.batch import Batch, Loss, PolicyOutputs, Prepared, Totals, terminal
from psigrad.objective.policy_gradient import PolicyGradient

__all__ = ["Batch", "Loss", "PolicyGradient", "PolicyOutputs", "Prepared", "Totals", "terminal"]
