"""What the optimizers still remember of every open step: κ, tensor by tensor, as Python numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.optimizers import Memory

Numbers = npt.NDArray[np.float64]
#: A use is settled when less than this part of its pushes is still to come: 44 steps at 0.9, 90 at 0.95.
REST = 0.01
#: Steps that one number of the memory is assumed to last at most.
LONGEST = 10_000


class StepMemory:
    """κ_{t,s} = weight_s · f_t by tensor since the sums began: ``kept`` is the product of what was kept since then.

    One row per open step, oldest first, one column per tensor.
    """

    def __init__(self, tensors: int) -> None:
        self.kept: Numbers = np.ones(tensors)
        #: The coefficient a of every open step, Σ|κ| so far, and Σ|κ| still to come were the options to stay.
        self.a: Numbers = np.zeros((0, tensors))
        self.paid: Numbers = np.zeros((0, tensors))
        self.rest: Numbers = np.zeros((0, tensors))
        #: For how many steps a tensor has not stepped, and what later steps keep of it.
        self.idle: Numbers = np.zeros(tensors)
        self.later: Numbers = np.zeros(tensors)

    def step(self, memories: Sequence[Memory | None]) -> tuple[Numbers, Numbers, Numbers]:
        """Count a step; None stands for tensors that did not step.

        Returns:
            By tensor: the weight of the step's rows (its enter over ``kept``), f for all open steps, and κ_{t,t}.
        """
        moved = np.array([m is not None for m in memories])
        keep, enter, read, own, later = np.array(
            [[m.keep, m.enter, m.read, m.own, min(m.later, 1 - 1e-9)] if m else [1.0, 0, 0, 0, 0] for m in memories]
        ).T.reshape(5, -1)
        # Where nothing is kept there is nothing to forget: a first step, or an optimizer without memory.
        self.kept = self.kept * np.where(keep == 0.0, 1.0, keep)
        f = np.where(later > 0.0, read * self.kept, 0.0)
        self.idle = np.where(moved, 0.0, self.idle + 1)
        self.later = np.where(moved, later, self.later)
        self.a = np.vstack([self.a * keep, enter[None]])
        kappa = np.vstack([self.a[:-1] * read, own[None]])
        blank = np.zeros((1, len(moved)))
        self.paid = np.vstack([self.paid, blank]) + np.abs(kappa)
        ahead = np.abs(self.a * read) * later / (1.0 - later)
        self.rest = np.where(moved, ahead, np.vstack([self.rest, blank]))
        return enter / self.kept, f, own

    def preview(self, memories: Sequence[Memory | None]) -> Numbers:
        """Return f of a step that is not counted yet, by tensor."""
        keep = np.array([m.keep if m else 1.0 for m in memories])
        read = np.array([m.read if m and m.later > 0.0 else 0.0 for m in memories])
        return read * self.kept * np.where(keep == 0.0, 1.0, keep)

    def passed(self) -> int:
        """Return how many of the oldest steps have less than :data:`REST` of their pushes to come.

        A tensor that rests still remembers, and keeps uses open as long as if it had stepped.
        """
        whole = self.paid + self.rest
        share = self.rest * self.later**self.idle / np.where(whole > 0, whole, 1.0)
        open_ = np.flatnonzero((share > REST).any(1))
        return int(open_[0]) if len(open_) else len(self.a)

    def share_paid(self, row: int) -> float:
        """Return the share of an open step's pushes that was paid so far, the mean over its tensors."""
        whole = self.paid[row] + self.rest[row]
        known = whole > 0
        return float((self.paid[row][known] / whole[known]).mean()) if known.any() else 1.0

    def steps_open(self) -> int:
        """Return for how many steps uses will stay open, with the options as they are."""
        later = float(self.later.max(initial=0.0))
        return 1 if later <= 0 else min(LONGEST, math.ceil(math.log(REST) / math.log(min(later, 0.9999))))

    def forget(self, count: int) -> None:
        """Let the oldest steps go."""
        self.a, self.paid, self.rest = self.a[count:], self.paid[count:], self.rest[count:]

    def rebase(self) -> Numbers:
        """Begin the sums anew; return ``kept``, by which open rows are to be multiplied."""
        kept, self.kept = self.kept, np.ones_like(self.kept)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: getattr(self, name).tolist() for name in ("kept", "a", "paid", "rest", "idle", "later")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        width = len(self.kept)
        for name, value in state.items():
            array = np.array(value, np.float64)
            setattr(self, name, array.reshape(-1, width) if name in ("a", "paid", "rest") else array)
