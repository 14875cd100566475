"""More points along a move where a few do not do: pieces of the way are cut until their slopes explain the measured fall.

In a rough step the loss may be flat for most of the way and then bend sharply; one rule over the whole way does not converge
there. So the way is cut where it is bad: the piece whose slope in the middle misses most of its own measured fall is cut into
three, whose middle one keeps the middle. Only slopes are kept while looking, no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Slope = Callable[[float], Tensor]
Loss = Callable[[float], Tensor]


@dataclass
class Piece:
    """A part of the way: where it begins, how long it is, −dℓ/ds in its middle and the measured fall over it, ``[k]`` each."""

    start: float
    length: float
    slope: Tensor
    before: Tensor
    after: Tensor

    @property
    def middle(self) -> float:
        """Return its middle."""
        return self.start + self.length / 2

    @property
    def missed(self) -> Tensor:
        """Return the fall that the slope in the middle does not explain."""
        return self.before - self.after - self.slope * self.length


def cut_the_way(slope: Slope, loss: Loss, before: Tensor, after: Tensor, allowed: Tensor, most: int) -> list[tuple[float, float]]:
    """Return the middles and lengths of pieces that explain the fall to ``allowed`` ``[k]``, or as many as there may be.

    Args:
        slope: −dℓ/ds at a place s of the way from 0 to 1, ``[k]``: one gradient each.
        loss: The losses there, ``[k]``.
        before: The losses at 0.
        after: The losses at 1.
        allowed: How much may stay unexplained.
        most: Pieces at most.
    """
    pieces = [Piece(0.0, 1.0, slope(0.5), before, after)]
    while len(pieces) + 2 <= most:
        missed = torch.stack([p.missed for p in pieces])
        if bool((missed.sum(0).abs() <= allowed).all()):
            break
        worst = int((missed.abs() / allowed.clamp_min(1e-30)).amax(1).argmax())
        pieces[worst : worst + 1] = _cut(pieces[worst], slope, loss)
    return [(p.middle, p.length) for p in pieces]


def _cut(piece: Piece, slope: Slope, loss: Loss) -> list[Piece]:
    third = piece.length / 3
    ends = [piece.start + third, piece.start + 2 * third]
    losses = [piece.before, loss(ends[0]), loss(ends[1]), piece.after]
    starts = [piece.start, *ends]
    slopes = [slope(starts[0] + third / 2), piece.slope, slope(starts[2] + third / 2)]
    return [Piece(s, third, g, a, b) for s, g, a, b in zip(starts, slopes, losses[:3], losses[1:], strict=True)]
