"""The ring: one row of numbers for every open use, and the rows of tables that it touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inrun.engine.memory import Numbers
from inrun.engine.sketch import Sketcher


@dataclass(eq=False)
class TableRows:
    """Rows of a table that open uses touched: numbers ``[places, rows, r]`` and values ``[places, rows, r, per_row]``."""

    numbers: Tensor
    values: Tensor


@dataclass(eq=False)
class Entering:
    """What a step's samples leave: S g_n ``[n, columns]``, and rows of tables.

    ``tables`` holds: tensor, number of the call that read it, first row, numbers ``[n, r]``, values ``[n, r, per_row]``.
    """

    rows: Tensor
    tables: list[tuple[int, int, int, Tensor, Tensor]] = field(default_factory=list)
    ids: npt.NDArray[np.int64] | None = None


class Ring:
    """Rows by place and sample; a place holds the uses of one open step."""

    def __init__(self, sketcher: Sketcher) -> None:
        self.sketcher = sketcher
        #: ``[places, rows, columns]``; and by use what it was paid and what the running sum had for it when it entered.
        self.rows = torch.zeros(0, 0, sketcher.size, dtype=sketcher.dtype, device=sketcher.device)
        self.uses: dict[str, Tensor] = {}
        #: By tensor and number of the call that read it.
        self.tables: dict[tuple[int, int], TableRows] = {}

    @property
    def places(self) -> int:
        """Return how many steps there is room for."""
        return self.rows.shape[0]

    def reserve(self, places: int, rows: int, sets: int) -> bool:
        """Make room for so many open steps of so many rows, keeping what is open; return whether there was less."""
        shape = (max(places, self.rows.shape[0]), max(rows, self.rows.shape[1]))
        if shape == tuple(self.rows.shape[:2]):
            return False
        self.rows = _grown(self.rows, (*shape, self.sketcher.size))
        for name in ("credit", "noted"):
            self.uses[name] = _grown(self.uses.get(name, self.rows[:0, :0, :0]), (*shape, sets))
        for t in self.tables.values():
            t.numbers = _grown(t.numbers, (*shape, *t.numbers.shape[2:]))
            t.values = _grown(t.values, (*shape, *t.values.shape[2:]))
        return True

    def enter(self, place: int, entering: Entering, weight: Numbers, by: Tensor | float) -> None:
        """Write the rows of a step, multiplied by the weight of their tensor; ``by`` is the weight by column."""
        torch.mul(entering.rows, by, out=self.rows[place, : len(entering.rows)])
        for t in self.tables.values():
            t.values[place].zero_()
        for i, call, first, numbers, values in entering.tables:
            at = self._table((i, call), numbers.shape[1], values.shape[2])
            rows = slice(first, first + len(numbers))
            at.numbers[place, rows, : numbers.shape[1]] = numbers
            torch.mul(values, float(weight[i]), out=at.values[place, rows, : numbers.shape[1]])

    def _table(self, key: tuple[int, int], r: int, per_row: int) -> TableRows:
        shape, old = (*self.rows.shape[:2], r), self.tables.get(key)
        if old is None:
            like = self.rows
            old = TableRows(like.new_zeros(0, 0, 0, dtype=torch.long), like.new_zeros(0, 0, 0, 0))
        elif old.numbers.shape[2] >= r:
            return old
        self.tables[key] = TableRows(_grown(old.numbers, shape), _grown(old.values, (*shape, per_row)))
        return self.tables[key]

    def products(self, place: int, n: int, flat: Tensor, tables: Mapping[int, Tensor], by: Numbers | None = None) -> Tensor:
        """Return ⟨row, direction⟩ of a step's uses, ``[n, k]``.

        Args:
            place: Where the step is.
            n: Its samples.
            flat: The direction, ``[k, columns]``.
            tables: The direction of tables, ``[k, rows, per_row]``.
            by: Factors of tables, by tensor.
        """
        rows = self.rows[place, :n]
        found = torch.mv(rows, flat[0]).unsqueeze(1) if len(flat) == 1 else rows @ flat.t()
        for (i, _), t in self.tables.items():
            if i in tables:
                part = contract(t.numbers[place, :n], t.values[place, :n], tables[i])
                found += part if by is None else float(by[i]) * part
        return found

    def scale(self, kept: Numbers, by: Tensor | float) -> None:
        """Multiply all rows by numbers by tensor; ``by`` are the same by column."""
        self.rows.mul_(by)
        for (i, _), t in self.tables.items():
            t.values.mul_(float(kept[i]))

    def held(self) -> dict[str, Tensor]:
        """Return everything by name, the first dimension by place."""
        return {
            "ring": self.rows,
            **{f"uses.{name}": x for name, x in self.uses.items()},
            **{f"numbers.{i}.{call}": t.numbers for (i, call), t in self.tables.items()},
            **{f"values.{i}.{call}": t.values for (i, call), t in self.tables.items()},
        }

    def restore(self, places: list[int], held: dict[str, Any]) -> None:
        """Write what :meth:`held` had at some places."""
        for name, x in held.items():
            kind, _, rest = name.partition(".")
            if kind in ("numbers", "values"):
                i, call = map(int, rest.split("."))
                wide = held[f"values.{i}.{call}"].shape
                target: Tensor = getattr(self._table((i, call), wide[2], wide[3]), kind)
            elif kind in ("ring", "uses"):
                target = self.rows if kind == "ring" else self.uses[rest]
            else:
                continue
            target[places] = x.to(self.sketcher.device)


def _grown(old: Tensor, shape: tuple[int, ...]) -> Tensor:
    new = torch.zeros(shape, dtype=old.dtype, device=old.device)
    if old.numel():
        new[tuple(slice(0, size) for size in old.shape)] = old
    return new


def contract(numbers: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """Return Σ values ∘ table[numbers], ``[n, k]``, for numbers ``[n, r]``, values ``[n, r, j]`` and a table ``[k, rows, j]``."""
    return torch.stack([torch.einsum("nrj,nrj->n", values, one[numbers]) for one in table], 1)
