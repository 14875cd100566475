"""Options for experts, when steps are audited, and which parameters are covered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inrun.errors import ConfigurationError

#: Steps that are audited in every run, before every 50th.
EARLY_AUDITS, EVERY = (0, 1, 2, 5, 10, 20, 30, 40), 50


@dataclass(frozen=True)
class Options:
    """What few people need.

    Args:
        about: Plain data that ``run.json`` of a new ledger has beside method, model and coverage.
        process_group: The processes that train together, where the model does not tell: give it with the module inside
            DistributedDataParallel.
        validation_mode: "eval" (default) or "train", the mode of the model during validation passes.
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
