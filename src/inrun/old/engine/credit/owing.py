"""What the steps of a block owe to older uses, until it is paid in one go.

For all uses s that were open when a block began, κ_{t,s} = a_s · f_t with the same f_t for each parameter, so that

    Σ_t κ_{t,s} ⟨g_n, D_t⟩ = a_s ⟨g_n, Σ_t f_t D_t⟩

and only the sum of directions is kept, in segment sums where gradients are sketched: a window of forty steps is read once per
block instead of at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inrun.old.engine.credit.direction import Direction
from inrun.old.engine.credit.memory import Numbers
from inrun.old.engine.credit.sketcher import Sketcher
from inrun.old.optimizers import Recall


@dataclass
class Owed:
    """One block: the uses of the first ``len(a)`` open steps are owed."""

    #: a_s times what the gradients of step s were multiplied by when they entered, ``[steps, parameters]``.
    a: Numbers
    #: Σ_t mean |κ_{t,s}| of every open step, those of the block too: by these a rest is spread.
    sizes: Numbers
    #: What is left of a memory since the block began, and Σ_t f_t, by parameter.
    kept: Numbers
    passed: Numbers
    steps: int = 0
    #: What the samples got together, less what those of the block's own steps got, ``[k]``.
    rest: Tensor | None = None
    #: Σ_t f_t D_t in the segment sums of each sketcher that the owed uses were sketched by.
    sums: dict[Sketcher, list[Tensor]] = field(default_factory=dict)
    #: The same whole, by parameter, in host memory, where gradients are kept as they are.
    whole: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def from_now(cls, a: Numbers) -> Owed:
        """Begin a block."""
        count, parameters = a.shape
        return cls(a, np.zeros(count), np.ones(parameters), np.zeros(parameters))

    @property
    def count(self) -> int:
        """Return how many of the oldest open steps are owed."""
        return len(self.a)

    def step(self, recalls: list[Recall | None]) -> None:
        """A step happened; a use of its own is open now."""
        self.kept = self.kept * np.array([1.0 if r is None else r.keep for r in recalls])
        self.sizes = np.append(self.sizes, 0.0)

    def add(
        self,
        recalls: list[Recall | None],
        paces: Numbers,
        direction: Direction,
        kappa: Numbers,
        rest: Tensor,
        by: set[Sketcher] | None,
    ) -> None:
        """Owe what the step that was just counted pays by a direction; ``kappa`` is that of all open steps.

        ``by`` are the ways in which the owed uses were sketched; None where their gradients are kept.
        """
        f = self.kept * np.array([0.0 if r is None else r.read for r in recalls]) * paces
        self.passed = self.passed + f
        self.steps += 1
        self.sizes = self.sizes + np.abs(kappa).mean(1)
        self.rest = rest if self.rest is None else self.rest + rest
        if by is None:
            self._add_whole(direction, f)
            return
        for sketcher in by:
            fresh = direction.sums(sketcher)
            if sketcher not in self.sums:
                self.sums[sketcher] = [x * float(c) for x, c in zip(fresh, f, strict=True)]
                continue
            for x, y, c in zip(self.sums[sketcher], fresh, f, strict=True):
                x.add_(y, alpha=float(c))

    def _add_whole(self, direction: Direction, f: Numbers) -> None:
        for i, d in direction.whole.items():
            if i in self.whole:
                self.whole[i].add_(d.to("cpu"), alpha=float(f[i]))
            else:
                self.whole[i] = d.to("cpu") * float(f[i])

    def direction(self) -> Direction:
        """Return Σ_t f_t D_t."""
        assert self.rest is not None
        if self.whole:
            return Direction(self.whole, len(self.rest))
        return Direction.of_sums(self.sums, len(self.rest))

    def nbytes(self) -> int:
        """Return the memory of the sums."""
        return sum(x.nbytes for sums in [*self.sums.values(), list(self.whole.values())] for x in sums)

    # Plain data and tensors

    def state(self, names: dict[Sketcher, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return plain data and add tensors."""
        if self.rest is not None:
            tensors["owed.rest"] = self.rest
        for sketcher, sums in self.sums.items():
            tensors |= {f"owed.{names[sketcher]}.{i}": x for i, x in enumerate(sums)}
        tensors |= {f"owed.whole.{i}": x for i, x in self.whole.items()}
        plain = {name: getattr(self, name).tolist() for name in ("a", "sizes", "kept", "passed")}
        return {**plain, "steps": self.steps, "sketchers": [names[s] for s in self.sums], "whole": list(self.whole)}

    @classmethod
    def from_state(cls, plain: dict[str, Any], sketchers: dict[str, Sketcher], tensors: dict[str, Tensor]) -> Owed:
        """Undo :meth:`state`."""
        kept = np.array(plain["kept"], np.float64)
        a = np.array(plain["a"], np.float64).reshape(-1, len(kept))
        found = cls(a, np.array(plain["sizes"], np.float64), kept, np.array(plain["passed"], np.float64), int(plain["steps"]))
        found.rest = tensors.get("owed.rest")
        found.whole = {i: tensors[f"owed.whole.{i}"] for i in plain.get("whole", [])}
        for name in plain["sketchers"]:
            sk = sketchers[name]
            found.sums[sk] = [tensors[f"owed.{name}.{i}"].to(sk.device) for i in range(len(sk.plans))]
        return found


def split_rest(rest: Tensor, sizes: Tensor, whole: float) -> Tensor:
    """Share out ``rest`` ``[k]`` in proportion to ``sizes`` ``[rows]``, whose sum (on all processes) is ``whole``.

    Nobody gets anything where all are 0.
    """
    if whole == 0.0:
        return torch.zeros(len(sizes), len(rest), dtype=rest.dtype)
    return (sizes / whole).unsqueeze(1) * rest
