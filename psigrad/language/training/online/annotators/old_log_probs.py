"""The policy's log-probs before the update, and how far they are from the sampler's log-probs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from psigrad.errors import UserError
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.online.batching import compute_by_row
from psigrad.language.training.online.online_run import Annotator, OnlineRun
from psigrad.objective import Batch, PolicyGradient, PolicyOutputs, Prepared
from psigrad.processes.parallel.world import ALONE, World

if TYPE_CHECKING:
    from psigrad.language.models.fused.caches import ActivationCache
    from psigrad.language.models.packing import Groups

COMPARE_EVERY, COMPARED = 4, 20
"""With LoRA dropout or reused activations, measure the gap every `COMPARE_EVERY` steps, on one in `COMPARED` completions."""


class LogProbGap:
    """The mean and maximum of |trainer's log-prob − sampler's log-prob|, in nats, over all tokens that `add` received."""

    def __init__(self) -> None:
        self._sum, self._max, self._count, self._unequal = 0.0, 0.0, 0, 0

    @property
    def mean(self) -> float:
        """The mean absolute difference over all compared tokens."""
        return self._sum / max(1, self._count)

    def add(self, logp: Tensor, sampled: Tensor, mask: Tensor) -> None:
        """Compare the trainer's log-probs [n, T] with the sampler's where the mask is True. All tensors are on the CPU."""
        difference = (logp - sampled).abs()[mask]
        self._sum += float(difference.sum())
        self._max = max(self._max, float(difference.max()))
        self._count += difference.numel()
        self._unequal += int((difference != 0).sum())

    def gather(self, world: World) -> None:
        """Combine the log-prob differences that all processes measured. All processes must call this."""
        each = world.all_gather((self._sum, self._max, self._count, self._unequal))
        sums, largest, counts, unequal = zip(*each, strict=True)
        self._sum, self._max, self._count, self._unequal = math.fsum(sums), max(largest), sum(counts), sum(unequal)

    def check(self, step: int, bound: float) -> None:
        """Raise a `UserError` that names `step` if the mean difference exceeds `bound`: another policy sampled the tokens."""
        if not self.mean <= bound:
            raise UserError(
                f"At step {step} the log-probs of sampler and trainer differ by {self.mean:.2g} on average, above the limit "
                f"{bound:.2g}: the completions were not sampled from the policy that is trained. Check the sampler, or raise "
                "max_logp_difference."
            )

    def figures(self) -> dict[str, float]:
        """Return the mean and maximum difference, and the share of tokens whose log-probs differ; {} if no token was compared."""
        if not self._count:
            return {}
        name = "sampling/sampling_logp_difference"
        return {f"{name}/mean": self.mean, f"{name}/max": self._max, f"{name}/share": self._unequal / self._count}


class OldLogProbs(Annotator):
    """The annotator that recomputes `logp_old` if needed, and measures how far the trainer's log-probs are from the sampler's."""

    def __init__(self) -> None:
        self.gap = LogProbGap()
        self._compared: Batch | None = None

    def columns(self, run: OnlineRun, batch: Batch, step: int, cache: ActivationCache | None) -> Batch:
        """Recompute `logp_old` if needed, and compare it with the sampler's log-probs."""
        self.gap = LogProbGap()
        model, budget, temperature, world = run.model, run.config.micro_batch_tokens, run.params.temperature, run.world
        reused = cache is not None and bool(cache.slabs)  # then training and sampling have the same log-probs
        stale = any(t.version != step for t in batch.inputs)
        # In a single pass, `add_terms` sets `logp_old`.
        enough = (run.exact_sampling or run.single_pass) and not stale
        drops = run.config.model.lora_dropout > 0  # then the trained policy differs from the sampling one
        self._compared = batch if enough and not reused and not drops else None  # `add_terms` compares this batch
        if (reused or drops) and not stale and step % COMPARE_EVERY == 0 and len(present := batch.present.nonzero()[:, 0]):
            # Take other completions each time, and run them forward without the cache.
            size, count = math.ceil(len(present) / COMPARED), step // COMPARE_EVERY
            some = torch.zeros(len(batch.mask), dtype=torch.bool)
            some[present[(torch.arange(size) + count * size) % len(present)]] = True
            again = compute_log_probs(model, batch, budget, temperature, row_mask=some, world=world)
            self.gap.add(again[some], batch.logp_old[some], batch.mask[some])
        if enough:
            return batch
        again = compute_log_probs(model, batch, budget, temperature, cache=cache, world=world)
        if not reused and not stale:  # earlier weights had other log-probs
            self.gap.add(again, batch.logp_old, batch.mask)
        return replace(batch, logp_old=again)

    def add_terms(
        self, run: OnlineRun, part: Prepared, outputs: PolicyOutputs, rows: Tensor, sums: LossSums
    ) -> tuple[Prepared, PolicyOutputs]:
        """Compare the first step's log-probs with the sampler's if needed. If it is the only step, they become `logp_old`."""
        if sums.steps == 0 and (own := self._compared) is not None:
            sums.later(outputs.logp, partial(self.gap.add, sampled=own.logp_old[rows], mask=own.mask[rows]))
        if run.single_pass:
            part = replace(part, batch=replace(part.batch, logp_old=outputs.logp.detach()))
        return part, outputs

    def figures(self, run: OnlineRun, step: int) -> dict[str, float]:
        """Return the metrics of the `LogProbGap`; see `Annotator`. Raise `UserError` if its mean exceeds `run.max_gap`."""
        self.gap.gather(run.world)
        self.gap.check(step + 1, run.max_gap)
        return self.gap.figures()


class OldEntropy(Annotator):
    """The annotator that adds, for each token, the entropy of the policy's distribution before the update."""

    def columns(self, run: OnlineRun, batch: Batch, step: int, cache: ActivationCache | None) -> Batch:
        """Add the column `entropy`, in nats, if the method reads it."""
        if not isinstance(run.algorithm, PolicyGradient) or not run.algorithm.needs_old_entropy:
            return batch

        def of(inputs: Groups) -> Tensor:
            entropy = run.model.evaluate(inputs, temperature=run.params.temperature, entropy=True).entropy
            assert entropy is not None
            return entropy

        return replace(batch, entropy=compute_by_row(batch, run.config.micro_batch_tokens, of, world=run.world))


def compute_log_probs(
    model: LanguageModel,
    batch: Batch,
    budget: int,
    temperature: float,
    *,
    cache: ActivationCache | None = None,
    row_mask: Tensor | None = None,
    world: World = ALONE,
) -> Tensor:
    """Return the batch's log-probs [N, T] under `model`, in passes of up to `budget` tokens; 0 where `row_mask` [N] is False."""
    return compute_by_row(batch, budget, lambda x: model.evaluate(x, temperature=temperature, cache=cache).logp, row_mask, world)
