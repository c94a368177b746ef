"""Convolutions before the multilayer perceptrons (towers) of the policy and the critics, for observations that are images.

All towers share them, as the features extractor of Stable-Baselines3. Their parameters are in the same flat vector.

Axes: `_M` states, `_C` channels, `_H`, `_W` rows and columns of an image, `_F` features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from psigrad.control.networks.networks import Activation, Recording, StackedMLP
from psigrad.errors import UserError

Kind = Literal["auto", "nature", "small", "none"]


@dataclass(frozen=True)
class Image:
    """The shape and layout of an image in an observation."""

    channels: int
    height: int
    width: int
    channels_last: bool
    """True if an observation is [H, W, C]."""
    bytes: bool
    """True if the pixels are uint8, from 0 to 255."""


class Convolution(NamedTuple):
    """The shape of a convolution layer, which is followed by a ReLU."""

    channels: int
    kernel: int
    stride: int


# "nature" is from Mnih et al. 2015, Nature 518, whose last layer of 512 belongs to the towers. "small" has three layers for the
# symbols of MiniGrid's 7 × 7 grid.
LAYERS: dict[str, tuple[Convolution, ...]] = {
    "nature": (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1)),
    "small": (Convolution(16, 2, 1), Convolution(32, 2, 1), Convolution(64, 2, 1)),
}


def layers_for(kind: Kind, image: Image | None) -> tuple[Convolution, ...]:
    """Return the convolutions of the setting `cnn` for an image; none without an image. Raises `UserError` if they do not fit."""
    if image is None:
        if kind in ("nature", "small"):
            raise UserError(f"cnn is {kind!r}, but the observations are not images (a Box of three dimensions); set cnn=auto.")
        return ()
    if kind == "none":
        return ()
    found = LAYERS["nature" if kind == "nature" or (kind == "auto" and min(image.height, image.width) >= 36) else "small"]
    if min(_sizes(image, found)[-1]) < 1:
        shown = f"{image.height} × {image.width}"
        advice = "set cnn=small or cnn=none" if kind == "nature" else "set cnn=none, which reads the pixels as a vector"
        raise UserError(f"The images have {shown} pixels, too few for cnn={kind}; {advice}.")
    return found


def _sizes(image: Image, layers: Sequence[Convolution]) -> list[tuple[int, int]]:
    """Return (height, width) before the first layer and after each layer."""
    found = [(image.height, image.width)]
    for layer in layers:
        h, w = found[-1]
        found.append(((h - layer.kernel) // layer.stride + 1, (w - layer.kernel) // layer.stride + 1))
    return found


class ConvolvedMLP(StackedMLP):
    """A `StackedMLP` on the features of convolutions, which read the image in a flat observation [M, D].

    The image starts at index `at`. The other `beside` numbers of the observation are appended to the features, as in
    Stable-Baselines3's CombinedExtractor.
    """

    def __init__(
        self,
        image: Image,
        convolutions: Sequence[Convolution],
        hidden: Sequence[int],
        outputs: Sequence[int],
        activation: Activation = "tanh",
        extra: int = 0,
        at: int = 0,
        beside: int = 0,
    ) -> None:
        self.image, self.convolutions, self.at, self.beside = image, tuple(convolutions), at, beside
        widths = [image.channels, *(c.channels for c in convolutions)]
        self._kernels = [(c.channels, before, c.kernel, c.kernel) for before, c in zip(widths, convolutions, strict=False)]
        height, width = _sizes(image, convolutions)[-1]
        front = sum(math.prod(shape) + shape[0] for shape in self._kernels)
        super().__init__(widths[-1] * height * width + beside, hidden, outputs, activation, extra, front)

    def kernels(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the weights [out, in, k, k] and biases [out] of each convolution, as views of a flat vector."""
        found, at = [], self.front_slice.start
        for shape in self._kernels:
            count = math.prod(shape)
            found.append((flat[at : at + count].view(shape), flat[at + count : at + count + shape[0]]))
            at += count + shape[0]
        return found

    def seen(self, x_MD: Tensor, flat: Tensor) -> Tensor:
        """Return the features [M, F] of flat observations."""
        image = self.image
        end = self.at + image.channels * image.height * image.width
        if image.channels_last:
            h = x_MD[:, self.at : end].reshape(-1, image.height, image.width, image.channels).permute(0, 3, 1, 2)
        else:
            h = x_MD[:, self.at : end].reshape(-1, image.channels, image.height, image.width)
        # A normaliser may already have converted the bytes.
        h = h.to(flat.dtype) / 255 if x_MD.dtype == torch.uint8 else h
        for layer, (weight, bias) in zip(self.convolutions, self.kernels(flat), strict=True):
            h = torch.relu(conv2d(h, weight, bias, stride=layer.stride))
        return torch.cat([h.flatten(1), x_MD[:, : self.at], x_MD[:, end:]], 1) if self.beside else h.flatten(1)

    def record(self, x_MD: Tensor) -> Recording:
        """Do a forward pass whose gradient can be computed once."""
        leaf = self.flat.detach().requires_grad_()
        with torch.enable_grad():
            features = self.seen(x_MD, leaf)
        return _ConvolvedRecording(self, self._record(features.detach()), features, leaf)

    @torch.no_grad()
    def initialise(self, seed: int, gains: Sequence[float] | None = None) -> None:
        """Initialise the weights. Those of the convolutions are initialised like hidden layers."""
        super().initialise(seed, gains)
        generator = torch.Generator().manual_seed(seed + 1)
        for weight, bias in self.kernels(self.flat):
            if gains is None:
                bound = 1 / math.sqrt(weight[0].numel())
                weight.uniform_(-bound, bound, generator=generator)
                bias.uniform_(-bound, bound, generator=generator)
            else:
                nn.init.orthogonal_(weight, math.sqrt(2), generator=generator)
                bias.zero_()

    def named(self) -> dict[str, Tensor]:
        """Return the parameters, including "cnn.layer.weight" [out, in, k, k] and "cnn.layer.bias" [out] as in `nn.Conv2d`."""
        found = super().named()
        for i, (weight, bias) in enumerate(self.kernels(self.flat.detach())):
            found |= {f"cnn.{i}.weight": weight, f"cnn.{i}.bias": bias}
        return found


class _ConvolvedRecording(Recording):
    """A recorded forward pass whose gradient includes the convolutions.

    Autograd computes their part, since its cost is small compared to that of the convolutions.
    """

    def __init__(self, towers: ConvolvedMLP, parts: list[list[Tensor]], features: Tensor, leaf: Tensor) -> None:
        super().__init__(towers, parts)
        self._features, self._leaf = features, leaf

    def backward(self, grad_KMO: Tensor) -> Tensor:
        """Return the gradient with respect to `flat`, including the convolutions."""
        inputs: list[Tensor] = []
        out = self._backward(grad_KMO, inputs)
        slope = torch.cat(inputs)
        (through,) = torch.autograd.grad(self._features[: len(slope)], self._leaf, slope)
        out[self.towers.front_slice] = through[self.towers.front_slice]
        return out
