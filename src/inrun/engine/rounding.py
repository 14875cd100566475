"""Entries whose batch gradient is only rounding error: a bias in front of batch norm, keys' biases in attention.

In real arithmetic the terms of such a gradient cancel exactly, and what is left is noise. Adam divides noise by its own size, so
the entry moves at the full learning rate, and samples would be credited with large amounts of opposite signs.

How large the noise of an entry is, is read on audited steps. In later steps an entry counts as noise while it stays as small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inrun.engine.parameters import Parameters
from inrun.engine.reading import Reading
from inrun.engine.sketch import Sketcher

#: |Σ g| up to so many times the machine precision of Σ|terms| counts as rounding.
ROUNDINGS = 16.0
#: The same for a whole tensor whose gradients are made in half precision, relative to (Σ g_n²)^½, and the least entries it needs:
#: of one entry, half precision cannot tell.
HALF_ROUNDINGS, LEAST_ENTRIES = 4.0, 8
#: How much larger than at the last audit noise may get.
GROWTH = 16.0


class Noise:
    """How large the noise of every entry of the small tensors may be."""

    def __init__(self, adaptive: Sequence[bool]) -> None:
        """``adaptive`` tells by tensor whether its optimizer divides by the size of gradients: others leave noise small."""
        self.adaptive = list(adaptive)
        #: By entry, 0 where the gradient is no noise, ``[columns]``; as it was measured last.
        self.level: Tensor | None = None
        #: Places of larger tensors whose gradient is noise as a whole, as it was measured last.
        self.tensors: list[int] = []
        #: Whether it is measured in the step that is open.
        self.due = False

    @torch.no_grad()
    def measure(self, sketcher: Sketcher, rows: Tensor, readings: Sequence[Reading], parameters: Parameters) -> None:
        """Measure it anew, if that is due.

        Args:
            sketcher: Which columns are entries.
            rows: Per-sample rows of the step, ``[n, columns]``.
            readings: With Σ|terms| of entries.
            parameters: Whose gradients they are.
        """
        processes = parameters.processes
        if not self.due or not any(self.adaptive) or (len(rows) == 0 and not processes.several):
            return
        precision = [getattr(s.leaf.reader, "precision", None) or s.parameter.dtype for s in parameters.scored]
        half = torch.tensor([float(p.itemsize < 4) for p in precision], device=sketcher.device)
        if sketcher.lossy:
            self._measure_tensors(sketcher, rows[:, : sketcher.cut], half, parameters)
        if not sketcher.kept:
            return
        entries = rows[:, sketcher.cut :]
        total, size, square = entries.sum(0), entries.abs().sum(0), entries.square().sum(0)
        for r in readings:
            for i, terms in r.sizes.items():
                here = size[sketcher.kept_columns(i)]
                torch.maximum(here, terms.reshape(-1), out=here)
        processes.all_reduce_("sums of gradients", [total, size, square, half])
        each = zip(parameters.scored, self.adaptive, strict=True)
        eps = [ROUNDINGS * torch.finfo(s.parameter.dtype).eps if adaptive else -1.0 for s, adaptive in each]
        level = size * _columns(sketcher, torch.tensor(eps, dtype=size.dtype, device=size.device))
        level = torch.where(total.abs() <= level, level, 0.0)
        in_half = _columns(sketcher, half) > 0
        self.level = torch.where(in_half, _of_tensors(sketcher, total, square, self.adaptive), level)

    def _measure_tensors(self, sketcher: Sketcher, rows: Tensor, half: Tensor, parameters: Parameters) -> None:
        """Find larger tensors whose gradient is noise as a whole: the host reads which."""
        total, norms = rows.sum(0, keepdim=True), sketcher.by_tensor_of_lossy(rows.square())
        size, square, in_half = norms.sqrt().sum(0), norms.sum(0), half.clone()
        parameters.processes.all_reduce_("sums of gradients", [total, size, square, in_half])
        found = sketcher.by_tensor_of_lossy(total.square())[0].sqrt()
        some = [parameters.scored[i].parameter.dtype for i in sketcher.lossy]
        eps = torch.tensor([ROUNDINGS * torch.finfo(d).eps for d in some], dtype=size.dtype).to(size.device)
        by_half = HALF_ROUNDINGS * torch.finfo(torch.bfloat16).eps * square.sqrt()
        noise = torch.where(in_half[torch.tensor(sketcher.lossy, device=half.device)] > 0, by_half, eps * size)
        is_noise = ((found <= noise) & (size > 0)).tolist()
        plans = sketcher.plans
        self.tensors = [i for i, x in zip(sketcher.lossy, is_noise, strict=True) if x and self.adaptive[i] and not plans[i].fine]

    def covers(self, total: Tensor) -> Tensor | None:
        """Return which entries of a step's gradient are noise, ``[columns]``; None where nothing is known."""
        return None if self.level is None else total.abs() < GROWTH * self.level


def _of_tensors(sketcher: Sketcher, total: Tensor, square: Tensor, adaptive: Sequence[bool]) -> Tensor:
    """Return the noise of entries of tensors whose gradient is noise as a whole, in half precision."""
    owner, tensors = sketcher.owner[sketcher.cut :], len(sketcher.order)
    sums = torch.zeros(2, tensors, dtype=total.dtype, device=total.device)
    sums.index_add_(1, owner, torch.stack([total.square(), square]))
    by = (HALF_ROUNDINGS * torch.finfo(torch.bfloat16).eps) ** 2
    large = torch.tensor([adaptive[i] and sketcher.plans[i].numel >= LEAST_ENTRIES for i in sketcher.order], device=total.device)
    is_noise = (sums[0] <= by * sums[1]) & large
    return torch.where(is_noise[owner], (by * square).sqrt(), 0.0)


def _columns(sketcher: Sketcher, numbers: Tensor) -> Tensor:
    """Return numbers by tensor as numbers by entry of the small tensors."""
    return numbers[torch.tensor(sketcher.order, device=numbers.device)][sketcher.owner[sketcher.cut :]]
