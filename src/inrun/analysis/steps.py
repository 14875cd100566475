"""The steps of a run as columns, and those that hold an outsized part of what its samples were given and taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Figures of a step; books of older releases lack some.
FIGURES = (
    "loss_before",
    "loss_after",
    "data",
    "spread",
    "momentum",
    "decay",
    "inherited",
    "rounding",
    "residual",
    "points",
    "lr",
    "clip",
)
#: Fewer scored steps than this have no neighbourhood that a step could stand out from.
LEAST_STEPS = 8
#: Neighbours on either side: these at least, else one step in twenty, and no more than the last.
REACH = (12, 20, 50)
#: A step stands out from NOISE times the usual change from step to step on (of its logarithm), and within these factors of the
#: median around it: learning rates and gains change smoothly, so neighbours are what a step is held against.
NOISE, LEAST_FACTOR, MOST_FACTOR = 5.0, 3.0, 10.0
#: A step that stands out among its neighbours is still small in the run below this many times the run's median step.
SMALL = 2.0
#: What steps that stand out must hold of Σ|c|: one of them alone, or all together.
ALONE, TOGETHER = 0.005, 0.02
#: Tensors that are named.
MOST_TENSORS = 5
#: The part of the steps whose share is always told.
TOP = 0.03
#: The first steps of a run: these many, or this part of them.
FIRST, FIRST_PART = 5, 0.02


#: A step that holds this share of Σ|c|, and so many times both an even one and that of its neighbours, is named however noisy
#: the run is.
LARGE_SHARE, LARGE_TIMES = 0.08, 6.0


@dataclass(frozen=True)
class Steps:
    """The steps of one validation set: numbers, whether each was scored, and figures with NaN where there is none."""

    step: npt.NDArray[np.int64]
    scored: npt.NDArray[np.bool_]
    figures: dict[str, Floats]

    @classmethod
    def of(cls, step: Sequence[int], scored: Sequence[bool], figures: Mapping[str, Any]) -> Steps:
        """Take columns; missing columns, None and what is not finite become NaN."""
        n = len(step)
        found = {}
        for name in FIGURES:
            column = np.array(figures[name], dtype=np.float64) if name in figures else np.full(n, np.nan)
            found[name] = np.where(np.isfinite(column), column, np.nan)
        return cls(np.array(step, np.int64), np.array(scored, bool), found)

    def __getitem__(self, name: str) -> Floats:
        """Return a column."""
        return self.figures[name]

    @property
    def audited(self) -> npt.NDArray[np.bool_]:
        """Steps whose fall was measured."""
        return ~np.isnan(self["loss_before"] - self["loss_after"])

    def total(self, name: str, where: npt.NDArray[np.bool_]) -> float | None:
        """Return the sum of a figure over some steps; None where one lacks it, or there are no steps."""
        values = self[name][where]
        return None if not len(values) or np.isnan(values).any() else math.fsum(values)


@dataclass(frozen=True)
class OutsizedStep:
    """A step that holds far more of Σ|c| than those around it."""

    step: int
    #: Of Σ|c| over all scored steps.
    share: float
    #: Against the median step around it.
    times: float
    audited: bool
    #: The likely reasons, in plain words.
    why: list[str]


@dataclass(frozen=True)
class LargeTensor:
    """A tensor of the model, and its part of Σ|c| over the steps whose fall was measured."""

    name: str
    share: float


def largest_tensors(steps: Iterable[tuple[float | None, Sequence[str] | None, Sequence[float] | None]]) -> list[LargeTensor]:
    """Return the tensors with the largest parts of Σ|c|, the largest first.

    Args:
        steps: Σ|c| of steps, and of each the tensors that its account names, with their shares.
    """
    held: dict[str, float] = {}
    total = 0.0
    for spread, names, shares in steps:
        if spread and names and shares:
            total += spread
            for name, share in zip(names, shares, strict=True):
                held[name] = held.get(name, 0.0) + spread * share
    return [LargeTensor(name, x / total) for name, x in sorted(held.items(), key=lambda e: -e[1])[:MOST_TENSORS]]


def audited_share(steps: Steps, audited: npt.NDArray[np.bool_]) -> float | None:
    """Return what audited steps hold of Σ|c|; None where no step was given anything, or a step does not say."""
    spread, total = steps["spread"], steps.total("spread", steps.scored)
    if total is None:
        return 1.0 if audited.any() and bool(audited[steps.scored].all()) else None
    return math.fsum(spread[audited & steps.scored]) / total if total > 0 else None


def longest_stretch(where: npt.NDArray[np.bool_]) -> int:
    """Return how many steps in a row are marked at most."""
    ends = np.flatnonzero(np.concatenate([[True], ~where, [True]]))
    return int(np.diff(ends).max()) - 1


def top_steps(steps: Steps) -> tuple[int, float | None]:
    """Return how many steps the top 3 % are, and what they hold of Σ|c|."""
    spread = steps["spread"][steps.scored & (steps["spread"] > 0)]
    count = math.ceil(TOP * len(spread))
    return count, math.fsum(np.sort(spread)[-count:]) / math.fsum(spread) if count else None


def outsized_steps(steps: Steps) -> list[OutsizedStep]:
    """Return the steps that hold an outsized part of Σ|c|, the largest first; none in a calm run."""
    places = np.flatnonzero(steps.scored & (steps["spread"] > 0))
    spread = steps["spread"][places]
    if len(places) < LEAST_STEPS:
        return []
    total = math.fsum(spread)
    change = np.median(np.abs(np.diff(np.log(spread)))) / (0.6745 * math.sqrt(2))
    factor = min(max(math.exp(min(NOISE * change, 5.0)), LEAST_FACTOR), MOST_FACTOR)
    reach = _reach(len(places))
    found = []
    for i in np.flatnonzero(spread >= SMALL * np.median(spread)):
        around = places[max(i - reach, 0) : i + reach + 1]
        times = float(spread[i] / np.median(steps["spread"][around]))
        share = spread[i].item() / total
        large = share >= LARGE_SHARE and min(share * len(places), times) >= LARGE_TIMES
        if times >= factor or large:
            place = int(places[i])
            why = _reasons(steps, place, around, first=bool(i < max(FIRST, FIRST_PART * len(places))), times=times)
            found.append(OutsizedStep(int(steps.step[place]), share, times, bool(steps.audited[place]), why))
    if sum(s.share for s in found) < TOGETHER:
        found = [s for s in found if s.share >= ALONE]
    return sorted(found, key=lambda s: (-s.share, s.step))


def _reach(steps: int) -> int:
    least, part, most = REACH
    return min(max(least, steps // part), most)


def _reasons(steps: Steps, place: int, around: npt.NDArray[np.int64], first: bool, times: float) -> list[str]:
    why = []
    clip, lr = steps["clip"], steps["lr"]
    if clip[place] < 0.5 * _median(clip[around]):
        why.append(f"clipped to {clip[place]:.2g}")
    if first:
        why.append("among the first steps of the run")
    known = lr[~np.isnan(lr)]
    if len(known) and lr[place] >= 0.95 * known.max() and (known >= 0.95 * known.max()).mean() <= 0.25:
        why.append("at the peak of the learning rate")
    why.append(f"{'' if first else 'a spike: '}{times_word(times)} the median step around it")
    return why


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan


def times_word(times: float) -> str:
    """Return "3.4 times", "29 times"."""
    return f"{times:,.0f} times" if times >= 10 else f"{times:.1f} times"
