"""What an accountant says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inrun.analysis import summarise
from inrun.errors import InrunError
from inrun.notebook import block, facts, shown

if TYPE_CHECKING:
    from inrun.engine.accountant import Accountant

#: Validation sets that are named.
MOST_SETS = 6


def describe_accountant(accountant: Accountant) -> str:
    """Return a line."""
    closed = ", closed" if accountant.closed else ""
    return f"<Accountant of {type(accountant.model).__name__}: {accountant.method}, {accountant.steps_done} steps{closed}>"


def accountant_html(accountant: Accountant) -> str:
    """Return a table of what is scored, how, and what the books say so far."""
    about = accountant.about()
    names = [shown(name, 60) for name in about["validation"]]
    known = {
        "method": accountant.method,
        "optimizer": ", ".join(about["optimizers"]),
        "steps so far": f"{accountant.steps_done:,}" + (", closed" if accountant.closed else ""),
        "validation sets": _some(names),
        "books": _verdicts(accountant),
        "coverage": accountant.coverage.line(),
    }
    return block(f"Accountant of {about['model']} ({about['parameters']:,} parameters)", facts(known))


def _verdicts(accountant: Accountant) -> str | None:
    """Return what the books are worth, from the accounts alone: a picture must be quick, and must never raise."""
    accounts = getattr(accountant.ledger, "accounts", None)
    if not callable(accounts):
        return None
    try:
        found = summarise(accounts(), accountant.method)
    except InrunError as error:
        return f"cannot be read: {error}"
    said = [f"{shown(s.validation, 60)}: {s.short}" + _figure(s.relative_residual) for s in found.sets]
    return _some(said, "; ") or "no steps yet"


def _figure(relative: float | None) -> str:
    return "" if relative is None else f" (residual {100 * relative:.2g} %)"


def _some(names: list[str], between: str = ", ") -> str:
    more = f"{between}and {len(names) - MOST_SETS} more" if len(names) > MOST_SETS else ""
    return between.join(names[:MOST_SETS]) + more
