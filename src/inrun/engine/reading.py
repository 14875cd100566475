"""What one microbatch's backward left, and the factor between its gradients and those that the optimizer used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.engine.parameters import Parameters, Scored
from inrun.engine.readers import LeafReader, Request
from inrun.engine.sketch import Epoch, Sketcher
from inrun.engine.window import Entering
from inrun.layers.gradients import PerSample

#: Tensors from which the clip factor is read where gradients are only contracted.
FEW = 12


@dataclass(eq=False)
class Reading:
    """The probes of one microbatch, after its backward."""

    n: int
    #: By place: inner products ``[n, k]`` and sketches ``[n, buckets]``.
    products: dict[int, Tensor]
    sketches: dict[int, Tensor]
    #: Rows of tables: place, number of the call, numbers, values.
    tables: list[tuple[int, int, Tensor, Tensor]]
    kept: list[tuple[int, PerSample]] = field(default_factory=list)


def read_probes(parameters: Parameters, request: Request) -> Reading:
    """Collect what a microbatch's backward left as gradients of probes."""
    products: dict[int, Tensor] = {}
    sketches: dict[int, Tensor] = {}
    for s in parameters.scored:
        reader = s.leaf.reader
        assert isinstance(reader, LeafReader)
        if reader.products is not None and reader.products.grad is not None:
            products[s.place] = reader.products.grad
        if reader.sketch is not None and reader.sketch.grad is not None:
            sketches[s.place] = reader.sketch.grad
    tables: list[tuple[int, int, Tensor, Tensor]] = []
    calls: dict[int, int] = {}
    for rows in request.rows:
        found = rows.result()
        if found is not None:
            call = calls[rows.tensor] = calls.get(rows.tensor, -1) + 1
            tables.append((rows.tensor, call, *found))
    return Reading(request.n, products, sketches, tables, request.kept)


def joined(sketcher: Sketcher, readings: Sequence[Reading]) -> Entering:
    """Join the sketches of all microbatches: one row per sample, one column per number."""
    rows = torch.zeros(sum(r.n for r in readings), sketcher.size, dtype=sketcher.dtype, device=sketcher.device)
    tables = []
    first = 0
    for r in readings:
        part = rows[first : first + r.n]
        if len(r.sketches) == len(sketcher.order):
            torch.cat([r.sketches[i] for i in sketcher.order], 1, out=part)
        else:
            for i, x in r.sketches.items():
                part[:, sketcher.columns[i]] = x
        tables += [(i, call, first, numbers, values) for i, call, numbers, values in r.tables]
        first += r.n
    return Entering(rows, tables)


def correct(sketcher: Sketcher, entering: Entering, readings: Sequence[Reading], known: Tensor, tables: dict[int, Tensor]) -> None:
    """Make sketches exact for the known directions v, tensor by tensor: S g += S v (S vᵀ S v)⁻¹ (⟨g, v⟩ − ⟨S g, S v⟩).

    Args:
        sketcher: How gradients are sketched.
        entering: The rows, which are changed.
        readings: With ⟨g, v⟩ by place.
        known: S v, ``[k, columns]``.
        tables: S v of rows of tables, ``[k, rows, per_row]``.
    """
    lossy, cut, n, k = sketcher.lossy, sketcher.cut, len(entering.rows), len(known)
    if not lossy or n == 0:
        return
    wide = {i: torch.zeros(n, k, dtype=known.dtype, device=known.device) for i in lossy}
    first = 0
    for r in readings:
        for i, x in r.products.items():
            wide[i][first : first + r.n] = x
        first += r.n
    for i, _, start, numbers, values in entering.tables:
        if i in tables and i in sketcher.columns and any(i in r.products for r in readings):
            from inrun.engine.window import contract

            wide[i][start : start + len(numbers)] -= contract(numbers, values, tables[i])
    exact = torch.stack([wide[i] for i in lossy], 1)  # [n, tensors, k]
    part, sv, owner = entering.rows[:, :cut], known[:, :cut], sketcher.owner[:cut]
    estimate = torch.stack([sketcher.by_tensor_of_lossy(part * one) for one in sv], 2)
    missing = exact - estimate
    gram = torch.stack([sketcher.by_tensor_of_lossy(sv * one) for one in sv], 0)  # [k, k, tensors]
    if k == 1:
        share = missing[..., 0] / gram[0, 0].clamp_min(torch.finfo(sv.dtype).tiny)
        share = torch.where(gram[0, 0] > 0, share, 0.0)
        part.addcmul_(share.index_select(1, owner), sv)
        return
    square = gram.permute(2, 0, 1)
    ridge = square.diagonal(dim1=1, dim2=2).sum(1).clamp_min(torch.finfo(sv.dtype).tiny) * 1e-6
    inverse = torch.linalg.inv_ex(square + ridge.view(-1, 1, 1) * torch.eye(k, dtype=sv.dtype, device=sv.device)).inverse
    share = torch.einsum("ntk,tkl->ntl", missing, inverse)
    for j in range(k):
        part.addcmul_(share[..., j].index_select(1, owner), sv[j])


def clip_from_entries(sketcher: Sketcher, rows: Tensor, some: Sequence[Scored], epoch: Epoch) -> Tensor:
    """Return the factor of one optimizer's gradients: clipping, loss scale, and the share among microbatches.

    The gradients of small tensors are known entry by entry from the samples: the factor is ⟨known, now⟩ / ⟨known, known⟩.
    Where no tensor is that small, sketches are compared.
    """
    mine = [s for s in some if s.parameter.grad is not None]
    places = [s.place for s in mine if sketcher.plans[s.place].lossless]
    total = rows.sum(0)
    if places:
        known = torch.cat([total[sketcher.columns[i]] for i in places])
        now = torch.cat([s.parameter.grad.reshape(-1).to(sketcher.dtype) for s in mine if s.place in set(places)])  # type: ignore[union-attr]
    else:
        of = {s.place: s.parameter.grad for s in mine}
        sketched = sketcher.of_directions(
            [None if (g := of.get(i)) is None else g.unsqueeze(0) for i in range(len(sketcher.plans))], 1, epoch, (), cut=False
        )
        columns = torch.cat([torch.arange(sketcher.columns[s.place].start, sketcher.columns[s.place].stop) for s in mine])
        known, now = total[columns], sketched.flat[0][columns]
    return ratio(known, now)


def clip_from_products(readings: Sequence[Reading], some: Sequence[Scored], directions: dict[int, Tensor]) -> Tensor:
    """Return the same from inner products with known directions, of the smallest tensors."""
    mine = [s for s in some if s.parameter.grad is not None and s.place in directions]
    mine = sorted(mine, key=lambda s: (s.parameter.numel(), s.place))[:FEW]
    known, now = [], []
    for s in mine:
        parts = [r.products[s.place].sum(0) for r in readings if s.place in r.products]
        v, g = directions[s.place], s.parameter.grad
        assert g is not None
        now.append(v.reshape(len(v), -1) @ g.reshape(-1).to(v.dtype))
        known.append(torch.stack(parts).sum(0).to(v.dtype) if parts else torch.zeros_like(now[-1]))
    return ratio(torch.cat(known), torch.cat(now))


def ratio(known: Tensor, now: Tensor) -> Tensor:
    """Return ⟨known, now⟩ / ⟨known, known⟩, 1 where nothing is known."""
    square = torch.dot(known, known)
    return torch.where(square > 0, torch.dot(known, now) / torch.where(square > 0, square, 1.0), 1.0)
