"""How the numbers of a sketch are shared among the tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inrun.layers.tap import Leaf

#: Entries per segment at most; numbers per row that is kept apart, and for sketches below ``SMALL`` numbers.
SEGMENT, PER_ROW, PER_ROW_SMALL, SMALL = 32, 64, 32, 16_384
#: Rows of an output vocabulary that are kept apart per sample.
HEAVY = 32
#: Numbers that a tensor gets at least, and the share of all that may go to tensors of which every entry is kept.
LEAST, ENTRIES = 32, 0.25


def default_size(entries: int) -> int:
    """Return the numbers per sample for a model with so many scored entries."""
    return int(min(max(SMALL, 2 ** math.ceil(math.log2(12 * max(entries, 1) ** 0.5))), 262_144))


def divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is not larger than ``most``."""
    return next(d for d in range(max(1, min(most, number)), 0, -1) if number % d == 0)


@dataclass(frozen=True)
class Plan:
    """How one tensor is sketched, seen as ``[rows, columns]``."""

    rows: int
    columns: int
    #: Entries per segment, and buckets; a segment of 1 with as many buckets as entries keeps every entry.
    segment: int
    buckets: int
    #: Entries per segment where a row is kept apart; 0 where none is.
    fine: int = 0
    #: Rows kept apart per sample because they hold most of its gradient.
    heavy: int = 0

    @property
    def numel(self) -> int:
        """Return the number of entries."""
        return self.rows * self.columns

    @property
    def lossless(self) -> bool:
        """Whether every entry is kept."""
        return self.segment == 1 and self.buckets == self.numel

    @property
    def segments(self) -> int:
        """Return the number of segments."""
        return self.numel // self.segment

    @property
    def per_row(self) -> int:
        """Return the numbers of a row that is kept apart."""
        return self.columns // self.fine if self.fine else 0


def make_plans(leaves: Sequence[Leaf], size: int | None, tables: set[int], outputs: set[int]) -> list[Plan]:
    """Share ``size`` numbers among the tensors: as many as entries for the smallest, in proportion to √entries for the others.

    Args:
        leaves: The scored parameters.
        size: Numbers per sample; None keeps every entry.
        tables: Places of parameters that are looked up.
        outputs: Places of output vocabularies; those that are not looked up, too, get four times the share.
    """
    shapes = [
        (p.shape[0], p.numel() // max(p.shape[0], 1)) if p.dim() > 1 else (1, p.numel())
        for p in (leaf.parameter for leaf in leaves)
    ]
    if size is None:
        return [Plan(rows, columns, 1, rows * columns) for rows, columns in shapes]
    left, small = size, set[int]()
    for i in sorted(range(len(shapes)), key=lambda i: math.prod(shapes[i])):
        if i in outputs or size - left + math.prod(shapes[i]) > ENTRIES * size:
            continue
        left -= math.prod(shapes[i])
        small.add(i)
    parts = {i: math.sqrt(math.prod(s)) * (4.0 if i in outputs - tables else 1.0) for i, s in enumerate(shapes) if i not in small}
    parts = {i: x for i, x in parts.items() if not (i in tables and i not in outputs)}
    whole, per_row = sum(parts.values()) or 1.0, PER_ROW if size >= SMALL else PER_ROW_SMALL
    found = []
    for i, (rows, columns) in enumerate(shapes):
        numel = rows * columns
        share = max(LEAST, int(left * parts[i] / whole)) if i in parts else 8 * LEAST
        if i in small or numel <= share:
            found.append(Plan(rows, columns, 1, numel))
            continue
        apart = i in tables or (i in outputs and rows > 4 * HEAVY)
        fine = divisor(columns, max(1, columns // per_row)) if apart else 0
        most = max(1, min(SEGMENT, numel // share))
        segment = fine * divisor(columns // fine, max(1, most // fine)) if fine else divisor(columns, most)
        segment = segment if segment > 1 or fine else divisor(numel, most)
        buckets = min(numel // segment, share)
        found.append(Plan(rows, columns, segment, buckets, fine, HEAVY if i in outputs and rows > 4 * HEAVY else 0))
    return found
