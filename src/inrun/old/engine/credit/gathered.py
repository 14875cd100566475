"""Credit so far of the samples of all processes, for whoever shows scores while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inrun.ledger.record import SettledCredits
from inrun.old.engine.processes import Processes


def of_all(processes: Processes, mine: Sequence[SettledCredits]) -> list[SettledCredits]:
    """Return the credits of every process, on every process; all of them ask."""
    if not processes.several:
        return list(mine)
    return [_read(one) for told in processes.tell([_plain(s) for s in mine]) for one in told]


def _plain(s: SettledCredits) -> dict[str, Any]:
    values = {what: {label: x.tolist() for label, x in by.items()} for what, by in (("credits", s.credits), ("errors", s.errors))}
    rows = None if s.rows is None else s.rows.tolist()
    return {"step": s.step, "ids": s.sample_ids.tolist(), **values, "paid": s.paid.tolist(), "rows": rows}


def _read(told: dict[str, Any]) -> SettledCredits:
    credits, errors = ({label: np.array(x, np.float32) for label, x in told[what].items()} for what in ("credits", "errors"))
    rows = None if told["rows"] is None else np.array(told["rows"], np.int64)
    paid = np.array(told["paid"], np.float32)
    return SettledCredits(told["step"], np.array(told["ids"], np.int64), credits, errors, paid, rows)
