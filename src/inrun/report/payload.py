"""The data of the page's script: plain lists and numbers, with every untrusted text made visible first."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from inrun.report.gather import Findings
from inrun.report.text import one_line


def payload(found: Findings) -> dict[str, Any]:
    """Return what the script draws. Lists per validation set are in the order of ``sets``."""
    return {
        "sets": [one_line(name, 60) for name in found.sets],
        "folds": list(found.sets.values()),
        "loss": [b.curve for b in found.accounts],
        "books": [{"audited": b.audited, "steps": b.steps, "curve": b.audited_curve} for b in found.accounts],
        "metrics": _metrics(found),
        "scores": [asdict(d) for d in found.distributions],
        "agreement": None if found.agreement is None else asdict(found.agreement),
        "stages": None if found.stages is None else {"first": found.stages.first, "last": found.stages.last},
        "groupings": [{**asdict(g), "column": one_line(g.column, 60)} for g in found.groupings],
        "shown": asdict(found.shown),
        "text": found.text,
    }


def _metrics(found: Findings) -> dict[str, Any] | None:
    if found.metrics is None:
        return None
    evaluation = [{"name": one_line(name, 60), **curve} for name, curve in found.metrics.evaluation.items()]
    return {"training": found.metrics.training, "evaluation": evaluation}
