"""More points along a move where its middle does not do.

Cheap signs tell which steps are rough; there, and where an audit measures anyway, the losses at both ends of the move are held
against what the points explain. Where more than :data:`RESIDUAL` of Σ|c| is missing, finer rules are tried, and at last the move
is cut: the piece whose slope in the middle misses most of its own measured fall is cut into three.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from inrun.engine.move import Mover
    from inrun.engine.scorer import Outcome, RefiningScorer

#: The residual of a step that is put up with, relative to Σ|c|, and the Gauss rules that are tried.
RESIDUAL, FINER = 0.01, (2, 3)
#: Pieces that the move of a rough step is cut into at most.
MOST_PIECES = 65
#: Signs of a rough step: clipped to a fraction of what is usual, or a fall of so many times the usual one.
CLIPPED, LARGE = 0.3, 3.0
#: Steps that the usual is taken from, and those at the beginning that are always measured.
RECENT, FIRST = 50, 5


def gauss(points: int) -> list[tuple[float, float]]:
    """Return the points of Gauss-Legendre quadrature on [0, 1], and their weights."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(nodes, weights, strict=True)]


class Typical:
    """What steps are usually like. Lasts over steps."""

    def __init__(self) -> None:
        self.clips: list[float] = []
        self.falls: list[float] = []
        self.recently_rough = True

    def note(self, clip: float, fall: float) -> bool:
        """Remember a step; return whether it stands out. The first few always do."""
        rough = len(self.falls) < FIRST
        if not rough:
            rough = clip < CLIPPED * statistics.median(self.clips) or fall > LARGE * statistics.median(self.falls)
        self.clips, self.falls = [*self.clips[1 - RECENT :], clip], [*self.falls[1 - RECENT :], fall]
        self.recently_rough = rough
        return rough

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"clips": self.clips, "falls": self.falls, "rough": self.recently_rough}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self.clips, self.falls, self.recently_rough = list(state["clips"]), list(state["falls"]), state["rough"]


def refine(scorer: RefiningScorer, outcome: Outcome, step: int, mover: Mover) -> Outcome:
    """Measure the losses at both ends of an audited or rough step's move, and take more points if they are needed."""
    if not bool(outcome.valid.all()):
        return outcome
    validation = scorer.validation
    with mover.at(0.0):
        before = validation.losses(step)
    after = validation.losses(step)
    change = before - after
    accounts = outcome.accounts
    accounts.abs_sum = scorer.abs_sum()

    def explained() -> bool:
        return bool(((change - accounts.explained).abs() <= RESIDUAL * accounts.abs_sum).all())

    if bool(torch.isfinite(change).all()):
        for points in map(gauss, FINER):
            if explained():
                break
            accounts = scorer.again(step, mover, points)
        if not explained() and not mover.low_precision:
            pieces = cut(
                lambda place: scorer.slope(step, mover, place),
                lambda place: _loss(scorer, step, mover, place),
                before,
                after,
                0.8 * RESIDUAL * accounts.abs_sum,
            )
            accounts = scorer.again(step, mover, pieces)
    accounts.before, accounts.after, accounts.by_tensor = before, after, scorer.by_tensor()
    outcome.accounts, outcome.contributions = accounts, scorer.own_credits()
    return outcome


def _loss(scorer: RefiningScorer, number: int, mover: Mover, place: float) -> Tensor:
    with mover.at(place):
        return scorer.validation.losses(number)


@dataclass
class Piece:
    """A part of a move: where it begins, its length, −dℓ/ds in its middle, and the losses at its ends, ``[k]`` each."""

    start: float
    length: float
    slope: Tensor
    before: Tensor
    after: Tensor

    @property
    def missed(self) -> Tensor:
        """Return the fall that the slope in the middle does not explain."""
        return self.before - self.after - self.slope * self.length


def cut(
    slope: Callable[[float], Tensor], loss: Callable[[float], Tensor], before: Tensor, after: Tensor, allowed: Tensor
) -> Sequence[tuple[float, float]]:
    """Return the middles and lengths of pieces that explain the fall to ``allowed`` ``[k]``, or as many as there may be."""
    pieces = [Piece(0.0, 1.0, slope(0.5), before, after)]
    while len(pieces) + 2 <= MOST_PIECES:
        missed = torch.stack([p.missed for p in pieces])
        if bool((missed.sum(0).abs() <= allowed).all()):
            break
        worst = int((missed.abs() / allowed.clamp_min(1e-30)).amax(1).argmax())
        p, third = pieces[worst], pieces[worst].length / 3
        starts = [p.start, p.start + third, p.start + 2 * third]
        losses = [p.before, loss(starts[1]), loss(starts[2]), p.after]
        slopes = [slope(starts[0] + third / 2), p.slope, slope(starts[2] + third / 2)]
        pieces[worst : worst + 1] = [
            Piece(s, third, g, a, b) for s, g, a, b in zip(starts, slopes, losses[:3], losses[1:], strict=True)
        ]
    return [(p.start + p.length / 2, p.length) for p in pieces]
