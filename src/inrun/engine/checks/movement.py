"""Whose entries moved: how the rows of a tensor are laid out, told by what moves when one sample does."""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.engine.checks.recorder import Entry, fingerprint, moved_rows
from inrun.errors import RowOwnershipError
from inrun.layers import Layout


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


def moves_only(before: Entry, after: Entry, n: int, sample: int) -> bool:
    """Whether one sample's entries alone moved, wherever the samples are."""
    moved = moved_rows(before.rows, after.rows)
    if not bool(moved.any()):
        return True
    if len(moved) % n == 0 and (only_block(moved, n, sample) or _only_every(moved, n, sample)):
        return True
    return _only_column(before, after, n, sample)


def classify(entry: Entry, moved: Tensor, n: int, sample: int, after: Entry | None = None) -> Layout | None:
    """Return the layout of a call of which one sample's rows may move, None if nothing moved; raise if others did."""
    if not bool(moved.any()):
        return None
    size = entry.shape[0]
    if size % n == 0 and only_block(moved, n, sample):
        return "rows" if size == n else "flat"
    assert entry.site is not None
    if after is not None and entry.site.rule.turns and entry.output is None:
        if _only_column(entry, after, n, sample):
            return "second"
        if _only_every(moved, n, sample):
            return "cycled"
    module = entry.site.module
    hint = ""
    if getattr(module, "batch_first", True) is False:
        hint = " It has batch_first=False: rebuild it with batch_first=True."
    raise RowOwnershipError(
        f"rows at {entry.site.name or 'the model itself'} ({type(module).__name__}) do not separate by sample: exchanging "
        f"one of {n} samples moved {int(moved.sum())} of {size} leading rows of a tensor of shape {tuple(entry.shape)}. "
        "Put the sample first (sequence-first, gathered, window-partitioned and packed tensors cannot be scored)." + hint
    )
