"""The training curve that ``inrun train`` writes beside the ledger: ``metrics.jsonl``, one JSON object a line."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from inrun.report.accounts import MOST_POINTS
from inrun.report.text import digits

#: Lines longer than this are no metrics; names of evaluation curves beyond these are left out.
LONGEST_LINE, MOST_CURVES = 1 << 20, 12


@dataclass
class Metrics:
    """Curves of bounded length: ``step`` and ``loss``."""

    training: dict[str, list[Any]] | None = None
    evaluation: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    unreadable: int = 0


def read_metrics(run: Path) -> Metrics | None:
    """Read ``metrics.jsonl`` of a run, if it has one; the last line may still be being written, and is left out if so."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return None
    series: dict[str | None, tuple[array[float], array[float]]] = {}
    found = Metrics()
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            if line.strip() and not _take(line, series):
                found.unreadable += 1
    for name in sorted(series, key=lambda n: n or ""):
        curve = _thin(*series[name])
        if name is None:
            found.training = curve
        elif len(found.evaluation) < MOST_CURVES:
            found.evaluation[name] = curve
    return found


def _take(line: bytes, series: dict[str | None, tuple[array[float], array[float]]]) -> bool:
    """Add a line to the series (None: the training loss); say whether it could be read."""
    try:
        row = json.loads(line)
        step = row["step"]
        losses = {None: row.get("loss"), **(row.get("validation") or {})}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    if isinstance(step, bool) or not isinstance(step, int | float) or not abs(step) < 2**63:
        return False
    for name, loss in losses.items():
        if isinstance(loss, int | float) and not isinstance(loss, bool) and abs(loss) < math.inf:
            steps, values = series.setdefault(name, (array("d"), array("d")))
            steps.append(step)
            values.append(loss)
    return True


def _thin(steps: array[float], values: array[float]) -> dict[str, list[Any]]:
    """Average to at most MOST_POINTS points; of a step that was written again after a resume the last word holds."""
    step, last = np.unique(np.array(steps)[::-1], return_index=True)
    loss = np.array(values)[::-1][last]
    count = min(MOST_POINTS, len(step))
    edges = np.linspace(0, len(step), count + 1).astype(int)
    pieces = [slice(a, b) for a, b in pairwise(edges)]
    return {"step": [int(step[p][-1]) for p in pieces], "loss": [digits(float(loss[p].mean())) for p in pieces]}
