"""Options for experts, when steps are audited, and which parameters are covered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inrun.errors import ConfigurationError
from inrun.notebook import block, lines, table

#: Steps that are audited in every run, before every 50th.
EARLY_AUDITS, EVERY = (0, 1, 2, 5, 10, 20, 30, 40), 50
#: Rows that a notebook shows of a coverage.
MOST_ROWS = 40


@dataclass(frozen=True)
class Options:
    """Rarely needed options of an :class:`inrun.Accountant`.

    Args:
        about: Plain data to store in ``run.json`` of a new ledger, beside method, model and coverage.
        process_group: The processes that train together. Needed where the model has no wrapper that tells, such as the module
            inside DistributedDataParallel.
        validation_mode: The mode of the model during validation passes, ``"eval"`` or ``"train"``.

    Raises:
        ConfigurationError: For another ``validation_mode``, or ``about`` that is no dictionary.
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    process_group: Any = None
    validation_mode: str = "eval"

    def __post_init__(self) -> None:
        if self.validation_mode not in ("eval", "train"):
            raise ConfigurationError(f'validation_mode is {self.validation_mode!r}. Accepted are "eval" and "train".')
        if not isinstance(self.about, Mapping):
            raise ConfigurationError(f"about is {type(self.about).__name__}. Give a dictionary of plain data.")


def audit_due(step: int, every: int | None) -> bool:
    """Return whether a step is audited; ``every`` 0 is never, None often at first and then every 50th step."""
    if every is None:
        return step in EARLY_AUDITS or step % EVERY == 0
    return every > 0 and step % every == 0


@dataclass(frozen=True)
class CoverageRow:
    """One trainable parameter.

    Attributes:
        parameter: Its name in the model.
        scored: Whether it is scored.
        entries: How many entries it has.
    """

    parameter: str
    scored: bool
    entries: int


@dataclass(frozen=True)
class Coverage:
    """Which trainable parameters of a model are scored; iterates over :class:`CoverageRow`."""

    rows: tuple[CoverageRow, ...]

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def scored_share(self) -> float:
        """Return the share of the trainable entries that is scored."""
        total = sum(row.entries for row in self.rows)
        return sum(row.entries for row in self.rows if row.scored) / total if total else 0.0

    def line(self) -> str:
        """Return a summary in a line."""
        left = [row.parameter for row in self.rows if not row.scored]
        rest = f"; not scored: {', '.join(left[:3])}{' ...' if len(left) > 3 else ''}" if left else ""
        return f"{100 * self.scored_share:.4g} % of {sum(r.entries for r in self.rows):,} trainable entries{rest}"

    def __str__(self) -> str:
        rows = [f"  {'' if row.scored else 'not '}scored  {row.parameter} ({row.entries:,})" for row in self.rows]
        return "\n".join([self.line(), *rows])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        left = len(self.rows) - MOST_ROWS
        rows = [(row.parameter, "yes" if row.scored else "no", row.entries) for row in self.rows[:MOST_ROWS]]
        more = [f"and {left} more rows; str() has all"] if left > 0 else []
        return block("Coverage", lines([self.line()]), table(("parameter", "scored", "entries"), rows), lines(more))
