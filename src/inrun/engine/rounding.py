"""Entries whose batch gradient is only rounding error: a bias in front of batch norm, keys' biases in attention, dead units.

In real arithmetic the terms of such a gradient cancel exactly, and what is left is noise. Adam divides noise by its own size, so
the entry moves at the full learning rate, and samples would be credited with large amounts of opposite signs.

Which entries these are is read on audited steps, or where there are none on those of the default schedule, and believed until
the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inrun.engine.processes import Processes
from inrun.engine.reading import Reading
from inrun.engine.sketch import Sketcher

#: |Σ g| up to so many times the machine precision of Σ|terms| counts as rounding.
ROUNDINGS = 16.0


@torch.no_grad()
def cancelled(
    sketcher: Sketcher, rows: Tensor, readings: Sequence[Reading], dtypes: Sequence[torch.dtype], processes: Processes
) -> Tensor | None:
    """Return which entries of the small tensors have a batch gradient that is only rounding, ``[columns]``.

    Args:
        sketcher: Which columns are entries.
        rows: Per-sample rows of the step, ``[n, columns]``.
        readings: With Σ|terms| of entries.
        dtypes: The precision of every parameter.
        processes: Those that have the samples.
    """
    if sketcher.cut == sketcher.size or (len(rows) == 0 and not processes.several):
        return None
    entries = rows[:, sketcher.cut :]
    total, size = entries.sum(0), entries.abs().sum(0)
    for r in readings:
        for i, terms in r.sizes.items():
            c = sketcher.columns[i]
            here = size[c.start - sketcher.cut : c.stop - sketcher.cut]
            torch.maximum(here, terms.reshape(-1), out=here)
    processes.all_reduce_("sums of gradients", [total, size])
    precision = [ROUNDINGS * torch.finfo(dtypes[i]).eps for i in range(len(dtypes))]
    by = sketcher.columns_of(precision)
    size = size * (by[sketcher.cut :] if isinstance(by, Tensor) else by)
    return (total.abs() <= size) & (size > 0)
