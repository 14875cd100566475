"""How the scores of a validation set are spread; the headlines speak of the same figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from inrun.ledger.tables import Tables
from inrun.report.findings import Findings
from inrun.report.panel import Panel


def read(tables: Tables, found: Findings) -> list[dict[str, Any]]:
    """Return the distributions, one per validation set."""
    return [asdict(d) for d in found.distributions]


PANEL = Panel("scores", "How scores are spread", read, jump="Scores")
