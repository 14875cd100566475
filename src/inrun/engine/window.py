"""All open uses: one ring of rows, and the running sums by which they are paid.

A use is one row of numbers, S g_n, in the ring ``[places, rows, columns]``. At step t it earns κ_{t,s} ⟨S g_n, S D_t⟩, and

    κ_{t,s} = enter_s / P_s · f_t        f_t = read_t · P_t,    P_t = product of what the optimizer kept so far

tensor by tensor. So one running sum R = Σ_t f_t S D_t pays everybody: a row, multiplied by enter_s / P_s when it enters, notes
⟨row, R⟩ then and takes the difference when its window ends. Its own step is paid on entry, where Nesterov and NAdam differ
from later ones. Every so often the sums begin anew (P = 1, R = 0), which keeps them accurate in single precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inrun.engine.memory import Numbers, StepMemory
from inrun.engine.sketch import Epoch, SketchedDirection, Sketcher
from inrun.engine.sketch_error import SketchErrors
from inrun.errors import ConfigurationError, ValidationError
from inrun.ledger.labels import Label
from inrun.optimizers import Memory

#: Steps after which running sums begin anew.
REBASE = 22


@dataclass(eq=False)
class TableRows:
    """Rows of a table that open uses touched: numbers ``[places, rows, r]`` and values ``[places, rows, r, per_row]``."""

    numbers: Tensor
    values: Tensor


@dataclass(eq=False)
class Slot:
    """The uses of one open step."""

    step: int
    place: int
    rows: int
    epoch: Epoch
    #: The ids of its samples, to find those that are used again.
    ids: npt.NDArray[np.int64] | None = None


@dataclass(eq=False)
class Entering:
    """What a step's samples leave: S g_n ``[n, columns]``, and rows of tables.

    ``tables`` holds: tensor, number of the call that read it, first row, numbers ``[n, r]``, values ``[n, r, per_row]``.
    """

    rows: Tensor
    tables: list[tuple[int, int, int, Tensor, Tensor]] = field(default_factory=list)
    ids: npt.NDArray[np.int64] | None = None


@dataclass(eq=False)
class Settled:
    """The credits of the uses of one step, on the device, ``[n, k]`` each, and the share of the push that was paid."""

    step: int
    credit: Tensor
    error: Tensor
    paid: float


class Window:
    """The ring and its sums."""

    def __init__(self, sketcher: Sketcher, tables: Sequence[int]) -> None:
        self.sketcher, self.tables = sketcher, list(tables)
        #: What the validation losses are; known with the first direction.
        self.labels: list[Label] = []
        self.memory = StepMemory(len(sketcher.plans))
        self.slots: list[Slot] = []
        self.epochs: list[Epoch] = [sketcher.epoch(0, {})]
        #: Rows; and by use what it was paid and what R had for it when it entered.
        self.ring = torch.zeros(0)
        self.uses: dict[str, Tensor] = {}
        self.errors = SketchErrors(sketcher, self.tables)
        self.apart: dict[tuple[int, int], TableRows] = {}

    @property
    def sets(self) -> int:
        """Return the number of validation losses."""
        return len(self.labels)

    def check_labels(self, labels: Sequence[Label], step: int) -> None:
        """Take what the validation losses are; it must stay as it is."""
        if labels == self.labels:
            return
        if self.labels:
            new, old = (", ".join(map(str, some)) for some in (labels, self.labels))
            raise ValidationError(
                f"the validation losses at step {step} are {new}, and were {old} before. Uses are paid over many steps, so the "
                "number of points and folds, and the names, must stay the same."
            )
        self.labels = list(labels)
        self._clear_sums(self.epoch)

    # Room

    def reserve(self, steps: int, rows: int) -> None:
        """Make room for so many open steps of so many rows; what is open is kept."""
        old = tuple(self.ring.shape[:2]) if self.ring.dim() == 3 else (0, 0)
        steps, rows = max(steps, old[0]), max(rows, old[1])
        if (steps, rows) == old:
            return
        sk, k = self.sketcher, self.sets
        self.ring = self._grown(self.ring, (steps, rows, sk.size))
        self.uses = {name: self._grown(self.uses.get(name), (steps, rows, k)) for name in ("credit", "noted")}
        self.errors.reserve(steps, rows, k)
        for t in self.apart.values():
            t.numbers = self._grown(t.numbers, (steps, rows, *t.numbers.shape[2:]))
            t.values = self._grown(t.values, (steps, rows, *t.values.shape[2:]))

    def _grown(self, old: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        dtype = old.dtype if old is not None and old.numel() else self.sketcher.dtype
        new = torch.zeros(shape, dtype=dtype, device=self.sketcher.device)
        if old is not None and old.numel():
            new[tuple(slice(0, size) for size in old.shape)] = old
        return new

    def _free_place(self, rows: int) -> int:
        taken = {slot.place for slot in self.slots}
        steps = self.ring.shape[0] if self.ring.dim() == 3 else 0
        if rows > (self.ring.shape[1] if steps else 0):
            self.reserve(steps, rows)
        free = next((p for p in range(steps) if p not in taken), None)
        if free is None:
            self.reserve(max(len(self.slots) + 1, self.memory.steps_open() + 1), rows)
            free = next(p for p in range(len(self.ring)) if p not in taken)
        return free

    # Epochs

    def begin_epoch(self, epoch: Epoch) -> None:
        """Sketch in a new way from now on."""
        self._clear_sums(epoch)
        self.epochs.append(epoch)
        self._drop_epochs()

    def _clear_sums(self, epoch: Epoch) -> None:
        sk = self.sketcher
        epoch.paid = torch.zeros(self.sets, sk.size, dtype=sk.dtype, device=sk.device)
        for i in self.tables:
            plan = sk.plans[i]
            epoch.tables[i] = torch.zeros(self.sets, plan.rows, plan.per_row, dtype=sk.dtype, device=sk.device)

    @property
    def epoch(self) -> Epoch:
        """Return how gradients are sketched now."""
        return self.epochs[-1]

    def _drop_epochs(self) -> None:
        alive = {id(slot.epoch) for slot in self.slots} | {id(self.epochs[-1])}
        self.epochs = [e for e in self.epochs if id(e) in alive]

    # A step

    def pay(
        self,
        step: int,
        memories: Sequence[Memory | None],
        entering: Entering,
        directions: dict[int, SketchedDirection],
        known: Tensor | None,
        own_credits: Tensor,
    ) -> None:
        """Pay a step: add its direction to the sums, and let its uses in.

        Args:
            step: Its number.
            memories: How each tensor's optimizer remembers; None for tensors that did not step.
            entering: The step's rows, multiplied by what their gradients were multiplied by (clipping).
            directions: S D by ``id`` of the epoch.
            known: S v of the direction known at the backward, ``[k, columns]``, if any.
            own_credits: What the step pays its own rows, ``[n, k]``.
        """
        weight, f, own = self.memory.step(memories)
        for e in self.epochs:
            self._add(e, directions[id(e)], f)
        self._enter(step, entering, directions[id(self.epoch)], weight, own, known, own_credits)

    def abs_sum_of(self, memories: Sequence[Memory | None], directions: dict[int, SketchedDirection]) -> Tensor:
        """Return Σ|credit| that a step which is not counted yet pays to the open uses, ``[k]``."""
        f = self.memory.preview(memories)
        total = torch.zeros(self.sets, dtype=torch.float64, device=self.sketcher.device)
        by = self._columns(f)
        for slot in self.slots:
            direction, place, n = directions[id(slot.epoch)], slot.place, slot.rows
            found = self.ring[place, :n] @ (direction.flat * by).t()
            for (i, _), t in self.apart.items():
                if i in direction.tables:
                    found += float(f[i]) * contract(t.numbers[place, :n], t.values[place, :n], direction.tables[i])
            total += found.abs().sum(0)
        return total

    def _columns(self, numbers: Numbers) -> Tensor | float:
        """Return numbers by tensor as one number if they are all alike (zeros aside), else by column."""
        return self.sketcher.columns_of(numbers)

    def _add(self, epoch: Epoch, direction: SketchedDirection, f: Numbers) -> None:
        by = self._columns(f)
        if isinstance(by, Tensor):
            epoch.paid.addcmul_(direction.flat, by)
        else:
            epoch.paid.add_(direction.flat, alpha=by)
        for i, table in direction.tables.items():
            if i in epoch.tables:
                epoch.tables[i].add_(table, alpha=float(f[i]))

    def _enter(
        self,
        step: int,
        entering: Entering,
        direction: SketchedDirection,
        weight: Numbers,
        own: Numbers,
        known: Tensor | None,
        own_credits: Tensor,
    ) -> None:
        n = len(entering.rows)
        place = self._free_place(n)
        slot = Slot(step, place, n, self.epoch, entering.ids)
        row = self.ring[place, :n]
        self._enter_tables(place, n, entering, weight)
        self.uses["credit"][place, :n] = own_credits
        torch.mul(entering.rows, self._columns(weight), out=row)
        self.slots.append(slot)
        self.uses["noted"][place, :n] = self.value(slot)
        ratio = self._columns(np.where(weight == 0.0, 0.0, own / np.where(weight == 0.0, 1.0, weight)))
        self.errors.enter(slot, direction, ratio, known, self.apart)

    def _enter_tables(self, place: int, n: int, entering: Entering, weight: Numbers) -> None:
        for t in self.apart.values():
            t.values[place].zero_()
        for i, call, first, numbers, values in entering.tables:
            at = self._table((i, call), numbers.shape[1], values.shape[2])
            rows = slice(first, first + len(numbers))
            at.numbers[place, rows, : numbers.shape[1]] = numbers
            torch.mul(values, float(weight[i]), out=at.values[place, rows, : numbers.shape[1]])

    def _table(self, key: tuple[int, int], r: int, per_row: int) -> TableRows:
        steps, rows = self.ring.shape[:2]
        old = self.apart.get(key)
        if old is None or old.numbers.shape[2] < r:
            numbers = torch.zeros(steps, rows, r, dtype=torch.long, device=self.sketcher.device)
            values = torch.zeros(steps, rows, r, per_row, dtype=self.sketcher.dtype, device=self.sketcher.device)
            if old is not None:
                numbers[:, :, : old.numbers.shape[2]] = old.numbers
                values[:, :, : old.values.shape[2]] = old.values
            self.apart[key] = TableRows(numbers, values)
        return self.apart[key]

    # Credits

    def value(self, slot: Slot) -> Tensor:
        """Return ⟨rows, R⟩ of a step's uses, ``[n, k]``."""
        place, n, epoch = slot.place, slot.rows, slot.epoch
        found = self.ring[place, :n] @ epoch.paid.t()
        for (i, _), t in self.apart.items():
            found += contract(t.numbers[place, :n], t.values[place, :n], epoch.tables[i])
        return found

    def credits_of(self, slot: Slot) -> Tensor:
        """Return what a step's uses were paid so far, ``[n, k]``."""
        at = (slot.place, slice(0, slot.rows))
        return self.uses["credit"][at] + self.value(slot) - self.uses["noted"][at]

    def settle_passed(self) -> list[Settled]:
        """Settle the steps whose windows have ended."""
        return self._settle(self.memory.passed())

    def settle_all(self) -> list[Settled]:
        """Settle all that is open as it stands."""
        return self._settle(len(self.slots))

    def open_credits(self, count: int | None = None) -> list[Settled]:
        """Return what the open uses were paid so far, as if they were settled now; of the oldest ``count`` steps."""
        return [
            Settled(slot.step, self.credits_of(slot), self.error_of(slot), self.memory.share_paid(j))
            for j, slot in enumerate(self.slots[:count])
        ]

    def _settle(self, count: int) -> list[Settled]:
        if count == 0:
            return []
        found = self.open_credits(count)
        self.slots = self.slots[count:]
        self.memory.forget(count)
        self._drop_epochs()
        return found

    def error_of(self, slot: Slot) -> Tensor:
        """Return the standard errors of a step's credits, ``[n, k]``."""
        return self.errors.of(slot, self.ring, self.slots)

    def rebase(self) -> None:
        """Begin the sums anew."""
        for slot in self.slots:
            at = (slot.place, slice(0, slot.rows))
            self.uses["credit"][at] = self.credits_of(slot)
            self.uses["noted"][at] = 0.0
        kept = self.memory.rebase()
        by = self._columns(kept)
        self.errors.rebase(self.slots, kept, by)
        self.ring.mul_(by)
        for (i, _), t in self.apart.items():
            t.values.mul_(float(kept[i]))
        for e in self.epochs:
            e.paid.zero_()
            for table in e.tables.values():
                table.zero_()

    # Going on later

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors; of the ring what is open."""
        numbers = {id(e): e.number for e in self.epochs}
        held = {
            "ring": self.ring,
            **{f"uses.{name}": x for name, x in self.uses.items()},
            **{f"errors.{name}": x for name, x in self.errors.held.items()},
            **{f"numbers.{i}.{call}": t.numbers for (i, call), t in self.apart.items()},
            **{f"values.{i}.{call}": t.values for (i, call), t in self.apart.items()},
        }
        places = [s.place for s in self.slots]
        return {
            "labels": [[c.name, c.point, c.is_fold] for c in self.labels],
            "memory": self.memory.state_dict(),
            "shape": list(self.ring.shape),
            "slots": [
                [s.step, s.place, s.rows, numbers[id(s.epoch)], None if s.ids is None else s.ids.tolist()] for s in self.slots
            ],
            "epochs": [
                {"number": e.number, "paid": e.paid, "tables": dict(e.tables), "weights": list(e.weights)} for e in self.epochs
            ],
            "held": {name: x[places].clone() for name, x in held.items()} if places else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        sk = self.sketcher
        if state["shape"] and len(state["shape"]) == 3 and state["shape"][2] != sk.size:
            raise ConfigurationError(
                f"the saved run kept {state['shape'][2]} numbers per sample, this accountant {sk.size}. Give the same sketch=."
            )
        self.labels = [Label(*c) for c in state["labels"]]
        self.memory.load_state_dict(state["memory"])
        self.epochs = []
        for saved in state["epochs"]:
            epoch = sk.epoch(saved["number"], {})
            epoch.weights = [None if w is None else w.to(sk.device, copy=True) for w in saved["weights"]]
            epoch.paid = saved["paid"].to(sk.device, copy=True)
            epoch.tables = {int(i): t.to(sk.device, copy=True) for i, t in saved["tables"].items()}
            self.epochs.append(epoch)
        by_number = {e.number: e for e in self.epochs}
        self.slots = [
            Slot(step, place, rows, by_number[n], None if ids is None else np.array(ids, np.int64))
            for step, place, rows, n, ids in state["slots"]
        ]
        self.ring, self.uses, self.apart = torch.zeros(0), {}, {}
        self.errors = SketchErrors(sk, self.tables)
        if len(state["shape"]) == 3:
            self.reserve(state["shape"][0], state["shape"][1])
        places = [s.place for s in self.slots]
        for name, x in state["held"].items():
            kind, _, rest = name.partition(".")
            if kind in ("numbers", "values"):
                i, call = map(int, rest.split("."))
                wide = state["held"][f"values.{i}.{call}"].shape
                target: Tensor = getattr(self._table((i, call), wide[2], wide[3]), kind)
            else:
                target = self.ring if kind == "ring" else (self.errors.held if kind == "errors" else self.uses)[rest]
            target[places] = x.to(sk.device)

    def nbytes(self) -> int:
        """Return the memory of the ring and its sums."""
        held = [self.ring, *self.uses.values()]
        held += [x for t in self.apart.values() for x in (t.numbers, t.values)]
        held += [x for e in self.epochs for x in (e.paid, *e.tables.values(), *(w for w in e.weights if w is not None))]
        return sum(x.nbytes for x in held) + self.errors.nbytes() + self.sketcher.nbytes()


def contract(numbers: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """Return Σ values ∘ table[numbers], ``[n, k]``, for numbers ``[n, r]``, values ``[n, r, j]`` and a table ``[k, rows, j]``."""
    return torch.stack([torch.einsum("nrj,nrj->n", values, one[numbers]) for one in table], 1)
