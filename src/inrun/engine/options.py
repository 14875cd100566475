"""When steps are audited, and which parameters are covered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Steps that are audited in every run, before every 50th.
EARLY_AUDITS, EVERY = (0, 1, 2, 5, 10, 20, 30, 40), 50


def audit_due(step: int, every: int | None) -> bool:
    """Return whether a step is audited; ``every`` 0 is never, None often at first and then every 50th step."""
    if every is None:
        return step in EARLY_AUDITS or step % EVERY == 0
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class CoverageRow:
    """One trainable parameter, and whether it is scored."""

    parameter: str
    scored: bool
    entries: int


@dataclass(frozen=True)
class Coverage:
    """The trainable parameters of a model."""

    rows: tuple[CoverageRow, ...]

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
