"""Whose entries moved: how the rows of a tensor may be laid out, told by what moves when one sample does."""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.errors import RowOwnershipError
from inrun.old.engine.checks.recorder import Entry, fingerprint, moved_rows
from inrun.old.layers import Layout


def only_block(moved: Tensor, n: int, sample: int) -> bool:
    """Whether samples lie in blocks of rows and only one sample's moved."""
    block = moved.numel() // n
    others = torch.cat([moved[: sample * block], moved[(sample + 1) * block :]])
    return not bool(others.any())


def _only_column(before: Entry, after: Entry, n: int, sample: int) -> bool:
    """Whether the samples are in the second dimension and only one sample's entries moved."""
    if before.columns is None or after.columns is None or len(before.columns) != n:
        return False
    return only_block(moved_rows(before.columns, after.columns), n, sample)


def _only_every(moved: Tensor, n: int, sample: int) -> bool:
    """Whether rows go round the samples and only one sample's moved."""
    return len(moved) % n == 0 and only_block(moved.view(-1, n).any(0), n, sample)


def entry_of(x: Tensor) -> Entry:
    """Return an output of the model as an entry."""
    return Entry(None, x.shape, fingerprint(x), columns=fingerprint(x.transpose(0, 1)) if x.dim() > 1 else None)


def possible_layouts(before: Entry, after: Entry, n: int, sample: int, anywhere: bool = False) -> set[Layout] | None:
    """Return the layouts in which one sample's entries alone moved, none if others did; None if nothing moved.

    Layers that treat all positions alike may have the samples in the second dimension, and so may what modules without a rule
    return (the last states of recurrent ones); ``anywhere`` asks for all layouts.
    """
    moved = moved_rows(before.rows, after.rows)
    if not bool(moved.any()):
        return None
    size = before.shape[0]
    found: set[Layout] = set()
    if size % n == 0 and only_block(moved, n, sample):
        found.add("rows" if size == n else "flat")
    turns = anywhere or (before.site is not None and before.site.rule.turns and before.output is None)
    if turns or before.output is not None:
        if _only_column(before, after, n, sample):
            found.add("second")
        if turns and size > n and _only_every(moved, n, sample):
            found.add("cycled")
    return found


#: What is taken where several layouts are possible and nothing else tells.
_ORDER: tuple[Layout, ...] = ("rows", "flat", "second", "cycled")


def chosen(layouts: set[Layout], known: Layout | None) -> Layout:
    """Return the layout that is known, if it is possible, or the most usual of the possible ones."""
    return known if known is not None and known in layouts else next(x for x in _ORDER if x in layouts)


def inseparable(entry: Entry, moved: Tensor, n: int) -> RowOwnershipError:
    """Return what to raise where other samples' entries moved, too."""
    assert entry.site is not None
    module, size = entry.site.module, entry.shape[0]
    hint = ""
    if getattr(module, "batch_first", True) is False:
        hint = " It has batch_first=False: rebuild it with batch_first=True."
    return RowOwnershipError(
        f"rows at {entry.site.name or 'the model itself'} ({type(module).__name__}) do not separate by sample: exchanging "
        f"one of {n} samples moved {int(moved.sum())} of {size} leading rows of a tensor of shape {tuple(entry.shape)}. "
        "Put the sample first (sequence-first, gathered, window-partitioned and packed tensors cannot be scored)." + hint
    )
