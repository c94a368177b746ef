"""TRPO: on-policy control in which a step within a trust region replaces gradient steps on the surrogate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psigrad.control.methods.on_policy import Minibatch, OnPolicyTrainer
from psigrad.errors import UserError
from psigrad.objective import PolicyGradient, Totals, trust_region


class TRPOTrainer(OnPolicyTrainer):
    """The trainer of TRPO. It maximises E[ρ·A] under a limit on the mean KL(old‖new), then trains the critic.

    Of the `PolicyGradient`, only psi and the critic's loss are used.
    Source: Schulman et al. 2015, arXiv:1502.05477; the critic's schedule is that of sb3-contrib.
    """

    def __init__(self, *given: Any) -> None:
        self._taken = 0
        super().__init__(*given)
        if self.network.shared:
            raise UserError(
                "TRPO's critic needs separate layers, since fitting shared ones would move the policy; set critic to separate."
            )

    @property
    def moves(self) -> int:
        """The number of changes to the weights: updates by the optimiser, and steps of the policy."""
        return super().moves + self._taken

    def _once(self, minibatches: int) -> bool:
        return False

    def _passes(
        self, algorithm: PolicyGradient, whole: Minibatch, totals: Totals, minibatches: int, metrics: bool
    ) -> dict[str, float]:
        taken = self._policy_step(whole)
        terms = {
            "policy/approxkl_avg": taken.kl,
            "trpo/improvement": taken.improvement,
            "trpo/tries": float(taken.tries),
            "trpo/accepted": float(taken.improvement > 0),
        }
        error = self._fit_critic(algorithm, whole, minibatches)
        return {**terms, "value_loss": error} if metrics else terms

    def _policy_step(self, whole: Minibatch) -> trust_region.TrustRegionStep:
        network, settings, distribution = self.network, self.config.trpo, self.network.distribution
        advantage, logp_old = whole.prepared.advantage[:, 0], whole.prepared.batch.logp_old[:, 0]
        observation, start = whole.observation, network.flat
        now = network.plain(observation)
        old_policy, old_rest = now.policy.detach(), now.rest.detach()
        objective = (torch.exp(distribution.log_prob(now.policy, now.rest, whole.action) - logp_old) * advantage).mean()
        (gradient,) = torch.autograd.grad(objective, start, retain_graph=True)
        kl = distribution.kl(old_policy, old_rest, now.policy, now.rest).mean()
        product = trust_region.fisher_product(kl, start, settings.cg_damping)

        def measure(shift: Tensor) -> tuple[float, float]:
            with torch.no_grad():
                new = network.plain(observation, start + shift)
                ratio = torch.exp(distribution.log_prob(new.policy, new.rest, whole.action) - logp_old)
                moved = distribution.kl(old_policy, old_rest, new.policy, new.rest).mean()
                return float((ratio * advantage).mean() - objective), float(moved)

        taken = trust_region.step(
            gradient,
            product,
            measure,
            max_kl=settings.max_kl,
            cg_steps=settings.cg_max_steps,
            shrink=settings.line_search_shrinking_factor,
            tries=settings.line_search_max_iter,
        )
        with torch.no_grad():
            start.add_(taken.shift)
        self._taken += 1
        return taken

    def _fit_critic(self, algorithm: PolicyGradient, whole: Minibatch, minibatches: int) -> float:
        """Train the critic alone, in passes over the rollout. Return its mean loss in the last pass."""
        assert algorithm.critic is not None and whole.prepared.batch.value is not None and whole.prepared.returns is not None
        value_old, returns = whole.prepared.batch.value[:, 0], whole.prepared.returns[:, 0]
        rng = self.rng("minibatch")
        error = 0.0
        for _ in range(self.config.trpo.n_critic_updates):
            order, error = torch.from_numpy(rng.permutation(len(returns))), 0.0
            for part in order.tensor_split(minibatches):
                recorded = self.network.record(whole.observation[part])
                assert recorded.output.values is not None
                # All critics of an ensemble have the same returns as targets.
                losses = [algorithm.critic(v, value_old[part], returns[part]).mean() for v in recorded.output.values]
                loss = algorithm.critic.coefficient * torch.stack(losses).mean()
                gradient = recorded.backward(loss)
                gradient[self.network.towers.front_slice] = 0.0  # the policy shares the convolutions, which stay as they are
                self.apply_gradient(gradient, self.learning_rate)
                error += float(loss.detach()) / minibatches
        return error
