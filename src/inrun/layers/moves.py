"""Rows of the batch that a model puts into another order before its parameters meet them, and rows that data chooses.

The graph begins where parameters are, so it does not show what a model does to its inputs before: data without gradient is
followed here, by the sample of every row. The rows of a layer must then belong to the same samples as its input's.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.layers.layout import tensors_in
from inrun.torch_private import pack_padded_sequence

if TYPE_CHECKING:
    from inrun.layers.tensors import Tensors

_GETITEM = {Tensor.__getitem__}
_SELECT = {torch.index_select, Tensor.index_select}
_MASKED = {torch.masked_select, Tensor.masked_select, pack_padded_sequence}
_ALONG = {torch.roll: 2, Tensor.roll: 2, torch.flip: 1, Tensor.flip: 1}
#: The sample of rows in which several are mixed.
MIXED = -2


class Moves:
    """The samples of the rows of data whose rows were moved, weakly; and whether data chose rows."""

    def __init__(self) -> None:
        #: Whether rows were chosen by data: what lies where changes from step to step.
        self.chosen = False
        self._rows: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def clear(self) -> None:
        """Forget all."""
        self.chosen = False
        self._rows.clear()

    def of(self, t: Tensor) -> Tensor | None:
        """Return the sample of every row of a tensor, if its rows were moved."""
        found = self._rows.get(id(t))
        return None if found is None else found[1]

    def see(self, known: Tensors, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what a function did to the rows."""
        moves = func in _GETITEM or func in _SELECT or func in _ALONG or func in _MASKED
        if not moves and not self._rows:
            return
        index = _index(func, args, kwargs) if moves else None
        if func in _MASKED or (isinstance(index, Tensor) and known.is_data(index)):
            self.chosen = True
        if not known.follows or not isinstance(out, Tensor) or out.requires_grad or out.dim() == 0:
            return
        rows = self._moved(known, func, args, kwargs, index) if moves else self._combined(known, args, kwargs, out)
        if rows is not None and len(rows) == len(out):
            key, every = id(out), self._rows
            every[key] = (weakref.ref(out, lambda _: every.pop(key, None)), rows)

    def _samples(self, known: Tensors, t: Tensor) -> Tensor | None:
        """Return the sample of every row of data; None if it has no row per sample."""
        rows = self.of(t)
        if rows is None and t.dim() > 0 and len(t) > 0 and len(t) % known.n == 0 and known.is_data(t):
            rows = torch.arange(len(t)) // (len(t) // known.n)
        return rows

    def _moved(self, known: Tensors, func: Any, args: Any, kwargs: Any, index: Any) -> Tensor | None:
        x = args[0]
        rows = self._samples(known, x) if isinstance(x, Tensor) else None
        if rows is None or func in _MASKED:
            return None
        if func in _ALONG:
            dims = kwargs.get("dims", args[_ALONG[func]] if len(args) > _ALONG[func] else None)
            dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
            if func in (torch.flip, Tensor.flip):
                return rows.flip(0) if 0 in dims or -x.dim() in dims else self.of(x)
            shifts = kwargs.get("shifts", args[1] if len(args) > 1 else 0)
            by = dict(zip(dims, (shifts,) if isinstance(shifts, int) else shifts, strict=False))
            return rows.roll(int(by[0])) if 0 in by else self.of(x)
        if not isinstance(index, Tensor):
            return self.of(x)
        index = index.cpu()
        if index.dtype == torch.bool:
            found = rows.view(-1, *[1] * (index.dim() - 1)).expand(index.shape)[index]
        else:
            found = rows[index].flatten() if index.dim() == 1 else rows[:0]
        return None if self.of(x) is None and _in_order(found, known.n) else found

    def _combined(self, known: Tensors, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
        """Return the samples of what is made of several tensors: those of all of them, or a mixture."""
        given = [t for t in tensors_in((args, kwargs)) if t.dim() > 0 and len(t) == len(out)]
        if not any(self.of(t) is not None for t in given):
            return None
        found = [rows for t in given if not t.requires_grad and (rows := self._samples(known, t)) is not None]
        rows = found[0]
        for more in found[1:]:
            rows = torch.where(rows == more, rows, MIXED)
        return rows


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what chooses the entries of the first dimension."""
    if func in _SELECT:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        index = kwargs.get("index", args[2] if len(args) > 2 else None)
    elif func in _GETITEM:
        dim, index = 0, args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    else:
        return None
    return index if dim == 0 and isinstance(index, Tensor) and index.dim() > 0 else None


def _in_order(rows: Tensor, n: int) -> bool:
    return len(rows) % n == 0 and bool((rows == torch.arange(len(rows)) // max(1, len(rows) // n)).all())
