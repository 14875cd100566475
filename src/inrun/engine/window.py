"""All open uses: one ring of rows, and the running sums by which they are paid.

A use is one row of numbers, S g_n, in the ring ``[places, rows, columns]``. At step t it earns κ_{t,s} ⟨S g_n, S D_t⟩, and

    κ_{t,s} = enter_s / P_s · f_t        f_t = read_t · P_t,    P_t = product of what the optimizer kept so far

tensor by tensor. So one running sum R = Σ_t f_t S D_t pays everybody: a row, multiplied by enter_s / P_s when it enters, notes
⟨row, R⟩ then and takes the difference when its window ends. Its own step is paid on entry, where Nesterov and NAdam differ
from later ones. Every so often the sums begin anew (P = 1, R = 0), which keeps them accurate in single precision.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inrun.engine.memory import Numbers, StepMemory
from inrun.engine.ring import Entering, Ring
from inrun.engine.sketch import Epoch, SketchedDirection, Sketcher
from inrun.engine.sketch_error import SketchErrors
from inrun.errors import ConfigurationError, ValidationError
from inrun.ledger.labels import Label
from inrun.optimizers import Memory

log = logging.getLogger("inrun")


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
        self.ring = Ring(sketcher)
        self.errors = SketchErrors(sketcher, self.tables)

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
        if self.ring.reserve(steps, rows, self.sets):
            self.errors.reserve(self.ring.rows.shape[0], self.ring.rows.shape[1], self.sets)
            log.info(
                "inrun: %d numbers per sample, for up to %d samples in each of %d steps: %.0f MB",
                self.sketcher.size,
                *(self.ring.rows.shape[1], self.ring.places, self.nbytes() / 1e6),
            )

    def _free_place(self, rows: int) -> int:
        taken = {slot.place for slot in self.slots}
        self.reserve(self.ring.places, rows)
        free = next((p for p in range(self.ring.places) if p not in taken), None)
        if free is None:
            free = self.ring.places
            self.reserve(max(len(self.slots) + 1, self.memory.steps_open() + 1), rows)
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
            direction = directions[id(slot.epoch)]
            found = self.ring.products(slot.place, slot.rows, direction.flat * by, direction.tables, f)
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
        self.ring.enter(place, entering, weight, self._columns(weight))
        self.slots.append(slot)
        self.ring.uses["credit"][place, :n] = own_credits
        self.ring.uses["noted"][place, :n] = self.value(slot)
        ratio = self._columns(np.where(weight == 0.0, 0.0, own / np.where(weight == 0.0, 1.0, weight)))
        self.errors.enter(slot, direction, ratio, known, self.ring.tables)

    # Credits

    def value(self, slot: Slot) -> Tensor:
        """Return ⟨rows, R⟩ of a step's uses, ``[n, k]``."""
        return self.ring.products(slot.place, slot.rows, slot.epoch.paid, slot.epoch.tables)

    def credits_of(self, slot: Slot) -> Tensor:
        """Return what a step's uses were paid so far, ``[n, k]``."""
        at = (slot.place, slice(0, slot.rows))
        return self.ring.uses["credit"][at] + self.value(slot) - self.ring.uses["noted"][at]

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
        return self.errors.of(slot, self.ring.rows, self.slots)

    def rebase(self) -> None:
        """Begin the sums anew."""
        for slot in self.slots:
            at = (slot.place, slice(0, slot.rows))
            self.ring.uses["credit"][at] = self.credits_of(slot)
            self.ring.uses["noted"][at] = 0.0
        kept = self.memory.rebase()
        by = self._columns(kept)
        self.errors.rebase(self.slots, kept, by)
        self.ring.scale(kept, by)
        for e in self.epochs:
            e.paid.zero_()
            for table in e.tables.values():
                table.zero_()

    # Going on later

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors; of the ring what is open."""
        numbers = {id(e): e.number for e in self.epochs}
        held = {**self.ring.held(), **{f"errors.{name}": x for name, x in self.errors.held.items()}}
        places = [s.place for s in self.slots]
        return {
            "labels": [[c.name, c.point, c.is_fold] for c in self.labels],
            "memory": self.memory.state_dict(),
            "shape": list(self.ring.rows.shape),
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
        if state["shape"][2] != sk.size:
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
        self.ring, self.errors = Ring(sk), SketchErrors(sk, self.tables)
        self.reserve(state["shape"][0], state["shape"][1])
        places = [s.place for s in self.slots]
        self.ring.restore(places, state["held"])
        for name, x in self.errors.held.items():
            if f"errors.{name}" in state["held"]:
                x[places] = state["held"][f"errors.{name}"].to(sk.device)

    def nbytes(self) -> int:
        """Return the memory of the ring and its sums."""
        held = list(self.ring.held().values())
        held += [x for e in self.epochs for x in (e.paid, *e.tables.values(), *(w for w in e.weights if w is not None))]
        return sum(x.nbytes for x in held) + self.errors.nbytes() + self.sketcher.nbytes()
