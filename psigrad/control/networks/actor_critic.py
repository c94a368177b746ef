"""The network of control: a policy and its critics, with separate or shared hidden layers; critics of states or of actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from psigrad.control.networks.convolutions import ConvolvedMLP, Image, Kind, layers_for
from psigrad.control.networks.distributions import Array, Distribution, Noise
from psigrad.control.networks.networks import Activation, Recording, StackedMLP
from psigrad.errors import UserError

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, eq=False)
class NetworkOutput:
    """The network's outputs for M states."""

    policy: Tensor
    """[M, P] the parameters of the action distribution, such as logits."""
    rest: Tensor
    """The parameters of the distribution that are the same in every state."""
    values: Tensor | None
    """[C, M] V(s) of each critic, or [C, M, A] Q(s, ·) for critics of actions."""


class ActorCritic:
    """A policy π(a|s) and C critics, as small multilayer perceptrons.

    If `critic` is "separate", each critic has its own hidden layers. If it is "shared", the policy and the critics are heads on
    the same hidden layers. With `of_actions`, the critics are Q(s, a) of a discrete policy's actions, and V(s) is Σ_a π(a|s)·Q(s,
    a). If the flat observation has an `image`, which starts at its number `at`, the image first passes the convolutions that
    `cnn` names. Policy and critics share them.
    """

    def __init__(
        self,
        observation: int,
        distribution: Distribution,
        hidden: Sequence[int] = (64, 64),
        activation: Activation = "tanh",
        critic: Literal["separate", "shared"] = "separate",
        n_critics: int = 1,
        of_actions: bool = False,
        image: Image | None = None,
        at: int = 0,
        cnn: Kind = "auto",
    ) -> None:
        self.distribution, self.n_critics, self.of_actions = distribution, n_critics, of_actions
        own = distribution.outputs
        width = own if of_actions else 1
        self.shared = critic == "shared" or n_critics == 0
        outputs = (own + n_critics * width,) if self.shared else (own, *[width] * n_critics)
        convolutions = layers_for(cnn, image)
        if image is not None and convolutions:
            beside = observation - image.channels * image.height * image.width
            extra = distribution.extra
            self.towers: StackedMLP = ConvolvedMLP(image, convolutions, hidden, outputs, activation, extra, at, beside)
        else:
            self.towers = StackedMLP(observation, hidden, outputs, activation, distribution.extra)

    @torch.no_grad()
    def initialise(self, seed: int, log_std: float = 0.0) -> None:
        """Initialise the weights as orthogonal matrices, with gain 1 for values and 0.01 for the policy's outputs.

        So the initial policy is nearly the same in all states.
        """
        self.towers.initialise(seed, [1.0] if self.shared else [0.01, *[1.0] * self.n_critics])
        if self.shared:
            weight, _ = self.towers.layers(self.towers.flat)[-1]
            weight[0, :, : self.distribution.outputs] *= 0.01
        self.towers.rest(self.towers.flat).fill_(log_std)

    @property
    def flat(self) -> torch.nn.Parameter:
        """All parameters, as one vector."""
        return self.towers.flat

    @property
    def rest(self) -> Tensor:
        """The parameters of the distribution that are the same in every state, with gradient."""
        return self.towers.rest(self.flat)

    def __call__(self, observations: Tensor) -> NetworkOutput:
        """Return the outputs for observations [M, D], without gradient."""
        return self._split(self.towers(observations), self.rest.detach())

    def record(self, observations: Tensor) -> ForwardPass:
        """Do a forward pass for `ForwardPass.backward`, once. Autograd can differentiate a loss down to its outputs."""
        recording = self.towers.record(observations)
        found = self._split(recording.output, self.rest)
        values = None if found.values is None else found.values.detach().requires_grad_()
        leaves = NetworkOutput(found.policy.detach().requires_grad_(), found.rest.detach().requires_grad_(), values)
        return ForwardPass(self, recording, leaves)

    def record_closed(self, observations: Tensor) -> ForwardPass:
        """Do a forward pass for `ForwardPass.backward_closed`, once. Its outputs have no autograd graph."""
        recording = self.towers.record(observations)
        return ForwardPass(self, recording, self._split(recording.output, self.rest.detach()))

    def plain(self, observations: Tensor, flat: Tensor | None = None) -> NetworkOutput:
        """Return the outputs for the parameters `flat`, by PyTorch's operations. Autograd can differentiate them repeatedly."""
        flat = self.flat if flat is None else flat
        return self._split(self.towers.plain(observations, flat), self.towers.rest(flat))

    def _split(self, out_KMO: Tensor, rest: Tensor) -> NetworkOutput:
        """Return the raw outputs [K, M, O] of the network as a `NetworkOutput`: the policy's and the critics' parts."""
        own = self.distribution.outputs
        policy = out_KMO[0].narrow(1, 0, own)
        if not self.n_critics:
            return NetworkOutput(policy, rest, None)
        width = own if self.of_actions else 1
        if self.shared:
            joined = out_KMO[0, :, own : own + self.n_critics * width]
            values = torch.unflatten(joined, 1, (self.n_critics, width)).transpose(0, 1)
        else:
            values = out_KMO[1:].narrow(2, 0, width)
        return NetworkOutput(policy, rest, values if self.of_actions else values.select(2, 0))

    def state_value(self, output: NetworkOutput) -> Tensor:
        """Return [M] V(s): the mean over critics. For critics of actions, it is the expectation under the policy."""
        assert output.values is not None
        mean = output.values[0] if self.n_critics == 1 else output.values.mean(0)
        return (torch.softmax(output.policy, -1) * mean).sum(-1) if self.of_actions else mean

    def act(self, observations: Array, noise: Array | None = None) -> Array:
        """Return actions for a few observations [E, D], sampled with `noise` [E, P] or, without it, the most likely ones."""
        hidden, (weight, bias), rest = self._numpy
        h = self._features(observations)
        for inner, shift in hidden:
            h = h.dot(inner)
            h += shift
            h = np.tanh(h, out=h) if self.towers.activation == "tanh" else np.maximum(h, 0, out=h)
        out = h.dot(weight)
        out += bias
        return self.distribution.mode(out) if noise is None else self.distribution.sample(out, rest, noise)

    def _features(self, observations: Array) -> Array:
        """Return the input of the hidden layers: the observations, or the features of the convolutions."""
        if not self.towers.front:
            return observations
        with torch.no_grad():
            found: Array = self.towers.seen(torch.from_numpy(observations), self.flat).numpy()
            return found

    def actor(self, rng: np.random.Generator | None, count: int) -> Callable[[Array], Array]:
        """Return a function from `count` observations to actions, sampled with `rng`; without it, the most likely ones."""
        if rng is None:
            return self.act
        noise = Noise(self.distribution, rng, count)
        return lambda observations: self.act(observations, noise.step())

    @cached_property
    def _numpy(self) -> tuple[list[tuple[Array, Array]], tuple[Array, Array], Array]:
        # The cached views stay valid, since the parameters are only ever changed in place.
        *hidden, (weight, bias) = self.towers.as_numpy(0)
        own = self.distribution.outputs
        return hidden, (weight[:, :own], bias[:own]), self.towers.rest(self.flat.detach()).numpy()

    def save(self, folder: Path) -> None:
        """Save the weights as `model.safetensors`, named as in a stack of `nn.Linear`s."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: x.contiguous() for name, x in self.towers.named().items()}, folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Load the weights that `save` wrote. Raises `UserError` if they belong to a different network."""
        found, own = load_file(folder / WEIGHTS), self.towers.named()
        # Shapes must match too, since a copy would broadcast silently.
        if {name: x.shape for name, x in found.items()} != {name: x.shape for name, x in own.items()}:
            raise UserError(
                f"The weights in {folder} belong to a different network; give the environment and net_arch that they "
                "were trained with."
            )
        with torch.no_grad():
            for name, x in own.items():
                x.copy_(found[name])


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """A recorded forward pass, whose gradient through the network's layers is computed in closed form, without autograd.

    The gradient with respect to `output` comes from autograd (`backward`), or from given gradients of log-probabilities,
    entropies and values (`backward_closed`).
    """

    network: ActorCritic
    recording: Recording
    output: NetworkOutput

    def backward(self, loss: Tensor) -> Tensor:
        """Return the gradient of `loss`, a function of `output`, with respect to the flat vector."""
        network, output = self.network, self.output
        leaves = [x for x in (output.policy, output.rest, output.values) if x is not None]
        grads = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
        back = torch.zeros_like(self.recording.output)
        views = network._split(back, output.rest)
        d_policy, d_rest, d_values = next(grads), next(grads), next(grads, None)
        if d_policy is not None:
            views.policy.copy_(d_policy)
        if d_values is not None and views.values is not None:
            views.values.copy_(d_values)
        out = self.recording.backward(back)
        if d_rest is not None:
            network.towers.rest(out).copy_(d_rest)
        return out

    def backward_closed(self, actions: Tensor, d_logp: Tensor, d_entropy: float, d_values: Tensor | None) -> Tensor:
        """Return the gradient of a loss on the first m states of this pass, with respect to the flat vector.

        The arguments are the loss's gradients with respect to the actions' log-probs [m], to each entropy, and to the values [C,
        m].
        """
        network, output, steps = self.network, self.output, len(actions)
        back = torch.zeros_like(self.recording.output)
        views = network._split(back, output.rest)
        d_policy, d_rest = network.distribution.slope(output.policy[:steps], output.rest, actions, d_logp, d_entropy)
        views.policy[:steps] = d_policy
        if d_values is not None and views.values is not None:
            views.values[:, :steps] = d_values
        out = self.recording.backward(back)
        if network.distribution.extra:
            network.towers.rest(out).copy_(d_rest)
        return out
