"""Split a pool of money by contribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

import pyarrow as pa

from inrun.analysis.queries import Source, groups
from inrun.analysis.summary import summarise
from inrun.errors import ConfigurationError, LedgerError
from inrun.ledger import credit_of
from inrun.ledger.reader import reader_of
from inrun.ledger.tables import some

RULE = (
    "each group gets the share of the pool that its total score has in the sum of all positive totals; groups with a total of zero "
    "or less get nothing; rounded to cents by largest remainder, so that the shares sum to the pool"
)
MOMENTUM = {
    "step": "momentum carries the pushes of earlier samples on; that part of the fall is in the "
    "account of momentum and is not shared out here",
    "whole": "what momentum carries on is credited to the samples that pushed; weight decay, momentum from before scoring began "
    "and the residual are not shared out here",
}


@dataclass(frozen=True)
class Share:
    """What one group gets."""

    #: None: samples without a value in the column.
    group: Any
    samples: int
    uses: int
    total: float
    cents: int


@dataclass(frozen=True)
class Shares:
    """A pool that was split; ``cents`` of the rows sum to ``pool_cents``."""

    by: str
    validation: str
    view: str
    pool_cents: int
    rule: str
    rows: list[Share]
    #: Samples without an owner, and whether they took part.
    unowned_samples: int
    include_unowned: bool
    #: Fall of the validation loss over the audited steps, and what the data account says; None if nothing was audited.
    fall: float | None
    data: float | None
    audited: int
    #: What the totals add up ("whole" or "step" credit), and how many uses are pending: theirs may still change.
    credit: str = "step"
    pending: int = 0

    @property
    def covered(self) -> float | None:
        """The share of the fall that the data account covers."""
        return None if self.data is None or not self.fall else self.data / self.fall

    def coverage(self) -> str:
        """Say what the totals are a share of."""
        momentum = MOMENTUM[self.credit]
        if self.pending:
            momentum += f"; {self.pending:,} uses are pending, and their credit may still change"
        if self.data is None or self.fall is None:
            return f"no step was audited, so it is not known what share of the loss's fall the data account covers; {momentum}"
        share = f"{100 * self.data / self.fall:.1f} % of it" if self.fall > 0 else "no share of it can be named"
        return (
            f"over {self.audited} audited steps the validation loss fell by {self.fall:.6g}; the data account, "
            f"{self.data:.6g}, covers {share}; {momentum}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [{**vars(r), "amount": money(r.cents)} for r in self.rows]
        more = {"pool": money(self.pool_cents), "covered": self.covered, "coverage": self.coverage()}
        return {**vars(self), "rows": rows, **more}


def parse_pool(text: str) -> int:
    """Return an amount such as ``10000`` or ``99.95`` in cents; ConfigurationError if it is none."""
    try:
        amount = Decimal(text)
        cents = amount * 100
        fits = amount.is_finite() and 0 < cents <= 10**17 and cents == cents.to_integral_value()
    except InvalidOperation:
        fits = False
    if not fits:
        raise ConfigurationError(
            f"the pool is {text!r}; it must be a positive amount with at most two decimals, such as 10000 or 99.95"
        )
    return int(cents)


def money(cents: int) -> str:
    """Return cents as an amount with two decimals."""
    return f"{cents // 100}.{cents % 100:02d}"


def split(totals: Sequence[float], cents: int) -> list[int]:
    """Split ``cents`` by the positive totals, by largest remainder (ties: the first); the parts sum to ``cents`` exactly.

    Raises:
        ValueError: No total is positive.
    """
    weights = [Fraction(t) if t > 0 else Fraction(0) for t in totals]
    whole = sum(weights, Fraction(0))
    if whole <= 0:
        raise ValueError("no total is positive")
    exact = [w * cents / whole for w in weights]
    parts = [e.numerator // e.denominator for e in exact]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: cents - sum(parts)]:
        parts[i] += 1
    return parts


def shares(
    source: Source,
    pool_cents: int,
    by: str = "owner",
    validation: str | None = None,
    view: str = "plain",
    include_unowned: bool = False,
) -> Shares:
    """Split a pool by the total scores of the groups of a metadata column.

    Args:
        source: A reader, or the path of a run.
        pool_cents: The pool, in cents.
        by: A column of the samples table.
        validation: The set that decides; may be left out where there is only one.
        view: How uses are seen.
        include_unowned: Whether samples without a value share, too, as one group; otherwise they get nothing.
    """
    if isinstance(pool_cents, bool) or not isinstance(pool_cents, int) or pool_cents < 1:
        raise ConfigurationError(f"pool_cents is {pool_cents!r}; it must be a positive integer")
    reader = reader_of(source)
    with reader.tables() as tables:
        tables.column(by)
        tables.check_rows()
        if validation is None and len(tables.sets()) > 1:
            raise ConfigurationError(
                f"the run has several validation sets; choose the one that decides: {some(list(tables.sets()))}"
            )
        ((name, labels),) = tables.choose(validation or list(tables.sets())).items()
        accounts = tables.table("SELECT * FROM accounts WHERE list_contains($labels::VARCHAR[], validation)", labels=labels)
        pending = "SELECT count(*) FROM uses WHERE pending AND validation = $label"
        open_uses = tables.row(pending, label=labels[0])[0] if tables.whole else 0
    rows = groups(reader, by, name, view=view).to_pylist()
    if not rows:
        raise LedgerError(
            f"{str(reader.path)!r} has no contribution that the view {view!r} can use, so there is nothing to split by"
        )
    totals = [r["total"] if r["group"] is not None or include_unowned else 0.0 for r in rows]
    try:
        cents = split(totals, pool_cents)
    except ValueError:
        raise LedgerError(
            f"no {by!r} has a positive total for {name!r}: nobody's samples lowered the loss, so the pool cannot be split by it"
        ) from None
    fall, data, audited = _accounts(accounts)
    return Shares(
        by=by,
        validation=name,
        view=view,
        pool_cents=pool_cents,
        rule=RULE,
        rows=[Share(r["group"], r["samples"], r["uses"], r["total"], c) for r, c in zip(rows, cents, strict=True)],
        unowned_samples=sum(r["samples"] for r in rows if r["group"] is None),
        include_unowned=include_unowned,
        fall=fall,
        data=data,
        audited=audited,
        credit=credit_of(reader.about),
        pending=open_uses,
    )


def _accounts(accounts: pa.Table) -> tuple[float | None, float | None, int]:
    """Return fall, data and the number of audited steps of a set."""
    found = summarise(accounts, "").sets
    if not found or not found[0].audited:
        return None, None, 0
    return found[0].fall, found[0].data, found[0].audited
