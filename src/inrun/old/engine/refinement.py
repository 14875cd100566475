"""More points along a move where a few do not do, in the step game and under whole credit.

`Usual` tells by cheap signs which steps are rough; only there (and where an audit measures anyway) are the losses at both ends of
the way held against what the points explain of their difference. Where more than `RESIDUAL` of Σ|c| is missing, `refine` takes
finer rules, and at last pieces of the way: in a rough step the loss may be flat for most of the way and then bend sharply, and one
rule over the whole way does not converge there. So the way is cut where it is bad: the piece whose slope in the middle misses most
of its own measured fall is cut into three, whose middle one keeps the middle. Only slopes are kept while looking, no gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from inrun.old.engine.look import StepLook
from inrun.old.engine.update_path import Place
from inrun.old.methods.midpoint import find_quadrature

#: The residual of a step that is put up with, relative to Σ|c| of what it paid, and the rules tried one after the other.
RESIDUAL, FINER = 0.01, ("gauss2", "gauss3")
#: Pieces that the way of a rough step is cut into at most, where these do not do.
MOST_PIECES = 65
#: Signs of a rough step: clipped to a fraction of what is usual, or a fall (or rise) of so many times the usual one.
CLIPPED, LARGE = 0.3, 3.0
#: Steps that the usual is taken from, and those at the beginning that are always measured.
RECENT, FIRST = 50, 5

Slope = Callable[[float], Tensor]
Loss = Callable[[float], Tensor]
Points = Sequence[tuple[float, float]]


class Usual:
    """What steps are usually like: the cheap signs by which a rough one is known. Lasts over steps."""

    def __init__(self) -> None:
        """No step was seen yet."""
        self.clips: list[float] = []
        self.falls: list[float] = []

    def is_rough(self, clip: float, fall: float) -> bool:
        """Whether a step stands out; the first few always do."""
        if len(self.falls) < FIRST:
            return True
        return clip < CLIPPED * statistics.median(self.clips) or fall > LARGE * statistics.median(self.falls)

    def note(self, clip: float, fall: float) -> None:
        """Remember a step."""
        self.clips, self.falls = [*self.clips[1 - RECENT :], clip], [*self.falls[1 - RECENT :], fall]

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"clips": self.clips, "falls": self.falls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self.clips, self.falls = list(state["clips"]), list(state["falls"])


class Way(Protocol):
    """The part of a move that is shared out."""

    def at(self, fraction: float) -> Place:
        """Hold the model at a place between the beginning, 0, and the end, 1."""
        ...

    def worth(self, raw: list[Tensor | None]) -> Tensor:
        """Return −⟨end − beginning, ∇ℓ⟩ for validation gradients ``[k, *shape]``, which may be overwritten: ``[k]``."""
        ...


class Explained(Protocol):
    """What some points make of a move, ``[k]`` each."""

    @property
    def whole(self) -> Tensor:
        """Return what they say that the move was worth."""
        ...

    @property
    def spread(self) -> Tensor:
        """Return Σ|c| of what they pay."""
        ...


E = TypeVar("E", bound=Explained)


@torch.no_grad()
def refine(
    look: StepLook, way: Way, before: Tensor, after: Tensor, first: E, used: int, again: Callable[[Points], E], coarse: bool = False
) -> tuple[E, int]:
    """Take more points along a way while the residual is larger than `RESIDUAL` · Σ|c|, at most `MOST_PIECES`.

    In half precision (``coarse``) losses at two places of a way differ by rounding as much as by the way: pieces would explain
    their rounding, and none are cut.

    Args:
        look: Takes validation gradients.
        way: Where.
        before: The losses at its beginning, ``[k]``.
        after: The losses at its end.
        first: What the first points explain.
        used: How many these were.
        again: Takes the gradients at other points, with their weights, and tells what those explain.
        coarse: Whether passes run in half precision, on all processes alike.

    Returns:
        What the last points explain, and their number.
    """
    fall = before - after
    found = first
    if not bool(torch.isfinite(fall).all()):
        return found, used

    def explains() -> bool:
        """All processes take as many points: none stops before the others do."""
        return not look.validation.processes.agree("points along the move", look.step, not _explains(found, fall))

    for finer in map(find_quadrature, FINER):
        if explains():
            return found, used
        if len(finer) > used:
            found, used = again(finer), len(finer)
    if coarse or explains():
        return found, used

    def slope(place: float) -> Tensor:
        return way.worth(look.averaged(way.at, ((place, 1.0),)).raw)

    def loss(place: float) -> Tensor:
        with look.capture.paused(), way.at(place):
            return look.validation.losses(look.step).cpu()

    pieces = cut_the_way(slope, loss, before, after, 0.8 * RESIDUAL * found.spread, MOST_PIECES)
    return again(pieces), len(pieces)


def _explains(found: Explained, fall: Tensor) -> bool:
    return bool(((fall - found.whole).abs() <= RESIDUAL * found.spread).all())


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
