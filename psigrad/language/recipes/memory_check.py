"""A trial of a run's largest forward and backward pass before its first step, so that a lack of memory shows at once.

The trial leaves no trace: gradients are discarded, and the random state is restored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from psigrad.errors import UserError
from psigrad.language.models.packing import Groups, pack_groups
from psigrad.language.training.offline.offline import OfflineRun
from psigrad.language.training.online.annotators.reference import exact_kl
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.objective import PolicyGradient
from psigrad.optim import Optimizer
from psigrad.optim.gradients import in_place, is_out_of_memory


def check_online(run: OnlineRun) -> None:
    """Run a forward and backward pass on the largest micro-batch: the longest prompts with completions of maximum length."""
    inputs = _fullest(run)
    method = run.algorithm if isinstance(run.algorithm, PolicyGradient) else None
    needs_critic = run.algorithm.needs_critic
    with _trial([run.optimizer, *([run.critic.optimizer] if run.critic else [])]):
        evaluation = run.model.evaluate(
            inputs,
            temperature=run.params.temperature,
            entropy=method is not None and method.needs_entropy,
            kl_to=None if run.reference is None else exact_kl(method, run.reference),
            value=needs_critic and run.critic is None,
        )
        parts = (evaluation.logp, evaluation.entropy, evaluation.kl, evaluation.value)
        loss: Tensor = torch.stack([part.sum() for part in parts if part is not None]).sum()
        loss.backward()
        if run.critic is not None:
            run.critic.model.values(inputs).sum().backward()


def check_offline(run: OfflineRun) -> None:
    """Run a forward and backward pass on a micro-batch with the dataset's longest row and other long rows."""
    task = run.task
    longest = sorted(range(len(task)), key=lambda i: -task.tokens([i]))[: run.config.batch_size]
    with _trial([run.optimizer]):
        first = task.shares(longest, run.config.micro_batch_tokens)[0]  # the first share contains the longest row
        first().value.backward()


def _fullest(run: OnlineRun) -> Groups:
    """Return the largest micro-batch of a worst-case step: the longest prompts, and completions of the maximum length."""
    config = run.config
    count = math.ceil(config.prompts_per_step / config.num_minibatches)
    prompts = sorted((p.ids for p in run.prompts), key=len)[-count:]
    room = run.model.max_length
    lengths = [[min(run.params.max_tokens, room - len(p))] * config.num_generations for p in prompts]
    parts = pack_groups([len(p) for p in prompts], lengths, config.micro_batch_tokens)

    def tokens(part: Sequence[tuple[int, list[int]]]) -> int:
        return sum(len(prompts[g]) + sum(lengths[g][k] for k in ks) for g, ks in part)

    fullest = max(parts, key=tokens)
    return Groups([prompts[g] for g, _ in fullest], [[[prompts[g][-1]] * lengths[g][k] for k in ks] for g, ks in fullest])


@contextlib.contextmanager
def _trial(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Clear the gradients of `optimizers` and restore the random state after the `with` block.

    Raises `UserError` if the block runs out of the device's memory.
    """
    try:
        with torch.random.fork_rng(devices=[]), in_place(*(o.sums for o in optimizers)):
            yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            "The longest samples of this run do not fit the device's memory; `psigrad plan` suggests what to change."
        ) from error
    finally:
        for optimizer in optimizers:
            optimizer.clear()
