"""Audits. Each compares two sums that must agree, on the device; the host reads the result with the step's record.

Conservation   Σ_n ⟨g_n, v⟩ = ⟨G, v⟩, and entry by entry for small tensors: sees gradient that flows through no sample's row, and
               gradients that were changed by something else than one factor (value clipping, noise, a regularizer's gradient).
Memory         what the optimizer remembers = Σ κ c g + decay + momentum of before: sees a wrong β, a wrong factor, a reset state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inrun.engine.parameters import Parameters, Scored
from inrun.engine.processes import Processes
from inrun.engine.reading import Reading
from inrun.engine.transfer import Array
from inrun.errors import ConservationError, CreditError, InrunError

if TYPE_CHECKING:
    from inrun.engine.move import Mover
    from inrun.engine.sketch import Sketcher

#: Relative errors that rounding may cause, by precision.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
#: A tensor's difference is compared with its own size, and with so much of the size of all.
OF_ALL = 1e-3


def nothing(parameters: Parameters) -> Tensor:
    """Return blank results, ``[4, tensors]``: difference and size of conservation, then of memory."""
    return torch.zeros(4, len(parameters.scored), dtype=torch.float32, device=parameters.device)


@torch.no_grad()
def check_products(
    out: Tensor, some: Sequence[Scored], readings: Sequence[Reading], clip: Tensor, v: dict[int, Tensor], processes: Processes
) -> None:
    """Add by tensor how far Σ_n ⟨g_n, v⟩ is from ⟨G, v⟩, and Σ|⟨g_n, v⟩|, to ``out`` ``[2, tensors]``."""
    places, of_samples, of_batch = [], [], []
    for s in some:
        parts = [r.products[s.place] for r in readings if s.place in r.products]
        g, d = s.grad, v.get(s.place)
        if g is None or d is None:
            continue
        d, g = d.reshape(len(d), -1), g.reshape(-1).to(d.dtype)
        x = torch.cat(parts).to(d.dtype) * clip if parts else d.new_zeros(0, len(d))
        places.append(s.place)
        of_samples.append(torch.stack([x.sum(0), x.abs().sum(0)]))
        of_batch.append(torch.stack([d @ g, d.square().sum().expand(len(d)), g.square().sum().expand(len(d))]))
    if not places:
        return
    (total, size), (product, d2, g2) = (
        processes.all_reduced("audits", torch.stack(of_samples, 1)),
        processes.over_shards(torch.stack(of_batch, 1)),
    )
    out[0, places] += torch.linalg.vector_norm(product - total, dim=1).to(out.dtype)
    # Where v is at right angles to all gradients, rounding is that of the products.
    bound = (d2[:, 0] * g2[:, 0]).sqrt()
    out[1, places] += (torch.linalg.vector_norm(size, dim=1) + OF_ALL * bound).to(out.dtype)


@torch.no_grad()
def check_entries(out: Tensor, columns: dict[int, slice], rows: Tensor, now: Tensor, clip: Tensor, processes: Processes) -> None:
    """Add by tensor how far Σ_n g_n is from G entry by entry, and the norm of Σ|g_n|, to ``out`` ``[2, tensors]``.

    Args:
        out: Differences and sizes.
        columns: The columns of tensors of which every entry is kept.
        rows: Per-sample entries, ``[n, columns]``.
        now: The gradients as the optimizer will use them, in the same columns.
        clip: The factor between the two.
        processes: Those that have the samples.
    """
    total, size = processes.all_reduced("audits", torch.stack([rows.sum(0), rows.abs().sum(0)])) * clip
    off = now - total
    for i, c in columns.items():
        out[0, i] += torch.linalg.vector_norm(off[c])
        out[1, i] += torch.linalg.vector_norm(size[c])


@torch.no_grad()
def check_memory(
    out: Tensor, sketcher: Sketcher, mover: Mover, known: Tensor, parts: Sequence[Tensor | None], parameters: Parameters
) -> None:
    """Add by small tensor how far q, by which the optimizer moved it, is from what it was given, and the norm of both.

    Args:
        out: Differences and sizes, ``[2, tensors]``.
        sketcher: Which tensors are small.
        mover: The move.
        known: The part of q that samples and rounding gave, entry by entry.
        parts: The parts of q that decay and earlier momentum gave, ``[size]`` each.
        parameters: Whose gradients they are.
    """
    shards, some, found = parameters.shards, [], []
    for g in mover.groups:
        for places, part, q in zip(g.places, g.parts, g.pushed() if g.memories else (), strict=False):
            for i in (i for i in places if sketcher.plans[i].lossless):
                at = sketcher.flat.slices[i]
                own = q[at.start - part.start : at.stop - part.start].to(known.dtype)
                other = sum((x[at] for x in parts if x is not None), torch.zeros_like(own))
                both = torch.stack([own - other, own.abs() + other.abs()])
                found.append(both if shards is None else shards.embed(i, both).reshape(2, -1))
                some.append(i)
    if not some:
        return
    remembered, size = torch.cat(found, 1)
    if shards is not None:
        parameters.processes.all_reduce_("audits", [remembered, size])
    for i, own, all_ in zip(some, *(x.split([sketcher.plans[i].numel for i in some]) for x in (remembered, size)), strict=True):
        given = known[sketcher.kept_columns(i)]
        out[0, i] += torch.linalg.vector_norm(own - given)
        out[1, i] += torch.linalg.vector_norm(all_) + torch.linalg.vector_norm(given)


def judge(step: int, names: Sequence[str], dtypes: Sequence[torch.dtype], results: Array) -> InrunError | None:
    """Return the error of a failed audit, None if it passed.

    Args:
        step: The number of the step.
        names: Of the tensors.
        dtypes: In which the gradient of each tensor is computed.
        results: ``[4, tensors]``, see :func:`nothing`.
    """
    allowed = np.array([TOLERANCE.get(d, TOLERANCE[torch.float32]) for d in dtypes])

    def worst(difference: Array, size: Array) -> tuple[float, str, int]:
        size = size + OF_ALL * float(np.linalg.norm(size))
        off = np.divide(difference, size, out=np.where(difference > 0, np.inf, 0.0), where=size > 0)
        off = np.where(np.isnan(off), np.inf, off)
        first = int((off / allowed).argmax())
        return float(off[first]), names[first], int((off > allowed).sum())

    off, name, count = worst(results[0], results[1])
    if count:
        return ConservationError(
            f"step {step}: the samples' gradients do not add up to the gradient of {name} (off by {off:.1e} of their size; "
            f"{count} of {len(names)} tensors). Gradient that flows through no sample's row cannot be scored, nor gradients that "
            "something else than one factor changes before the optimizer steps (value clipping, noise)."
        )
    off, name, count = worst(results[2], results[3])
    if count:
        return CreditError(
            f"step {step}: what the optimizer remembers of {name} is not what the samples of the open steps gave it "
            f"(off by {off:.1e}; {count} of {len(names)} tensors). Its state was reset or changed. "
            'Make a new accountant after such a change, or take method="step".'
        )
    return None
