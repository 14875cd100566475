"""The data of the page's script: plain lists and numbers, with every untrusted text made visible first."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from inrun.report.findings import Findings
from inrun.report.text import one_line


def payload(found: Findings) -> dict[str, Any]:
    """Return what the script draws. Lists per validation set are in the order of ``sets``."""
    return {
        "credit": found.credit,
        "run": one_line(found.path.rstrip("/").rpartition("/")[2], 60),
        "sets": [one_line(name, 60) for name in found.sets],
        "folds": list(found.sets.values()),
        "loss": [b.curve for b in found.accounts],
        "books": [{"audited": b.audited, "steps": b.steps, "curve": b.audited_curve} for b in found.accounts],
        "metrics": _metrics(found),
        "columns": [one_line(column, 60) for column in found.columns],
        "panels": found.panels,
        "shown": asdict(found.shown),
        "text": found.text,
    }


def _metrics(found: Findings) -> dict[str, Any] | None:
    if found.metrics is None:
        return None
    known = {accounts.name: accounts.curve for accounts in found.accounts}
    new = {name: curve for name, curve in found.metrics.evaluation.items() if not _same(curve, known.get(name))}
    evaluation = [{"name": one_line(name, 60), **curve} for name, curve in new.items()]
    return {"training": found.metrics.training, "evaluation": evaluation}


def _same(evaluation: dict[str, list[Any]], booked: dict[str, list[Any]] | None) -> bool:
    """Whether a curve of the metrics says what the accounts say already, up to their last flush; both may be thinned."""
    if booked is None or not booked["step"]:
        return False
    step, loss = np.array(evaluation["step"]), np.array(evaluation["loss"])
    within = (step >= booked["step"][0]) & (step <= booked["step"][-1])
    if not within.any() or within.sum() > len(booked["step"]):
        return False
    return bool(np.allclose(np.interp(step[within], booked["step"], booked["loss"]), loss[within], rtol=2e-3))
