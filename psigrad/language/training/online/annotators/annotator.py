"""The protocol of annotators: columns before the first optimiser step, and terms in each forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from psigrad.objective import Batch, PolicyOutputs, Prepared

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache
    from psigrad.language.models.language_model import Divergence
    from psigrad.language.training.online.batch import MicroBatch
    from psigrad.language.training.online.online_run import Online


class Annotator:
    """Adds one kind of column or term to the batches of a run. This base class adds nothing.

    An annotator may keep what belongs to the current collection: `columns` starts a new one.
    """

    gives_reference = False
    """True if it answers for the reference of a KL term."""

    def columns(self, run: Online, batch: Batch, step: int, cache: ActivationCache | None) -> Batch:
        """Return the batch with further columns [N, T]. `step` counts the steps that the policy has behind it."""
        return batch

    def divergence(self, run: Online, batch: Batch, micro: MicroBatch) -> Divergence | None:
        """Return the KL that the policy's forward pass is to sum over the vocabulary, if any."""
        return None

    def in_pass(
        self, run: Online, part: Prepared, outputs: PolicyOutputs, rows: Tensor, first: bool
    ) -> tuple[Prepared, PolicyOutputs]:
        """Return the `rows` of a batch and the policy's outputs on them with further terms. `first`: no weight has moved yet."""
        return part, outputs

    def figures(self, run: Online, step: int) -> dict[str, float]:
        """Return metrics of the collection, after its last optimiser step. Raises `UserError` where a run must not continue."""
        return {}

    def after_step(self, run: Online, number: int) -> None:
        """Update what follows the policy, after step `number`."""
