"""What the optimizers still remember of every open use: κ, parameter by parameter.

Step t moves a parameter by q_t = Σ_s κ_{t,s} z_s. The coefficients follow from a list a, one number per remembered step, that is
advanced only when the parameter really steps, with the options of that moment (``optimizers.Recall``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.old.optimizers import Recall

Numbers = npt.NDArray[np.float64]
#: A use is settled when less than this part of its pushes is still to come: 44 steps at 0.9, 90 at 0.95.
REST = 0.01


class PushMemory:
    """The lists a of all parameters: one row per open step, oldest first, one column per parameter."""

    def __init__(self, parameters: int) -> None:
        """Nothing is remembered yet."""
        self.a: Numbers = np.zeros((0, parameters))
        #: The sum of |κ| so far.
        self.paid: Numbers = np.zeros((0, parameters))
        #: What is still to come, were the options to stay as they are.
        self.rest: Numbers = np.zeros((0, parameters))
        #: For how many steps parameters have not stepped, and by what one more step would multiply what they remember.
        self.idle: Numbers = np.zeros(parameters)
        self.later: Numbers = np.zeros(parameters)

    def __len__(self) -> int:
        """Return the number of open steps."""
        return len(self.a)

    def look(self, recalls: Sequence[Recall | None]) -> Numbers:
        """Return κ of the coming step, a row per open step and one for the coming step; 0 for parameters that do not step."""
        keep, enter, read, direct = _columns(recalls)
        kappa = np.vstack([self.a * keep, enter[None]]) * read
        kappa[-1] += direct
        return kappa

    def advance(self, recalls: Sequence[Recall | None]) -> None:
        """The coming step happened."""
        kappa = self.look(recalls)
        keep, enter, read, _ = _columns(recalls)
        moved = np.array([r is not None for r in recalls])
        self.idle = np.where(moved, 0.0, self.idle + 1)
        blank = np.zeros((1, self.a.shape[1]))
        grown = {name: np.vstack([getattr(self, name), blank]) for name in ("a", "paid", "rest")}
        self.a = np.where(moved, np.vstack([self.a * keep, enter[None]]), grown["a"])
        self.paid = grown["paid"] + np.abs(kappa)
        later = np.array([0.0 if r is None else min(r.later, 1.0 - 1e-9) for r in recalls])
        self.later = np.where(moved, later, self.later)
        ahead = np.abs(self.a * read) * later / (1.0 - later)
        self.rest = np.where(moved, ahead, grown["rest"])

    def passed(self) -> int:
        """Return how many of the oldest steps are over: less than :data:`REST` of their pushes is still to come."""
        # What is to come, against what would come after a push of the peak's size: κ / peak in a steady state.
        # Parameters that rest (two networks that train in turn) still remember, and keep uses open as long as if they had stepped:
        # one that is frozen for good would keep all of them.
        whole = self.paid + self.rest
        share = self.rest * self.later**self.idle / np.where(whole > 0, whole, 1.0)
        open_ = np.flatnonzero((share > REST).any(1))
        return int(open_[0]) if len(open_) else len(self.a)

    def shares_paid(self) -> Numbers:
        """Return the share of every open step's pushes that was paid so far, the mean over its parameters."""
        whole = self.paid + self.rest
        share = np.where(whole > 0, self.paid / np.where(whole > 0, whole, 1.0), np.nan)
        return np.array([np.nanmean(row) if np.isfinite(row).any() else 1.0 for row in share])

    def forget(self, count: int) -> None:
        """Let the oldest steps go."""
        self.a, self.paid, self.rest = self.a[count:], self.paid[count:], self.rest[count:]

    def state_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: getattr(self, name).tolist() for name in ("a", "paid", "rest", "idle", "later")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        width = self.a.shape[1]
        for name in ("a", "paid", "rest"):
            setattr(self, name, np.array(state[name], np.float64).reshape(-1, width))
        # A state of an earlier version tells only who stepped last; those alone kept uses open.
        stepping = np.array(state.get("stepping", np.ones(width)), np.float64)
        self.idle = np.array(state.get("idle", 1.0 - stepping), np.float64)
        self.later = np.array(state.get("later", 0.9 * stepping), np.float64)


def _columns(recalls: Sequence[Recall | None]) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    none = Recall(keep=1.0, enter=0.0, read=0.0)
    table = np.array([[r.keep, r.enter, r.read, r.direct] for r in ((r or none) for r in recalls)]).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]
