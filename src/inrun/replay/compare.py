"""How close the scores of a replay are to those of a set that was scored live."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.ledger import StepRecord
from inrun.ledger.labels import set_of
from inrun.ledger.record import SettledCredits
from inrun.replay.source import RecordedStep, Source
from inrun.statistics import pearson, spearman

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Closeness:
    """One validation set, replayed from some checkpoints, beside what it was when it was scored live."""

    validation: str
    mode: str
    #: Median of the steps from one state to the next, and how many states there are, the beginning included.
    spacing: float
    states: int
    steps: int
    samples: int
    #: Of the samples' scores; NaN where one side is constant.
    spearman: float
    pearson: float
    #: Σ scores of the replay over Σ scores live, and the same for Σ |contribution|.
    total: float
    spread: float
    #: Spearman of the domains' totals; NaN with fewer than three domains.
    domains: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}


def compare(
    source: Source,
    name: str,
    steps: Sequence[RecordedStep],
    records: dict[int, StepRecord],
    mode: str,
    spacing: float,
    states: int,
    seconds: float,
    credits: Mapping[int, SettledCredits] | None = None,
) -> Closeness:
    """Hold a replay against what was scored live, use by use: contributions, or ``credits`` by the step of use."""
    if credits is None:
        both = [(s.ids, s.live, records[s.step].contributions) for s in steps if s.step in records]
    else:
        both = [(s.ids, s.credits, credits[s.step].credits) for s in steps if s.step in credits and s.credits]
    both = [(ids, before, now) for ids, before, now in both if now]
    if not both:
        nothing = math.nan
        return Closeness(name, mode, spacing, states, 0, 0, nothing, nothing, nothing, nothing, nothing, seconds)
    ids = np.concatenate([some for some, _, _ in both])
    live = np.concatenate([_set_of(name, before) for _, before, _ in both])
    again = np.concatenate([_set_of(name, now) for _, _, now in both])
    samples, place = np.unique(ids, return_inverse=True)
    a, b = _sums(place, again), _sums(place, live)
    codes = source.data.chunks.codes("domain", samples)
    domains, group = np.unique(codes, return_inverse=True)
    by_domain = [_sums(group, x) for x in (a, b)]
    return Closeness(
        validation=name,
        mode=mode,
        spacing=spacing,
        states=states,
        steps=len(both),
        samples=len(samples),
        spearman=spearman(a, b),
        pearson=pearson(a, b),
        total=_ratio(a.sum(), b.sum()),
        spread=_ratio(np.abs(again).sum(), np.abs(live).sum()),
        domains=spearman(*by_domain) if len(domains) > 2 else math.nan,
        seconds=seconds,
    )


def _set_of(name: str, columns: Any) -> Vector:
    """Return what samples did to a set: to one in folds the mean."""
    return np.mean([np.asarray(v, np.float64) for label, v in columns.items() if set_of(label) == name], axis=0)


def _sums(group: npt.NDArray[np.int64], x: Vector) -> Vector:
    return np.bincount(group, x).astype(np.float64)


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b else math.nan
