"""Who scores what: one row per parameter and use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inrun.notebook import block, lines, table

HEADER = ("parameter", "module", "rule", "form", "timing", "entries")
#: Rows that a notebook shows, and rules that a line names.
MOST_ROWS, MOST_RULES = 60, 6


@dataclass(frozen=True)
class CoverageRow:
    """How one parameter is scored in one module."""

    parameter: str
    module: str
    #: The rule, or why there is none to be had.
    rule: str
    #: shared, project, jvp or vmap; empty before the first step.
    form: str
    #: streaming (contracted inside the backward), deferred (when the optimizer steps), sketched (whole credit: a few numbers leave
    #: the backward, and later steps pay by them), kept (whole credit with exact memory) or unmoved (in no optimizer).
    timing: str
    numel: int


@dataclass(frozen=True)
class Coverage:
    """All trainable parameters of the model and how each is scored; ``str()`` gives a table."""

    rows: tuple[CoverageRow, ...]

    def __iter__(self) -> Iterator[CoverageRow]:
        """Iterate over the rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def scored_share(self) -> float:
        """Return the share of trainable entries that are scored; the rest is in no optimizer and does not move."""
        entries = {r.parameter: (r.numel, r.timing != "unmoved") for r in self.rows}
        total = sum(count for count, _ in entries.values())
        return sum(count for count, moved in entries.values() if moved) / total if total else 1.0

    def __str__(self) -> str:
        """Return the table."""
        cells = [HEADER, *((r.parameter, r.module, r.rule, r.form, r.timing, f"{r.numel:,}") for r in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(HEADER))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)

    def line(self) -> str:
        """Return how much is scored, and by which rules, in a line."""
        entries: dict[str, int] = {}
        for parameter in {r.parameter: r for r in self.rows}.values():
            entries[parameter.rule] = entries.get(parameter.rule, 0) + parameter.numel
        rules = sorted(entries.items(), key=lambda entry: -entry[1])
        named = ", ".join(f"{rule} {count:,}" for rule, count in rules[:MOST_RULES])
        named += f" and {len(rules) - MOST_RULES} more" if len(rules) > MOST_RULES else ""
        return f"{100 * self.scored_share:.4g} % of {sum(entries.values()):,} trainable entries are scored: {named}"

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        left = len(self.rows) - MOST_ROWS
        rows = [(r.parameter, r.module, r.rule, r.form, r.timing, r.numel) for r in self.rows[:MOST_ROWS]]
        more = [f"and {left} more rows; str() has all"] if left > 0 else []
        return block("Coverage", lines([self.line()]), table(HEADER, rows), lines(more))
