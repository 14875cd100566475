"""The networks of the image experiments. Group norm everywhere: a sample's rows are its own.

Batch norm in training couples the samples of a batch, so that a sample has no gradient of its own; in evaluation mode it needs
statistics of an earlier training, and a network that starts from scratch has none. Group norm has neither trouble, is the same for
all methods and both starts, and trains as well at these sizes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from inrun.experiments.images import CLASSES


class SmallNet(nn.Module):
    """Three strided convolutions with group norm, and a linear layer: seconds for a thousand images on a core."""

    def __init__(self, channels: int, edge: int, width: int) -> None:
        super().__init__()
        # Images of 8x8 keep their edge in the first layer.
        first = 2 if edge >= 16 else 1
        self.body = nn.Sequential(
            *_block(channels, width, 5, first), *_block(width, 2 * width, 3, 2), *_block(2 * width, 4 * width, 3, 2), nn.Flatten()
        )
        left = edge // (4 * first)
        self.head = nn.Linear(4 * width * left * left, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        """Return what the last layer sees, ``[n, f]``."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[n, 10]``."""
        return self.head(self.features(x))


def _block(i: int, o: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(i, o, kernel, stride, kernel // 2), nn.GroupNorm(4, o), nn.ReLU()]


class Residual(nn.Module):
    """A basic block of ResNet-18."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(i, o, 3, stride, 1, bias=False),
            _norm(o),
            nn.ReLU(),
            nn.Conv2d(o, o, 3, 1, 1, bias=False),
            _norm(o),
        )
        self.short = nn.Identity() if i == o else nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), _norm(o))

    def forward(self, x: Tensor) -> Tensor:
        """Add the path to what came in."""
        return torch.relu(self.short(x) + self.path(x))


class ResNet18(nn.Module):
    """ResNet-18 with its ImageNet stem: at 32x32 the four stages see 8, 4, 2 and 1 pixels an edge.

    Width 64 is He et al.'s, with 11.2 million parameters and 0.04 GFLOP per image of 32x32; others scale all channels.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 7, 2, 3, bias=False), _norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        stages = []
        for k, (i, o) in enumerate(pairwise(widths)):
            stages += [Residual(i, o, 1 if k == 0 else 2), Residual(o, o, 1)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(8 * width, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        """Return the mean over positions of the last stage, ``[n, 8 width]``."""
        return self.stages(self.stem(x)).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[n, 10]``."""
        return self.head(self.features(x))


def _norm(channels: int) -> nn.Module:
    # Groups of at least four channels: at one pixel an edge, a group is all that there is to take statistics of.
    return nn.GroupNorm(min(32, max(1, channels // 4)), channels)


def build_net(kind: str, shape: tuple[int, int], width: int, seed: int) -> SmallNet | ResNet18:
    """Make a network with the weights of a seed, and leave torch's random state as it was.

    Args:
        kind: "small" or "resnet18".
        shape: Channels and edge of the images.
        width: Channels of the first layer.
        seed: Of the weights.
    """
    channels, edge = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallNet(channels, edge, width) if kind == "small" else ResNet18(channels, width)
