"""What a baseline is: a function from sample ids and validation sets to scores, registered under its name.

    @register("mine", "what it measures, in one line", unit="what a score counts")
    def mine(sample_ids, validation, *, model, steps=100):
        return {name: scores_for(data) for name, data in validation.items()}

Keyword arguments without a default are what it needs, those with one are its options; :func:`run` checks both. What several
baselines take in common is a dataclass, ``register(..., takes=Options)``: its fields are arguments of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.errors import ConfigurationError, IdsError, InrunError
from inrun.ledger.schema import SCORES

Ids = npt.NDArray[np.int64]
#: Takes sample ids ``[n]``, validation data by name and keywords; returns scores ``[n]`` by name. Higher = the sample helps more.
Compute = Callable[..., Mapping[str, npt.ArrayLike]]
F = TypeVar("F", bound=Compute)


@dataclass(frozen=True)
class Baseline:
    """A registered baseline."""

    name: str
    #: One line for tables and errors.
    summary: str
    #: What a score counts; ours count loss, and most others do not.
    unit: str
    compute: Compute
    #: Whose arguments it takes beside its own.
    takes: type | None = None

    @property
    def needs(self) -> list[str]:
        """The keyword arguments that must be given."""
        return [p.name for p in self._keywords() if p.default is p.empty]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that may be given, with their defaults."""
        return {p.name: p.default for p in self._keywords() if p.default is not p.empty}

    def _keywords(self) -> list[inspect.Parameter]:
        signatures = [inspect.signature(x) for x in (self.takes, self.compute) if x is not None]
        return [p for signature in signatures for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ConfigurationError for arguments that are missing or unknown."""
        missing = [name for name in self.needs if name not in given]
        unknown = [name for name in given if name not in self.needs and name not in self.options]
        for wrong, what in ((missing, "needs"), (unknown, "does not take")):
            if wrong:
                raise ConfigurationError(
                    f"baseline {self.name!r} {what} {', '.join(wrong)}; it needs {', '.join(self.needs) or 'nothing more'}, "
                    f"and takes {', '.join(self.options) or 'no options'}"
                )


BASELINES: dict[str, Baseline] = {}


def register(name: str, summary: str, *, unit: str, takes: type | None = None) -> Callable[[F], F]:
    """Register a function as a baseline; the fields of ``takes`` are arguments of it, too."""

    def add(compute: F) -> F:
        BASELINES[name] = Baseline(name, summary, unit, compute, takes)
        return compute

    return add


def run(name: str, sample_ids: npt.ArrayLike, validation: Any, **given: Any) -> pa.Table:
    """Score samples by a baseline.

    Args:
        name: Which one; ``BASELINES`` has all.
        sample_ids: The training samples, ``[n]`` different integers.
        validation: Validation data by name, in the form that the baseline wants (a loss, texts ...); one alone is called
            ``validation``.
        given: What the baseline needs, and its options.

    Returns:
        A table with the columns of our own scores, one row per validation set and sample in the order of their names and ids.
        Higher = the sample helps more; the unit is the baseline's own, in the metadata of the schema. What baselines
        do not know is null: standard errors, uses and steps.
    """
    if name not in BASELINES:
        raise ConfigurationError(f"unknown baseline {name!r}; available: {', '.join(BASELINES)}")
    baseline = BASELINES[name]
    baseline.check(given)
    ids = _checked_ids(sample_ids)
    sets = dict(validation) if isinstance(validation, Mapping) else {"validation": validation}
    if not sets:
        raise ConfigurationError("there is no validation set to score for; give at least one, by name")
    wrong = [label for label in sets if not isinstance(label, str)]
    if wrong:
        raise ConfigurationError(f"a validation set is called {wrong[0]!r}, a {type(wrong[0]).__name__}; names must be text")
    found = baseline.compute(ids, sets, **given)
    order = np.argsort(ids, kind="stable")
    tables = [_table(ids[order], label, _checked_scores(baseline, ids, label, found)[order]) for label in sorted(sets)]
    return pa.concat_tables(tables).replace_schema_metadata({"baseline": name, "unit": baseline.unit})


def _checked_ids(given: npt.ArrayLike) -> Ids:
    ids = np.asarray(given)
    if (
        ids.ndim != 1
        or not len(ids)
        or ids.dtype.kind not in "iu"
        or (ids.dtype.kind == "u" and ids.max() > np.iinfo(np.int64).max)
    ):
        raise IdsError(f"sample_ids are {ids.dtype} of shape {list(ids.shape)}; they must be a list of 64-bit integers, not empty")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise IdsError(f"sample {values[counts > 1][0]} is given {counts.max()} times; every sample is scored once")
    return ids.astype(np.int64)


def _checked_scores(baseline: Baseline, ids: Ids, label: str, found: Mapping[str, npt.ArrayLike]) -> npt.NDArray[np.float64]:
    """Return the scores of a set, all of them numbers: partial scores must never look complete."""
    scores = np.asarray(found[label], np.float64)
    assert scores.shape == ids.shape, f"{baseline.name} returned scores of shape {scores.shape} for {len(ids)} samples"
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise InrunError(
            f"baseline {baseline.name!r} gave {len(wrong)} of {len(ids)} samples no finite score for {label!r}, "
            f"first sample {ids[wrong[0]]}; look for infinities and NaN in the model and the data"
        )
    return scores


def _table(ids: Ids, label: str, scores: npt.NDArray[np.float64]) -> pa.Table:
    known = {"sample_id": ids, "validation": [label] * len(ids), "score": scores}
    columns = [pa.array(known[f.name], f.type) if f.name in known else pa.nulls(len(ids), f.type) for f in SCORES]
    return pa.table(columns, schema=SCORES)
