"""Single samples that hold a large part of what all samples of a run were given and taken."""

# ruff: noqa: S608 - queries are put together from our own pieces; values are bound

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from inrun.analysis.steps import times_word
from inrun.ledger.labels import by_set

#: The table or view that has one row per use of a sample and validation label, and its column with what the sample got for it.
USES, VALUE = "uses", "value"
#: Fewer samples than this have no usual part that one could stand out from.
LEAST_SAMPLES = 10
#: The largest samples are left out before the usual range is taken: this many, or one in so many.
SPARED, SPARED_PART = 3, 100
#: A sample stands out from this many times the largest of the others on, if it holds this share or that many times an even one.
FACTOR, LEAST_SHARE, LEAST_TIMES = 5.0, 0.005, 100.0
#: One that holds both this share and this many times an even one is named whatever the others hold: rough steps raise theirs.
LARGE_SHARE, LARGE_TIMES = 0.05, 20.0
#: A sample is an outlier of its step from this many times an even share on (half of a small step); else the step itself is large.
OUTLIER = 4.0
#: Samples that are named in a set: those that stand out, and the largest whether they stand out or not.
MOST_SAMPLES, MOST_LARGEST = 10, 3


@dataclass(frozen=True)
class OutsizedSample:
    """A sample that holds far more of Σ|c| than others."""

    sample_id: int
    #: Of Σ|c| over all uses.
    share: float
    #: Against an even share.
    times: float
    #: What it got in all; positive = it lowered the loss.
    total: float
    uses: int
    #: The step of its largest use, and what it holds of that step.
    step: int
    step_share: float
    #: The likely reasons, in plain words.
    why: list[str]


@dataclass(frozen=True)
class LargeSample:
    """A sample with a large part of Σ|c|, and what it got in all; positive = it lowered the loss."""

    sample_id: int
    share: float
    total: float


@dataclass(frozen=True)
class Samples:
    """The samples of a validation set that hold much of Σ|c|, the largest first: those that stand out, and the largest of all."""

    outsized: list[OutsizedSample]
    largest: list[LargeSample]


def samples_in_table(uses: pa.Table, value: str = VALUE) -> dict[str, Samples]:
    """Return the large samples of every validation set in a table with step, sample_id, validation and a value."""
    import duckdb

    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        connection.from_arrow(uses).create_view(USES)
        return large_samples(connection, by_set(uses["validation"].unique().to_pylist()), value=value)


def large_samples(connection: Any, sets: dict[str, list[str]], view: str = USES, value: str = VALUE) -> dict[str, Samples]:
    """Return the samples of validation sets that hold much of Σ|c|.

    Args:
        connection: DuckDB's, with the view.
        sets: Names of sets, each with its labels: one, or its folds, which are averaged.
        view: Where the uses are.
        value: The column with what a use was worth.
    """
    return {name: _of_set(connection, labels, view, value) for name, labels in sets.items()}


def _of_set(connection: Any, labels: list[str], view: str, value: str) -> Samples:
    used = (
        f"SELECT step, sample_id, {value}::DOUBLE AS c FROM {view} WHERE list_contains($labels, validation) AND isfinite({value})"
    )
    if len(labels) > 1:
        used = f"SELECT step, sample_id, sum(c) / {len(labels)} AS c FROM ({used}) GROUP BY 1, 2"
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE sample_parts AS SELECT sample_id, sum(abs(c)) AS held, sum(c) AS total, count(*) AS uses, "
        f"arg_max(step, abs(c)) AS step, max(abs(c)) AS most FROM ({used}) GROUP BY 1",
        {"labels": labels},
    )
    try:
        samples, whole, uses = connection.execute("SELECT count(*), sum(held), sum(uses) FROM sample_parts").fetchone()
        if not samples or not whole > 0:
            return Samples([], [])
        first = f"SELECT sample_id, held, total FROM sample_parts ORDER BY held DESC, sample_id LIMIT {MOST_LARGEST}"
        largest = [LargeSample(i, held / whole, total) for i, held, total in connection.execute(first).fetchall()]
        found = [] if samples < LEAST_SAMPLES else _far_out(connection, samples, whole)
        at = _step_sums(connection, used, labels, {row[-2] for row in found})
    finally:
        connection.execute("DROP TABLE sample_parts")
    return Samples([_sample(row, samples, whole, uses / samples, at) for row in found], largest)


def _far_out(connection: Any, samples: int, whole: float) -> list[tuple[Any, ...]]:
    spared = max(SPARED, samples // SPARED_PART)
    usual = connection.execute(f"SELECT held FROM sample_parts ORDER BY held DESC LIMIT 1 OFFSET {spared}").fetchone()[0]
    if not usual > 0:
        return []
    even = whole / samples
    far = max(FACTOR * usual, min(LEAST_SHARE * whole, LEAST_TIMES * even))
    least = min(far, max(LARGE_SHARE * whole, LARGE_TIMES * even))
    asked = "SELECT sample_id, held, total, uses, step, most FROM sample_parts WHERE held >= $least"
    rows = connection.execute(f"{asked} ORDER BY held DESC, sample_id LIMIT {MOST_SAMPLES}", {"least": least}).fetchall()
    return list(rows)


def _step_sums(connection: Any, used: str, labels: list[str], steps: Iterable[int]) -> dict[int, tuple[float, int]]:
    chosen = list(steps)
    if not chosen:
        return {}
    asked = f"SELECT step, sum(abs(c)), count(*) FROM ({used}) WHERE list_contains($steps, step) GROUP BY 1"
    return {step: (held, n) for step, held, n in connection.execute(asked, {"labels": labels, "steps": chosen}).fetchall()}


def _sample(
    row: tuple[Any, ...], samples: int, whole: float, usual_uses: float, at: dict[int, tuple[float, int]]
) -> OutsizedSample:
    sample_id, held, total, uses, step, most = row
    times = samples * held / whole
    step_held, step_samples = at[step]
    of_step = most / step_held
    is_outlier = of_step * step_samples >= min(OUTLIER, 0.5 * step_samples)
    why = [f"{'an outlier' if is_outlier else 'used in a large step'}: {times_word(times)} an even share"]
    if most >= 0.5 * held:
        why.append(f"{100 * of_step:.0f} % of step {step}")
    if uses >= 5 * usual_uses:
        why.append(f"used {uses:,} times, where {usual_uses:.2g} is usual")
    return OutsizedSample(sample_id, held / whole, times, total, uses, step, of_step, why)
