"""Small networks for control: K multilayer perceptrons of equal shape (towers), evaluated by batched matrix products.

A policy and its critics have hidden layers of the same sizes, so they are towers of one network. That halves the number of
PyTorch operations, which dominates the time of a small network. All parameters are in one flat vector, so that an optimiser step,
a gradient norm, a copy and a step along a direction are one operation each.

Axes: `_K` towers, `_M` states, `_D` numbers of an observation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from psigrad.compiled import FlatKernels, kernels

Activation = Literal["tanh", "relu"]
Layers = list[tuple[Tensor, Tensor]]
# The number of states per product. A layer's output is then still in the core's cache when the next layer reads it.
_GROUPS = 2048


class StackedMLP(nn.Module):
    """K multilayer perceptrons (towers) with hidden layers of the same sizes on the same input. They may have different outputs.

    `flat` is the only parameter. For each layer, it has the weights [K, in, out] and the biases [K, 1, out] of all towers. Then
    follow `front` numbers for layers before the towers, such as convolutions, and `extra` numbers for the network's owner. Towers
    with fewer outputs than the widest one have unused columns.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: Sequence[int],
        activation: Activation = "tanh",
        extra: int = 0,
        front: int = 0,
    ) -> None:
        super().__init__()
        self.outputs, self.activation, self.towers = tuple(outputs), activation, len(outputs)
        self.sizes = [inputs, *hidden, max(outputs)]
        self.shapes = [(self.towers, a, b) for a, b in itertools.pairwise(self.sizes)]
        count = sum(math.prod(shape) + shape[0] * shape[2] for shape in self.shapes)
        self.extra, self.front, self.front_slice = extra, front, slice(count, count + front)
        self.flat = nn.Parameter(torch.zeros(count + front + extra))
        self._viewed: tuple[int, Layers] | None = None
        self._gradient: tuple[Tensor, Layers] | None = None

    def layers(self, flat: Tensor) -> Layers:
        """Return the weights [K, in, out] and biases [K, 1, out] of each layer, as views of a flat vector."""
        found, at = [], 0
        for k, a, b in self.shapes:
            weight = flat[at : at + k * a * b].view(k, a, b)
            at += k * a * b
            found.append((weight, flat[at : at + k * b].view(k, 1, b)))
            at += k * b
        return found

    def rest(self, flat: Tensor) -> Tensor:
        """Return the `extra` numbers at the end of a flat vector."""
        return flat[len(flat) - self.extra :]

    def seen(self, x_MD: Tensor, flat: Tensor) -> Tensor:
        """Return the input of the layers for observations: the observations themselves."""
        return x_MD

    def forward(self, x_MD: Tensor) -> Tensor:
        """Return the outputs [K, M, widest], without gradient."""
        with torch.no_grad():
            return self._activations(self.seen(x_MD, self.flat))[-1]

    def with_flat(self, flat: Tensor, x_MD: Tensor) -> Tensor:
        """Return the outputs [K, M, widest] with the parameters `flat` instead of this network's."""
        with torch.no_grad():
            return self._activations(self.seen(x_MD, flat), self.layers(flat))[-1]

    def record(self, x_MD: Tensor) -> Recording:
        """Do a forward pass whose gradient can be computed once."""
        native = self._native(x_MD) if len(x_MD) <= _GROUPS else None
        return Recording(self, self._record(x_MD)) if native is None else _NativeRecording(self, native, x_MD)

    def _native(self, x_MD: Tensor) -> FlatKernels | None:
        """Return psigrad's compiled kernels if they apply: to float32 layers with ReLUs on a CPU. Otherwise return None.

        For small layers, they take half the time of PyTorch's operations.
        """
        found = kernels() if self.activation == "relu" and x_MD.device.type == "cpu" else "PyTorch's"
        if isinstance(found, str) or not (x_MD.dtype == self.flat.dtype == torch.float32 and x_MD.is_contiguous()):
            return None
        return found.towers

    def _split_layers(self, given: Tensor, states: int) -> list[Tensor]:
        """Return the output of each layer, [K, M, out], as views of the kernels' output."""
        widths = [self.towers * states * width for width in self.sizes[1:]]
        return [h.view(self.towers, states, -1) for h in given.split(widths)]

    @torch.no_grad()
    def _record(self, x_MD: Tensor) -> list[list[Tensor]]:
        layers = self._views()
        parts = (x_MD,) if len(x_MD) <= _GROUPS else torch.split(x_MD, _GROUPS)
        return [self._activations(x, layers) for x in parts]

    def plain(self, x_MD: Tensor, flat: Tensor | None = None) -> Tensor:
        """Return the outputs by PyTorch's operations, so that autograd can differentiate them any number of times."""
        act = torch.tanh if self.activation == "tanh" else torch.relu
        flat = self.flat if flat is None else flat
        layers, x = self.layers(flat), self.seen(x_MD, flat)
        h = x.expand(self.towers, *x.shape)
        for i, (weight, bias) in enumerate(layers):
            h = torch.baddbmm(bias, h, weight)
            h = h if i == len(layers) - 1 else act(h)
        return h

    def _activations(self, x_MD: Tensor, layers: Layers | None = None) -> list[Tensor]:
        """Return a list of the network's input and of the output of every layer."""
        act = torch.tanh_ if self.activation == "tanh" else torch.relu_
        hs, layers = [x_MD.expand(self.towers, *x_MD.shape)], layers or self._views()
        for i, (weight, bias) in enumerate(layers):
            h = torch.baddbmm(bias, hs[-1], weight)
            hs.append(h if i == len(layers) - 1 else act(h))
        return hs

    def _views(self) -> Layers:
        # The views are cached, since making them takes longer than a small layer. The vector is only ever changed in place.
        if self._viewed is None or self._viewed[0] != self.flat.data_ptr():
            self._viewed = (self.flat.data_ptr(), self.layers(self.flat.detach()))
        return self._viewed[1]

    def _room(self) -> tuple[Tensor, Layers]:
        """Return (a vector for the gradient, its views by layer). It is reused, so a new gradient overwrites the last one."""
        if self._gradient is None or self._gradient[0].device != self.flat.device:
            out = torch.zeros_like(self.flat, requires_grad=False)
            self._gradient = (out, self.layers(out))
        if self.extra:
            self.rest(self._gradient[0]).zero_()
        return self._gradient

    @torch.no_grad()
    def initialise(self, seed: int, gains: Sequence[float] | None = None) -> None:
        """Initialise the weights as orthogonal matrices, with gain √2 in hidden layers and `gains` [K] in the last; biases as 0.

        Without `gains`, all are uniform within ±1/√in, as in `nn.Linear`. Source: Andrychowicz et al. 2021, arXiv:2006.05990.
        """
        generator = torch.Generator().manual_seed(seed)
        for i, (weight, bias) in enumerate(self.layers(self.flat)):
            for k in range(self.towers):
                if gains is None:
                    bound = 1 / math.sqrt(weight.shape[1])
                    weight[k].uniform_(-bound, bound, generator=generator)
                    bias[k].uniform_(-bound, bound, generator=generator)
                else:
                    gain = gains[k] if i == len(self.shapes) - 1 else math.sqrt(2)
                    nn.init.orthogonal_(weight[k].T, gain, generator=generator)
                    bias[k].zero_()

    def named(self) -> dict[str, Tensor]:
        """Return views of every used parameter, named as in `nn.Linear`: "tower.layer.weight" [out, in], "…bias" [out]."""
        found = {}
        for i, (weight, bias) in enumerate(self.layers(self.flat.detach())):
            for k, outputs in enumerate(self.outputs):
                width = outputs if i == len(self.shapes) - 1 else weight.shape[2]
                found[f"{k}.{i}.weight"] = weight[k, :, :width].T
                found[f"{k}.{i}.bias"] = bias[k, 0, :width]
        if self.extra:
            found["extra"] = self.rest(self.flat.detach())
        return found

    def as_numpy(self, tower: int = 0) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Return (weights [in, out], biases [out]) of each layer of one tower, as numpy arrays that share the parameters' memory.

        They are for acting in a few states, where numpy takes a third of PyTorch's time. On a device other than the CPU, they are
        copies.
        """
        return [(w[tower].numpy(), b[tower, 0].numpy()) for w, b in self.layers(self.flat.detach().cpu())]


class Recording:
    """A recorded forward pass, whose gradient is computed in closed form. Tests compare it with autograd on `StackedMLP.plain`.

    Autograd is not used, since a node of its graph would cost more time than the operation itself.
    """

    def __init__(self, towers: StackedMLP, parts: list[list[Tensor]]) -> None:
        self.towers, self._parts = towers, parts
        self.output = parts[0][-1] if len(parts) == 1 else torch.cat([hs[-1] for hs in parts], 1)
        """[K, M, widest] the outputs, without gradient."""

    def backward(self, grad_KMO: Tensor) -> Tensor:
        """Return the gradient with respect to `flat`, given that with respect to the output of all states or of the first ones.

        It is 0 for the `extra` numbers. The next call overwrites it.
        """
        return self._backward(grad_KMO)

    @torch.no_grad()
    def _backward(self, grad_KMO: Tensor, inputs: list[Tensor] | None = None) -> Tensor:
        """Return the gradient with respect to `flat`. Append that with respect to the input, part by part, to `inputs`."""
        towers = self.towers
        out, grads = towers._room()
        back = _tanh_backward_ if towers.activation == "tanh" else _relu_backward
        layers = towers._views()
        given = (grad_KMO,) if len(self._parts) == 1 else torch.split(grad_KMO, _GROUPS, 1)
        for part, (hs, d) in enumerate(zip(self._parts, given, strict=False)):
            states = d.shape[1]
            for i in reversed(range(len(layers))):
                weight, bias = grads[i]
                h = hs[i] if hs[i].shape[1] == states else hs[i][:, :states]
                if part:
                    weight.baddbmm_(h.transpose(1, 2), d)
                    bias.add_(d.sum(1, keepdim=True))
                else:
                    torch.bmm(h.transpose(1, 2), d, out=weight)
                    torch.sum(d, 1, keepdim=True, out=bias)
                if i:
                    d = back(torch.bmm(d, layers[i][0].transpose(1, 2)), h)
                elif inputs is not None:
                    inputs.append(torch.bmm(d, layers[i][0].transpose(1, 2)).sum(0))
        return out


class _NativeRecording(Recording):
    """A recorded forward pass by psigrad's compiled kernels: one call forwards and one backwards.

    Only the order of summation, and so rounding, differs from `Recording`.
    """

    def __init__(self, towers: StackedMLP, native: FlatKernels, x_MD: Tensor) -> None:
        self._native, self._given = native, x_MD
        self._hs = native.forward(towers.flat.detach(), x_MD, towers.towers, towers.sizes)
        super().__init__(towers, [towers._split_layers(self._hs, len(x_MD))])

    def backward(self, grad_KMO: Tensor) -> Tensor:
        """Return the gradient with respect to `flat`, given that with respect to the output. See `Recording.backward`."""
        out, _ = self.towers._room()
        flat, given = self.towers.flat.detach(), grad_KMO.contiguous()
        self._native.backward(out, flat, self._given, self._hs, given, self.towers.sizes)
        return out


def _tanh_backward_(grad: Tensor, output: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.tanh_backward.grad_input(grad, output, grad_input=grad)
    return found


def _relu_backward(grad: Tensor, output: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.threshold_backward(grad, output, 0)
    return found
